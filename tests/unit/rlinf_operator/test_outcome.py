"""What the answers to a pass' writes make of its status: refused children, a scheduler that is away, no plan."""

import pytest

from rlinf_api.conditions import JobCondition
from rlinf_operator.reconcile import outcome
from rlinf_operator.reconcile.outcome import Answers
from tests.builders import ppo_job

TRIED = "it is tried again"


def told(world, **answers):
    """What the answers changed in the status that was decided: conditions as text, other fields as they are."""
    decided = world.decide().status
    observed = world.observed()
    found = outcome.status_after(Answers(**answers), observed, decided=decided, now=world.now)
    before = {c.type: (c.status, c.reason, c.message) for c in decided.conditions}
    after = {c.type: (c.status, c.reason, c.message) for c in found.conditions}
    changed = {kind: said for kind, said in after.items() if before.get(kind) != said}
    fields = ("attempt", "life", "pools", "plan", "restarts", "step")
    return changed, {f: getattr(found, f) for f in fields if getattr(found, f) != getattr(decided, f)}


def new():
    return ppo_job().world()


def planned():
    return ppo_job().world().planned()


def running():
    world = ppo_job().world().created().all_ready()
    world.report(plan_revision=1, plan_switches=1, step=5).step()
    return world.later(10)


def test_nothing_is_answered_and_nothing_changes():
    assert told(running()) == told(new()) == ({}, {})


def test_a_job_that_waits_for_its_first_plan_says_why_there_is_none():
    assert told(new(), infeasible=("role 'a' is too large", "role 'b' too")) == (
        {
            JobCondition.VALID: ("False", "Infeasible", "role 'a' is too large; role 'b' too"),
            JobCondition.RUNNING: ("Unknown", "WaitingForPlan", "no plan is feasible: see Valid"),
        },
        {},
    )
    assert told(new(), scheduler_away="the scheduler gave no plan") == (
        {
            JobCondition.PLAN_APPLIED: ("Unknown", "SchedulerUnavailable", "the scheduler gave no plan"),
            JobCondition.RUNNING: ("Unknown", "SchedulerUnavailable", "the scheduler gave no plan"),
        },
        {},
    )


def test_a_job_at_work_goes_on_under_its_older_plan():
    assert told(running(), infeasible=("too large",)) == (
        {JobCondition.VALID: ("False", "Infeasible", "too large")}, {},
    )  # fmt: skip
    assert told(running(), scheduler_away="away") == (
        {JobCondition.PLAN_APPLIED: ("Unknown", "SchedulerUnavailable", "away")}, {},
    )  # fmt: skip


def test_a_driver_that_refuses_its_plan_is_quoted():
    assert told(running(), driver_refused="no") == (
        {JobCondition.PLAN_APPLIED: ("False", "PlanPending", "no")}, {},
    )  # fmt: skip


def test_of_first_pods_that_are_refused_neither_attempt_nor_counts_nor_plan_are_written():
    world = planned()
    changed, fields = told(world, writes_refused=("Pod a was refused", "Pod b was refused", "Pod c was refused"))
    assert changed == {JobCondition.PODS_READY: ("False", "PodsMissing", "Pod a was refused; and 2 more")}
    assert (fields["attempt"], fields["plan"].current) == (0, "")
    assert [(p.name, p.desired, p.slots) for p in fields["pools"]] == [("sim", 0, 0), ("train", 0, 0)]
    assert set(fields) == {"attempt", "plan", "pools"}


def test_of_a_successor_that_is_refused_its_predecessor_is_counted_and_its_attempt_is_not_given_out():
    world = running().exited("math-sim-0-a1", 1).vanished("math-sim-1-a1")
    decided = world.decide().status
    assert decided.attempt == 2
    assert len(decided.restarts) == 2
    changed, fields = told(world, writes_refused=("Pod a was refused",))
    assert changed == {JobCondition.PODS_READY: ("False", "PodsMissing", "Pod a was refused")}
    assert fields == {"attempt": 1, "restarts": ["2026-11-21T12:00:10Z math-sim-0-a1 Program"]}


def test_pods_that_make_room_are_entered_so_that_nobody_takes_them_for_lost():
    world = running()
    changed, fields = told(world, writes_refused=("no room",), makes_room=("math-sim-0", "math-sim-1"))
    text = "no room; 2 pods that are replaced go first, to make room"
    assert changed == {JobCondition.PODS_READY: ("False", "PodsMissing", text)}
    assert fields == {"restarts": [f"2026-11-21T12:00:10Z math-sim-{n} Stale" for n in (0, 1)]}


def test_a_full_quota_has_a_reason_of_its_own_and_says_how_many_pods_wait_for_it():
    changed, _ = told(planned(), writes_refused=("Pod a: exceeded quota",), untried=8, no_room=True, over_quota="x")
    assert changed == {JobCondition.PODS_READY: ("False", "QuotaExceeded", "Pod a: exceeded quota; and 8 more")}


def test_of_first_pods_that_are_left_to_the_next_pass_nothing_is_written_but_how_many():
    changed, fields = told(planned(), rest=1872)
    assert changed == {JobCondition.PODS_READY: ("False", "PodsStarting", "1872 pods are still to be made")}
    assert (fields["attempt"], fields["plan"].current) == (0, "")
    assert [(p.name, p.desired) for p in fields["pools"]] == [("sim", 0), ("train", 0)]


def test_pods_of_a_plan_on_its_way_that_are_refused_are_no_lack_of_the_job():
    world = running()
    changed, fields = told(world, late_refused=("Pod a was refused", "Pod b was refused"))
    text = " is on its way: Pod a was refused; and 1 more; math-p1 stays in force meanwhile"
    assert changed == {JobCondition.PLAN_APPLIED: ("Unknown", "PlanPending", text)}
    assert fields == {}


def test_a_resume_whose_pods_are_refused_is_still_suspended_and_in_its_earlier_life():
    world = running().edit(suspend=True)
    world.step()
    world.pods.clear()
    world.link = None
    world.later(1).step()
    world.later(1).edit(suspend=False)
    assert world.decide().status.life == 2
    changed, fields = told(world, writes_refused=("Pod a was refused",))
    assert changed[JobCondition.SUSPENDED][:2] == ("True", "SuspendedByUser")
    assert changed[JobCondition.PODS_READY] == ("False", "PodsMissing", "Pod a was refused")
    assert (fields["life"], fields["attempt"]) == (1, 1)
    assert [(p.name, p.desired) for p in fields["pools"]] == [("sim", 0), ("train", 0)]


@pytest.mark.parametrize("answers", [{"scheduler_away": "away"}, {"writes_refused": ("no",)}])
def test_a_condition_that_ends_as_it_stood_keeps_its_time(answers):
    world = new()
    world.status = outcome.status_after(
        Answers(**answers), world.observed(), decided=world.decide().status, now=world.now
    )
    before = world.status.conditions
    world.later(100)
    found = outcome.status_after(Answers(**answers), world.observed(), decided=world.decide().status, now=world.now)
    assert found.conditions == before
