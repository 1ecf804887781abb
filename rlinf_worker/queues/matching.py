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

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal

from rlinf_api.errors import InvariantBroken
from rlinf_api.names import WorkerId
from rlinf_worker.channels import lineage
from rlinf_worker.queues.book import UnitBook, UnitEntry
from rlinf_worker.queues.past import OnTheWay, Past
from rlinf_worker.queues.rounds import Assignment, RoundAssignment, StepRounds, balance
from rlinf_worker.queues.units import COUNTED, GONE, INLINE, Age, UnitId, UnitInfo, UnitState


class QueueCore:
    is_ready: Callable[[UnitId], bool] | None = None
    """For a queue that others join: whether they have their part of a unit. None: a unit is ready when it is here."""

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
        self.book = self._book = UnitBook()  # public to look in, for messages
        self._finished = Past()  # acked or dropped
        self._on_the_way = OnTheWay()
        self._consumers: list[WorkerId] = []
        self._credit: dict[WorkerId, int] = {}
        self._steps: dict[int, StepRounds] = {}
        self.counts = dict.fromkeys(COUNTED, 0)

    # --- who is there ------------------------------------------------------------------------------------------------
    def set_consumers(self, consumers: Sequence[WorkerId]) -> None:
        """All consumers of the roster, in rank order, present or not: affinity counts over these."""
        self._consumers = list(consumers)

    def credit(self, consumer: WorkerId, units: int) -> None:
        """How much this consumer can take from now on (absolute; rounds for a gang)."""
        self._credit[consumer] = max(0, units)

    def remove_consumer(self, consumer: WorkerId) -> list[UnitInfo]:
        """What it had is waiting again; returns what is lost because its producer is gone as well.

        A gang is removed whole: the caller removes every rank, and rounds of open steps are formed anew.
        """
        self._credit.pop(consumer, None)
        self._on_the_way.gone(consumer)
        orphans: list[UnitInfo] = []
        for entry in self._book.of(consumer):
            self.counts["redelivered"] += 1
            self._take_back(entry.unit)
            self._book.move(entry, UnitState.WAITING)
            if entry.unit.producer == GONE:
                orphans.append(entry.unit)
                self._book.pop(entry.unit.id)
        self.counts["lost"] += len(orphans)
        for step in self._steps.values():
            step.formed = [r for r in step.formed if not r.last]  # the new gang needs one
        return orphans

    def remove_producer(self, producer: WorkerId) -> list[UnitInfo]:
        """Its units that nobody holds yet are lost; held ones live on with their consumer. One that was just handed
        out may have arrived all the same: `held` takes it back."""
        lost = []
        for entry in self._book.made_by(producer) if producer != INLINE else ():
            if entry.state is UnitState.HELD:
                self._book.change(entry, replace(entry.unit, producer=GONE))
            else:
                if entry.consumer is not None:
                    self._on_the_way.add(replace(entry.unit, producer=GONE), entry.consumer)
                lost.append(entry.unit)
                self._forget(entry.unit.id)
        self.counts["lost"] += len(lost)
        return lost

    def missing(
        self, consumer: WorkerId, producer: WorkerId, *, units: Collection[UnitId] | None = None
    ) -> list[UnitInfo]:
        """The producer is alive and does not have what the consumer was to fetch (None: any of it): lost, as above, but
        certainly not with the consumer."""
        lost = [entry.unit for entry in self._to_fetch(consumer, producer, units)]
        for unit in lost:
            self._forget(unit.id)
        self.counts["lost"] += len(lost)
        return lost

    def hand_back(self, consumer: WorkerId, producer: WorkerId, *, units: Collection[UnitId] | None = None) -> None:
        """The consumer has given up what it was to fetch (None: all), and the producer keeps it: it waits again."""
        for entry in self._to_fetch(consumer, producer, units):
            self.counts["redelivered"] += 1
            self._take_back(entry.unit)
            self._book.move(entry, UnitState.WAITING)

    def _to_fetch(self, consumer: WorkerId, producer: WorkerId, units: Collection[UnitId] | None) -> list[UnitEntry]:
        return [
            entry
            for entry in self._book.of(consumer)
            if entry.state is UnitState.ASSIGNED
            and entry.unit.producer == producer != INLINE
            and (units is None or entry.unit.id in units)
        ]

    def _forget(self, uid: UnitId) -> None:
        self._take_back(self._book.pop(uid).unit)

    def _take_back(self, unit: UnitInfo) -> None:
        """A later round has it."""
        step = self._step_of(unit)
        if step is not None:
            step.take_back(unit.key)

    def _step_of(self, unit: UnitInfo) -> StepRounds | None:
        step = self._steps.get(unit.step)
        return step if step is not None and step.age.branch == unit.branch else None

    # --- units -------------------------------------------------------------------------------------------------------
    def open_step(self, step: int, *, branch: int, keys: Iterable[str]) -> None:
        """The units that step will need; asked again with the same keys, nothing changes."""
        expected = sorted(keys, key=lineage.sort_key)
        known = self._steps.get(step)
        if known is None or known.age.branch != branch:
            ids = [UnitId(branch, key) for key in expected]
            here = (entry for entry in map(self._book.get, ids) if entry is not None)
            given = {e.unit.key for e in here if e.state is not UnitState.WAITING}
            given |= {uid.key for uid in ids if uid in self._finished}
            self._steps[step] = StepRounds(age=Age(branch, step), expected=expected, handed_out=given)
        elif known.expected != expected:
            raise InvariantBroken(f"step {step} of {self.name!r} was opened twice with different keys")

    def announce(self, units: Iterable[UnitInfo]) -> list[UnitInfo]:
        """Returns the duplicates: their producers may free them at once."""
        duplicates = []
        for unit in units:
            known = self._book.get(unit.id)
            if unit.id in self._finished or (known is not None and known.unit.producer != unit.producer):
                duplicates.append(unit)
                self.counts["duplicates"] += 1
            elif known is None:
                self._book.add(unit)
                if not self.rounds:
                    self._on_the_way.take(unit.id)
                self.counts["announced"] += 1
            elif unit.producer == INLINE:
                self._book.change(known, unit)  # a consumer that restored it could not say its affinity
        return duplicates

    def rehome(self, units: Iterable[UnitInfo]) -> list[UnitInfo]:
        """With another affinity than before; what is handed out already stays where it is. Returns those that wait."""
        found = [(entry, u) for u in units if (entry := self._book.get(u.id)) and entry.unit.affinity != u.affinity]
        for entry, unit in found:
            self._book.change(entry, replace(entry.unit, affinity=unit.affinity))
        return [entry.unit for entry, _ in found if entry.state is UnitState.WAITING]

    def knows(self, branch: int, key: str) -> bool:
        return UnitId(branch, key) in self._book.entries or UnitId(branch, key) in self._finished

    def restore_held(self, consumer: WorkerId, unit: UnitInfo) -> None:
        """A reconnecting consumer says that it has this unit, unacknowledged."""
        entry = self._book.get(unit.id)
        if unit.id in self._finished or (entry is not None and entry.consumer not in (None, consumer)):
            return  # another has it: whoever finishes what it makes of it first, wins
        if entry is None:
            self._book.add(unit, UnitState.HELD, consumer)
        else:
            self._book.move(entry, UnitState.HELD, consumer=consumer, number=entry.round)
        self._on_the_way.take(unit.id)
        self._give(unit)

    def _give(self, unit: UnitInfo) -> None:
        step = self._step_of(unit)
        if step is not None:
            step.give(unit.key)

    def assigned_to(self, consumer: WorkerId) -> tuple[list[UnitInfo], list[RoundAssignment]]:
        """What it may not have heard of when its stream broke, to be said again: (units, rounds with its part)."""
        mine = self._book.of(consumer)
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
        self._finished.forget(unit.id)
        if unit.id not in self._book.entries:
            self._book.add(unit)
            self.counts["redelivered"] += 1

    def expect_again(self, units: Iterable[tuple[int, str]]) -> None:
        """What they were made from is made again: in a chain of queues they pass this one a second time."""
        for branch, key in units:
            self._finished.forget(UnitId(branch, key))

    def held(self, consumer: WorkerId, *, branch: int, keys: Iterable[str]) -> list[UnitInfo]:
        """Returns the units that are newly held, so that their producers hear of it."""
        news = []
        for uid in (UnitId(branch, key) for key in keys):
            entry = self._book.get(uid)
            if entry is not None and entry.consumer == consumer and entry.state is UnitState.ASSIGNED:
                self._book.move(entry, UnitState.HELD, consumer=consumer, number=entry.round)
                news.append(entry.unit)
            elif self._on_the_way.consumer(uid) == consumer and (entry is None or entry.state is UnitState.WAITING):
                unit = self._on_the_way.take(uid)
                assert unit is not None
                if entry is None:
                    self._book.add(unit, UnitState.HELD, consumer)
                else:
                    self._book.move(entry, UnitState.HELD, consumer=consumer)
                    news.append(entry.unit)
                self._give(unit)
        return news

    def acked(self, consumer: WorkerId, *, branch: int, keys: Iterable[str]) -> list[UnitInfo]:
        """Returns the units that are finished: released to their producers."""
        return self._finish(consumer, branch=branch, keys=keys, count="acked")

    def dropped(self, consumer: WorkerId, *, branch: int, key: str) -> list[UnitInfo]:
        return self._finish(consumer, branch=branch, keys=[key], count="dropped")

    def end(self, unit: UnitInfo) -> list[UnitInfo]:
        """What `unit` would have become, by its key, is not to come: a filter ended it on its way here. Its step does
        not wait for it, and who makes it all the same makes a duplicate. Returns what waited here under that key."""
        entry = self._book.get(unit.id)
        if entry is not None and entry.state is not UnitState.WAITING:
            return []
        self._finished.add(unit, ended=True)
        self._give(unit)
        if entry is not None:
            self._book.pop(unit.id)
            self.counts["dropped"] += 1
        return [entry.unit] if entry is not None else []

    def _finish(self, consumer: WorkerId, *, branch: int, keys: Iterable[str], count: str) -> list[UnitInfo]:
        done = []
        for key in keys:
            entry = self._book.get(UnitId(branch, key))
            if entry is not None and entry.consumer == consumer:
                done.append(entry.unit)
                self._book.pop(entry.unit.id)
                self._finished.add(entry.unit)
                self.counts[count] += 1
        return done

    def close_step(self, step: int, *, branch: int) -> None:
        """The step has committed: what de-duplication remembered of it may go. Who announces more of it is too late,
        which the caller knows; acknowledgements of it may still come."""
        self._finished.close(step, branch=branch)
        self._steps = {n: s for n, s in self._steps.items() if s.age > (branch, step)}
        self._on_the_way.close(step, branch=branch)

    def forget_committed(self, step: int, *, branch: int, waiting_only: bool = False) -> list[UnitInfo]:
        """What it was told of these steps or of older branches, so that producers free it. All of it, where a new
        driver learns what has committed; where a step has just closed, what nobody had expected and waits still."""
        self.close_step(step, branch=branch)
        old = [e for e in self._book.entries.values() if e.unit.branch < branch or e.unit.step <= step]
        late = [entry.unit for entry in old if entry.state is UnitState.WAITING or not waiting_only]
        self.counts["late"] += sum(self._book.pop(unit.id) is not None for unit in late)
        return late

    def cancel(self, branch: int) -> list[UnitInfo]:
        """Forget everything of this branch and older ones; returns the units, so that producers free them."""
        gone = [e.unit for e in self._book.entries.values() if e.unit.branch <= branch]
        for unit in gone:
            self._book.pop(unit.id)
        self.counts["dropped"] += len(gone)
        self._finished.cancel(branch)
        self._on_the_way.cancel(branch)
        self._steps = {n: s for n, s in self._steps.items() if s.age.branch > branch}
        return gone

    # --- matching ----------------------------------------------------------------------------------------------------
    def match(self) -> list[Assignment]:
        """Hand out what waits within credit: the oldest policy version first, then by arrival. Not for rounds.

        What only one consumer may have goes first; the rest to whoever can take most, of two equals to the one that has
        less to do by weight.
        """
        given: dict[WorkerId, list[UnitInfo]] = {}
        for age in self._book.ages():
            if not any(map(self._room, self._consumers)):
                break
            for entry, consumer in self._choose(age):
                self._book.move(entry, UnitState.ASSIGNED, consumer=consumer)
                given.setdefault(consumer, []).append(entry.unit)
        return [Assignment(consumer=c, units=tuple(u)) for c, u in given.items()]

    def _choose(self, age: Age) -> list[tuple[UnitEntry, WorkerId]]:
        """Credit is spent here."""
        chosen: list[tuple[UnitEntry, WorkerId]] = []
        for index, lines in self._book.waiting_for_one(age, consumers=len(self._consumers)).items():
            consumer = self._consumers[index]
            mine = islice(self._ready(heapq.merge(*lines, key=lambda e: e.arrival)), self._credit.get(consumer, 0))
            chosen += [(entry, consumer) for entry in mine]
        for _, consumer in chosen:
            self._credit[consumer] -= 1
        able = [(-self._credit[c], self._book.weight_of(c), i) for i, c in enumerate(self._consumers) if self._room(c)]
        heapq.heapify(able)
        for entry in self._ready(self._book.waiting_for_anybody(age)):
            if not able:
                break
            credit, weight, index = able[0]
            chosen.append((entry, self._consumers[index]))
            self._credit[self._consumers[index]] -= 1
            if credit + 1 < 0:
                heapq.heapreplace(able, (credit + 1, weight + entry.unit.weight, index))
            else:
                heapq.heappop(able)
        return chosen

    def _ready(self, entries: Iterable[UnitEntry]) -> Iterable[UnitEntry]:
        is_ready = self.is_ready
        return entries if is_ready is None else (e for e in entries if is_ready(e.unit.id))

    def owner(self, uid: UnitId) -> WorkerId | None:
        """Who was given the unit and has not finished it."""
        entry = self._book.get(uid)
        return entry.consumer if entry is not None else None

    def follow(self, first: QueueCore) -> list[Assignment]:
        """For a queue that joins another: each part goes to whom `first` gave the unit, which is the bound of both."""
        given: dict[WorkerId, list[UnitInfo]] = {}
        for age in self._book.ages():
            for entry in list(self._book.waiting(age)):
                if (consumer := first.owner(entry.unit.id)) is not None:
                    self._book.move(entry, UnitState.ASSIGNED, consumer=consumer)
                    given.setdefault(consumer, []).append(entry.unit)
        return [Assignment(consumer=c, units=tuple(u)) for c, u in given.items()]

    def _room(self, consumer: WorkerId) -> bool:
        return self._credit.get(consumer, 0) > 0

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

    def _form_round(self, step: StepRounds) -> RoundAssignment | None:
        if step.is_over:
            return None
        if not step.left_count:
            return self._round(step, [], last=True) if not self._book.count_assigned(step.age) else None
        size = min(step.left_count, self.micro_batch * len(self._consumers))
        if self._book.count_waiting(step.age) < size:
            return None
        chosen: list[UnitEntry] = []
        if self.order == "lineage":
            for key in islice(step.left(), size):
                entry = self._book.get(UnitId(step.age.branch, key))
                if entry is None or entry.state is not UnitState.WAITING or not list(self._ready([entry])):
                    return None
                chosen.append(entry)
        else:
            here = (e for e in self._book.waiting(step.age) if e.unit.key in step.places)
            chosen = list(islice(self._ready(here), size))
            if len(chosen) < size:
                return None
        return self._round(step, chosen, last=False)

    def _round(self, step: StepRounds, chosen: Sequence[UnitEntry], *, last: bool) -> RoundAssignment:
        number = self.first_round + step.rounds
        step.rounds += 1
        entries = {e.unit.id: e for e in chosen}
        ranks = {consumer: rank for rank, consumer in enumerate(self._consumers)}
        only = {uid: ranks[c] for uid in entries if (c := self._on_the_way.consumer(uid)) in ranks}
        parts = balance([e.unit for e in chosen], ranks=len(ranks), only=only)
        for consumer, part in zip(self._consumers, parts, strict=True):
            self._credit[consumer] -= 1
            for unit in part:
                step.give(unit.key)
                self._on_the_way.take(unit.id)
                self._book.move(entries[unit.id], UnitState.ASSIGNED, consumer=consumer, number=number)
        return RoundAssignment(
            step=step.age.step,
            branch=step.age.branch,
            number=number,
            last=last,
            total_weight=sum(e.unit.weight for e in chosen),
            parts=tuple(Assignment(consumer=c, units=tuple(p)) for c, p in zip(self._consumers, parts, strict=True)),
            ended=self._finished.ended(step.age.branch, step.expected) if last else (),
        )

    # --- looking in --------------------------------------------------------------------------------------------------
    def waiting_for(self, step: int) -> list[str]:
        """Keys of an open step that have not reached a consumer, for messages."""
        found: list[str] = []
        for uid in self._steps[step].uids if step in self._steps else ():
            entry = self._book.get(uid)
            if uid not in self._finished and (entry is None or entry.state is not UnitState.HELD):
                found.append(uid.key)
        return found

    @property
    def depth(self) -> int:
        return len(self._book.entries)

    @property
    def waiting(self) -> int:
        """Units that no consumer has yet."""
        return sum(self._book.count_waiting(age) for age in self._book.ages())

    @property
    def queued_bytes(self) -> int:
        return self._book.queued_bytes
