"""Idle share of each slot in a step, from what its workers say with their accounts."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.slots import PlacedWorker, Slot
from rlinf_worker.driver import idle
from rlinf_worker.driver.commits import STEPS_KEPT
from rlinf_worker.driver.recovery import BETWEEN
from tests.builders_driver import make_job
from tests.fakes.driver_world import World


def placed(name, *indices):
    role, _, rank = name.partition("/")
    slots = tuple(Slot(pool="cpu", ordinal=0, index=index) for index in indices)
    return PlacedWorker(id=WorkerId(name), role=role, rank=int(rank), world=1, slots=slots)


def account(*stretches, window_s=10.0):
    busy_s = sum(t1 - t0 for t0, t1 in stretches)
    return pb.Account(window_s=window_s, busy_s=busy_s, busy=[at for pair in stretches for at in pair])


def test_a_worker_makes_all_of_its_slots_busy():
    found = idle.shares([placed("env/0", 0, 1)], {WorkerId("env/0"): account((0.0, 2.0), (4.0, 5.0))})
    assert found == {"cpu/0/0": 0.7, "cpu/0/1": 0.7}


@pytest.mark.parametrize(("window_s", "share"), [(0.4, 0.75), (0.0, 0.0)])
def test_a_step_may_be_short_and_one_that_took_no_time_had_nobody_idle(window_s, share):
    said = {WorkerId("env/0"): account((0.0, window_s / 4), window_s=window_s)}
    assert idle.shares([placed("env/0", 0)], said) == {"cpu/0/0": share}


def test_a_moment_in_which_two_of_a_slot_work_counts_once():
    workers = [placed("env/0", 0), placed("train/0", 0)]
    said = {WorkerId("env/0"): account((0.0, 4.0)), WorkerId("train/0"): account((3.0, 6.0), (9.0, 10.0))}
    assert idle.shares(workers, said) == {"cpu/0/0": pytest.approx(0.3)}


def test_the_step_ends_for_all_at_once_and_one_that_began_late_was_not_there_before():
    workers = [placed("env/0", 0), placed("train/0", 0)]
    said = {WorkerId("env/0"): account((0.0, 4.0)), WorkerId("train/0"): account((0.0, 1.0), window_s=2.0)}
    assert idle.shares(workers, said) == {"cpu/0/0": pytest.approx(0.5)}


def test_where_nobody_was_there_from_its_begin_the_step_is_as_long_nevertheless():
    """Its one worker was added by a plan, and came late: before that nobody had the slot."""
    said = {WorkerId("env/0"): account((0.0, 4.0), window_s=4.0)}
    assert idle.shares([placed("env/0", 0)], said, window_s=10.0) == {"cpu/0/0": pytest.approx(0.6)}
    said[WorkerId("train/0")] = account((1.0, 2.0), window_s=2.0)
    workers = [placed("env/0", 0), placed("train/0", 0)]
    assert idle.shares(workers, said, window_s=10.0) == {"cpu/0/0": pytest.approx(0.6)}


def test_what_a_worker_did_before_it_died_is_not_made_up():
    workers = [placed("env/0", 0), placed("train/0", 0), placed("env/1", 1)]
    said = {worker.id: account((0.0, 4.0)) for worker in workers}
    assert idle.shares(workers, said, window_s=10.0, lost={WorkerId("env/0")}) == {"cpu/0/1": pytest.approx(0.6)}


def test_nothing_is_said_of_a_slot_whose_workers_have_said_nothing():
    assert idle.shares([placed("env/0", 0), placed("train/0", 1)], {WorkerId("env/0"): account()}) == {"cpu/0/0": 1.0}


def test_of_many_slots_the_means_of_their_pools_are_written():
    workers = [placed(f"env/{n}", n) for n in range(66)]
    said = {w.id: account((0.0, 5.0 if w.rank % 2 else 10.0)) for w in workers}
    assert idle.shares(workers, said) == {"cpu": 0.25}


@pytest.mark.parametrize(("step", "share"), [(0, 0.0), (1, 0.5), (16, 0.5), (17, 0.0)])
def test_how_long_a_step_took_is_known_for_sixteen_steps(step, share):
    """Of one that is not known, it is what its workers say."""
    steps = idle.IdleSteps()
    for number in range(17):
        steps.ended(number, [], at=20.0 * number, seconds=20.0)
    record: Any = SimpleNamespace(placed=placed("env/0", 0), ended_at=None)
    assert steps.shares(step, [record], {WorkerId("env/0"): account((0.0, 10.0))}) == {"cpu/0/0": share}


BUSY_S = 0.5


class Accounted(World):
    """Each worker says of each step, as it ends, that it was there for its last half second, and busy."""

    def __init__(self) -> None:
        super().__init__(make_job(steps=8, every_steps=100))
        self.idle: dict[int, dict[str, float]] = {}
        self.lasted: dict[int, float] = {}
        write = self.driver.job.output.step

        def line(done: Any, **parts: Any) -> None:
            self.idle[done.step - 1], self.lasted[done.step] = parts["idle"], done.seconds
            write(done, **parts)
            account = pb.Account(step=done.step, window_s=BUSY_S, busy_s=BUSY_S, busy=[0.0, BUSY_S])
            for worker, record in self.driver.job.members.workers.items():
                if record.present:
                    self.driver.on_worker_message(worker, pb.WorkerMessage(account=account))

        self.driver.job.output.step = line  # type: ignore[method-assign]

    async def at_step(self, number: int) -> None:
        """In the middle of it: nobody has moved for 2 s."""
        await self.run_until(lambda: self.driver.job.ledger.committed == number - 1)
        self.clock.now += 2.0

    def slots(self, name: str) -> set[str]:
        return {str(slot) for slot in self.driver.job.members.workers[WorkerId(name)].placed.slots}


async def test_accounts_of_steps_that_are_in_no_line_yet_are_bounded():
    """As of a worker that is far ahead of what the job says, or says nonsense: the oldest are forgotten."""
    world, seen = World(make_job(steps=8, every_steps=100)), dict[int, set[str]]()
    world.driver.job.output.step = lambda done, *, accounts, **_: seen.update({done.step: set(accounts)})  # type: ignore[method-assign]
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    for step in (2, 3, *range(100, 99 + STEPS_KEPT)):
        account = pb.Account(step=step, window_s=BUSY_S)
        world.driver.on_worker_message(WorkerId("env/0"), pb.WorkerMessage(account=account))
    await world.run_until(lambda: world.driver.job.ledger.committed >= 4)
    assert ("env/0" in seen[3], "env/0" in seen[4]) == (False, True)


async def test_a_line_of_a_step_says_what_took_time_to_a_microsecond_and_not_what_lies_between_steps():
    world, seen = World(make_job(steps=4, every_steps=100)), dict[int, Any]()
    world.driver.job.output.step = lambda done, *, accounts, **_: seen.update({done.step: accounts})  # type: ignore[method-assign]
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    seconds = {"compute": 1.23456789, "wait_data": 2e-6, "comm": 0.0, BETWEEN: 5.0}
    account = pb.Account(step=2, window_s=3.00000049, instrument_s=0.00012345, seconds=seconds)
    world.driver.on_worker_message(WorkerId("env/0"), pb.WorkerMessage(account=account))
    await world.run_until(lambda: world.driver.job.ledger.committed >= 3)
    line = seen[3]["env/0"]
    assert line == {"compute": 1.234568, "wait_data": 2e-6, "window_s": 3.0, "instrument_s": 0.000123}


async def test_a_slot_is_left_out_of_the_step_in_which_its_worker_died():
    world = Accounted()
    everywhere = {slot for name in ("env/0", "env/1", "rollout/0", "actor/0") for slot in world.slots(name)}
    await world.at_step(3)
    await world.at_step(4)
    world.kill("env/0")
    await world.run_until(lambda: world.driver.job.ledger.committed >= 7)
    assert set(world.idle[3]) == set(world.idle[5]) == everywhere
    assert set(world.idle[4]) == everywhere - world.slots("env/0")
    for step in (3, 4):
        assert world.lasted[step] >= 2.0
        assert world.idle[step] == pytest.approx(
            dict.fromkeys(world.idle[step], 1 - BUSY_S / world.lasted[step]), abs=1e-3
        )
