"""What a consumer of a queue has been given, as values: on its way, here, taken; and in which order. Pure.

For: queues.consuming, which moves what these decide.

    assign() ──► pulling ──arrived()──► here ──take()──► taken ──finish()──► gone
                    └── lost(): its producer is away; the driver hands the unit out again
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice, takewhile
from typing import Generic, NamedTuple, TypeVar

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import InvariantBroken
from rlinf_worker.queues.units import Age, UnitId, UnitInfo

P = TypeVar("P")  # whatever holds a payload


class _State(Enum):
    PULLING = "pulling"
    HERE = "here"
    TAKEN = "taken"


@dataclass(slots=True)
class _Given(Generic[P]):
    unit: UnitInfo
    since: float  # by the caller's clock
    state: _State = _State.PULLING
    payload: P | None = None


@dataclass(slots=True)
class RoundPart:
    """This rank's part of a round, as it was announced; units that were lost are taken out of it.

    RoundPart(step=4, branch=0, number=1, last=True, total_weight=512.0, units=[UnitId(0, "env:7@4")])
    """

    step: int
    branch: int
    number: int
    last: bool
    total_weight: float
    units: list[UnitId]

    @classmethod
    def from_pb(cls, message: pb.Round) -> RoundPart:
        return cls(
            step=message.step,
            branch=message.branch,
            number=message.number,
            last=message.last,
            total_weight=message.total_weight,
            units=[UnitId(unit.branch, unit.key) for unit in message.units],
        )

    @property
    def place(self) -> tuple[int, int, int]:
        """Rounds come in this order."""
        return self.branch, self.step, self.number


class Admitted(NamedTuple):
    """What an assignment asks for."""

    to_pull: list[UnitInfo]
    again: list[UnitInfo]  # here already, only to be called held once more
    absent: list[UnitInfo]  # a round was taken without them: to be made again, for another round


class GivenUnits(Generic[P]):
    """Every unit from its assignment to the end of the role's work on it."""

    def __init__(self) -> None:
        self._given: dict[UnitId, _Given[P]] = {}
        self._unconfirmed: set[UnitId] = set()
        """On their way since a Hello that no Welcome has answered: who has heard it may give them to another."""

    def __contains__(self, uid: UnitId) -> bool:
        return uid in self._given

    def __iter__(self) -> Iterator[UnitId]:
        return iter(self._given)

    def admit(self, units: Sequence[UnitInfo], *, now: float) -> tuple[list[UnitInfo], Admitted]:
        """(what is new, what is to be done)."""
        new, to_pull, again = [], [], []
        for unit in units:
            known = self._given.get(unit.id)
            if known is None:
                self._given[unit.id] = _Given(unit, now)
                new.append(unit)
            elif known.state is _State.PULLING:
                known.unit = unit  # perhaps of another producer now
            else:
                again.append(unit)
                continue
            to_pull.append(unit)
        return new, Admitted(to_pull, again, [])

    def arrived(self, uid: UnitId, payload: P) -> UnitInfo | None:
        """The unit, if this is news; None for one that was forgotten or is here already."""
        given = self._given.get(uid)
        if given is None or given.state is not _State.PULLING:
            return None
        given.state, given.payload = _State.HERE, payload
        return given.unit

    def is_here(self, uid: UnitId) -> bool:
        """To be handed out, and a driver's to know."""
        given = self._given.get(uid)
        return given is not None and given.state is _State.HERE and uid not in self._unconfirmed

    def is_awaited(self, uid: UnitId) -> bool:
        given = self._given.get(uid)
        return given is not None and given.state is not _State.TAKEN and not self.is_here(uid)

    def pulling(self, *, producer: str | None = None) -> list[UnitId]:
        """What is on its way, from there (None: from anybody)."""
        return [
            uid
            for uid, given in self._given.items()
            if given.state is _State.PULLING and producer in (None, given.unit.producer)
        ]

    def unconfirm(self) -> None:
        self._unconfirmed.update(self.pulling())

    def confirm(self) -> list[UnitInfo]:
        """What has come meanwhile and is here now."""
        found, self._unconfirmed = self._unconfirmed, set()
        return [self._given[uid].unit for uid in found if self.is_here(uid)]

    def forget_unconfirmed(self) -> set[UnitId]:
        """None of them was taken."""
        return {uid for uid in self._unconfirmed if self._given.pop(uid, None) is not None}

    def lose(self, uids: Iterable[UnitId]) -> list[UnitInfo]:
        """Those that are on their way are forgotten."""
        pulling = set(self.pulling())
        return [self._given.pop(uid).unit for uid in dict.fromkeys(uids) if uid in pulling]

    def cancel(self, dead: set[UnitId]) -> tuple[set[UnitId], list[UnitId]]:
        """Forgets these, except those that were taken: (all of them that are here, those that were taken, which
        stay)."""
        dead = dead & self._given.keys()
        taken = [uid for uid in dead if self._given[uid].state is _State.TAKEN]
        for uid in dead.difference(taken):
            del self._given[uid]
        return dead, taken

    def take(self, uid: UnitId) -> tuple[UnitInfo, P]:
        given = self._given[uid]
        payload, given.payload, given.state = given.payload, None, _State.TAKEN
        if payload is None:
            raise InvariantBroken(f"unit {uid.key} of branch {uid.branch} is here without a payload")
        return given.unit, payload

    def taken(self, uid: UnitId) -> UnitInfo | None:
        """None: it is finished, or its branch is dead."""
        given = self._given.get(uid)
        return given.unit if given is not None and given.state is _State.TAKEN else None

    def finish(self, uid: UnitId) -> UnitInfo | None:
        """Acknowledged or dropped; None: it was before, or its branch is dead."""
        unit = self.taken(uid)
        return unit if unit is None else self._given.pop(uid).unit

    def held(self) -> list[UnitInfo]:
        """Payload here, not finished: what a driver must know."""
        return [g.unit for uid, g in self._given.items() if g.state is _State.TAKEN or self.is_here(uid)]

    def level(self) -> tuple[int, int, float | None]:
        """(units assigned and not taken, their bytes, since when the first of them has been)."""
        untaken = [g for g in self._given.values() if g.state is not _State.TAKEN]
        return len(untaken), sum(g.unit.size_bytes for g in untaken), min((g.since for g in untaken), default=None)


