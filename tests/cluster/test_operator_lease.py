"""The Lease goes to the next operator when one ends, in order or not. A job meanwhile: test_operator_plans.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.control_plane import PRODUCTION_LEASE, ControlPlane, refused_calls, seconds_until
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture
def plane(cluster: Cluster, tmp_path: Path) -> Iterator[ControlPlane]:
    with ControlPlane(cluster, tmp_path) as made:
        yield made
        for operator in made.operators:
            assert refused_calls(operator) == []


def test_the_lease_goes_to_the_next_operator(plane: ControlPlane):
    plane.change(**PRODUCTION_LEASE)  # the first one leads by a Lease of a minute: nobody here waits for its end
    second = plane.add_operator().start()
    try:
        until(lambda: second.get("/readyz")[0] == 200, what="the second operator", timeout_s=30)
        assert second.metric("rlinf_operator_leader") == 0
        assert plane.operator.stop() == 0
        took_s = seconds_until(lambda: second.metric("rlinf_operator_leader"), what="the second to lead", timeout_s=20)
        print(f"stopped in order: {took_s:.1f} s")
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
