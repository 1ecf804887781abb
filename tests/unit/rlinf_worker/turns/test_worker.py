"""A worker's side of turns: when it freezes, what it says, and when its role is loaded and offloaded."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2 as pb
from rlinf_api.errors import DeadlineExceeded, UserError
from rlinf_worker.channels.protocol import ChannelClosed
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.phases import Phases
from rlinf_worker.roles.protocol import Memory
from rlinf_worker.runtime.ends import ChannelEnds
from rlinf_worker.settings import Settings
from rlinf_worker.spans import Recorder
from rlinf_worker.turns import worker as turns_worker
from rlinf_worker.turns.term import Progress
from rlinf_worker.turns.worker import Turns


class Movable:
    def __init__(self) -> None:
        self.did: list[str] = []
        self.on = True

    def memory(self) -> Memory:
        return Memory(now=1000 if self.on else 10)

    async def load(self) -> None:
        await asyncio.sleep(0)
        self.did.append("load")
        self.on = True

    async def offload(self) -> None:
        await asyncio.sleep(0)
        self.did.append("offload")
        self.on = False


class Bench:
    def __init__(self, lease_set: str = "all", *, tries_moves: bool = False, limits: Settings | None = None) -> None:
        self.waits, self.recorder, self.role = Waits(), Recorder(), Movable()
        self.said: list[pb.TurnReport] = []
        self.errors: list[BaseException] = []
        self.progress = Progress()
        self.news = self.waits.signal()
        self.items: list[str] = []
        self.left: list[int] = []
        self.stays = False
        self.wanted: list[bool] = []
        """After each unit that was taken: whether the slots are wanted back."""
        limits = limits or Settings()
        self.turns = Turns(
            waits=self.waits,
            recorder=self.recorder,
            phases=Phases(limits),
            settings=limits,
            fatal=self.errors.append,
            progress=lambda: self.progress,
            has_input=lambda: bool(self.items),
            say=self.said.append,
            footprint=cast(Any, self),
            left=self.left.append,
            tries_moves=lambda: tries_moves,
            stays=lambda: self.stays,
        )
        self.turns.residence.role = self.role
        self.turns.on_membership(pb.Membership(lease_set=lease_set))
        self._number = 0
        self.in_use: dict[bool, int | None] = {True: 2000, False: 30}

    def now(self) -> int | None:
        """In use on the slots, for who measures it."""
        assert threading.current_thread() is not threading.main_thread(), "beside the loop"
        return self.in_use[self.role.on]

    def kept(self, before: int, after: int, *, said: int) -> int:
        return before + after + said

    def order(self, kind: str, **fields: Any) -> None:
        self._number += 1
        self.turns.on_order(pb.TurnOrder(lease_set="all", number=self._number, kind=kind, **fields))

    @contextlib.contextmanager
    def recorder_span(self) -> Iterator[None]:
        """The role is at work."""
        span = self.recorder.begin("compute")
        yield
        span.end()

    async def until(self, standing: str) -> pb.TurnReport:
        async with asyncio.timeout(5):
            while not self.said or (self.said[-1].standing, self.said[-1].seen) != (standing, self._number):
                await asyncio.sleep(0.001)
        return self.said[-1]

    async def take(self) -> str:
        await self.waits.until(lambda: bool(self.items), self.news, what="an item", timeout_s=None)
        return self.items.pop(0)

    def put(self, item: str) -> None:
        self.items.append(item)
        self.news.notify()


@pytest.fixture
async def bench():
    made = Bench()
    yield made
    await made.turns.close()
    assert made.errors == []


async def working(bench, *, units=0):
    """Takes items in one turn, for ever."""
    did: list[str] = []

    async def role():
        async with bench.turns.turn():
            while True:
                did.append(await bench.take())
                bench.progress = replace(bench.progress, units=bench.progress.units + 1, items=bench.progress.items + 1)
                bench.turns.consider()
                bench.wanted.append(bench.turns.yield_wanted.is_set())
                await bench.turns.safe_point()

    task = asyncio.ensure_future(role())
    await bench.until("wants")
    assert did == [], "it does not work without its turn"
    bench.order("grant", until_units=units)
    await bench.until("holds")
    return task, did


async def end(task):
    task.cancel()
    await asyncio.wait([task])


async def test_without_a_lease_set_a_turn_is_entered_at_once():
    bench = Bench(lease_set="")
    async with bench.turns.turn():
        await bench.turns.safe_point()
        with pytest.raises(UserError, match="inside its turn"):
            async with bench.turns.turn():
                pass
    assert (bench.said, bench.role.did) == ([], [])


async def test_a_role_that_takes_no_turns_is_moved_once_so_that_their_cost_is_known():
    bench = Bench("", tries_moves=True)
    for _ in range(2):
        async with bench.turns.turn():
            assert bench.role.on
    assert bench.role.did == ["offload", "load", "offload", "load"], "the first pair makes the host's buffers"
    moves = {what: (move.count, move.bytes) for what, move in bench.recorder.sums.take(1, 0).moves.items()}
    assert moves == {"offload": (1, 990.0), "load": (1, 990.0)}
    used = bench.turns.residence.memory()
    assert (used.peak, used.offloaded) == (1000, 10)


@pytest.mark.parametrize(("lease_set", "tries"), [("", False), ("all", True)])
async def test_a_role_that_takes_turns_or_whose_memory_nobody_plans_with_is_not_moved(lease_set, tries):
    bench = Bench(lease_set, tries_moves=tries)
    if lease_set:
        bench.order("grant")
    async with bench.turns.turn():
        assert bench.role.did == []


async def test_a_role_works_only_when_its_turn_is_granted(bench):
    bench.put("a")
    task, did = await working(bench)
    async with asyncio.timeout(5):
        while did != ["a"]:
            await asyncio.sleep(0)
    standings = [said.standing for said in bench.said]
    assert standings.index("wants") < standings.index("holds")
    await end(task)


async def test_an_idle_role_freezes_when_somebody_waits_and_is_offloaded(bench):
    task, did = await working(bench)
    await asyncio.sleep(0.01)
    assert bench.said[-1].standing == "holds", "nobody wants the slots"
    bench.order("yield")
    await bench.until("idle")
    bench.order("offload")
    gone = await bench.until("content")
    assert (gone.memory_bytes, bench.role.did) == (10, ["offload"])
    bench.put("b")
    await bench.until("wants")
    assert did == [], "it does not work without its turn"
    bench.order("grant")
    await bench.until("holds")
    async with asyncio.timeout(5):
        while did != ["b"]:
            await asyncio.sleep(0)
    assert bench.role.did == ["offload", "load"]
    assert bench.turns.switches == 2
    assert (await bench.until("holds")).memory_bytes == 1000, "as it is after the load"
    await end(task)


async def test_what_a_role_keeps_on_its_slots_is_measured_around_its_offload(bench):
    task, _ = await working(bench)
    bench.order("yield")
    await bench.until("idle")
    bench.order("offload")
    await bench.until("content")
    assert bench.left == [2000 + 30 + 1000], "as measured, and what it said it had"
    levels = {labels: value for name, labels, value in bench.turns.numbers() if name.endswith("memory_bytes")}
    assert levels == {("state=loaded",): 2000.0, ("state=offloaded",): 30.0}
    bench.order("offload")
    await bench.until("content")
    assert len(bench.left) == 1, "it was off its slots already"
    await end(task)


@pytest.mark.parametrize(("apart_s", "looked_at"), [(0.0, 1), (1.9, 1), (2.1, 2)])
async def test_looks_at_memory_take_a_hundredth_of_the_time(bench, monkeypatch, apart_s, looked_at):
    """Each takes 10 ms, for which who has the next turn waits: two now, and no more for 2 s."""
    clock = [100.0]
    monkeypatch.setattr(turns_worker, "monotonic", lambda: clock[0])
    measure, residence = bench.now, bench.turns.residence

    def slow():
        clock[0] += 0.010
        return measure()

    monkeypatch.setattr(bench, "now", slow)
    await residence.offload()
    assert clock[0] == pytest.approx(100.020)
    await residence.load()
    clock[0] += apart_s
    await residence.offload()
    assert (len(bench.left), bench.role.did) == (looked_at, ["offload", "load", "offload"])
    assert residence.memory().offloaded == 10, "what it says of itself is asked each time"


class Clock:
    """The machine's monotonic one, as both workers of a pod read it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(turns_worker, "monotonic", lambda: self.now)

    def slow(self, bench: Bench, **seconds: float) -> None:
        """Its moves take so long."""
        for what, took in seconds.items():
            move = getattr(bench.role, what)

            async def moved(move=move, took=took) -> None:
                self.now += took
                await move()

            setattr(bench.role, what, moved)


