"""The two ends of one stream as values: sequence numbers, credit, redelivery, de-duplication. Pure, no I/O, no clock.

For: runtime.streams, which moves what these decide. One StreamSender per route of a producer, one StreamReceiver per
stream of a producer's life.

    add() ──► unacked (at most `credit`) ──► accept() ──► pending ──► finish() ──► floor moves ──► acked() frees
                 ▲                              │
                 └── replay() on each new link  └── below `expected`: seen before, dropped

The link keeps order and may die at any point: what it had accepted may or may not have arrived. After `replay` on the
next link everything unfinished has been sent again from `base`, in order, and the receiver drops what it knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from rlinf_api.errors import InvariantBroken

T = TypeVar("T")


class StreamSender(Generic[T]):
    """Owns the bound on items in flight: charged by add(), freed by acked() or take_back()."""

    __slots__ = ("_unacked", "base", "closed", "credit", "sequence", "stream")

    def __init__(self, stream: int, *, credit: int) -> None:
        self.stream = stream
        self.credit = max(1, credit)
        self.base = 0  # lowest sequence number that is not finished with
        self.sequence = 0  # the next item's
        self.closed = False
        self._unacked: deque[T] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._unacked)

    @property
    def room(self) -> int:
        return self.credit - len(self._unacked)

    def add(self, item: T) -> int:
        """The item's sequence number. The caller has seen `room`."""
        if len(self._unacked) >= self.credit or self.closed:
            got = f"{len(self._unacked)} in flight"
            raise InvariantBroken(f"stream {self.stream} took an item without room", got=got)
        self._unacked.append(item)
        number = self.sequence
        self.sequence = number + 1
        return number

    def acked(self, floor: int) -> list[T]:
        """Everything below `floor` is finished with; returns what that frees. An old floor changes nothing."""
        if floor > self.sequence:
            raise InvariantBroken(
                f"stream {self.stream} was acknowledged beyond its end", got=str(floor),
                wanted=f"at most {self.sequence}",
            )  # fmt: skip
        freed = []
        while self.base < floor:
            freed.append(self._unacked.popleft())
            self.base += 1
        return freed

    def replay(self) -> Iterator[tuple[int, T]]:
        """Everything that is not finished with, for a link that is new."""
        return zip(range(self.base, self.sequence), tuple(self._unacked), strict=True)

    def take_back(self) -> list[T]:
        """The route is gone: its unfinished items, in order. The sender is of no more use."""
        items, self.closed = list(self._unacked), True
        self._unacked.clear()
        self.base = self.sequence
        return items


class StreamReceiver:
    """Which sequence numbers are new, and up to where all are finished with."""

    __slots__ = ("_finished", "end", "expected", "floor", "reported")

    def __init__(self, *, base: int) -> None:
        self.expected = base  # the next new item's
        self.floor = base  # everything below is finished with
        self.reported = base  # the floor that the sender was told last
        self.end: int | None = None
        self._finished: set[int] = set()

    def reopen(self, base: int) -> None:
        """The stream goes on over another link."""
        if base > self.expected:
            raise InvariantBroken(
                "a stream was reopened behind its own end", got=f"base {base}", wanted=f"at most {self.expected}"
            )
        self.reported = min(self.reported, base)  # an ack that was lost with the old link is told again

    def accept(self, sequence: int) -> bool:
        """False: seen before."""
        if sequence > self.expected:
            raise InvariantBroken("an item is missing in a stream", got=str(sequence), wanted=str(self.expected))
        if sequence < self.expected:
            return False
        self.expected = sequence + 1
        return True

    def finish(self, sequence: int) -> None:
        """The consumer is done with this item; in any order, and again without effect."""
        if sequence < self.floor or sequence >= self.expected:
            return
        if sequence != self.floor:
            self._finished.add(sequence)
            return
        self.floor += 1
        finished = self._finished
        while finished and self.floor in finished:
            finished.remove(self.floor)
            self.floor += 1

    @property
    def due(self) -> int:
        """How much the floor has moved since it was told."""
        return self.floor - self.reported

    def report(self) -> int:
        """The floor to tell now."""
        self.reported = self.floor
        return self.floor

    @property
    def ended(self) -> bool:
        return self.end is not None and self.expected >= self.end
