"""A worker that does not come back: its work goes to others of its role, and comes back to it when it does."""

from collections.abc import Callable

import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from rlinf_worker.driver import status
from rlinf_worker.driver.members import WorkerState
from rlinf_worker.driver.steps import Committed
from rlinf_worker.queues.units import UnitState
from rlinf_worker.settings import Settings
from tests.builders_driver import Job, make_job
from tests.fakes.driver_world import World
from tests.unit.rlinf_worker.driver.test_whole_job import check

AFTER_S = Settings().rehome_after_s
PLACE = ("sim", 1)


class Places(World):
    """Two pods of one env each; the second finds no node from `lose` on until `give_back`."""

    def __init__(self, *, seed: int = 0, steps: int = 12) -> None:
        super().__init__(make_job(envs=2, pods=2, slices=4, steps=steps, every_steps=3), seed=seed)

    def lose(self) -> None:
        self.kill_pod(*PLACE)
        self.agents[PLACE].connect = lambda: None  # type: ignore[method-assign]

    def give_back(self) -> None:
        del self.agents[PLACE].connect

    async def until_step(self, number: int) -> None:
        await self.run_until(lambda: self.driver.job.ledger.committed >= number)

    def told(self, step: int) -> dict[str, str]:
        return {key: worker for key, worker in self.assigned if key.endswith(f"@{step}")}


async def test_steps_go_on_without_a_worker_that_does_not_come_back_and_with_it_once_it_does():
    world = Places(steps=40)
    told: list[dict[str, object]] = []
    tell = world.driver.job.event

    def event(kind, message, **fields):
        told.append({"kind": kind, **fields})
        tell(kind, message, **fields)

    world.driver.job.event = event  # type: ignore[method-assign]
    await world.until_step(2)
    world.lose()
    lost_at = world.clock.now
    await world.until_step(4)
    assert AFTER_S <= world.clock.now - lost_at < AFTER_S + 10, "one step waited that long, and no longer"
    report = status.report(world.driver)
    assert report.state is DriverState.RECOVERING, "the condition Degraded comes of this"
    assert "steps go on without worker env/1" in report.message
    assert "agent of pod sim-1" in report.missing
    assert set(world.told(4).values()) == {"env/0"}
    began = world.clock.now
    await world.until_step(8)
    assert world.clock.now - began < AFTER_S, "no further step waits"
    assert world.driver.job.members.away == {"env/1"}

    world.give_back()
    while world.driver.job.members.away:
        await world.pass_time(0.2)
        for _ in range(5):
            await world.step()
    back = world.driver.job.ledger.committed
    await world.until_step(back + 3)
    assert world.told(back + 3) == {f"env:{n}@{back + 3}": f"env/{n // 2}" for n in range(4)}, "each has its own again"
    assert status.report(world.driver).state is DriverState.RUNNING
    await world.run()
    check(world)
    assert world.driver.exchange.queues["segments"].core.counts["rehomed"] >= 2 * (back - 3)
    assert [each for each in told if each["kind"] == "rehomed"] == [
        {"kind": "rehomed", "worker": "env/1", "units": 2}, {"kind": "rehomed", "worker": "env/1"}
    ]  # fmt: skip


async def test_what_is_slow_is_told_also_while_somebody_is_away():
    world = Places(steps=40)
    await world.until_step(2)
    world.lose()
    await world.until_step(4)
    driver = world.driver
    words = "steps go on without worker env/1, whose work others of the role take over until it is back"
    driver.notices.look(world.clock.now)
    assert driver.job.standing.message == words
    await world.run_until(lambda: bool(driver.job.ledger.open_steps))
    driver.notices.look(world.clock.now + 31)
    assert (driver.job.standing.state, driver.job.standing.reason) == (DriverState.RECOVERING, "Recovering")
    assert driver.job.standing.message.startswith(f"{words}; step {driver.job.ledger.committed + 1} has run for 31 s")
    driver.notices.look(world.clock.now)
    assert driver.job.standing.message == words
    world.kill("rollout/0")
    driver.notices.look(world.clock.now + 31)
    assert driver.job.standing.message == "worker rollout/0 is started again: Exited", (
        "nor does any while it is waited for"
    )
    driver.notices.look(world.clock.now)
    await world.until_step(driver.job.ledger.committed + 2)
    driver.notices.look(world.clock.now)
    assert driver.job.standing.message == words


def all_wait(world: Places, seconds: float) -> None:
    """Heard from a moment ago, and nothing moves."""
    for wid, record in world.driver.job.members.workers.items():
        if wid not in world.driver.job.members.away:
            said = agents_pb2.Progress(worker=wid, phase="step", still_s=seconds)
            beat = agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat(progress=[said]))
            world.driver.agents.heard(record.placed.pod, beat)


async def without_one() -> Places:
    """Steps go on without env/1, and one is open."""
    world = Places(steps=40)
    await world.until_step(2)
    world.lose()
    await world.until_step(4)
    ledger = world.driver.job.ledger
    await world.run_until(lambda: any(step.sealed for step in ledger.open_steps))
    return world


