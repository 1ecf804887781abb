"""The clock of everything that waits, ages or leases: it stands still while its process does.

A process that was stopped, or whose machine was paused, has not heard who spoke meanwhile, and nobody's deadline may
pass by it. So whoever counts in this clock has nothing to shift afterwards, and cannot forget to.

    clock = Clock(notice_s=1.0)
    clock() - before        # seconds that this process has lived through
    clock.call_later(120.0, kill)      # not sooner than that on this clock
    clock.stood_still_s     # all that it has left out so far

Standing still is a gap between two looks at the clock: it has to be looked at more often than every `notice_s`, which
the ticks of driver and agent do; who has none runs `tick`. Not for: times on the wire or on the
disk, which are the wall's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

GAPS_KEPT: Final = 64
"""Marks of workers are seconds old. What is older than 64 gaps is placed too early, by what has been forgotten."""
LOOKS: Final = 4
"""In the time that is noticed: of `tick`, and of a call that is to come, which must not hang on others' looks."""


class Clock:
    def __init__(self, *, notice_s: float, raw: Callable[[], float] = time.monotonic) -> None:
        """`notice_s`: a gap that is longer is one of standing still. `raw`: a clock that never does."""
        self._notice_s, self._raw = notice_s, raw
        self._seen, self.look_s = raw(), notice_s / LOOKS
        self._gaps: deque[tuple[float, float]] = deque(maxlen=GAPS_KEPT)  # when it began, how long it was
        self.stood_still_s = 0.0

    def __call__(self) -> float:
        now = self._raw()
        gap, began = now - self._seen, self._seen
        self._seen = now
        if gap > self._notice_s:
            self._gaps.append((began, gap))
            self.stood_still_s += gap
        return now - self.stood_still_s

    time = __call__

    def at(self, raw: float) -> float:
        """What this clock showed at a moment of the raw one, as another process of this machine has noted it."""
        shown = self()
        since = sum(min(length, began + length - raw) for began, length in self._gaps if began + length > raw)
        return min(shown, raw - (self.stood_still_s - since))

    async def tick(self) -> None:
        """For ever: looks at it."""
        while True:
            self()
            await asyncio.sleep(self.look_s)

    def call_later(self, delay: float, callback: Callable[..., None], *args: Any) -> Later:
        return Later(self, delay, callback, args)


class Later:
    """A call that comes when the clock, and not only the machine, has gone on for so long."""

    def __init__(self, clock: Clock, delay: float, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._clock, self._callback, self._args = clock, callback, args
        self._due = clock() + delay
        self._handle = self._again(delay)

    def _again(self, left: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(min(left, self._clock.look_s), self._look)

    def _look(self) -> None:
        left = self._due - self._clock()
        if left > 0.0:
            self._handle = self._again(left)
        else:
            self._callback(*self._args)

    def cancel(self) -> None:
        self._handle.cancel()
