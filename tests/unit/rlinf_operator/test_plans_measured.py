"""Plans of the scheduler that follow what was measured: approval, what a status says of their steps, rolled back."""

from dataclasses import replace

import pytest

from rlinf_operator.reconcile import events
from tests.builders_plans import job, name, pin, plan, plan_conditions, running, store_statuses, told


def scheduled(revision, *, code="Profiled", based_on=1, seconds=2.0):
    return plan(
        revision,
        pods=2,
        source="Scheduler",
        reason={"code": code, "message": f"because of {code}"},
        basedOn={"revision": based_on},
        predicted={"periodSeconds": seconds},
    )


def measured(world, revision):
    found = dict(world.decide().plan_statuses).get(name(world, revision))
    return found.measured if found else None


def test_a_newer_plan_of_the_scheduler_is_put_in_force_by_itself():
    world = running(scheduled(2))
    assert told(world) == (("Prepare",), 2)


def test_a_plan_that_a_person_went_back_behind_does_not_return_by_an_unpin():
    world = running(scheduled(2), scheduled(3))
    world.report(plan_revision=3, plan_switches=2)
    store_statuses(world)
    pin(world, name(world, 2))
    assert told(world) == (("Prepare",), 2)
    world.report(plan_revision=2, plan_switches=3)
    assert told(world.edit(placement={"mode": "Auto"})) is None, "nor before its status says that it was superseded"
    store_statuses(world)
    assert told(world) is None
    world.edit(placement={"mode": "Auto", "apply": "OnApproval"}).step()
    assert "waits for approval" not in world.message("PlanApplied")
    world.edit(placement={"mode": "Auto"}).with_plan(scheduled(4, based_on=2))
    assert told(world) == (("Prepare",), 4), "what the scheduler has measured since"


def test_with_on_approval_it_waits_for_the_annotation_and_says_how_to_give_it():
    world = running(scheduled(2)).edit(placement={"apply": "OnApproval"})
    world.step()
    assert told(world) is None
    assert world.condition("PlanApplied") == ("True", "PlanInForce")
    said = "math-p2 waits for approval (kubectl annotate rlplan math-p2 rlinf.io/approved-by=YOU): because of Profiled"
    assert said in world.message("PlanApplied")
    world.plans = [replace(p, approved_by="ada") if p.revision == 2 else p for p in world.plans]
    assert told(world) == (("Prepare",), 2)


def test_of_several_that_wait_the_newest_that_was_approved_comes_into_force():
    world = running(scheduled(2), scheduled(3)).edit(placement={"apply": "OnApproval"})
    world.plans = [replace(p, approved_by="ada") if p.revision == 2 else p for p in world.plans]
    assert told(world) == (("Prepare",), 2)
    world.step()
    assert "math-p3 waits for approval" not in world.message("PlanApplied"), "of the one on its way is told first"


def test_a_job_begins_without_an_approval_and_one_that_is_pinned_needs_none():
    world = job().with_spec(placement={"apply": "OnApproval"}).world().planned().created().all_ready()
    world.report(plan_revision=0)
    assert told(world) == (("Prepare", "Commit"), 1)
    pinned = running(plan(2, pods=2)).edit(placement={"mode": "Pinned", "pin": "math-p2", "apply": "OnApproval"})
    assert told(pinned) == (("Prepare",), 2)


def test_what_steps_took_under_a_plan_stands_in_its_status_and_is_written_when_they_have_doubled():
    world = running(scheduled(2))

    def steps(count):
        world.report(plan_revision=2, plan_switches=2, plan_step_s=2.2, plan_step_spread_s=0.5, plan_steps=count)

    steps(4)
    assert measured(world, 2) is None
    steps(5)
    found = measured(world, 2)
    assert (found.period_seconds, found.steps, found.ratio_to_prediction) == (2.2, 5, 1.1)
    # 1.96 x 0.5 / sqrt(5) = 0.438 s of 2 s
    assert found.confidence95 == ["0.881", "1.319"]
    store_statuses(world)
    steps(9)
    assert name(world, 2) not in dict(world.decide().plan_statuses)
    steps(10)
    assert measured(world, 2).steps == 10
    store_statuses(world)
    steps(6)  # its driver is another: what is measured begins again
    assert measured(world, 2).steps == 6


def test_a_plan_that_promised_nothing_has_a_period_and_no_ratio():
    world = running()
    world.report(plan_revision=1, plan_switches=1, plan_steps=8, plan_step_s=1.5, plan_step_spread_s=0.1)
    found = measured(world, 1)
    assert (found.period_seconds, found.steps, found.ratio_to_prediction, found.confidence95) == (1.5, 8, 0.0, [])


