"""A queue that joins another: a unit is handed out once all its parts are there, and they go to the same worker."""

import random

import pytest

from rlinf_api.names import WorkerId
from rlinf_worker.queues.core import QueueCore
from rlinf_worker.queues.units import Age, UnitId, UnitInfo, UnitState
from tests.fakes.looks import counted_looks

A, B = WorkerId("train/0"), WorkerId("train/1")


def unit(index, *, producer):
    return UnitInfo(key=f"w:1/{index}", branch=0, step=1, producer=WorkerId(producer))


def joined(*, rounds, **more):
    first, part = QueueCore(rounds=rounds, **more), QueueCore()
    part.joint.join(first.joint)
    for core in (first, part):
        core.consumers.ranked = [A, B]
        core.consumers.credit(A, 4)
        core.consumers.credit(B, 4)
    return first, part


def test_a_unit_waits_for_its_other_part_and_later_units_do_not_wait_for_it():
    first, part = joined(rounds=False)
    first.announce([unit(0, producer="reward/0"), unit(1, producer="reward/0")])
    assert first.match() == {}
    part.announce([unit(1, producer="reference/0")])
    given = first.match()
    assert [[u.key for u in units] for units in given.values()] == [["w:1/1"]]
    assert {c: [u.key for u in units] for c, units in part.match().items()} == {min(given): ["w:1/1"]}
    assert part.match() == {}


def test_a_round_is_of_complete_units_in_the_order_in_which_they_became_so():
    first, part = joined(rounds=True)
    first.steps.at(Age(0, 1)).open(dict.fromkeys([f"w:1/{n}" for n in range(4)], 1))
    first.announce([unit(n, producer="reward/0") for n in range(4)])
    assert first.match_rounds() == []
    part.announce([unit(n, producer="reference/0") for n in (3, 2)])
    [formed] = first.match_rounds()
    keys = {rank: [u.key for u in units] for rank, units in formed.parts.items()}
    assert keys == {A: ["w:1/2"], B: ["w:1/3"]}
    assert {c: [u.key for u in units] for c, units in part.match().items()} == keys


def test_parts_are_given_again_with_the_unit_where_a_consumer_is_gone():
    first, part = joined(rounds=False)
    for core in (first, part):
        core.announce([unit(0, producer="reward/0")])
    [consumer] = first.match()
    part.match()
    other = B if consumer == A else A
    for core in (first, part):
        core.departures.remove_consumer(consumer)
    assert part.match() == {}, "nobody has the unit now"
    assert list(first.match()) == [other]
    assert list(part.match()) == [other]


def test_a_unit_that_is_made_again_passes_a_queue_that_had_finished_with_it():
    core = QueueCore()
    core.consumers.ranked = [A]
    core.consumers.credit(A, 4)
    core.announce([unit(0, producer="rollout/0")])
    core.match()
    core.held(A, branch=0, keys=["w:1/0"])
    core.acked(A, branch=0, keys=["w:1/0"])
    assert core.announce([unit(0, producer="rollout/1")]).duplicates, "a duplicate"
    core.expect_again([UnitId(0, "w:1/0")])
    assert core.announce([unit(0, producer="rollout/1")]).duplicates == []
    assert len(core.match()) == 1


def test_what_comes_of_a_ticket_that_is_worked_on_again_passes_once_more_and_nothing_else():
    core = QueueCore()
    core.consumers.ranked = [WorkerId("reward/0")]
    core.consumers.credit(WorkerId("reward/0"), 8)
    made = [UnitInfo(key=f"{t}/0", branch=0, step=1, tickets=(t,), producer=WorkerId("rollout/0")) for t in "pq"]
    core.announce(made)
    core.match()
    core.held(WorkerId("reward/0"), branch=0, keys=["p/0", "q/0"])
    core.acked(WorkerId("reward/0"), branch=0, keys=["p/0", "q/0"])
    core.expect_again([UnitId(0, "p")])
    assert [unit.key for unit in core.announce(made).duplicates] == ["q/0"]


@pytest.mark.parametrize(("rounds", "order"), [(True, "lineage"), (True, "arrival"), (False, "arrival")])
def test_what_a_message_costs_does_not_grow_with_what_waits_for_its_other_part(rounds, order):
    looks = [looks_of_one_batch(waiting, rounds=rounds, order=order) for waiting in (1_000, 50_000)]
    assert looks[0] == looks[1] < 8 * 150, "eight units of two queues: announced, handed out, held, acknowledged"


