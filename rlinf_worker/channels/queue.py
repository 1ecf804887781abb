"""The worker's two halves of a queue as values: what a producer keeps and what a consumer has been given. Pure.

For: runtime.queues, which moves what these decide; the driver's half is matching.py. No I/O, no clock, no payload is
looked into.

    producer   add() ──► kept ──► (pulled any number of times) ──► release() / cancel()      bounded by units and bytes
    consumer   assign() ──► pulling ──arrived()──► here ──take()──► taken ──finish()──► gone
                               └── lost(): its producer is away; the driver hands the unit out again

    parents    add(child, parents) ... held(child) ──► a parent whose children are all held, and which is sealed, is
               acknowledged: everything made from it is safe with the next consumer
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels.units import UnitId, UnitInfo

P = TypeVar("P")  # whatever holds a payload
ItemT = TypeVar("ItemT", bound=Hashable)


@dataclass(slots=True)
class Kept(Generic[P]):
    unit: UnitInfo
    payload: P


class QueueProducer(Generic[P]):
    """Owns the bound on units and bytes that wait for consumers: charged by add(), freed by release() and cancel().

    The bound is the channel's until the driver states this producer's share (Capacity: what may still be announced).
    """

    def __init__(self, *, capacity_units: int, capacity_bytes: int) -> None:
        self._kept: dict[UnitId, Kept[P]] = {}
        self._room_units = capacity_units or 1 << 40
        self._room_bytes = capacity_bytes or 1 << 60
        self.kept_bytes = 0

    def has_room(self, size_bytes: int) -> bool:
        """One unit is always let in when there is none: a bound below the largest unit would wait for ever."""
        if not self._kept:
            return True
        return self._room_units > 0 and self._room_bytes >= size_bytes

    def is_drained(self) -> bool:
        """To a quarter of what may be kept: a producer that was stopped by a full channel goes on for more than one."""
        return 3 * len(self._kept) <= max(0, self._room_units)

    def add(self, unit: UnitInfo, payload: P) -> bool:
        """False: this very unit is kept already (made again), and the first copy stays."""
        if unit.id in self._kept:
            return False
        self._kept[unit.id] = Kept(unit, payload)
        self._charge(unit, 1)
        return True

    def _charge(self, unit: UnitInfo, sign: int) -> None:
        self._room_units -= sign
        self._room_bytes -= sign * unit.size_bytes
        self.kept_bytes += sign * unit.size_bytes

    def capacity(self, *, units: int, size_bytes: int) -> None:
        """The driver states anew what may still be announced."""
        self._room_units, self._room_bytes = units, size_bytes

    def resize(self, *, capacity_units: int, capacity_bytes: int) -> None:
        """Another plan's bound, over what is kept already: below that, nothing is let in until some of it is freed."""
        self._room_units = (capacity_units or 1 << 40) - len(self._kept)
        self._room_bytes = (capacity_bytes or 1 << 60) - self.kept_bytes

    def get(self, uid: UnitId) -> Kept[P] | None:
        return self._kept.get(uid)

    def release(self, uids: Iterable[UnitId]) -> list[UnitInfo]:
        """What was kept of these and is forgotten now; again without effect."""
        gone = []
        for uid in uids:
            kept = self._kept.pop(uid, None)
            if kept is not None:
                self._charge(kept.unit, -1)
                gone.append(kept.unit)
        return gone

    def cancel(self, branch: int) -> list[UnitInfo]:
        """Forget this branch and older ones."""
        return self.release([uid for uid in self._kept if uid.branch <= branch])

    def units(self) -> list[UnitInfo]:
        return [kept.unit for kept in self._kept.values()]

    def __len__(self) -> int:
        return len(self._kept)


class _State(Enum):
    PULLING = "pulling"
    HERE = "here"
    TAKEN = "taken"


@dataclass(slots=True)
class _Given(Generic[P]):
    unit: UnitInfo
    state: _State = _State.PULLING
    payload: P | None = None


@dataclass(slots=True)
class RoundPart:
    """This rank's part of a round, as it was announced; units that were lost are taken out of it."""

    step: int
    branch: int
    number: int
    last: bool
    total_weight: float
    units: list[UnitId]


