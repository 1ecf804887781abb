"""QueueCore without a gang: what is announced, handed out, held, finished and lost, against a model."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlinf_api.errors import InvariantBroken
from rlinf_api.names import WorkerId
from rlinf_worker.queues.core import QueueCore
from rlinf_worker.queues.units import INLINE, Age, UnitId, UnitInfo, UnitState
from tests.fakes.looks import counted_looks

PRODUCERS = [WorkerId(f"env/{n}") for n in range(2)]
CONSUMERS = [WorkerId(f"actor/{n}") for n in range(3)]
KEYS = [f"env:{n}@{n // 4 + 1}" for n in range(8)]


def unit(key: str, *, branch: int = 0, producer: str = PRODUCERS[0], **fields) -> UnitInfo:
    return UnitInfo(key=key, branch=branch, step=int(key.split("@")[1]), producer=WorkerId(producer), **fields)


def ready(*consumers: WorkerId, credit: int = 8, **fields) -> QueueCore:
    core = QueueCore(**fields)
    core.consumers.ranked = list(consumers or CONSUMERS)
    for consumer in consumers or CONSUMERS:
        core.consumers.credit(consumer, credit)
    return core


@dataclass
class Known:
    state: str  # waiting assigned held finished lost cancelled
    producer: str
    consumer: WorkerId | None = None
    on_the_way_to: WorkerId | None = None  # lost with its producer, but perhaps it arrived


class Arrival(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core = QueueCore()
        self.core.consumers.ranked = CONSUMERS
        self.branch = 0
        self.known: dict[UnitId, Known] = {}
        self.credit = dict.fromkeys(CONSUMERS, 0)
        for consumer in CONSUMERS:
            self.say_credit(consumer, 3)

    def of(self, *states: str) -> list[UnitId]:
        return [uid for uid, k in self.known.items() if k.state in states]

    @rule(
        producer=st.sampled_from([*PRODUCERS, INLINE]),
        key=st.sampled_from(KEYS),
        affinity=st.none() | st.integers(0, 9),
        size=st.integers(0, 9),
        matched=st.booleans(),
    )
    def announce(self, producer, key, affinity, size, matched):
        self._announce(
            unit(key, branch=self.branch, producer=producer, affinity=affinity, size_bytes=size, weight=size)
        )
        if matched:
            self.match()

    def _announce(self, made):
        producer = made.producer
        before = self.known.get(made.id)
        news, duplicates, adopted = self.core.announce([made])
        assert news == ([made] if before is None or before.state in ("lost", "cancelled") else [])
        if before is not None and before.state == "held" and before.producer == "gone":
            assert (duplicates, [u.id for u in adopted]) == ([], [made.id]), "who made it again keeps it for the next"
            before.producer = producer
            return
        assert adopted == []
        if before is None or before.state in ("lost", "cancelled"):
            assert duplicates == []
            self.known[made.id] = Known("waiting", producer)
        else:
            assert bool(duplicates) == (before.state == "finished" or before.producer != producer)

    @rule(key=st.sampled_from(KEYS), affinity=st.none() | st.integers(0, 9))
    def rehome(self, key, affinity):
        entry = self.core.book.get(UnitId(self.branch, key))
        moves = entry is not None and entry.unit.affinity != affinity
        waits = {u.key for u in self.core.rehome([unit(key, branch=self.branch, affinity=affinity)])}
        assert waits == ({key} if moves and key in {uid.key for uid in self.of("waiting")} else set())
        assert entry is None or entry.unit.affinity == affinity

    @rule(consumer=st.sampled_from(CONSUMERS), units=st.integers(0, 3))
    def say_credit(self, consumer, units):
        self.core.consumers.credit(consumer, units)
        self.credit[consumer] = units

    @rule()
    def match(self):
        for consumer, units in self.core.match().items():
            assert len(units) <= self.credit[consumer]
            self.credit[consumer] -= len(units)
            for u in units:
                assert self.known[u.id].state == "waiting"
                assert u.affinity is None or CONSUMERS[u.affinity % len(CONSUMERS)] == consumer
                self.known[u.id].state, self.known[u.id].consumer = "assigned", consumer

    @rule(consumer=st.none() | st.sampled_from(CONSUMERS), key=st.sampled_from(KEYS))
    def held(self, consumer, key):
        """None: by the one that has it."""
        k = self.known.get(UnitId(self.branch, key))
        consumer = consumer or (k and k.consumer) or CONSUMERS[0]
        news = self.core.held(consumer, branch=self.branch, keys=[key])
        if k is not None and k.state == "assigned" and k.consumer == consumer:
            assert [u.key for u in news] == [key]
            k.state = "held"
        else:
            assert news == []
            if k is not None and k.state == "lost" and k.on_the_way_to == consumer:
                k.state, k.consumer, k.producer = "held", consumer, "gone"

    @rule(consumer=st.none() | st.sampled_from(CONSUMERS), key=st.sampled_from(KEYS), drop=st.booleans())
    def finish(self, consumer, key, drop):
        k = self.known.get(UnitId(self.branch, key))
        consumer = consumer or (k and k.consumer) or CONSUMERS[0]
        if drop:
            done = self.core.acked(consumer, branch=self.branch, keys=[key], count="dropped")
        else:
            done = self.core.acked(consumer, branch=self.branch, keys=[key])
        mine = k is not None and k.state in ("assigned", "held") and k.consumer == consumer
        assert len(done) == mine
        if k is not None and mine:
            k.state = "finished"

    @rule(consumer=st.sampled_from(CONSUMERS))
    def consumer_dies(self, consumer):
        lost = {u.id for u in self.core.departures.remove_consumer(consumer)}
        self.credit[consumer] = 0
        for uid, k in self.known.items():
            if k.on_the_way_to == consumer:
                k.on_the_way_to = None
            if k.state in ("assigned", "held") and k.consumer == consumer:
                assert (uid in lost) == (k.producer == "gone")
                k.state, k.consumer = ("lost" if uid in lost else "waiting"), None

    @rule(producer=st.sampled_from(PRODUCERS))
    def producer_dies(self, producer):
        lost = {u.id for u in self.core.departures.remove_producer(producer)}
        assert lost == {uid for uid in self.of("waiting", "assigned") if self.known[uid].producer == producer}
        for uid in lost:
            k = self.known[uid]
            k.state, k.on_the_way_to, k.consumer = "lost", k.consumer, None
        for uid in self.of("held"):
            if self.known[uid].producer == producer:
                self.known[uid].producer = "gone"

    @rule(consumer=st.sampled_from(CONSUMERS), producer=st.sampled_from(PRODUCERS))
    def link_breaks(self, consumer, producer):
        lost = {u.id for u in self.core.departures.missing(consumer, producer)}
        mine = [u for u in self.of("assigned") if self.known[u].consumer == consumer]
        assert lost == {uid for uid in mine if self.known[uid].producer == producer}
        for uid in lost:
            self.known[uid] = Known("lost", producer)

    @rule(consumer=st.sampled_from(CONSUMERS), key=st.sampled_from(KEYS))
    def reconnects_and_holds(self, consumer, key):
        uid = UnitId(self.branch, key)
        k = self.known.get(uid)
        self.core.restore_held(consumer, unit(key, branch=self.branch))
        if k is None or k.state in ("lost", "cancelled"):
            self.known[uid] = Known("held", PRODUCERS[0], consumer)
        elif k.state == "waiting" or (k.state == "assigned" and k.consumer == consumer):
            k.state, k.consumer = "held", consumer

    @rule(consumer=st.sampled_from(CONSUMERS))
    def reconnects(self, consumer):
        again, rounds = self.core.assigned_to(consumer)
        assert rounds == []
        assert {u.id for u in again} == {u for u in self.of("assigned") if self.known[u].consumer == consumer}

    @rule(key=st.sampled_from(KEYS))
    def requeue_ticket(self, key):
        uid = UnitId(self.branch, key)
        k = self.known.get(uid)
        if k is None or k.state in ("finished", "cancelled"):
            before = self.core.counts["redelivered"]
            self.core.requeue(unit(key, branch=self.branch, producer=INLINE))
            assert self.core.counts["redelivered"] == before + 1
            self.known[uid] = Known("waiting", INLINE)

    @rule()
    def cancel_branch(self):
        live = set(self.of("waiting", "assigned", "held"))
        assert {u.id for u in self.core.forget(Age.end_of(self.branch), count="dropped")} == live
        for uid in live:
            self.known[uid].state = "cancelled"
        self.known = {}
        self.branch += 1

    @rule(step=st.integers(1, 2))
    def step_commits(self, step):
        """Only what is under way stays known; what the step made is never announced again (its caller sees to it)."""
        here = [uid for uid in self.of("waiting", "assigned", "lost") if int(uid.key.split("@")[1]) <= step]
        if not here and not any(int(u.key.split("@")[1]) <= step for u in self.of("held")):
            self.core.close(Age(self.branch, step))
            self.cancel_branch()

    @invariant()
    def nothing_vanishes(self):
        entries = {uid: (e.state, e.consumer) for uid, e in self.core.book.entries.items()}
        states = {"waiting": UnitState.WAITING, "assigned": UnitState.ASSIGNED, "held": UnitState.HELD}
        assert entries == {uid: (states[k.state], k.consumer) for uid, k in self.known.items() if k.state in states}
        assert len(self.core.book.entries) == len(entries)
        assert set(self.core._finished.known) == set(self.of("finished"))

    @invariant()
    def indices_agree_with_the_entries(self):
        book = self.core.book
        entries = sorted(book.entries.values(), key=lambda e: e.arrival)
        for age in {e.unit.age for e in entries} | set(book.lines.ages()):
            here = [e for e in entries if e.unit.age == age]
            assert list(book.waiting(age)) == [e for e in here if e.state is UnitState.WAITING]
            assert book.lines.count(age) == sum(e.state is UnitState.WAITING for e in here)
            assert book.count_assigned(age) == sum(e.state is UnitState.ASSIGNED for e in here)
        for consumer in CONSUMERS:
            mine = [e for e in entries if e.consumer == consumer]
            assert book.loads.of(consumer) == mine
            assert book.loads.weight_of(consumer) == pytest.approx(sum(e.unit.weight for e in mine))
        for producer in PRODUCERS:
            assert sorted(book.made_by(producer), key=lambda e: e.arrival) == [
                e for e in entries if e.unit.producer == producer
            ]
        assert book.waiting_count == sum(e.state is UnitState.WAITING for e in entries)
        assert book.queued_bytes == sum(e.unit.size_bytes for e in entries)
        assert {t for t in self.known if t in book.worked_on} == {e.unit.id for e in entries if not e.is_sealed}

    @invariant()
    def credit_is_what_was_stated_less_what_was_given(self):
        assert {c: self.core.consumers.credit_of(c) for c in CONSUMERS} == self.credit
        assert all(n >= 0 for n in self.credit.values())


TestArrival = Arrival.TestCase
TestArrival.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_oldest_step_is_handed_out_first():
    core = ready(CONSUMERS[0], credit=1)
    core.announce([unit("env:0@2"), unit("env:0@1")])
    assert [u.key for units in core.match().values() for u in units] == ["env:0@1"]


def test_a_unit_that_comes_back_has_its_place_in_the_order_of_arrival():
    core = ready(CONSUMERS[0], credit=1)
    core.announce([unit("env:0@1"), unit("env:1@1"), unit("env:2@1")])
    core.match()
    core.departures.remove_consumer(CONSUMERS[0])
    core.consumers.credit(CONSUMERS[0], 3)
    assert [u.key for units in core.match().values() for u in units] == ["env:0@1", "env:1@1", "env:2@1"]


def test_whoever_has_less_to_do_is_given_more():
    core = ready(CONSUMERS[0], CONSUMERS[1], credit=4)
    core.announce([unit("env:0@1", weight=9.0)])
    (first,) = core.match()
    core.consumers.credit(first, 4)
    core.announce([unit("env:1@1"), unit("env:2@1"), unit("env:3@1")])
    given = {consumer: len(units) for consumer, units in core.match().items()}
    assert given == {next(c for c in CONSUMERS[:2] if c != first): 3}


def test_what_a_message_costs_grows_neither_with_what_waits_nor_with_who_takes():
    """10,000 wait for anybody, 10,000 for one of a thousand each, of whom one asks for one unit, and one for two."""
    crowd = [WorkerId(f"train/{n}") for n in range(1000)]
    with counted_looks() as looks:
        core = ready(*crowd, credit=0)
        core.announce(unit(f"env:{i}@1") for i in range(10_000))
        core.announce(unit(f"env:{i}@1", affinity=i) for i in range(10_000, 20_000))
        core.match()
        before = looks()
        core.consumers.credit(crowd[17], 1)
        assert [u.key for u in core.match()[crowd[17]]] == ["env:10017@1"]
        assert looks() - before <= 40
        core.consumers.credit(crowd[18], 12)
        assert [u.key for u in core.match()[crowd[18]]][9:] == ["env:19018@1", "env:0@1", "env:1@1"]
        assert looks() - before <= 400


def test_a_pinned_unit_waits_for_its_consumer_and_holds_up_nobody():
    core = ready(CONSUMERS[0], CONSUMERS[1])
    core.consumers.credit(CONSUMERS[1], 0)
    core.announce([unit("env:1@1", affinity=1), unit("env:2@1")])
    assert {c: [u.key for u in units] for c, units in core.match().items()} == {CONSUMERS[0]: ["env:2@1"]}


def test_with_other_consumers_a_pinned_unit_that_waits_is_anothers_and_credit_still_counts():
    core = ready(CONSUMERS[0], credit=0)
    core.announce([unit("env:1@1", affinity=1), unit("env:0@1", affinity=0), unit("env:2@1")])
    core.match()
    core.consumers.credit(CONSUMERS[1], 2)
    core.match()
    core.consumers.ranked = CONSUMERS[:2]
    assert {c: [u.key for u in units] for c, units in core.match().items()} == {CONSUMERS[1]: ["env:1@1", "env:2@1"]}
    idle = ready(CONSUMERS[1], credit=1)
    idle.match()
    idle.consumers.ranked = CONSUMERS[1:]
    idle.announce([unit("env:3@1")])
    assert list(idle.match()) == [CONSUMERS[1]]


def test_what_was_given_before_a_stream_broke_is_named_again_and_costs_no_second_credit():
    core = ready(CONSUMERS[0])
    core.announce([unit("env:0@1"), unit("env:1@1")])
    core.match()
    core.held(CONSUMERS[0], branch=0, keys=["env:0@1"])
    assert [u.key for u in core.assigned_to(CONSUMERS[0])[0]] == ["env:1@1"]
    assert core.match() == {}


def test_what_arrived_although_its_producer_died_is_held_and_not_made_again():
    core = ready(CONSUMERS[0])
    core.announce([unit("env:0@1")])
    core.match()
    assert [u.key for u in core.departures.remove_producer(PRODUCERS[0])] == ["env:0@1"]
    core.held(CONSUMERS[0], branch=0, keys=["env:0@1"])
    again = core.announce([unit("env:0@1", producer=PRODUCERS[1])])
    assert again == ([], [], [unit("env:0@1", producer=PRODUCERS[1])]), "held, by one who has it from another life"
    assert core.departures.remove_consumer(CONSUMERS[0]) == [], "who made it again has it for the next"


def test_of_a_key_that_is_not_to_come_what_waits_goes_and_what_a_consumer_has_stays_with_it():
    core = ready(CONSUMERS[0], credit=1)
    had, waits = unit("env:0@1"), unit("env:1@1")
    core.announce([had, waits])
    core.match()
    assert (core.end(had), core.end(waits)) == ([], [waits])
    assert core.counts["dropped"] == 1
    assert core.acked(CONSUMERS[0], branch=0, keys=[had.key, waits.key]) == [had]
    assert core.announce([waits]).duplicates == [waits], "who makes it all the same makes a duplicate"


def test_a_step_that_was_opened_again_with_other_keys_is_a_bug():
    core = ready()
    core.steps.at(Age(0, 1)).open(dict.fromkeys(["env:0@1"], 1))
    core.steps.at(Age(0, 1)).open(dict.fromkeys(["env:0@1"], 1))
    with pytest.raises(InvariantBroken, match="different keys"):
        core.steps.at(Age(0, 1)).open(dict.fromkeys(["env:1@1"], 1))


def test_memory_of_finished_units_does_not_grow_with_the_job():
    core = ready(CONSUMERS[0], credit=100)
    for step in range(1, 50):
        core.announce([unit(f"env:0@{step}")])
        core.match()
        core.held(CONSUMERS[0], branch=0, keys=[f"env:0@{step}"])
        core.close(Age(0, step))
        core.acked(CONSUMERS[0], branch=0, keys=[f"env:0@{step}"])  # acknowledged after the commit, as actors do
    assert len(core.book.entries) == 0
    assert len(core._finished) == 0


def test_a_ticket_restored_without_affinity_gets_it_back_from_the_flow():
    core = ready()
    core.restore_held(CONSUMERS[1], unit("env:1@1", producer=INLINE))
    core.announce([unit("env:1@1", producer=INLINE, affinity=1)])
    core.departures.remove_consumer(CONSUMERS[1])
    core.consumers.credit(CONSUMERS[1], 1)
    assert list(core.match()) == [CONSUMERS[1]]


def test_what_a_new_driver_heard_before_it_learnt_the_commit_is_released():
    core = ready()
    core.announce([unit("env:0@1"), unit("env:0@2"), unit("env:0@3", branch=1)])
    late = core.forget(Age(1, 2))
    assert sorted(u.key for u in late) == ["env:0@1", "env:0@2"]
    assert len(core.book.entries) == 1


def test_the_next_life_of_a_consumer_has_no_claim_on_what_was_on_its_way_to_the_last():
    core = ready(CONSUMERS[0])
    core.announce([unit("env:0@1")])
    core.match()
    core.departures.remove_producer(WorkerId(PRODUCERS[0]))
    core.departures.remove_consumer(CONSUMERS[0])
    assert core.held(CONSUMERS[0], branch=0, keys=["env:0@1"]) == []
    assert not core.knows(UnitId(0, "env:0@1")), "lost, and made again from its ticket"


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9])
def test_units_are_shared_out_evenly_however_much_of_their_credit_consumers_have_used(window):
    """Steps of eight units for three consumers, each of which states its credit anew once it has used all of it: who
    has some left is not passed over for those that have just stated theirs."""
    core = ready(credit=window)
    left: dict[WorkerId, int] = dict.fromkeys(CONSUMERS, window)
    for step in range(1, 20):
        had, units = dict.fromkeys(CONSUMERS, 0), [unit(f"env:{n}@{step}") for n in range(8)]
        for made in units:
            core.announce([made])
            [consumer] = core.match()
            had[consumer] += 1
            left[consumer] -= 1
            if not left[consumer]:
                left[consumer] = window
                core.consumers.credit(consumer, window)
        assert sorted(had.values()) == [2, 3, 3], f"step {step}: {had}"
        for made in units:
            whose = core.book.entries[made.id].consumer
            assert whose is not None
            core.acked(whose, branch=0, keys=[made.key])
