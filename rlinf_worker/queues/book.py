"""Where each unit of one queue is, looked up by every question that matching asks. Pure.

For: queues.core, matching and steps, which decide. No question costs more than its answer is long: a driver asks after
each message, with as many units waiting as a step has.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter
from typing import Generic, TypeVar

import msgspec

from rlinf_api.names import WorkerId
from rlinf_worker.queues.units import Age, UnitId, UnitInfo, UnitState


class UnitEntry(msgspec.Struct, eq=False, gc=False):
    """Neither it nor its unit refers to anything that refers back: of the 200,000 of a step none is the collector's."""

    unit: UnitInfo
    arrival: int  # keeps its place when it waits again
    state: UnitState = UnitState.WAITING
    consumer: WorkerId | None = None
    round: int = 0  # number of the round that it is in
    is_sealed: bool = False  # its consumer makes no more of it
    is_ready: bool = True  # it lacks no part that another queue has of it
    only: WorkerId | None = None  # while it waits: who alone may have it; None: anybody


News = dict[UnitId, None]
"""Units of which something has happened in one queue, for another to look at: in order, each once."""
ConsumerOf = Callable[[UnitInfo], WorkerId | None]
IsReady = Callable[[UnitId], bool]
_ARRIVAL = attrgetter("arrival")
K = TypeVar("K")
W = TypeVar("W")
V = TypeVar("V")


def _discard(index: dict[K, dict[W, V]], key: K, what: W) -> None:
    del index[key][what]
    if not index[key]:
        del index[key]


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


