"""A plan in force that an edited spec no longer allows, or whose object is gone: it keeps its pods until another is in
force."""

from typing import Any

import pytest

from rlinf_api.conditions import Reason
from rlinf_api.report import DriverState
from rlinf_operator.reconcile import events, outcome
from rlinf_operator.reconcile.outcome import Answers
from tests.builders import World
from tests.builders_plans import (
    ELASTIC,
    job,
    name,
    pin,
    plan,
    plan_conditions,
    reason_of,
    running,
    store_statuses,
    told,
)


def lowered(world: World, *, most: int = 1, **placement: str) -> World:
    pools = [{**ELASTIC[0], "pods": {"min": 1, "max": most}}, ELASTIC[1]]
    return world.edit(pools=pools, **({"placement": placement} if placement else {}))


def wide() -> World:
    """At work under revision 2, with two pods of pool sim."""
    world = running(plan(2, pods=2))
    pin(world, name(world, 2)).step()
    world.all_ready().report(state=DriverState.RUNNING, plan_revision=2, plan_switches=2)
    world.step()
    store_statuses(world)
    return world


def sims(world: World) -> list[str]:
    return [pod.rpartition("math-")[2] for pod in world.names() if "-sim-" in pod]


def test_bounds_lowered_under_the_plan_in_force_take_no_pod_before_another_is_in_force():
    world = lowered(wide(), mode="Auto")
    decision = world.step()
    assert decision.delete_pods == (), "revision 1 fits, and is prepared; the driver still works with both pods"
    assert (world.status.plan.current, world.status.plan.pending) == (name(world, 2), name(world, 1))
    assert told(world) == (("Prepare",), 1)
    assert world.condition("PlanApplied") == ("Unknown", Reason.PLAN_PENDING)
    says = f"{name(world, 2)} stays in force meanwhile, though not allowed any more: it has 2 pods of pool 'sim', "
    assert says + "spec.pools[sim].pods allows 1" in world.message("PlanApplied")
    world.report(state=DriverState.RUNNING, plan_revision=2, plan_switches=2, plan_prepared=1)
    assert told(world) == (("Commit",), 1)
    assert world.step().delete_pods == ()
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_switches=3)
    world.step()
    assert sims(world) == ["sim-0-a1"]
    assert world.condition("PlanApplied") == ("True", Reason.PLAN_IN_FORCE)


def test_a_running_job_without_an_allowed_plan_asks_for_one_and_goes_on_meanwhile():
    world = wide()
    world.plans = [p for p in world.plans if p.revision == 2]
    decision = lowered(world, mode="Auto").decide()
    assert (decision.request_plan, decision.highest_revision, decision.delete_pods) == ("CapacityChanged", 2, ())
    before = world.status
    world.step()  # the plan is written
    assert world.condition("PlanApplied") == ("Unknown", Reason.PLAN_NOT_ALLOWED)
    (told_of,) = [e for e in events.of_transition(before, world.status) if e.reason == "PlanNotAllowed"]
    assert told_of.type == "Warning"
    assert "it has 2 pods of pool 'sim', spec.pools[sim].pods allows 1; another is asked for" in told_of.message
    decision = world.step()
    assert (told(world), decision.delete_pods) == ((("Prepare",), 3), ())
    assert (world.status.plan.current, world.status.plan.pending) == (name(world, 2), name(world, 3))
    assert not world.decide().request_plan


def test_plans_that_fail_one_after_the_other_are_not_asked_for_without_end():
    world = wide()
    world.plans = [p for p in world.plans if p.revision == 2]
    lowered(world, mode="Auto")
    asked = 0
    for _ in range(30):
        decision = world.step()
        asked += bool(decision.request_plan)
        newest = max(p.revision for p in world.plans)
        failed: dict[str, Any] = {"plan_failed": newest, "plan_message": "no room"} if newest > 2 else {}
        world.report(state=DriverState.RUNNING, plan_revision=2, plan_switches=2, **failed)
        store_statuses(world)
    assert 1 <= asked <= 8
    assert world.condition("PlanApplied") == ("False", Reason.PLAN_FAILED)
    assert "plans in a row could not be used" in world.message("PlanApplied")
    assert "no room" in world.message("PlanApplied")
    assert len(sims(world)) == 2


def test_a_pinned_plan_that_is_no_longer_allowed_stays_in_force_and_its_lost_pods_come_back():
    world = lowered(wide())
    world.step()
    assert world.condition("PlanApplied") == ("False", Reason.PIN_REFUSED)
    assert "which is pinned, is not allowed any more: it has 2 pods of pool 'sim'" in world.message("PlanApplied")
    assert f"{name(world, 2)} stays in force" in world.message("PlanApplied")
    assert told(world) is None
    world.vanished(f"{world.job.name}-sim-1-a2").later(1)
    world.step()
    assert sims(world) == ["sim-0-a1", "sim-1-a3"]
    assert not world.decide().request_plan, "a person chose"


@pytest.mark.parametrize("mode", [{"mode": "Auto"}, {}], ids=["auto", "pinned"])
def test_a_deleted_plan_stays_in_force_and_its_lost_pods_come_back(mode):
    world = wide()
    world.plans = [p for p in world.plans if p.revision == 1]
    if mode:
        world.edit(placement=mode)
    world.vanished(f"{world.job.name}-sim-1-a2").later(1)
    decision = world.step()
    assert decision.delete_pods == ()
    assert sims(world) == ["sim-0-a1", "sim-1-a3"]
    assert world.status.plan.current == name(world, 2)
    assert f"{name(world, 2)} stays in force" in world.message("PlanApplied")
    if not mode:
        assert reason_of(world, "PlanApplied") == Reason.PIN_NOT_FOUND
        assert told(world) is None
        return
    assert "its object is gone" in world.message("PlanApplied")
    assert told(world) == (("Prepare",), 1)
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_switches=3).all_ready()
    world.step()
    assert sims(world) == ["sim-0-a1"]


