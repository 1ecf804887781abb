"""Who of the consumers of one queue gets which unit: by credit, affinity, age and weight. Pure. For: queues.core; the
rounds of a gang are queues.steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from rlinf_api.names import WorkerId
from rlinf_worker.queues.book import UnitBook, UnitEntry
from rlinf_worker.queues.units import Age, UnitId, UnitInfo, UnitState

IsReady = Callable[[UnitId], bool]
Given = dict[WorkerId, list[UnitInfo]]
"""What each consumer is given, in the order in which it is to have it."""


class Consumers:
    """Of one queue: all of the roster, present or not, and how much each can take from now on (rounds, for a gang)."""

    def __init__(self) -> None:
        self.ranked: Sequence[WorkerId] = ()  # affinity counts over these
        self._credit: dict[WorkerId, int] = {}

    def credit(self, consumer: WorkerId, units: int) -> None:
        """Stated anew: it is absolute."""
        self._credit[consumer] = max(0, units)

    def credit_of(self, consumer: WorkerId) -> int:
        return self._credit.get(consumer, 0)

    def spend(self, consumer: WorkerId) -> None:
        self._credit[consumer] -= 1

    def remove(self, consumer: WorkerId) -> None:
        self._credit.pop(consumer, None)


def hand_out(book: UnitBook, consumers: Consumers, *, is_ready: IsReady) -> Given:
    """What waits, within credit: the oldest policy version first, then by arrival.

    What only one consumer may have goes first; the rest to whoever can take most, of two equals to the one that has
    less to do by weight.
    """
    given: Given = {}
    for age in book.ages():
        if not any(map(consumers.credit_of, consumers.ranked)):
            break
        _assign(book, _choose(book, consumers, age, is_ready=is_ready), given)
    return given


def follow(book: UnitBook, first: UnitBook) -> Given:
    """For a queue that joins another: each part goes to whom `first` gave the unit, which is the bound of both."""
    given: Given = {}
    for age in book.ages():
        owned = [(entry, first.get(entry.unit.id)) for entry in book.waiting(age)]
        _assign(book, [(entry, one.consumer) for entry, one in owned if one is not None and one.consumer], given)
    return given


def _assign(book: UnitBook, chosen: Iterable[tuple[UnitEntry, WorkerId]], given: Given) -> None:
    for entry, consumer in chosen:
        book.move(entry, UnitState.ASSIGNED, consumer=consumer)
        given.setdefault(consumer, []).append(entry.unit)


def _choose(book: UnitBook, consumers: Consumers, age: Age, *, is_ready: IsReady) -> list[tuple[UnitEntry, WorkerId]]:
    """Credit is spent here."""
    chosen: list[tuple[UnitEntry, WorkerId]] = []
    for index, lines in book.waiting_for_one(age, consumers=len(consumers.ranked)).items():
        consumer = consumers.ranked[index]
        ready = (e for e in heapq.merge(*lines, key=lambda e: e.arrival) if is_ready(e.unit.id))
        chosen += [(entry, consumer) for entry in islice(ready, consumers.credit_of(consumer))]
    for _, consumer in chosen:
        consumers.spend(consumer)
    able = [
        (-credit, book.weight_of(consumer), index)
        for index, consumer in enumerate(consumers.ranked)
        if (credit := consumers.credit_of(consumer))
    ]
    heapq.heapify(able)
    for entry in book.waiting_for_anybody(age):
        if not able:
            break
        if not is_ready(entry.unit.id):
            continue
        credit, weight, index = able[0]
        chosen.append((entry, consumers.ranked[index]))
        consumers.spend(consumers.ranked[index])
        if credit + 1 < 0:
            heapq.heapreplace(able, (credit + 1, weight + entry.unit.weight, index))
        else:
            heapq.heappop(able)
    return chosen
