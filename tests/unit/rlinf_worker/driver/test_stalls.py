"""Nothing moves: who is named, when, and who is replaced."""

from typing import Any

import pytest

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.conditions import Reason
from rlinf_api.names import WorkerId
from rlinf_worker.driver.job import FlowWait
from rlinf_worker.driver.members import WorkerState
from rlinf_worker.queues.units import UnitState
from tests.builders_driver import make_job
from tests.fakes.driver_world import World
from tests.fakes.lineage_world import SHAPES, LineageWorld, same

ENV, ROLLOUT, ACTOR = WorkerId("env/0"), WorkerId("rollout/0"), WorkerId("actor/0")


@pytest.fixture
async def world():
    """Of one step that is measured to take a second, and another that is open; nobody has said how they are."""
    made = World(make_job(envs=2, steps=40))
    await stepping(made)
    steps_took(made, 1.0, 1.2, 0.9)
    return made


async def stepping(world: World) -> None:
    job = world.driver.job
    await world.run_until(lambda: job.ledger.committed >= 2 and any(step.sealed for step in job.ledger.open_steps))


def steps_took(world: World, *seconds: float) -> None:
    world.driver.commits.step_seconds.clear()
    world.driver.commits.step_seconds.extend(seconds)


def says(world: World, worker: str, **progress: Any) -> None:
    record = world.driver.job.members.workers[WorkerId(worker)]
    said = agents_pb2.Progress(worker=worker, phase="step", **progress)
    beat = agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat(progress=[said]))
    world.driver.agents.heard(record.placed.pod, beat)


def all_say(world: World, **progress: Any) -> None:
    for worker in world.driver.job.members.workers:
        says(world, worker, **progress)


def told(world: World) -> tuple[str, str]:
    """The reason and the words of the job."""
    world.looks()
    world.driver.notices.look(world.clock.now)
    standing = world.driver.job.standing
    return standing.reason, standing.message


def holds_up(world: World, worker: WorkerId) -> str:
    """Has a unit in hand that the open step waits for."""
    queue = world.driver.exchange.queues["segments"].core
    step = world.driver.job.ledger.open_steps[0].number
    key = world.driver.exchange.ends.waiting_for(step)[0]
    entry = next(entry for entry in queue.book.entries.values() if entry.unit.key == key)
    queue.book.move(entry, UnitState.HELD, consumer=worker)
    return key


async def short_of_units() -> LineageWorld:
    """One of the envs takes its ticket, puts one unit of three and acknowledges it."""
    world = LineageWorld(SHAPES["three of each"], steps=40)
    await stepping(world)
    steps_took(world, 1.0)
    world.made_of = lambda worker, items: (  # type: ignore[method-assign]
        [f"{items[0].key}/0"] if items[0].key.startswith("env:1@") else same(worker, items)
    )
    ledger = world.driver.job.ledger
    for _ in range(20_000):
        if not await world.step() and world.driver.exchange.ends.short(ledger.committed + 1):
            break
    return world


async def test_units_that_can_never_come_are_named_and_then_fail_the_job():
    world = await short_of_units()
    ledger = world.driver.job.ledger
    step = ledger.committed + 1
    sentence = (
        f"step {step} can never end: whoever took ticket 'env:1@{step}' is through with what came of it: got 1 of its "
        "units, wanted 3, as the flow says; put them all before ack, each with parents=[...]; or drop what is not to "
        "come; or Ticket(..., units=None) where nobody knows how many"
    )
    all_say(world, still_s=11.0)
    assert told(world) == (Reason.STALLED, sentence)
    assert world.driver.job.failure is None
    all_say(world, still_s=61.0)
    world.looks()
    assert (world.driver.job.standing.reason, world.driver.job.standing.message) == (Reason.USER_ERROR, sentence)


