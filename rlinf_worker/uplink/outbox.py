"""Messages on their way to the other end of one stream: bounded, taken in batches, closed once.

For: both ends of an uplink. Whoever has something to say puts it in; the one task that writes the stream takes it out.
What outlives a stream is in the dialling end's `Kept`.

    put .... put ──► [ oldest first, at most `limit` ] ──► take, drain
                          a put that finds it full closes it: the other end does not read

A frame of gRPC costs its two ends 0.2 ms of CPU, with TLS and the wake-ups of its threads; another message in it, a few
microseconds. So what nobody waits for `can_wait`: it goes with the next frame, at the latest `PACE_S` after the last.

    units held, acknowledged, released      can wait: room is freed when much has gathered
    units made, below a micro-batch         can wait: so many are taken at once where they go
    credit                                  goes at once, and is said when half of the window is free (queues.given)
    anything else                           goes at once, and takes along what waits
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Generic, Protocol, TypeVar

M = TypeVar("M")

LIMIT: Final = 20_000
"""Messages: seconds of the fastest worker's traffic. What credit and capacity let wait is far below it."""


FRAME_BYTES: Final = 4 << 20
"""Bytes that a frame of several messages may weigh: a quarter of what one message of gRPC may (16 MiB), as the last one
that is put into a frame comes on top."""
UNWEIGHED: Final = 8
"""Messages that go into a frame without a look at their size, which costs as much as sending them: eight large ones, of
2 MiB, still fit."""


PACE_S: Final = 0.004
"""Between two frames, where the second has nothing but what can wait: 250 of those a second take 5% of a core, of both
ends together. After a rest it goes at once, so that a stream with little to say is as quick as ever; on one that is
busy a unit is known to be held, or is announced below its micro-batch, so much later."""


class Sized(Protocol):
    def ByteSize(self) -> int: ...  # noqa: N802 - protobuf's name


S = TypeVar("S", bound=Sized)


def in_frames(batch: Sequence[S]) -> Iterator[list[S]]:
    """The batch, in order, in as few lists as may each be one frame. A peer that was away for a moment is told much at
    once, and a frame that is too large would break its stream, each time anew."""
    if 0 < len(batch) <= UNWEIGHED:
        yield list(batch)
        return
    part, weight = list[S](), 0
    for message in batch:
        part.append(message)
        weight += message.ByteSize()
        if weight >= FRAME_BYTES:
            yield part
            part, weight = [], 0
    if part:
        yield part


