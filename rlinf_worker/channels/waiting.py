"""Waiting inside one worker: a wake-up for everybody, a name and a bound for every wait, and the end of all waits.

A condition is looked at again after each wake-up, so a wake-up too many is harmless and one too few is the only mistake
there is.

| waits | for | unblocked by |
|---|---|---|
| Waits.until | its condition | Signal.notify of whoever changed something; the worker's stop; its deadline |
| Waits.beside | its condition | Signal.notify; the worker's stop; whoever raced it, by cancelling it |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, TypeVar

from rlinf_api.errors import DeadlineExceeded
from rlinf_worker.channels.protocol import ChannelClosed

T = TypeVar("T")


class Signal:
    """Wakes everybody who waits at this moment. Whoever has a thread look, and then waits, notes `count` before the
    look and waits `after` it: what came about meanwhile is not missed."""

    __slots__ = ("_loop", "_waiters", "_waits", "count")

    def __init__(self, waits: Waits) -> None:
        self._loop, self._waits = asyncio.get_running_loop(), waits
        self._waiters: list[asyncio.Future[None]] = []
        self.count = 0

    def notify(self) -> None:
        self.count += 1
        if self._waits.watcher is not None:
            self._waits.watcher()
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self, *, after: int | None = None) -> None:
        if after is not None and self.count != after:
            return
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter.cancelled() and waiter in self._waiters:
                self._waiters.remove(waiter)


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """One wait of a role. `ripe`: whether what has come is enough to take a turn for it."""

    condition: Callable[[], bool]
    ripe: Callable[[], bool]
    signal: Signal


class _Countdown:
    """The bound of one wait, which runs while the role has its turn: off its slots it can neither make room nor take
    what came, and another role may train for an hour."""

    __slots__ = ("_began", "_left_s", "_loop", "limit")

    def __init__(self, timeout_s: float, *, runs: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._left_s, self._began = timeout_s, None if not runs else self._loop.time()
        self.limit = asyncio.timeout(timeout_s if runs else None)

    def run(self, runs: bool) -> None:
        now = self._loop.time()
        if self.limit.expired():
            return
        if runs and self._began is None:
            self._began = now
            self.limit.reschedule(now + self._left_s)
        elif not runs and self._began is not None:
            self._left_s, self._began = self._left_s - (now - self._began), None
            self.limit.reschedule(None)


class Gate(Protocol):
    """turns.worker: a role without its turn does not go on, whatever has come. Asked by each wait in a lease set."""

    @property
    def is_open(self) -> bool: ...

    def waiting(self) -> None: ...

    def look(self) -> None: ...


class Waits:
    """Every wait of the worker, by name; `stop` ends them all with ChannelClosed."""

    def __init__(self) -> None:
        self.stopped: str | None = None
        self.gate: Gate | None = None  # where the worker is in a lease set
        self.watcher: Callable[[], None] | None = None  # told of every signal: of a role that is off its slots
        self._gated: dict[int, Wait] = {}
        self._signals: list[Signal] = []
        self._current: dict[int, tuple[str, float, asyncio.Task[Any] | None]] = {}
        self._clocks: dict[int, _Countdown] = {}  # gated waits'
        self._count = 0

    def signal(self) -> Signal:
        signal = Signal(self)
        self._signals.append(signal)
        return signal

    def stop(self, why: str) -> None:
        if self.stopped is None:
            self.stopped = why
        for signal in self._signals:
            signal.notify()

    def raise_if_stopped(self) -> None:
        if self.stopped is not None:
            raise ChannelClosed("this worker is stopping", got=self.stopped, next="return from run()")

    @property
    def gated(self) -> list[Wait]:
        return list(self._gated.values())

    def gate_moved(self) -> None:
        """The gate has opened or closed; said too often, nothing happens."""
        is_open = self.gate is None or self.gate.is_open
        for clock in self._clocks.values():
            clock.run(is_open)

    def notify_gated(self) -> None:
        for wait in self.gated:
            wait.signal.notify()

    async def until(
        self,
        condition: Callable[[], bool],
        signal: Signal,
        *,
        what: str,
        timeout_s: float | None,
        missing: str | Callable[[], str] = "",
        ripe: Callable[[], bool] = lambda: True,
        gated: bool = True,
    ) -> float:
        """Seconds waited. `timeout_s` None: an input may stay empty for as long as the job's deadline allows; such a
        wait has a name all the same (`current`). `gated`: a wait of the role, which is not over before its turn, and
        whose bound does not run meanwhile."""
        self.raise_if_stopped()
        if condition() and (self.gate is None or not gated or self.gate.is_open):
            return 0.0
        since = monotonic()
        self._count += 1
        number = self._count
        self._current[number] = (what, since, asyncio.current_task())
        if gated:
            self._gated[number] = Wait(condition, ripe, signal)
        try:
            if timeout_s is None:  # without a timer: what waits for each question waits so
                await self._until(condition, signal, gated=gated)
            else:
                clock = _Countdown(timeout_s, runs=not gated or self.gate is None or self.gate.is_open)
                async with clock.limit:
                    if gated:
                        self._clocks[number] = clock
                    await self._until(condition, signal, gated=gated)
        except TimeoutError as error:
            still = missing if isinstance(missing, str) else missing()  # as it is now, where it changes
            raise DeadlineExceeded(what, timeout_s=timeout_s or 0.0, missing=still) from error
        finally:
            del self._current[number]
            self._gated.pop(number, None)
            self._clocks.pop(number, None)
        return monotonic() - since

    async def _until(self, condition: Callable[[], bool], signal: Signal, *, gated: bool) -> None:
        while not (condition() and (self.gate is None or not gated or self.gate.is_open)):
            if gated and self.gate is not None:
                self.gate.look()
                self.gate.waiting()
            await signal.wait()
            self.raise_if_stopped()

    async def beside(self, condition: Callable[[], bool], signal: Signal) -> None:
        """For a task that races this against its work. No wait of the role: it is no safe point, runs also while the
        role is off its slots, and whoever has nothing else under way is not taken to wait for others."""
        self.raise_if_stopped()
        while not condition():
            await signal.wait()
            self.raise_if_stopped()

    def current(self) -> list[tuple[str, float]]:
        """(what, seconds so far), the longest first."""
        now = monotonic()
        return sorted(((what, now - since) for what, since, _ in self._current.values()), key=lambda wait: -wait[1])

    @property
    def tasks(self) -> set[asyncio.Task[Any] | None]:
        """That are in a wait now."""
        return {task for _, _, task in self._current.values()}


async def each(take: Callable[[], Awaitable[T]]) -> AsyncIterator[T]:
    """What `take` returns, until the end of what it takes from, or of the worker."""
    while True:
        try:
            yield await take()
        except ChannelClosed:
            return
