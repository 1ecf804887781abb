"""Plans that a person pins on a running job: which one is in force, what the driver is told, what stands where."""

from dataclasses import replace

import pytest

from rlinf_api.conditions import Reason
from rlinf_api.job import RLJobSpec
from rlinf_api.plan import RLPlanStatus
from rlinf_api.report import DriverState
from rlinf_operator.reconcile import plans
from tests.builders import World
from tests.builders_plans import job, name, pin, plan, plan_conditions, reason_of, running, store_statuses, told


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


@pytest.mark.parametrize("of", ["another object", "this one"])
def test_a_plan_that_is_written_anew_under_its_name_is_not_failed_by_what_the_driver_said_of_the_one_before(of):
    world = running(plan(2))
    pin(world, name(world, 2))
    world.plans = [replace(p, uid="new") if p.revision == 2 else p for p in world.plans]
    uid = "old" if of == "another object" else "new"
    world.report(plan_revision=1, plan_failed=2, plan_failed_uid=uid, plan_message="no room")
    if of == "another object":
        order = world.decide().instruct
        assert order is not None
        assert (order.steps, order.plan.revision, order.uid) == (("Prepare",), 2, "new")
        assert plan_conditions(world, 2) == {}
    else:
        assert told(world) is None
        assert plan_conditions(world, 2) == {"Failed": ("True", "PrepareFailed")}


@pytest.mark.parametrize("of", ["another object", "this one", "a driver that says no uid"])
def test_a_plan_that_is_written_anew_while_it_is_prepared_is_prepared_anew_and_not_committed_as_it_was(of):
    world = running(plan(2))
    pin(world, name(world, 2))
    world.plans = [replace(p, uid="new") if p.revision == 2 else p for p in world.plans]
    uid = {"another object": "old", "this one": "new"}.get(of, "")
    for said, steps in (({"plan_preparing": 2}, None), ({"plan_prepared": 2}, ("Commit",))):
        world.report(plan_revision=1, plan_pending_uid=uid, **said)
        order = world.decide().instruct
        if of == "another object":
            assert order is not None
            assert (order.steps, order.plan.revision, order.uid) == (("Prepare",), 2, "new")
            assert plan_conditions(world, 2) == {}
        else:
            assert (order and order.steps) == steps
    assert ("Prepared" in plan_conditions(world, 2)) == (of != "another object")


@pytest.mark.parametrize("of", ["another object", "this one", "a driver that says no uid"])
def test_a_plan_that_is_written_anew_while_it_is_in_force_is_not_the_one_that_the_driver_executes(of):
    world = running(plan(2))
    pin(world, name(world, 2)).step()
    world.plans = [replace(p, uid="old") if p.revision == 2 else p for p in world.plans]
    world.report(plan_revision=2, plan_switches=2, plan_uid="old").step()
    store_statuses(world)
    pods = set(world.pods)
    world.plans = [replace(p, uid="new", status=RLPlanStatus()) if p.revision == 2 else p for p in world.plans]
    uid = {"another object": "old", "this one": "new"}.get(of, "")
    world.report(plan_revision=2, plan_switches=2, plan_uid=uid)
    decision = world.decide()
    told = plan_conditions(world, 2)
    if of == "another object":
        assert told == {}
        said = next(c.message for c in decision.status.conditions if c.type == "PlanApplied")
        assert "the driver executes revision 2 as it was before it was written anew; give it another revision" in said
        assert (decision.delete_pods, decision.instruct) == ((), None), "who works under the one before stays"
    else:
        assert told["Applied"] == ("True", "PlanInForce")
    assert set(world.pods) == pods


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


@pytest.mark.parametrize("code", [1, 64])
@pytest.mark.parametrize("heard", ["nothing", "a driver without a plan"])
def test_who_has_not_heard_which_plan_is_in_force_fails_none_for_a_pod_that_ended(code, heard):
    """An operator that begins: the driver may have put in force meanwhile what the status calls on its way."""
    world = running(plan(2, pods=3))
    pin(world, name(world, 2)).step()
    world.all_ready()
    (_, extra) = [pod for pod in world.pods if "-sim-1-" in pod or "-sim-2-" in pod]
    world.exited(extra, code, words="no such image folder")
    world.link = None
    if heard != "nothing":
        world.report(state=DriverState.WAITING, plan_revision=0)
    for _ in range(2):
        _, report = world.observed().driver_of(world.status.life)
        choice = plans.choose(world.observed(), RLJobSpec.model_validate(world.manifest["spec"]), report)
        assert choice.failed is None
        assert choice.pending is not None
        assert choice.pending.name == name(world, 2)
        assert choice.pods()["sim"] == 3
        decision = world.step()
        assert (decision.plan_statuses, decision.delete_pods, decision.create_pods) == ((), (), ())
        assert (world.status.restarts, extra in world.pods) == ([], True), "nor is it judged before that is clear"
        assert not any(c.type == "Failed" for c in world.status.conditions)


