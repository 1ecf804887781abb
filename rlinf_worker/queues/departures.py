"""What becomes of the units of one queue when a consumer or a producer goes, or one cannot fetch from the other. Pure.

    its consumer goes, or gives up fetching it ──► waits again      its producer goes, or has it no more ──► lost

For: queues.core. What is lost is returned, so that the driver hands its tickets out again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from rlinf_api.names import WorkerId
from rlinf_worker.queues.book import Past, UnitBook
from rlinf_worker.queues.matching import Consumers
from rlinf_worker.queues.steps import OpenSteps
from rlinf_worker.queues.units import GONE, INLINE, UnitEntry, UnitId, UnitInfo, UnitState


class Departures:
    def __init__(
        self,
        book: UnitBook,
        consumers: Consumers,
        steps: OpenSteps,
        *,
        on_the_way: Past[tuple[UnitInfo, WorkerId]],
        counts: dict[str, int],
    ) -> None:
        self._book, self._consumers, self._steps = book, consumers, steps
        self._on_the_way, self._counts = on_the_way, counts
        self._again: list[UnitInfo] = []

    def remove_consumer(self, consumer: WorkerId) -> list[UnitInfo]:
        """What it had is waiting again; returns what is lost because its producer is gone as well.

        A gang is removed whole: the caller removes every rank, and rounds of open steps are formed anew.
        """
        self._consumers.remove(consumer)
        if self._consumers.homes is not None:
            self._consumers.homes.gone(consumer)
        self._on_the_way.drop(lambda way: way[1] == consumer)
        had = self._book.loads.of(consumer)
        self._wait_again(had)
        self._steps.gang_gone()
        return self._lose(entry for entry in had if entry.unit.producer == GONE)

    def take_over(self, consumer: WorkerId) -> list[UnitInfo]:
        """What it has of steps that have committed and never acknowledged: nobody needs it again. What a gang has is
        acknowledged by its commit, or made again with its branch."""
        if self._book.is_last:
            return []
        over = [entry.unit for entry in self._book.loads.of(consumer) if entry.unit.age <= self._steps.closed]
        for unit in over:
            self._book.pop(unit.id)
        self._counts["late"] += len(over)
        return over

    def remove_producer(self, producer: WorkerId) -> list[UnitInfo]:
        """Its units that nobody holds yet are lost; held ones live on with their consumer. One that was just handed
        out may have arrived all the same: `held` takes it back."""
        made = self._book.made_by(producer) if producer != INLINE else []
        for entry in made:
            alone = replace(entry.unit, producer=GONE)
            if entry.state is UnitState.HELD:
                self._book.change(entry, alone)
            elif entry.consumer is not None:
                self._on_the_way.add(alone, (alone, entry.consumer))
        return self._lose(entry for entry in made if entry.state is not UnitState.HELD)

    def missing(
        self, consumer: WorkerId, producer: WorkerId, *, units: Collection[UnitId] | None = None
    ) -> list[UnitInfo]:
        """The producer is alive and does not have what the consumer was to fetch (None: any of it): lost, as above, but
        certainly not with the consumer."""
        return self._lose(self._to_fetch(consumer, producer, units))

    def hand_back(self, consumer: WorkerId, producer: WorkerId, *, units: Collection[UnitId] | None = None) -> None:
        """The consumer has given up what it was to fetch (None: all), and the producer keeps it: it waits again."""
        self._wait_again(self._to_fetch(consumer, producer, units))

    def _to_fetch(self, consumer: WorkerId, producer: WorkerId, units: Collection[UnitId] | None) -> list[UnitEntry]:
        return [
            entry
            for entry in self._book.loads.of(consumer)
            if entry.state is UnitState.ASSIGNED
            and entry.unit.producer == producer != INLINE
            and (units is None or entry.unit.id in units)
        ]

    def _wait_again(self, entries: Iterable[UnitEntry]) -> None:
        for entry in entries:
            self._counts["redelivered"] += 1
            self._steps.take_back(entry.unit)
            self._book.move(entry, UnitState.WAITING)
            self._again.append(entry.unit)

    def _lose(self, entries: Iterable[UnitEntry]) -> list[UnitInfo]:
        lost = [self._book.pop(entry.unit.id) for entry in entries]
        for unit in lost if self._book.is_last else ():
            self._steps.at(unit.age).forget(unit)
        self._counts["lost"] += len(lost)
        return lost

    def take_again(self) -> list[UnitInfo]:
        """What is given to another since it was asked for: of its tickets something may come a second time."""
        again, self._again = self._again, []
        return again
