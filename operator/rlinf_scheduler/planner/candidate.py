"""A plan as the planner weighs it: which slots change hands together, who has them in which order, and the numbers of
each role. For: search makes them, simulate runs them, spec writes the chosen one down.

    Region        slots of one or several pools. One turn: its role has them to itself; several: a lease set.
    PlannedTurn   a role's workers there, per pool. They take the first slots of the region in each pool.
    Choice        what else is decided of a role: micro-batch, depth, option, resident or offloaded, stages of a cycle.

A role may have workers in several regions, a gang in one only: its ranks hold and let go together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rlinf_scheduler.planner.problem import PlanProblem

MAX_STAGES: Final = 64
"""The most questions of a front worker that are under way: more than its answerers keep apart."""


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    role: str
    workers: tuple[int, ...]
    """How many there are in each pool of the problem."""
    until: int = 0
    """Units, rounds of a gang, that end the turn; 0: the end of the step."""


@dataclass(frozen=True, slots=True)
class Region:
    slots: tuple[int, ...]
    """How many there are in each pool of the problem."""
    turns: tuple[PlannedTurn, ...]


def shape(region: Region) -> object:
    """What makes two regions the same place: slots, who has them in which order, and how many workers each."""
    return region.slots, tuple((turn.role, turn.workers) for turn in region.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    micro_batch: int = 1
    depth: int = 2
    option: int = 0
    stays: bool = False
    """Whether the role is resident while others have the turn; else it is offloaded."""
    stages: int = 1
    """Sub-batches, or units, of each worker of a cycle's front that are under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    regions: tuple[Region, ...]
    choices: Mapping[str, Choice]

    @property
    def slots(self) -> int:
        return sum(sum(region.slots) for region in self.regions)

    def workers(self, role: str) -> int:
        return sum(sum(turn.workers) for region in self.regions for turn in region.turns if turn.role == role)


@dataclass(frozen=True, slots=True)
class TooMuch:
    """A slot that cannot hold what a candidate puts there: the role at its peak, and what each other keeps."""

    pool: str
    room_mib: float
    role: str
    peak_mib: float
    kept: tuple[tuple[str, float], ...]

    @property
    def need_mib(self) -> float:
        return self.peak_mib + sum(mib for _, mib in self.kept)


def too_much(problem: PlanProblem, region: Region, choices: Mapping[str, Choice]) -> Iterator[TooMuch]:
    """Where memory does not suffice: slot by slot, the active role's peak and what the others on it keep."""
    for at, pool in enumerate(problem.pools):
        if not pool.memory_mib or not region.slots[at]:
            continue
        covered = {t.role: t.workers[at] * problem.role(t.role).slots_per_worker for t in region.turns if t.workers[at]}
        for reach in sorted(set(covered.values())):
            here = [problem.role(name) for name, slots in covered.items() if slots >= reach]
            keeps = {r.name: r.resident_mib if choices[r.name].stays else r.offloaded_mib for r in here}
            together = sum(keeps.values())
            for role in here:
                peak = max(role.options[choices[role.name].option].peak_mib, role.resident_mib)
                if peak + together - keeps[role.name] > pool.memory_mib:
                    kept = tuple((name, mib) for name, mib in keeps.items() if name != role.name)
                    yield TooMuch(pool.name, pool.memory_mib, role.name, peak, kept)


def pods(problem: PlanProblem, candidate: Candidate) -> tuple[int, ...]:
    """The pods of each pool: those that hold the candidate's slots, and those that are there anyway."""
    used = [sum(region.slots[at] for region in candidate.regions) for at in range(len(problem.pools))]
    return tuple(max(pool.least_pods, -(-n // pool.slots_per_pod)) for pool, n in zip(problem.pools, used, strict=True))


def paid(problem: PlanProblem, candidate: Candidate) -> int:
    """The slots that the candidate's pods have."""
    of_pools = zip(problem.pools, pods(problem, candidate), strict=True)
    return sum(min(pool.slots, n * pool.slots_per_pod) for pool, n in of_pools)
