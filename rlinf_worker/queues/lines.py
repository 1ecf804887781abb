"""What may be handed out of one queue, in the order in which it is to go. Pure.

For: queues.book, which keeps it; queues.matching and steps, which ask.

    wait, and ready ──join()──► in the line of its age and of who may have it ──leave()──► given to one, or not ready
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from rlinf_api.names import WorkerId
from rlinf_worker.queues.units import Age, UnitEntry


class _Line:
    """Entries that wait, by arrival: the first of them at hand, whatever has left from the middle or comes back."""

    __slots__ = ("_order", "entries")

    def __init__(self) -> None:
        self.entries: dict[int, UnitEntry] = {}
        self._order: list[int] = []  # a heap; those that have left are passed over

    def add(self, entry: UnitEntry) -> None:
        self.entries[entry.arrival] = entry
        heapq.heappush(self._order, entry.arrival)

    def discard(self, entry: UnitEntry) -> None:
        del self.entries[entry.arrival]
        if len(self._order) > 2 * len(self.entries) + 8:
            self._order = sorted(self.entries)

    def first(self) -> UnitEntry:
        while (arrival := self._order[0]) not in self.entries:
            heapq.heappop(self._order)
        return self.entries[arrival]

    def first_few(self, count: int) -> list[UnitEntry]:
        found = list[int]()
        while self._order and len(found) < count:
            arrival = heapq.heappop(self._order)
            if arrival in self.entries and arrival not in found[-1:]:  # it may stand there twice
                found.append(arrival)
        for arrival in found:
            heapq.heappush(self._order, arrival)
        return [self.entries[arrival] for arrival in found]


class Lines:
    """One for each age, and in it for each that alone may have something (None: for anybody). None is empty."""

    def __init__(self) -> None:
        self._lines: dict[Age, dict[WorkerId | None, _Line]] = {}
        self._pinned: dict[WorkerId, None] = {}

    def __bool__(self) -> bool:
        """Something may be handed out."""
        return bool(self._lines)

    def join(self, entry: UnitEntry) -> None:
        if entry.is_ready:
            self._lines.setdefault(entry.unit.age, {}).setdefault(entry.only, _Line()).add(entry)
            if entry.only is not None:
                self._pinned[entry.only] = None

    def leave(self, entry: UnitEntry) -> None:
        """It is as it was when it joined."""
        if entry.is_ready:
            of_age = self._lines[entry.unit.age]
            line = of_age[entry.only]
            line.discard(entry)
            if not line.entries:
                del of_age[entry.only]
                if not of_age:
                    del self._lines[entry.unit.age]

    def ages(self) -> list[Age]:
        """The oldest first."""
        return sorted(self._lines)

    def first_of(self, age: Age, *, only: WorkerId | None) -> UnitEntry | None:
        """What goes first: of what `only` this consumer may have; None: of what anybody may."""
        line = self._lines.get(age, {}).get(only)
        return line.first() if line is not None else None

    def first_few(self, age: Age, count: int) -> list[UnitEntry]:
        """As `first_of` anybody's, one after another."""
        line = self._lines.get(age, {}).get(None)
        return line.first_few(count) if line is not None else []

    def count(self, age: Age) -> int:
        return sum(len(line.entries) for line in self._lines.get(age, {}).values())

    def take_pinned(self) -> Iterable[WorkerId]:
        """For whom alone something has begun to wait."""
        pinned, self._pinned = self._pinned, {}
        return pinned
