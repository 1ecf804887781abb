"""What one step is to have of units where they end: by ticket, whatever the units are called. Pure.

A ticket opens work; a unit names the tickets that it comes of. How many units come of a ticket, the flow says with it,
or nobody knows before whoever works on it is through (None):

    ticket "p:3", units=2      ──> samples "p:3/0", "p:3/1"         complete when both are known here
    tickets "p:3" and "p:4"    ──> group "g:1" of both              counts for each of them
    ticket "p:5", units=None   ──> turns "p:5/0", "p:5/1", ...      complete when the driver has sealed it

For: queues.steps, which forms the rounds of a gang of them; queues.core, which tells what comes and what is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels import lineage
from rlinf_worker.queues.units import Age, UnitInfo

Wanted = Mapping[str, int | None]
"""By ticket: how many units come of it; None: as many as are known when it is sealed. {"p:3": 2, "p:5": None}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A unit that a filter dropped, and of how many units which tickets are short for it.

    Ended(key="p:3/1", tickets=("p:3",), units=1)
    """

    key: str
    tickets: tuple[str, ...]
    units: int = 1

    @classmethod
    def from_pb(cls, message: pb.Ended) -> Ended:
        return cls(key=message.key, tickets=tuple(message.tickets), units=message.units)

    def to_pb(self) -> pb.Ended:
        return pb.Ended(key=self.key, tickets=self.tickets, units=self.units)


@dataclass(slots=True)
class _Ticket:
    keys: dict[str, None] = field(default_factory=dict)  # of its units that are known here
    ended: int = 0
    sealed: bool = False
    is_again: bool = False
    """Something of it is made a second time: whoever draws anew may come to other units than the first time."""


class LineageOrder:
    """Units of a step by lineage of their tickets: of all before the first of which more may come. What is handed out
    of them, and what is left.

    left() goes on where it was: what has its place keeps it, until begin_again().
    """

    def __init__(
        self, tickets: Mapping[str, _Ticket], tickets_of: Mapping[str, tuple[str, ...]], incomplete: Set[str]
    ) -> None:
        """All is of the step, each as it is now: its tickets, those of each unit that is known, and those of which more
        may come."""
        self._tickets, self._of, self._incomplete = tickets, tickets_of, incomplete
        self.handed_out: set[str] = set()
        self._order: list[str] = []  # tickets
        self._units: list[str] = []
        self.placed = self._cursor = 0  # tickets whose units have a place; units before which all is handed out

    def open(self, tickets: Iterable[str]) -> None:
        self._order = sorted(tickets, key=lineage.sort_key)

    def begin_again(self) -> None:
        self._units, self.placed, self._cursor = [], 0, 0

    def take_back(self, key: str) -> None:
        self.handed_out.discard(key)
        self._cursor = 0

    def left(self) -> Iterator[str]:
        """What is not handed out."""
        while self.placed < len(self._order) and self._order[self.placed] not in self._incomplete:
            known = self._tickets.get(self._order[self.placed])
            fresh = (key for key in (known.keys if known is not None else ()) if self._stands_at_next(key))
            self._units += sorted(fresh, key=lineage.sort_key)
            self.placed += 1
        while self._cursor < len(self._units) and self._units[self._cursor] in self.handed_out:
            self._cursor += 1
        return (key for key in islice(self._units, self._cursor, None) if key not in self.handed_out)

    def _stands_at_next(self, key: str) -> bool:
        """A unit of several tickets stands at the last of them: all before are complete there."""
        tickets = self._of[key]
        return len(tickets) == 1 or max(tickets, key=lineage.sort_key) == self._order[self.placed]

    def to_come(self) -> list[str]:
        """Tickets of which more may come."""
        return [ticket for ticket in self._order if ticket in self._incomplete]


class StepUnits:
    """The units of one step in one queue at whose consumer they end."""

    def __init__(self, age: Age) -> None:
        self.age = age
        self.wanted: dict[str, int | None] = {}
        self.is_open = False
        """The flow has said all of it."""
        self.ended: dict[str, Ended] = {}
        self._tickets: dict[str, _Ticket] = {}
        self._of: dict[str, tuple[str, ...]] = {}  # the tickets of each unit that is known
        self._incomplete: set[str] = set()  # of what is wanted
        self.by_lineage = LineageOrder(self._tickets, self._of, self._incomplete)

    # --- what the flow says -------------------------------------------------------------------------------------------
    def expect(self, wanted: Wanted) -> None:
        """Tickets, some at a time; again without effect."""
        if self.is_open and not self.wanted.items() >= wanted.items():
            raise InvariantBroken(f"step {self.age.step} was opened twice with different keys")
        self.wanted.update(wanted)

    def open(self, wanted: Wanted) -> None:
        """These are all tickets."""
        self.expect(wanted)
        if not self.is_open:
            for key in [key for key, tickets in self._of.items() if not self.wanted.keys() >= set(tickets)]:
                del self._of[key]
                self.by_lineage.handed_out.discard(key)
            self.is_open = True
            self.by_lineage.open(self.wanted)
            self._incomplete.update(t for t, units in self.wanted.items() if not self._is_full(t, units))

    def seal(self, ticket: str, *, sealed: bool) -> None:
        """Nobody works on anything of it (any more, or for now)."""
        known = self._tickets.get(ticket) or self._begun(ticket)
        if known.sealed is not sealed:
            known.sealed = sealed
            self._look_at((ticket,))

    # --- what comes and goes ------------------------------------------------------------------------------------------
    def know(self, unit: UnitInfo) -> None:
        if unit.key in self._of or self._foreign(unit) is not None:
            return
        if self.by_lineage.placed and not self._incomplete.issuperset(unit.of_tickets):
            self.by_lineage.begin_again()
        self._of[unit.key] = unit.of_tickets
        for ticket in unit.of_tickets:
            (self._tickets.get(ticket) or self._begun(ticket)).keys[unit.key] = None
        self._look_at(unit.of_tickets)

    def forget(self, unit: UnitInfo) -> None:
        """It is lost, and may be made again under another key."""
        self.by_lineage.handed_out.discard(unit.key)
        self.by_lineage.begin_again()
        for ticket in self._of.pop(unit.key, ()):
            self._tickets[ticket].keys.pop(unit.key, None)
            self._tickets[ticket].is_again = True
        self._look_at(unit.of_tickets)

    def end(self, unit: UnitInfo) -> None:
        """A filter has dropped it, here or on its way: a ticket, all that is still to come of it; of anything else, one
        unit of each of its tickets that is short of any. Told again, nothing changes."""
        before = self.ended.get(unit.key)
        if unit.key in self._of:  # it has come, and the gang drops it
            self.ended[unit.key] = Ended(key=unit.key, tickets=unit.of_tickets)
            return
        short = tuple(ticket for ticket in unit.of_tickets if self.missing(ticket))
        is_ticket = unit.of_tickets == (unit.key,)
        if before is not None and not (is_ticket and short):
            return
        units = self.missing(unit.key) if is_ticket else 1
        so_far = before.units if before is not None else 0
        self.ended[unit.key] = Ended(key=unit.key, tickets=short, units=so_far + units)
        for ticket in short:
            known = self._tickets.get(ticket) or self._begun(ticket)
            known.ended += units
            known.is_again = True
        self._look_at(short)

    def give(self, key: str) -> None:
        if key in self._of:
            self.by_lineage.handed_out.add(key)

    def _begun(self, ticket: str) -> _Ticket:
        made = self._tickets[ticket] = _Ticket()
        return made

    def _look_at(self, tickets: Iterable[str]) -> None:
        for ticket in tickets:
            if not self.is_open or ticket not in self.wanted:
                continue
            if self._is_full(ticket, self.wanted[ticket]):
                self._incomplete.discard(ticket)
            elif ticket not in self._incomplete:
                self._incomplete.add(ticket)
                self.by_lineage.begin_again()

    def again(self, tickets: Iterable[str]) -> None:
        """These are worked on a second time."""
        for ticket in tickets:
            (self._tickets.get(ticket) or self._begun(ticket)).is_again = True

    # --- questions ----------------------------------------------------------------------------------------------------
    def _is_full(self, ticket: str, units: int | None) -> bool:
        known = self._tickets.get(ticket)
        if units is None:
            return known is not None and known.sealed
        return known is not None and len(known.keys) + known.ended >= units

    def has_all(self, ticket: str) -> bool:
        """Whether nothing more is to come of it. Of one that nobody has counted it is never certain: no."""
        units = self.wanted.get(ticket)
        return units is not None and self._is_full(ticket, units)

    def is_empty(self, ticket: str) -> bool:
        """Filters have ended all of it: nothing is known of it."""
        known = self._tickets.get(ticket)
        return known is None or not known.keys

    def missing(self, ticket: str) -> int:
        """Units of it that are still to come, as far as they are counted."""
        known = self._tickets.get(ticket, _Ticket())
        return max(0, (self.wanted.get(ticket, 1) or 0) - len(known.keys) - known.ended)

    def knows(self, key: str) -> bool:
        return key in self._of

    def tickets_of(self, key: str) -> tuple[str, ...]:
        return self._of.get(key, (key,))

    def known(self) -> Iterable[str]:
        """Keys of all units that are."""
        return self._of

    def is_another_draw(self, unit: UnitInfo) -> bool:
        """A ticket of it was worked on twice, and has all its units from the other time, of which this is none."""
        if unit.key in self._of or not self.is_open or self._incomplete.issuperset(unit.of_tickets):
            return False
        if not any(ticket in self.wanted and ticket not in self._incomplete for ticket in unit.of_tickets):
            return False
        return any(ticket in self._tickets and self._tickets[ticket].is_again for ticket in unit.of_tickets)

    def _foreign(self, unit: UnitInfo) -> str | None:
        if self.is_open:
            for ticket in unit.of_tickets:
                if ticket not in self.wanted:
                    return ticket
        return None

    def stranger(self, unit: UnitInfo) -> str:
        """Why no round will ever have it; empty: one will."""
        for ticket in unit.of_tickets if self.is_open else ():
            if ticket not in self.wanted:
                return f"of ticket {ticket!r}, which is none of the step"
            units = self.wanted[ticket]
            count = len(self._tickets[ticket].keys) if ticket in self._tickets else 0
            if units is not None and count + (unit.key not in self._of) > units:
                return f"of ticket {ticket!r}, of which {units} {'unit comes' if units == 1 else 'units come'}"
        return ""

    @property
    def left_count(self) -> int | None:
        """Units that are not handed out; None: more may come."""
        if not self.is_open or self._incomplete:
            return None
        return len(self._of) - len(self.by_lineage.handed_out)