class QueueConsumer(Generic[P]):
    """Owns the bound on prefetched units (rounds, for a gang): what is assigned and not taken never exceeds `window`.

    Credit is stated as an absolute number, and only when all that was stated before has arrived: an earlier statement
    would count units that are on their way as if they were not.
    """

    def __init__(self, *, window: int, rounds: bool) -> None:
        self.window = max(1, window)
        self._is_gang = rounds
        self._given: dict[UnitId, _Given[P]] = {}
        self._order: deque[UnitId] = deque()  # assigned and not taken
        self._rounds: deque[RoundPart] = deque()
        self._last_taken = (-1, -1, -1)  # (branch, step, number); rounds come in this order
        self._outstanding = 0  # credit that was stated and has not come back as units

    # --- credit -------------------------------------------------------------------------------------------------------
    @property
    def waiting(self) -> int:
        return len(self._rounds) if self._is_gang else len(self._order)

    def is_quarter_full(self) -> bool:
        """Enough to take a turn for (runtime.turns): a quarter of what may wait here."""
        return 4 * self.waiting >= self.window

    def credit_due(self) -> int | None:
        """The number to state now; None: nothing to say."""
        room = self.window - self.waiting
        if self._outstanding > 0 or room <= 0:
            return None
        self._outstanding = room
        return room

    def forget_credit(self) -> None:
        """A new stream to the driver: nothing has been stated on it."""
        self._outstanding = 0

    # --- units --------------------------------------------------------------------------------------------------------
    def assign(self, units: Sequence[UnitInfo]) -> tuple[list[UnitInfo], list[UnitInfo]]:
        """(units to pull, units that are here already and only have to be called held again)."""
        self._outstanding -= len(units)
        return self._admit(units, ordered=True)

    def assign_round(self, part: RoundPart, units: Sequence[UnitInfo]) -> tuple[list[UnitInfo], list[UnitInfo]]:
        """As assign. A round is told again by a driver that does not know whether it arrived."""
        self._outstanding -= 1
        if (part.branch, part.step, part.number) <= self._last_taken:
            return self._admit(units, ordered=False)
        for known in self._rounds:
            if (known.branch, known.step, known.number) == (part.branch, part.step, part.number):
                known.units, known.last, known.total_weight = part.units, part.last, part.total_weight
                return self._admit(units, ordered=False)
        self._rounds.append(part)
        return self._admit(units, ordered=False)

    def _admit(self, units: Sequence[UnitInfo], *, ordered: bool) -> tuple[list[UnitInfo], list[UnitInfo]]:
        to_pull, again = [], []
        for unit in units:
            known = self._given.get(unit.id)
            if known is None:
                self._given[unit.id] = _Given(unit)
                to_pull.append(unit)
                if ordered:
                    self._order.append(unit.id)
            elif known.state is _State.PULLING:
                known.unit = unit  # perhaps of another producer now
                to_pull.append(unit)
            else:
                again.append(unit)
        return to_pull, again

    def arrived(self, uid: UnitId, payload: P) -> UnitInfo | None:
        """The unit, if this is news; None for one that was forgotten or is here already."""
        given = self._given.get(uid)
        if given is None or given.state is not _State.PULLING:
            return None
        given.state, given.payload = _State.HERE, payload
        return given.unit

    def pulling_from(self, producer: str) -> list[UnitInfo]:
        return [g.unit for g in self._given.values() if g.state is _State.PULLING and g.unit.producer == producer]

    def lost(self, uids: Iterable[UnitId]) -> list[UnitInfo]:
        """Assignments that cannot be fetched; a round goes on without them, as the driver forms another for them."""
        gone: list[UnitInfo] = []
        for uid in uids:
            given = self._given.get(uid)
            if given is not None and given.state is _State.PULLING:
                gone.append(given.unit)
                del self._given[uid]
        self._withdraw({unit.id for unit in gone})
        return gone

    def cancel(self, branch: int) -> list[UnitId]:
        """Forget what was not taken of this branch and older ones; returns what was taken, to be marked."""
        dead = {uid for uid in self._given if uid.branch <= branch}
        taken = [uid for uid in dead if self._given[uid].state is _State.TAKEN]
        for uid in dead.difference(taken):
            del self._given[uid]
        self._withdraw(dead)
        self._rounds = deque(part for part in self._rounds if part.branch > branch)
        return taken

    def _withdraw(self, uids: set[UnitId]) -> None:
        if not uids:
            return
        self._order = deque(uid for uid in self._order if uid not in uids)
        for part in self._rounds:
            part.units = [uid for uid in part.units if uid not in uids]

    # --- taking -------------------------------------------------------------------------------------------------------
    def has_next(self) -> bool:
        """Whether take, or take_round, has something."""
        if self._is_gang:
            return bool(self._rounds) and all(self._given[u].state is _State.HERE for u in self._rounds[0].units)
        return bool(self._order) and self._given[self._order[0]].state is _State.HERE

    def take(self) -> tuple[UnitInfo, P] | None:
        """The next unit in the order of assignment; None: it is not here yet."""
        return self._hand_out(self._order.popleft()) if self.has_next() else None

    def take_round(self) -> tuple[RoundPart, list[tuple[UnitInfo, P]]] | None:
        """The next round, once every unit of this rank's part is here."""
        if not self.has_next():
            return None
        part = self._rounds.popleft()
        self._last_taken = (part.branch, part.step, part.number)
        return part, [self._hand_out(uid) for uid in part.units]

    def _hand_out(self, uid: UnitId) -> tuple[UnitInfo, P]:
        given = self._given[uid]
        payload, given.payload, given.state = given.payload, None, _State.TAKEN
        if payload is None:
            raise InvariantBroken(f"unit {uid.key} of branch {uid.branch} is here without a payload")
        return given.unit, payload

    def finish(self, uid: UnitId) -> UnitInfo | None:
        """Acknowledged or dropped; None: it was before, or its branch is dead."""
        given = self._given.get(uid)
        if given is None or given.state is not _State.TAKEN:
            return None
        del self._given[uid]
        return given.unit

    def held_units(self) -> list[UnitInfo]:
        """Payload here, not finished: what a driver must know."""
        return [g.unit for g in self._given.values() if g.state is not _State.PULLING]

    def pulling(self) -> set[UnitId]:
        return {uid for uid, given in self._given.items() if given.state is _State.PULLING}

    def forget(self, uids: Iterable[UnitId]) -> int:
        """Assignments that count no more, whether their payload is here or not; how many there were."""
        gone = {uid for uid in uids if uid in self._given and self._given[uid].state is not _State.TAKEN}
        for uid in gone:
            del self._given[uid]
        self._withdraw(gone)
        return len(gone)


