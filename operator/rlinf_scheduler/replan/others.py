"""Which plans could come next in a job, what a step of each is expected to take, and what the change to it costs. Pure.
For: decide.py, which asks for all of them once and chooses.

    others = Others(known)
    for other in others.of(fit.problem):       # the search's, then those that were in force before
        other.seconds, other.change_s          # 0.84 of a step; 0.2 where all processes stay

A plan is left out that the job's rules do not allow, that failed or was rolled back, or that moves a gang which has no
checkpoint to begin again on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from rlinf_api import plan_rules
from rlinf_api.job import PlacementMode
from rlinf_api.plan import PlanReason, PlanReasonModel, RLPlanSpec
from rlinf_scheduler.planner import search
from rlinf_scheduler.planner import spec as plans
from rlinf_scheduler.planner.candidate import Candidate
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.problem import PlanProblem
from rlinf_scheduler.planner.searching.runs import Scored
from rlinf_scheduler.planner.simulate import Prediction, simulate
from rlinf_scheduler.replan.known import Known, pods_of

IN_PLACE_S: Final = 0.2
"""A change that keeps all processes: docs/plans.md has 0.006 to 0.16 s."""
START_S: Final = 30.0
"""Until a worker that nobody has timed works: imports, weights, the first compile of an engine."""


@dataclass(frozen=True, slots=True)
class Other:
    """A plan that could come next: what a step is expected to take, and what the change to it costs."""

    seconds: float
    change_s: float
    price: float
    """What its slots cost, over those of the plan in force: 1 where slots come for nothing (spec.objective)."""
    candidate: Candidate
    prediction: Prediction
    plan: RLPlanSpec
    is_new: bool
    """It was never in force."""

    @property
    def worth_s(self) -> float:
        """Seconds of a step that are as good, on the slots of the plan in force."""
        return self.seconds * self.price


class Others:
    def __init__(self, known: Known) -> None:
        self._known, self._case, self._plan, self._problem = known, known.case, known.plan, known.problem

    # --- which there are ----------------------------------------------------------------------------------------------
    def of(self, problem: PlanProblem) -> Iterator[Other]:
        """Candidates of the search, by how far the simulator is off now, and plans that were in force before."""
        excluded = {content(self._plan)}
        earlier = list(self._earlier(excluded=excluded))
        known = excluded | {content(other.plan) for other in earlier}
        for scored, written in self.ranked(problem, excluded=known):
            seconds = 1e-3 * scored.prediction.period_ms * self._known.off
            yield self._other(written, scored.candidate, scored.prediction, seconds=seconds, is_new=True)
        yield from earlier

    def ranked(self, problem: PlanProblem, *, excluded: set[str]) -> Iterator[tuple[Scored, RLPlanSpec]]:
        """Candidates that a plan can say and the rules allow, the best first."""
        stands = plans.stands(problem, self._plan, self._case.job)
        keep = []
        if not self._case.profiles[-1].checkpoints:  # a gang that moves would have nothing to begin again on
            gangs = {role.name for role in problem.roles if role.is_gang}
            keep = [standing.region for standing in stands if not gangs.isdisjoint(standing.workers)]
        found = search.plan(problem, start=[plans.read(problem, self._plan, self._case.job)], keep=keep)
        if isinstance(found, Infeasible):
            return
        for scored in (found.best, *found.others):
            written = plans.write(
                problem, scored.candidate, scored.prediction, job=self._plan.job, revision=self._known.next_revision,
                reason=PlanReasonModel(code=PlanReason.PROFILED), instead_of=stands, channels=self._plan.channels,
                workers=self._plan.workers,
            )  # fmt: skip
            if written is not None and content(written) not in excluded and self._is_allowed(written):
                yield scored, written

    def _other(
        self, plan: RLPlanSpec, candidate: Candidate, prediction: Prediction, *, seconds: float, is_new: bool
    ) -> Other:
        return Other(
            seconds=seconds, change_s=self.change_s(plan), price=self.price(plan), candidate=candidate,
            prediction=prediction, plan=plan, is_new=is_new,
        )  # fmt: skip

    def _earlier(self, *, excluded: set[str]) -> Iterator[Other]:
        """Plans that were in force before, by how far the simulator was off then; of the same content the newest."""
        seen = set(excluded)
        for record in reversed(self._case.plans):
            own = content(record.spec)
            if own in seen or record.failed or not self._is_allowed(record.spec):
                continue
            if (off := self._known.off_of(record.spec.revision)) is None:
                continue
            seen.add(own)
            candidate = plans.read(self._problem, record.spec, self._case.job)
            prediction = simulate(self._problem, candidate)
            seconds = 1e-3 * prediction.period_ms * off
            yield self._other(record.spec, candidate, prediction, seconds=seconds, is_new=False)

    def _is_allowed(self, plan: RLPlanSpec) -> bool:
        return place(plan) not in self._given_up and self.may_be_used(plan)

    def may_be_used(self, plan: RLPlanSpec) -> bool:
        """By the job as it is now, whatever became of the plan."""
        side_by_side = self._case.job.placement.mode is PlacementMode.DISAGGREGATED  # an edit, maybe, since it was made
        if side_by_side and plan.lease_sets:
            return False
        if not self._case.profiles[-1].checkpoints and self._moves_a_gang(plan):
            return False
        return plan_rules.allows(plan, self._case.job)

    def _moves_a_gang(self, plan: RLPlanSpec) -> bool:
        """It would have to begin again on a checkpoint."""
        before, after = _slots(self._plan), _slots(plan)
        return any(before.get(role.name) != after.get(role.name) for role in self._problem.roles if role.is_gang)

    @cached_property
    def rolled_back(self) -> set[int]:
        return {p.spec.based_on.revision for p in self._case.plans if p.spec.reason.code is PlanReason.ROLLED_BACK}

    @cached_property
    def _given_up(self) -> set[object]:
        """Where workers were in what failed, or was rolled back: other sizes there are no other plan."""
        return {
            place(p.spec)
            for p in self._case.plans
            if (p.failed and not p.no_node_at) or p.spec.revision in self.rolled_back
        }

    # --- what they cost -----------------------------------------------------------------------------------------------
    def price(self, plan: RLPlanSpec) -> float:
        return math.exp(self._problem.price(self.paid(plan)) - self._problem.price(self.paid(self._plan)))

    def paid(self, plan: RLPlanSpec) -> int:
        """Slots of its pods."""
        return sum(pods_of(plan, pool.name) * pool.slots_per_pod for pool in self._problem.pools)

    def change_s(self, plan: RLPlanSpec) -> float:
        """What a change to it costs: nothing starts again where all workers stay on their slots."""
        before, after = _slots(self._plan), _slots(plan)
        moved = {role for role in after if before.get(role) != after[role]}
        if not moved:
            return IN_PLACE_S
        starts = {
            part.name: move.seconds.value
            for part in self._case.profiles[-1].roles
            for move in part.moves
            if move.what == "start"
        }
        return IN_PLACE_S + max(starts.get(role, START_S) for role in moved)


def content(plan: RLPlanSpec) -> str:
    """What makes two plans the same to execute."""
    return plan.model_dump_json(include={"pools", "workers", "lease_sets", "channels", "cycles"})


def place(plan: RLPlanSpec) -> object:
    return tuple(sorted(_places(plan).items()))


def _slots(plan: RLPlanSpec) -> dict[str, tuple[object, ...]]:
    """The slots of each role, and whether it takes turns on them. Who has others starts again."""
    shared = {turn.role for lease in plan.lease_sets for turn in lease.turns}
    found: dict[str, tuple[object, ...]] = {}
    for entry in plan.workers:
        found[entry.role] = (*found.get(entry.role, ()), entry.count, entry.slots, entry.role in shared)
    return found


def _places(plan: RLPlanSpec) -> dict[str, tuple[object, ...]]:
    """The slots of each role, and whom it shares them with."""
    shared = [(lease.slots, tuple(turn.role for turn in lease.turns)) for lease in plan.lease_sets]
    found: dict[str, tuple[object, ...]] = {}
    for entry in plan.workers:
        sets = tuple(sorted(slots for slots, roles in shared if entry.role in roles))
        found[entry.role] = (*found.get(entry.role, ()), entry.count, entry.slots, sets)
    return found
