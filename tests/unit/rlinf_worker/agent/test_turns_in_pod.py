"""Lease sets of one pod over changes of plan: who is told what, what is carried over, and what people read."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2 as pb
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_worker.agent import remains
from rlinf_worker.agent.turns import AgentTurns
from rlinf_worker.settings import Settings


def lease_set(name: str, *workers: str, by_driver: bool = False, **turn: Any) -> pb.LeaseSet:
    turns = [pb.Turn(role=worker.split("/")[0], workers=[worker], **turn) for worker in workers]
    return pb.LeaseSet(name=name, by_driver=by_driver, turns=turns)


class Timer:
    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due, self.call, self.is_on = due, call, True

    def cancel(self) -> None:
        self.is_on = False


class Pod:
    """Plays supervisor, socket, outbox, NVML and the time of its arbiters."""

    def __init__(self) -> None:
        self.used: int | None = 0
        self.left: list[str] = []
        self.orders: list[tuple[str, slots_pb2.AgentOrder]] = []
        self.told: list[pb.AgentMessage] = []
        self.condemned: list[tuple[str, str]] = []
        self.timers: list[Timer] = []
        self.now = 100.0
        self.turns = AgentTurns(
            Settings(turn_release_s=20.0), workers=cast(Any, self), order=self.order, tell=self.told.append,
            probe=cast(Any, self), turn_over=lambda *_: None, timers=self,
        )  # fmt: skip

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[..., None], *args: Any) -> Timer:
        self.timers.append(Timer(self.now + delay, lambda: callback(*args)))
        return self.timers[-1]

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.is_on and timer.due <= self.now]:
            timer.is_on = False
            timer.call()

    def used_bytes(self) -> int | None:
        return self.used

    def remains(self, worker: str) -> list[str]:
        return self.left

    def condemn(self, worker: str, *, why: str) -> None:
        self.condemned.append((worker, why))

    def order(self, worker: str, order: slots_pb2.AgentOrder) -> bool:
        self.orders.append((worker, order))
        return True

    def adopt(self, *sets: pb.LeaseSet, vacant: bool = True) -> list[str]:
        """`vacant`: nobody ends on the slots of who takes no turns any more."""
        alone = self.turns.adopt(pb.LeaseSets(sets=sets))
        for worker in alone if vacant else ():
            self.turns.alone(worker)
        return alone

    def join(self, *workers: str, attempt: int = 1) -> None:
        for worker in workers:
            self.turns.joined(worker, attempt)

    def number(self, worker: str) -> int:
        numbers = [o.turn.number for w, o in self.orders if w == worker and o.WhichOneof("kind") == "turn"]
        return max(numbers, default=0)

    def say(self, worker: str, standing: str, lease: str = "all", *, seen: int | None = None, **fields: Any) -> None:
        known: dict[str, Any] = {"ripe": True, "seen": self.number(worker) if seen is None else seen}
        said = slots_pb2.TurnReport(lease_set=lease, standing=standing, **{**known, **fields})
        self.turns.said(worker, 1, said)

    def take_orders(self) -> list[tuple[str, str, str]]:
        """(worker, kind, lease set) of those since the last call; a membership's kind is `in`."""
        found, self.orders = self.orders, []
        return [
            (w, o.turn.kind, o.turn.lease_set) if o.WhichOneof("kind") == "turn" else (w, "in", o.membership.lease_set)
            for w, o in found
        ]

    def notices(self) -> list[tuple[str, str]]:
        return [(m.notice.kind, m.notice.message) for m in self.told if m.WhichOneof("kind") == "notice"]

    def told_turns(self) -> list[pb.WorkerTurn]:
        return [m.turn for m in self.told if m.WhichOneof("kind") == "turn"]


@pytest.fixture
async def pod():
    made = Pod()
    yield made
    await made.turns.close()


async def test_who_joins_hears_in_which_set_it_is_and_who_is_moved_hears_it_then(pod):
    pod.join("env/0", "actor/0")
    assert pod.take_orders() == [("env/0", "in", ""), ("actor/0", "in", "")]
    pod.adopt(lease_set("all", "env/0", "actor/0", "rollout/0"))
    said = pod.take_orders()
    assert [kind for _, kind, _ in said[:2]] == ["in", "in"], "rollout is not here yet"
    assert said[2:] == [("actor/0", "leave", "all")], "both had their slots to themselves, and one is to leave first"
    pod.adopt(lease_set("all", "env/0"))
    assert pod.take_orders() == [("actor/0", "in", "")], "who stays where it is hears nothing"
    pod.join("env/0")
    assert pod.take_orders() == [("env/0", "in", "all")]