class Outbox(Generic[M]):
    """A peer that does not read fast enough is disconnected rather than remembered without end: it connects anew, and
    its hello says what it holds."""

    def __init__(self, *, limit: int = LIMIT) -> None:
        self._messages: deque[M] = deque()
        self._limit = limit
        self._wake = asyncio.Event()
        self._has_words = False  # that can wait
        self._taken_at = float("-inf")  # by the loop's clock
        self._loop: asyncio.AbstractEventLoop | None = None  # of whoever writes the stream
        self._is_timed = False
        self.closed: str | None = None
        """Why nothing more is taken in; None: it is open."""
        self.deaf = False
        """On the serving end: the peer has been dismissed, and what it still says counts no more."""

    def put(self, message: M, *, can_wait: bool = False) -> None:
        """Nothing, where it is closed. The message that finds it full is its last."""
        if self.closed is not None:
            return
        self._messages.append(message)
        self.poke(can_wait=can_wait)
        if len(self._messages) > self._limit:
            self.close(f"the other end left {self._limit} messages unread")

    def close(self, why: str) -> None:
        """What is already in it can still be taken."""
        if self.closed is None:
            self.closed = why
            self._wake.set()

    def poke(self, *, can_wait: bool = False) -> None:
        """Ends one wait for it: whoever writes the stream has a reason of its own to look."""
        if not can_wait:
            self._wake.set()
        elif not self._has_words:
            self._has_words = True
            if self._loop is not None:  # else its writer looks before it waits
                self._wake_in_time(self._loop)

    def _wake_in_time(self, loop: asyncio.AbstractEventLoop) -> None:
        due = self._taken_at + PACE_S
        if loop.time() >= due:
            self._wake.set()
        elif not self._is_timed:
            self._is_timed = True
            loop.call_at(due, self._ripe, loop)

    def _ripe(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_timed = False
        if self._has_words:  # and no other frame has taken them along
            self._wake_in_time(loop)

    async def filled(self) -> None:
        """Returns when something in it is due, or it is closed, or was poked since the last call."""
        self._loop = loop = asyncio.get_running_loop()
        while self.closed is None and not self._wake.is_set():
            if self._has_words:
                self._wake_in_time(loop)
            await self._wake.wait()
        self._wake.clear()

    def take(self, count: int | None = None) -> list[M]:
        """The oldest `count`; None: all that wait."""
        waiting = len(self._messages)
        taken = [self._messages.popleft() for _ in range(waiting if count is None else min(count, waiting))]
        if self._messages:
            self._wake.set()  # the rest is due, too
        else:
            self._has_words = False
        if taken and self._loop is not None:
            self._taken_at = self._loop.time()
        return taken

    async def drain(self) -> list[M]:
        """All that waits, at once, when some of it is due; an empty list when closed and empty."""
        while True:
            await self.filled()
            if self._messages or self.closed is not None:
                return self.take()

    @property
    def waiting(self) -> int:
        """Messages that have not been taken."""
        return len(self._messages)


class Lasts(Enum):
    """How long a message that could not be written is worth saying."""

    STREAM = auto()
    DRIVER = auto()
    JOB = auto()


@dataclass(frozen=True, slots=True)
class Told(Generic[M]):
    message: M
    lasts: Lasts = Lasts.STREAM
    is_repeated: bool = False


class Kept(Generic[M]):
    """What was told to a driver and outlives the stream: said again after the next Welcome, or forgotten. Pure; one per
    dialling end. A stream that breaks says nothing about what had arrived, so each message has its `Lasts`.

    | told | while a stream is open | when the stream ends before it was written | while there is no stream |
    |---|---|---|---|
    | `Lasts.STREAM` | written | forgotten: the next hello says it | forgotten |
    | `Lasts.DRIVER` | written | waits; forgotten where the next driver is another one | likewise |
    | `Lasts.JOB` | written | waits for the next Welcome | waits for the next Welcome |
    | `repeat(key)` | written | written again after every Welcome, until `forget(key)` | likewise |

    Bounded: more than `limit` that wait push out the oldest, which is counted in `dropped`.
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Told[M]] = deque()
        self._repeated: OrderedDict[str, M] = OrderedDict()
        self.dropped = 0

    def add(self, told: Iterable[Told[M]]) -> None:
        """Told, and not written."""
        self._waiting += [one for one in told if one.lasts is not Lasts.STREAM]
        while len(self._waiting) > self._limit:
            self._waiting.popleft()
            self.dropped += 1

    def repeat(self, key: str, message: M) -> None:
        """In place of what had this key."""
        self._repeated.pop(key, None)
        self._repeated[key] = message
        while len(self._repeated) > self._limit:
            self._repeated.popitem(last=False)
            self.dropped += 1

    def forget(self, key: str) -> None:
        self._repeated.pop(key, None)

    def welcomed(self, since_hello: Iterable[Told[M]], *, is_same_driver: bool) -> list[Told[M]]:
        """What a stream begins with: what is repeated, what waited, what was told while the Welcome was on its way."""
        waited, self._waiting = self._waiting, deque()
        rest = [
            one
            for one in (*waited, *since_hello)
            if not one.is_repeated and (is_same_driver or one.lasts is not Lasts.DRIVER)
        ]
        return [*(Told(message, is_repeated=True) for message in self._repeated.values()), *rest]
