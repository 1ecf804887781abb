"""Plans that a person pins on a running job: which one is in force, what the driver is told, what stands where."""

from dataclasses import replace
from typing import Any

import pytest

from rlinf_api.conditions import Reason
from rlinf_api.plan import RLPlanSpec
from rlinf_api.report import DriverState
from rlinf_operator.reconcile import events, outcome
from rlinf_operator.reconcile.outcome import Answers
from tests.builders import JobBuilder, World, plan_of, ppo_job

ELASTIC: list[dict[str, Any]] = [
    {"name": "sim", "roles": ["env", "rollout"], "pods": {"min": 1, "max": 3}, "slots": {"perPod": 4}},
    {"name": "train", "roles": ["actor"], "pods": 1, "slots": {"perPod": 1}},
]


def job() -> JobBuilder:
    return ppo_job().with_spec(
        pools=ELASTIC,
        roles=[
            {"name": "env", "kind": "gymnasium", "workers": {"min": 1, "max": 8}},
            {"name": "rollout", "kind": "torch"},
            {"name": "actor", "kind": "fsdp"},
        ],
    )


def plan(revision: int, *, pods: int = 1, uid: str = "", **fields: Any) -> RLPlanSpec:
    value = plan_of(job()).model_dump(mode="json", by_alias=True)
    value |= {"revision": revision, "source": "User", "reason": {"code": "Pinned", "message": "by hand"}, **fields}
    value["pools"] = [{"name": "sim", "pods": pods}, {"name": "train", "pods": 1}]
    if uid:
        value["job"]["uid"] = uid
    return RLPlanSpec.model_validate(value)


def running(*plans: RLPlanSpec) -> World:
    """At work under revision 1, with further plans lying there."""
    world = job().world().planned().created().all_ready().report(state=DriverState.RUNNING, plan_revision=1)
    world.step()
    for found in plans:
        world.with_plan(found)
    return world


def pin(world: World, name: str) -> World:
    return world.edit(placement={"mode": "Pinned", "pin": name})


def name(world: World, revision: int) -> str:
    return f"{world.job.name}-p{revision}"


def reason_of(world: World, kind: str) -> str:
    return world.condition(kind)[1]


def told(world: World) -> tuple[tuple[str, ...], int] | None:
    order = world.decide().instruct
    return (order.steps, order.revision) if order else None


def plan_conditions(world: World, revision: int) -> dict[str, tuple[str, str]]:
    found = dict(world.decide().plan_statuses).get(name(world, revision))
    return {c.type: (c.status, c.reason) for c in found.conditions} if found else {}


def store_statuses(world: World) -> None:
    for found, status in world.decide().plan_statuses:
        world.plans = [replace(p, status=status) if p.name == found else p for p in world.plans]


def test_a_plan_that_a_person_wrote_is_not_used_before_it_is_pinned():
    world = running(plan(2))
    assert told(world) is None
    assert told(pin(world, name(world, 2))) == (("Prepare",), 2)


def test_a_pinned_plan_is_prepared_then_committed_then_in_force():
    world = running(plan(2))
    pin(world, name(world, 2))
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_preparing=2, plan_message="waiting for worker env/3")
    assert told(world) is None
    world.step()
    assert reason_of(world, "PlanApplied") == Reason.PLAN_PENDING
    assert "waiting for worker env/3" in world.message("PlanApplied")
    assert (world.status.plan.current, world.status.plan.pending) == (name(world, 1), name(world, 2))
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_prepared=2)
    assert told(world) == (("Commit",), 2)
    assert plan_conditions(world, 2) == {"Prepared": ("True", "Prepared")}
    world.report(state=DriverState.RUNNING, plan_revision=2, plan_switches=2, plan_pause_s=0.04)
    assert told(world) is None
    assert plan_conditions(world, 2)["Applied"] == ("True", "PlanInForce")
    assert plan_conditions(world, 1)["Superseded"] == ("True", "Superseded")
    world.step()
    assert (world.status.plan.current, world.status.plan.pending, world.status.plan.switches) == (name(world, 2), "", 2)
    assert "the change to it took 0.040 s" in world.message("PlanApplied")


def test_a_pool_grows_before_and_shrinks_after_the_commit():
    world = running(plan(2, pods=2), plan(3))
    before = set(world.pods)
    pin(world, name(world, 2))
    decision = world.step()
    assert [p["metadata"]["labels"]["rlinf.io/ordinal"] for p in decision.create_pods] == ["1"]
    assert reason_of(world, "PodsReady") == Reason.PODS_READY, "the job that runs lacks nothing"
    world.all_ready().report(state=DriverState.RUNNING, plan_revision=2, plan_switches=2)
    world.step()
    assert set(world.pods) > before
    pin(world, name(world, 3))
    world.step()
    assert set(world.pods) > before, "until the commit the plan in force has its pods"
    world.report(state=DriverState.RUNNING, plan_revision=3, plan_switches=3)
    world.step()
    assert set(world.pods) == before


