"""The operator's process ends, in order or not, and is started again; jobs go on. A scheduler that is away:
tests/conformance."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.control_plane import (
    ControlPlane,
    further_than,
    is_complete,
    is_stepping,
    refused_calls,
    seconds_until,
)
from tests.cluster.paced import Paced
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

COMPLETE_S = 120
"""From apply, or of its steps that take no time: 10 s; ten times that on busy cores."""
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture
def plane(cluster: Cluster, image: str, namespace: str, tmp_path: Path) -> Iterator[ControlPlane]:
    with ControlPlane(cluster, tmp_path) as made:
        yield made
        for operator in made.operators:
            assert refused_calls(operator) == []


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
