"""The worker's halves of a queue, as values."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.queues.given import QueueConsumer, RoundPart
from rlinf_worker.queues.parents import Parents
from rlinf_worker.queues.receipts import Receipts
from rlinf_worker.queues.shelf import Shelf, ShelvedPayload
from rlinf_worker.queues.units import Age, UnitId, UnitInfo

AGE = Age(0, 1)
PAYLOAD = ShelvedPayload("of ten bytes, says its unit")


def unit(key: str, *, branch: int = 0, step: int = 1, size: int = 10, producer: str = "env/0") -> UnitInfo:
    return UnitInfo(key=key, branch=branch, step=step, size_bytes=size, producer=WorkerId(producer))


def part(number: int, *keys: str, last: bool = False) -> RoundPart:
    uids = [UnitId(0, key) for key in keys]
    return RoundPart(step=1, branch=0, number=number, last=last, total_weight=1.0, units=uids)


def test_a_producer_is_bounded_by_units_and_bytes():
    made = Shelf(capacity_units=2, capacity_bytes=25)
    made.add(unit("a"), PAYLOAD)
    assert made.has_room(15, AGE)
    assert not made.has_room(16, AGE)
    made.add(unit("b"), PAYLOAD)
    assert not made.has_room(1, AGE)
    assert [u.key for u in made.release([UnitId(0, "a")])] == ["a"]
    assert made.release([UnitId(0, "a")]) == []
    assert made.has_room(15, AGE)


def test_a_unit_larger_than_the_bound_is_let_in_alone():
    made = Shelf(capacity_units=2, capacity_bytes=25)
    assert made.has_room(1000, AGE)
    made.add(unit("a", size=1000), PAYLOAD)
    assert not made.has_room(1, AGE)


def test_units_of_a_later_step_take_no_room_from_those_that_an_earlier_one_lacks():
    made = Shelf(capacity_units=2, capacity_bytes=25)
    for key in ("a", "b"):
        made.add(unit(key, step=2), PAYLOAD)
    assert not made.has_room(1, Age(0, 2))
    assert made.has_room(25, AGE)


def test_what_is_kept_until_the_commit_gets_in_whole_for_the_oldest_step_alone():
    made = Shelf(capacity_units=2, capacity_bytes=25, until_commit=True)
    for key in "abcd":
        assert made.has_room(20, AGE), "it would wait for the end of its own step"
        made.add(unit(key, size=20), PAYLOAD)
    for key in "ef":
        assert made.has_room(10, Age(0, 2))
        made.add(unit(key, step=2), PAYLOAD)
    assert not made.has_room(1, Age(0, 2)), "the bound is for what runs ahead"
    assert not made.is_drained(Age(0, 2))
    made.release([UnitId(0, key) for key in "abcd"])
    assert made.has_room(20, Age(0, 2)), "it is the oldest now"
    assert made.is_drained(Age(0, 2))


def test_a_producer_that_has_nothing_of_an_older_step_keeps_at_worst_each_open_step_in_whole():
    """As docs/channels.md says: it is not told which step is the job's oldest."""
    made = Shelf(capacity_units=2, capacity_bytes=25, until_commit=True)
    for step in (2, 1):
        for key in "abcd":
            assert made.has_room(20, Age(0, step))
            made.add(unit(f"{step}/{key}", step=step, size=20), PAYLOAD)
    assert len(made) == 8
    assert not made.has_room(1, Age(0, 2)), "what is no longer the oldest gets no further"


def test_cancelling_a_branch_frees_it_and_older_ones():
    made = Shelf(capacity_units=10, capacity_bytes=1000)
    made.add(unit("a", branch=0), PAYLOAD)
    made.add(unit("b", branch=1), PAYLOAD)
    assert [u.key for u in made.cancel(0)] == ["a"]
    assert made.kept_bytes == 10


def test_units_are_handed_out_in_the_order_of_assignment():
    given_ = QueueConsumer[str](window=4, rounds=False)
    given_.assign([unit("a"), unit("b")])
    given_.units.arrived(UnitId(0, "b"), "B")
    assert given_.take() is None
    given_.units.arrived(UnitId(0, "a"), "A")
    taken = [given_.take(), given_.take()]
    assert [t[1] for t in taken if t] == ["A", "B"]


