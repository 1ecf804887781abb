"""An operator that goes by the labels of namespaces: one that gets them is served, one that loses them is let alone."""

from pathlib import Path

import pytest

from tests.cluster.control_plane import BEGUN_S, ControlPlane, cartpole, pods_of, refused_calls
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
LABEL = "rlinf"


def test_jobs_of_a_namespace_are_run_from_its_label_on_and_let_alone_without_it(
    cluster: Cluster, image: str, namespace: str, claim: str, tmp_path: Path
):
    with ControlPlane(cluster, tmp_path, selector=f"{LABEL}=yes") as plane:
        plane.apply(namespace, cartpole(claim=claim, steps=100_000))
        # An event later than the job's: where it were taken up, it had a status by then.
        cluster.kubectl("label", "namespace", namespace, f"{LABEL}=no")
        until(lambda: plane.operator.metric("rlinf_operator_leader") == 1, what="a leader", timeout_s=30)
        assert "status" not in plane.job(namespace, "cartpole")

        cluster.kubectl("label", "namespace", namespace, f"{LABEL}=yes", "--overwrite")
        plane.until(
            namespace, "cartpole", lambda job: (job.get("status") or {}).get("step", 0) > 1, what="steps",
            timeout_s=BEGUN_S,
        )  # fmt: skip

        cluster.kubectl("label", "namespace", namespace, f"{LABEL}-")
        (driver,) = pods_of(plane, namespace, "driver")
        name, uid = driver["metadata"]["name"], driver["metadata"]["uid"]
        until(lambda: plane.operator.metric('rlinf_operator_jobs{state="Running"}') == 0, what="no job", timeout_s=20)
        cluster.kubectl("-n", namespace, "delete", "pod", name, "--grace-period=0", "--force")
        status = plane.job(namespace, "cartpole")["status"]
        plane.touch(namespace, "cartpole")
        until(lambda: pods_of(plane, namespace, "driver") == [], what="the end of the driver's pod", timeout_s=20)
        assert plane.job(namespace, "cartpole")["status"] == status, "nobody writes of it"

        cluster.kubectl("label", "namespace", namespace, f"{LABEL}=yes")
        until(lambda: len(pods_of(plane, namespace, "driver")) == 1, what="another driver", timeout_s=30)
        (another,) = pods_of(plane, namespace, "driver")
        assert another["metadata"]["uid"] != uid
        assert refused_calls(plane.operator) == []
