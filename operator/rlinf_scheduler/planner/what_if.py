"""What more capacity would bring: a slot more of each pool, a tenth more memory of its slots. Pure; asked only where
somebody wants to know, as each answer takes as long as a plan. For: explanations, `what-if`.

An answer is never worse than the one that it is compared with, which is tried on the larger pools first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rlinf_scheduler.planner.candidate import Candidate, Region
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.problem import PlanProblem, Pool
from rlinf_scheduler.planner.search import Found, plan

MORE_MEMORY: Final = 0.1
NOTHING: Final = 1e-3
"""Share of a step below which nothing is gained: less than a run of the job would show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """`period_ms`: of the best plan then; None: there is none then either. `saves`: share of the period of today; None:
    there is no plan today.

    >>> print(Gain(pool="gpu", slots=1, memory=0.0, period_ms=90.0, saves=0.1))
    1 slot more of pool gpu: 90.0 ms a step, 10.0% less
    >>> print(Gain(pool="gpu", slots=0, memory=0.1, period_ms=90.0, saves=None))
    10% more memory of pool gpu's slots: a plan of 90.0 ms a step, where there is none today
    """

    pool: str
    slots: int
    memory: float
    period_ms: float | None
    saves: float | None

    def __str__(self) -> str:
        what = f"{self.slots} slot more of pool {self.pool}"
        if not self.slots:
            what = f"{self.memory:.0%} more memory of pool {self.pool}'s slots"
        if self.period_ms is None:
            return f"{what}: no plan either"
        if self.saves is None:
            return f"{what}: a plan of {self.period_ms:.1f} ms a step, where there is none today"
        if self.saves < NOTHING:
            return f"{what}: no gain"
        return f"{what}: {self.period_ms:.1f} ms a step, {self.saves:.1%} less"


def what_if_more(problem: PlanProblem, answer: Found | Infeasible, *, effort: int | None = None) -> tuple[Gain, ...]:
    """`answer`: of `plan(problem)`. The largest gain first."""
    return tuple(sorted(_gains(problem, answer, effort), key=_worth, reverse=True))


def _worth(gain: Gain) -> float:
    if gain.period_ms is None:
        return -1.0
    return 1.0 if gain.saves is None else gain.saves


def _gains(problem: PlanProblem, answer: Found | Infeasible, effort: int | None) -> Iterator[Gain]:
    for at, pool in enumerate(problem.pools):
        larger = replace(pool, slots=pool.slots + 1)
        yield _gain(problem, answer, effort, at, larger, slots=1, memory=0.0)
        if pool.memory_mib:
            roomier = replace(pool, memory_mib=pool.memory_mib * (1 + MORE_MEMORY))
            yield _gain(problem, answer, effort, at, roomier, slots=0, memory=MORE_MEMORY)


def _gain(
    problem: PlanProblem,
    answer: Found | Infeasible,
    effort: int | None,
    at: int,
    pool: Pool,
    *,
    slots: int,
    memory: float,
) -> Gain:
    pools = (*problem.pools[:at], pool, *problem.pools[at + 1 :])
    today = answer.best if isinstance(answer, Found) else None
    start = [today.candidate, *_wider(problem, today.candidate, at)] if today else []
    found = plan(replace(problem, pools=pools), effort=effort, start=start)
    if isinstance(found, Infeasible):
        return Gain(pool=pool.name, slots=slots, memory=memory, period_ms=None, saves=None)
    period = found.best.prediction.period_ms
    saves = None
    if today is not None:
        saves = max(0.0, 1 - period / today.prediction.period_ms) if today.prediction.period_ms else 0.0
    return Gain(pool=pool.name, slots=slots, memory=memory, period_ms=period, saves=saves)


def _wider(problem: PlanProblem, candidate: Candidate, pool: int) -> Sequence[Candidate]:
    """The slot more given to each region in turn, where it makes a worker more."""
    found = []
    for number, region in enumerate(candidate.regions):
        slots = tuple(n + (p == pool) for p, n in enumerate(region.slots))
        turns = tuple(
            replace(turn, workers=tuple(n + (p == pool) for p, n in enumerate(turn.workers)))
            if (turn.workers[pool] + 1) * problem.role(turn.role).slots_per_worker <= slots[pool]
            and turn.role in problem.pools[pool].roles
            else turn
            for turn in region.turns
        )
        regions = (*candidate.regions[:number], Region(slots, turns), *candidate.regions[number + 1 :])
        found.append(replace(candidate, regions=regions))
    return found