def test_of_what_is_here_the_oldest_policy_version_is_taken_first():
    given_ = QueueConsumer[str](window=9, rounds=False)
    for key, branch, step in (("new", 1, 4), ("newer", 1, 5), ("old", 0, 9), ("older, not here", 0, 8)):
        made = UnitInfo(key=key, branch=branch, step=step, producer=WorkerId("env/0"))
        given_.assign([made])
        if "not here" not in key:
            given_.units.arrived(made.id, key)
    assert given_.count_here(most=9) == 3
    assert [t[1] for t in iter(given_.take, None)] == ["old", "new", "newer"]
    given_.units.arrived(UnitId(0, "older, not here"), "x")
    assert given_.take() is not None
    assert given_.waiting == 0


def test_an_assignment_that_is_told_again_is_not_handed_out_again():
    given_ = QueueConsumer[str](window=4, rounds=False)
    to_pull, again, _ = given_.assign([unit("a")])
    assert [u.key for u in to_pull] == ["a"]
    given_.units.arrived(UnitId(0, "a"), "A")
    to_pull, again, _ = given_.assign([unit("a")])
    assert (to_pull, [u.key for u in again]) == ([], ["a"])
    assert given_.take() is not None
    assert given_.take() is None


def test_a_round_that_is_told_again_is_not_handed_out_again():
    given_ = QueueConsumer[str](window=2, rounds=True)
    given_.assign_round(part(1), [])
    given_.assign_round(part(2, last=True), [])
    assert given_.take_round() is not None
    given_.assign_round(part(1), [])
    given_.assign_round(part(2, last=True), [])
    taken = given_.take_round()
    assert taken is not None
    assert taken[0].last
    assert given_.take_round() is None


def test_a_round_goes_on_without_what_was_lost():
    given_ = QueueConsumer[str](window=2, rounds=True)
    given_.assign_round(part(1, "a", "b"), [unit("a"), unit("b", producer="env/1")])
    given_.units.arrived(UnitId(0, "a"), "A")
    assert given_.take_round() is None
    assert [u.key for u in given_.units.pulling(producer="env/1")] == ["b"]
    given_.lost([UnitId(0, "b")])
    taken = given_.take_round()
    assert taken is not None
    assert [payload for _, payload in taken[1]] == ["A"]


def test_a_payload_that_comes_after_its_assignment_was_forgotten_is_no_news():
    given_ = QueueConsumer[str](window=2, rounds=False)
    given_.assign([unit("a")])
    given_.lost([UnitId(0, "a")])
    assert given_.units.arrived(UnitId(0, "a"), "A") is None


@pytest.mark.parametrize("window", range(1, 18))
def test_a_steady_consumer_asks_for_half_a_window_at_once_and_never_runs_dry(window):
    given_, asked, key = QueueConsumer[str](window=window, rounds=False), 0, 0
    for taken in range(200):
        if (due := given_.credit_due()) is not None:
            asked += 1
            for _ in range(due):
                given_.assign([unit(str(key))])
                given_.units.arrived(unit(str(key)).id, "payload")
                key += 1
        assert given_.take() is not None, taken
    assert asked <= 1 + 200 // -(-window // 2)


@pytest.mark.parametrize("waiting", range(8))
def test_who_waits_for_more_than_is_here_asks_for_all_the_room(waiting):
    given_ = QueueConsumer[str](window=8, rounds=False)
    assert given_.credit_due() == 8
    given_.assign([unit(str(number)) for number in range(8)])
    for number in range(8):
        given_.units.arrived(unit(str(number)).id, "payload")
    for _ in range(8 - waiting):
        given_.take()
    assert given_.is_credit_due is (waiting <= 4)
    given_.waits += 1
    assert given_.credit_due() == 8 - waiting


def test_a_role_that_has_room_for_more_than_the_plan_says_asks_for_all_of_it():
    given_ = QueueConsumer[str](window=2, rounds=False)
    given_.room = 64
    assert given_.credit_due() == 64
    given_.assign([unit(str(number)) for number in range(64)])
    for number in range(64):
        given_.units.arrived(unit(str(number)).id, "payload")
    while given_.take() is not None:
        pass
    given_.room = 0
    assert given_.credit_due() == 2, "it begins none now: what the plan lets wait"


def test_what_was_given_for_room_that_is_gone_asks_for_no_more():
    given_ = QueueConsumer[str](window=2, rounds=False)
    given_.room = 8
    assert given_.credit_due() == 8
    given_.assign([unit(str(number)) for number in range(8)])
    given_.room = 0
    given_.waits = 1
    assert given_.credit_due() is None


