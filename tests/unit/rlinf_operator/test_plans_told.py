"""Plans that come into force, fail, are pinned, edited away and deleted: whole, pass by pass."""

from dataclasses import replace
from pathlib import Path

from rlinf_api.conditions import Reason
from rlinf_api.report import DriverState
from rlinf_operator.reconcile import plans
from rlinf_operator.reconcile.plans import PlanChoice
from tests.builders_plans import ELASTIC, job, name, pin, plan, plan_conditions, running, store_statuses
from tests.stories import Story

STORIES = Path(__file__).parent / "stories"


def test_a_choice_wants_the_pods_of_both_plans_and_keeps_those_of_one_that_is_gone():
    world = running(plan(2, pods=2))
    first, second = world.observed().plans
    assert PlanChoice(current=first, pending=second).pods() == {"sim": 2, "train": 1}
    assert PlanChoice(current=second, pending=first).pods() == {"sim": 2, "train": 1}
    assert PlanChoice(current=second, pending=first).pods_in_force() == {"sim": 2, "train": 1}
    gone = replace(first, spec=None)
    assert PlanChoice(current=gone, pods_kept={"sim": 3}, pending=first).pods() == {"sim": 3, "train": 1}
    assert PlanChoice().pods() == {}


def chosen(world, *, report=None, fresh=False):
    observed = world.observed()
    return plans.choose(observed, job().with_spec(**world.manifest["spec"]).parsed(), report, fresh=fresh)


def test_a_choice_names_what_is_in_force_on_its_way_and_passed_over():
    world = running(plan(2, pods=2), plan(3, uid="other"))
    first, second, third = world.observed().plans
    bad = replace(third, problem=f"it is a plan of job uid other, this job's is {world.job.uid}")
    assert chosen(world) == PlanChoice(
        current=first, highest_revision=3, pin_reason=Reason.PLAN_IN_FORCE,
    )  # fmt: skip
    pin(world, name(world, 2))
    wanted = PlanChoice(current=first, pending=second, highest_revision=3, pin_reason=Reason.PLAN_IN_FORCE)
    assert chosen(world) == wanted
    pin(world, name(world, 9))
    text = (
        "spec.placement.pin names 'math-p9', got no RLPlan of this name with label rlinf.io/job: math; apply it or pin "
        "one of math-p1, math-p2"
    )
    found = chosen(world)
    assert (found.current, found.pending, found.pin_problem) == (first, None, text)
    assert (found.pin_reason, found.request) == (Reason.PIN_NOT_FOUND, "")
    pin(world, name(world, 3))
    found = chosen(world)
    assert found.pin_problem == f"RLPlan 'math-p3', which is pinned, cannot be used: {bad.problem}"
    assert found.pin_reason == Reason.PIN_REFUSED


def test_a_new_plan_is_prepared_committed_and_in_force_and_the_one_before_it_superseded():
    story = Story(running(plan(2, pods=2)))
    world = story.world
    story.step("a plan lies there")
    pin(world.later(5), name(world, 2))
    story.step("it is pinned")
    world.later(1).all_ready().report(plan_revision=1, plan_preparing=2, plan_message="waits for env/3")
    story.step("its pods are ready, and it is prepared")
    world.later(1).report(plan_revision=1, plan_prepared=2)
    story.step("it is prepared")
    world.later(1).report(plan_revision=2, plan_switches=2, plan_pause_s=0.0416)
    story.step("it is in force")
    pin(world.later(5), name(world, 1))
    story.step("the first is pinned again")
    world.later(1).report(plan_revision=1, plan_switches=3)
    story.step("the first is in force again")
    story.step("nothing is new")
    story.holds(STORIES / "plans.txt")


def test_a_plan_that_cannot_come_into_force_leaves_the_one_before_it_and_is_named():
    story = Story(running(plan(2, pods=2), plan(3, pods=3), plan(1, pods=2)))
    world = story.world
    pin(world.later(5), name(world, 2))
    story.step("it is pinned")
    world.later(1).all_ready().report(plan_revision=1, plan_preparing=2)
    story.step("it is prepared")
    world.later(1).report(plan_revision=1, plan_failed=2, plan_message="env/3 did not start")
    story.step("its preparation failed")
    world.later(1).edit(placement={"mode": "Auto"}).report(plan_revision=1, plan_prepared=2)
    story.step("the pin is taken back, the driver still has it prepared")
    pin(world.later(5), name(world, 3)).report(plan_revision=1)
    story.step("another is pinned")
    last = sorted(pod for pod in world.pods if "-sim-2-" in pod)[0]
    world.later(1).waiting(last, unschedulable="0/3 nodes")
    story.step("it has no room")
    world.later(1).exited(last, 3, words="cannot start")
    story.step("a pod that only it needs ends")
    story.holds(STORIES / "plans_failed.txt")