def turn_moves(bench: Bench) -> list[Any]:
    found = bench.recorder.sums.take(9, 9).moves.get("turn")
    return [] if found is None else [pytest.approx(found.seconds), found.count]


async def test_slots_are_free_from_the_last_work_on_but_for_the_offload(bench, monkeypatch):
    clock = Clock(monkeypatch)
    clock.slow(bench, offload=0.5)
    task, _ = await working(bench)
    assert bench.said[-1].free_since == 0.0
    await asyncio.sleep(0.01)  # the role waits for an item
    clock.now += 10.0
    with bench.recorder_span():
        bench.turns.waiting()
        clock.now += 1.0  # one task waits, another works
    clock.now += 2.0  # nothing is left to do, and nobody has told it that somebody waits
    bench.order("yield")
    await bench.until("idle")
    clock.now += 4.0  # the word that it is idle, and the word to leave
    bench.order("offload")
    gone = await bench.until("content")
    assert gone.free_since == pytest.approx(100.0 + 10.0 + 1.0 + 0.5)
    bench.put("a")
    assert (await bench.until("wants")).free_since == gone.free_since, "as long as it is off them"
    assert turn_moves(bench) == [], "nobody knows who had the slots before its first turn"
    await end(task)


async def test_a_turn_that_is_due_ends_at_its_safe_point(bench, monkeypatch):
    clock = Clock(monkeypatch)
    clock.slow(bench, offload=0.25)
    task, did = await working(bench, units=1)
    bench.order("finish")
    clock.now += 7.0
    bench.put("a")
    gone = await bench.until("content")
    assert did == ["a"]
    assert gone.free_since == pytest.approx(107.25)
    await end(task)