async def test_they_take_turns_together_who_are_in_one_set(pod):
    pod.adopt(lease_set("all", "env/0", "actor/0"), lease_set("other", "rollout/0"))
    pairs = [("env/0", "actor/0"), ("env/0", "rollout/0"), ("env/0", "env/9"), ("env/8", "env/9")]
    assert [pod.turns.together(*pair) for pair in pairs] == [True, False, False, False]
    pod.adopt()
    assert not pod.turns.together("env/0", "actor/0"), "in no set is not in the same"


def granted_of(pod):
    """`free_since` of the grants since the last call, by worker."""
    found, pod.orders = pod.orders, []
    return {w: o.turn.free_since for w, o in found if o.WhichOneof("kind") == "turn" and o.turn.kind == "grant"}


async def test_who_is_granted_a_turn_hears_since_when_the_slots_are_free(pod):
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    pod.join("env/0", "actor/0")
    pod.say("env/0", "wants")
    assert granted_of(pod) == {"env/0": 0.0}, "nobody has left them"
    pod.say("env/0", "holds", seen=1)
    pod.say("actor/0", "wants", seen=0)
    pod.say("env/0", "leaves", seen=2)
    pod.say("env/0", "content", seen=2, free_since=50.5)
    assert granted_of(pod) == {"actor/0": 50.5}
    pod.say("actor/0", "holds", seen=3)
    pod.say("env/0", "wants", seen=2, free_since=50.5)
    pod.say("actor/0", "leaves", seen=4)
    pod.say("actor/0", "content", seen=4, free_since=60.25)
    assert granted_of(pod) == {"env/0": 60.25}


async def test_what_the_dead_had_said_last_is_of_the_past_though_it_is_read_after_their_end(pod):
    """An agent that was stopped for a while sees both at once, in any order."""
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    pod.join("env/0", "actor/0")
    pod.say("env/0", "wants")
    pod.turns.gone("env/0", 1)
    pod.say("env/0", "holds")
    pod.take_orders()
    pod.say("actor/0", "wants")
    assert pod.take_orders() == [("actor/0", "grant", "all")]


async def test_of_slots_whose_holder_died_nobody_knows_since_when_they_are_free(pod):
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    pod.join("env/0", "actor/0")
    pod.say("env/0", "wants")
    pod.say("env/0", "holds")
    pod.say("actor/0", "wants", seen=0, free_since=7.0)
    granted_of(pod)
    pod.turns.gone("env/0", 1)
    assert granted_of(pod) == {"actor/0": 0.0}


async def test_turns_of_sets_that_are_no_more_stay_counted(pod):
    pod.adopt(lease_set("all", "env/0"))
    pod.join("env/0")
    pod.say("env/0", "wants")
    assert pod.turns.changes == 1
    pod.adopt()
    assert pod.turns.changes == 1
    pod.adopt(lease_set("all", "env/0"))
    pod.say("env/0", "content")
    pod.say("env/0", "wants")
    assert pod.turns.changes == 2


async def test_a_set_that_another_plan_changes_goes_on_with_higher_numbers_and_who_was_granted_holds(pod):
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    pod.join("env/0", "actor/0")
    pod.say("env/0", "wants")
    granted = pod.number("env/0")
    pod.take_orders()
    pod.adopt(lease_set("all", "env/0", "actor/0", until_units=5))
    assert pod.take_orders() == [], "its grant is on its way already"
    pod.say("actor/0", "wants", seen=0)
    assert pod.take_orders() == [], "it is granted to nobody else"
    pod.say("env/0", "holds", seen=granted)
    [(worker, kind, _)] = pod.take_orders()
    assert (worker, kind) == ("env/0", "leave")


async def test_numbers_of_orders_grow_over_plans(pod):
    pod.adopt(lease_set("all", "env/0"))
    pod.join("env/0")
    pod.say("env/0", "wants")
    before = pod.number("env/0")
    pod.say("env/0", "content")
    pod.adopt(lease_set("new", "env/0"))
    pod.say("env/0", "wants", "new", seen=before)
    assert pod.number("env/0") > before