class QueueConsumer(Generic[P]):
    """Owns the bound on prefetched units (rounds, for a gang): what is assigned and not taken never exceeds `window`.

    Credit is stated as an absolute number, and only when all that was stated before has arrived: an earlier statement
    would count units that are on their way as if they were not.
    """

    def __init__(self, *, window: int, rounds: bool) -> None:
        self.window = max(1, window)
        self.room = 0  # units that the role could begin now, where it has said so
        self.reserve = 0  # units that it works on while more is on its way, where it takes turns
        self.units = GivenUnits[P]()
        self._is_gang = rounds
        self._order: dict[Age, deque[UnitId]] = {}  # assigned and not taken
        self._rounds: deque[RoundPart] = deque()
        self._last_taken = (-1, -1, -1)  # the place of a round
        self._outstanding = 0  # credit that was stated and has not come back as units
        self.waits = 0  # calls of the role that wait for more than is here
        self._is_greeting = False  # between a Hello and its Welcome

    # --- credit -------------------------------------------------------------------------------------------------------
    @property
    def waiting(self) -> int:
        return len(self._rounds) if self._is_gang else sum(map(len, self._order.values()))

    def is_quarter_full(self) -> bool:
        """Enough to take a turn for (turns.worker): a quarter of what may wait here."""
        return 4 * self.waiting >= self.window

    @property
    def is_credit_due(self) -> bool:
        """Half of what may wait is gone, or the role waits for more than there is: else each unit that is taken would
        be asked for by itself, in two messages of the driver, while others lie here."""
        if self._is_greeting or self._outstanding > 0:
            return False
        return 2 * self.waiting <= self._most or (self.waits > 0 and self.waiting < self._most)

    def credit_due(self) -> int | None:
        """The number to state now; None: nothing to say."""
        if not self.is_credit_due:
            return None
        self._outstanding = self._most - self.waiting
        return self._outstanding

    @property
    def _most(self) -> int:
        """How many units may wait here. What can be begun at once waits for nothing."""
        return max(self.window, self.room, self.reserve)

    def forget_credit(self) -> None:
        """Nothing counts that has been stated: the stream to the driver is new, or the plan."""
        self._outstanding = 0

    # --- the way to the driver ----------------------------------------------------------------------------------------
    def hello(self) -> None:
        """A Hello is being made, perhaps not the first one without an answer: whoever has heard one of them may give
        what was on its way to another. So that is not handed out before it is known whose it is. And no credit is
        stated before: what was assigned on the last stream, and lost with it, is said again with the Welcome."""
        self.forget_credit()
        self._is_greeting = True
        self.units.unconfirm()

    def welcomed(self, *, is_new_driver: bool) -> tuple[int, list[UnitInfo]]:
        """(assignments that count no more, units that are here now). A new driver knows nothing of assignments that
        were not held when the Hello was made, and makes them anew; the same one still counts on them."""
        self._is_greeting = False
        forgotten = self.units.forget_unconfirmed() if is_new_driver else set()
        self._withdraw(forgotten)
        return len(forgotten), self.units.confirm()

    # --- units --------------------------------------------------------------------------------------------------------
    def assign(self, units: Sequence[UnitInfo], *, now: float = 0.0) -> Admitted:
        self._outstanding -= len(units)
        new, admitted = self.units.admit(units, now=now)
        for unit in new:
            self._order.setdefault(unit.age, deque()).append(unit.id)
        return admitted

    def assign_round(self, part: RoundPart, units: Sequence[UnitInfo], *, now: float = 0.0) -> Admitted:
        """As assign. A round is told again by a driver that does not know whether it arrived. One that was taken is
        over: what it names besides is nowhere, and no round would ever hand it out."""
        self._outstanding -= 1
        if part.place <= self._last_taken:
            _, admitted = self.units.admit([unit for unit in units if unit.id in self.units], now=now)
            return admitted._replace(absent=[unit for unit in units if unit.id not in self.units])
        for earlier in self._rounds:
            if earlier.place == part.place:
                self._tell_again(earlier, part)
                break
        else:
            self._rounds.append(part)
        return self.units.admit(units, now=now)[1]

    def _tell_again(self, earlier: RoundPart, part: RoundPart) -> None:
        """What is here stays, named or not: the driver was told that it is held. What was on its way and is named no
        more is made again elsewhere."""
        unnamed = [uid for uid in earlier.units if uid not in part.units]
        self.units.lose(unnamed)
        kept = [uid for uid in unnamed if uid in self.units]
        earlier.units, earlier.last, earlier.total_weight = [*kept, *part.units], part.last, part.total_weight

    def lost(self, uids: Iterable[UnitId]) -> list[UnitInfo]:
        """Assignments that cannot be fetched; a round goes on without them, as the driver forms another for them."""
        gone = self.units.lose(uids)
        self._withdraw({unit.id for unit in gone})
        return gone

    def cancel(self, branch: int) -> list[UnitId]:
        """Forget what was not taken of this branch and older ones; returns what was taken, to be marked."""
        dead, taken = self.units.cancel({uid for uid in self.units if uid.branch <= branch})
        self._withdraw(dead)
        self._rounds = deque(part for part in self._rounds if part.branch > branch)
        return taken

    def cancel_units(self, uids: Iterable[UnitId]) -> list[UnitId]:
        """Likewise, of single units."""
        dead, taken = self.units.cancel(set(uids))
        self._withdraw(dead)
        return taken

    def _withdraw(self, uids: set[UnitId]) -> None:
        if not uids:
            return
        left = {age: deque(uid for uid in line if uid not in uids) for age, line in self._order.items()}
        self._order = {age: line for age, line in left.items() if line}
        for part in self._rounds:
            part.units = [uid for uid in part.units if uid not in uids]

    # --- taking -------------------------------------------------------------------------------------------------------
    def has_next(self) -> bool:
        """Whether take, or take_round, has something."""
        if self._is_gang:
            return bool(self._rounds) and not any(map(self.units.is_awaited, self._rounds[0].units))
        return self._next_age() is not None

    def _next_age(self) -> Age | None:
        """The oldest of which something is here. Of one age, units go in the order of assignment."""
        return min((age for age, line in self._order.items() if self.units.is_here(line[0])), default=None)

    def take(self) -> tuple[UnitInfo, P] | None:
        """The next unit: of the oldest policy version that is here; None where nothing is."""
        age = self._next_age()
        if age is None:
            return None
        uid = self._order[age].popleft()
        if not self._order[age]:
            del self._order[age]
        return self.units.take(uid)

    def count_here(self, *, most: int) -> int:
        """How many units `take` would hand out now, one after another; counted up to `most`."""
        here = (uid for line in self._order.values() for uid in takewhile(self.units.is_here, line))
        return sum(1 for _ in islice(here, most))

    def take_round(self) -> tuple[RoundPart, list[tuple[UnitInfo, P]]] | None:
        """The next round, once every unit of this rank's part is here. A unit that an earlier round has handed out, and
        that is named once more because its producer died as it came, is not handed out again."""
        if not self.has_next():
            return None
        part = self._rounds.popleft()
        self._last_taken = part.place
        return part, [self.units.take(uid) for uid in part.units if self.units.is_here(uid)]
