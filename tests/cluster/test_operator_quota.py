"""A ResourceQuota without room for all pods of a job: it is said, asked little, and the job goes on when there is."""

import json
import re
from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane, cartpole, refused_calls
from tests.cluster.kueues import said
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
WORKERS = 5
TOUCHES = 30


def limit(cluster: Cluster, namespace: str, pods: int) -> None:
    """Returns when the API server goes by it."""
    spec = {"hard": {"pods": str(pods)}}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": spec}
    cluster.kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps(quota))

    def holds() -> bool:
        found = json.loads(cluster.kubectl("-n", namespace, "get", "resourcequota", "team", "-o", "json"))
        return bool(found.get("status", {}).get("hard") == spec["hard"])

    until(holds, what="the quota to hold", timeout_s=30)


def refused(plane: ControlPlane) -> int:
    """Pods that the API server refused this operator."""
    found = 0
    for line in plane.operator.metrics().splitlines():
        label = dict(re.findall(r'(\w+)="([^"]*)"', line))
        if line.startswith("rlinf_operator_api_calls_total") and label.get("kind") == "Pod" and label["code"] == "403":
            found += round(float(line.rpartition(" ")[2]))
    return found


def test_a_full_quota_is_said_and_asked_once_in_a_pause(cluster: Cluster, namespace: str, tmp_path: Path):
    limit(cluster, namespace, 2)
    with ControlPlane(cluster, tmp_path) as plane:
        plane.apply(namespace, cartpole(claim="none", pods=WORKERS))
        full = plane.until(
            namespace, "cartpole", lambda job: said(job, "PodsReady") == ("False", "QuotaExceeded"), what="a full quota"
        )
        [message] = [c["message"] for c in full["status"]["conditions"] if c["type"] == "PodsReady"]
        assert "exceeded quota: team" in message
        assert len(plane.pods(namespace)) == 2
        assert full["status"]["attempt"] == 0
        for _ in range(TOUCHES):
            plane.touch(namespace, "cartpole")
        assert 0 < refused(plane) < TOUCHES / 2, "a pass for another reason asks nobody"
        limit(cluster, namespace, 100)
        plane.until(
            namespace, "cartpole", lambda _: len(plane.pods(namespace)) == WORKERS + 1, what="all pods", timeout_s=90
        )
        assert {pod["metadata"]["labels"]["rlinf.io/attempt"] for pod in plane.pods(namespace)} == {"1"}
        assert refused_calls(plane.operator) == []