def test_a_preparation_that_failed_leaves_the_old_plan_and_says_why():
    world = running(plan(2, pods=2))
    pin(world, name(world, 2)).step()
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_failed=2, plan_message="not prepared within 600 s")
    assert told(world) is None
    assert plan_conditions(world, 2) == {"Failed": ("True", "PrepareFailed")}
    store_statuses(world)
    world.step()
    assert reason_of(world, "PlanApplied") == Reason.PIN_REFUSED
    assert "it failed: not prepared within 600 s; " in world.message("PlanApplied")
    assert f"{name(world, 1)} stays in force" in world.message("PlanApplied")
    assert not any("sim-1" in pod for pod in world.pods), "its pods go again"
    assert world.status.plan.current == name(world, 1)


def test_a_pod_that_only_the_next_plan_needs_costs_that_plan_and_not_the_job():
    world = running(plan(2, pods=2))
    pin(world, name(world, 2)).step()
    (extra,) = [pod for pod in world.pods if "-sim-1-" in pod]
    world.exited(extra, 64, words="no such image folder")
    decision = world.decide()
    assert "ended with exit code 64" in str(dict(decision.plan_statuses)[name(world, 2)])
    world.step()
    assert not any(c.type == "Failed" for c in world.status.conditions)
    assert world.status.restarts == []


@pytest.mark.parametrize(
    ("given", "reason", "says"),
    [
        ([], Reason.PIN_NOT_FOUND, "got no RLPlan of this name with label rlinf.io/job"),
        ([plan(2, uid="another")], Reason.PIN_REFUSED, "it is a plan of job uid another"),
        ([plan(2, pods=9)], Reason.PIN_REFUSED, "it has 9 pods of pool 'sim', spec.pools[sim].pods allows 3"),
        (
            [plan(2, channels=[{"name": "trajectories", "microBatch": 64, "depth": 64}])],
            Reason.PIN_REFUSED,
            "fewer than microBatch * depth = 4096",
        ),
    ],
)
def test_a_pin_that_cannot_be_used_is_a_sentence_and_changes_nothing(given, reason, says):
    world = running(*given)
    pin(world, name(world, 2))
    assert told(world) is None
    world.step()
    assert reason_of(world, "PlanApplied") == reason
    assert says in world.message("PlanApplied")
    assert f"{name(world, 1)} stays in force" in world.message("PlanApplied")


def test_an_older_plan_may_be_pinned_again():
    world = running(plan(2))
    pin(world, name(world, 2)).report(state=DriverState.RUNNING, plan_revision=2, plan_switches=2)
    store_statuses(world)
    world.step()
    pin(world, name(world, 1))
    assert told(world) == (("Prepare",), 1)
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_switches=3)
    world.step()
    assert world.status.plan.current == name(world, 1)
    assert plan_conditions(world, 1)["Superseded"] == ("False", "PlanInForce")
    assert plan_conditions(world, 2)["Applied"] == ("False", "Superseded")


def test_a_pin_that_is_taken_back_ends_the_preparation():
    world = running(plan(2))
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_prepared=2)
    assert told(world) == (("Abort",), 1)


def test_a_plan_that_is_in_force_stays_when_the_pin_goes():
    world = running(plan(2))
    world.report(state=DriverState.RUNNING, plan_revision=2, plan_switches=2)
    world.step()
    assert told(world) is None
    assert world.status.plan.current == name(world, 2)


def test_a_driver_that_finished_a_change_is_believed_before_the_status():
    world = running(plan(2))
    assert world.status.plan.current == name(world, 1)
    world.report(state=DriverState.RUNNING, plan_revision=2, plan_switches=2)
    assert told(world) is None
    world.step()
    assert world.status.plan.current == name(world, 2)


def test_a_new_driver_is_told_the_plan_in_force_and_how_many_there_have_been():
    world = running(plan(2))
    pin(world, name(world, 2)).report(state=DriverState.RUNNING, plan_revision=2, plan_switches=2)
    world.step()
    world.report(state=DriverState.WAITING, plan_revision=0)
    order = world.decide().instruct
    assert order is not None
    assert (order.steps, order.revision, order.switches) == (("Prepare", "Commit"), 2, 2)


def test_a_job_whose_pin_does_not_exist_waits_for_it_and_asks_for_no_other():
    world = pin(job().world(), "by-hand")
    decision = world.step()
    assert decision.request_plan == ""
    assert decision.create_pods == ()
    assert reason_of(world, "PlanApplied") == Reason.PIN_NOT_FOUND


# --- the plan in force is no longer allowed ---------------------------------------------------------------------------
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
    assert (order.steps, order.revision, order.switches) == (("Prepare", "Commit"), 2, 2)


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
    answered = outcome.status_after(
        Answers(infeasible=("role 'env' needs 9 workers",)),
        before=world.status, decided=decision.status, generation=2, now=world.now,
    )  # fmt: skip
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
