"""A step's rounds as values: what is left to hand out, and how a round is divided among the ranks of a gang. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

from rlinf_api.names import WorkerId
from rlinf_worker.queues.units import Age, UnitId, UnitInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Units for one consumer.

    Assignment(consumer="actor/0", units=(UnitInfo(key="env:3@17", branch=2, step=17),))
    """

    consumer: WorkerId
    units: tuple[UnitInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAssignment:
    """One round of a gang: `parts[rank]` may be empty. `ended`, of the last one: keys of the step that are in none, as
    filters dropped them.

    RoundAssignment(step=17, branch=2, number=0, last=True, total_weight=256.0, ended=("env:5@17",),
                    parts=(Assignment(consumer="actor/0", units=(...)), Assignment(consumer="actor/1", units=(...))))
    """

    step: int
    branch: int
    number: int
    last: bool
    total_weight: float
    parts: tuple[Assignment, ...]
    ended: tuple[str, ...] = ()


@dataclass(slots=True)
class StepRounds:
    age: Age
    expected: list[str]  # in lineage order
    handed_out: set[str]
    rounds: int = 0  # formed so far, those of a gang that is gone included
    formed: list[RoundAssignment] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)  # where each key stands in `expected`
    cursor: int = 0  # all before it is handed out

    def __post_init__(self) -> None:
        self.places = {key: place for place, key in enumerate(self.expected)}
        self.handed_out &= self.places.keys()

    @property
    def is_over(self) -> bool:
        """Its last round is out."""
        return bool(self.formed) and self.formed[-1].last

    @property
    def uids(self) -> list[UnitId]:
        return [UnitId(self.age.branch, key) for key in self.expected]

    @property
    def left_count(self) -> int:
        return len(self.expected) - len(self.handed_out)

    def left(self) -> Iterator[str]:
        """What is not handed out, in lineage order."""
        while self.cursor < len(self.expected) and self.expected[self.cursor] in self.handed_out:
            self.cursor += 1
        return (key for key in islice(self.expected, self.cursor, None) if key not in self.handed_out)

    def give(self, key: str) -> None:
        if key in self.places:
            self.handed_out.add(key)

    def take_back(self, key: str) -> None:
        if key in self.handed_out:
            self.handed_out.discard(key)
            self.cursor = min(self.cursor, self.places[key])


def balance(
    units: Sequence[UnitInfo], *, ranks: int, only: Mapping[UnitId, int] = MappingProxyType({})
) -> list[list[UnitInfo]]:
    """Units over ranks by weight, heaviest first to the lightest rank; ties to the lower rank. Deterministic. `only`:
    the rank of units that no other rank may have; these come first.

    >>> us = [UnitInfo(key=f"s:{i}", branch=0, step=1, weight=w) for i, w in enumerate([5, 3, 3, 2])]
    >>> [[u.key for u in part] for part in balance(us, ranks=2)]
    [['s:0', 's:3'], ['s:1', 's:2']]
    """
    parts: list[list[UnitInfo]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for unit in sorted(units, key=lambda u: (u.id not in only, -u.weight)):
        rank = only[unit.id] if unit.id in only else min(range(ranks), key=lambda r: (loads[r], len(parts[r]), r))
        parts[rank].append(unit)
        loads[rank] += unit.weight
    order = {unit.id: position for position, unit in enumerate(units)}
    return [sorted(part, key=lambda u: order[u.id]) for part in parts]