async def test_units_that_died_with_their_maker_before_anybody_heard_of_them_are_made_again():
    """It had answered whoever had the ticket, who was through with it then. Too few once more though nobody dies are a
    role's mistake."""
    world = await short_of_units()
    exchange, step = world.driver.exchange, world.driver.job.ledger.committed + 1
    short = exchange.ends.short(step)
    all_say(world, still_s=2.1)
    world.looks()
    assert exchange.ends.short(step) == short != [], "nobody has died"
    exchange.gone(WorkerId("env/7"), "env")
    assert exchange.remaking.make_up(step + 1) == [], "nobody is through with anything of it yet"
    next(iter(world.driver.job.members.workers.values())).state = WorkerState.STARTING  # also while it is not back
    all_say(world, still_s=1.9)
    world.looks()
    assert exchange.ends.short(step) == short
    all_say(world, still_s=2.1)
    world.looks()
    assert exchange.ends.short(step) == []
    again = [unit for queue in exchange.queues.values() for unit in queue.core.book.all_waiting()]
    assert [entry.unit.key for entry in again if entry.unit.key == short[0][0]] == [short[0][0]]
    assert step not in exchange.remaking._bereft, "once for each death"


@pytest.mark.parametrize(("silent_s", "is_named"), [(10.0, False), (10.4, True)])
async def test_a_worker_that_is_stuck_is_named_with_its_phase_and_what_it_is_at(world, silent_s, is_named):
    all_say(world)
    says(world, "rollout/0", age_s=silent_s, still_s=silent_s, doing="span compute for 10 s")
    reason, words = told(world)
    wanted = "worker rollout/0 has not moved for 10 s in phase step: span compute for 10 s"
    assert (reason, words) == ((Reason.STALLED, wanted) if is_named else (Reason.STEPPING, ""))
    says(world, "rollout/0")
    assert told(world) == (Reason.STEPPING, "")


async def test_where_steps_are_long_standing_still_is_usual(world):
    steps_took(world, 8.0)
    all_say(world)
    for silent_s, reason in ((39.0, Reason.STEPPING), (41.0, Reason.STALLED)):
        says(world, "env/0", age_s=silent_s, still_s=silent_s)
        assert told(world) == (reason, f"worker env/0 has not moved for {silent_s:.0f} s in phase step")
    all_say(world, still_s=39.0)
    assert told(world)[0] == Reason.STEPPING
    all_say(world, still_s=41.0)
    assert told(world)[0] == Reason.STALLED


async def test_before_a_step_is_measured_half_a_minute_is_none(world):
    world.driver.commits.step_seconds.clear()
    for still_s, reason in ((29.0, Reason.STEPPING), (31.0, Reason.STALLED)):
        all_say(world, still_s=still_s)
        assert told(world)[0] == reason


async def test_as_long_as_anybody_moves_nothing_stands_still(world):
    all_say(world, still_s=50.0)
    says(world, "env/1", still_s=9.0)
    assert told(world) == (Reason.STEPPING, "")


async def test_whoever_holds_what_the_step_waits_for_is_named_and_then_replaced(world):
    holds_up(world, WorkerId("env/1"))
    doing = "waits for an answer of cycle 'actions' for 59 s"
    all_say(world, still_s=59.0, doing="waits for weights b0-3 or newer for 59 s")
    says(world, "env/1", still_s=59.0, doing=doing)
    step = world.driver.job.ledger.open_steps[0].number
    reason, words = told(world)
    assert reason == Reason.STALLED
    assert words.startswith(f"step {step} has not moved for 59 s: worker env/1 {doing}")
    record = world.driver.job.members.workers[WorkerId("env/1")]
    assert (record.state, record.restarts) == (WorkerState.READY, 0)
    all_say(world, still_s=61.0, doing=doing)
    told(world)
    assert (record.state, record.restarts) == (WorkerState.DOWN, 1)
    assert record.why == f"nothing moved for 61 s, and it {doing}"
    others = [w for w in world.driver.job.members.workers.values() if w is not record]
    assert [w.restarts for w in others] == [0] * len(others)
    assert world.driver.stalls.replaced == 1
    assert record.doing == "", "its next life has done nothing yet"


async def test_nobody_is_replaced_while_somebody_works_at_something(world):
    """Its agent has its deadline, and kills it."""
    all_say(world, still_s=200.0)
    says(world, "actor/0", still_s=200.0, age_s=8.0, doing="span compute for 200 s")
    assert told(world)[0] == Reason.STALLED
    assert world.driver.stalls.replaced == 0


