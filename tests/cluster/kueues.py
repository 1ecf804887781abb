"""What tests write for Kueue, and read of what it writes."""

import json

from tests.cluster.control_plane import Manifest
from tools.testcluster.cluster import Cluster

KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
LABEL = "kueue.x-k8s.io/queue-name"


def local_queue(cluster: Cluster, namespace: str, of: str) -> None:
    made = {
        "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": of},
        "spec": {"clusterQueue": of},
    }  # fmt: skip
    cluster.kubectl("-n", namespace, "create", "-f", "-", stdin=json.dumps(made))


def said(job: Manifest, kind: str) -> tuple[str, str]:
    """(status, reason)."""
    listed = (job.get("status") or {}).get("conditions") or []
    return next(((c["status"], c["reason"]) for c in listed if c["type"] == kind), ("", ""))


def workload(cluster: Cluster, namespace: str, job: str) -> Manifest:
    found: Manifest = cluster.api.get(f"{KUEUE}/namespaces/{namespace}/workloads/rljob-{job}")
    return found