@pytest.mark.parametrize(
    ("wanted_at", "change_s"), [(100.0, 3.0), (104.0, 2.0), (0.0, None)], ids=["before", "later", "unknown"]
)
async def test_a_change_of_turn_is_what_lies_between_two_works_without_the_load(
    bench, monkeypatch, wanted_at, change_s
):
    """Slots were free at 103; it works at 106 + 5 of load, and could not have before it wanted to."""
    clock = Clock(monkeypatch)
    clock.slow(bench, load=5.0)
    task, did = await working(bench)
    bench.order("yield")
    await bench.until("idle")
    bench.order("offload")
    await bench.until("content")
    clock.now = wanted_at or 100.0
    bench.put("a")
    await bench.until("wants")
    clock.now = 106.0
    bench.order("grant", free_since=103.0 if change_s is not None else 0.0)
    async with asyncio.timeout(5):
        while did != ["a"]:
            await asyncio.sleep(0)
    assert turn_moves(bench) == ([] if change_s is None else [pytest.approx(change_s), 1])
    await end(task)


async def test_of_memory_that_nobody_can_measure_nothing_is_said(bench):
    bench.in_use[False] = None
    task, _ = await working(bench)
    bench.order("yield")
    await bench.until("idle")
    bench.order("offload")
    await bench.until("content")
    assert (bench.left, bench.turns.residence.seen) == ([], {})
    await end(task)


async def test_the_bound_of_a_wait_does_not_run_while_the_role_is_off_its_slots(bench):
    async def role():
        async with bench.turns.turn():
            await bench.waits.until(lambda: False, bench.news, what="room for a unit", timeout_s=1.0)

    task = asyncio.ensure_future(role())
    await bench.until("wants")
    bench.order("grant", yielding=True)
    await bench.until("idle")
    (clock,) = bench.waits._clocks.values()
    assert clock.limit.when() is None
    bench.order("resume")
    assert 0 < clock.limit.when() - asyncio.get_running_loop().time() <= 1.0
    bench.order("yield")
    await bench.until("idle")
    assert clock.limit.when() is None
    bench.order("resume")
    with pytest.raises(DeadlineExceeded, match="room for a unit"):
        await task
    assert bench.waits._clocks == {}


