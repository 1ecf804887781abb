"""The open steps of one queue, and the rounds of a gang that are formed of their units. Pure. For: queues.core.

The ranks of a gang take a micro-batch each at the same time; the tickets of a step are known beforehand
(queues.expected), so `order="lineage"` can form rounds in key order whatever arrives first. The last round of a step is
one without units, formed when every unit of it is held: a flag on the last units themselves would be wrong as soon as
one of them dies with its producer on the way to its rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Literal

from rlinf_api.names import WorkerId
from rlinf_worker.channels import lineage
from rlinf_worker.queues.book import Past, UnitBook
from rlinf_worker.queues.expected import Ended, StepUnits
from rlinf_worker.queues.matching import Consumers
from rlinf_worker.queues.units import Age, UnitEntry, UnitId, UnitInfo, UnitState

Order = Literal["arrival", "lineage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAssignment:
    """One round of a gang: the part of a rank may be empty. `ended`, of the last one: what filters dropped of the
    step.

    RoundAssignment(step=17, branch=2, number=0, last=True, total_weight=256.0,
                    ended=(Ended(key="env:5@17", tickets=("env:5@17",)),),
                    parts={"actor/0": [UnitInfo(key="env:3@17", branch=2, step=17)], "actor/1": []})
    """

    step: int
    branch: int
    number: int
    last: bool
    total_weight: float
    parts: Mapping[WorkerId, Sequence[UnitInfo]]
    ended: tuple[Ended, ...] = ()


class StepRounds(StepUnits):
    """What is left of a step to hand out, and what was."""

    def __init__(self, age: Age) -> None:
        super().__init__(age)
        self.rounds = 0  # formed so far, those of a gang that is gone included
        self.formed: list[RoundAssignment] = []

    @property
    def is_over(self) -> bool:
        """Its last round is out."""
        return bool(self.formed) and self.formed[-1].last


class OpenSteps:
    def __init__(
        self,
        book: UnitBook,
        consumers: Consumers,
        *,
        on_the_way: Past[tuple[UnitInfo, WorkerId]],
        order: Order,
        first_round: int,
    ) -> None:
        self._book, self._consumers, self._on_the_way = book, consumers, on_the_way
        self._order, self._first_round = order, first_round
        self._steps: dict[Age, StepRounds] = {}
        self.closed = Age(0, 0)  # the newest step that has committed

    def of(self, age: Age) -> StepRounds | None:
        """None: it has closed, or nothing is known of it."""
        return self._steps.get(age)

    def at(self, age: Age) -> StepRounds:
        """The step, for what comes of it, which may be before the flow has said what there is to come."""
        found = self._steps.get(age)
        if found is None:
            found = StepRounds(age)
            if age > self.closed:
                self._steps[age] = found
        return found

    def strangers(self, units: Iterable[UnitInfo]) -> list[tuple[UnitInfo, str]]:
        """Those that no round of their step, which is open, will ever have; and what it has instead."""
        found = []
        for unit in units:
            if (step := self.of(unit.age)) is not None and (why := step.stranger(unit)):
                found.append((unit, why))
        return found

    def has_all_of(self, unit: UnitInfo) -> bool:
        """Whether nothing more is to come here of what it was made of."""
        step = self.of(unit.age)
        return step is not None and all(map(step.has_all, unit.of_tickets))

    def take_back(self, unit: UnitInfo) -> None:
        """A later round has it."""
        if (step := self.of(unit.age)) is not None:
            step.by_lineage.take_back(unit.key)

    def close(self, upto: Age) -> None:
        self.closed = max(self.closed, upto)
        self._steps = {age: step for age, step in self._steps.items() if age > upto}

    def _open(self) -> list[StepRounds]:
        """The oldest first."""
        return [step for _, step in sorted(self._steps.items()) if step.is_open]

    # --- rounds -------------------------------------------------------------------------------------------------------
    def gang_gone(self) -> None:
        """The new gang needs a last round of its own."""
        for step in self._steps.values():
            step.formed = [formed for formed in step.formed if not formed.last]

    def told_again(self, consumer: WorkerId, mine: Sequence[UnitEntry]) -> list[RoundAssignment]:
        """Rounds that this rank may not have heard of, with its part: it was given `mine`."""
        missing = {(e.unit.age, e.round) for e in mine if e.state is UnitState.ASSIGNED}
        again = []
        for step in self._open():
            for formed in step.formed:
                if formed.last or (step.age, formed.number) in missing:
                    units = [e.unit for e in mine if (e.unit.age, e.round) == (step.age, formed.number)]
                    again.append(replace(formed, parts={consumer: units}))
        return again

    def form_rounds(self, micro_batch: int) -> list[RoundAssignment]:
        """While every rank has credit; the oldest open step first, one step after another."""
        result: list[RoundAssignment] = []
        ranks = self._consumers.ranked
        for step in self._open():
            while ranks and not step.is_over and all(map(self._consumers.credit_of, ranks)):
                chosen = self._choose(step, micro_batch * len(ranks))
                if chosen is None:
                    break
                step.formed.append(self._form(step, chosen))
                result.append(step.formed[-1])
            if not step.is_over:
                break
        return result

    def _choose(self, step: StepRounds, size: int) -> list[UnitEntry] | None:
        """The units of the next round: none of the last one. None: it has to wait."""
        left = step.left_count
        if left == 0:
            return [] if not self._book.count_assigned(step.age) else None
        size = size if left is None else min(left, size)
        if self._book.lines.count(step.age) < size:
            return None
        if self._order == "lineage":
            found = (self._book.get(UnitId(step.age.branch, key)) for key in islice(step.by_lineage.left(), size))
            chosen = [entry for entry in takewhile(_may_go, found) if entry is not None]
        else:
            chosen = [entry for entry in self._book.lines.first_few(step.age, size) if step.knows(entry.unit.key)]
        return chosen if len(chosen) == size else None

    def _form(self, step: StepRounds, chosen: Sequence[UnitEntry]) -> RoundAssignment:
        number, last = self._first_round + step.rounds, not chosen
        step.rounds += 1
        entries, ranks = {e.unit.id: e for e in chosen}, self._consumers.ranked
        on_the_way = self._on_the_way if len(self._on_the_way) else None
        ways = {uid: way for uid in entries if (way := on_the_way.pop(uid)) is not None} if on_the_way else {}
        only = {uid: ranks.index(rank) for uid, (_, rank) in ways.items() if rank in ranks}
        parts = balance([e.unit for e in chosen], ranks=len(ranks), only=only)
        for consumer, part in zip(ranks, parts, strict=True):
            self._consumers.spend(consumer)
            for unit in part:
                step.give(unit.key)
                self._book.assign(entries[unit.id], consumer, number=number)
        branch = step.age.branch
        return RoundAssignment(
            step=step.age.step,
            branch=branch,
            number=number,
            last=last,
            total_weight=sum(e.unit.weight for e in chosen),
            parts=dict(zip(ranks, parts, strict=True)),
            ended=tuple(step.ended.values()) if last else (),
        )

    def waiting_for(self, number: int) -> list[str]:
        """What an open step waits for, for messages: tickets of which units are to come, and units that have not
        reached a rank."""
        for step in self._open():
            if step.age.step == number:
                entries = ((key, self._book.get(UnitId(step.age.branch, key))) for key in step.known())
                on_the_way = [key for key, entry in entries if entry is not None and entry.state is not UnitState.HELD]
                return step.by_lineage.to_come() + sorted(on_the_way, key=lineage.sort_key)
        return []


def _may_go(entry: UnitEntry | None) -> bool:
    return entry is not None and entry.state is UnitState.WAITING and entry.is_ready


def balance(
    units: Sequence[UnitInfo], *, ranks: int, only: Mapping[UnitId, int] = MappingProxyType({})
) -> list[list[UnitInfo]]:
    """Units over ranks by weight, heaviest first to the lightest rank; ties to the lower rank. Deterministic. `only`:
    the rank of units that no other rank may have; these come first.

    >>> us = [UnitInfo(key=f"s:{i}", branch=0, step=1, weight=w) for i, w in enumerate([5, 3, 3, 2])]
    >>> [[u.key for u in part] for part in balance(us, ranks=2)]
    [['s:0', 's:3'], ['s:1', 's:2']]
    """
    pinned, free = list[int](), list[int]()
    for position, unit in enumerate(units):
        (pinned if unit.id in only else free).append(position)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for position in pinned:
        rank = only[units[position].id]
        parts[rank].append(position)
        loads[rank] += units[position].weight
    lightest = [(loads[rank], len(parts[rank]), rank) for rank in range(ranks)]
    heapq.heapify(lightest)
    for position in sorted(free, key=lambda at: -units[at].weight):
        load, count, rank = lightest[0]
        parts[rank].append(position)
        heapq.heapreplace(lightest, (load + units[position].weight, count + 1, rank))
    return [[units[position] for position in sorted(part)] for part in parts]