@settings(deadline=None)
@given(window=st.integers(1, 6), script=st.lists(st.sampled_from("satx"), max_size=80))
def test_assigned_and_not_taken_never_exceeds_the_window(window, script):
    """s: the consumer states credit; a: the driver assigns one within it; t: take; x: all under way arrives."""
    given_ = QueueConsumer[str](window=window, rounds=False)
    credit, number, under_way = 0, 0, []
    for action in script:
        if action == "s" and (due := given_.credit_due()) is not None:
            credit = due
        elif action == "a" and credit > 0:
            credit -= 1
            under_way.append(unit(str(number)))
            number += 1
        elif action == "x":
            for made in under_way:
                given_.assign([made])
                given_.units.arrived(made.id, "payload")
            under_way = []
        elif action == "t":
            given_.take()
        assert given_.waiting + len(under_way) <= window


def test_a_parent_is_complete_when_sealed_and_all_its_children_are_held():
    parents = Parents[str]()
    parents.add("child 1", ["p", "q"])
    parents.add("child 2", ["p", "q"])
    assert parents.held("child 1") == []
    assert not parents.seal("p")
    assert parents.held("child 2") == ["p"]
    assert parents.seal("q")
    assert len(parents) == 0


def test_a_parent_that_nobody_seals_is_remembered_while_a_child_of_it_is_under_way():
    """A question of a cycle is answered, and neither acknowledged nor dropped."""
    parents = Parents[str]()
    parents.add("child", ["question"])
    assert len(parents) == 1
    assert parents.held("child") == []
    assert len(parents) == 0


def test_a_parent_is_complete_when_it_is_sealed_and_not_before():
    """Whoever makes several of one parent dies after the first: the others would be lost."""
    parents = Parents[str]()
    parents.add("child", ["p"])
    assert parents.held("child") == []
    parents.add("another", ["p"])
    assert not parents.seal("p")
    assert parents.held("another") == ["p"]


def test_a_parent_without_children_is_complete_at_once():
    assert Parents[str]().seal("p")


def test_another_bound_counts_what_is_kept_already():
    made = Shelf(capacity_units=2, capacity_bytes=1000)
    made.add(unit("a"), PAYLOAD)
    made.add(unit("b"), PAYLOAD)
    assert not made.has_room(1, AGE)
    made.resize(capacity_units=3, capacity_bytes=1000)
    assert made.has_room(1, AGE)
    made.resize(capacity_units=1, capacity_bytes=1000)
    made.release([UnitId(0, "a")])
    assert not made.has_room(1, AGE), "one is kept still, which is all that fits now"
    made.release([UnitId(0, "b")])
    assert made.has_room(1, AGE)


def test_what_is_finished_is_told_once_and_kept_until_the_driver_has_certainly_heard():
    """A drain looks at what is new and at what is over, never at all that is kept: at full rate that is 100,000."""
    receipts = Receipts("q", repeat_s=10)
    first, second, third = (unit(key) for key in "abc")

    def told(now: float) -> list[str]:
        out: list[pb.WorkerMessage] = []
        receipts.drain(out, now)
        return [
            key for m in out for key in (m.acked.keys if m.HasField("acked") else [f"{m.drop.key} {m.drop.reason}"])
        ]

    receipts.finished(first, None)
    receipts.finished(second, "Stale")
    assert told(100.0) == ["b Stale", "a"]
    assert told(105.0) == []
    receipts.finished(third, None)
    assert told(106.0) == ["c"]
    assert receipts.units() == [first, second, third]
    receipts.hello()
    assert receipts.units() == [first, second, third], "the hello names them"
    assert told(107.0) == ["b Stale", "a", "c"]
    assert told(117.1) == []
    assert receipts.units() == []


def test_what_is_held_is_told_once_and_by_a_hello_instead():
    receipts = Receipts("q", repeat_s=10)
    receipts.held([unit("a"), unit("b", branch=1), unit("c")])
    out: list[pb.WorkerMessage] = []
    receipts.drain(out, 1.0)
    assert [(m.held.branch, list(m.held.keys)) for m in out] == [(0, ["a", "c"]), (1, ["b"])]
    receipts.held([unit("d")])
    receipts.hello()
    receipts.drain(out, 2.0)
    assert len(out) == 2