def test_the_last_plan_that_is_deleted_is_asked_for_again_under_another_revision():
    """Under the same one a plan for edited bounds would pass for the plan that the driver executes."""
    world = wide()
    world.plans.clear()
    decision = world.edit(placement={"mode": "Auto"}).decide()
    assert (decision.request_plan, decision.highest_revision) == ("CapacityChanged", 2)
    assert (decision.create_pods, decision.delete_pods) == ((), ())


@pytest.mark.parametrize("gone", [True, False], ids=["deleted", "not allowed"])
def test_nothing_is_taken_from_a_running_job_before_its_driver_is_heard_again(gone):
    """An operator that began a moment ago."""
    world = lowered(wide(), mode="Auto")
    if gone:
        world.plans = [p for p in world.plans if p.revision == 1]
    world.link = None
    decision = world.step()
    assert (decision.delete_pods, decision.instruct, decision.request_plan) == ((), None, "")
    assert world.status.plan.current == name(world, 2)


def test_a_driver_made_anew_is_told_the_plan_that_its_agents_hold_though_bounds_were_lowered():
    world = lowered(wide(), mode="Auto")
    world.report(state=DriverState.WAITING, plan_revision=0)
    order = world.decide().instruct
    assert order is not None
    assert (order.steps, order.plan.revision, order.switches) == (("Prepare", "Commit"), 2, 2)


def test_bounds_lowered_before_any_driver_had_a_plan_take_effect_at_once():
    """No node has room for a pod: the person lowers the pool."""
    pools = [{**ELASTIC[0], "pods": 2}, ELASTIC[1]]
    world = job().with_spec(pools=pools).world().planned().created()
    assert len(sims(world)) == 2
    lowered(world)
    world.step()
    world.step()
    assert sims(world) == ["sim-0-a1"]
    assert world.status.plan.current == name(world, 2)


def test_a_plan_that_came_into_force_though_it_was_given_up_is_as_good_as_any():
    """A driver finished what the one before it had told its agents, after a pod of the plan had ended."""
    world = running(plan(2, pods=2))
    pin(world, name(world, 2)).step()
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_failed=2, plan_message="a pod of it ended")
    store_statuses(world)
    world.report(state=DriverState.RUNNING, plan_revision=2, plan_switches=2)
    assert plan_conditions(world, 2)["Failed"] == ("False", "PlanInForce")
    world.step()
    assert world.status.plan.current == name(world, 2)
    assert world.condition("PlanApplied") == ("True", Reason.PLAN_IN_FORCE)
    assert any("sim-1" in pod for pod in world.pods)


def test_a_job_that_ends_under_a_plan_that_is_not_allowed_ended_under_a_plan_in_force():
    world = lowered(wide(), mode="Auto")
    world.step()
    assert world.condition("PlanApplied") == ("Unknown", Reason.PLAN_PENDING)
    world.report(state=DriverState.COMPLETE, plan_revision=2, plan_switches=2)
    world.step()
    assert world.condition("PlanApplied") == ("True", Reason.PLAN_IN_FORCE)
    assert (world.status.plan.current, world.status.plan.pending) == (name(world, 2), "")


def test_a_resumed_job_begins_with_a_plan_that_is_allowed():
    world = wide()
    world.edit(suspend=True)
    world.report(state=DriverState.DRAINED, plan_revision=2, plan_switches=2)
    for _ in range(3):
        world.step()
    assert not world.pods
    world.link = None
    lowered(world, mode="Auto").edit(suspend=False)
    for _ in range(3):
        world.step()
    assert len(sims(world)) == 1
    assert world.status.plan.current == name(world, 1)


def test_a_pool_that_the_spec_no_longer_has_does_not_stop_the_pass():
    world = wide()
    smaller = [{**ELASTIC[0], "name": "other"}, ELASTIC[1]]
    world.edit(pools=smaller, placement={"mode": "Auto"})
    decision = world.step()
    assert decision.request_plan == "CapacityChanged"


def test_what_no_plan_could_be_made_for_leaves_a_running_job_running():
    world = wide()
    before = world.condition("Running")
    decision = lowered(world, mode="Auto").decide()
    infeasible = Answers(infeasible=("role 'env' needs 9 workers",))
    answered = outcome.status_after(infeasible, world.observed(), decided=decision.status, now=world.now)
    said = {c.type: (c.status, c.reason) for c in answered.conditions}
    assert said["Valid"] == ("False", Reason.INFEASIBLE)
    assert said["Running"] == before
    world.plans = [p for p in world.plans if p.revision == 2]
    world.status = answered.model_copy(
        update={
            "conditions": [
                c.model_copy(update={"observed_generation": world.manifest["metadata"]["generation"]})
                for c in answered.conditions
            ]
        }
    )
    decision = world.step()
    assert decision.request_plan == "", "the same spec has the same answer"
    assert world.condition("Valid") == ("False", Reason.INFEASIBLE)
    world.edit(seed=0)
    assert world.decide().request_plan == "CapacityChanged"
