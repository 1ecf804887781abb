"""Pods of a job whose pods are not replaced: what becomes of them is counted once, and nothing follows."""

from datetime import timedelta

import pytest

from rlinf_operator.reconcile import places
from tests.builders import ppo_job


@pytest.fixture
def world():
    return ppo_job().world().started()


def looked_on(world, *, stopping):
    settings = world.settings
    return places.look_on(world.observed(), now=world.now + timedelta(minutes=5), settings=settings, stopping=stopping)


def ended(found):
    return sorted(pod.name for pod, _ in found.ended)


def test_all_that_live_are_found_and_a_driver_that_is_ready(world):
    found = looked_on(world, stopping=False)
    assert sorted(pod.name for pod in found.live.values()) == sorted(world.names())
    assert found.driver_ready
    assert (found.create, found.delete, found.failed, ended(found)) == ([], [], None, [])
    assert found.attempt == world.status.attempt


@pytest.mark.parametrize("how", ["deleted", "exited 0", "failed"])
@pytest.mark.parametrize("stopping", [False, True])
def test_of_a_job_that_stops_only_who_fails_has_ended(world, how, stopping):
    """The others end as they should."""
    name = next(name for name in world.names() if "sim" in name)
    if how == "deleted":
        world.deleted(name)
    else:
        world.exited(name, 0 if how == "exited 0" else 1)
    found = looked_on(world, stopping=stopping)
    assert ended(found) == ([] if stopping and how != "failed" else [name])
    assert name not in {pod.name for pod in found.live.values()}
    assert (found.create, found.delete, found.failed) == ([], [], None)
