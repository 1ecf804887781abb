"""What belongs to a job is taken away, or somebody else has its name: it is made again, or the job says whose it is."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.control_plane import ControlPlane, await_replaced, cartpole, is_complete, is_stepping
from tests.cluster.paced import STEPS, Paced
from tests.cluster.pods import create, pod
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def plane(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(cluster, tmp_path_factory.mktemp("plane")) as made:
        yield made


def uid(plane: ControlPlane, namespace: str, child: str) -> str:
    """Empty where it is not there."""
    words = ("get", child, "-o", "jsonpath={.metadata.uid}", "--ignore-not-found")
    return plane.cluster.kubectl("-n", namespace, *words).strip()


def test_children_that_are_deleted_are_made_again_under_a_running_job(
    plane: ControlPlane, namespace: str, paced: Paced
):
    plane.apply(namespace, paced.job())
    plane.until(namespace, "cartpole", is_stepping, what="a first step", timeout_s=90)
    children = {"service/cartpole", "networkpolicy/cartpole", "configmap/cartpole-job"}
    uids = {child: uid(plane, namespace, child) for child in children}
    for child in (*children, "rlplan/cartpole-p1"):
        plane.cluster.kubectl("-n", namespace, "delete", child, "--wait=false")
    plane.cluster.kubectl("-n", namespace, "delete", "secret", "-l", "rlinf.io/job=cartpole", "--wait=false")

    def there() -> bool:
        return all(uid(plane, namespace, child) not in ("", before) for child, before in uids.items())

    until(there, what="the children to be back", timeout_s=60)
    # A plan is never written twice under one revision: the driver may still be at work under the one that is gone.
    until(lambda: uid(plane, namespace, "rlplan/cartpole-p2"), what="the next plan", timeout_s=60)
    # A worker that starts now needs its Secret, too.
    plane.cluster.kubectl("-n", namespace, "delete", "pod", "-l", "rlinf.io/component=worker", "--wait=false")
    await_replaced(plane, namespace, "worker", attempt=2)
    paced.go()
    job = plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=120)
    assert job["status"]["step"] == STEPS


def test_somebody_elses_pod_with_a_childs_name_is_named_and_left_alone(plane: ControlPlane, namespace: str, claim: str):
    create(plane.cluster, namespace, pod("cartpole-driver-a1"))
    plane.apply(namespace, cartpole(claim=claim))

    def named(job: dict[str, Any]) -> bool:
        return "cartpole-driver-a1 exists and does not belong to this job" in yaml.safe_dump(
            job.get("status"), width=10_000
        )

    plane.until(namespace, "cartpole", named, what="the name of the foreign pod in the status", timeout_s=60)
    found = plane.cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/cartpole-driver-a1")
    assert "ownerReferences" not in found["metadata"]
    plane.cluster.kubectl("-n", namespace, "delete", "pod", "cartpole-driver-a1")
    plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=120)
