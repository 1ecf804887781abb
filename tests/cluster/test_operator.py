"""A job on a real cluster, from kubectl apply to its deletion, with the operator and the scheduler as processes."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.control_plane import (
    ControlPlane,
    Process,
    await_replaced,
    cartpole,
    condition,
    further_than,
    is_complete,
    is_stepping,
    seconds_until,
)
from tests.cluster.paced import STEPS, Paced
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

COMPLETE_S = 120
"""From apply, or of STEPS steps that take no time, made twice at most: 10 s each; ten times that on busy cores."""
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture
def plane(cluster: Cluster, image: str, namespace: str, tmp_path: Path) -> Iterator[ControlPlane]:
    with ControlPlane(cluster, tmp_path) as made:
        yield made
        for operator in made.operators:
            assert refused_calls(operator) == []


def refused_calls(operator: Process) -> list[str]:
    """Calls that RBAC refused, and reads of Secrets but of the CA: access.py would be wrong.

    By RBAC's sentence and not by code="403": so answers a namespace as well that is being deleted with its job.
    """
    calls = [line for line in operator.metrics().splitlines() if line.startswith("rlinf_operator_api_calls_total")]
    wrong = [
        line
        for line in calls
        if 'code="401"' in line or ('kind="Secret"' in line and ('verb="list"' in line or 'verb="watch"' in line))
    ]
    return wrong + [line for line in operator.log.read_text().splitlines() if "is forbidden: User" in line]


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


def test_without_the_scheduler_a_job_says_so_and_starts_when_it_is_back(
    plane: ControlPlane, namespace: str, claim: str
):
    plane.scheduler.stop()
    try:
        plane.apply(namespace, cartpole(claim=claim))

        def says_so(job):
            listed = (job.get("status") or {}).get("conditions") or []
            return any(c["type"] == "Running" and c["reason"] == "SchedulerUnavailable" for c in listed)

        plane.until(namespace, "cartpole", says_so, what="SchedulerUnavailable", timeout_s=40)
    finally:
        plane.scheduler.start()
    plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=COMPLETE_S)


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


def test_an_operator_that_is_killed_goes_on_where_it_was(plane: ControlPlane, namespace: str, paced: Paced):
    plane.apply(namespace, paced.job())
    plane.until(namespace, "cartpole", is_stepping, what="a first step", timeout_s=90)
    before = {pod["metadata"]["uid"] for pod in plane.pods(namespace)}
    plane.operator.kill()
    heard = further_than(plane.job(namespace, "cartpole"))
    plane.operator.start()
    plane.until(namespace, "cartpole", heard, what="a step that the next operator hears of")
    paced.go()
    job = plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=COMPLETE_S)
    assert {pod["metadata"]["uid"] for pod in plane.pods(namespace)} <= before, "a pod was replaced"
    assert job["status"]["attempt"] == 1


def test_the_lease_goes_to_the_next_operator(plane: ControlPlane):
    second = plane.add_operator().start()
    try:
        until(lambda: second.get("/readyz")[0] == 200, what="the second operator", timeout_s=30)
        assert second.metric("rlinf_operator_leader") == 0
        assert plane.operator.stop() == 0
        took_s = seconds_until(lambda: second.metric("rlinf_operator_leader"), what="the second to lead", timeout_s=20)
        print(f"stopped in order: {took_s:.1f} s")
        assert took_s < 10
        plane.operator.start()
        until(lambda: plane.operator.get("/readyz")[0] == 200, what="the first operator", timeout_s=30)
        second.kill()
        took_s = seconds_until(
            lambda: plane.operator.metric("rlinf_operator_leader"), what="the first to lead", timeout_s=40
        )
        print(f"killed: {took_s:.1f} s")
    finally:
        second.kill()
        plane.operators.remove(second)
