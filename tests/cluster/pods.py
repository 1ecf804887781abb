"""Pods for cluster tests: manifests that Pod Security *restricted* admits, and waiting for them."""

import json
from typing import Any

from tools.testcluster.cluster import Cluster

WEB = "echo I am $HOSTNAME >/tmp/index.html; exec httpd -f -p 8080 -h /tmp"
"""A script for pod(): an HTTP server on port 8080 that says who it is."""


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


def wait_ready(cluster: Cluster, namespace: str, *names: str, timeout_s: int = 30) -> None:
    targets = [f"pod/{name}" for name in names]
    cluster.kubectl("-n", namespace, "wait", "--for=condition=Ready", f"--timeout={timeout_s}s", *targets)


def phase(cluster: Cluster, namespace: str, name: str) -> str:
    return str(cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")["status"]["phase"])
