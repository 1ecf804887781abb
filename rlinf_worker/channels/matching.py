"""Matching of units with consumers: the pure core of one queue, kept by the driver. No I/O, no clock, no payload.

    announced by a producer ──match()──> assigned ──held()──> held ──acked()──> gone (released to the producer)
          ▲                                 │                   │
          └──────── consumer lost ──────────┴───────────────────┘        producer lost before held: `lost`

A unit is the same unit by (branch, lineage key), whoever makes it: announcing it again changes nothing. What a dead
producer took along is reported as lost, so that the driver hands its ticket out again. One instance per queue; every
method returns what has to be told to whom.

`rounds`: the consumers are the ranks of one gang, which take a micro-batch each at the same time; the units of a step
are known beforehand (open_step), so `order="lineage"` can form rounds in key order whatever arrives first. The last
round of a step is one without units, formed when every unit of it is held: a flag on the last units themselves would
be wrong as soon as one of them dies with its producer on the way to its rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal, NamedTuple

from rlinf_api.errors import InvariantBroken
from rlinf_api.names import WorkerId
from rlinf_worker.channels import lineage
from rlinf_worker.channels.protocol import PolicyVersion

FIRST_VERSION = PolicyVersion(0, 0)
INLINE = WorkerId("")  # producer of units that the driver itself made


class UnitId(NamedTuple):
    branch: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitInfo:
    """One unit without its payload."""

    key: str
    branch: int
    step: int
    weight: float = 1.0
    size_bytes: int = 0
    version: PolicyVersion = FIRST_VERSION
    parents: tuple[str, ...] = ()
    producer: WorkerId = INLINE
    inline: bytes = b""
    affinity: int | None = None

    @property
    def id(self) -> UnitId:
        return UnitId(self.branch, self.key)


class UnitState(Enum):
    WAITING = "waiting"
    ASSIGNED = "assigned"
    HELD = "held"


@dataclass(slots=True)
class _Entry:
    unit: UnitInfo
    state: UnitState = UnitState.WAITING
    consumer: WorkerId | None = None
    round: int = 0  # number of the round that it is in


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Units for one consumer."""

    consumer: WorkerId
    units: tuple[UnitInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAssignment:
    """One round of a gang: `parts[rank]` may be empty."""

    step: int
    branch: int
    number: int
    last: bool
    total_weight: float
    parts: tuple[Assignment, ...]


@dataclass(slots=True)
class _OpenStep:
    step: int
    branch: int
    expected: list[str]  # in lineage order
    handed_out: set[str] = field(default_factory=set)
    rounds: int = 0  # formed so far, those of a gang that is gone included
    formed: list[RoundAssignment] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Its last round is out."""
        return bool(self.formed) and self.formed[-1].last


class QueueCore:
    def __init__(
        self,
        name: str,
        *,
        micro_batch: int = 1,
        rounds: bool = False,
        order: Literal["arrival", "lineage"] = "arrival",
        first_round: int = 1,
    ) -> None:
        """`first_round`: number of the first round of every step; higher in a newer driver, so that its rounds are
        never taken for those of the driver before."""
        self.name = name
        self.micro_batch = micro_batch
        self.first_round = first_round
        self.rounds = rounds
        self.order = order
        self._entries: dict[UnitId, _Entry] = {}  # in order of arrival
        self._finished: dict[UnitId, int] = {}  # acked or dropped, with their step, until it closes
        self._on_the_way: dict[UnitId, tuple[UnitInfo, WorkerId]] = {}  # lost, unless their consumer says `held` yet
        self._closed = (0, 0)  # (branch, step): units up to here are remembered no more
        self._consumers: list[WorkerId] = []
        self._credit: dict[WorkerId, int] = {}
        self._steps: dict[int, _OpenStep] = {}
        self.counts = {"announced": 0, "acked": 0, "dropped": 0, "redelivered": 0, "lost": 0, "duplicates": 0}

    # --- who is there ------------------------------------------------------------------------------------------------
    def set_consumers(self, consumers: Sequence[WorkerId]) -> None:
        """All consumers of the roster, in rank order, present or not: affinity counts over these."""
        self._consumers = list(consumers)

    def credit(self, consumer: WorkerId, units: int) -> None:
        """How much this consumer can take from now on (absolute; rounds for a gang)."""
        self._credit[consumer] = max(0, units)

    def has_credit_entry(self, consumer: WorkerId) -> bool:
        return consumer in self._credit

    def remove_consumer(self, consumer: WorkerId) -> list[UnitInfo]:
        """What it had is waiting again; returns what is lost because its producer is gone as well.

        A gang is removed whole: the caller removes every rank, and rounds of open steps are formed anew.
        """
        self._credit.pop(consumer, None)
        self._on_the_way = {uid: way for uid, way in self._on_the_way.items() if way[1] != consumer}
        for entry in self._entries.values():
            if entry.consumer == consumer:
                entry.state, entry.consumer, entry.round = UnitState.WAITING, None, 0
                self.counts["redelivered"] += 1
                self._take_back(entry.unit)
        for step in self._steps.values():
            step.formed = [r for r in step.formed if not r.last]  # the new gang needs one
        return self._take_orphans()

    def remove_producer(self, producer: WorkerId) -> list[UnitInfo]:
        """Its units that nobody holds yet are lost; held ones live on with their consumer. One that was just handed
        out may have arrived all the same: `held` takes it back."""
        lost = []
        for uid, entry in list(self._entries.items()):
            if entry.unit.producer != producer or producer == INLINE:
                continue
            if entry.state is UnitState.HELD:
                entry.unit = replace(entry.unit, producer=_GONE)
            else:
                if entry.consumer is not None:
                    self._on_the_way[uid] = (replace(entry.unit, producer=_GONE), entry.consumer)
                lost.append(entry.unit)
                self._forget(uid)
        self.counts["lost"] += len(lost)
        return lost

    def unreachable(self, consumer: WorkerId, producer: WorkerId) -> list[UnitInfo]:
        """The consumer has given up what it was to fetch from this producer, alive or not: lost, as above."""
        lost = [
            e.unit
            for e in self._entries.values()
            if e.state is UnitState.ASSIGNED and e.consumer == consumer and e.unit.producer == producer != INLINE
        ]
        for unit in lost:
            self._forget(unit.id)
        self.counts["lost"] += len(lost)
        return lost

    def _take_orphans(self) -> list[UnitInfo]:
        orphans = [e.unit for e in self._entries.values() if e.unit.producer == _GONE and e.state is not UnitState.HELD]
        for unit in orphans:
            self._forget(unit.id)
        self.counts["lost"] += len(orphans)
        return orphans

    def _forget(self, uid: UnitId) -> None:
        self._take_back(self._entries.pop(uid).unit)

    def _take_back(self, unit: UnitInfo) -> None:
        """A later round has it."""
        step = self._steps.get(unit.step)
        if step is not None and step.branch == unit.branch:
            step.handed_out.discard(unit.key)

    # --- units -------------------------------------------------------------------------------------------------------
    def open_step(self, step: int, *, branch: int, keys: Iterable[str]) -> None:
        """The units that step will need; asked again with the same keys, nothing changes."""
        expected = sorted(keys, key=lineage.sort_key)
        known = self._steps.get(step)
        if known is None or known.branch != branch:
            here = (e.unit for e in self._entries.values() if e.unit.step == step and e.unit.branch == branch)
            given = {unit.key for unit in here if self._entries[unit.id].state is not UnitState.WAITING}
            given |= {uid.key for uid, of in self._finished.items() if of == step and uid.branch == branch}
            self._steps[step] = _OpenStep(step=step, branch=branch, expected=expected, handed_out=given & {*expected})
        elif known.expected != expected:
            raise InvariantBroken(f"step {step} of {self.name!r} was opened twice with different keys")

    def announce(self, units: Iterable[UnitInfo]) -> list[UnitInfo]:
        """Returns the duplicates: their producers may free them at once."""
        duplicates = []
        for unit in units:
            known = self._entries.get(unit.id)
            if unit.id in self._finished or (known is not None and known.unit.producer != unit.producer):
                duplicates.append(unit)
                self.counts["duplicates"] += 1
            elif known is None:
                self._entries[unit.id] = _Entry(unit)
                self._on_the_way.pop(unit.id, None)
                self.counts["announced"] += 1
            elif unit.producer == INLINE:
                known.unit = unit  # a consumer that restored it could not say its affinity
        return duplicates

    def knows(self, branch: int, key: str) -> bool:
        return UnitId(branch, key) in self._entries or UnitId(branch, key) in self._finished

    def restore_held(self, consumer: WorkerId, unit: UnitInfo) -> None:
        """A reconnecting consumer says that it has this unit, unacknowledged."""
        entry = self._entries.get(unit.id)
        if unit.id in self._finished or (entry is not None and entry.consumer not in (None, consumer)):
            return  # another has it: whoever finishes what it makes of it first, wins
        if entry is None:
            entry = self._entries[unit.id] = _Entry(unit)
            self._on_the_way.pop(unit.id, None)
        entry.state, entry.consumer = UnitState.HELD, consumer
        self._give(unit)

    def _give(self, unit: UnitInfo) -> None:
        step = self._steps.get(unit.step)
        if step is not None and step.branch == unit.branch:
            step.handed_out.add(unit.key)

    def assigned_to(self, consumer: WorkerId) -> tuple[list[UnitInfo], list[RoundAssignment]]:
        """What it may not have heard of when its stream broke, to be said again: (units, rounds with its part)."""
        mine = [e for e in self._entries.values() if e.consumer == consumer]
        missing = {(e.unit.step, e.round) for e in mine if e.state is UnitState.ASSIGNED}
        if not self.rounds:
            return [e.unit for e in mine if e.state is UnitState.ASSIGNED], []
        again = []
        for number in sorted(self._steps):
            for formed in self._steps[number].formed:
                if formed.last or (number, formed.number) in missing:
                    units = (e.unit for e in mine if (e.unit.step, e.round) == (number, formed.number))
                    again.append(replace(formed, parts=(Assignment(consumer=consumer, units=tuple(units)),)))
        return [], again

    def requeue(self, unit: UnitInfo) -> None:
        """Make a finished unit wait again: what was made from it is lost."""
        self._finished.pop(unit.id, None)
        if unit.id not in self._entries:
            self._entries[unit.id] = _Entry(unit)
            self.counts["redelivered"] += 1

    def held(self, consumer: WorkerId, *, branch: int, keys: Iterable[str]) -> list[UnitInfo]:
        """Returns the units that are newly held, so that their producers hear of it."""
        news = []
        for uid in (UnitId(branch, key) for key in keys):
            entry = self._entries.get(uid)
            if entry is not None and entry.consumer == consumer and entry.state is UnitState.ASSIGNED:
                entry.state = UnitState.HELD
                news.append(entry.unit)
            elif entry is None and uid in self._on_the_way and self._on_the_way[uid][1] == consumer:
                unit, _ = self._on_the_way.pop(uid)
                self._entries[uid] = _Entry(unit, UnitState.HELD, consumer)
                self._give(unit)
        return news

    def acked(self, consumer: WorkerId, *, branch: int, keys: Iterable[str]) -> list[UnitInfo]:
        """Returns the units that are finished: released to their producers."""
        return self._finish(consumer, branch=branch, keys=keys, count="acked")

    def dropped(self, consumer: WorkerId, *, branch: int, key: str) -> list[UnitInfo]:
        return self._finish(consumer, branch=branch, keys=[key], count="dropped")

    def _finish(self, consumer: WorkerId, *, branch: int, keys: Iterable[str], count: str) -> list[UnitInfo]:
        done = []
        for key in keys:
            entry = self._entries.get(UnitId(branch, key))
            if entry is not None and entry.consumer == consumer:
                done.append(entry.unit)
                del self._entries[entry.unit.id]
                if (branch, entry.unit.step) > self._closed:
                    self._finished[entry.unit.id] = entry.unit.step
                self.counts[count] += 1
        return done

    def close_step(self, step: int, *, branch: int) -> None:
        """The step has committed: what de-duplication remembered of it may go. Who announces more of it is too late,
        which the caller knows; acknowledgements of it may still come."""
        self._closed = (branch, step)
        self._steps = {n: s for n, s in self._steps.items() if (s.branch, n) > self._closed}
        self._finished = {uid: n for uid, n in self._finished.items() if (uid.branch, n) > self._closed}
        self._on_the_way = {
            uid: way for uid, way in self._on_the_way.items() if (uid.branch, way[0].step) > self._closed
        }

    def forget_committed(self, step: int, *, branch: int) -> list[UnitInfo]:
        """A new driver has learnt what has committed: returns what it was told before of these steps or of older
        branches, so that producers free it."""
        self.close_step(step, branch=branch)
        late = [e.unit for e in self._entries.values() if e.unit.branch < branch or e.unit.step <= step]
        for unit in late:
            del self._entries[unit.id]
        return late

    def cancel(self, branch: int) -> list[UnitInfo]:
        """Forget everything of this branch and older ones; returns the units, so that producers free them."""
        gone = [e.unit for e in self._entries.values() if e.unit.branch <= branch]
        for unit in gone:
            del self._entries[unit.id]
        self.counts["dropped"] += len(gone)
        self._finished = {uid: n for uid, n in self._finished.items() if uid.branch > branch}
        self._on_the_way = {uid: way for uid, way in self._on_the_way.items() if uid.branch > branch}
        self._steps = {n: s for n, s in self._steps.items() if s.branch > branch}
        return gone

    # --- matching ----------------------------------------------------------------------------------------------------
    def match(self) -> list[Assignment]:
        """Hand out what waits, oldest policy version first, within credit. Not for rounds."""
        waiting = sorted(
            (e for e in self._entries.values() if e.state is UnitState.WAITING),
            key=lambda e: (e.unit.branch, e.unit.step),
        )
        given: dict[WorkerId, list[UnitInfo]] = {}
        for entry in waiting:
            consumer = self._choose(entry.unit)
            if consumer is not None:
                entry.state, entry.consumer = UnitState.ASSIGNED, consumer
                self._credit[consumer] -= 1
                given.setdefault(consumer, []).append(entry.unit)
        return [Assignment(consumer=c, units=tuple(u)) for c, u in given.items()]

    def _choose(self, unit: UnitInfo) -> WorkerId | None:
        if unit.affinity is not None:
            pinned = self._consumers[unit.affinity % len(self._consumers)] if self._consumers else None
            return pinned if pinned is not None and self._credit.get(pinned, 0) > 0 else None
        best = max(self._consumers, key=lambda c: self._credit.get(c, 0), default=None)
        return best if best is not None and self._credit.get(best, 0) > 0 else None

    def match_rounds(self) -> list[RoundAssignment]:
        """Form rounds for the gang while every rank has credit; the oldest open step first, one step after another."""
        result: list[RoundAssignment] = []
        for number in sorted(self._steps):
            step = self._steps[number]
            while self._consumers and all(self._credit.get(c, 0) > 0 for c in self._consumers):
                formed = self._form_round(step)
                if formed is None:
                    break
                step.formed.append(formed)
                result.append(formed)
            if not step.is_over:
                break
        return result

    def _form_round(self, step: _OpenStep) -> RoundAssignment | None:
        if step.is_over:
            return None
        left = [key for key in step.expected if key not in step.handed_out]
        if not left:
            return self._round(step, [], last=True) if self._is_held(step) else None
        size = min(len(left), self.micro_batch * len(self._consumers))
        ready = {
            e.unit.key
            for e in self._entries.values()
            if e.state is UnitState.WAITING and e.unit.step == step.step and e.unit.branch == step.branch
        }
        if self.order == "lineage":
            chosen = left[:size]
            if not ready.issuperset(chosen):
                return None
        else:
            arrived = [e.unit.key for e in self._entries.values() if e.unit.key in ready and e.unit.step == step.step]
            if len(arrived) < size:
                return None
            chosen = arrived[:size]
        step.handed_out.update(chosen)
        return self._round(step, [self._entries[UnitId(step.branch, key)].unit for key in chosen], last=False)

    def _is_held(self, step: _OpenStep) -> bool:
        for key in step.expected:
            entry = self._entries.get(UnitId(step.branch, key))
            if entry is not None and entry.state is not UnitState.HELD:
                return False
        return True

    def _round(self, step: _OpenStep, units: Sequence[UnitInfo], *, last: bool) -> RoundAssignment:
        number = self.first_round + step.rounds
        step.rounds += 1
        parts = balance(units, ranks=len(self._consumers))
        for consumer, part in zip(self._consumers, parts, strict=True):
            self._credit[consumer] -= 1
            for unit in part:
                entry = self._entries[unit.id]
                entry.state, entry.consumer, entry.round = UnitState.ASSIGNED, consumer, number
        return RoundAssignment(
            step=step.step,
            branch=step.branch,
            number=number,
            last=last,
            total_weight=sum(u.weight for u in units),
            parts=tuple(Assignment(consumer=c, units=tuple(p)) for c, p in zip(self._consumers, parts, strict=True)),
        )

    # --- looking in --------------------------------------------------------------------------------------------------
    def waiting_for(self, step: int) -> list[str]:
        """Keys of an open step that have not reached a consumer, for messages."""
        known = self._steps.get(step)
        if known is None:
            return []
        here = {e.unit.key for e in self._entries.values() if e.state is UnitState.HELD}
        done = {uid.key for uid in self._finished if uid.branch == known.branch}
        return [key for key in known.expected if key not in here and key not in done]

    @property
    def depth(self) -> int:
        return len(self._entries)

    @property
    def queued_bytes(self) -> int:
        return sum(e.unit.size_bytes for e in self._entries.values())

    def units_of(self, producer: WorkerId) -> int:
        return sum(1 for e in self._entries.values() if e.unit.producer == producer)


_GONE = WorkerId("gone/-1")  # producer of units that live on with their consumer alone


def balance(units: Sequence[UnitInfo], *, ranks: int) -> list[list[UnitInfo]]:
    """Units over ranks by weight, heaviest first to the lightest rank; ties to the lower rank. Deterministic.

    >>> us = [UnitInfo(key=f"s:{i}", branch=0, step=1, weight=w) for i, w in enumerate([5, 3, 3, 2])]
    >>> [[u.key for u in part] for part in balance(us, ranks=2)]
    [['s:0', 's:3'], ['s:1', 's:2']]
    """
    parts: list[list[UnitInfo]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for unit in sorted(units, key=lambda u: -u.weight):
        rank = min(range(ranks), key=lambda r: (loads[r], len(parts[r]), r))
        parts[rank].append(unit)
        loads[rank] += unit.weight
    order = {unit.id: position for position, unit in enumerate(units)}
    return [sorted(part, key=lambda u: order[u.id]) for part in parts]
