"""A running job whose spec was edited into one that is not valid: it runs on as it was made, and its status with it."""

from typing import Any

import pytest

from rlinf_api.report import DriverState
from rlinf_operator.reconcile import examining
from rlinf_operator.reconcile.state import DriverView
from tests.builders import ppo_job

SIM, TRAIN, DRIVER = "math-sim-1-a1", "math-train-0-a1", "math-driver-a1"
WRONG = {"flow": {"name": "ppo", "setps": 3}}
LATER: dict[str, Any] = {"flow": {"name": "ppo", "maxStaleness": 1}}
RIGHT: dict[str, Any] = {"flow": {"name": "ppo"}}


@pytest.fixture(params=[WRONG, LATER], ids=["not readable", "not supported yet"])
def world(request):
    world = ppo_job().with_spec(checkpoint={"uri": "/c"}).world().created().all_ready().later(5)
    world.report(plan_revision=1, step=40).step()
    world.later(60).edit(**request.param).step()
    assert world.condition("Valid")[0] == "False"
    assert world.condition("Running") == ("True", "Stepping")
    return world


def pools(world):
    return {p.name: (p.desired, p.ready, p.failed, p.restarts) for p in world.status.pools}


def test_its_progress_and_its_checkpoint_go_on(world):
    before = world.status.conditions
    world.report(plan_revision=1, step=57, checkpoint_uri="/c/b0-50", checkpoint_step=50).later(60).step()
    assert world.status.step == 57
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.step == 50
    assert world.status.conditions == before
    assert pools(world) == {"sim": (2, 2, 0, 0), "train": (1, 1, 0, 0)}


def test_what_its_driver_says_reaches_the_conditions(world):
    world.report(plan_revision=1, state=DriverState.RECOVERING, message="rollout/0 is started again").step()
    assert world.condition("Running") == ("False", "Recovering")
    assert world.condition("Degraded") == ("True", "WorkerRestarting")
    world.report(plan_revision=1).step()
    assert world.condition("Running") == ("True", "Stepping")
    assert world.condition("Degraded") == ("False", "Healthy")
    world.silent(30.0).step()
    assert world.condition("Degraded") == ("True", "DriverUnreachable")


def test_a_pod_that_ends_is_told_once_and_made_again_once_the_spec_is_valid(world):
    decision = world.exited(SIM, 137, reason="OOMKilled").step()
    assert [(e.reason, e.pod) for e in decision.events] == [("PodEnded", SIM)]
    assert (decision.create_pods, decision.delete_pods, decision.request_plan) == ((), (), "")
    first = world.status.first_failure
    assert first is not None
    assert (first.pod, first.reason) == (SIM, "OOMKilled")
    assert world.condition("PodsReady") == ("False", "PodsMissing")
    assert world.message("PodsReady") == (
        "no pod is left of sim-1, and none is made before the spec is valid: see Valid"
    )
    assert world.condition("Degraded") == ("True", "PodReplaced")
    assert "before the spec is valid" in world.message("Degraded")
    assert world.condition("Running") == ("True", "Stepping"), "its driver says so"
    assert pools(world) == {"sim": (2, 1, 1, 1), "train": (1, 1, 0, 0)}
    assert world.later(7200).step().events == ()
    assert world.condition("Degraded") == ("True", "PodReplaced")
    decision = world.edit(**RIGHT).step()
    assert [p["metadata"]["name"] for p in decision.create_pods] == ["math-sim-1-a2"]
    assert decision.events == ()
    assert world.condition("Valid") == ("True", "Accepted")


def test_a_job_that_lost_all_its_pods_does_not_say_that_it_runs(world):
    for name in world.names():
        world.exited(name, 137, reason="OOMKilled")
    world.step()
    assert world.condition("Running")[0] == "False"
    assert world.condition("Running")[1] == world.condition("Valid")[1], "a column of kubectl get, unlike Valid"
    assert world.condition("PodsReady") == ("False", "PodsMissing")
    assert world.condition("Degraded") == ("True", "PodReplaced")
    assert pools(world) == {"sim": (2, 0, 2, 2), "train": (1, 0, 1, 1)}
    assert len(world.status.restarts) == 4
    assert len(world.names()) == 4, "they can be read until their successors are made"


