"""The tickets of which more may be made, by what is in one queue. Pure.

For: queues.book, which counts; driver.ends, which asks all queues of a flow whether a ticket is through.
"""

from __future__ import annotations

from rlinf_worker.queues.units import Age, UnitId, UnitInfo


class WorkedOn:
    def __init__(self) -> None:
        self._units: dict[UnitId, int] = {}  # of a ticket, that more may be made of
        self._turned: dict[UnitId, Age] = {}

    def __contains__(self, ticket: UnitId) -> bool:
        return ticket in self._units

    def __len__(self) -> int:
        return len(self._units)

    def count(self, unit: UnitInfo, sign: int) -> None:
        """`sign`: 1 where more may be made of the unit, -1 where no more is."""
        for key in unit.of_tickets:
            ticket = UnitId(unit.branch, key)
            before = self._units.get(ticket, 0)
            if before + sign:
                self._units[ticket] = before + sign
            else:
                del self._units[ticket]
            if unit.wants_seal and (not before or not before + sign):
                self._turned[ticket] = unit.age

    def take_turned(self) -> dict[UnitId, Age]:
        """Tickets of which somebody wants to hear, and that began or ceased to be worked on: with their steps."""
        turned, self._turned = self._turned, {}
        return turned