async def test_one_that_is_not_let_go_of_in_time_is_condemned_and_counted(pod):
    pod.adopt(lease_set("all", "env/0"))
    pod.join("env/0")
    pod.say("env/0", "wants")
    pod.pass_by(19.0)
    assert pod.condemned == []
    pod.pass_by(1.0)
    assert pod.condemned == [("env/0", "lease set 'all' not released within 20 s")]
    assert pod.turns.kills == 1


# --- the driver's sets ------------------------------------------------------------------------------------------------
async def test_what_workers_of_the_drivers_sets_say_is_told_as_it_is(pod):
    pod.adopt(lease_set("far", "actor/0", by_driver=True))
    pod.join("actor/0")
    pod.say("actor/0", "idle", "far", seen=7, ripe=False, items=3, memory_bytes=9)
    wanted = pb.WorkerTurn(
        lease_set="far", worker="actor/0", attempt=1, standing="idle", ripe=False, seen=7, items=3, memory_bytes=9
    )
    assert pod.told_turns() == [wanted]
    assert list(pod.turns.hello()) == [wanted]
    pod.adopt(lease_set("far", "actor/0", "env/0", by_driver=True))
    assert pod.told_turns() == [wanted] * 2, "who decides anew is told where they stand"


async def test_one_that_has_a_grant_on_its_way_is_told_to_hold(pod):
    pod.adopt(lease_set("far", "actor/0", by_driver=True))
    pod.join("actor/0")
    pod.say("actor/0", "wants", "far", seen=7)
    for kind, number, standing in (("yield", 8, "wants"), ("grant", 7, "wants"), ("grant", 8, "holds")):
        order = pb.TurnOrder(lease_set="far", worker="actor/0", attempt=1, number=number, kind=kind)
        pod.turns.obey(order)
        assert [turn.standing for turn in pod.turns.hello()] == [standing], (kind, number)


async def test_the_driver_hears_that_one_is_away_when_nothing_is_left_of_it(pod, monkeypatch):
    monkeypatch.setattr(remains, "_POLL_S", 0.001)
    pod.adopt(lease_set("far", "actor/0", by_driver=True))
    pod.join("actor/0")
    pod.say("actor/0", "holds", "far", seen=7)
    pod.told.clear()
    pod.left = ["a process"]
    pod.turns.gone("actor/0", 2)  # of another life
    assert [turn.standing for turn in pod.turns.hello()] == ["holds"]
    pod.turns.gone("actor/0", 1)
    assert [(turn.standing, turn.seen) for turn in pod.turns.hello()] == [("holds", 0)]
    assert pod.told == []
    pod.left = []
    async with asyncio.timeout(10):
        while not pod.told:
            await asyncio.sleep(0.001)
    assert pod.told_turns() == [pb.WorkerTurn(lease_set="far", worker="actor/0", attempt=1, standing="away", ripe=True)]
    assert list(pod.turns.hello()) == []


async def test_who_is_in_no_set_leaves_nothing_to_wait_for(pod):
    pod.join("actor/0")
    pod.left = ["a process"]
    pod.turns.gone("actor/0", 1)
    pod.turns.gone("actor/9", 1)
    assert (pod.told, list(pod.turns.hello())) == ([], [])


# --- what people read -------------------------------------------------------------------------------------------------
async def test_memory_and_processes_that_stay_are_said_and_the_slots_go_on_in_the_end(pod, monkeypatch):
    monkeypatch.setattr(remains, "_POLL_S", 0.0)
    pod.adopt(lease_set("far", "actor/0", by_driver=True))
    pod.join("actor/0")
    pod.say("actor/0", "wants", "far")
    pod.turns.obey(pb.TurnOrder(lease_set="far", worker="actor/0", attempt=1, number=8, kind="grant"))
    pod.say("actor/0", "holds", "far", seen=8, memory_bytes=1000)
    pod.told.clear()
    pod.left, pod.used = ["one", "two"], 900
    pod.turns.gone("actor/0", 1)
    await asyncio.sleep(0)
    for seconds, count in ((29.0, 0), (1.0, 1), (29.0, 1), (1.0, 2)):
        pod.now += seconds
        for _ in range(5):
            await asyncio.sleep(0)
        assert pod.notices() == [("turns", "the slots of worker actor/0 stay taken: 2 processes do not end")] * count
    pod.told.clear()
    pod.left = []
    async with asyncio.timeout(10):
        while not pod.told_turns():
            await asyncio.sleep(0.001)
    said = "worker actor/0 is dead, but memory of its accelerators is not seen to be free"
    assert pod.notices() == [("turns", said)]
    assert [turn.standing for turn in pod.told_turns()] == ["away"]