async def test_a_flow_that_has_not_said_all_of_a_step_is_named_and_nobody_is_replaced(world):
    world.driver.job.ledger.open_steps[0].sealed = False
    step = world.driver.job.ledger.open_steps[0].number
    all_say(world, still_s=300.0)
    wanted = f"all workers have waited for 300 s: the flow has not said all of step {step}"
    assert told(world) == (Reason.STALLED, wanted)
    assert world.driver.stalls.replaced == 0


async def test_what_a_flow_waits_for_is_named_and_who_holds_its_tickets_is_replaced(world):
    job = world.driver.job
    key = holds_up(world, ENV)
    job.ledger.open_steps[0].sealed = False
    number = job.ledger.open_steps[0].number
    all_say(world, still_s=300.0)
    job.flow_waits = FlowWait("fact 'typo', which no role has shared")
    words = f"the flow has not said all of step {number}, as it waits for fact 'typo', which no role has shared"
    assert told(world) == (Reason.STALLED, f"all workers have waited for 300 s: {words}")
    assert world.driver.stalls.replaced == 0
    says(world, "actor/0", still_s=900.0)
    job.flow_waits = FlowWait("results of a ticket", [key])
    told(world)
    assert world.driver.stalls.replaced == 1
    assert job.members.workers[ENV].state is not WorkerState.READY


async def test_while_somebody_is_started_again_nobody_is_blamed(world):
    all_say(world, still_s=300.0)
    world.driver.job.members.workers[ACTOR].state = WorkerState.STARTING
    assert "not moved" not in told(world)[1]


@pytest.mark.parametrize(
    ("state", "silent_s", "still_s", "is_replaced"),
    [
        (WorkerState.CONNECTED, 0.0, 61.0, True),
        (WorkerState.CONNECTED, 0.0, 59.0, False),
        (WorkerState.CONNECTED, 6.0, 61.0, False),  # it loads
        (WorkerState.STARTING, 0.0, 61.0, False),  # it may have no node
    ],
)
async def test_a_recovery_in_which_all_wait_for_each_other_comes_to_an_end(
    world, state, silent_s, still_s, is_replaced
):
    job = world.driver.job
    job.members.workers[ACTOR].state = state
    job.say_recovering("worker actor/0 is started again")
    all_say(world, still_s=still_s)
    says(world, "actor/0", still_s=still_s, age_s=silent_s)
    says(world, "rollout/0", still_s=still_s + 9.0, doing="waits for a turn for 70 s")
    world.looks()
    assert world.driver.stalls.replaced == int(is_replaced)
    assert job.members.workers[ROLLOUT].state is (WorkerState.DOWN if is_replaced else WorkerState.READY)
    if is_replaced:
        assert "nothing moved for 61 s, and it waits for a turn for 70 s" in job.members.workers[ROLLOUT].why


async def test_a_job_that_stands_still_again_and_again_fails_with_the_name():
    world = World(make_job(envs=1, steps=40, max_restarts=2))
    await stepping(world)
    steps_took(world, 1.0)
    for _ in range(3):
        assert world.driver.job.standing.state.name == "RUNNING"
        holds_up(world, ENV)
        all_say(world, still_s=70.0, doing="waits for the end of the world for 70 s")
        world.looks()
        world.driver.settle()
        if not world.driver.job.ending:
            world.driver.job.members.workers[ENV].state = WorkerState.READY
            world.driver.job.begin()
    standing = world.driver.job.standing
    assert standing.reason == "TooManyRestarts"
    assert standing.message.endswith(
        "the last was env/0: nothing moved for 70 s, and it waits for the end of the world for 70 s"
    )


@pytest.mark.parametrize(("looked_on_s", "is_told"), [(8.0, False), (12.0, True)])
async def test_a_driver_counts_from_when_it_began_to_look_and_not_from_when_another_died(
    world: World, looked_on_s: float, is_told: bool
):
    """Workers had nothing to do for 300 s while no driver was there."""
    all_say(world, still_s=300.0, doing="waits for a ticket for 300 s")
    world.looks(for_s=looked_on_s)
    assert world.driver.stalls.is_stalled is is_told
    assert world.driver.stalls.replaced == 0
    all_say(world)
    world.driver.job.say_recovering("worker actor/0 is started again")
    all_say(world, still_s=300.0, doing="waits for a ticket for 300 s")
    world.looks(for_s=looked_on_s)
    assert world.driver.stalls.replaced == 0, "what it looks at is another, and so is the time"
