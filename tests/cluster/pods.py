"""Namespaces and pods for cluster tests: manifests that Pod Security *restricted* admits, and waiting for them."""

import json
from typing import Any

from tools.testcluster.api import ApiError
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

REMOVE_S = 60.0
"""Of one deletion: the API server answers when all are gone, 150 pods a second, or a tenth of that on busy cores."""

WEB = "echo I am $HOSTNAME >/tmp/index.html; exec httpd -f -p 8080 -h /tmp"
"""A script for pod(): an HTTP server on port 8080 that says who it is."""


def make_namespace(cluster: Cluster, name: str) -> None:
    """Under Pod Security *restricted*. No pod can be made before the controller manager has made its account."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": name, "labels": labels}})
    accounts = f"/api/v1/namespaces/{name}/serviceaccounts"
    until(
        lambda: any(found["metadata"]["name"] == "default" for found in cluster.api.get(accounts)["items"]),
        what=f"the service account of namespace {name}", timeout_s=30,
    )  # fmt: skip


def remove_namespace(cluster: Cluster, name: str) -> None:
    """Jobs first, so that no operator makes pods anew; pods at once and without grace: what comes next should not share
    the cores with their ends. What is gone already is fine."""
    for path in (
        f"/apis/rlinf.io/v1alpha1/namespaces/{name}/rljobs",
        f"/api/v1/namespaces/{name}/pods?gracePeriodSeconds=0",
        f"/api/v1/namespaces/{name}",
    ):
        try:
            cluster.api.request("DELETE", path, timeout_s=REMOVE_S)
        except ApiError as error:
            if error.status != 404:
                raise


def pod(name: str, script: str = "sleep 600", *, node: str | None = None, **spec: Any) -> dict[str, Any]:
    """A pod that Pod Security *restricted* admits."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "test"}},
        "spec": {
            **({"nodeName": node} if node else {}),
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    "image": "localhost/box:1",
                    "command": ["sh", "-c", script],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                }
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
            **spec,
        },
    }


def create(cluster: Cluster, namespace: str, *manifests: dict[str, Any]) -> None:
    cluster.kubectl(
        "-n", namespace, "create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    )


def wait_ready(cluster: Cluster, namespace: str, *names: str, timeout_s: int = 60) -> None:
    """Ready says that the containers were started, no more: these pods have no probes."""
    targets = [f"pod/{name}" for name in names]
    words = ("wait", "--for=condition=Ready", f"--timeout={timeout_s}s", *targets)
    cluster.kubectl("-n", namespace, *words, timeout_s=timeout_s + 10)


def phase(cluster: Cluster, namespace: str, name: str) -> str:
    return str(cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")["status"]["phase"])
