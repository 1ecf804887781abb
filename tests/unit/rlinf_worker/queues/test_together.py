"""Units of one ticket go to one consumer, whatever becomes of it, and the load is spread by ticket."""

import random
from collections import defaultdict

import pytest

from rlinf_api.names import WorkerId
from rlinf_worker.queues.core import QueueCore
from rlinf_worker.queues.together import Homes
from rlinf_worker.queues.units import Age, UnitInfo
from tests.fakes.looks import counted_looks

A, B, C = (WorkerId(f"reward/{n}") for n in range(3))
PRODUCERS = [WorkerId(f"rollout/{n}") for n in range(2)]


def unit(ticket, n, *, producer=PRODUCERS[0], step=1, **more):
    return UnitInfo(key=f"{ticket}/{n}", tickets=(ticket,), branch=0, step=step, producer=producer, **more)


def samples(*tickets, count=8):
    """As rollouts make them: one of each, and again."""
    return [unit(ticket, n) for n in range(count) for ticket in tickets]


def kept_together(*consumers, credit=2, homes=None):
    core = QueueCore()
    core.keep_together(homes or Homes())
    core.consumers.ranked = list(consumers)
    for consumer in consumers:
        core.consumers.credit(consumer, credit)
    return core


def keys(given):
    return {consumer: [u.key for u in units] for consumer, units in given.items()}


def taken(core, *, credit=2, rounds=20):
    """What each is given in all, with little room at a time."""
    found = defaultdict[WorkerId, list[str]](list)
    for _ in range(rounds):
        for consumer, units in core.match().items():
            found[consumer] += [u.key for u in units]
        for consumer in core.consumers.ranked:
            core.consumers.credit(consumer, credit)
    return {consumer: found[consumer] for consumer in core.consumers.ranked}


def test_a_group_larger_than_a_window_comes_to_one_and_each_consumer_has_as_many_groups():
    core = kept_together(A, B)
    core.announce(samples("p:0", "p:1", "p:2", "p:3"))
    found = taken(core)
    tickets = {consumer: sorted({key.partition("/")[0] for key in given}) for consumer, given in found.items()}
    assert tickets == {A: ["p:0", "p:2"], B: ["p:1", "p:3"]}
    assert {consumer: len(set(given)) for consumer, given in found.items()} == {A: 16, B: 16}
    assert found[A][:8] == [f"p:0/{n}" for n in range(8)], "one after the other, so that the first is whole soon"


def test_what_comes_later_of_a_ticket_waits_for_its_consumer_and_holds_up_nobody():
    core = kept_together(A, B, credit=1)
    core.announce([unit("p:0", 0)])
    [home] = core.match()
    core.announce([unit("p:0", 1), unit("p:1", 0)])
    assert keys(core.match()) == {B if home == A else A: ["p:1/0"]}
    core.consumers.credit(home, 1)
    assert keys(core.match()) == {home: ["p:0/1"]}


def test_of_several_tickets_the_first_counts():
    core = kept_together(A, B, credit=4)
    core.announce([unit("p:0", 0)])
    [home] = core.match()
    both = [UnitInfo(key=f"g:{n}", tickets=("p:0", f"p:{n}"), branch=0, step=1, producer=PRODUCERS[0]) for n in (7, 8)]
    core.announce(both)
    assert keys(core.match()) == {home: ["g:7", "g:8"]}


def test_where_its_consumer_is_gone_the_whole_group_goes_to_one_other_what_was_held_included():
    core = kept_together(A, B, C, credit=4)
    core.announce(samples("p:0", count=6))
    [(home, given)] = core.match().items()
    core.held(home, branch=0, keys=[u.key for u in given[:2]])
    core.departures.remove_consumer(home)
    [(other, again)] = core.match().items()
    assert other != home
    assert [u.key for u in again] == [f"p:0/{n}" for n in range(4)]
    core.consumers.credit(home, 9)  # its next life
    core.consumers.credit(other, 2)
    assert keys(core.match()) == {other: ["p:0/4", "p:0/5"]}


def test_what_waited_for_one_that_is_gone_goes_to_another_also_where_it_had_finished_the_rest():
    core = kept_together(A, B, credit=1)
    core.announce(samples("p:0", count=2))
    [home] = core.match()
    core.acked(home, branch=0, keys=["p:0/0"])
    assert core.match() == {}, "the other has room"
    core.departures.remove_consumer(home)
    assert keys(core.match()) == {B if home == A else A: ["p:0/1"]}


def test_what_is_lost_with_its_producer_and_made_again_comes_to_where_the_others_are():
    core = kept_together(A, B, credit=2)
    core.announce([unit("p:0", 0), unit("p:0", 1, producer=PRODUCERS[1])])
    [home] = core.match()
    core.held(home, branch=0, keys=["p:0/0"])
    assert [u.key for u in core.departures.remove_producer(PRODUCERS[1])] == ["p:0/1"]
    core.consumers.credit(home, 1)
    core.announce([unit("p:0", 1)])
    assert keys(core.match()) == {home: ["p:0/1"]}


