"""A job on a real cluster, from kubectl apply to its deletion, with the operator and the scheduler as processes."""

from collections.abc import Iterator
from functools import partial

import pytest

from tests.cluster.control_plane import (
    ControlPlane,
    await_replaced,
    cartpole,
    condition,
    is_complete,
    is_stepping,
    refused_calls,
)
from tests.cluster.paced import STEPS, Paced
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

COMPLETE_S = 120
"""From apply, or of STEPS steps that take no time, made twice at most: 10 s each; ten times that on busy cores."""
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


def test_a_job_is_suspended_and_resumed(plane: ControlPlane, namespace: str, paced: Paced):
    plane.apply(namespace, paced.job())
    plane.until(namespace, "cartpole", is_stepping, what="a first step", timeout_s=90)
    suspend = partial(plane.cluster.kubectl, "-n", namespace, "patch", "rljob", "cartpole", "--type=merge", "-p")
    suspend('{"spec": {"suspend": true}}')
    plane.until(namespace, "cartpole", lambda job: condition(job, "Suspended") == "True", what="Suspended")
    until(lambda: not plane.pods(namespace), what="no pods", timeout_s=40)
    paced.go()
    suspend('{"spec": {"suspend": false}}')
    job = plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=COMPLETE_S)
    assert condition(job, "Suspended") == "False"


@pytest.mark.parametrize("component", ["driver", "worker"])
def test_a_pod_that_is_deleted_is_replaced_and_the_job_goes_on(
    plane: ControlPlane, namespace: str, paced: Paced, component: str
):
    plane.apply(namespace, paced.job())
    plane.until(namespace, "cartpole", is_stepping, what="a first step", timeout_s=90)
    selector = f"rlinf.io/component={component}"
    plane.cluster.kubectl("-n", namespace, "delete", "pod", "-l", selector, "--wait=false")
    await_replaced(plane, namespace, component, attempt=2)
    paced.go()
    job = plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=COMPLETE_S)
    assert job["status"]["step"] == STEPS
    assert job["status"]["attempt"] == 2