async def test_an_idle_role_leaves_without_another_word_where_it_was_told_to(bench):
    task, _ = await working(bench)
    bench.order("leave")
    gone = await bench.until("content")
    assert (gone.memory_bytes, bench.role.did) == (10, ["offload"])
    assert [said.standing for said in bench.said][-2:] == ["holds", "content"]
    await end(task)


async def test_a_long_offload_is_said_beforehand_so_that_one_that_hangs_is_noticed(bench):
    task, _ = await working(bench)
    hangs = asyncio.Event()
    bench.role.offload = hangs.wait
    bench.order("leave")
    await bench.until("leaves")
    assert bench.said[-1].memory_bytes > 0, "it is still there"
    hangs.set()
    await bench.until("content")
    await end(task)


async def test_one_of_several_leaves_by_itself_only_when_its_turn_is_due(bench):
    task, _ = await working(bench, units=2)
    bench.order("finish")
    await bench.until("idle")
    assert bench.role.did == []
    for item in "ab":
        bench.put(item)
    await bench.until("more")
    bench.order("resume", yielding=True)
    await bench.until("content")
    assert bench.said[-2].standing == "leaves", "it remembers what it was told"
    assert bench.role.did == ["offload"]
    await end(task)


async def test_a_role_that_is_halted_says_at_once_that_something_has_come(bench):
    bench.put("a")
    task, _ = await working(bench, units=1)
    await bench.until("due")
    bench.order("offload")
    await bench.until("content")
    bench.put("b")
    assert bench.said[-1].standing == "wants", "no clock in between"
    spans = [span.kind for span in bench.recorder.open]
    assert spans.count("wait_turn") == 1
    bench.order("grant")
    assert {name: value for name, _, value in bench.turns.numbers()}["rlinf_worker_turn_wait_seconds_total"] > 0
    await end(task)


async def test_a_frozen_role_says_that_work_has_come_and_goes_on_when_told(bench):
    task, did = await working(bench)
    bench.order("yield")
    await bench.until("idle")
    bench.put("c")
    await bench.until("more")
    assert did == []
    bench.order("resume", yielding=True)
    async with asyncio.timeout(5):
        while did != ["c"]:
            await asyncio.sleep(0)
    await bench.until("idle")
    assert bench.role.did == [], "it never left"
    await end(task)


async def test_a_role_with_an_open_span_is_not_idle_though_a_task_of_it_waits(bench):
    task, _ = await working(bench)
    span = bench.recorder.begin("compute")
    bench.order("yield")
    await asyncio.sleep(0.02)
    assert bench.said[-1].standing == "holds"
    span.end()
    await bench.until("idle")
    await end(task)


async def test_a_role_for_which_something_lies_there_is_not_idle_though_it_has_not_looked_yet():
    bench = Bench(limits=Settings(turn_idle_s=1.0))
    task, did = await working(bench)
    bench.order("yield")
    for _ in range(5):
        await asyncio.sleep(0)
    bench.items.append("a")  # its task is woken later than the clock of idleness
    await asyncio.sleep(1.2)
    assert (bench.said[-1].standing, did) == ("holds", [])
    bench.news.notify()
    await bench.until("idle")
    assert did == ["a"]
    await end(task)
    await bench.turns.close()


async def test_a_turn_of_two_units_ends_at_the_safe_point_after_the_second(bench):
    for item in "abc":
        bench.put(item)
    task, did = await working(bench, units=2)
    await bench.until("due")
    assert did == ["a", "b"]
    bench.order("resume")
    async with asyncio.timeout(5):
        while did != ["a", "b", "c"]:
            await asyncio.sleep(0)
    await end(task)


async def test_a_turn_of_a_step_goes_on_while_older_work_is_under_way(bench):
    passed = []

    async def role():
        async with bench.turns.turn():
            for newest, oldest in ((1, 1), (2, 1), (2, 2)):
                bench.turns.consider(newest)
                await bench.turns.safe_point(oldest=oldest)
                passed.append((newest, oldest))

    task = asyncio.ensure_future(role())
    await bench.until("wants")
    bench.order("grant", until_units=0)
    await bench.until("due")
    assert passed == [(1, 1), (2, 1)]
    await end(task)


