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
    assert first.match() == []
    part.announce([unit(1, producer="reference/0")])
    [given] = first.match()
    assert [u.key for u in given.units] == ["w:1/1"]
    [followed] = part.follow(first)
    assert (followed.consumer, [u.key for u in followed.units]) == (given.consumer, ["w:1/1"])
    assert part.follow(first) == []


def test_a_round_is_of_complete_units_in_the_order_in_which_they_became_so():
    first, part = joined(rounds=True)
    first.steps.open(Age(0, 1), [f"w:1/{n}" for n in range(4)])
    first.announce([unit(n, producer="reward/0") for n in range(4)])
    assert first.match_rounds() == []
    part.announce([unit(n, producer="reference/0") for n in (3, 2)])
    [formed] = first.match_rounds()
    keys = {p.consumer: [u.key for u in p.units] for p in formed.parts}
    assert keys == {A: ["w:1/2"], B: ["w:1/3"]}
    assert {g.consumer: [u.key for u in g.units] for g in part.follow(first)} == keys


def test_parts_are_given_again_with_the_unit_where_a_consumer_is_gone():
    first, part = joined(rounds=False)
    for core in (first, part):
        core.announce([unit(0, producer="reward/0")])
    [given] = first.match()
    part.follow(first)
    other = B if given.consumer == A else A
    for core in (first, part):
        core.remove_consumer(given.consumer)
    assert part.follow(first) == [], "nobody has the unit now"
    assert [g.consumer for g in first.match()] == [other]
    assert [g.consumer for g in part.follow(first)] == [other]


def test_a_unit_that_is_made_again_passes_a_queue_that_had_finished_with_it():
    core = QueueCore()
    core.consumers.ranked = [A]
    core.consumers.credit(A, 4)
    core.announce([unit(0, producer="rollout/0")])
    core.match()
    core.held(A, branch=0, keys=["w:1/0"])
    core.acked(A, branch=0, keys=["w:1/0"])
    assert core.announce([unit(0, producer="rollout/1")]), "a duplicate"
    core.expect_again([UnitId(0, "w:1/0")])
    assert core.announce([unit(0, producer="rollout/1")]) == []
    assert len(core.match()) == 1
