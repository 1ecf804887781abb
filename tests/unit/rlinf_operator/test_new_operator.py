"""An operator that begins, after a restart or a fail-over, has heard no driver yet. What drivers said before stands."""

from datetime import timedelta

import pytest

from rlinf_api.report import DriverState
from rlinf_operator.reconcile import events
from rlinf_operator.reconcile.state import DriverView
from tests.builders import NOW, ppo_job
from tests.fakes.cluster import KEY
from tests.fakes.drivers import FakeDrivers
from tests.fakes.quota import World

RECOVERING = {"state": DriverState.RECOVERING, "message": "rollout/0 is started again"}
SLOW = {"state": DriverState.RUNNING, "reason": "TurnsWithoutItems", "message": "two turns passed without an item"}
WAITING = {"state": DriverState.STARTING, "message": "env/1 is awaited"}
RUNNING = {"state": DriverState.RUNNING, "message": "step 7 has run for 310 s"}


def at_work(**said):
    """For an hour; its operator has just begun."""
    world = ppo_job().world().created().all_ready().later(5)
    world.report(plan_revision=1, **(said or {"state": DriverState.RUNNING})).step()
    world.later(3600).step()
    world.link = None
    return world


@pytest.mark.parametrize("said", [RUNNING, RECOVERING, SLOW, WAITING], ids=lambda said: said["message"])
def test_what_a_driver_said_to_the_operator_before_stands_until_it_is_heard(said):
    world = at_work(**said)
    before = world.status
    decision = world.step()
    assert world.status == before
    assert decision.requeue_after_s == world.settings.driver_late_s, "or nobody would look again"
    world.link = DriverView(attempt=1, silent_s=4.0)
    assert world.later(4).step().requeue_after_s == world.settings.driver_late_s - 4
    world.later(1).report(plan_revision=1, **said).step()
    assert world.status == before
    assert events.of_transition(before, world.status) == ()


def test_a_driver_that_is_not_heard_in_time_is_not_spoken_for():
    world = at_work()
    world.link = DriverView(attempt=1, silent_s=world.settings.driver_late_s)
    world.later(world.settings.driver_late_s).step()
    assert world.condition("Running") == ("Unknown", "WaitingForDriver")
    assert world.condition("PlanApplied") == ("Unknown", "PlanPending")
    assert world.condition("Degraded") == ("True", "DriverUnreachable")


def test_an_unreachable_driver_is_not_well_again_because_the_operator_is_new():
    world = at_work()
    world.report(plan_revision=1, silent_s=30.0).step()
    assert world.condition("Degraded") == ("True", "DriverUnreachable")
    world.link = None
    world.step()
    assert world.condition("Degraded") == ("True", "DriverUnreachable")


def test_a_driver_that_ended_meanwhile_is_not_spoken_for():
    world = at_work()
    world.exited("math-driver-a1", 137, reason="OOMKilled").step()
    assert world.condition("Running") == ("Unknown", "WaitingForDriver")
    assert world.condition("Degraded") == ("True", "PodReplaced")


def test_a_driver_is_not_spoken_for_by_the_one_before_it():
    """The status that told of its making was lost with the operator that made it."""
    world = at_work()
    before = world.status
    world.exited("math-driver-a1", 1).step()
    world.later(5).all_ready()
    world.status = before
    world.step()
    assert world.condition("Running") == ("Unknown", "WaitingForDriver")
    assert world.condition("PlanApplied") == ("Unknown", "PlanPending")


def test_another_plan_that_is_wanted_meanwhile_is_told_at_once():
    world = at_work()
    world.edit(placement={"mode": "Pinned", "pin": "math-p9"}).step()
    assert world.condition("PlanApplied") == ("False", "PinNotFound")
    assert world.condition("Running") == ("True", "Stepping")


class Unheard(FakeDrivers):
    def follow(self, key, target):
        self.followed[key] = target


async def test_a_fail_over_changes_no_condition_of_a_job_at_work_and_writes_no_status():
    world = World()
    await world.apply()
    await world.passes(2)
    world.now = NOW + timedelta(seconds=30)
    await world.passes(6)
    assert (await world.condition("Running"))[:2] == ("True", "Stepping")
    before, told = await world.status(), len(world.events("Stepping"))
    world.drivers, world.now = Unheard(), NOW + timedelta(seconds=3600)
    world.restart()
    world.store.writes.clear()
    await world.passes(3)
    world.drivers.say(KEY, state=DriverState.RUNNING, plan_revision=1)
    await world.passes(1)
    after = await world.status()
    assert after == before
    assert len(world.events("Stepping")) == told
    assert world.store.writes == []