def test_a_plan_that_is_taken_back_says_so_when_the_one_after_it_is_in_force():
    world = running(scheduled(2), scheduled(3, code="RolledBack", based_on=2))
    world.report(plan_revision=2, plan_switches=2)
    store_statuses(world)
    assert "RolledBack" not in plan_conditions(world, 2)
    world.report(plan_revision=3, plan_switches=3)
    assert plan_conditions(world, 2)["RolledBack"] == ("True", "RolledBack")
    assert plan_conditions(world, 2)["Superseded"] == ("True", "Superseded")
    assert "RolledBack" not in plan_conditions(world, 1)
    store_statuses(world)
    pin(world, name(world, 2)).report(plan_revision=2, plan_switches=4)
    assert plan_conditions(world, 2)["RolledBack"] == ("False", "PlanInForce"), "a person wants it again"
    assert plan_conditions(world, 2)["Superseded"] == ("False", "PlanInForce")


@pytest.mark.parametrize(
    ("steps", "wanted", "condition"),
    [
        (2, 3, ("Unknown", "Profiling")),
        (3, 3, ("True", "Profiled")),
        (0, 0, ("False", "ProfilingOff")),
        (9, 0, ("False", "ProfilingOff")),
    ],
)
def test_profiled_says_whether_the_plan_in_force_can_be_judged(steps, wanted, condition):
    world = running().edit(placement={"profileSteps": wanted})
    world.report(plan_revision=1, plan_steps=steps)
    world.step()
    assert world.condition("Profiled") == condition


@pytest.mark.parametrize(
    ("stays", "condition", "says"),
    [
        ("Best: no gain of 5%", ("True", "Profiled"), "steps of math-p1 are measured; no gain of 5%"),
        (
            "Unfit: role 'env' is silent: it has to say",
            ("False", "Unfit"),
            "the planner cannot improve on it: role 'env' is silent: it has to say",
        ),
        (
            "",
            ("True", "Profiled"),
            "steps of math-p1 are measured; the scheduler writes another plan where one pays",
        ),
    ],
)
def test_profiled_says_why_the_scheduler_leaves_the_plan_as_it_is(stays, condition, says):
    world = running()
    world.plans = [replace(plan, stays=stays) for plan in world.plans]
    world.report(plan_revision=1, plan_steps=3)
    world.step()
    assert world.condition("Profiled") == condition
    assert world.message("Profiled") == says
    world.report(plan_revision=0)
    world.step()
    assert world.condition("Profiled") == condition, "while the driver begins again"


def test_a_scheduler_that_is_away_is_a_condition_of_the_jobs_that_run_on():
    world = running()
    world.plans = [replace(plan, stays="Best: no gain of 5%") for plan in world.plans]
    world.report(plan_revision=1, plan_steps=3, scheduler_away=True)
    world.step()
    assert world.condition("Profiled") == ("Unknown", "SchedulerUnavailable")
    assert world.message("Profiled") == (
        "math-p1: the scheduler takes no profile; the job runs on, and keeps its plan until one is taken again"
    )
    assert world.condition("Running") == ("True", "Stepping")
    world.report(plan_revision=1, plan_steps=4)
    world.step()
    assert world.condition("Profiled") == ("True", "Profiled")


def test_what_was_profiled_stands_while_a_driver_begins_again():
    world = running()
    world.report(plan_revision=1, plan_steps=5)
    world.step()
    world.report(plan_revision=0)
    world.step()
    assert world.condition("Profiled") == ("True", "Profiled")


@pytest.mark.parametrize(("code", "kind"), [("Profiled", "Normal"), ("RolledBack", "Warning")])
def test_a_plan_that_comes_into_force_is_an_event_with_its_reason(code, kind):
    world = running(scheduled(2, code=code))
    before = world.status
    after = before.model_copy(update={"plan": before.plan.model_copy(update={"current": "math-p2"})})
    [event] = events.of_plan(before, after, world.observed().plans)
    assert (event.type, event.reason) == (kind, f"Plan{code}")
    assert event.message == f"math-p2 is in force instead of math-p1: because of {code}"
    assert events.of_plan(before, before, world.observed().plans) == ()
    begun = before.model_copy(update={"plan": before.plan.model_copy(update={"current": ""})})
    assert events.of_plan(begun, before, world.observed().plans) == ()