async def test_a_flow_that_waits_while_one_is_away_costs_nobody_of_the_others():
    world = await without_one()
    driver = world.driver
    driver.job.ledger.open_steps[0].sealed = False
    all_wait(world, 61.0)
    world.looks()
    assert (driver.stalls.replaced, driver.stalls.is_stalled) == (0, True)
    driver.notices.look(world.clock.now)
    standing = driver.job.standing
    assert (standing.state, standing.reason) == (DriverState.RECOVERING, "Stalled")
    assert "all workers have waited for 61 s: the flow has not said all of step" in standing.message
    driver.job.ledger.open_steps[0].sealed = True
    all_wait(world, 0.0)
    world.looks()
    driver.notices.look(world.clock.now)
    assert driver.job.standing.reason == "Recovering"


async def test_who_holds_a_step_up_while_one_is_away_is_replaced_and_not_who_has_waited_longest():
    world = await without_one()
    driver = world.driver
    queue, step = driver.exchange.queues["segments"].core, driver.job.ledger.open_steps[0].number
    key = driver.exchange.ends.waiting_for(step)[0]
    entry = next(entry for entry in queue.book.entries.values() if entry.unit.key == key)
    queue.book.move(entry, UnitState.HELD, consumer=WorkerId("env/0"))
    all_wait(world, 61.0)
    longest = driver.job.members.workers[WorkerId("rollout/0")]
    said = agents_pb2.Progress(worker="rollout/0", phase="step", still_s=900.0)
    driver.agents.heard(longest.placed.pod, agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat(progress=[said])))
    world.looks()
    assert driver.stalls.replaced == 1
    assert driver.job.members.workers[WorkerId("env/0")].state is not WorkerState.READY
    assert longest.state is WorkerState.READY


def keep_away(world: Places, key: tuple[str, int]) -> None:
    """Its pod is lost and finds no node."""
    world.kill_pod(*key)
    world.agents[key].connect = lambda: None  # type: ignore[method-assign]


async def told_after(world: Places, seconds: float) -> str:
    for _ in range(int(seconds / 0.2)):
        while await world.step():
            pass
        await world.pass_time(0.2)
    report = status.report(world.driver)
    assert (report.state, report.reason) == (DriverState.RECOVERING, "Recovering")
    return report.message


@pytest.mark.parametrize("first", ["env/1", "actor/0"])
async def test_nobody_says_that_steps_go_on_while_they_wait_for_another(first):
    world = Places(steps=40)
    await world.until_step(2)
    both = [("gpu", 0), PLACE]
    if first == "env/1":
        keep_away(world, both.pop())
        await world.until_step(4)
    else:
        keep_away(world, both.pop(0))
        await told_after(world, AFTER_S / 2)
    keep_away(world, both.pop())
    said = await told_after(world, 2 * AFTER_S)
    assert world.driver.job.members.away == {"env/1"}
    assert said.startswith(("worker actor/0 is started again: ", "worker rollout/0 is started again: ")), said
    del world.agents["gpu", 0].connect
    await world.until_step(world.driver.job.ledger.committed + 1)
    world.driver.notices.look(world.clock.now)
    assert world.driver.job.standing.message.startswith("steps go on without worker env/1")
    world.give_back()
    await world.run()
    check(world)


async def test_a_worker_that_a_plan_has_added_is_waited_for_by_its_name_alone():
    world = Places(steps=40)
    await world.until_step(2)
    keep_away(world, PLACE)
    await world.until_step(4)
    driver, added = world.driver, world.driver.job.members.workers[WorkerId("rollout/0")]
    driver.notices.look(world.clock.now)
    assert driver.job.standing.message.startswith("steps go on without worker env/1")
    added.state = WorkerState.STARTING
    driver.notices.look(world.clock.now)
    assert (driver.job.standing.state, driver.job.standing.message) == (
        DriverState.RECOVERING,
        "waiting for worker rollout/0",
    )
    added.state = WorkerState.READY
    driver.notices.look(world.clock.now)
    assert driver.job.standing.message.startswith("steps go on without worker env/1")


async def test_a_recovery_names_whom_it_waits_for_and_why_it_failed_last():
    world = Places(steps=40)
    await world.until_step(2)
    keep_away(world, ("gpu", 0))
    world.kill("env/0", said="the robot fell")
    assert world.driver.job.standing.message == "worker env/0 is started again: the robot fell"
    said = await told_after(world, 5.0)
    assert world.driver.job.members.workers[WorkerId("env/0")].state is WorkerState.READY, "it is back and not named"
    assert said.startswith(("worker actor/0 is started again: ", "worker rollout/0 is started again: ")), said
    assert await told_after(world, 5.0) == said
    del world.agents["gpu", 0].connect
    await world.run_until(lambda: world.driver.job.standing.state is DriverState.RUNNING)

    world.kill("env/0")
    assert world.driver.job.standing.message == "worker env/0 is started again: Exited"
    await world.run_until(lambda: WorkerId("env/0") in world.workers)
    world.kill("env/0", exit_code=names.EXIT_USER_ERROR, said="no card")
    world.driver.notices.look(world.clock.now)
    assert world.driver.job.standing.message == "worker env/0 is started again: no card"
    await world.run()
    check(world)