async def test_a_turn_that_is_told_to_end_ends_at_the_next_safe_point(bench):
    bench.put("a")
    task, did = await working(bench, units=9)
    async with asyncio.timeout(5):
        while did != ["a"]:
            await asyncio.sleep(0)
    bench.recorder.begin("compute")  # it is at work, though it waits for another item, too
    bench.order("end")
    await asyncio.sleep(0.01)
    assert bench.said[-1].standing == "holds"
    assert bench.turns.yield_wanted.is_set(), "an engine beside it hears so"
    bench.put("b")
    gone = await bench.until("content")
    assert (did, gone.memory_bytes, bench.role.did) == (["a", "b"], 10, ["offload"]), "by itself"
    bench.put("c")
    bench.put("d")
    bench.order("grant", until_units=2)
    await bench.until("due")
    assert did == ["a", "b", "c", "d"], "the next turn has its own length"
    await end(task)


async def test_the_slots_are_wanted_back_once_somebody_waits_and_the_work_of_the_turn_is_done(bench):
    """An event for whoever works in a task of its own, which asks at no safe point meanwhile."""
    bench.put("a")
    task, _ = await working(bench, units=2)
    heard = asyncio.ensure_future(bench.turns.yield_wanted.wait())
    bench.order("yield")
    await bench.until("idle")  # somebody waits, and one unit of two is done
    bench.put("b")
    bench.order("resume", yielding=True)
    await asyncio.wait_for(heard, 5)
    await bench.until("due")
    assert bench.wanted == [False, True]
    assert not bench.turns.yield_wanted.is_set(), "it is at the safe point"
    bench.order("offload")
    await bench.until("content")
    bench.order("grant", until_units=2)
    await bench.until("holds")
    assert not bench.turns.yield_wanted.is_set(), "served"
    await end(task)


async def test_slots_that_nobody_else_wants_are_not_wanted_back(bench):
    for item in "ab":
        bench.put(item)
    task, _ = await working(bench, units=1)
    await bench.until("due")
    assert bench.wanted == [False]
    bench.order("resume")
    await bench.until("due")
    assert bench.wanted == [False, False]
    await end(task)


async def test_the_slots_are_wanted_back_at_the_end_of_the_step_and_not_once_they_are_the_workers_own(bench):
    task, _ = await working(bench)
    with bench.recorder_span():
        bench.order("finish")
        assert not bench.turns.yield_wanted.is_set()
        bench.turns.step_ended()
        assert bench.turns.yield_wanted.is_set()
        bench.turns.on_membership(pb.Membership(lease_set=""))
        assert not bench.turns.yield_wanted.is_set()
    await end(task)


async def test_the_end_of_the_step_ends_the_turn(bench):
    bench.put("a")
    bench.turns.term.step_ended()
    task, _ = await working(bench)
    await asyncio.sleep(0.01)
    assert bench.said[-1].standing == "holds", "that was before the turn"
    bench.turns.term.step_ended()
    bench.put("b")
    await bench.until("due")
    await end(task)


async def test_an_order_that_was_obeyed_is_not_obeyed_again(bench):
    task, _ = await working(bench)
    bench.order("yield")
    await bench.until("idle")
    bench.order("offload")
    await bench.until("content")
    bench.turns.on_order(pb.TurnOrder(lease_set="all", number=1, kind="grant"))
    bench.turns.on_order(pb.TurnOrder(lease_set="other", number=99, kind="grant"))
    await asyncio.sleep(0.01)
    assert bench.said[-1].standing == "content"
    await end(task)


async def test_a_load_beside_the_holders_work_is_not_made_again(bench):
    task, _ = await working(bench)
    bench.order("yield")
    await bench.until("idle")
    bench.order("offload")
    await bench.until("content")
    bench.put("a")
    await bench.until("wants")
    bench.order("preload")
    assert (await bench.until("wants")).memory_bytes == 1000
    bench.order("grant")
    await bench.until("holds")
    assert bench.role.did == ["offload", "load"]
    await end(task)


async def test_a_worker_that_is_to_stop_does_not_wait_for_its_turn(bench):
    waiting = asyncio.ensure_future(bench.turns.turn().__aenter__())
    await bench.until("wants")
    bench.waits.stop("the job ends")
    with pytest.raises(ChannelClosed):
        await waiting


