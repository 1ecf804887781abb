"""A job on a real cluster, from kubectl apply to its deletion, with the operator and the scheduler as processes.

What becomes of it on the way (suspended, pods deleted, without a scheduler): tests/conformance.
"""

from collections.abc import Iterator

import pytest

from tests.cluster.control_plane import ControlPlane, cartpole, condition, refused_calls
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def shared(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One for the file: no test here ends its processes."""
    with ControlPlane(cluster, tmp_path_factory.mktemp("plane")) as made:
        yield made


@pytest.fixture
def plane(shared: ControlPlane, namespace: str) -> Iterator[ControlPlane]:
    yield shared
    assert refused_calls(shared.operator) == []


def left_of(cluster: Cluster, namespace: str) -> list[str]:
    kinds = "rljobs,rlplans,pods,services,networkpolicies,secrets,configmaps"
    listed = cluster.kubectl("-n", namespace, "get", kinds, "-o", "name").split()
    return [name for name in listed if name != "configmap/kube-root-ca.crt"]


def test_a_job_completes_in_its_own_pods_and_its_deletion_leaves_nothing(
    plane: ControlPlane, namespace: str, claim: str
):
    plane.apply(namespace, cartpole(claim=claim))
    plane.cluster.kubectl(
        "-n", namespace, "wait", "--for=condition=Complete", "rljob/cartpole", "--timeout=90s", timeout_s=100
    )
    job = plane.job(namespace, "cartpole")
    assert job["status"]["step"] == 6
    assert condition(job, "Failed") == "", "only the end that came is a condition"
    # No handle that only the operator could take off again, and no trace of Kopf.
    assert "finalizers" not in job["metadata"]
    assert not [name for name in job["metadata"].get("annotations", {}) if "kopf" in name]
    assert left_of(plane.cluster, namespace)
    plane.cluster.kubectl("-n", namespace, "delete", "rljob", "cartpole", "--wait=false")
    until(lambda: not left_of(plane.cluster, namespace), what="everything to be gone", timeout_s=60)
