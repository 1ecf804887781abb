"""Where each unit of one queue is, looked up by every question that matching asks. Pure.

For: queues.core, matching and steps, which decide. No question costs more than its answer is long: a driver asks after
each message, with as many units waiting as a step has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from operator import attrgetter
from typing import Generic, TypeVar

from rlinf_api.names import WorkerId
from rlinf_worker.queues.lines import Lines
from rlinf_worker.queues.loads import Loads
from rlinf_worker.queues.units import Age, UnitEntry, UnitId, UnitInfo, UnitState
from rlinf_worker.queues.worked_on import WorkedOn

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
        self.lines = Lines()
        self.loads = Loads()
        self.worked_on = WorkedOn()  # empty where `is_last`
        self._assigned: dict[Age, int] = {}
        self._of_producer: dict[WorkerId, dict[UnitId, UnitEntry]] = {}

    # --- changes ------------------------------------------------------------------------------------------------------
    def add(self, unit: UnitInfo, state: UnitState = UnitState.WAITING, consumer: WorkerId | None = None) -> None:
        self._arrivals += 1
        entry = UnitEntry(unit, self._arrivals, state, consumer)
        self._enter(entry)
        self._place(entry)
        if not self.is_last:
            self.worked_on.count(unit, 1)
        for news in self.known_to:
            news[unit.id] = None

    def assign(self, entry: UnitEntry, consumer: WorkerId, *, number: int = 0) -> None:
        """It waits, and nobody has sealed it."""
        self._stop_waiting(entry)
        entry.state, entry.consumer, entry.round = UnitState.ASSIGNED, consumer, number
        for news in self.given_to:
            news[entry.unit.id] = None
        self._count_assigned(entry.unit.age, 1)
        self.loads.add(consumer, entry)

    def hold(self, entry: UnitEntry) -> None:
        """It was assigned, and has come to its consumer: all else stays as it is."""
        self._count_assigned(entry.unit.age, -1)
        entry.state = UnitState.HELD

    def move(self, entry: UnitEntry, state: UnitState, *, consumer: WorkerId | None = None, number: int = 0) -> None:
        if entry.is_sealed and (state is not UnitState.HELD or consumer != entry.consumer):
            entry.is_sealed = False
            if not self.is_last:
                self.worked_on.count(entry.unit, 1)
        self._take_away(entry)
        entry.state, entry.consumer, entry.round = state, consumer, number
        self._place(entry)

    def seal(self, entry: UnitEntry) -> None:
        if not entry.is_sealed:
            entry.is_sealed = True
            if not self.is_last:
                self.worked_on.count(entry.unit, -1)

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
            self.worked_on.count(entry.unit, -1)
        for news in self.known_to:
            news[uid] = None
        return entry.unit

    def look_at(self, entry: UnitEntry) -> None:
        """It waits, and may be ready now, or not any more; or another may have it."""
        only, is_ready = self._consumer_of(entry.unit), self.is_ready(entry.unit.id)
        if (only, is_ready) != (entry.only, entry.is_ready):
            self.lines.leave(entry)
            entry.only, entry.is_ready = only, is_ready
            self.lines.join(entry)

    def look_at_all(self) -> None:
        for entry in self.all_waiting():
            self.look_at(entry)

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
            self.lines.join(entry)
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
            self.loads.add(entry.consumer, entry)

    def _stop_waiting(self, entry: UnitEntry) -> None:
        self.waiting_count -= 1
        self.lines.leave(entry)
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
            self.loads.remove(entry.consumer, entry)

    def _count_assigned(self, age: Age, sign: int) -> None:
        if count := self._assigned.get(age, 0) + sign:
            self._assigned[age] = count
        else:
            del self._assigned[age]

    # --- questions ----------------------------------------------------------------------------------------------------
    def get(self, uid: UnitId | tuple[int, str]) -> UnitEntry | None:
        return self.entries.get(uid)

    def consumers_of(self, tickets: Collection[str]) -> list[WorkerId]:
        """Who has units of these tickets, by arrival."""
        wanted = frozenset(tickets)
        entries = [
            e for e in self.entries.values() if e.consumer is not None and not wanted.isdisjoint(e.unit.of_tickets)
        ]
        return [entry.consumer for entry in sorted(entries, key=_ARRIVAL) if entry.consumer is not None]

    def made_by(self, producer: WorkerId) -> list[UnitEntry]:
        """In order of arrival."""
        return sorted(self._of_producer.get(producer, {}).values(), key=_ARRIVAL)

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
