"""Condition Prepared of an RLPlan: true while its pods and workers stand ready, and not a moment of its life longer."""

import re
from pathlib import Path

from rlinf_api.conditions import Reason
from rlinf_api.report import DriverState
from rlinf_operator.reconcile import plans
from tests.builders import World
from tests.builders_plans import name, pin, plan, plan_conditions, running, store_statuses

PAGE = Path(__file__).resolve().parents[3] / "docs" / "troubleshooting.md"


def prepared(world: World, revision: int) -> tuple[str, str]:
    """As it stands at the API server."""
    (found,) = [p for p in world.plans if p.revision == revision]
    return next(((c.status, c.reason) for c in found.status.conditions if c.type == "Prepared"), ("", ""))


def pass_over(world: World) -> World:
    """A pass, and what it says of plans is stored."""
    store_statuses(world)
    world.step()
    return world


def with_a_prepared_plan() -> World:
    world = running(plan(2, pods=2))
    pin(world, name(world, 2)).step()
    world.all_ready().report(state=DriverState.RUNNING, plan_revision=1, plan_switches=1, plan_prepared=2)
    pass_over(world)
    assert prepared(world, 2) == ("True", "Prepared")
    return world


def test_a_plan_that_is_given_up_is_prepared_no_more():
    world = with_a_prepared_plan()
    pin(world, name(world, 1))
    pass_over(world)
    assert prepared(world, 2) == ("True", "Prepared"), "until the driver has heard of it"
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_switches=1)
    pass_over(world)
    assert prepared(world, 2) == ("False", "Aborted")
    assert plan_conditions(world, 2) == {}, "said once"


def test_a_prepared_plan_that_fails_is_prepared_no_more():
    world = with_a_prepared_plan()
    why = "worker env/1, which it adds, failed"
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_switches=1, plan_failed=2, plan_message=why)
    assert plan_conditions(world, 2) == {"Prepared": ("False", "PrepareFailed"), "Failed": ("True", "PrepareFailed")}


def test_a_new_driver_prepares_it_anew():
    world = with_a_prepared_plan()
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_switches=1, plan_preparing=2)
    pass_over(world)
    assert prepared(world, 2) == ("False", "Preparing")
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_switches=1, plan_prepared=2)
    pass_over(world)
    assert prepared(world, 2) == ("True", "Prepared")


def test_its_commit_says_nothing_else_on_the_way():
    """The plan before it has been prepared and in force: one write each for the whole change."""
    world = with_a_prepared_plan()
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_switches=1)
    assert world.decide().plan_statuses == (), "agents are told; it is prepared no more, nor in force yet"
    world.report(state=DriverState.RUNNING, plan_revision=2, plan_switches=2)
    assert plan_conditions(world, 2) == {"Prepared": ("True", "Prepared"), "Applied": ("True", "PlanInForce")}
    pass_over(world)
    assert world.decide().plan_statuses == ()
    pin(world, name(world, 1)).report(state=DriverState.RUNNING, plan_revision=1, plan_switches=3)
    superseded = {"Applied": ("False", "Superseded"), "Superseded": ("True", "Superseded")}
    assert plan_conditions(world, 2) == {"Prepared": ("False", "Superseded"), **superseded}
    pass_over(world)
    assert world.decide().plan_statuses == ()


def test_nothing_is_prepared_in_a_suspended_job():
    world = with_a_prepared_plan()
    world.edit(suspend=True)
    pass_over(world)
    assert prepared(world, 2) == ("True", "Prepared"), "its driver is still at work"
    world.report(state=DriverState.DRAINED, plan_revision=1, plan_switches=1).step()
    world.link = None
    pass_over(world)
    assert prepared(world, 2) == ("False", "Stopped")
    assert world.decide().plan_statuses == ()


def test_nothing_is_prepared_in_a_job_that_has_ended():
    for ended in (DriverState.COMPLETE, DriverState.FAILED):
        world = with_a_prepared_plan()
        world.report(state=ended, plan_revision=1, plan_switches=1, plan_prepared=2)
        pass_over(world)
        assert prepared(world, 2)[0] == "False", ended
        assert world.decide().plan_statuses == ()
    world = with_a_prepared_plan().edit(activeDeadlineSeconds=60)
    world.link = None
    world.later(61).step()
    pass_over(world)
    assert prepared(world, 2) == ("False", "Stopped")


def test_a_plan_in_force_stays_prepared_when_its_job_stops():
    world = with_a_prepared_plan()
    world.report(state=DriverState.RUNNING, plan_revision=2, plan_switches=2)
    pass_over(world)
    world.report(state=DriverState.COMPLETE, plan_revision=2, plan_switches=2)
    for _ in range(2):
        pass_over(world)
    assert prepared(world, 2) == ("True", "Prepared")


def test_each_reason_of_prepared_stands_in_its_row():
    source = Path(str(plans.__file__)).read_text(encoding="utf-8")
    given = set(re.findall(r"_not_prepared\(old, (?:str\(Reason\.(\w+)\)|\"(\w+)\")", source))
    (row,) = re.findall(r"^\| `Prepared` \|.*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(given) == 4
    of_failed = {plans.PREPARE_FAILED, str(Reason.UNSCHEDULABLE)}
    assert {other or reason.capitalize() for reason, other in given} | of_failed == set(re.findall(r"`(\w+)`", row)) - {
        "Prepared"
    }
