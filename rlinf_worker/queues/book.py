"""Where each unit of one queue is, looked up by every question that matching asks. Pure.

For: queues.core, matching and steps, which decide. No question costs more than its answer is long: a driver asks after
each message, with as many units waiting as a step has.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from rlinf_api.names import WorkerId
from rlinf_worker.queues.units import Age, UnitId, UnitInfo, UnitState


@dataclass(slots=True, eq=False)
class UnitEntry:
    unit: UnitInfo
    arrival: int  # keeps its place when it waits again
    state: UnitState = UnitState.WAITING
    consumer: WorkerId | None = None
    round: int = 0  # number of the round that it is in
    is_sealed: bool = False  # its consumer makes no more of it


_ARRIVAL = attrgetter("arrival")
K = TypeVar("K")
W = TypeVar("W")
V = TypeVar("V")


def _discard(index: dict[K, dict[W, V]], key: K, what: W) -> None:
    del index[key][what]
    if not index[key]:
        del index[key]


@dataclass(slots=True)
class _Line:
    """Entries that wait, in order of arrival; one that comes back is put where it was before anybody looks."""

    entries: dict[UnitId, UnitEntry] = field(default_factory=dict)
    newest: int = 0
    is_sorted: bool = True

    def add(self, entry: UnitEntry) -> None:
        self.is_sorted = self.is_sorted and (entry.arrival >= self.newest or not self.entries)
        self.newest = entry.arrival if not self.entries else max(self.newest, entry.arrival)
        self.entries[entry.unit.id] = entry

    def in_order(self) -> Iterable[UnitEntry]:
        if not self.is_sorted:
            ordered = sorted(self.entries.values(), key=_ARRIVAL)
            self.entries = {e.unit.id: e for e in ordered}
            self.is_sorted = True
        return self.entries.values()


class UnitBook:
    def __init__(self) -> None:
        self.entries: dict[UnitId, UnitEntry] = {}
        self.queued_bytes = 0
        self._arrivals = 0
        self._waiting: dict[Age, dict[int | None, _Line]] = {}  # by affinity
        self._assigned = Counter[Age]()
        self._of_consumer: dict[WorkerId, dict[UnitId, UnitEntry]] = {}
        self._of_producer: dict[WorkerId, dict[UnitId, UnitEntry]] = {}
        self._weight: dict[WorkerId, float] = {}
        self._worked_on: dict[UnitId, int] = {}  # by ticket: units of it that more may be made of
        self._turned: dict[UnitId, Age] = {}  # of which somebody wants to hear: began or ceased to be worked on

    # --- changes ------------------------------------------------------------------------------------------------------
    def add(self, unit: UnitInfo, state: UnitState = UnitState.WAITING, consumer: WorkerId | None = None) -> None:
        self._arrivals += 1
        self._enter(UnitEntry(unit, self._arrivals, state, consumer))
        self._work(unit, 1)

    def move(self, entry: UnitEntry, state: UnitState, *, consumer: WorkerId | None = None, number: int = 0) -> None:
        self._leave(entry)
        if entry.is_sealed and (state is not UnitState.HELD or consumer != entry.consumer):
            entry.is_sealed = False
            self._work(entry.unit, 1)
        entry.state, entry.consumer, entry.round = state, consumer, number
        self._enter(entry)

    def seal(self, entry: UnitEntry) -> None:
        if not entry.is_sealed:
            entry.is_sealed = True
            self._work(entry.unit, -1)

    def change(self, entry: UnitEntry, unit: UnitInfo) -> None:
        """Another description of the same unit."""
        self._leave(entry)
        entry.unit = unit
        self._enter(entry)

    def pop(self, uid: UnitId) -> UnitInfo:
        entry = self.entries[uid]
        self._leave(entry)
        if not entry.is_sealed:
            self._work(entry.unit, -1)
        return entry.unit

    def _enter(self, entry: UnitEntry) -> None:
        unit = entry.unit
        self.entries[unit.id] = entry
        self.queued_bytes += unit.size_bytes
        self._of_producer.setdefault(unit.producer, {})[unit.id] = entry
        if entry.state is UnitState.WAITING:
            self._waiting.setdefault(unit.age, {}).setdefault(unit.affinity, _Line()).add(entry)
            return
        if entry.state is UnitState.ASSIGNED:
            self._assigned[unit.age] += 1
        if entry.consumer is not None:
            self._of_consumer.setdefault(entry.consumer, {})[unit.id] = entry
            self._weight[entry.consumer] = self._weight.get(entry.consumer, 0.0) + unit.weight

    def _leave(self, entry: UnitEntry) -> None:
        unit = entry.unit
        del self.entries[unit.id]
        self.queued_bytes -= unit.size_bytes
        _discard(self._of_producer, unit.producer, unit.id)
        if entry.state is UnitState.WAITING:
            lines = self._waiting[unit.age]
            del lines[unit.affinity].entries[unit.id]
            if not lines[unit.affinity].entries:
                _discard(self._waiting, unit.age, unit.affinity)
            return
        if entry.state is UnitState.ASSIGNED:
            self._assigned[unit.age] -= 1
            if not self._assigned[unit.age]:
                del self._assigned[unit.age]
        if entry.consumer is not None:
            self._weight[entry.consumer] -= unit.weight
            _discard(self._of_consumer, entry.consumer, unit.id)
            if entry.consumer not in self._of_consumer:
                del self._weight[entry.consumer]

    def _work(self, unit: UnitInfo, sign: int) -> None:
        for key in unit.of_tickets:
            ticket = UnitId(unit.branch, key)
            before = self._worked_on.get(ticket, 0)
            if before + sign:
                self._worked_on[ticket] = before + sign
            else:
                del self._worked_on[ticket]
            if unit.wants_seal and (not before or not before + sign):
                self._turned[ticket] = unit.age

    # --- questions ----------------------------------------------------------------------------------------------------
    def take_turned(self) -> dict[UnitId, Age]:
        """Tickets to be looked at anew, with their steps."""
        turned, self._turned = self._turned, {}
        return turned

    def is_worked_on(self, ticket: UnitId) -> bool:
        """Whether more may be made of what is here of it."""
        return ticket in self._worked_on

    def get(self, uid: UnitId) -> UnitEntry | None:
        return self.entries.get(uid)

    def of(self, consumer: WorkerId) -> list[UnitEntry]:
        """In order of arrival."""
        return sorted(self._of_consumer.get(consumer, {}).values(), key=_ARRIVAL)

    def consumers_of(self, tickets: Collection[str]) -> list[WorkerId]:
        """Who has units of these tickets, by arrival."""
        wanted = frozenset(tickets)
        entries = [
            e for e in self.entries.values() if e.consumer is not None and not wanted.isdisjoint(e.unit.of_tickets)
        ]
        return [entry.consumer for entry in sorted(entries, key=_ARRIVAL) if entry.consumer is not None]

    def weight_of(self, consumer: WorkerId) -> float:
        """The weight of what it was given and has not finished."""
        return self._weight.get(consumer, 0.0)

    def made_by(self, producer: WorkerId) -> list[UnitEntry]:
        """In order of arrival."""
        return sorted(self._of_producer.get(producer, {}).values(), key=_ARRIVAL)

    def ages(self) -> list[Age]:
        """The ages of what waits, the oldest first."""
        return sorted(self._waiting)

    def waiting(self, age: Age) -> Iterator[UnitEntry]:
        """In order of arrival; it must not be changed meanwhile."""
        lines = self._waiting.get(age, {})
        return heapq.merge(*(line.in_order() for line in lines.values()), key=_ARRIVAL)

    def waiting_for_anybody(self, age: Age) -> Iterable[UnitEntry]:
        line = self._waiting.get(age, {}).get(None)
        return line.in_order() if line is not None else ()

    def waiting_for_one(self, age: Age, *, consumers: int) -> dict[int, Sequence[Iterable[UnitEntry]]]:
        """By the index of the consumer that alone may have them."""
        found: dict[int, list[Iterable[UnitEntry]]] = {}
        for affinity, line in self._waiting.get(age, {}).items():
            if affinity is not None:
                found.setdefault(affinity % consumers, []).append(line.in_order())
        return dict(found)

    @property
    def waiting_count(self) -> int:
        """Units that no consumer has yet."""
        return sum(map(self.count_waiting, self._waiting))

    def count_waiting(self, age: Age) -> int:
        return sum(len(line.entries) for line in self._waiting.get(age, {}).values())

    def count_assigned(self, age: Age) -> int:
        """On their way to consumers."""
        return self._assigned[age]


class Past(Generic[V]):
    """What a queue remembers of units that it does not have (any more), so that one that comes again is known: until
    their step has committed. Bounded by the units of open steps."""

    def __init__(self) -> None:
        self._known: dict[UnitId, tuple[Age, V]] = {}
        self._of_ticket: dict[UnitId, list[UnitId]] = {}  # where a unit has another key than its ticket
        self._closed = Age(0, 0)  # units up to here are remembered no more

    def __contains__(self, uid: UnitId) -> bool:
        return uid in self._known

    def __len__(self) -> int:
        return len(self._known)

    def get(self, uid: UnitId) -> V | None:
        known = self._known.get(uid)
        return known[1] if known is not None else None

    def add(self, unit: UnitInfo, what: V) -> None:
        if unit.age > self._closed:
            self._known[unit.id] = unit.age, what
            for ticket in unit.tickets:
                self._of_ticket.setdefault(UnitId(unit.branch, ticket), []).append(unit.id)

    def pop(self, uid: UnitId) -> V | None:
        """It comes once more, or has come."""
        known = self._known.pop(uid, None)
        return known[1] if known is not None else None

    def pop_ticket(self, ticket: UnitId) -> None:
        """All that has come of it comes once more."""
        for uid in (ticket, *self._of_ticket.pop(ticket, ())):
            self._known.pop(uid, None)

    def drop(self, is_over: Callable[[V], bool]) -> None:
        self._known = {uid: known for uid, known in self._known.items() if not is_over(known[1])}

    def close(self, upto: Age) -> None:
        self._closed = max(self._closed, upto)
        self._known = {uid: known for uid, known in self._known.items() if known[0] > upto}
        known = ((ticket, [uid for uid in uids if uid in self._known]) for ticket, uids in self._of_ticket.items())
        self._of_ticket = {ticket: uids for ticket, uids in known if uids}