async def test_sets_that_stall_are_named_until_something_moves_or_they_are_no_more(pod):
    pod.adopt(lease_set("b", "env/0"), lease_set("a", "actor/0"))
    for name, why in (("b", "nothing in b"), ("a", "nothing in a"), ("b", "")):
        pod.turns.stalled(cast(Any, lease_set(name)), why)
    pod.adopt(lease_set("b", "env/0"))
    pod.adopt()
    assert pod.notices() == [
        ("turns-stalled", text) for text in ("nothing in b", "nothing in a; nothing in b", "nothing in a", "")
    ]


async def test_of_one_that_stays_nobody_is_told_that_it_keeps_its_memory(pod):
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    pod.join("env/0", "actor/0")
    pod.say("env/0", "wants")
    pod.say("env/0", "idle", memory_bytes=8000)
    pod.say("actor/0", "wants")
    pod.say("env/0", "content", memory_bytes=8000, stays=True)
    assert pod.notices() == []
    pod.say("env/0", "content", memory_bytes=8000)
    assert pod.notices() == [("turns", "worker env/0 has left its slots and keeps 8000 of 8000 bytes on them")]


async def test_one_that_keeps_half_of_its_memory_is_not_worth_a_word(pod):
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    pod.join("env/0", "actor/0")
    for kept in (4000, 4001):
        pod.say("env/0", "wants")
        pod.say("env/0", "idle", memory_bytes=8000)
        pod.say("actor/0", "wants")
        pod.say("env/0", "content", memory_bytes=kept)
        pod.say("actor/0", "content")
    said = "worker env/0 has left its slots and keeps 4001 of 8000 bytes on them"
    assert pod.notices() == [("turns", said)]


# --- a plan under which they begin to take turns, or cease to ---------------------------------------------------------
async def test_who_had_its_slots_to_itself_is_on_them_until_it_says_otherwise(pod):
    pod.join("env/0")
    pod.take_orders()
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    assert pod.take_orders() == [("env/0", "in", "all")]
    pod.join("actor/0")
    pod.say("actor/0", "wants")
    number = pod.number("env/0")
    assert pod.take_orders() == [("actor/0", "in", "all"), ("env/0", "leave", "all")], "nobody is granted beside it"
    pod.say("env/0", "leaves", seen=number)
    assert pod.take_orders() == []
    pod.say("env/0", "content", seen=number)
    assert pod.take_orders() == [("actor/0", "grant", "all")]


async def test_who_was_out_of_every_set_in_between_is_taken_to_have_its_slots_again(pod):
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    pod.join("env/0", "actor/0")
    pod.say("env/0", "content")
    pod.say("actor/0", "content")
    pod.adopt()
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    assert pod.take_orders()[-1] == ("actor/0", "leave", "all"), "both are on the slots for all that is known"
    pod.say("actor/0", "wants", seen=99)
    assert pod.take_orders() == [("env/0", "leave", "all")]
    pod.say("env/0", "content", seen=99)
    assert pod.take_orders() == [("actor/0", "grant", "all")]


async def test_who_was_told_to_leave_in_a_set_before_is_told_so_again_in_the_next(pod):
    """It forgot, as it was told that it is in none: the others would wait for it until the longest turn is over."""
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    pod.join("env/0", "actor/0")
    pod.say("env/0", "content")
    pod.say("actor/0", "wants")
    pod.say("actor/0", "holds")
    pod.say("env/0", "wants")
    assert pod.take_orders()[-1] == ("actor/0", "leave", "all")
    pod.adopt()
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    assert ("actor/0", "leave", "all") in pod.take_orders()


async def test_who_takes_no_turns_any_more_hears_it_when_nobody_ends_on_its_slots(pod):
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    pod.join("env/0", "actor/0")
    pod.take_orders()
    assert pod.adopt(lease_set("all", "actor/0"), vacant=False) == ["env/0"]
    assert pod.take_orders() == []
    pod.turns.alone("env/0")
    assert pod.take_orders() == [("env/0", "in", "")]


async def test_a_plan_that_has_it_take_turns_again_meanwhile_counts(pod):
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    pod.join("env/0", "actor/0")
    assert sorted(pod.adopt(vacant=False)) == ["actor/0", "env/0"]
    pod.adopt(lease_set("all", "env/0", "actor/0"))
    pod.take_orders()
    pod.turns.alone("env/0")
    assert pod.take_orders() == []
