"""Suspend and resume: drain at a step boundary, a deadline, a new life."""

import pytest

from rlinf_api.report import DriverState
from rlinf_operator.policies import suspend
from rlinf_operator.reconcile.state import DriverView
from rlinf_operator.settings import OperatorSettings
from tests.builders import ppo_job
from tests.builders_plans import pin, plan, plan_conditions, running, store_statuses


def suspended(**spec):
    world = ppo_job().with_spec(**spec).world().started()
    world.step()
    world.edit(suspend=True).step()
    world.report(state=DriverState.DRAINED, plan_revision=1, step=7, checkpoint_uri="/c", checkpoint_step=7).step()
    world.link = None
    world.step()
    return world


def test_a_running_job_is_drained_before_its_pods_go():
    world = ppo_job().world().started()
    world.step()
    decision = world.edit(suspend=True).step()
    assert decision.drain is not None
    assert decision.drain.deadline_s == world.settings.drain_deadline_s
    assert not decision.delete_pods
    assert world.condition("Suspended") == ("Unknown", "Draining")


def test_a_drained_job_loses_its_pods_and_is_suspended():
    world = suspended()
    assert world.names() == []
    assert world.condition("Suspended") == ("True", "SuspendedByUser")
    assert world.condition("Running") == ("False", "Stopped")
    assert world.status.step == 7
    assert world.status.start_time is None


def test_a_job_that_has_nowhere_to_write_says_before_it_is_drained_that_its_steps_are_lost():
    world = ppo_job().world().started()
    world.report(state=DriverState.RUNNING, plan_revision=1, step=7)
    world.step()
    decision = world.edit(suspend=True).step()
    assert [(e.type, e.reason) for e in decision.events] == [("Warning", "NoCheckpoint")]
    assert "a resume begins at step 0" in decision.events[0].message
    assert world.message("Suspended") == f"waiting for a step boundary; {suspend.LOST}"
    assert world.step().events == ()
    world.report(state=DriverState.DRAINED, plan_revision=1, step=7).step()
    assert world.message("Suspended").endswith(suspend.LOST)
    world.link = None
    world.step()
    assert world.condition("Suspended") == ("True", "SuspendedByUser")
    assert world.message("Suspended") == f"spec.suspend is true; no pods; {suspend.LOST}"


def test_after_the_deadline_such_a_job_names_no_checkpoint():
    world = ppo_job().world().started()
    world.report(state=DriverState.RUNNING, plan_revision=1, step=7)
    world.step()
    world.edit(suspend=True).step()
    world.later(121).step()
    assert world.condition("Suspended") == ("Unknown", "DrainDeadlineExceeded")
    assert world.message("Suspended").endswith(f"pods are deleted; {suspend.LOST}")


@pytest.mark.parametrize("why", ["it has a place of its own", "the operator has one for all", "it has made no step"])
def test_a_job_that_loses_nothing_is_told_of_no_loss(why):
    place = {"uri": "file:///data"} if why == "it has a place of its own" else {}
    settings = OperatorSettings(default_checkpoint_uri="file:///all/{uid}" if "operator" in why else "")
    world = ppo_job().with_spec(checkpoint=place).world(settings=settings).started()
    world.report(state=DriverState.RUNNING, plan_revision=1, step=0 if "no step" in why else 7)
    world.step()
    assert world.edit(suspend=True).step().events == ()
    assert world.message("Suspended") == "waiting for a step boundary and a checkpoint"


def test_a_driver_that_drained_and_exited_0_has_not_completed_the_job():
    world = ppo_job().world().started()
    world.step()
    world.edit(suspend=True).step()
    world.link = None
    words = '{"state": "Drained", "message": "stopped after step 7", "step": 7, '
    words += '"checkpointUri": "/c/b0-7", "checkpointStep": 7}'
    world.exited("math-driver-a1", 0, words=words)
    world.step()
    world.step()
    assert world.condition("Suspended") == ("True", "SuspendedByUser")
    assert world.status.step == 7
    assert world.status.checkpoint is not None
    assert (world.status.checkpoint.uri, world.status.checkpoint.step) == ("/c/b0-7", 7)
    assert not any(c.type == "Complete" for c in world.status.conditions)


def test_after_the_deadline_pods_go_without_a_checkpoint_and_it_says_so():
    world = ppo_job().world().started()
    world.step()
    world.edit(suspend=True).step()
    world.later(60)
    drain = world.decide().drain
    assert drain is not None
    assert drain.deadline_s == 60
    world.later(61).step()
    world.step()
    assert world.condition("Suspended") == ("True", "DrainDeadlineExceeded")
    assert "did not reach a step boundary within 120 s" in world.message("Suspended")


def test_without_a_driver_there_is_nothing_to_wait_for():
    world = ppo_job().world().created()
    decision = world.edit(suspend=True).step()
    assert len(decision.delete_pods) == 4
    world.step()
    assert world.condition("Suspended") == ("True", "SuspendedByUser")


