"""The ordinary life of a job: created, running, complete; suspended and resumed; over time."""

import pytest

from rlinf_api.conditions import JobCondition, Reason
from rlinf_api.job import RLJobStatus
from rlinf_api.report import DriverState
from rlinf_operator.settings import DEFAULTS
from tests.builders import ppo_job


def test_a_plan_is_requested_first_and_no_pod_is_made_without_one():
    world = ppo_job().world()
    decision = world.decide()
    assert decision.request_plan == "Initial"
    assert not decision.create_pods
    assert decision.service is not None
    assert decision.certificates == ("driver", "pool:sim", "pool:train")
    assert decision.write_config


def test_driver_and_workers_are_created_all_at_once_under_attempt_1():
    world = ppo_job().world().planned()
    decision = world.decide()
    made = [p["metadata"]["name"] for p in decision.create_pods]
    assert sorted(made) == ["math-driver-a1", "math-sim-0-a1", "math-sim-1-a1", "math-train-0-a1"]
    assert decision.status.attempt == 1
    assert decision.status.plan.current == "math-p1"


def test_a_second_pass_over_the_same_world_changes_nothing():
    world = ppo_job().world().started()
    world.step()
    again = world.decide()
    assert (again.create_pods, again.delete_pods, again.events) == ((), (), ())
    assert again.status == world.status
    assert again.service is None
    assert not again.write_config


def test_pods_that_are_not_ready_are_named():
    world = ppo_job().world().created().all_ready()
    world.pods["math-sim-1-a1"]["status"] = {"phase": "Pending"}
    world.step()
    assert world.condition("PodsReady") == ("False", "PodsStarting")
    assert world.message("PodsReady") == "waiting for sim-1"


def test_pods_missing_past_the_deadline_are_named_with_their_node():
    world = ppo_job().world().created().all_ready()
    world.pods["math-sim-1-a1"]["status"] = {"phase": "Pending"}
    world.waiting("math-sim-1-a1", reason="ContainerCreating", message="volume")
    world.later(301).step()
    assert world.condition("PodsReady") == ("False", "PodsMissing")
    assert "math-sim-1-a1 (node n1)" in world.message("PodsReady")
    assert "ContainerCreating volume" in world.message("PodsReady")


def test_an_unschedulable_pod_shows_the_schedulers_sentence():
    world = ppo_job().world().created()
    world.waiting("math-train-0-a1", unschedulable="0/2 nodes are available: 2 Insufficient nvidia.com/gpu").step()
    assert world.condition("PodsReady") == ("False", "Unschedulable")
    assert "math-train-0-a1: 0/2 nodes are available" in world.message("PodsReady")


def test_a_missing_image_names_pod_and_remedy():
    world = ppo_job().world().created()
    world.waiting("math-sim-0-a1", reason="ImagePullBackOff", message="no such tag").step()
    assert world.condition("PodsReady") == ("False", "ImageUnavailable")
    assert "correct spec.pools[*].image" in world.message("PodsReady")


def test_the_driver_is_told_its_plan_whenever_it_reports_another():
    world = ppo_job().world().created().all_ready().report(state=DriverState.WAITING, plan_revision=0)
    decision = world.step()
    assert decision.instruct is not None
    assert (decision.instruct.plan.revision, decision.instruct.steps) == (1, ("Prepare", "Commit"))
    assert decision.instruct.target.address == "10.1.0.7:7070"
    assert world.condition("PlanApplied") == ("Unknown", "PlanPending")
    world.report(state=DriverState.RUNNING, plan_revision=1)
    decision = world.step()
    assert decision.instruct is None
    assert world.condition("PlanApplied") == ("True", "PlanInForce")
    assert [(name, s.conditions[0].type) for name, s in decision.plan_statuses] == [("math-p1", "Applied")]


