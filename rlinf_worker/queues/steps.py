"""The open steps of one queue, and the rounds of a gang that are formed of their units. Pure. For: queues.core.

The consumers are the ranks of one gang, which take a micro-batch each at the same time; the units of a step are known
beforehand (open), so `order="lineage"` can form rounds in key order whatever arrives first. The last round of a step is
one without units, formed when every unit of it is held: a flag on the last units themselves would be wrong as soon as
one of them dies with its producer on the way to its rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal

from rlinf_api.errors import InvariantBroken
from rlinf_api.names import WorkerId
from rlinf_worker.channels import lineage
from rlinf_worker.queues.book import UnitBook, UnitEntry
from rlinf_worker.queues.matching import Consumers, IsReady
from rlinf_worker.queues.past import Past
from rlinf_worker.queues.rounds import Assignment, RoundAssignment, StepRounds, balance
from rlinf_worker.queues.units import Age, UnitId, UnitInfo, UnitState

Order = Literal["arrival", "lineage"]


class OpenSteps:
    def __init__(
        self,
        book: UnitBook,
        consumers: Consumers,
        *,
        finished: Past[bool],
        on_the_way: Past[tuple[UnitInfo, WorkerId]],
        order: Order,
        first_round: int,
    ) -> None:
        self._book, self._consumers = book, consumers
        self._finished, self._on_the_way = finished, on_the_way
        self._order, self._first_round = order, first_round
        self._steps: dict[int, StepRounds] = {}

    def open(self, age: Age, keys: Iterable[str]) -> None:
        """Asked again with the same keys, nothing changes."""
        expected, known = sorted(keys, key=lineage.sort_key), self._of(age)
        if known is None:
            uids = [UnitId(age.branch, key) for key in expected]
            here = (entry for entry in map(self._book.get, uids) if entry is not None)
            given = {entry.unit.key for entry in here if entry.state is not UnitState.WAITING}
            given |= {uid.key for uid in uids if uid in self._finished}
            self._steps[age.step] = StepRounds(age=age, expected=expected, handed_out=given)
        elif known.expected != expected:
            raise InvariantBroken(f"step {age.step} was opened twice with different keys")

    def _of(self, age: Age) -> StepRounds | None:
        step = self._steps.get(age.step)
        return step if step is not None and step.age == age else None

    def give(self, unit: UnitInfo) -> None:
        if (step := self._of(unit.age)) is not None:
            step.give(unit.key)

    def take_back(self, unit: UnitInfo) -> None:
        """A later round has it."""
        if (step := self._of(unit.age)) is not None:
            step.take_back(unit.key)

    def close(self, upto: Age) -> None:
        self._steps = {number: step for number, step in self._steps.items() if step.age > upto}

    # --- rounds -------------------------------------------------------------------------------------------------------
    def gang_gone(self) -> None:
        """The new gang needs a last round of its own."""
        for step in self._steps.values():
            step.formed = [formed for formed in step.formed if not formed.last]

    def told_again(self, consumer: WorkerId, mine: Sequence[UnitEntry]) -> list[RoundAssignment]:
        """Rounds that this rank may not have heard of, with its part: it was given `mine`."""
        missing = {(e.unit.step, e.round) for e in mine if e.state is UnitState.ASSIGNED}
        again = []
        for number in sorted(self._steps):
            for formed in self._steps[number].formed:
                if formed.last or (number, formed.number) in missing:
                    units = (e.unit for e in mine if (e.unit.step, e.round) == (number, formed.number))
                    again.append(replace(formed, parts=(Assignment(consumer=consumer, units=tuple(units)),)))
        return again

    def form_rounds(self, micro_batch: int, *, is_ready: IsReady) -> list[RoundAssignment]:
        """While every rank has credit; the oldest open step first, one step after another."""
        result: list[RoundAssignment] = []
        ranks = self._consumers.ranked
        for number in sorted(self._steps):
            step = self._steps[number]
            while ranks and not step.is_over and all(map(self._consumers.credit_of, ranks)):
                chosen = self._choose(step, micro_batch * len(ranks), is_ready=is_ready)
                if chosen is None:
                    break
                step.formed.append(self._form(step, chosen))
                result.append(step.formed[-1])
            if not step.is_over:
                break
        return result

    def _choose(self, step: StepRounds, size: int, *, is_ready: IsReady) -> list[UnitEntry] | None:
        """The units of the next round: none of the last one. None: it has to wait."""
        if not step.left_count:
            return [] if not self._book.count_assigned(step.age) else None
        size = min(step.left_count, size)
        if self._book.count_waiting(step.age) < size:
            return None
        if self._order == "lineage":
            found = [self._book.get(UnitId(step.age.branch, key)) for key in islice(step.left(), size)]
            chosen = [e for e in found if e and e.state is UnitState.WAITING and is_ready(e.unit.id)]
        else:
            here = (e for e in self._book.waiting(step.age) if e.unit.key in step.places and is_ready(e.unit.id))
            chosen = list(islice(here, size))
        return chosen if len(chosen) == size else None

    def _form(self, step: StepRounds, chosen: Sequence[UnitEntry]) -> RoundAssignment:
        number, last = self._first_round + step.rounds, not chosen
        step.rounds += 1
        entries, ranks = {e.unit.id: e for e in chosen}, self._consumers.ranked
        ways = {uid: way for uid in entries if (way := self._on_the_way.pop(uid)) is not None}
        only = {uid: ranks.index(rank) for uid, (_, rank) in ways.items() if rank in ranks}
        parts = balance([e.unit for e in chosen], ranks=len(ranks), only=only)
        for consumer, part in zip(ranks, parts, strict=True):
            self._consumers.spend(consumer)
            for unit in part:
                step.give(unit.key)
                self._book.move(entries[unit.id], UnitState.ASSIGNED, consumer=consumer, number=number)
        branch = step.age.branch
        return RoundAssignment(
            step=step.age.step,
            branch=branch,
            number=number,
            last=last,
            total_weight=sum(e.unit.weight for e in chosen),
            parts=tuple(Assignment(consumer=c, units=tuple(p)) for c, p in zip(ranks, parts, strict=True)),
            ended=tuple(k for k in step.expected if last and self._finished.get(UnitId(branch, k))),
        )

    def waiting_for(self, number: int) -> list[str]:
        """Keys of an open step that have not reached a consumer, for messages."""
        found: list[str] = []
        for uid in self._steps[number].uids if number in self._steps else ():
            entry = self._book.get(uid)
            if uid not in self._finished and (entry is None or entry.state is not UnitState.HELD):
                found.append(uid.key)
        return found
