"""How much a worker takes at once: micro-batches, stages, and which of them are worth a look."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rlinf_scheduler.planner.candidate import MAX_STAGES, Candidate, Choice
from rlinf_scheduler.planner.problem import CycleEdge, InLanes, InRounds, PlanProblem, RoleCosts

SMALL_SHARE: Final = 16
"""Units of a worker up to which, of few slots, small micro-batches of any size may matter; else halves, quarters and
eighths do."""


def share(problem: PlanProblem, draft: Candidate, role: RoleCosts) -> int:
    """Units of a step that a worker has, rounded up."""
    return -(-problem.units[role.name] // max(1, draft.workers(role.name)))


def most_stages(problem: PlanProblem, cycle: CycleEdge, draft: Candidate) -> int:
    """A front worker's share of a step, or of all that are open, where each unit travels by itself."""
    units = share(problem, draft, problem.role(cycle.front))
    return min(MAX_STAGES, units * (problem.staleness + 1) if cycle.is_single else units)


def choice(problem: PlanProblem, draft: Candidate, role: RoleCosts, *, option: int, stays: bool) -> Choice:
    """The largest micro-batch: fewest per-batch costs and changes of turn."""
    if role.name in problem.cycle_of:
        # A front takes its share of the step at once, and says itself what travels together.
        return Choice(micro_batch=1, depth=max(2, problem.units[role.name]), option=option, stays=stays)
    if isinstance(role.service, InLanes):
        return Choice(micro_batch=1, depth=max(2, role.service.lanes // 4), option=option, stays=stays)
    return Choice(micro_batch=share(problem, draft, role), option=option, stays=stays)


def streamed(problem: PlanProblem, candidate: Candidate) -> Candidate:
    """A quarter of their share at once, so that a role begins while the one before it works; two sub-batches."""
    choices = dict(candidate.choices)
    for role in problem.roles:
        if sizes := ladder(problem, candidate, role):
            quarter = -(-share(problem, candidate, role) // 4)
            choices[role.name] = replace(choices[role.name], micro_batch=min(sizes, key=lambda n: abs(n - quarter)))
    for cycle in problem.cycles:
        stages = most_stages(problem, cycle, candidate) if cycle.is_single else 2
        choices[cycle.front] = replace(choices[cycle.front], stages=stages)
    return replace(candidate, choices=choices)


def ladder(problem: PlanProblem, draft: Candidate, role: RoleCosts, *, every: bool = False) -> list[int]:
    """Micro-batches that are worth a look; none where the size changes nothing."""
    service = role.service
    if isinstance(service, InLanes) or role.name in problem.cycle_of:
        return []
    if isinstance(service, InRounds) and service.at_once:
        return []  # its share, as any other size is as good
    units = share(problem, draft, role)
    wanted = {units, -(-units // 2), -(-units // 4), -(-units // 8)}
    if every and units <= SMALL_SHARE:
        wanted |= {1, min(3, units)} | (set() if role.is_gang else {problem.units[role.name]})
    return sorted(wanted)