def test_progress_comes_from_the_report():
    world = ppo_job().world().started()
    world.report(
        state=DriverState.RUNNING, plan_revision=1, step=40, steps=100, branch=2, step_seconds=1.5,
        metrics={"return_mean": 41.25, "b": 1.0}, checkpoint_uri="/c/b2-40", checkpoint_step=40,
    ).step()  # fmt: skip
    status = world.status
    assert (status.step, status.progress_percentage, status.estimated_remaining_seconds) == (40, 40, 90)
    assert (status.policy_version.branch, status.policy_version.number) == (2, 40)
    assert [(m.name, m.value) for m in status.metrics] == [("b", "1"), ("return_mean", "41.25")]
    assert status.checkpoint is not None
    assert status.checkpoint.uri == "/c/b2-40"
    assert world.condition("Running") == ("True", "Stepping")


def test_progress_alone_waits_for_its_interval_but_a_condition_does_not():
    world = ppo_job().world().started()
    world.step()
    world.progress_due = False
    world.report(state=DriverState.RUNNING, plan_revision=1, step=41)
    assert world.decide().status == world.status
    world.report(state=DriverState.RECOVERING, plan_revision=1, step=42, message="worker env/1 restarts")
    after = world.decide().status
    assert after.step == 42
    assert next(c for c in after.conditions if c.type == "Degraded").reason == "WorkerRestarting"


def test_what_stands_still_while_steps_go_on_without_some_is_no_restart():
    world = ppo_job().world().started()
    world.report(
        state=DriverState.RECOVERING, plan_revision=1, reason="Stalled", message="steps go on without env/1; x"
    )
    world.step()
    assert (world.condition("Degraded"), world.status.state) == (("True", "Stalled"), "Stalled")
    world.report(
        state=DriverState.RECOVERING, plan_revision=1, reason="Recovering", message="steps go on without env/1"
    )
    world.step()
    assert (world.condition("Degraded"), world.status.state) == (("True", "WorkerRestarting"), "Recovering")


def test_turns_that_go_by_without_an_item_degrade_a_job_that_runs():
    world = ppo_job().world().started()
    why = "two turns in a row of lease set 'all' passed without an item: env/0 content; rollout/0 wants"
    world.report(state=DriverState.RUNNING, plan_revision=1, reason="TurnsWithoutItems", message=why)
    world.step()
    assert world.condition("Degraded") == ("True", "TurnsWithoutItems")
    assert world.condition("Running") == ("True", "Stepping")
    world.report(state=DriverState.RUNNING, plan_revision=1, reason="Stepping")
    world.step()
    assert world.condition("Degraded") == ("False", "Healthy")


def test_a_report_of_an_older_driver_attempt_is_ignored():
    world = ppo_job().world().created().all_ready().report(attempt=0, state=DriverState.COMPLETE, plan_revision=1)
    world.step()
    assert world.condition("Running") == ("Unknown", "WaitingForDriver")


def test_complete_deletes_workers_and_keeps_the_driver_for_readers():
    world = ppo_job().with_spec(ttlSecondsAfterFinished=60).world().started()
    world.report(state=DriverState.COMPLETE, plan_revision=1, step=100)
    decision = world.step()
    assert world.condition("Complete") == ("True", "FlowFinished")
    assert sorted(d.name for d in decision.delete_pods) == ["math-sim-0-a1", "math-sim-1-a1", "math-train-0-a1"]
    assert world.names() == ["math-driver-a1"]
    world.exited("math-driver-a1", 0)
    assert not world.later(40).step().delete_pods
    assert not world.decide().delete_job
    assert world.later(21).decide().delete_job


def test_a_finished_jobs_driver_that_does_not_exit_is_deleted_after_its_grace():
    world = ppo_job().world().started().report(state=DriverState.COMPLETE, plan_revision=1)
    world.step()
    assert [d.name for d in world.later(31).step().delete_pods] == ["math-driver-a1"]