class Parents(Generic[ItemT]):
    """Which items have children that are not held yet. An item is acknowledged when it is sealed and has none."""

    def __init__(self) -> None:
        self._waiting: dict[ItemT, set[Hashable]] = {}
        self._sealed: set[ItemT] = set()
        self._parents_of: dict[Hashable, tuple[ItemT, ...]] = {}

    def add(self, child: Hashable, parents: Sequence[ItemT]) -> None:
        self._parents_of[child] = tuple(parents)
        for parent in parents:
            self._waiting.setdefault(parent, set()).add(child)
        if len(parents) == 1:
            self._sealed.add(parents[0])

    def seal(self, parent: ItemT) -> bool:
        """Nothing more is made from it. True: and all that was is held, so that it may be acknowledged now."""
        if self._waiting.get(parent):
            self._sealed.add(parent)
            return False
        self.forget(parent)
        return True

    def held(self, child: Hashable) -> list[ItemT]:
        """The parents that this completes."""
        complete = []
        for parent in self._parents_of.pop(child, ()):
            waiting = self._waiting.get(parent)
            if waiting is None:
                continue
            waiting.discard(child)
            if not waiting and parent in self._sealed:
                self.forget(parent)
                complete.append(parent)
        return complete

    def forget(self, parent: ItemT) -> None:
        """It is finished with, or dropped."""
        self._waiting.pop(parent, None)
        self._sealed.discard(parent)

    def __len__(self) -> int:
        return len(self._waiting)