def test_a_pod_that_ended_before_the_driver_was_heard_is_judged_by_what_it_says():
    def unheard() -> tuple[World, str]:
        world = running(plan(2, pods=2))
        pin(world, name(world, 2)).step()
        (extra,) = [pod for pod in world.all_ready().pods if "-sim-1-" in pod]
        world.exited(extra, 1).link = None
        world.step()
        return world, extra

    world, extra = unheard()
    world.report(state=DriverState.RUNNING, plan_revision=1)
    assert "ended with exit code 1" in str(dict(world.decide().plan_statuses)[name(world, 2)])
    world, extra = unheard()
    world.report(state=DriverState.RUNNING, plan_revision=2, plan_switches=2)
    world.step()
    assert "Failed" not in plan_conditions(world, 2)
    assert [entry.split()[1] for entry in world.status.restarts] == [extra], "a worker of the plan in force"


def test_a_pod_that_ended_fails_its_plan_where_no_driver_is_there_to_say_that_it_is_in_force():
    """What else it has may be in the way of the driver's next pod."""
    world = running(plan(2, pods=2))
    pin(world, name(world, 2)).step()
    (extra,) = [pod for pod in world.all_ready().pods if "-sim-1-" in pod]
    (driver,) = [pod for pod in world.pods if "driver" in pod]
    world.exited(extra, 1).vanished(driver)
    world.link = None
    assert plan_conditions(world, 2) == {"Failed": ("True", "PrepareFailed")}


@pytest.mark.parametrize("driver", ["is at work", "is gone"])
def test_a_plan_whose_pod_finds_no_node_fails_without_a_report_only_where_no_driver_is_at_work(driver):
    """It may hold the nodes that the driver's next pod needs."""
    world = running(plan(2, pods=2, source="Scheduler", reason={"code": "Drift"}))
    world.step()
    (extra,) = [pod for pod in world.pods if "-sim-1-" in pod]
    world.waiting(extra, unschedulable="0/3 nodes are available").later(world.settings.pods_ready_deadline_s + 1)
    world.link = None
    if driver == "is gone":
        (pod,) = [pod for pod in world.pods if "driver" in pod]
        world.vanished(pod)
    found = plan_conditions(world, 2)
    assert found == ({"Failed": ("True", "Unschedulable")} if driver == "is gone" else {})


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
    assert (order.steps, order.plan.revision, order.switches) == (("Prepare", "Commit"), 2, 2)


def test_a_job_whose_pin_does_not_exist_waits_for_it_and_asks_for_no_other():
    world = pin(job().world(), "by-hand")
    decision = world.step()
    assert decision.request_plan == ""
    assert decision.create_pods == ()
    assert reason_of(world, "PlanApplied") == Reason.PIN_NOT_FOUND


def test_a_suspended_job_does_not_say_that_a_plan_is_on_its_way():
    world = running(plan(2, pods=2))
    pin(world, name(world, 2)).step()
    assert world.condition("PlanApplied") == ("Unknown", "PlanPending")
    world.edit(suspend=True).step()
    assert world.condition("PlanApplied") == ("Unknown", "PlanPending"), "its driver is still at work"
    world.report(state=DriverState.DRAINED, plan_revision=1).step()
    world.link = None
    for _ in range(2):
        world.step()
        assert world.condition("PlanApplied") == ("False", "Stopped")
        assert world.message("PlanApplied") == "math-p1 was its plan; math-p2 was on its way"
        assert (world.status.plan.current, world.status.plan.pending) == (name(world, 1), "")
    world.edit(suspend=False).created()
    assert world.condition("PlanApplied") == ("Unknown", "PlanPending")
    assert (world.status.plan.current, world.status.plan.pending) == (name(world, 1), name(world, 2))


def test_a_suspended_job_names_the_plan_that_it_last_executed():
    world = running()
    world.edit(suspend=True).step()
    world.report(state=DriverState.DRAINED, plan_revision=1).step()
    world.link = None
    world.step()
    assert world.condition("PlanApplied") == ("True", "PlanInForce")


def test_a_job_that_is_suspended_while_it_asks_for_a_plan_asks_no_more():
    world = job().world()
    world.status = world.decide().status
    assert world.condition("PlanApplied") == ("Unknown", "WaitingForPlan")
    world.edit(suspend=True).step()
    assert world.condition("PlanApplied") == ("False", "Stopped")


def test_a_job_that_fails_with_a_plan_on_its_way_does_not_wait_for_it():
    world = running(plan(2, pods=2))
    pin(world, name(world, 2)).edit(activeDeadlineSeconds=60).step()
    world.link = None
    world.later(61).step()
    assert world.condition("Failed") == ("True", "DeadlineExceeded")
    assert world.condition("PlanApplied") == ("False", "Stopped")
    assert world.status.plan.pending == ""


def test_a_plan_that_was_superseded_is_not_written_again_with_each_further_switch():
    world = running(plan(2), plan(3))
    for revision in (2, 3):
        pin(world, name(world, revision)).report(
            state=DriverState.RUNNING, plan_revision=revision, plan_switches=revision
        )
        world.step()
        written = {found for found, _ in world.decide().plan_statuses}
        store_statuses(world)
    assert written == {name(world, 2), name(world, 3)}