def test_a_driver_that_exited_0_completes_the_job_although_nobody_heard_it():
    world = ppo_job().world().started()
    world.link = None
    world.exited("math-driver-a1", 0, words='{"state": "Complete", "message": "100 steps are done"}').step()
    assert world.condition("Complete") == ("True", "FlowFinished")
    assert world.message("Complete") == "100 steps are done"


LAST = '{"state": "%s", "step": 100, "steps": 100, "branch": 2, "checkpointUri": "/c/b2-100", "checkpointStep": 100}'


@pytest.mark.parametrize("heard", [None, 60], ids=["nothing was heard", "an older report was"])
def test_an_ended_drivers_own_words_are_later_than_any_report(heard):
    world = ppo_job().world().started()
    world.link = None
    if heard is not None:
        world.report(
            state=DriverState.RUNNING, plan_revision=1, step=heard, steps=100, metrics={"return_mean": 7.0},
            checkpoint_uri="/c/b2-60", checkpoint_step=60,
        ).step()  # fmt: skip
    world.exited("math-driver-a1", 0, words=LAST % "Complete").step()
    status = world.status
    assert world.condition("Complete") == ("True", "FlowFinished")
    assert (status.step, status.policy_version.branch, status.policy_version.number) == (100, 2, 100)
    assert status.checkpoint is not None
    assert (status.checkpoint.uri, status.checkpoint.step) == ("/c/b2-100", 100)
    assert [m.name for m in status.metrics] == (["return_mean"] if heard else []), "what it does not say stays"


@pytest.mark.parametrize(
    "words",
    [
        "",
        "Traceback",
        '{"state": "Complete"}',
        '{"state": "Complete", "step": "x"}',
        '{"state": "Complete", "step": 0}',
    ],
)
def test_words_that_say_nothing_of_progress_change_none(words):
    world = ppo_job().world().started()
    world.report(state=DriverState.RUNNING, plan_revision=1, step=40, checkpoint_uri="/c", checkpoint_step=40).step()
    world.link = None
    world.exited("math-driver-a1", 0, words=words).step()
    assert world.condition("Complete") == ("True", "FlowFinished")
    assert world.status.step == 40
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.step == 40


def test_a_job_that_ends_before_its_first_status_could_be_written_says_what_it_was():
    """Twelve conflicts in a row last longer than a short job."""
    world = ppo_job().world().started()
    world.status = RLJobStatus()
    world.exited("math-driver-a1", 0).later(5).step()
    assert world.condition("Complete") == ("True", "FlowFinished")
    assert (world.status.attempt, world.status.start_time) == (1, "2026-11-21T12:00:00Z")


def test_a_drivers_last_words_fail_the_job_although_its_exit_code_asks_for_a_restart():
    world = ppo_job().world().started()
    world.link = None
    world.exited(
        "math-driver-a1", 1,
        words='{"state": "Failed", "reason": "TooManyRestarts", "message": "env/3 failed 21 times", "worker": 3}',
    ).step()  # fmt: skip
    assert world.condition("Failed") == ("True", "TooManyRestarts")
    assert world.status.first_failure is not None
    assert world.status.first_failure.worker == 3


def test_nothing_changes_what_is_once_complete():
    world = ppo_job().world().started().report(state=DriverState.COMPLETE, plan_revision=1)
    world.step()
    world.report(state=DriverState.FAILED, plan_revision=1).edit(suspend=True).later(5).step()
    assert world.condition("Complete") == ("True", "FlowFinished")


@pytest.mark.parametrize(("state", "said"), [("Complete", "Complete"), ("Failed", "Failed")])
def test_only_the_end_that_came_is_a_condition_so_that_its_column_alone_says_something(state, said):
    world = ppo_job().world().started()
    world.step()
    world.report(state=DriverState(state), plan_revision=1)
    world.step()
    assert [c.type for c in world.status.conditions if c.type in ("Complete", "Failed")] == [said]


