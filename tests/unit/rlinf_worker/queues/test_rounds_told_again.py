"""A round that a driver says again, because a stream broke, to a rank that has taken it or has not."""

from rlinf_api.names import WorkerId
from rlinf_worker.queues.core import QueueCore
from rlinf_worker.queues.given import QueueConsumer, RoundPart
from rlinf_worker.queues.steps import balance
from rlinf_worker.queues.units import Age, UnitId, UnitInfo

RANKS = [WorkerId("actor/0"), WorkerId("actor/1")]
ENV = WorkerId("env/0")


def unit(key: str, *, weight: float = 1.0, producer: str = "env/0") -> UnitInfo:
    return UnitInfo(key=key, branch=0, step=1, weight=weight, size_bytes=10, producer=WorkerId(producer))


def part(number: int, *keys: str) -> RoundPart:
    uids = [UnitId(0, key) for key in keys]
    return RoundPart(step=1, branch=0, number=number, last=False, total_weight=1.0, units=uids)


def rank() -> QueueConsumer[str]:
    return QueueConsumer[str](window=4, rounds=True)


def test_what_a_taken_round_names_and_is_not_here_is_reported_and_never_fetched():
    given = rank()
    given.assign_round(part(1, "a", "b"), [unit("a"), unit("b")])
    given.units.arrived(UnitId(0, "a"), "A")
    given.lost([UnitId(0, "b")])
    assert given.take_round() is not None
    told = given.assign_round(part(1, "a", "b"), [unit("a"), unit("b")])
    assert ([u.key for u in told.to_pull], [u.key for u in told.again]) == ([], ["a"])
    assert [u.key for u in told.absent] == ["b"]
    assert given.units.pulling() == []
    assert given.units.level()[0] == 0, "nothing stays behind that no round hands out"


def test_a_unit_that_was_taken_does_not_hold_up_a_later_round_that_names_it_again():
    given = rank()
    given.assign_round(part(1, "a"), [unit("a")])
    given.units.arrived(UnitId(0, "a"), "A")
    assert given.take_round() is not None
    told = given.assign_round(part(2, "a", "b"), [unit("a", producer="env/1"), unit("b")])
    assert [u.key for u in told.again] == ["a"]
    given.units.arrived(UnitId(0, "b"), "B")
    taken = given.take_round()
    assert taken is not None
    assert [payload for _, payload in taken[1]] == ["B"], "a is not handed out twice"


def test_a_unit_that_two_waiting_rounds_name_is_handed_out_by_the_first():
    given = rank()
    given.assign_round(part(1, "a"), [unit("a")])
    given.units.arrived(UnitId(0, "a"), "A")
    given.assign_round(part(2, "a"), [unit("a")])
    first, second = given.take_round(), None
    given.units.finish(UnitId(0, "a"))
    second = given.take_round()
    assert first is not None
    assert second is not None
    assert (len(first[1]), len(second[1])) == (1, 0)


def test_what_is_here_stays_in_its_round_though_the_driver_names_it_no_more():
    """Its producer died; the Hello has told the driver that it is held here, and the step counts on it."""
    given = rank()
    given.assign_round(part(1, "a", "b", "c"), [unit("a"), unit("b"), unit("c")])
    given.units.arrived(UnitId(0, "a"), "A")
    given.units.arrived(UnitId(0, "b"), "B")
    given.assign_round(part(1, "b"), [unit("b")])
    taken = given.take_round()
    assert taken is not None
    assert sorted(payload for _, payload in taken[1]) == ["A", "B"]
    assert given.units.arrived(UnitId(0, "c"), "C") is None, "made again elsewhere"


def gang(*keys: str) -> QueueCore:
    core = QueueCore(micro_batch=1, rounds=True)
    core.consumers.ranked = RANKS
    core.steps.at(Age(0, 1)).open(dict.fromkeys(keys, 1))
    core.announce([unit(key) for key in keys])
    for consumer in RANKS:
        core.consumers.credit(consumer, 4)
    return core


def parts_of(core: QueueCore) -> list[dict[str, list[str]]]:
    return [{rank: [u.key for u in part] for rank, part in formed.parts.items()} for formed in core.match_rounds()]


def test_a_step_ends_although_a_taken_round_was_told_again_with_a_unit_that_never_came():
    core = gang("a", "b")
    assert parts_of(core) == [{RANKS[0]: ["a"], RANKS[1]: ["b"]}]
    core.held(RANKS[1], branch=0, keys=["b"])
    core.departures.hand_back(RANKS[0], ENV, units={UnitId(0, "a")})
    again = parts_of(core)
    (owner,) = [consumer for consumer, keys in again[0].items() if keys]
    core.held(WorkerId(owner), branch=0, keys=["a"])
    assert core.match_rounds()[0].last


def test_only_the_named_units_of_a_producer_are_given_up():
    core = gang("a", "b", "c", "d")
    parts_of(core)
    mine = [e.unit.key for e in core.book.loads.of(RANKS[0])]
    assert len(mine) == 2
    lost = core.departures.missing(RANKS[0], ENV, units={UnitId(0, mine[0])})
    assert [u.key for u in lost] == mine[:1]
    assert [u.key for u in core.held(RANKS[0], branch=0, keys=mine)] == mine[1:]


def test_a_unit_that_may_have_reached_one_rank_is_made_again_for_no_other():
    """Two ranks of one gang would train on it twice."""
    core = gang("a", "b")
    (first,) = parts_of(core)
    (owner,) = [consumer for consumer, keys in first.items() if keys == ["a"]]
    core.held(RANKS[1], branch=0, keys=first[RANKS[1]])
    core.departures.remove_producer(ENV)  # while `a` is on its way, or has arrived: nobody has said
    core.announce([unit("a", weight=9.0, producer="env/1")])
    (again,) = parts_of(core)
    assert again[WorkerId(owner)] == ["a"]
    assert [u.key for u in core.held(WorkerId(owner), branch=0, keys=["a"])] == ["a"]


def test_the_word_that_it_came_ends_the_making_of_it_again():
    core = gang("a", "b")
    (first,) = parts_of(core)
    (owner,) = [consumer for consumer, keys in first.items() if keys == ["a"]]
    core.departures.remove_producer(ENV)
    core.announce([unit("a", producer="env/1")])  # waits: the round needs as many as there are ranks
    assert [u.key for u in core.held(WorkerId(owner), branch=0, keys=["a"])] == ["a"]
    assert [keys for formed in parts_of(core) for keys in formed.values() if "a" in keys] == []


def test_a_rank_that_is_gone_has_no_claim():
    core = gang("a", "b")
    parts_of(core)
    core.departures.remove_producer(ENV)
    for consumer in RANKS:
        core.departures.remove_consumer(consumer)
        core.consumers.credit(consumer, 4)
    core.announce([unit("a", producer="env/1"), unit("b", producer="env/1")])
    assert sorted(key for keys in parts_of(core)[0].values() for key in keys) == ["a", "b"]


def test_units_with_a_rank_of_their_own_are_placed_before_the_others_are_balanced():
    units = [unit("a", weight=5.0), unit("b", weight=1.0), unit("c", weight=4.0)]
    parts = balance(units, ranks=2, only={UnitId(0, "b"): 0, UnitId(0, "c"): 0})
    assert [[u.key for u in p] for p in parts] == [["b", "c"], ["a"]]
