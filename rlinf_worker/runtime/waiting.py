"""Waiting inside one worker: a wake-up for everybody, a name and a bound for every wait, and the end of all waits.

Called by the channel ends and the session. A condition is looked at again after each wake-up, so a wake-up too many is
harmless and one too few is the only mistake there is.

| waits | for | unblocked by |
|---|---|---|
| Waits.until | its condition | Signal.notify of whoever changed something; the worker's stop; its deadline |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from rlinf_api.errors import DeadlineExceeded
from rlinf_worker.channels.protocol import ChannelClosed


class Signal:
    """Wakes everybody who waits at this moment."""

    __slots__ = ("_loop", "_waiters")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter.cancelled() and waiter in self._waiters:
                self._waiters.remove(waiter)


class Waits:
    """Every wait of the worker, by name; `stop` ends them all with ChannelClosed."""

    def __init__(self) -> None:
        self.stopped: str | None = None
        self._signals: list[Signal] = []
        self._current: dict[int, tuple[str, float]] = {}
        self._count = 0

    def signal(self) -> Signal:
        signal = Signal()
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

    async def until(
        self, condition: Callable[[], bool], signal: Signal, *, what: str, timeout_s: float | None, missing: str = ""
    ) -> float:
        """Seconds waited. `timeout_s` None: an input may stay empty for as long as the job's deadline allows; such a
        wait has a name all the same (`current`)."""
        self.raise_if_stopped()
        if condition():
            return 0.0
        since = monotonic()
        self._count += 1
        number = self._count
        self._current[number] = (what, since)
        try:
            if timeout_s is None:  # without a timer: what waits for each item of a stream waits so
                await self._until(condition, signal)
            else:
                async with asyncio.timeout(timeout_s):
                    await self._until(condition, signal)
        except TimeoutError as error:
            raise DeadlineExceeded(what, timeout_s=timeout_s or 0.0, missing=missing) from error
        finally:
            del self._current[number]
        return monotonic() - since

    async def _until(self, condition: Callable[[], bool], signal: Signal) -> None:
        while not condition():
            await signal.wait()
            self.raise_if_stopped()

    def current(self) -> list[tuple[str, float]]:
        """(what, seconds so far), the longest first."""
        now = monotonic()
        return sorted(((what, now - since) for what, since in self._current.values()), key=lambda wait: -wait[1])