def test_the_deadline_fails_the_job_and_deletes_every_pod():
    world = ppo_job().with_spec(activeDeadlineSeconds=100).world().started()
    world.step()
    assert world.later(50).decide().requeue_after_s == 50
    decision = world.later(51).step()
    assert world.condition("Failed") == ("True", "DeadlineExceeded")
    assert len(decision.delete_pods) == 4
    assert "activeDeadlineSeconds (100)" in world.message("Failed")


def test_the_deadline_of_a_job_that_gets_no_plan_runs():
    world = ppo_job().with_spec(activeDeadlineSeconds=60).world()
    decision = world.decide()
    world.status = decision.status  # the scheduler answered nothing
    assert not world.pods
    assert world.later(30).decide().requeue_after_s == 30
    world.later(31).step()
    assert world.condition("Failed") == ("True", "DeadlineExceeded")


def test_an_invalid_spec_is_answered_with_every_sentence_and_leaves_pods_alone():
    world = ppo_job().world().started()
    world.step()
    world.edit(flow={"name": "ppo", "setps": 3}, objective="Cheap")
    decision = world.step()
    assert world.condition("Valid") == ("False", "InvalidSpec")
    assert "spec.flow.setps: is not a field; did you mean 'steps'" in world.message("Valid")
    assert "spec.objective" in world.message("Valid")
    assert not decision.delete_pods
    assert world.condition("Running") == ("True", "Stepping")


def test_a_value_of_a_later_version_is_answered_never_ignored():
    world = ppo_job().with_spec(flow={"name": "ppo", "maxStaleness": 1}).world()
    decision = world.step()
    assert world.condition("Valid") == ("False", "NotSupportedYet")
    assert "spec.flow.maxStaleness" in world.message("Valid")
    assert not decision.request_plan
    assert world.condition("Running") == ("False", "NotSupportedYet")
    world.edit(flow={"name": "ppo"})
    world.step()
    assert world.condition("Running") == ("Unknown", "WaitingForPlan")


def test_a_job_that_is_being_deleted_is_left_to_its_owner_references():
    world = ppo_job().world().started()
    world.deleting = True
    decision = world.decide()
    assert (decision.create_pods, decision.delete_pods, decision.status) == ((), (), world.status)


def test_certificates_are_renewed_when_two_thirds_of_their_life_are_over():
    world = ppo_job().world().started()
    world.step()
    life_s = world.settings.certificate_life_s
    assert not world.later(life_s * 0.66).decide().renew_certificates
    decision = world.later(life_s * 0.01).decide()
    assert decision.renew_certificates
    assert decision.write_config
    assert decision.certificates == ("driver", "pool:sim", "pool:train")


def test_conditions_stand_in_the_order_in_which_a_job_reaches_them():
    world = ppo_job().world().started()
    world.step()
    order = [str(c) for c in JobCondition]
    kinds = [c.type for c in world.status.conditions]
    assert kinds == sorted(kinds, key=order.index)


def test_pods_that_get_ready_one_by_one_are_one_write_until_the_next_is_due():
    world = ppo_job().world().planned().created()
    first = sorted(world.pods)[0]
    world.ready(first)
    world.step()
    before = world.status
    world.progress_due = False
    world.ready(sorted(world.pods)[1])
    held = world.decide()
    assert held.status == before
    assert held.requeue_after_s is not None, "or nobody would look again"
    assert held.requeue_after_s <= DEFAULTS.progress_interval_s
    world.progress_due = True
    told = world.decide().status
    assert sum(pool.ready for pool in told.pools) == 1 + sum(pool.ready for pool in before.pools)
    world.progress_due = False
    world.all_ready()
    assert world.step().status != before, "that all are ready is told at once"


