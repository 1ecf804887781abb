"""Pods that are lost, fail, are edited or vanish: what is made, deleted, counted and told, whole, pass by pass."""

from datetime import timedelta
from pathlib import Path

import pytest

from rlinf_api.report import Failure
from rlinf_operator.policies.pod_view import PodPlace
from rlinf_operator.policies.restart import Restart
from rlinf_operator.reconcile import places
from tests.builders import NOW, ppo_job
from tests.stories import Story

STORIES = Path(__file__).parent / "stories"
SIM, TRAIN, DRIVER = "math-sim-0-a1", "math-train-0-a1", "math-driver-a1"


def running(job=None):
    world = (job or ppo_job()).with_spec(checkpoint={"uri": "/c"}).world().created().all_ready()
    world.report(plan_revision=1, plan_switches=1, step=5).step()
    return Story(world)


def test_pods_that_fail_are_replaced_after_growing_pauses_until_there_were_too_many():
    story = running(ppo_job().with_spec(failurePolicy={"maxRestarts": 3, "resetAfterSeconds": 3600}))
    world = story.world
    for attempt in (1, 2, 3, 4):
        words = Failure(role="env", worker=attempt, reason="Oops", message=f"attempt {attempt}")
        world.later(10).exited(f"math-sim-0-a{attempt}", 1, words=words, reason="OOMKilled" if attempt == 2 else "")
        story.step(f"attempt {attempt} ends")
        if attempt < 4:
            for _ in range(2):
                if f"math-sim-0-a{attempt + 1}" not in world.pods:
                    world.later(1)
                    story.step("a second later")
            world.later(1).all_ready()
            story.step("its successor is ready")
    story.holds(STORIES / "fails.txt")


def test_pods_that_nodes_take_away_are_replaced_at_once_and_not_the_programs():
    story = running()
    world = story.world
    world.later(10).deleted(SIM, disruption="EvictionByEvictionAPI").ended_by_kubelet(
        TRAIN, reason="Evicted", message="The node was low on memory."
    )
    story.step("one is drained, one evicted")
    world.later(5).vanished(SIM)
    story.step("the first is gone")
    world.later(5).all_ready().vanished("math-sim-1-a1")
    story.step("somebody takes another away")
    world.later(5).exited("math-sim-0-a2", 0)
    story.step("one exits 0 in the middle")
    world.later(9.5)
    story.step("just before its driver had its time")
    world.later(0.5)
    story.step("its driver said nothing")
    story.holds(STORIES / "lost.txt")


def test_an_edit_replaces_the_pods_that_are_made_from_it_beside_those_that_stay():
    story = running()
    world = story.world
    pools = [dict(pool) for pool in world.manifest["spec"]["pools"]]
    pools[0] = {**pools[0], "template": {"metadata": {"labels": {"team": "rl"}}}}
    world.later(10).edit(pools=pools)
    story.step("the metadata of a pool's template are edited")
    pools[0] = {**pools[0], "template": {"spec": {"priorityClassName": "high"}}}
    world.later(10).edit(pools=pools)
    story.step("a pool's template is edited")
    world.later(10).all_ready()
    story.step("its pods are ready")
    world.later(10).edit(seed=7)
    story.step("the seed is edited")
    story.holds(STORIES / "edited.txt")


def test_a_job_with_a_user_error_fails_with_the_pods_words():
    story = running()
    world = story.world
    world.later(10).exited(SIM, 64).exited(TRAIN, 64, words=Failure(reason="UserError", message="no such file"))
    story.step("two exit 64")
    story.holds(STORIES / "user_error.txt")


def test_older_attempts_leave_and_pods_of_an_earlier_life_and_of_no_place_go():
    story = running()
    world = story.world
    world.exited(SIM, 1).step()
    world.pods[SIM] = world.pods["math-sim-1-a1"] | {
        "metadata": world.pods["math-sim-1-a1"]["metadata"] | {"name": SIM}
    }
    world.pods[SIM]["metadata"]["labels"] = {**world.pods[SIM]["metadata"]["labels"], "rlinf.io/ordinal": "0"}
    world.later(1)
    story.step("the one that was replaced is alive after all")
    strange = dict(world.pods[TRAIN])
    strange["metadata"] = {**strange["metadata"], "name": "math-train-7-a1", "uid": "strange"}
    strange["metadata"]["labels"] = {**strange["metadata"]["labels"], "rlinf.io/ordinal": "7"}
    old = dict(world.pods[TRAIN])
    annotations = {**old["metadata"]["annotations"], "rlinf.io/life": "0"}
    old["metadata"] = {**old["metadata"], "name": "math-train-0-a0", "uid": "old", "annotations": annotations}
    world.pods |= {"math-train-7-a1": strange, "math-train-0-a0": old}
    world.later(1)
    story.step("two that nobody wants")
    story.holds(STORIES / "surplus.txt")


@pytest.mark.parametrize(
    ("pod", "job", "pool", "of_it"),
    [
        ("math-gpu-2", "math", "gpu", True),
        ("math-gpu-2-a17", "math", "gpu", True),
        ("math-gpu-2-ax", "math", "gpu", False),
        ("math-gpu-x-a1", "math", "gpu", False),
        ("xmath-gpu-2-a1", "math", "gpu", False),
        ("math-cpu-2-a1", "math", "gpu", False),
    ],
)
def test_an_entrys_pod_is_of_its_pool_by_its_name(pod, job, pool, of_it):
    assert places.is_of_pool(pod, job, pool) is of_it


def test_a_long_list_is_cut_and_its_length_said():
    assert places.listed([str(n) for n in range(8)]) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert places.listed([str(n) for n in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert places.listed([]) == ""


def test_what_ended_in_this_life_is_told_by_the_entries_since_it_began():
    place = PodPlace(component="worker", pool="sim", ordinal=0)
    entry = Restart(at=NOW, pod="math-sim-0-a3", cause="Program")
    for since, ended in ((None, True), (NOW, True), (NOW + timedelta(seconds=1), False)):
        asked = places.which_ended(places.Pods(restarts=(entry,)), job="math", since=since)
        assert asked(place) is ended
    assert not places.which_ended(places.Pods(), job="math", since=None)(place)


def test_of_a_job_that_lost_all_its_pods_each_place_is_missed_its_drivers_too():
    """Counted by the status, or still there: either is a job that has begun."""
    world = running().world
    settings = world.settings
    world.pods.clear()
    found = places.look_on(world.observed(), now=world.now, settings=settings)
    assert [str(place) for place in found.waiting] == ["driver", "sim-0", "sim-1", "train-0"]
    world = running().world
    world.status = world.status.model_copy(update={"pools": []})
    world.exited(DRIVER, 1)
    for name in (SIM, TRAIN, "math-sim-1-a1"):
        world.vanished(name)
    found = places.look_on(world.observed(), now=world.now, settings=settings)
    assert [str(place) for place in found.waiting] == ["driver"]
    world.pods.clear()
    found = places.look_on(world.observed(), now=world.now, settings=settings)
    assert (found.waiting, found.live, found.attempt) == ([], {}, 1)