class UnitBook:
    def __init__(self, *, consumer_of: ConsumerOf = lambda unit: None) -> None:
        """`consumer_of`: who alone may have a unit."""
        self._consumer_of = consumer_of
        self.is_ready: IsReady = lambda uid: True
        self.entries: dict[tuple[int, str], UnitEntry] = {}
        """By UnitId, which is equal to a tuple of the same: looked up by one, it need not be made for that."""
        self.queued_bytes = 0
        self.known_to: list[News] = []  # who looks at what comes into this queue, and goes
        self.waiting_to: list[News] = []  # at what begins to wait
        self.given_to: list[News] = []  # at what is a consumer's
        self.is_last = False  # nothing is made of what is here: nobody asks whose tickets are worked on
        self.by_ticket: dict[tuple[Age, str], dict[int, UnitEntry]] | None = None  # what waits, where anybody asks
        self._arrivals = 0
        self.waiting_count = 0  # units that no consumer has yet
        self._lines: dict[Age, dict[WorkerId | None, _Line]] = {}  # what may be handed out, by `only`
        self._pinned: dict[WorkerId, None] = {}  # for whom alone something has begun to wait
        self._lighter: dict[WorkerId, None] = {}  # who has less to do than before
        self._assigned: dict[Age, int] = {}
        self._of_consumer: dict[WorkerId, dict[UnitId, UnitEntry]] = {}
        self._of_producer: dict[WorkerId, dict[UnitId, UnitEntry]] = {}
        self._weight: dict[WorkerId, float] = {}
        self._worked_on: dict[UnitId, int] = {}  # by ticket: units of it that more may be made of
        self._turned: dict[UnitId, Age] = {}  # of which somebody wants to hear: began or ceased to be worked on

    # --- changes ------------------------------------------------------------------------------------------------------
    def add(self, unit: UnitInfo, state: UnitState = UnitState.WAITING, consumer: WorkerId | None = None) -> None:
        self._arrivals += 1
        entry = UnitEntry(unit, self._arrivals, state, consumer)
        self._enter(entry)
        self._place(entry)
        if not self.is_last:
            self._work(unit, 1)
        for news in self.known_to:
            news[unit.id] = None

    def assign(self, entry: UnitEntry, consumer: WorkerId, *, number: int = 0) -> None:
        """It waits, and nobody has sealed it."""
        self._stop_waiting(entry)
        entry.state, entry.consumer, entry.round = UnitState.ASSIGNED, consumer, number
        for news in self.given_to:
            news[entry.unit.id] = None
        self._count_assigned(entry.unit.age, 1)
        self._burden(consumer, entry)

    def hold(self, entry: UnitEntry) -> None:
        """It was assigned, and has come to its consumer: all else stays as it is."""
        self._count_assigned(entry.unit.age, -1)
        entry.state = UnitState.HELD

    def move(self, entry: UnitEntry, state: UnitState, *, consumer: WorkerId | None = None, number: int = 0) -> None:
        if entry.is_sealed and (state is not UnitState.HELD or consumer != entry.consumer):
            entry.is_sealed = False
            if not self.is_last:
                self._work(entry.unit, 1)
        self._take_away(entry)
        entry.state, entry.consumer, entry.round = state, consumer, number
        self._place(entry)

    def seal(self, entry: UnitEntry) -> None:
        if not entry.is_sealed:
            entry.is_sealed = True
            if not self.is_last:
                self._work(entry.unit, -1)

    def change(self, entry: UnitEntry, unit: UnitInfo) -> None:
        """Another description of the same unit."""
        self._take_away(entry)
        self._leave(entry)
        entry.unit = unit
        self._enter(entry)
        self._place(entry)

    def pop(self, uid: UnitId) -> UnitInfo:
        entry = self.entries[uid]
        self._take_away(entry)
        self._leave(entry)
        if not (entry.is_sealed or self.is_last):
            self._work(entry.unit, -1)
        for news in self.known_to:
            news[uid] = None
        return entry.unit

    def look_at(self, entry: UnitEntry) -> None:
        """It waits, and may be ready now, or not any more; or another may have it."""
        only, is_ready = self._consumer_of(entry.unit), self.is_ready(entry.unit.id)
        if (only, is_ready) != (entry.only, entry.is_ready):
            self._leave_line(entry)
            entry.only, entry.is_ready = only, is_ready
            self._join_line(entry)

    def _enter(self, entry: UnitEntry) -> None:
        unit = entry.unit
        self.entries[unit.id] = entry
        self.queued_bytes += unit.size_bytes
        self._of_producer.setdefault(unit.producer, {})[unit.id] = entry

    def _leave(self, entry: UnitEntry) -> None:
        unit = entry.unit
        del self.entries[unit.id]
        self.queued_bytes -= unit.size_bytes
        _discard(self._of_producer, unit.producer, unit.id)

    def _place(self, entry: UnitEntry) -> None:
        """Where its state says that it is."""
        unit = entry.unit
        if entry.state is UnitState.WAITING:
            self.waiting_count += 1
            entry.only, entry.is_ready = self._consumer_of(unit), self.is_ready(unit.id)
            self._join_line(entry)
            if self.by_ticket is not None:
                self.by_ticket.setdefault((unit.age, unit.first_ticket), {})[entry.arrival] = entry
            for news in self.waiting_to:
                news[unit.id] = None
            return
        for news in self.given_to:
            news[unit.id] = None
        if entry.state is UnitState.ASSIGNED:
            self._count_assigned(unit.age, 1)
        if entry.consumer is not None:
            self._burden(entry.consumer, entry)

    def _burden(self, consumer: WorkerId, entry: UnitEntry) -> None:
        self._of_consumer.setdefault(consumer, {})[entry.unit.id] = entry
        self._weight[consumer] = self._weight.get(consumer, 0.0) + entry.unit.weight

    def _stop_waiting(self, entry: UnitEntry) -> None:
        self.waiting_count -= 1
        self._leave_line(entry)
        if self.by_ticket is not None:
            _discard(self.by_ticket, (entry.unit.age, entry.unit.first_ticket), entry.arrival)

    def _take_away(self, entry: UnitEntry) -> None:
        unit = entry.unit
        if entry.state is UnitState.WAITING:
            self._stop_waiting(entry)
            return
        if entry.state is UnitState.ASSIGNED:
            self._count_assigned(unit.age, -1)
        if entry.consumer is not None:
            self._weight[entry.consumer] -= unit.weight
            self._lighter[entry.consumer] = None
            _discard(self._of_consumer, entry.consumer, unit.id)
            if entry.consumer not in self._of_consumer:
                del self._weight[entry.consumer]

    def _count_assigned(self, age: Age, sign: int) -> None:
        if count := self._assigned.get(age, 0) + sign:
            self._assigned[age] = count
        else:
            del self._assigned[age]

    def _join_line(self, entry: UnitEntry) -> None:
        if entry.is_ready:
            self._lines.setdefault(entry.unit.age, {}).setdefault(entry.only, _Line()).add(entry)
            if entry.only is not None:
                self._pinned[entry.only] = None

    def _leave_line(self, entry: UnitEntry) -> None:
        if entry.is_ready:
            line = self._lines[entry.unit.age][entry.only]
            line.discard(entry)
            if not line.entries:
                _discard(self._lines, entry.unit.age, entry.only)

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

    def get(self, uid: UnitId | tuple[int, str]) -> UnitEntry | None:
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

    @property
    def has_lines(self) -> bool:
        """Something may be handed out."""
        return bool(self._lines)

    def ages(self) -> list[Age]:
        """The ages of what may be handed out, the oldest first."""
        return sorted(self._lines)

    def first_of(self, age: Age, *, only: WorkerId | None) -> UnitEntry | None:
        """What may be handed out first: of what `only` this consumer may have; None: of what anybody may."""
        line = self._lines.get(age, {}).get(only)
        return line.first() if line is not None else None

    def first_few(self, age: Age, count: int) -> list[UnitEntry]:
        """As `first_of` anybody's, one after another."""
        line = self._lines.get(age, {}).get(None)
        return line.first_few(count) if line is not None else []

    def take_pinned(self) -> Iterable[WorkerId]:
        """For whom alone something has begun to wait."""
        pinned, self._pinned = self._pinned, {}
        return pinned

    def take_lighter(self) -> Iterable[WorkerId]:
        """Who has less to do than when this was asked last."""
        lighter, self._lighter = self._lighter, {}
        return lighter

    def count_ready(self, age: Age) -> int:
        return sum(len(line.entries) for line in self._lines.get(age, {}).values())

    def waiting(self, age: Age) -> list[UnitEntry]:
        """In order of arrival, ready or not. Looks at all that is here, as the others do: once a step."""
        return sorted((entry for entry in self.all_waiting() if entry.unit.age == age), key=_ARRIVAL)

    def waiting_of(self, age: Age, ticket: str) -> list[UnitEntry]:
        """Units that come of it first; asked of a queue that keeps them by ticket."""
        return list((self.by_ticket or {}).get((age, ticket), {}).values())

    def waiting_upto(self, upto: Age) -> Iterator[UnitEntry]:
        return (entry for entry in self.all_waiting() if entry.unit.age <= upto)

    def all_waiting(self) -> list[UnitEntry]:
        return [entry for entry in self.entries.values() if entry.state is UnitState.WAITING]

    def count_assigned(self, age: Age) -> int:
        """On their way to consumers."""
        return self._assigned.get(age, 0)