def test_a_job_created_suspended_asks_for_nothing():
    world = ppo_job().with_spec(suspend=True).world()
    decision = world.step()
    assert not decision.request_plan
    assert not decision.create_pods
    assert world.condition("Suspended") == ("True", "SuspendedByUser")
    world.edit(suspend=False).created()
    assert world.status.life == 1
    assert "math-driver-a1" in world.names()


def test_resume_makes_pods_of_the_next_life_under_the_next_attempt():
    world = suspended()
    decision = world.edit(suspend=False).step()
    assert "math-driver-a2" in [p["metadata"]["name"] for p in decision.create_pods]
    env = {e["name"]: e.get("value") for e in decision.create_pods[0]["spec"]["containers"][0]["env"]}
    assert (env["RLINF_LIFE"], env["RLINF_ATTEMPT"]) == ("2", "2")
    assert (world.status.life, world.status.attempt) == (2, 2)
    assert world.condition("Suspended") == ("False", "NotSuspended")
    assert world.status.restarts == []


def is_first_of_life(world, name):
    env = world.pods[name]["spec"]["containers"][0]["env"]
    return {e["name"]: e.get("value") for e in env}["RLINF_FIRST_OF_LIFE"] == "1"


def test_the_driver_of_a_resume_is_told_that_it_is_the_first_and_the_next_one_is_not():
    world = suspended()
    world.edit(suspend=False).step()
    assert is_first_of_life(world, "math-driver-a2")
    world.exited("math-driver-a2", 1).step()
    assert not is_first_of_life(world, "math-driver-a3")


def test_a_driver_is_not_called_the_first_where_workers_of_its_life_may_have_had_another():
    """The pods of a resume were made and its status was not written; then somebody deleted the driver."""
    world = suspended()
    before = world.status
    world.edit(suspend=False).step()
    world.status = before
    del world.pods["math-driver-a2"]
    world.step()
    assert not is_first_of_life(world, "math-driver-a2")


def test_a_resume_that_crashed_before_its_status_write_ends_in_the_same_pods():
    world = suspended()
    before = world.status
    world.edit(suspend=False).step()
    made = world.names()
    world.status = before  # the status write was lost
    world.step()
    world.step()
    assert world.names() == made
    assert (world.status.life, world.status.attempt) == (2, 2)


def test_suspend_taken_back_while_draining_begins_a_new_life():
    world = ppo_job().world().started()
    world.step()
    world.edit(suspend=True).step()
    world.edit(suspend=False).created()
    assert world.status.life == 2
    assert world.names() == ["math-driver-a2", "math-sim-0-a2", "math-sim-1-a2", "math-train-0-a2"]


def test_a_plan_that_was_prepared_in_a_job_that_is_suspended_says_that_it_is_not_any_more():
    world = pin(running(plan(2, pods=2)), "math-p2").report(plan_revision=1, plan_prepared=2)
    store_statuses(world)
    world.edit(suspend=True)
    assert plan_conditions(world, 2) == {}, "its driver is still at work"
    world.report(state=DriverState.DRAINED, plan_revision=1)
    assert plan_conditions(world, 2)["Prepared"] == ("False", "Stopped")


def test_a_ready_driver_that_a_new_operator_has_not_heard_yet_is_waited_for():
    """The operator was started anew, then the job suspended: its first pass is before any report."""
    world = ppo_job().world().started()
    world.step()
    world.link = None
    decision = world.edit(suspend=True).step()
    assert (decision.drain, decision.delete_pods) == (None, ())
    assert decision.requeue_after_s == world.settings.driver_late_s
    assert world.condition("Suspended") == ("Unknown", "Draining")
    world.link = DriverView(attempt=1, silent_s=4.0)
    assert world.later(4).step().requeue_after_s == world.settings.driver_late_s - 4
    assert len(world.names()) == 4
    decision = world.later(1).report(state=DriverState.RUNNING, plan_revision=1).step()
    assert decision.drain is not None
    assert decision.drain.deadline_s == world.settings.drain_deadline_s - 5, "the wait is part of the deadline"


def test_a_ready_driver_that_never_says_a_word_is_waited_for_until_it_is_late():
    world = ppo_job().world().created().all_ready()
    world.edit(suspend=True).step()
    world.link = DriverView(attempt=1, silent_s=world.settings.driver_late_s)
    decision = world.later(world.settings.driver_late_s).step()
    assert len(decision.delete_pods) == 4
    assert "no running driver" in world.message("Suspended")


def test_what_an_earlier_driver_said_is_no_word_of_the_one_that_is_suspended():
    world = ppo_job().world().started()
    world.step()
    world.exited("math-driver-a1", 1).step()
    world.all_ready().report(attempt=1, silent_s=100.0, plan_revision=1)
    decision = world.edit(suspend=True).step()
    assert (decision.drain, decision.delete_pods) == (None, ())
    assert world.condition("Suspended") == ("Unknown", "Draining")


def test_a_resume_asks_for_the_certificates_of_the_pods_that_it_makes():
    """Somebody may have deleted one while the job was suspended; those that exist answer 409."""
    decision = suspended().edit(suspend=False).step()
    assert decision.certificates == ("driver", "pool:sim", "pool:train")
    assert not decision.renew_certificates


