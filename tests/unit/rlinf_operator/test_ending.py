"""The end of a job, by its driver's word, its exit code or a decision, and suspension: whole, pass by pass."""

from pathlib import Path

import pytest

from rlinf_api.report import DriverState, Failure
from rlinf_operator.reconcile import ending
from rlinf_operator.reconcile.draft import Draft
from tests.builders import ppo_job
from tests.stories import Story

STORIES = Path(__file__).parent / "stories"
SIM, TRAIN, DRIVER = "math-sim-0-a1", "math-train-0-a1", "math-driver-a1"
PLAN = {"plan_revision": 1, "plan_switches": 1}
LAST = '{"state": "Failed", "reason": "CheckpointUnreadable", "message": "no such step", "step": 7, "steps": 10}'


def running(**spec):
    world = ppo_job().with_spec(**({"checkpoint": {"uri": "/c"}} | spec)).world().created().all_ready()
    world.report(**PLAN, step=5).step()
    return Story(world)


ENDS = {
    "complete without words": lambda w: w.report(state=DriverState.COMPLETE, **PLAN, step=9),
    "failed with words": lambda w: w.report(
        state=DriverState.FAILED, **PLAN, reason="UserError", message="no such env",
        first_failure=Failure(role="env", worker=1, reason="UserError", message="no such env"),
    ),
    "failed without words": lambda w: w.report(state=DriverState.FAILED, **PLAN),
    "its driver exited 0": lambda w: w.exited(DRIVER, 0),
    "its driver exited 0 and said what": lambda w: w.exited(DRIVER, 0, words='{"state": "Complete", "message": "all"}'),
    "its driver exited and said why": lambda w: w.exited(DRIVER, 75, words=LAST),
    "its driver exited and said that it failed": lambda w: w.exited(DRIVER, 1, words='{"state": "Failed"}'),
    "its time was over": lambda w: w.later(3600),
}  # fmt: skip


@pytest.mark.parametrize("what", ENDS)
def test_an_end_is_told_in_one_condition_and_leaves_the_driver_to_be_read(what):
    story = running(activeDeadlineSeconds=3000, ttlSecondsAfterFinished=600)
    ENDS[what](story.world.later(10))
    story.step(what)
    for seconds in (29, 1, 500, 69, 1):
        story.world.later(seconds)
        story.step(f"{seconds} s later")
    story.holds(STORIES / f"end_{what.replace(' ', '_')}.txt")


def test_what_ended_the_job_is_its_first_failure_whatever_had_failed_before():
    """A pod that was replaced did not end it; what the driver gave up for did."""
    world = running().world
    world.exited(SIM, 1).step()
    assert world.status.first_failure.pod == SIM
    ended_by = Failure(role="env", worker=1, reason="UserError", message="no such env")
    world.later(5).report(state=DriverState.FAILED, **PLAN, reason="UserError", first_failure=ended_by).step()
    assert (world.status.first_failure.worker, world.status.first_failure.message) == (1, "no such env")


def test_a_job_that_goes_on_has_no_end():
    world = running().world
    assert ending.finish_by_driver(Draft(world.observed(), now=world.now), life=1) is None


def test_a_suspension_drains_stops_and_a_resume_begins_a_new_life():
    story = running()
    world = story.world
    world.later(10).edit(suspend=True)
    story.step("it is to be suspended")
    world.later(10).report(**PLAN, step=6)
    story.step("it steps on")
    world.later(10).report(**PLAN, state=DriverState.DRAINED, step=6, checkpoint_uri="/c/6", checkpoint_step=6)
    story.step("it is drained")
    world.later(1)
    story.step("it is gone")
    world.link = None
    world.later(10).edit(suspend=False)
    story.step("it is to go on")
    world.later(1).all_ready().report(**PLAN, step=6)
    story.step("it goes on")
    story.holds(STORIES / "suspended.txt")


def test_a_drain_that_takes_too_long_is_not_waited_for():
    story = running()
    world = story.world
    world.later(10).edit(suspend=True)
    story.step("it is to be suspended")
    world.later(119).report(**PLAN, step=9, checkpoint_uri="/c/8", checkpoint_step=8)
    story.step("a second is left")
    world.later(1)
    story.step("none is left")
    world.deleted(SIM, grace_s=5) if SIM in world.pods else world
    world.later(1)
    story.step("its pods are gone")
    story.holds(STORIES / "drained_late.txt")


def test_a_job_without_a_place_for_checkpoints_loses_its_steps_and_is_told_so():
    story = running(checkpoint={})
    world = story.world
    world.later(10).edit(suspend=True)
    story.step("it is to be suspended")
    world.later(10).exited(SIM, 1)
    story.step("a pod ends meanwhile")
    world.later(1).exited(DRIVER, 0, words='{"state": "Drained", "step": 9, "steps": 100}')
    story.step("its driver is drained and gone")
    world.later(1)
    story.step("all are gone")
    story.holds(STORIES / "suspended_without_place.txt")