async def test_leaving_the_block_ends_the_turn(bench):
    task = asyncio.ensure_future(_once(bench))
    await bench.until("wants")
    bench.order("grant")
    await asyncio.wait_for(task, 5)
    assert bench.said[-1].standing == "content"
    assert bench.role.did == ["offload"]


async def _once(bench):
    async with bench.turns.turn():
        await asyncio.sleep(0)


async def test_slots_that_join_a_lease_set_are_held_until_the_next_safe_point(bench):
    bench.turns.on_membership(pb.Membership(lease_set=""))
    task = asyncio.ensure_future(_forever(bench))
    await asyncio.sleep(0.01)
    bench.turns.on_membership(pb.Membership(lease_set="all"))
    assert bench.said[-1].standing == "holds"
    bench.turns.on_membership(pb.Membership(lease_set=""))
    await end(task)


async def test_what_it_was_told_in_a_set_that_is_no_more_does_not_count_in_the_next(bench):
    task, _ = await working(bench)
    with bench.recorder_span():  # it is at work, and does not let go meanwhile
        bench.order("end")
        assert bench.turns.yield_wanted.is_set()
        bench.turns.on_membership(pb.Membership(lease_set=""))
        bench.turns.on_membership(pb.Membership(lease_set="all"))
        assert not bench.turns.yield_wanted.is_set(), "nobody waits there yet"
        assert bench.said[-1].standing == "holds"
    await end(task)


async def test_who_is_between_two_turns_as_its_slots_join_a_set_leaves_them_by_itself(bench):
    """It has loaded, and will not look at anybody's word before its next turn."""
    bench.turns.on_membership(pb.Membership(lease_set=""))
    async with bench.turns.turn():
        assert bench.turns.residence.is_loaded
    assert bench.role.did == []
    bench.turns.on_membership(pb.Membership(lease_set="all"))
    assert bench.said[-1].standing == "leaves"
    await bench.until("content")
    assert bench.role.did == ["offload"]
    task = asyncio.ensure_future(_forever(bench))
    await bench.until("wants")
    bench.order("grant")
    async with asyncio.timeout(5):
        while bench.role.did != ["offload", "load"]:
            await asyncio.sleep(0.001)
    await end(task)


async def test_a_worker_that_begins_in_a_set_does_not_leave_slots_that_it_has_not_had(bench):
    assert bench.turns.residence.is_loaded, "as every role before it is made"
    assert [said.standing for said in bench.said] == ["content"]
    assert bench.role.did == []


async def test_a_turn_inside_a_turn_is_the_roles_mistake_and_a_safe_point_outside_is_none(bench):
    await bench.turns.safe_point()
    task, _ = await working(bench)
    with pytest.raises(UserError) as error:
        async with bench.turns.turn():
            pass
    assert str(error.value) == ("a role asks for a turn inside its turn; leave the block first, or use safe_point()")
    await end(task)


async def test_orders_of_another_set_are_passed_over_and_unknown_ones_named(bench, caplog):
    bench.turns.on_order(pb.TurnOrder(lease_set="other", number=9, kind="grant"))
    assert ([said.standing for said in bench.said], bench.turns.switches) == (["content"], 0)
    bench.order("juggle")
    [record] = caplog.records
    assert (record.getMessage(), record.__dict__["kind"]) == ("an order that this version does not know", "juggle")


async def test_the_numbers_of_turns_are_for_who_takes_some(bench):
    task, _ = await working(bench)
    await end(task)
    seconds = bench.turns.residence.seconds
    numbers = {name: value for name, labels, value in bench.turns.numbers() if labels == ()}
    waited = numbers.pop("rlinf_worker_turn_wait_seconds_total")
    assert waited > 0.0
    assert numbers == {
        "rlinf_worker_turn_switches_total": 1.0,
        "rlinf_worker_turn_load_seconds_total": seconds["load"],
        "rlinf_worker_turn_offload_seconds_total": seconds["offload"],
    }


