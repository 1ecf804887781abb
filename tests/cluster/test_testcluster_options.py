"""What options add to a cluster: devices, gangs, fake nodes, enforced policies, metrics, an audit log."""

import json
import os
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.cluster.pods import WEB, create, phase, pod, wait_ready
from tools.testcluster import accelerators, binaries, prometheus
from tools.testcluster.cluster import Cluster
from tools.testcluster.layout import Options
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


GATE = "PodLogsQuerySplitStreams"
"""An alpha feature that is off unless asked for, and disturbs nothing."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One with everything, for this file only."""
    options = Options(
        gang_scheduling=True,
        feature_gates=(f"{GATE}=true",),
        dra_devices=2,
        kwok_nodes=50,
        network_policies=True,
        prometheus=True,
        audit=True,
        extended_resources=("nvidia.com/gpu=2",),
    )
    name = f"options-{os.getpid()}"
    with Cluster.up(name, options, report=binaries.say, owner_pid=os.getpid()) as made:
        yield made


def node_of(item: dict[str, Any]) -> str:
    return str(item["spec"].get("nodeName") or "")


def statuses(cluster: Cluster, namespace: str) -> list[str]:
    items = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    return [item["status"]["phase"] for item in items]


def test_two_containers_of_a_pod_share_a_device(cluster: Cluster, namespace: str):
    claim: dict[str, Any] = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "one"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": accelerators.DEVICE_CLASS}}]}},
    }
    say = "echo from-writer > /dev/fake-gpu-$N; sleep 600"
    find = "N=$(env | sed -n 's/^FAKE_GPU_\\([0-9]*\\)=.*/\\1/p'); "
    manifest = pod("sharing", find + say)
    manifest["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "one"}]
    writer = manifest["spec"]["containers"][0]
    writer["resources"] = {"claims": [{"name": "gpu"}]}
    manifest["spec"]["containers"].append({**writer, "name": "reader", "command": ["sh", "-c", "sleep 600"]})
    create(cluster, namespace, claim, manifest)
    wait_ready(cluster, namespace, "sharing")

    def inside(container: str, script: str) -> str:
        return cluster.kubectl("-n", namespace, "exec", "sharing", "-c", container, "--", "sh", "-c", find + script)

    identity = "env | grep ^FAKE_GPU_"
    assert inside("main", identity) == inside("reader", identity)
    assert inside("main", identity).strip().split("=")[1].startswith("FAKE-node-")
    until(lambda: "from-writer" in inside("reader", "cat /dev/fake-gpu-$N"), what="the other's word", timeout_s=30)


def test_devices_run_out(cluster: Cluster, namespace: str):
    template: dict[str, Any] = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "each"},
        "spec": {
            "spec": {
                "devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": accelerators.DEVICE_CLASS}}]}
            }
        },
    }
    pods = []
    for number in range(5):  # two nodes with two devices each
        manifest = pod(f"p-{number}")
        manifest["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "each"}]
        manifest["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
        pods.append(manifest)
    create(cluster, namespace, template, *pods)
    until(
        lambda: sorted(statuses(cluster, namespace)) == ["Pending", *["Running"] * 4],
        what="four of five pods to run",
        timeout_s=60,
    )


def test_a_gang_is_bound_as_a_whole_or_not_at_all(cluster: Cluster, namespace: str):
    group = {
        "apiVersion": "scheduling.k8s.io/v1alpha2",
        "kind": "PodGroup",
        "metadata": {"name": "gang"},
        "spec": {"schedulingPolicy": {"gang": {"minCount": 4}}},
    }

    def member(number: int) -> dict[str, Any]:
        manifest = pod(f"m-{number}", schedulingGroup={"podGroupName": "gang"})
        manifest["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
        return manifest

    blocker = pod("blocker")
    blocker["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    create(cluster, namespace, blocker)
    wait_ready(cluster, namespace, "blocker")
    create(cluster, namespace, group, *(member(number) for number in range(4)))

    def told() -> bool:
        found = cluster.api.get(f"/apis/scheduling.k8s.io/v1alpha2/namespaces/{namespace}/podgroups/gang")
        return any(c["status"] == "False" for c in found.get("status", {}).get("conditions", []))

    until(told, what="the group to be found unschedulable", timeout_s=30)
    placed = [item for item in cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"] if node_of(item)]
    assert [item["metadata"]["name"] for item in placed] == ["blocker"], "three are free: a gang of four wants none"
    cluster.kubectl("-n", namespace, "delete", "pod", "blocker", "--now")
    until(lambda: statuses(cluster, namespace).count("Running") == 4, what="the whole gang to run", timeout_s=40)


def test_kwok_nodes_run_pods_by_the_hundred(cluster: Cluster, namespace: str):
    place: dict[str, Any] = {
        "nodeSelector": {"type": "kwok"},
        "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
    }
    create(cluster, namespace, *(pod(f"k-{number}", **place) for number in range(100)))
    until(lambda: statuses(cluster, namespace).count("Running") == 100, what="100 kwok pods", timeout_s=60)
    until(cluster.well, what="the cluster to be well with them", timeout_s=20)


def fetch(cluster: Cluster, namespace: str, source: str, host: str) -> bool:
    words = ["exec", source, "--", "timeout", "2", "wget", "-qO-", f"http://{host}:8080"]
    return "I am" in cluster.kubectl("-n", namespace, *words, check=False)


def test_network_policies_are_enforced_across_nodes(cluster: Cluster, namespace: str):
    server = pod("server", WEB, node="node-1")
    server["metadata"]["labels"] = {"role": "server"}
    friend, stranger = pod("friend", node="node-0"), pod("stranger", node="node-1")
    friend["metadata"]["labels"] = {"role": "friend"}
    create(cluster, namespace, server, friend, stranger)
    wait_ready(cluster, namespace, "server", "friend", "stranger")
    ip = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/server")["status"]["podIP"]
    reaches = partial(fetch, cluster, namespace)
    until(lambda: reaches("stranger", ip) and reaches("friend", ip), what="an open network", timeout_s=30)
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "friends-only"},
        "spec": {
            "podSelector": {"matchLabels": {"role": "server"}},
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"role": "friend"}}}], "ports": [{"port": 8080}]}],
        },
    }
    create(cluster, namespace, policy)
    until(lambda: not reaches("stranger", ip), what="the stranger to be shut out", timeout_s=30)
    until(lambda: reaches("friend", ip), what="the friend to be let in", timeout_s=30)
    assert not reaches("stranger", ip), "it was only slow"
    assert phase(cluster, namespace, "server") == "Running"
    cluster.kubectl("-n", namespace, "delete", "networkpolicy", "friends-only")
    until(lambda: reaches("stranger", ip), what="the network to be open again", timeout_s=30)


