"""What a status says while a job comes up, runs, loses its driver's voice, is edited: whole, pass by pass."""

from pathlib import Path

import pytest

from rlinf_api.conditions import Reason
from rlinf_api.report import DriverState, Failure
from rlinf_operator.reconcile import status
from tests.builders import ppo_job
from tests.stories import Story

STORIES = Path(__file__).parent / "stories"
SIM, TRAIN, DRIVER = "math-sim-0-a1", "math-train-0-a1", "math-driver-a1"


def test_a_job_comes_up_runs_and_is_complete():
    story = Story(ppo_job().with_spec(checkpoint={"uri": "/c"}, ttlSecondsAfterFinished=100).world())
    world = story.world
    for what in ("the job is made", "the plan is there", "nothing is new"):
        story.step(what)
    world.later(2).ready(SIM)
    story.step("a pod is ready")
    world.later(2).all_ready()
    story.step("all pods are ready")
    world.later(2).report(state=DriverState.WAITING, missing=("env/0", "env/1"))
    story.step("the driver waits for workers")
    world.later(2).report(state=DriverState.WAITING, message="loading", plan_revision=1, plan_switches=1)
    story.step("the driver has its plan")
    world.later(2).report(plan_revision=1, plan_switches=1, plan_pause_s=0.5, message="step 0")
    story.step("the driver runs")
    world.later(20).report(
        plan_revision=1, plan_switches=1, step=40, branch=2, step_seconds=1.26, metrics={"loss": 0.123456789, "a": 7.0},
        checkpoint_uri="/c/40", checkpoint_step=40, message="step 40",
    )  # fmt: skip
    story.step("steps are made")
    world.later(20).report(plan_revision=1, plan_switches=1, step=41, message="step 41", checkpoint_uri="/c/40",
                           checkpoint_step=40)  # fmt: skip
    story.step("a step without a time, the same checkpoint")
    world.later(20).report(state=DriverState.COMPLETE, plan_revision=1, step=100, message="done")
    story.step("the driver is done")
    world.later(31)
    story.step("its driver had its time")
    world.exited(DRIVER, 0).later(60) if DRIVER in world.pods else world.later(60)
    story.step("later")
    world.later(100)
    story.step("its time to live is over")
    story.holds(STORIES / "life.txt")


def test_pods_that_do_not_start_say_why():
    story = Story(ppo_job().world().planned())
    world = story.world
    story.step("pods are made")
    world.later(1).waiting(SIM, unschedulable="0/3 nodes")
    world.waiting(TRAIN, unschedulable="0/4 nodes")
    story.step("two find no node")
    for name, reason in ((SIM, "ErrImagePull"), (TRAIN, "ContainerCreating")):
        world.pods[name]["status"]["conditions"] = []
        world.waiting(name, reason=reason, message="no such image" if name == SIM else "")
    story.step("an image is missing")
    world.waiting(SIM, reason="CreateContainerConfigError", message="no secret").ready("math-sim-1-a1", node="n2")
    world.later(298.5)
    story.step("just before the deadline")
    world.later(0.5)
    story.step("at the deadline")
    world.later(0.5)
    story.step("after it")
    story.holds(STORIES / "not_ready.txt")


@pytest.fixture
def running():
    world = ppo_job().with_spec(checkpoint={"uri": "/c"}).world().created().all_ready()
    world.report(plan_revision=1, plan_switches=1, step=5).step()
    return Story(world)


def test_a_driver_that_recovers_waits_for_items_or_is_not_heard_degrades_its_job(running):
    world = running.world
    for what, fields in (
        ("a worker is made anew", {"state": DriverState.RECOVERING, "message": "env/1 is made anew"}),
        ("it runs again", {}),
        ("turns go by", {"reason": "TurnsWithoutItems", "message": "nothing since 40 s"}),
        ("a worker failed", {"first_failure": Failure(role="env", worker=3, pod=SIM, reason="X", message="m" * 2100)}),
        ("another one failed", {"first_failure": Failure(role="env", worker=4, reason="Y")}),
    ):
        world.later(10).report(plan_revision=1, plan_switches=1, step=6, **fields)
        running.step(what)
    for seconds in (9.5, 10.0, 30.0, 59.5, 60.0):
        world.later(1).silent(seconds)
        running.step(f"silent for {seconds:g} s")
    running.holds(STORIES / "degraded.txt")


def test_a_job_whose_spec_is_edited_into_a_wrong_one_says_what_becomes_of_it(running):
    world = running.world
    world.later(10).edit(flow={"name": "ppo", "setps": 3})
    running.step("it is not valid any more")
    world.later(10).exited(SIM, 1, words="no more")
    running.step("a pod ends")
    world.later(10).report(plan_revision=1, plan_switches=1, step=7, state=DriverState.RECOVERING, message="waits")
    running.step("its driver says so")
    world.later(10).exited(DRIVER, 75)
    running.step("its driver ends")
    world.later(10).edit(flow={"name": "ppo"})
    running.step("it is valid again")
    running.holds(STORIES / "invalid.txt")


def test_progress_alone_waits_and_is_written_with_what_does_not(running):
    world = running.world
    world.progress_due = False
    world.later(1).report(plan_revision=1, plan_switches=1, step=6, message="step 6")
    running.step("a step")
    world.later(1).report(plan_revision=1, plan_switches=1, step=7, reason="TurnsWithoutItems", message="40 s")
    running.step("turns without items")
    world.later(1).report(plan_revision=1, plan_switches=1, step=8, reason="TurnsWithoutItems", message="41 s")
    running.step("still")
    running.step("nothing new")
    running.holds(STORIES / "progress.txt")


@pytest.mark.parametrize(
    ("text", "reason"), [("UserError", "UserError"), ("Stopped", "Stopped"), ("x", "InternalError")]
)
def test_a_drivers_reason_is_the_conditions_where_it_is_one_of_ours(text, reason):
    assert status.terminal_reason(text) == Reason(reason)
