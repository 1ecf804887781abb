"""Timers that come out even: pieces of work that take as long as they should, on a machine that wakes late.

A wake-up is late by up to a millisecond (epoll counts in them), on busy cores by more. What one piece took too long,
the next one of the same lane takes less: the sum is right, and nobody spins.

>>> async def example(pacer: Pacer) -> None:
...     await pacer.spend(0.004)  # late by 0.7 ms
...     await pacer.spend(0.004)  # begins 0.7 ms in debt: 3.3 ms
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final

MAX_DEBT_S: Final = 0.25
"""Lateness that is made up for. A process that was frozen for seconds must not work for nothing afterwards."""
WORTH_SLEEPING_S: Final = 0.0002
"""Less than this left of a piece is carried on as credit: a sleep would take a millisecond."""


class Pacer:
    """One lane: pieces of it follow each other. `clock` and `sleep` are the test's."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], object] = asyncio.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self.debt_s = 0.0  # how much too long the pieces so far took; negative: too short

    async def spend(self, *pieces: float, after: Callable[[int], None] = lambda number: None) -> float:
        """Pieces that follow each other without a gap; `after` is called at the end of each, and must not block. How
        long they really took in all."""
        begun = now = self._clock()
        for number, seconds in enumerate(pieces):
            due = now + seconds - self.debt_s
            left = due - self._clock()
            if left > WORTH_SLEEPING_S:
                await self._sleep(left)  # type: ignore[misc]
            ended = self._clock()
            self.debt_s = min(MAX_DEBT_S, ended - due)
            now = ended
            after(number)
        return now - begun
