"""QueueCore with a gang: rounds of steps whose units are known beforehand, through deaths and a change of driver."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlinf_api.names import WorkerId
from rlinf_worker.channels import lineage
from rlinf_worker.queues.core import QueueCore
from rlinf_worker.queues.steps import RoundAssignment, balance
from rlinf_worker.queues.units import Age, UnitInfo

PRODUCERS = [WorkerId("env/0"), WorkerId("env/1")]
RANK_0 = WorkerId("actor/0")


def ranks(world: int) -> list[WorkerId]:
    return [WorkerId(f"actor/{r}") for r in range(world)]


def keys_of(step: int, count: int) -> list[str]:
    return [lineage.segment(n, step=step) for n in range(count)]


def unit(key: str, *, branch: int = 0, weight: float = 1.0) -> UnitInfo:
    producer = PRODUCERS[int(key[4 : key.index("@")]) % len(PRODUCERS)]
    return UnitInfo(key=key, branch=branch, step=int(key.split("@")[1]), weight=weight, producer=producer)


def gang(world: int = 2, *, micro_batch: int = 1, order: str = "arrival", first_round: int = 1) -> QueueCore:
    core = QueueCore(
        rounds=True,
        micro_batch=micro_batch,
        order="lineage" if order == "lineage" else "arrival",
        first_round=first_round,
    )
    core.consumers.ranked = ranks(world)
    return core


class Gang(RuleBasedStateMachine):
    """Every rank takes what it is given; a driver that dies is replaced by one that asks what they hold."""

    @initialize(
        world=st.integers(1, 3),
        micro_batch=st.integers(1, 3),
        order=st.sampled_from(["arrival", "lineage"]),
        count=st.integers(1, 7),
    )
    def begin(self, world, micro_batch, order, count):
        self.shape = {"world": world, "micro_batch": micro_batch, "order": order}
        self.core, self.attempt, self.ranks, self.count = gang(**self.shape), 1, ranks(world), count
        self.branch, self.committed = 0, 0
        self.credit = dict.fromkeys(self.ranks, 0)
        self.made: set[str] = set()  # payloads that a living producer has
        self.given: dict[str, WorkerId] = {}  # assigned or held
        self.held: set[str] = set()
        self.over: set[int] = set()
        self.numbers: dict[int, int] = {}
        self.open_steps()

    def open_steps(self):
        for step in (self.committed + 1, self.committed + 2):  # a staleness of one
            self.core.steps.at(Age(self.branch, step)).open(dict.fromkeys(keys_of(step, self.count), 1))

    def open_keys(self) -> list[str]:
        return [k for step in (self.committed + 1, self.committed + 2) for k in keys_of(step, self.count)]

    @rule(data=st.data())
    def announce(self, data):
        key = data.draw(st.sampled_from(self.open_keys()))
        known = key in self.made or key in self.given
        self.core.announce([unit(key, branch=self.branch)])
        if not known:
            self.made.add(key)

    @rule(data=st.data(), rounds=st.integers(0, 3))
    def say_credit(self, data, rounds):
        rank = data.draw(st.sampled_from(self.ranks))
        self.core.consumers.credit(rank, rounds)
        self.credit[rank] = rounds

    @rule()
    def match(self):
        for formed in self.core.match_rounds():
            self.check(formed)

    def check(self, formed: RoundAssignment):
        assert formed.step == min({self.committed + 1, self.committed + 2} - self.over), "steps in order"
        assert list(formed.parts) == self.ranks
        assert formed.number > self.numbers.get(formed.step, 0)
        self.numbers[formed.step] = formed.number
        for rank in self.ranks:
            assert self.credit[rank] > 0
            self.credit[rank] -= 1
        expected = keys_of(formed.step, self.count)
        left = [k for k in expected if k not in self.given]
        units = [u for part in formed.parts.values() for u in part]
        assert formed.total_weight == sum(u.weight for u in units)
        if formed.last:
            assert not units
            assert set(expected) <= self.held
            self.over.add(formed.step)
            return
        assert len(units) == len({u.key for u in units}) == min(len(left), self.shape["micro_batch"] * len(self.ranks))
        assert {u.key for u in units} <= self.made - self.given.keys()
        if self.shape["order"] == "lineage":
            assert {u.key for u in units} == set(left[: len(units)])
        for rank, part in formed.parts.items():
            if self.shape["order"] == "lineage":
                assert [u.key for u in part] == sorted((u.key for u in part), key=lineage.sort_key)
            self.given.update({u.key: rank for u in part})

    @rule(data=st.data())
    def holds(self, data):
        key = data.draw(st.sampled_from(self.open_keys()))
        rank = self.given.get(key, self.ranks[0])
        self.core.held(rank, branch=self.branch, keys=[key])
        if key in self.given:
            self.held.add(key)
            self.made.add(key)

    @rule(data=st.data())
    def works_for_a_while(self, data):
        """The common case at once, so that deaths meet steps in every state of their life."""
        for key in data.draw(st.lists(st.sampled_from(self.open_keys()), max_size=10)):
            self.core.announce([unit(key, branch=self.branch)])
            self.made.add(key)
        for rank in self.ranks:
            self.core.consumers.credit(rank, 2)
            self.credit[rank] = 2
        self.match()
        if self.given:
            for key in data.draw(st.lists(st.sampled_from(sorted(self.given)), max_size=10)):
                self.core.held(self.given[key], branch=self.branch, keys=[key])
                self.held.add(key)
        self.match()

    @rule(producer=st.sampled_from(PRODUCERS))
    def producer_dies(self, producer):
        self.core.departures.remove_producer(producer)
        for key in [k for k in self.made if unit(k).producer == producer]:
            if key not in self.held:
                self.made.discard(key)
                self.given.pop(key, None)
        # What was just given may be held all the same; a rank that has it not, says nothing.
        self.core._on_the_way.drop(lambda way: True)

    @rule()
    def gang_dies(self):
        """All ranks: the open steps are formed anew, on the same units, until the driver opens a branch."""
        lost = {u.key for rank in self.ranks for u in self.core.departures.remove_consumer(rank)}
        self.made -= lost
        self.given.clear()
        self.held.clear()
        self.over.clear()
        self.credit = dict.fromkeys(self.ranks, 0)

    @rule()
    def new_branch(self):
        self.core.forget(Age.end_of(self.branch), count="dropped")
        self.branch += 1
        self.made.clear()
        self.given.clear()
        self.held.clear()
        self.over.clear()
        self.numbers.clear()
        self.open_steps()

    @precondition(lambda self: self.committed + 1 in self.over)
    @rule()
    def commits(self):
        step = self.committed + 1
        self.core.close(Age(self.branch, step))
        for rank in self.ranks:
            mine = [k for k in keys_of(step, self.count) if self.given.get(k) == rank]
            assert len(self.core.acked(rank, branch=self.branch, keys=mine)) == len(mine)
        for key in keys_of(step, self.count):
            self.made.discard(key)
            self.held.discard(key)
            self.given.pop(key)
        self.over.discard(step)
        self.committed = step
        self.open_steps()

    @rule(producers_first=st.booleans(), flow_first=st.booleans())
    def driver_is_replaced(self, producers_first, flow_first):
        """It hears of what is held; what was on its way is forgotten by the ranks; then the flow opens the steps."""
        self.attempt += 1
        self.core = gang(**self.shape, first_round=self.attempt * 1000)
        taken = [(self.given[k], unit(k, branch=self.branch)) for k in self.held]
        made = [unit(k, branch=self.branch) for k in sorted(self.made)]
        if flow_first:
            self.open_steps()
        if producers_first:
            self.core.announce(made)
        for rank, u in taken:
            self.core.restore_held(rank, u)
        self.core.announce(made)
        self.given = {k: r for k, r in self.given.items() if k in self.held}
        self.over.clear()
        self.credit = dict.fromkeys(self.ranks, 0)
        self.open_steps()

    @rule(data=st.data())
    def a_stream_breaks(self, data):
        """What the rank was given and does not hold is in the rounds that are told again, with all of its part."""
        rank = data.draw(st.sampled_from(self.ranks))
        units, again = self.core.assigned_to(rank)
        assert units == []
        told = [u.key for formed in again for part in formed.parts.values() for u in part]
        assert len(told) == len(set(told))
        assert all(self.given[k] == rank for k in told)
        assert {k for k, r in self.given.items() if r == rank and k not in self.held} <= set(told)
        assert {f.step for f in again if f.last} == self.over

    @invariant()
    def credit_is_what_was_stated_less_what_was_given(self):
        if hasattr(self, "core"):
            assert {r: self.core.consumers.credit_of(r) for r in self.ranks} == self.credit

    def teardown(self):
        """From any state a job that loses nobody any more gets through."""
        if not hasattr(self, "core"):
            return
        for _ in range(40):
            self.core.announce([unit(k, branch=self.branch) for k in self.open_keys()])
            self.made |= set(self.open_keys())
            for rank in self.ranks:
                self.core.consumers.credit(rank, 1)
                self.credit[rank] = 1
            self.match()
            for rank in self.ranks:
                mine = [k for k, r in self.given.items() if r == rank]
                self.core.held(rank, branch=self.branch, keys=mine)
                self.held |= set(mine)
            if self.committed + 1 in self.over:
                return
        raise AssertionError(
            f"step {self.committed + 1} never ended: {self.core.steps.waiting_for(self.committed + 1)}"
        )


TestGang = Gang.TestCase
TestGang.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@given(
    order=st.permutations(keys_of(1, 11)),
    world=st.integers(1, 3),
    micro_batch=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_in_lineage_order_the_rounds_are_the_same_whatever_arrives_first(order, world, micro_batch, seed):
    chance = random.Random(seed)
    core = gang(world, micro_batch=micro_batch, order="lineage")
    core.steps.at(Age(0, 1)).open(dict.fromkeys(order, 1))
    formed: list[RoundAssignment] = []
    for key in order:
        core.announce([unit(key)])
        for rank in ranks(world):
            core.consumers.credit(rank, chance.randrange(3))
        formed += core.match_rounds()
    for rank in ranks(world):
        core.consumers.credit(rank, 100)
    formed += core.match_rounds()
    handed_out = [sorted((u.key for part in f.parts.values() for u in part), key=lineage.sort_key) for f in formed]
    assert [k for keys in handed_out for k in keys] == keys_of(1, 11)
    assert [len(keys) for keys in handed_out[:-1]] == [world * micro_batch] * (len(handed_out) - 1)


@given(weights=st.lists(st.integers(1, 50), max_size=12), world=st.integers(1, 5))
def test_balance_gives_every_unit_to_one_rank_and_is_near_even(weights, world):
    units = [unit(f"env:{n}@1", weight=float(w)) for n, w in enumerate(weights)]
    parts = balance(units, ranks=world)
    assert len(parts) == world
    assert sorted(u.key for p in parts for u in p) == sorted(u.key for u in units)
    assert all([units.index(u) for u in p] == sorted(units.index(u) for u in p) for p in parts)
    loads = [sum(u.weight for u in p) for p in parts]
    assert max(loads) - min(loads) <= max(weights, default=0)
    assert balance(units, ranks=world) == parts


def test_the_last_round_comes_once_when_all_is_held_and_carries_nothing():
    core = gang(1, micro_batch=2)
    core.steps.at(Age(0, 1)).open(dict.fromkeys(keys_of(1, 2), 1))
    core.consumers.credit(RANK_0, 5)
    core.announce([unit(k) for k in keys_of(1, 2)])
    assert [f.last for f in core.match_rounds()] == [False]
    core.held(RANK_0, branch=0, keys=["env:0@1"])
    assert core.match_rounds() == []
    core.held(RANK_0, branch=0, keys=["env:1@1"])
    (last,) = core.match_rounds()
    assert (last.last, last.number, last.parts[RANK_0]) == (True, 2, [])
    assert core.match_rounds() == []


def test_a_unit_that_dies_on_the_way_to_its_rank_is_in_a_later_round_before_the_last():
    core = gang(1, micro_batch=2)
    core.steps.at(Age(0, 1)).open(dict.fromkeys(keys_of(1, 2), 1))
    core.consumers.credit(RANK_0, 5)
    core.announce([unit(k) for k in keys_of(1, 2)])
    core.match_rounds()
    core.held(RANK_0, branch=0, keys=["env:0@1"])
    assert [u.key for u in core.departures.remove_producer(PRODUCERS[1])] == ["env:1@1"]
    assert core.match_rounds() == []
    core.announce([unit("env:1@1")])
    (again,) = core.match_rounds()
    assert [u.key for u in again.parts[RANK_0]] == ["env:1@1"]
    core.held(RANK_0, branch=0, keys=["env:1@1"])
    assert [f.last for f in core.match_rounds()] == [True]


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_unit_that_arrived_although_its_producer_died_is_not_waited_for_by_the_last_round(is_made_again):
    core = gang(1)
    core.steps.at(Age(0, 1)).open(dict.fromkeys(keys_of(1, 1), 1))
    core.consumers.credit(RANK_0, 5)
    core.announce([unit("env:0@1")])
    core.match_rounds()
    core.departures.remove_producer(PRODUCERS[0])
    if is_made_again:
        core.announce([unit("env:0@1")])
    core.held(RANK_0, branch=0, keys=["env:0@1"])
    assert [f.last for f in core.match_rounds()] == [True]


@pytest.mark.parametrize("order", ["arrival", "lineage"])
def test_what_ranks_held_before_the_flow_opened_the_step_counts_as_handed_out(order):
    """A new driver hears the hellos first."""
    core = gang(1, micro_batch=3, order=order)
    core.restore_held(RANK_0, unit("env:0@1"))
    core.steps.at(Age(0, 1)).open(dict.fromkeys(keys_of(1, 3), 1))
    core.consumers.credit(RANK_0, 5)
    core.announce([unit("env:2@1"), unit("env:1@1")])
    assert sorted(u.key for f in core.match_rounds() for u in f.parts[RANK_0]) == ["env:1@1", "env:2@1"]


def test_no_round_of_the_next_step_comes_before_the_last_of_this_one():
    core = gang(1)
    for step in (1, 2):
        core.steps.at(Age(0, step)).open(dict.fromkeys(keys_of(step, 1), 1))
        core.announce([unit(k) for k in keys_of(step, 1)])
    core.consumers.credit(RANK_0, 9)
    assert [f.step for f in core.match_rounds()] == [1]
    core.held(RANK_0, branch=0, keys=["env:0@1"])
    assert [(f.step, f.last) for f in core.match_rounds()] == [(1, True), (2, False)]


def test_what_comes_back_from_a_gang_that_died_is_in_the_next_round_once():
    core = gang(2)
    core.steps.at(Age(0, 1)).open(dict.fromkeys(keys_of(1, 3), 1))
    core.announce([unit(key) for key in keys_of(1, 3)])
    for _ in range(3):
        for rank in ranks(2):
            core.consumers.credit(rank, 1)
        [formed] = core.match_rounds()
        assert [u.key for part in formed.parts.values() for u in part] == keys_of(1, 2)
        for rank in ranks(2):
            core.departures.remove_consumer(rank)


def test_what_is_made_again_goes_to_the_rank_to_which_the_first_of_it_was_on_its_way():
    """It may have arrived there: another rank would learn from it a second time. Who is heavy without it gets less."""
    core = gang(2, micro_batch=2)
    core.steps.at(Age(0, 1)).open(dict.fromkeys(keys_of(1, 4), 1))
    for rank in ranks(2):
        core.consumers.credit(rank, 5)
    core.announce([unit(k) for k in keys_of(1, 4)])
    (first,) = core.match_rounds()
    lost = core.departures.remove_producer(PRODUCERS[0])
    homes = {u.key: rank for rank, part in first.parts.items() for u in part if u in lost}
    assert list(homes.values()) == [RANK_0, RANK_0]
    core.announce([unit(u.key, weight=9.0) for u in lost])
    (again,) = core.match_rounds()
    assert {u.key: rank for rank, part in again.parts.items() for u in part} == homes
    assert (again.last, again.total_weight, again.number) == (False, 18.0, 2)


def test_units_that_only_one_rank_may_have_come_first_and_count_as_its_load():
    units = [unit(f"env:{n}@1", weight=w) for n, w in enumerate((5.0, 3.0, 3.0, 2.0))]

    def parts(*only: int) -> list[list[int]]:
        pinned = {units[n].id: rank for n, rank in enumerate(only) if rank >= 0}
        return [[units.index(u) for u in part] for part in balance(units, ranks=2, only=pinned)]

    assert parts() == [[0, 3], [1, 2]]
    assert parts(1) == [[1, 2], [0, 3]]
    assert parts(-1, 0, 0) == [[1, 2], [0, 3]]
    assert parts(0, 0, 0) == [[0, 1, 2], [3]]
    assert parts(1, 1, 1, 1) == [[], [0, 1, 2, 3]]
