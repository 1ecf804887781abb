"""The worker's two halves of a queue as values: what a producer keeps and what a consumer has been given. Pure.

For: queues.channel, which moves what these decide; the driver's half is matching.py. No I/O, no clock, no payload is
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
from typing import Generic, NamedTuple, TypeVar

from rlinf_api.errors import InvariantBroken
from rlinf_worker.queues.book import Age
from rlinf_worker.queues.units import UnitId, UnitInfo

P = TypeVar("P")  # whatever holds a payload
ItemT = TypeVar("ItemT", bound=Hashable)


@dataclass(slots=True)
class KeptUnit(Generic[P]):
    unit: UnitInfo
    payload: P


class QueueProducer(Generic[P]):
    """Owns the bound on units and bytes that wait for consumers: charged by add(), freed by release() and cancel().

    The bound is of each open step: the units of a later one take no room from those that an earlier one lacks. And
    `until_commit`, of a queue whose units are kept until their step commits: the oldest step that there is anything of
    here gets in whole, as it would wait for its own end. At worst that is each open step, whose number the driver
    bounds: others may keep units of an older step, and what got in whole stays as an older one comes after it.
    """

    def __init__(self, *, capacity_units: int, capacity_bytes: int, until_commit: bool = False) -> None:
        self._kept: dict[UnitId, KeptUnit[P]] = {}
        self._of_age: dict[Age, tuple[int, int]] = {}  # units, bytes
        self._until_commit = until_commit
        self.kept_bytes = 0
        self.resize(capacity_units=capacity_units, capacity_bytes=capacity_bytes)

    def resize(self, *, capacity_units: int, capacity_bytes: int) -> None:
        """Another plan's bound, over what is kept already: below that, nothing is let in until some of it is freed."""
        self.capacity_units, self.capacity_bytes = capacity_units or 1 << 40, capacity_bytes or 1 << 60

    def has_room(self, size_bytes: int, age: Age) -> bool:
        """One unit is always let in when there is none: a bound below the largest unit would wait for ever."""
        units, nbytes = self._of_age.get(age, (0, 0))
        if not units or self._is_oldest(age):
            return True
        return units < self.capacity_units and nbytes + size_bytes <= self.capacity_bytes

    def _is_oldest(self, age: Age) -> bool:
        return self._until_commit and age <= min(self._of_age, default=age)

    def is_drained(self, age: Age) -> bool:
        """To a quarter of what may be kept: a producer that was stopped by a full channel goes on for more than one."""
        return 4 * len(self._kept) <= self.capacity_units or self._is_oldest(age)

    def add(self, unit: UnitInfo, payload: P) -> bool:
        """False: this very unit is kept already (made again), and the first copy stays."""
        if unit.id in self._kept:
            return False
        self._kept[unit.id] = KeptUnit(unit, payload)
        self._charge(unit, 1)
        return True

    def _charge(self, unit: UnitInfo, sign: int) -> None:
        age = Age(unit.branch, unit.step)
        units, nbytes = self._of_age.get(age, (0, 0))
        self._of_age[age] = units + sign, nbytes + sign * unit.size_bytes
        if not self._of_age[age][0]:
            del self._of_age[age]
        self.kept_bytes += sign * unit.size_bytes

    def get(self, uid: UnitId) -> KeptUnit[P] | None:
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


class _KeptState(Enum):
    PULLING = "pulling"
    EARLY = "early"  # its payload came behind a Hello that could not say so, and before the Welcome
    HERE = "here"
    TAKEN = "taken"


@dataclass(slots=True)
class _Given(Generic[P]):
    unit: UnitInfo
    since: float  # by the caller's clock
    state: _KeptState = _KeptState.PULLING
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
    ended: frozenset[str] = frozenset()  # with the last one: keys of the step that filters dropped


class Admitted(NamedTuple):
    """What an assignment asks for."""

    to_pull: list[UnitInfo]
    again: list[UnitInfo]  # here already, only to be called held once more
    absent: list[UnitInfo]  # a round was taken without them: to be made again, for another round