def test_a_pod_that_somebody_deleted_is_missed_and_not_made(world):
    decision = world.vanished(SIM).step()
    assert decision.create_pods == ()
    assert world.condition("PodsReady") == ("False", "PodsMissing")
    assert world.status.restarts == []
    assert [p["metadata"]["name"] for p in world.edit(**RIGHT).step().create_pods] == ["math-sim-1-a2"]


def test_pods_that_still_start_are_waited_for():
    world = ppo_job().world().created().edit(**WRONG)
    decision = world.step()
    assert world.condition("PodsReady") == ("False", "PodsStarting")
    assert world.condition("Running") == ("Unknown", "WaitingForDriver")
    assert decision.requeue_after_s == world.settings.pods_ready_deadline_s
    world.all_ready().later(5).step()
    assert world.condition("PodsReady") == ("True", "PodsReady")


def test_a_new_operator_lets_what_its_driver_said_stand(world):
    before = world.later(60).step().status
    world.link = DriverView(attempt=1, silent_s=1.0)
    decision = world.step()
    assert decision.status == before
    assert decision.requeue_after_s == world.settings.driver_late_s - 1


def test_it_can_be_suspended_and_goes_on_once_it_is_valid(world):
    decision = world.edit(suspend=True).step()
    assert decision.drain is not None
    assert world.condition("Valid")[0] == "False"
    assert world.condition("Suspended") == ("Unknown", "Draining")
    world.report(state=DriverState.DRAINED, plan_revision=1, step=57, checkpoint_uri="/c/b0-57", checkpoint_step=57)
    world.step()
    world.link = None
    world.step()
    assert world.condition("Suspended") == ("True", "SuspendedByUser")
    assert world.names() == []
    world.edit(suspend=False).step()
    assert world.names() == []
    assert world.condition("Suspended") == ("True", "SuspendedByUser")
    assert world.message("Suspended") == "no pods; it goes on once the spec is valid: see Valid"
    assert world.condition("Running") == ("False", world.condition("Valid")[1])
    world.edit(**RIGHT).step()
    assert world.condition("Suspended") == ("False", "NotSuspended")
    assert "math-driver-a2" in world.names()
    assert world.status.life == 2


def test_a_drain_that_is_taken_back_ends_in_no_job_that_runs(world):
    """Its next life waits for a valid spec."""
    world.edit(suspend=True).step()
    world.edit(suspend=False).step()
    assert world.condition("Running") == ("True", "Stepping"), "its driver ends its step first"
    words = '{"state": "Drained", "step": 41, "checkpointUri": "/c/b0-41", "checkpointStep": 41}'
    world.link = None
    world.exited(DRIVER, 0, words=words)
    for name in (SIM, "math-sim-0-a1", TRAIN):
        world.exited(name, 0)
    decision = world.later(60).step()
    assert world.condition("Running") == ("False", world.condition("Valid")[1])
    assert (decision.events, world.status.restarts) == ((), [])
    assert world.status.step == 41
    world.edit(**RIGHT).step()
    assert world.status.life == 2


WRONG = {"flow": {"name": "ppo", "setps": 3}}


@pytest.mark.parametrize("begun", [False, True])
def test_a_bug_of_ours_that_is_over_is_not_said_of_a_spec_that_is_not_valid(begun):
    world = ppo_job().world()
    if begun:
        world.started().report(plan_revision=1, step=40).step()
        world.edit(**WRONG).step()
        world.edit(suspend=True).step()
        world.edit(suspend=False)
    world.status = examining.broken(world.observed(), KeyError("x"), now=world.now).status
    assert world.condition("Degraded") == ("True", "InternalError")
    world.edit(**WRONG).step()
    assert world.condition("Valid") == ("False", "InvalidSpec")
    assert world.condition("Degraded")[1] != "InternalError"