async def test_a_wait_for_a_turn_is_counted_while_it_lasts():
    bench = Bench()
    now = 100.0
    bench.recorder._clock = lambda: now
    waiting = asyncio.ensure_future(_forever(bench))
    await bench.until("wants")
    now += 7.0
    numbers = {name: value for name, _, value in bench.turns.numbers()}
    assert numbers["rlinf_worker_turn_wait_seconds_total"] == pytest.approx(7.0)
    assert bench.recorder.so_far()["wait_turn"] == pytest.approx(7.0)
    assert bench.recorder.seconds["wait_turn"] == 0.0
    bench.order("grant")
    await bench.until("holds")
    now += 7.0
    numbers = {name: value for name, _, value in bench.turns.numbers()}
    assert numbers["rlinf_worker_turn_wait_seconds_total"] == pytest.approx(7.0), "and once"
    await end(waiting)
    await bench.turns.close()


async def test_who_has_its_slots_to_itself_has_no_such_numbers():
    bench = Bench(lease_set="")
    assert list(bench.turns.numbers()) == []
    await bench.turns.close()


async def _forever(bench):
    async with bench.turns.turn():
        await bench.take()


@pytest.mark.parametrize(
    ("waiting", "in_hand", "items", "goes_on"),
    [
        (0, 1, 5, True),  # stopped between two pieces of one unit: nobody else can end it
        (1, 0, 5, True),
        (0, 0, 5, False),  # it would only wait on the slots
        (0, 0, 0, True),  # nothing ever came this way: it works without channels
    ],
)
def test_a_role_that_was_stopped_wants_its_slots_for_what_waits_and_for_what_it_has_in_hand(
    waiting, in_hand, items, goes_on
):
    into = SimpleNamespace(given=SimpleNamespace(waiting=waiting))
    queue: Any = SimpleNamespace(into=into, in_hand=in_hand, account_in=SimpleNamespace(items=items))
    host: Any = SimpleNamespace(peers=SimpleNamespace(handlers={}, on_up=[], on_unreachable=[], on_superseded=[]))
    ends = ChannelEnds(host, Mock())
    ends.queues["units"] = queue
    assert ends.has_input is goes_on


async def idle_and_off(bench):
    bench.order("yield")
    await bench.until("idle")
    bench.order("offload")
    return await bench.until("content")


async def test_a_role_that_stays_leaves_the_slots_to_others_and_moves_nothing(bench):
    bench.stays = True
    task, did = await working(bench)
    gone = await idle_and_off(bench)
    assert (gone.memory_bytes, gone.stays, bench.role.did, bench.left) == (1000, True, [], [])
    bench.put("a")
    await bench.until("wants")
    assert did == [], "it does not work without its turn"
    bench.order("grant")
    assert not (await bench.until("holds")).stays
    async with asyncio.timeout(5):
        while did != ["a"]:
            await asyncio.sleep(0)
    assert bench.role.did == [], "nothing is loaded, either"
    bench.stays = False
    assert not (await idle_and_off(bench)).stays
    assert bench.role.did == ["offload"], "as the plan in force says when it leaves"
    await end(task)


async def test_a_plan_that_does_not_let_it_stay_is_in_force_once_it_has_left(bench):
    done = list[list[str]]()
    bench.turns.replanned(lambda: done.append([*bench.role.did]))
    assert done == [[]], "nobody else has its slots"
    bench.stays = True
    task, _ = await working(bench)
    bench.turns.replanned(lambda: done.append([*bench.role.did]))
    await idle_and_off(bench)
    bench.turns.replanned(lambda: done.append([*bench.role.did]))
    assert done == [[]] * 3, "it may stay"
    bench.stays = False
    bench.turns.replanned(lambda: done.append([*bench.role.did]))
    async with asyncio.timeout(5):
        while len(done) < 4:
            await asyncio.sleep(0.001)
    assert done[3] == ["offload"]
    assert (bench.said[-1].memory_bytes, bench.said[-1].stays) == (10, False)
    bench.turns.replanned(lambda: done.append([*bench.role.did]))
    assert len(done) == 5, "once"
    await end(task)


async def test_a_plan_that_comes_while_it_leaves_counts_all_the_same(bench):
    bench.stays = True
    task, _ = await working(bench)
    bench.order("yield")
    await bench.until("idle")
    async with bench.turns.residence._moving:
        bench.order("offload")
        await asyncio.sleep(0.01)
        bench.stays, done = False, asyncio.Event()
        bench.turns.replanned(done.set)
        assert not done.is_set()
    async with asyncio.timeout(5):
        await done.wait()
    assert bench.role.did == ["offload"]
    await end(task)
