"""Simulated time: events in their order, and the piece of work that brought each about.

    clock.at(12.5, work.over, worker, unit, piece)      handler(worker, unit) is called when all earlier events are

Of several at one time the first that was asked for comes first, so that a run is the same on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from rlinf_api.errors import InvariantBroken

Piece = tuple[Any, int, str, float, float]
"""(what brought it about, role, kind, begin, end); kinds: compute, load, offload, weights, turn."""


class Aborted(Exception):
    """A run that lasts longer than was asked for: nobody wants such a candidate. `moves`: what it took."""

    def __init__(self, moves: int) -> None:
        super().__init__(moves)
        self.moves = moves


class SimClock:
    def __init__(self) -> None:
        self.now = 0.0
        self.piece: Any = None
        """What has brought the present event about."""
        self.count = 0
        """Events that were asked for: what a run costs, on any machine."""
        self._events: list[tuple[float, int, Callable[[Any, Any], None], Any, Any, Any]] = []

    def at(self, time: float, handler: Callable[[Any, Any], None], a: Any, b: Any, piece: Any) -> None:
        self.count += 1
        heappush(self._events, (time, self.count, handler, a, b, piece))

    def run(self, ends: Sequence[object], *, until: float) -> None:
        """Until one more of `ends` is there. Raises Aborted where that takes longer."""
        events, before = self._events, len(ends)
        while len(ends) == before:
            if not events:
                raise InvariantBroken(f"the simulated job stands still after {before - 1} steps")
            self.now, _, handler, a, b, self.piece = heappop(events)
            if self.now > until:
                raise Aborted(self.count)
            handler(a, b)
