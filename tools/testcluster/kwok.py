"""Fake nodes by the hundred and their pods, against the same API server: for figures of scale. `Cluster` calls this.

A kwok node is tainted and labelled; a pod goes there with

    nodeSelector: {type: kwok}
    tolerations: [{key: kwok.x-k8s.io/node, operator: Exists}]

(the selector, too: a toleration alone does not keep it off the real nodes). Its pods become Running at once and Ready,
with no process behind them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from tools.testcluster.api import Api
from tools.testcluster.layout import Addresses, Paths

ANNOTATION = "kwok.x-k8s.io/node"
LEASE_S = 40
PODS_PER_NODE = 250


def words(paths: Paths, addresses: Addresses) -> list[str]:
    return [
        "kwok",
        "--v=WARN",
        f"--config={paths.config}/kwok.yaml",
        f"--kubeconfig={paths.pki}/kwok.kubeconfig",
        f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
        f"--node-lease-duration-seconds={LEASE_S}",
        "--cidr=10.128.0.0/10",
        f"--node-ip={addresses.hub}",
    ]


def stages() -> str:
    """What kwok does to nodes and pods. Its stock stage gives pods an IP, which fails for some (a second one)."""
    ready = "conditions:\n- {type: Ready, status: 'True', reason: KubeletReady, lastHeartbeatTime: {{ Now | Quote }},"
    ready += " lastTransitionTime: {{ Now | Quote }}}\n"
    running = """\
{{ $now := Now }}
phase: Running
startTime: {{ $now | Quote }}
conditions:
- {type: Initialized, status: 'True', lastTransitionTime: {{ $now | Quote }}}
- {type: ContainersReady, status: 'True', lastTransitionTime: {{ $now | Quote }}}
- {type: Ready, status: 'True', lastTransitionTime: {{ $now | Quote }}}
containerStatuses:
{{ range .spec.containers }}
- {name: {{ .name | Quote }}, image: {{ .image | Quote }}, imageID: "", ready: true, restartCount: 0, started: true,
   state: {running: {startedAt: {{ $now | Quote }}}}}
{{ end }}
"""
    exists, absent = {"operator": "Exists"}, {"operator": "DoesNotExist"}
    made = [
        _stage(
            "node-ready",
            "Node",
            [
                {"key": '.status.conditions.[] | select( .type == "Ready" ) | .status', "operator": "NotIn"}
                | _in("True")
            ],
            {"statusTemplate": ready},
        ),
        _stage(
            "pod-run",
            "Pod",
            [
                {"key": ".metadata.deletionTimestamp", **absent},
                {"key": ".status.phase", "operator": "In"} | _in("Pending"),
            ],
            {"statusTemplate": running},
        ),
        _stage("pod-delete", "Pod", [{"key": ".metadata.deletionTimestamp", **exists}], {"delete": True}),
    ]
    return yaml.safe_dump_all(made)


def _in(value: str) -> dict[str, list[str]]:
    return {"values": [value]}


def _stage(name: str, kind: str, expressions: list[dict[str, Any]], then: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": expressions},
            "next": then,
        },
    }


def node(index: int, *, resources: tuple[str, ...]) -> dict[str, Any]:
    name = f"kwok-{index}"
    capacity = {"cpu": "64", "memory": "512Gi", "pods": str(PODS_PER_NODE)}
    capacity.update(dict(pair.split("=") for pair in resources))
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {ANNOTATION: "fake"},
            "labels": {"type": "kwok", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
        },
        "spec": {"taints": [{"key": ANNOTATION, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"capacity": capacity, "allocatable": capacity},
    }


def make_nodes(api: Api, count: int, *, resources: tuple[str, ...]) -> None:
    def make(index: int) -> None:
        api.request("POST", "/api/v1/nodes", body=node(index, resources=resources))

    with ThreadPoolExecutor(max_workers=8) as pool:
        for done in [pool.submit(make, index) for index in range(count)]:
            done.result()


def ready_nodes(api: Api) -> int:
    items = api.get("/api/v1/nodes?labelSelector=type%3Dkwok")["items"]
    return sum(
        condition["type"] == "Ready" and condition["status"] == "True"
        for item in items
        for condition in item["status"].get("conditions", [])
    )


def write_config(folder: Path) -> None:
    (folder / "kwok.yaml").write_text(stages(), encoding="utf-8")
