"""What each consumer of one queue was given and has not finished, and its weight. Pure.

For: queues.book, which keeps it; queues.matching, which gives to whoever has least to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from rlinf_api.names import WorkerId
from rlinf_worker.queues.units import UnitEntry, UnitId

_ARRIVAL = attrgetter("arrival")


class Loads:
    def __init__(self) -> None:
        self._of_consumer: dict[WorkerId, dict[UnitId, UnitEntry]] = {}
        self._weight: dict[WorkerId, float] = {}
        self._lighter: dict[WorkerId, None] = {}

    def add(self, consumer: WorkerId, entry: UnitEntry) -> None:
        self._of_consumer.setdefault(consumer, {})[entry.unit.id] = entry
        self._weight[consumer] = self._weight.get(consumer, 0.0) + entry.unit.weight

    def remove(self, consumer: WorkerId, entry: UnitEntry) -> None:
        """Its unit is the one that was added."""
        self._weight[consumer] -= entry.unit.weight
        self._lighter[consumer] = None
        mine = self._of_consumer[consumer]
        del mine[entry.unit.id]
        if not mine:
            del self._of_consumer[consumer], self._weight[consumer]

    def of(self, consumer: WorkerId) -> list[UnitEntry]:
        """In order of arrival."""
        return sorted(self._of_consumer.get(consumer, {}).values(), key=_ARRIVAL)

    def weight_of(self, consumer: WorkerId) -> float:
        return self._weight.get(consumer, 0.0)

    def take_lighter(self) -> Iterable[WorkerId]:
        """Who has less to do than when this was asked last."""
        lighter, self._lighter = self._lighter, {}
        return lighter