def test_two_queues_of_one_consumer_have_the_same_home_for_a_ticket_and_lose_it_together():
    homes = Homes()
    answers, checks = kept_together(A, B, homes=homes), kept_together(A, B, homes=homes)
    answers.announce([unit("p:0", 0)])
    [home] = answers.match()
    other = B if home == A else A
    checks.announce([unit("p:0", 7), unit("p:1", 7)])
    assert keys(checks.match()) == {home: ["p:0/7"], other: ["p:1/7"]}
    checks.announce([unit("p:0", 8), unit("p:0", 9)])
    checks.match()
    for core in (answers, checks):
        core.departures.remove_consumer(home)
    assert list(answers.match()) == list(checks.match()) == [other]


def test_units_that_need_another_part_are_together_too_and_their_parts_follow():
    first, part = kept_together(A, B), QueueCore()
    part.joint.join(first.joint)
    part.consumers.ranked = [A, B]
    first.announce(samples("p:0", count=4))
    assert first.match() == {}
    part.announce([unit("p:0", n, producer=PRODUCERS[1]) for n in (3, 1)])
    [(home, given)] = first.match().items()
    assert keys({home: given}) == {home: ["p:0/1", "p:0/3"]}
    assert keys(part.match()) == {home: ["p:0/3", "p:0/1"]}
    part.announce([unit("p:0", n, producer=PRODUCERS[1]) for n in (2, 0)])
    assert first.match() == {}, "the other has room, and waits"
    first.consumers.credit(home, 2)
    assert keys(first.match()) == {home: ["p:0/0", "p:0/2"]}


def test_a_new_driver_hears_who_has_what_and_of_two_who_have_part_of_a_group_the_first_has_it():
    core = kept_together(A, B, credit=4)
    core.restore_held(B, unit("p:0", 0))
    core.restore_held(A, unit("p:0", 1))
    core.announce(samples("p:0", count=4))
    assert keys(core.match()) == {B: ["p:0/1", "p:0/2", "p:0/3"]}


def test_a_step_that_is_over_is_forgotten():
    homes = Homes()
    core = kept_together(A, B, credit=4, homes=homes)
    core.announce([unit("p:0", 0), unit("p:0", 1, step=2)])
    for consumer, units in core.match().items():
        core.acked(consumer, branch=0, keys=[u.key for u in units])
    core.close(Age(0, 1))
    assert list(homes._homes) == [Age(0, 2)]
    core.close(Age(0, 2))
    assert (homes._homes, core.book.by_ticket) == ({}, {})


def test_what_a_message_costs_grows_neither_with_the_groups_that_wait_nor_with_the_size_of_one():
    def looks_of_one_batch(groups, size):
        with counted_looks() as looks:
            core = kept_together(A, B, credit=0)
            core.announce(samples(*(f"p:{n}" for n in range(groups)), count=size))
            core.consumers.credit(A, 1)
            core.match()  # a home for the first: all that waits of it is A's
            before = looks()
            core.consumers.credit(A, 4)
            core.match()
            return looks() - before

    assert looks_of_one_batch(10, 8) == looks_of_one_batch(2_000, 8) == looks_of_one_batch(10, 2_000)


@pytest.mark.parametrize("seed", range(100))
def test_whatever_dies_no_two_consumers_have_units_of_one_ticket(seed):
    chance, homes = random.Random(seed), Homes()
    cores = [kept_together(A, B, C, homes=homes) for _ in range(2)]
    tickets = [f"p:{n}" for n in range(4)]
    for _ in range(150):
        core, ticket = chance.choice(cores), chance.choice(tickets)
        made = unit(ticket, chance.randint(0, 3), producer=chance.choice(PRODUCERS))
        entry = core.book.get(made.id)
        consumer = entry.consumer if entry is not None and entry.consumer is not None else chance.choice([A, B, C])
        often = ["make", "make", "credit", "held"]
        act = chance.choice([*often, *often, "make", "acked", "dies", "lost", "restored"])
        match act:
            case "make":
                core.announce([made])
            case "credit":
                core.consumers.credit(consumer, chance.randint(0, 3))
            case "held":
                core.held(consumer, branch=0, keys=[made.key])
            case "acked":
                core.acked(consumer, branch=0, keys=[made.key])
            case "dies" if chance.random() < 0.3:
                for one in cores:
                    one.departures.remove_consumer(consumer)
            case "lost":
                core.departures.remove_producer(made.producer)
            case "restored":
                core.restore_held(consumer, made)
        if chance.random() < 0.8:
            for one in cores:
                one.match()
        having = defaultdict[str, set[WorkerId]](set)
        for one in cores:
            for entry in one.book.entries.values():
                if entry.consumer is not None:
                    having[entry.unit.first_ticket].add(entry.consumer)
        assert all(len(consumers) == 1 for consumers in having.values()), having
    for consumer in (A, B, C):
        for core in cores:
            core.consumers.credit(consumer, 100)
    for core in cores:
        core.match()
        assert core.book.waiting_count == 0, "nothing waits for one that is gone"
