"""What one queue has to look at because of another that it joins, or that joins it. Pure. For: queues.core.

a unit of the first ──each queue that joins it has one of the same key──► ready ──given to one──► the parts follow
"""

from __future__ import annotations

from collections.abc import Callable

from rlinf_worker.queues.book import News, UnitBook
from rlinf_worker.queues.matching import Given
from rlinf_worker.queues.units import Age, UnitId, UnitState


class Joint:
    """One for each queue, joined or not."""

    def __init__(self, book: UnitBook, *, knows: Callable[[UnitId], bool]) -> None:
        """`knows`: whether the queue has a unit, or had it."""
        self._book, self._knows = book, knows
        self._parts: list[Joint] = []  # of queues that join this one: they have a part of each of its units
        self.first: Joint | None = None  # of the queue that this one joins
        self._news: News = {}  # units of which another queue knows more, or less, than when they were looked at

    def join(self, first: Joint) -> None:
        """A unit of `first` is ready once this queue has one of the same key, which then goes where that went."""
        first._parts.append(self)
        self._book.is_ready = lambda uid: False  # nothing of it is handed out by itself: it follows
        first._book.is_ready, self.first = first._is_ready, first
        self._book.known_to.append(first._news)
        self._book.waiting_to.append(self._news)
        first._book.given_to.append(self._news)

    def _is_ready(self, uid: UnitId) -> bool:
        return all(part._knows(uid) for part in self._parts)

    def tell_first(self, uid: UnitId) -> None:
        """This queue knows it now, or not any more, and its book does not say so."""
        if self.first is not None:
            self.first._news[uid] = None

    def look_at_news(self) -> None:
        if not self._news:
            return
        for entry in map(self._book.entries.get, self._news):
            if entry is not None and entry.state is UnitState.WAITING:
                self._book.look_at(entry)
        self._news.clear()

    def follow(self, first: Joint) -> Given:
        """What waits here of units that somebody was given there, to the same."""
        given: Given = {}
        if not self._news:
            return given
        for entry, one in [(self._book.entries.get(uid), first._book.entries.get(uid)) for uid in self._news]:
            if entry is not None and entry.state is UnitState.WAITING and one is not None and one.consumer is not None:
                self._book.assign(entry, one.consumer)
                given.setdefault(one.consumer, []).append(entry.unit)
        self._news.clear()
        return given

    def close(self, upto: Age) -> None:
        """The parts remember as little of these steps as this queue."""
        if self._parts:
            self._news.update((entry.unit.id, None) for entry in self._book.waiting_upto(upto))