async def test_a_worker_that_is_back_in_time_keeps_its_units():
    world = Places()
    await world.until_step(2)
    world.lose()
    for _ in range(int(AFTER_S / 0.2) - 10):
        await world.pass_time(0.2)
    world.give_back()
    await world.run()
    check(world)
    assert {key: worker for key, worker in world.assigned if worker == "env/1"}.keys() >= {"env:2@3", "env:3@3"}
    assert world.driver.exchange.queues["segments"].core.counts["rehomed"] == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("also", ["actor/0", "rollout/0", "env/0", "driver"])
async def test_other_losses_meanwhile_cost_time_and_nothing_else(also, seed):
    world = Places(seed=seed)
    await world.until_step(2)
    world.lose()
    await world.until_step(4)
    if also == "driver":
        world.replace_driver()
    else:
        world.kill(also)
    await world.until_step(7)
    world.give_back()
    await world.run()
    check(world)


async def test_a_job_does_not_begin_without_a_worker_that_has_never_been_there():
    world = Places()
    world.agents[PLACE].connect = lambda: None  # type: ignore[method-assign]
    for _ in range(int(2 * AFTER_S / 0.2)):
        await world.run_until(lambda: True)
        while await world.step():
            pass
        await world.pass_time(0.2)
    assert (world.driver.job.begun, world.driver.job.members.away) == (False, frozenset())
    world.give_back()
    await world.run()
    check(world)


async def test_all_of_a_role_are_waited_for_where_nobody_can_stand_in():
    world = World(make_job(envs=1, slices=2, steps=4))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    world.kill_pod("sim")
    world.agents[("sim", 0)].connect = lambda: None  # type: ignore[method-assign]
    for _ in range(int(2 * AFTER_S / 0.2)):
        await world.pass_time(0.2)
    assert world.driver.job.members.away == frozenset()
    assert WorkerId("env/0") in world.driver.job.members.workers
    del world.agents[("sim", 0)].connect
    await world.run()
    check(world)


# --- what is measured meanwhile ---------------------------------------------------------------------------------------
async def measured_without(world: World, worker: str, *, come: Callable[[], None]) -> None:
    """Steps in which it was away, the one in which it comes back included, are in no profile; those behind them are."""
    driver, wid = world.driver, WorkerId(worker)
    committed = driver.commits.on_committed

    def say(done: Committed) -> None:
        committed(done)
        for record in driver.job.members.workers.values():
            if record.state is WorkerState.READY:
                account = pb.Account(step=done.step, branch=done.version.branch, seconds={"compute": 0.5})
                driver.on_worker_message(record.placed.id, pb.WorkerMessage(account=account))

    driver.commits.on_committed = say
    await world.run_until(lambda: wid in driver.job.members.away)
    without = driver.job.ledger.committed
    await world.run_until(lambda: driver.job.ledger.committed >= without + 4)
    come()
    while driver.job.members.away:
        await world.pass_time(0.2)
        for _ in range(5):
            await world.step()
    back = driver.job.ledger.committed
    await world.run_until(lambda: driver.job.ledger.committed >= back + 4)
    steps = [(told.first_step, told.last_step) for told in driver.profiles.reports if told.first_step > without]
    assert steps
    assert steps[0][0] > back + 1
    await world.run()


async def test_steps_without_a_worker_that_a_plan_has_added_are_not_measured_as_the_plans():
    def of(revision: int, *, pods: int) -> Job:
        return make_job(envs=3, slices=4, steps=40, every_steps=100, pods=pods, revision=revision, elastic=True)

    world = World(of(1, pods=1))
    await world.run_until(lambda: world.driver.job.ledger.committed >= 2)
    world.pin(of(2, pods=2))  # env/2 leaves its pod for another, by the commit
    await world.run_until(lambda: PLACE in world.agents)
    agent, kept = world.agents[PLACE], list[agents_pb2.DriverMessage]()
    obey = agent.obey

    def keep(message: agents_pb2.DriverMessage) -> None:
        (kept.append if message.instruction.HasField("start") else obey)(message)

    def come() -> None:
        agent.obey = obey  # type: ignore[method-assign]
        for message in kept:
            obey(message)

    agent.obey = keep  # type: ignore[method-assign]
    await measured_without(world, "env/2", come=come)
    assert world.driver.job.revision == 2
    assert world.driver.workforce.restarts == 0, "it was never lost"


async def test_a_driver_that_comes_while_a_worker_is_away_measures_no_step_without_it():
    world = Places(steps=40)
    await world.until_step(2)
    world.lose()
    await world.until_step(4)
    world.replace_driver()
    await measured_without(world, "env/1", come=world.give_back)
    check(world)