SAVED = {"plan_revision": 1, "step": 57, "checkpoint_uri": "/c/b0-40", "checkpoint_step": 40}
NOT_SAVED = "without a new checkpoint, the last one is of step 40"


def draining(**said):
    """At step 57, its last checkpoint of step 40."""
    world = ppo_job().with_spec(checkpoint={"uri": "/c"}).world().started().report(**(said or SAVED))
    world.step()
    world.edit(suspend=True).step()
    assert world.message("Suspended") == "waiting for a step boundary and a checkpoint"
    return world


def test_a_drain_that_brought_no_checkpoint_says_which_one_a_resume_begins_with():
    world = draining()
    world.report(state=DriverState.DRAINED, **SAVED).step()
    assert world.message("Suspended") == f"drained; pods are being deleted; {NOT_SAVED}"
    world.link = None
    for _ in range(2):
        world.step()
        assert world.condition("Suspended") == ("True", "SuspendedByUser")
        assert world.message("Suspended") == f"spec.suspend is true; no pods; {NOT_SAVED}"


def test_a_checkpoint_that_could_not_be_gone_on_from_saves_nothing():
    """That of step 57 was damaged: the gang went on from an older one, and has come to step 45 again."""
    world = draining(plan_revision=1, step=57, checkpoint_uri="/c/b0-57", checkpoint_step=57)
    again = {"plan_revision": 1, "step": 45, "checkpoint_uri": "/c/b0-57", "checkpoint_step": 57}
    world.report(state=DriverState.DRAINED, **again).step()
    assert world.message("Suspended").endswith(
        "; without a new checkpoint, and that of step 57 could not be gone on from"
    )


def test_a_checkpoint_that_the_driver_tells_of_as_it_exits_is_not_missed():
    world = draining()
    world.link = None
    words = '{"state": "Drained", "step": 58, "checkpointUri": "/c/b0-58", "checkpointStep": 58}'
    world.exited("math-driver-a1", 0, words=words).step()
    assert world.message("Suspended") == "drained; pods are being deleted"


def test_a_job_that_stands_on_the_checkpoint_of_its_earlier_life_loses_nothing():
    """Its new driver has restored it, and saved none of its own yet."""
    world = suspended(checkpoint={"uri": "/c"})
    world.edit(suspend=False).created().all_ready().report(plan_revision=1, step=7).step()
    world.edit(suspend=True).step()
    world.report(state=DriverState.DRAINED, plan_revision=1, step=7).step()
    assert world.message("Suspended") == "drained; pods are being deleted"


def test_a_job_that_never_wrote_a_checkpoint_names_none():
    world = draining(plan_revision=1, step=7)
    world.report(state=DriverState.DRAINED, plan_revision=1, step=7).step()
    assert world.message("Suspended").endswith("; without a checkpoint of its own so far")


def test_a_driver_that_ends_in_the_middle_of_its_drain_is_told_and_what_is_lost_with_it():
    world = draining()
    decision = world.exited("math-driver-a1", 137, reason="OOMKilled").later(2).step()
    assert [(e.reason, e.pod) for e in decision.events] == [("PodEnded", "math-driver-a1")]
    assert world.message("Suspended") == f"there is no running driver to drain; pods are being deleted; {NOT_SAVED}"
    assert world.status.restarts == ["2026-11-21T12:00:00Z math-driver-a1 Program"]
    first = world.status.first_failure
    assert first is not None
    assert (first.pod, first.reason) == ("math-driver-a1", "OOMKilled")
    assert world.step().events == ()
    assert world.message("Suspended") == f"spec.suspend is true; no pods; {NOT_SAVED}"


def test_a_worker_pod_that_ends_during_a_drain_is_told_once_and_not_replaced():
    world = draining()
    decision = world.exited("math-sim-1-a1", 137, reason="OOMKilled").step()
    assert [(e.reason, e.pod) for e in decision.events] == [("PodEnded", "math-sim-1-a1")]
    assert (decision.create_pods, decision.delete_pods) == ((), ())
    assert world.condition("Suspended") == ("Unknown", "Draining")
    assert world.step().events == ()


def test_pods_that_end_because_their_job_is_drained_are_no_failures():
    world = draining()
    for name in ("math-sim-0-a1", "math-sim-1-a1", "math-train-0-a1"):
        world.exited(name, 0)
    decision = world.step()
    assert decision.events == ()
    world.report(state=DriverState.DRAINED, plan_revision=1, step=57, checkpoint_uri="/c/b0-57", checkpoint_step=57)
    decision = world.step()
    assert decision.events == ()
    assert (world.status.restarts, world.status.first_failure) == ([], None)
    assert world.message("Suspended") == "drained; pods are being deleted"


def test_a_pod_that_the_operator_deletes_is_no_failure_although_it_is_killed():
    world = draining().report(state=DriverState.DRAINED, **SAVED)
    decision = world.decide()
    world.status = decision.status
    for name in world.names():
        world.deleted(name).exited(name, 143)
    world.link = None
    assert world.later(1).step().events == ()
    assert (world.status.restarts, world.status.first_failure) == ([], None)