class QueueConsumer(Generic[P]):
    """Owns the bound on prefetched units (rounds, for a gang): what is assigned and not taken never exceeds `window`.

    Credit is stated as an absolute number, and only when all that was stated before has arrived: an earlier statement
    would count units that are on their way as if they were not.
    """

    def __init__(self, *, window: int, rounds: bool) -> None:
        self.window = max(1, window)
        self._is_gang = rounds
        self._given: dict[UnitId, _Given[P]] = {}
        self._order: dict[Age, deque[UnitId]] = {}  # assigned and not taken
        self._ordered = 0
        self._rounds: deque[RoundPart] = deque()
        self._last_taken = (-1, -1, -1)  # (branch, step, number); rounds come in this order
        self._outstanding = 0  # credit that was stated and has not come back as units
        self._is_greeting = False  # between a Hello and its Welcome
        self._unconfirmed: set[UnitId] = set()  # on their way since a Hello that no Welcome has answered

    # --- credit -------------------------------------------------------------------------------------------------------
    @property
    def waiting(self) -> int:
        return len(self._rounds) if self._is_gang else self._ordered

    def is_quarter_full(self) -> bool:
        """Enough to take a turn for (turns.worker): a quarter of what may wait here."""
        return 4 * self.waiting >= self.window

    def credit_due(self) -> int | None:
        """The number to state now; None: nothing to say."""
        room = self.window - self.waiting
        if self._is_greeting or self._outstanding > 0 or room <= 0:
            return None
        self._outstanding = room
        return room

    def forget_credit(self) -> None:
        """A new stream to the driver: nothing has been stated on it."""
        self._outstanding = 0

    # --- the way to the driver ----------------------------------------------------------------------------------------
    def hello(self) -> None:
        """A Hello is being made, perhaps not the first one without an answer: whoever has heard one of them may give
        what was on its way to another. So that is not handed out before it is known whose it is. And no credit is
        stated before: what was assigned on the last stream, and lost with it, is said again with the Welcome."""
        self.forget_credit()
        self._is_greeting = True
        self._unconfirmed |= self.pulling()

    def welcomed(self, *, is_new_driver: bool) -> tuple[int, list[UnitInfo]]:
        """(assignments that count no more, units that are here now). A new driver knows nothing of assignments that
        were not held when the Hello was made, and makes them anew; the same one still counts on them."""
        unconfirmed, self._unconfirmed, self._is_greeting = self._unconfirmed, set(), False
        forgotten = self._forget(unconfirmed) if is_new_driver else 0
        here = [g for uid in unconfirmed if (g := self._given.get(uid)) is not None and g.state is _KeptState.EARLY]
        for given in here:
            given.state = _KeptState.HERE
        return forgotten, [given.unit for given in here]

    def _forget(self, uids: Iterable[UnitId]) -> int:
        gone = {uid for uid in uids if uid in self._given and self._given[uid].state is not _KeptState.TAKEN}
        for uid in gone:
            del self._given[uid]
        self._withdraw(gone)
        return len(gone)

    # --- units --------------------------------------------------------------------------------------------------------
    def assign(self, units: Sequence[UnitInfo], *, now: float = 0.0) -> Admitted:
        self._outstanding -= len(units)
        return self._admit(units, ordered=True, now=now)

    def assign_round(self, part: RoundPart, units: Sequence[UnitInfo], *, now: float = 0.0) -> Admitted:
        """As assign. A round is told again by a driver that does not know whether it arrived. One that was taken is
        over: what it names besides is nowhere, and no round would ever hand it out."""
        self._outstanding -= 1
        if (part.branch, part.step, part.number) <= self._last_taken:
            known = [unit for unit in units if unit.id in self._given]
            absent = [unit for unit in units if unit.id not in self._given]
            return self._admit(known, ordered=False, now=now)._replace(absent=absent)
        for earlier in self._rounds:
            if (earlier.branch, earlier.step, earlier.number) == (part.branch, part.step, part.number):
                self._tell_again(earlier, part)
                return self._admit(units, ordered=False, now=now)
        self._rounds.append(part)
        return self._admit(units, ordered=False, now=now)

    def _tell_again(self, earlier: RoundPart, part: RoundPart) -> None:
        """What is here stays, named or not: the driver was told that it is held. What was on its way and is named no
        more is made again elsewhere."""
        unnamed = [uid for uid in earlier.units if uid not in part.units and uid in self._given]
        kept = [uid for uid in unnamed if self._given[uid].state is not _KeptState.PULLING]
        for uid in unnamed:
            if uid not in kept:
                del self._given[uid]
        earlier.units, earlier.last, earlier.total_weight = [*kept, *part.units], part.last, part.total_weight

    def _admit(self, units: Sequence[UnitInfo], *, ordered: bool, now: float) -> Admitted:
        to_pull, again = [], []
        for unit in units:
            known = self._given.get(unit.id)
            if known is None:
                self._given[unit.id] = _Given(unit, now)
                to_pull.append(unit)
                if ordered:
                    self._order.setdefault(Age(unit.branch, unit.step), deque()).append(unit.id)
                    self._ordered += 1
            elif known.state is _KeptState.PULLING:
                known.unit = unit  # perhaps of another producer now
                to_pull.append(unit)
            else:
                again.append(unit)
        return Admitted(to_pull, again, [])

    def arrived(self, uid: UnitId, payload: P) -> UnitInfo | None:
        """The unit, if this is news; None for one that was forgotten or is here already."""
        given = self._given.get(uid)
        if given is None or given.state is not _KeptState.PULLING:
            return None
        given.state, given.payload = _KeptState.EARLY if uid in self._unconfirmed else _KeptState.HERE, payload
        return given.unit

    def is_early(self, uid: UnitId) -> bool:
        given = self._given.get(uid)
        return given is not None and given.state is _KeptState.EARLY

    def pulling_from(self, producer: str) -> list[UnitInfo]:
        return [g.unit for g in self._given.values() if g.state is _KeptState.PULLING and g.unit.producer == producer]

    def lost(self, uids: Iterable[UnitId]) -> list[UnitInfo]:
        """Assignments that cannot be fetched; a round goes on without them, as the driver forms another for them."""
        gone: list[UnitInfo] = []
        for uid in uids:
            given = self._given.get(uid)
            if given is not None and given.state is _KeptState.PULLING:
                gone.append(given.unit)
                del self._given[uid]
        self._withdraw({unit.id for unit in gone})
        return gone

    def cancel(self, branch: int) -> list[UnitId]:
        """Forget what was not taken of this branch and older ones; returns what was taken, to be marked."""
        dead = {uid for uid in self._given if uid.branch <= branch}
        taken = [uid for uid in dead if self._given[uid].state is _KeptState.TAKEN]
        for uid in dead.difference(taken):
            del self._given[uid]
        self._withdraw(dead)
        self._rounds = deque(part for part in self._rounds if part.branch > branch)
        return taken

    def _withdraw(self, uids: set[UnitId]) -> None:
        if not uids:
            return
        for age, line in list(self._order.items()):
            self._order[age] = deque(uid for uid in line if uid not in uids)
            self._drop_empty(age)
        self._ordered = sum(map(len, self._order.values()))
        for part in self._rounds:
            part.units = [uid for uid in part.units if uid not in uids]

    # --- taking -------------------------------------------------------------------------------------------------------
    def has_next(self) -> bool:
        """Whether take, or take_round, has something."""
        if self._is_gang:
            return bool(self._rounds) and not any(map(self._is_awaited, self._rounds[0].units))
        return self._next_age() is not None

    def _next_age(self) -> Age | None:
        """The oldest of which something is here. Of one age, units go in the order of assignment."""
        here = [age for age, line in self._order.items() if self._given[line[0]].state is _KeptState.HERE]
        return min(here, default=None)

    def _drop_empty(self, age: Age) -> None:
        if not self._order[age]:
            del self._order[age]

    def take(self) -> tuple[UnitInfo, P] | None:
        """The next unit: of the oldest policy version that is here; None where nothing is."""
        age = self._next_age()
        if age is None:
            return None
        uid = self._order[age].popleft()
        self._drop_empty(age)
        self._ordered -= 1
        return self._hand_out(uid)

    def count_here(self, *, most: int) -> int:
        """How many units `take` would hand out now, one after another; counted up to `most`."""
        found = 0
        for line in self._order.values():
            for uid in line:
                if found >= most or self._given[uid].state is not _KeptState.HERE:
                    break
                found += 1
        return found

    def take_round(self) -> tuple[RoundPart, list[tuple[UnitInfo, P]]] | None:
        """The next round, once every unit of this rank's part is here. A unit that an earlier round has handed out, and
        that is named once more because its producer died as it came, is not handed out again."""
        if not self.has_next():
            return None
        part = self._rounds.popleft()
        self._last_taken = (part.branch, part.step, part.number)
        mine = [uid for uid in part.units if uid in self._given and self._given[uid].state is _KeptState.HERE]
        return part, [self._hand_out(uid) for uid in mine]

    def _is_awaited(self, uid: UnitId) -> bool:
        given = self._given.get(uid)
        return given is not None and given.state in (_KeptState.PULLING, _KeptState.EARLY)

    def _hand_out(self, uid: UnitId) -> tuple[UnitInfo, P]:
        given = self._given[uid]
        payload, given.payload, given.state = given.payload, None, _KeptState.TAKEN
        if payload is None:
            raise InvariantBroken(f"unit {uid.key} of branch {uid.branch} is here without a payload")
        return given.unit, payload

    def finish(self, uid: UnitId) -> UnitInfo | None:
        """Acknowledged or dropped; None: it was before, or its branch is dead."""
        given = self._given.get(uid)
        if given is None or given.state is not _KeptState.TAKEN:
            return None
        del self._given[uid]
        return given.unit

    def held_units(self) -> list[UnitInfo]:
        """Payload here, not finished: what a driver must know."""
        return [g.unit for g in self._given.values() if g.state in (_KeptState.HERE, _KeptState.TAKEN)]

    def level(self) -> tuple[int, int, float | None]:
        """(units assigned and not taken, their bytes, since when the first of them has been)."""
        untaken = [g for g in self._given.values() if g.state is not _KeptState.TAKEN]
        return len(untaken), sum(g.unit.size_bytes for g in untaken), min((g.since for g in untaken), default=None)

    def pulling(self) -> set[UnitId]:
        return {uid for uid, given in self._given.items() if given.state is _KeptState.PULLING}


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
