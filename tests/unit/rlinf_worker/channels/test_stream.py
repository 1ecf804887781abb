"""The two ends of a stream, as values, over links that die at any moment."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels.stream import StreamReceiver, StreamSender

CREDIT = 5


class StreamOverBadLinks(RuleBasedStateMachine):
    """A sender, a receiver and a wire which is cut with anything under way, in both directions."""

    def __init__(self):
        super().__init__()
        self.sender = StreamSender[int](1, credit=CREDIT)
        self.receiver = StreamReceiver(base=0)
        self.to_receiver: deque[tuple[str, int, int]] = deque()
        self.to_sender: deque[int] = deque()
        self.put = 0
        self.delivered: list[int] = []
        self.pending: list[int] = []
        self.freed: list[int] = []

    @precondition(lambda self: self.sender.room > 0)
    @rule()
    def add(self):
        sequence = self.sender.add(self.put)
        self.to_receiver.append(("data", sequence, self.put))
        self.put += 1

    @precondition(lambda self: self.to_receiver)
    @rule()
    def deliver(self):
        kind, sequence, value = self.to_receiver.popleft()
        if kind == "open":
            self.receiver.reopen(sequence)
        elif self.receiver.accept(sequence):
            self.delivered.append(value)
            self.pending.append(sequence)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def finish(self, data):
        self.receiver.finish(self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1))))

    @precondition(lambda self: self.receiver.due)
    @rule()
    def tell(self):
        self.to_sender.append(self.receiver.report())

    @precondition(lambda self: self.to_sender)
    @rule()
    def hear(self):
        self.freed += self.sender.acked(self.to_sender.popleft())

    @rule()
    def cut(self):
        self.to_receiver.clear()
        self.to_sender.clear()
        self.to_receiver.append(("open", self.sender.base, 0))
        self.to_receiver.extend(("data", sequence, value) for sequence, value in self.sender.replay())

    @invariant()
    def nothing_is_lost_or_twice_and_order_holds(self):
        assert self.delivered == list(range(len(self.delivered)))
        assert self.freed == list(range(len(self.freed)))
        assert len(self.freed) <= len(self.delivered)

    @invariant()
    def the_bound_holds(self):
        assert 0 <= self.sender.in_flight <= CREDIT

    def teardown(self):
        while self.to_receiver:
            self.deliver()
        for sequence in self.pending:
            self.receiver.finish(sequence)
        assert self.delivered == list(range(self.put))
        self.cut()
        while self.to_receiver:
            self.deliver()
        self.sender.acked(self.receiver.report())
        assert self.sender.in_flight == 0


TestStreamOverBadLinks = StreamOverBadLinks.TestCase
TestStreamOverBadLinks.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_an_acknowledgement_of_what_was_never_sent_is_a_bug():
    sender = StreamSender[int](1, credit=2)
    sender.add(0)
    with pytest.raises(InvariantBroken, match="beyond its end: got 2, wanted at most 1"):
        sender.acked(2)


def test_what_a_route_leaves_unfinished_is_given_back_in_order():
    sender = StreamSender[str](1, credit=4)
    for item in "abc":
        sender.add(item)
    sender.acked(1)
    assert sender.take_back() == ["b", "c"]
    assert sender.in_flight == 0


def test_a_gap_is_a_bug():
    receiver = StreamReceiver(base=0)
    with pytest.raises(InvariantBroken, match="missing"):
        receiver.accept(1)


def test_a_stream_has_ended_when_everything_before_its_end_came():
    receiver = StreamReceiver(base=0)
    receiver.end = 1
    assert not receiver.ended
    receiver.accept(0)
    assert receiver.ended
