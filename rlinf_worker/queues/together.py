"""Which consumer has the units of one ticket, where all of them have to come to the same one. Pure.

    nobody's ──one of its units is given──> that consumer's ──it is gone, or the step is over──> nobody's

For: queues.core. Queues of one consumer share it: what several of them have of a ticket comes to one place.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlinf_api.names import WorkerId
from rlinf_worker.queues.book import UnitBook
from rlinf_worker.queues.units import Age, UnitInfo


class Homes:
    def __init__(self) -> None:
        self._homes: dict[Age, dict[str, WorkerId]] = {}  # by the ticket; of open steps
        self._books: list[UnitBook] = []

    def share(self, book: UnitBook) -> None:
        book.by_ticket = {}
        self._books.append(book)

    def of(self, unit: UnitInfo) -> WorkerId | None:
        """None: whoever is given the first of its ticket."""
        return self._homes.get(unit.age, {}).get(unit.first_ticket)

    def settle(self, unit: UnitInfo, consumer: WorkerId) -> None:
        """It is this consumer's; so is what waits, and what comes, of its ticket."""
        homes = self._homes.setdefault(unit.age, {})
        if unit.first_ticket not in homes:
            homes[unit.first_ticket] = consumer
            self._look_at(unit.age, [unit.first_ticket])

    def gone(self, consumer: WorkerId) -> None:
        """What it had goes to one other, ticket by ticket."""
        for age, homes in self._homes.items():
            orphaned = [ticket for ticket, home in homes.items() if home == consumer]
            for ticket in orphaned:
                del homes[ticket]
            self._look_at(age, orphaned)

    def close(self, upto: Age) -> None:
        self._homes = {age: homes for age, homes in self._homes.items() if age > upto}

    def _look_at(self, age: Age, tickets: Iterable[str]) -> None:
        for ticket in tickets:
            for book in self._books:
                for entry in book.waiting_of(age, ticket):
                    book.look_at(entry)