class Past(Generic[V]):
    """What a queue remembers of units that it does not have (any more), so that one that comes again is known: until
    their step has committed. Bounded by the units of open steps."""

    def __init__(self, *, by_ticket: bool = False) -> None:
        """`by_ticket`: somebody asks for all that came of one."""
        self.by_ticket = by_ticket
        self.known: dict[UnitId, tuple[Age, V]] = {}
        """To be asked whether it has a unit, and changed by nobody else."""
        self._of_ticket: dict[UnitId, list[UnitId]] = {}  # where a unit has another key than its ticket
        self._closed = Age(0, 0)  # units up to here are remembered no more

    def __len__(self) -> int:
        return len(self.known)

    def get(self, uid: UnitId) -> V | None:
        known = self.known.get(uid)
        return known[1] if known is not None else None

    def add(self, unit: UnitInfo, what: V) -> None:
        if unit.age > self._closed:
            self.known[unit.id] = unit.age, what
            for ticket in unit.tickets if self.by_ticket else ():
                self._of_ticket.setdefault(UnitId(unit.branch, ticket), []).append(unit.id)

    def pop(self, uid: UnitId) -> V | None:
        """It comes once more, or has come."""
        known = self.known.pop(uid, None)
        return known[1] if known is not None else None

    def pop_ticket(self, ticket: UnitId) -> list[UnitId]:
        """All that has come of it comes once more: what that was."""
        uids = (ticket, *self._of_ticket.pop(ticket, ()))
        return [uid for uid in uids if self.known.pop(uid, None) is not None]

    def drop(self, is_over: Callable[[V], bool]) -> None:
        self.known = {uid: known for uid, known in self.known.items() if not is_over(known[1])}

    def close(self, upto: Age) -> None:
        self._closed = max(self._closed, upto)
        self.known = {uid: known for uid, known in self.known.items() if known[0] > upto}
        known = ((ticket, [uid for uid in uids if uid in self.known]) for ticket, uids in self._of_ticket.items())
        self._of_ticket = {ticket: uids for ticket, uids in known if uids}
