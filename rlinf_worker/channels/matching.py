"""Matching of units with consumers: the pure core of one queue, kept by the driver. No I/O, no clock, no payload.

    announced by a producer ──match()──> assigned ──held()──> held ──acked()──> gone (released to the producer)
          ▲                                 │                   │
          └──────── consumer lost ──────────┴───────────────────┘        producer lost before held: `lost`

A unit is the same unit by (branch, lineage key), whoever makes it: announcing it again changes nothing. What a dead
producer took along is reported as lost, so that the driver hands its ticket out again. One instance per queue; every
method returns what has to be told to whom.

`rounds`: the consumers are the ranks of one gang, which take a micro-batch each at the same time; the units of a step
are known beforehand (open_step), so the last round of a step is known too, and `order="lineage"` can form rounds in key
order whatever arrives first.
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
    rounds: int = 0


class QueueCore:
    def __init__(
        self,
        name: str,
        *,
        micro_batch: int = 1,
        rounds: bool = False,
        order: Literal["arrival", "lineage"] = "arrival",
    ) -> None:
        self.name = name
        self.micro_batch = micro_batch
        self.rounds = rounds
        self.order = order
        self._entries: dict[UnitId, _Entry] = {}  # in order of arrival
        self._finished: set[UnitId] = set()  # acked or dropped, of steps that are still open
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
        for entry in self._entries.values():
            if entry.consumer == consumer:
                entry.state, entry.consumer = UnitState.WAITING, None
                self.counts["redelivered"] += 1
                if step := self._steps.get(entry.unit.step):
                    step.handed_out.discard(entry.unit.key)
        return self._take_orphans()

    def remove_producer(self, producer: WorkerId) -> list[UnitInfo]:
        """Its units that nobody holds yet are lost; held ones live on with their consumer."""
        lost = []
        for uid, entry in list(self._entries.items()):
            if entry.unit.producer != producer or producer == INLINE:
                continue
            if entry.state is UnitState.HELD:
                entry.unit = replace(entry.unit, producer=_GONE)
            else:
                lost.append(entry.unit)
                self._forget(uid)
        self.counts["lost"] += len(lost)
        return lost

    def _take_orphans(self) -> list[UnitInfo]:
        orphans = [e.unit for e in self._entries.values() if e.unit.producer == _GONE and e.state is not UnitState.HELD]
        for unit in orphans:
            self._forget(unit.id)
        self.counts["lost"] += len(orphans)
        return orphans

    def _forget(self, uid: UnitId) -> None:
        entry = self._entries.pop(uid)
        if step := self._steps.get(entry.unit.step):
            step.handed_out.discard(uid.key)

    # --- units -------------------------------------------------------------------------------------------------------
    def open_step(self, step: int, *, branch: int, keys: Iterable[str]) -> None:
        """The units that step will need; asked again with the same keys, nothing changes."""
        expected = sorted(keys, key=lineage.sort_key)
        known = self._steps.get(step)
        if known is None or known.branch != branch:
            self._steps[step] = _OpenStep(step=step, branch=branch, expected=expected)
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
                self.counts["announced"] += 1
        return duplicates

    def knows(self, branch: int, key: str) -> bool:
        return UnitId(branch, key) in self._entries or UnitId(branch, key) in self._finished

    def restore_held(self, consumer: WorkerId, unit: UnitInfo) -> None:
        """A reconnecting consumer says that it has this unit, unacknowledged."""
        if unit.id in self._finished:
            return
        entry = self._entries.setdefault(unit.id, _Entry(unit))
        entry.state, entry.consumer = UnitState.HELD, consumer
        if step := self._steps.get(unit.step):
            step.handed_out.add(unit.key)

    def requeue(self, unit: UnitInfo) -> None:
        """Make a finished unit wait again: what was made from it is lost."""
        self._finished.discard(unit.id)
        if unit.id not in self._entries:
            self._entries[unit.id] = _Entry(unit)
            self.counts["redelivered"] += 1

    def held(self, consumer: WorkerId, *, branch: int, keys: Iterable[str]) -> list[UnitInfo]:
        """Returns the units that are newly held, so that their producers hear of it."""
        news = []
        for key in keys:
            entry = self._entries.get(UnitId(branch, key))
            if entry is not None and entry.consumer == consumer and entry.state is UnitState.ASSIGNED:
                entry.state = UnitState.HELD
                news.append(entry.unit)
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
                self._finished.add(entry.unit.id)
                self.counts[count] += 1
        return done

    def close_step(self, step: int) -> None:
        """The step has committed: what de-duplication remembered of it may go."""
        done = self._steps.pop(step, None)
        if done is not None:
            self._finished -= {UnitId(done.branch, key) for key in done.expected}

    def cancel(self, branch: int) -> list[UnitInfo]:
        """Forget everything of this branch and older ones; returns the units, so that producers free them."""
        gone = [e.unit for e in self._entries.values() if e.unit.branch <= branch]
        for unit in gone:
            del self._entries[unit.id]
        self.counts["dropped"] += len(gone)
        self._finished = {uid for uid in self._finished if uid.branch > branch}
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
                result.append(formed)
            if len(step.handed_out) < len(step.expected):
                break
        return result

    def _form_round(self, step: _OpenStep) -> RoundAssignment | None:
        left = [key for key in step.expected if key not in step.handed_out]
        if not left:
            return None
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
        units = [self._entries[UnitId(step.branch, key)].unit for key in chosen]
        parts = balance(units, ranks=len(self._consumers))
        for consumer, part in zip(self._consumers, parts, strict=True):
            self._credit[consumer] -= 1
            for unit in part:
                entry = self._entries[unit.id]
                entry.state, entry.consumer = UnitState.ASSIGNED, consumer
        step.handed_out.update(chosen)
        step.rounds += 1
        return RoundAssignment(
            step=step.step,
            branch=step.branch,
            number=step.rounds,
            last=len(step.handed_out) == len(step.expected),
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