def test_prometheus_scrapes_pods_that_ask_for_it(cluster: Cluster, namespace: str):
    script = "mkdir -p /tmp/m; echo test_answer 42 >/tmp/m/metrics; exec httpd -f -p 8080 -h /tmp/m"
    manifest = pod("measured", script)
    manifest["metadata"]["annotations"] = {"prometheus.io/scrape": "true", "prometheus.io/port": "8080"}
    create(cluster, namespace, manifest)
    wait_ready(cluster, namespace, "measured")
    url = f"http://{cluster.addresses.hub}:{prometheus.PORT}/api/v1/query?query=test_answer"

    def value() -> str | None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:  # busy
            return None
        return str(found[0]["value"][1]) if found else None

    assert until(value, what="a sample of the pod", timeout_s=60, every_s=0.3) == "42"


def test_the_audit_log_tells_who_made_what(cluster: Cluster, namespace: str):
    def making() -> list[dict[str, Any]]:
        """The API server answers before it has written, and may be writing the last line now."""
        whole = (cluster.paths.logs / "audit.log").read_text().rpartition("\n")[0].splitlines()
        made: list[dict[str, Any]] = [event for event in map(json.loads, whole) if event["verb"] == "create"]
        return [event for event in made if event.get("objectRef", {}).get("name") == namespace]

    made = until(making, what="the line of the namespace", timeout_s=20)
    assert made[0]["user"]["username"] == "kubernetes-admin"


def test_a_feature_gate_is_on_in_the_control_plane_and_on_nodes(cluster: Cluster):
    metrics = {
        "the API server": str(cluster.api.get("/metrics")),
        "the kubelet": str(cluster.api.get("/api/v1/nodes/node-0/proxy/metrics")),
        "kube-proxy": cluster.node("node-0").run(["busybox", "wget", "-qO-", "http://127.0.0.1:10249/metrics"]),
    }
    off = [
        who
        for who, text in metrics.items()
        if f'kubernetes_feature_enabled{{name="{GATE}",stage="ALPHA"}} 1' not in text
    ]
    assert off == []


def test_what_options_added_is_started_again_when_it_has_died(cluster: Cluster):
    added = ["kwok", "prometheus-targets", "prometheus"]
    added += [f"{node.name}-{daemon}" for node in cluster.nodes for daemon in ("dradriver", "netpolicy")]
    before = {name: cluster.hub.record.read(name) for name in added}
    for process in before.values():
        assert process is not None
        process.end()
    assert sorted(cluster.missing()) == sorted(added)
    cluster.faults.undo_all()
    assert cluster.missing() == []
    assert not {process for process in before.values() if process and process.alive}
