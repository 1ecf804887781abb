"""A queue that joins another: a unit is handed out once all its parts are there, and they go to the same worker."""

from rlinf_api.names import WorkerId
from rlinf_worker.queues.core import QueueCore
from rlinf_worker.queues.units import Age, UnitId, UnitInfo

A, B = WorkerId("train/0"), WorkerId("train/1")


def unit(index, *, producer):
    return UnitInfo(key=f"w:1/{index}", branch=0, step=1, producer=WorkerId(producer))


def joined(*, rounds):
    first, part = QueueCore(rounds=rounds), QueueCore()
    first.parts = [part]
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
    assert {c: [u.key for u in units] for c, units in part.follow(first).items()} == {min(given): ["w:1/1"]}
    assert part.follow(first) == {}


def test_a_round_is_of_complete_units_in_the_order_in_which_they_became_so():
    first, part = joined(rounds=True)
    first.steps.at(Age(0, 1)).open(dict.fromkeys([f"w:1/{n}" for n in range(4)], 1))
    first.announce([unit(n, producer="reward/0") for n in range(4)])
    assert first.match_rounds() == []
    part.announce([unit(n, producer="reference/0") for n in (3, 2)])
    [formed] = first.match_rounds()
    keys = {rank: [u.key for u in units] for rank, units in formed.parts.items()}
    assert keys == {A: ["w:1/2"], B: ["w:1/3"]}
    assert {c: [u.key for u in units] for c, units in part.follow(first).items()} == keys


def test_parts_are_given_again_with_the_unit_where_a_consumer_is_gone():
    first, part = joined(rounds=False)
    for core in (first, part):
        core.announce([unit(0, producer="reward/0")])
    [consumer] = first.match()
    part.follow(first)
    other = B if consumer == A else A
    for core in (first, part):
        core.remove_consumer(consumer)
    assert part.follow(first) == {}, "nobody has the unit now"
    assert list(first.match()) == [other]
    assert list(part.follow(first)) == [other]


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
