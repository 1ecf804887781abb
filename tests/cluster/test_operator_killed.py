"""An operator that dies at every write of a job: the write is done, its answer never heard, the next one goes on."""

from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane, cartpole, is_complete
from tools.testcluster.apiproxy import ApiProxy, DropAfter, Rule
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]
WRITES = (
    ("POST", "services", 1),
    ("POST", "networkpolicies", 1),
    ("POST", "secrets", 2),
    ("PATCH", "secrets", 2),
    ("POST", "configmaps", 1),
    ("POST", "pods", 2),
    ("PUT", "rljobs/.*/status", 4),
    ("PATCH", "rlplans/.*/status", 1),
    ("DELETE", "pods/.*", 1),
)
"""Method, path and how often it dies there. Not for ever: it dies at requests, also at those that change nothing."""


def test_a_job_ends_the_same_though_the_operator_dies_at_every_write(
    cluster: Cluster, image: str, namespace: str, claim: str, tmp_path: Path
):
    deaths = 0
    with (
        ApiProxy(cluster) as proxy,
        ControlPlane(cluster, tmp_path, through=proxy.kubeconfig, progress_interval_s="3600") as plane,
    ):
        # Of this namespace only: the operator writes its own Secrets at each start.
        rules = [
            Rule(method=method, path=f"/apis?/.*/{namespace}/{path}", do=DropAfter(), times=times)
            for method, path, times in WRITES
        ]
        for rule in rules:
            proxy.add(rule)
        plane.apply(namespace, cartpole(claim=claim))

        def over() -> bool:
            nonlocal deaths
            if (used := sum(rule.used for rule in rules)) > deaths:
                plane.operator.kill()
                deaths = used
                plane.operator.start()
            return is_complete(plane.job(namespace, "cartpole"))

        until(over, what="Complete", timeout_s=300, every_s=0.05)
        job = plane.job(namespace, "cartpole")
        print(f"{deaths} deaths")
        assert deaths >= len(WRITES) - 1  # the last may come after Complete
        # Also where nobody heard its last report: the driver's termination message says as much.
        assert job["status"]["progressPercentage"] == 100
        assert job["status"]["step"] == 6
        assert job["status"]["attempt"] == 1, plane.describe(namespace, "cartpole")
        assert job["status"]["restarts"] == []
        plans = cluster.api.get(f"/apis/rlinf.io/v1alpha1/namespaces/{namespace}/rlplans")["items"]
        assert [plan["metadata"]["name"] for plan in plans] == ["cartpole-p1"]