@pytest.mark.parametrize(
    "reason",
    [
        Reason.STEPPING,
        Reason.TURNS_WITHOUT_ITEMS,
        Reason.MEMORY_KEPT,
        Reason.LOGPROB_MISMATCH,
        Reason.NOTHING_LEARNT,
        Reason.STALLED,
    ],
)
def test_seconds_that_pass_in_a_slow_step_are_no_write_each(reason):
    """Five hundred jobs on a volume that hangs would be five hundred writes a second."""
    world = ppo_job().world().started()
    world.report(plan_revision=1, step=4, reason=reason, message="step 5 has run for 30 s (usual 1.0 s)").step()
    before = world.status
    world.progress_due = False
    for seconds in range(31, 41):
        world.report(plan_revision=1, step=4, reason=reason, message=f"step 5 has run for {seconds} s (usual 1.0 s)")
        assert world.step().status == before
    world.progress_due = True
    world.step()
    assert world.message("Running") == "step 5 has run for 40 s (usual 1.0 s)"
    world.progress_due = False
    world.report(state=DriverState.RECOVERING, plan_revision=1, message="worker env/0 is started again").step()
    assert world.condition("Running") == ("False", Reason.RECOVERING), "another reason is told at once"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            Reason.LOGPROB_MISMATCH,
            "engine and actor disagree on tokens of one policy: engine_kl is 0.4 in step 4, above 0.01",
        ),
        (Reason.NOTHING_LEARNT, "all groups of a step were dropped: empty_steps is 1 in step 4, above 0"),
    ],
)
def test_a_job_with_a_number_above_its_bound_is_degraded_and_runs_and_is_well_again(reason, words):
    world = ppo_job().world().started()
    world.report(plan_revision=1, step=4, reason=reason, message=words).step()
    assert world.condition("Degraded") == ("True", reason)
    assert world.condition("Running") == ("True", Reason.STEPPING)
    assert world.message("Degraded") == words
    world.report(plan_revision=1, step=5, reason=Reason.STEPPING).step()
    assert world.condition("Degraded") == ("False", Reason.HEALTHY)


def test_a_job_that_stands_still_is_degraded_and_runs():
    world = ppo_job().world().started()
    words = "worker rollout/0 has not moved for 14 s in phase step: span compute for 14 s"
    world.report(plan_revision=1, step=4, reason=Reason.STALLED, message=words).step()
    assert world.condition("Degraded") == ("True", Reason.STALLED)
    assert world.message("Degraded") == words
    assert world.condition("Running") == ("True", Reason.STEPPING)
    world.report(plan_revision=1, step=5).step()
    assert world.condition("Degraded") == ("False", Reason.HEALTHY)


def test_a_plan_that_was_begun_and_ended_while_the_operator_was_away_is_recorded_as_executed():
    world = ppo_job().world().created().all_ready()
    assert world.condition("PlanApplied") == ("Unknown", "PlanPending")
    world.report(state=DriverState.COMPLETE, plan_revision=1, step=100)
    decision = world.step()
    assert world.condition("Complete") == ("True", "FlowFinished")
    assert world.condition("PlanApplied") == ("True", "PlanInForce")
    assert [(name, [c.type for c in plan.conditions]) for name, plan in decision.plan_statuses] == [
        ("math-p1", ["Applied"])
    ]


def test_an_operator_that_died_between_the_ends_of_a_job_and_of_its_plan_leaves_the_second_to_the_next():
    world = ppo_job().world().created().all_ready()
    world.report(state=DriverState.COMPLETE, plan_revision=1, step=100).step()
    assert [(name, [(c.type, c.status) for c in plan.conditions]) for name, plan in world.decide().plan_statuses] == [
        ("math-p1", [("Applied", "True")])
    ]


def test_a_plan_that_no_driver_executed_is_not_said_to_have_been_in_force_as_its_job_ends():
    world = ppo_job().world().created().all_ready()
    world.report(state=DriverState.FAILED, plan_revision=0, reason="UserError", message="no").step()
    assert world.decide().plan_statuses == ()