def test_a_plan_of_the_scheduler_whose_pod_finds_no_node_fails_by_that_name_and_a_persons_waits():
    planned = plan(2, pods=2).model_copy(update={"source": "Scheduler"})
    for wanted in (planned, plan(2, pods=2)):
        world = running(wanted)
        if wanted.source == "User":
            pin(world, "math-p2")
        world.later(1).step()
        [added] = [pod for pod in world.pods if "-sim-1-" in pod]
        world.waiting(added, unschedulable="0/3 nodes are available: 3 Insufficient cpu").later(299).step()
        assert plan_conditions(world, 2) == {}
        world.later(2)
        if wanted.source == "User":
            assert plan_conditions(world, 2) == {}
            continue
        assert plan_conditions(world, 2) == {"Failed": ("True", "Unschedulable")}
        status = dict(world.decide().plan_statuses)["math-p2"]
        assert status.conditions[-1].message == (
            f"pod {added}, which it adds, finds no node: 0/3 nodes are available: 3 Insufficient cpu"
        )
        store_statuses(world)
        world.step()
        assert added not in {name for name, pod in world.pods.items() if "deletionTimestamp" not in pod["metadata"]}


def test_a_plan_in_force_that_an_edit_forbids_or_somebody_deletes_stays_until_another_is_there():
    story = Story(running())
    world = story.world
    roles = [dict(role) for role in world.manifest["spec"]["roles"]]
    roles[0]["workers"] = {"min": 1, "max": 2}
    world.later(5).edit(roles=roles)
    story.step("bounds are lowered, and another is asked for")
    story.step("the other is there")
    world.later(1).report(plan_revision=1, plan_prepared=2)
    story.step("it is prepared")
    world.later(1).report(plan_revision=2, plan_switches=2)
    story.step("it is in force")
    world.later(1).plans.clear()
    story.step("somebody deletes all plans")
    story.step("another is there")
    world.later(1).report(state=DriverState.COMPLETE, plan_revision=2, plan_switches=2)
    story.step("the job is complete")
    story.holds(STORIES / "plans_forbidden.txt")


def heard(world, **fields):
    world.report(**fields)
    assert world.link is not None
    return world.link.report


def test_the_plan_in_force_when_a_driver_begins_is_what_its_agents_hold_though_bounds_allow_it_no_more():
    world = pin(running(plan(2, pods=2)), "math-p2").report(plan_revision=2, plan_switches=2)
    world.step()
    world.edit(pools=[{**ELASTIC[0], "pods": 1}, ELASTIC[1]], placement={"mode": "Auto"})
    found = chosen(world, report=heard(world, state=DriverState.WAITING))
    assert found.current is not None
    assert (found.current.name, found.current.spec) == ("math-p2", world.plans[1].spec)
    assert found.not_allowed == "it has 2 pods of pool 'sim', spec.pools[sim].pods allows 1"


def test_a_driver_that_begins_is_told_the_plan_in_force_unless_it_has_one_or_has_ended():
    world = running()
    target = plans.target_of(world.job, next(p for p in world.observed().pods if p.component == "driver"))
    assert target is not None
    assert (target.job_uid, target.attempt, target.address) == (world.job.uid, 1, "10.1.0.7:7070")
    choice = chosen(world)
    assert plans.instruct(choice, report=None, target=target, switches=4) is None
    for state, tells in (
        (DriverState.WAITING, True), (DriverState.RUNNING, True), (DriverState.RECOVERING, True),
        (DriverState.COMPLETE, False), (DriverState.FAILED, False), (DriverState.DRAINED, False),
    ):  # fmt: skip
        report = heard(world, state=state)
        order = plans.instruct(choice, report=report, target=target, switches=4)
        assert (order is not None) is tells, state
        if order is not None:
            assert (order.steps, order.plan, order.switches) == (("Prepare", "Commit"), choice.current.spec, 4)
            assert order.target == target
        assert plans.instruct(choice, report=report, target=None, switches=4) is None
    for fields, steps in (
        ({"plan_revision": 1}, None),
        ({"plan_revision": 1, "plan_preparing": 2}, ("Abort",)),
        ({"plan_revision": 1, "plan_prepared": 2}, ("Abort",)),
    ):
        order = plans.instruct(choice, report=heard(world, **fields), target=target, switches=4)
        assert (order.steps if order else None) == steps
    assert plans.target_of(world.job, None) is None
    assert plans.target_of(world.job, replace(world.observed().pods[0], ip="")) is None