def looks_of_one_batch(waiting, *, rounds, order):
    """`waiting` units have one of their two parts; then eight of them get the other."""
    with counted_looks() as looks:
        first, part = joined(rounds=rounds, order=order, micro_batch=4)
        if rounds:
            first.steps.at(Age(0, 1)).open({f"w:1/{n}": 1 for n in range(waiting)})
        first.announce(unit(n, producer="reward/0") for n in range(waiting))
        assert not (first.match_rounds() if rounds else first.match())
        before = looks()
        part.announce(unit(n, producer="reference/0") for n in reversed(range(8)))
        given = first.match_rounds()[0].parts if rounds else first.match()
        for core, got in ((first, given), (part, part.match())):
            assert {u.key for units in got.values() for u in units} == {f"w:1/{n}" for n in range(8)}
            for consumer, units in got.items():
                keys = [u.key for u in units]
                assert len(core.held(consumer, branch=0, keys=keys)) == len(core.acked(consumer, branch=0, keys=keys))
        assert not (first.match_rounds() if rounds else first.match())
        assert part.match() == {}
        return looks() - before


KEYS = [f"w:1/{n}" for n in range(3)]
PRODUCERS = [WorkerId("p/0"), WorkerId("p/1")]


class Joins:
    """Two queues that join a third, whatever happens to any: what is ready has all parts, and each part is with its
    unit."""

    def __init__(self, chance, *, rounds, order):
        self.chance, self.step = chance, 0
        self.cores = self.first, *self.parts = [QueueCore(rounds=rounds, order=order), QueueCore(), QueueCore()]
        for core in self.cores:
            core.is_end = core.book.is_last = rounds
            core.consumers.ranked = [A, B]
        for part in self.parts:
            part.joint.join(self.first.joint)
        self.end_step(QueueCore.close)

    def act(self):
        core, key = self.chance.choice(self.cores), self.chance.choice(KEYS)
        made = UnitInfo(key=key, branch=0, step=self.step, producer=self.chance.choice(PRODUCERS))
        entry = core.book.get(made.id)
        consumer = entry.consumer if entry is not None and entry.consumer is not None else self.chance.choice([A, B])
        acts = {
            "announce": lambda: core.announce([made]),
            "announce all": lambda: [other.announce([made]) for other in self.cores],
            "credit": lambda: self.first.consumers.credit(consumer, self.chance.randint(0, 2)),
            "held": lambda: core.held(consumer, branch=0, keys=[key]),
            "acked": lambda: core.acked(consumer, branch=0, keys=[key]),
            "restored": lambda: core.restore_held(consumer, made),
            "ended": lambda: core.end(made),
            "again": lambda: core.expect_again([made.id]),
            "a producer dies": lambda: [other.departures.remove_producer(made.producer) for other in self.cores],
            "a consumer dies": lambda: [
                other.departures.remove_consumer(one)
                for other in self.cores for one in ((A, B) if self.first.rounds else (consumer,))
            ],
            "a peer is lost": lambda: core.departures.missing(consumer, made.producer),
            "closed": lambda: self.end_step(QueueCore.close),
            "forgotten": lambda: self.end_step(QueueCore.forget),
        }  # fmt: skip
        likely = [*acts, *["announce", "announce all", "credit", "held", "acked"] * 2]
        acts[self.chance.choice(likely)]()
        if self.chance.random() < 0.7:
            self.match()

    def end_step(self, how):
        for core in self.cores:
            how(core, Age(0, self.step))
        self.step += 1
        for core in self.cores:
            core.steps.at(Age(0, self.step)).open(dict.fromkeys(KEYS, 1))

    def match(self):
        rounds = self.first.match_rounds() if self.first.rounds else []
        given = [formed.parts for formed in rounds] if self.first.rounds else [self.first.match()]
        units = [unit for to in given for units in to.values() for unit in units]
        assert len(units) == len({unit.id for unit in units})
        assert all(part.knows(unit.id) for unit in units for part in self.parts)
        for part in self.parts:
            part.match()
        for entry in self.first.book.entries.values():
            if entry.state is UnitState.WAITING:
                assert entry.is_ready == all(part.knows(entry.unit.id) for part in self.parts)
        for part in self.parts:
            for uid, entry in part.book.entries.items():
                whole = self.first.book.get(uid)
                assert entry.state is not UnitState.WAITING or whole is None or whole.consumer is None


@pytest.mark.parametrize(("rounds", "order"), [(True, "lineage"), (True, "arrival"), (False, "arrival")])
def test_whatever_happens_to_any_part_what_is_ready_has_all_parts_and_they_are_where_it_is(rounds, order):
    for seed in range(300):
        joins = Joins(random.Random(seed), rounds=rounds, order=order)
        for _ in range(60):
            joins.act()
