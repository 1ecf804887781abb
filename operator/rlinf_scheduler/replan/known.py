"""What is known of a job as its next plan is decided: its plans, what was measured under each, and how far the
simulator is off for it. Pure. For: decide.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final

from rlinf_api.job import RLJobSpec
from rlinf_api.plan import PlanReason, RLPlanSpec
from rlinf_api.profile import Profile
from rlinf_scheduler.planner import spec as plans
from rlinf_scheduler.planner.problem import PlanProblem
from rlinf_scheduler.planner.simulate import Prediction, simulate
from rlinf_scheduler.replan.evidence import StepTimes, own_of, steps_of
from rlinf_scheduler.replan.fit import Fit, Unfit, fit

VERIFIED_STEPS: Final = 5  # fewer say nothing at 99%
PROBE_STEPS: Final = 3
"""The most steps of a probe: one warms up, two say what a batch costs."""
NO_NODE_S: Final = 600.0
"""The seconds until a pool is asked for more pods again, after one found no node; twice that after the next, and so
on."""
MOST_NO_NODE_S: Final = 16 * NO_NODE_S  # 2 h 40 min: a night has room for three tries


NOBODY_KILLED: Final[tuple[int, Mapping[str, int]]] = (0, MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    spec: RLPlanSpec
    failed: bool = False
    """Its preparation failed, or it may not be used."""
    was_in_force: bool = False
    """At some time, if only for a while: the operator takes it up again only where a person pins it."""
    is_in_force: bool = False
    """By the newest word of the operator, which may be ahead of the driver's last report."""
    no_node_at: float = 0.0
    """When it failed because a pod that it adds found no node, in seconds since 1970; 0: that is not why."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that a decision rests on. `considered`: the last step when all candidates were looked at and nothing better
    was found; `settled`: the revision that was in force then; `judged_by`: its newest reports then."""

    job: RLJobSpec
    plans: tuple[PlanRecord, ...]
    profiles: tuple[Profile, ...]
    considered: int = 0
    settled: int = 0
    judged_by: tuple[Profile, ...] = ()
    highest: int = 0
    """The highest revision that any plan of the name has, those included that cannot be read."""
    now: float = 0.0
    """Seconds since 1970."""
    again: bool = False
    """All candidates are to be looked at, though they were: the job was edited, or there may be nodes again."""
    killed: tuple[int, Mapping[str, int]] = NOBODY_KILLED
    """Under which revision, and how many workers of each role, for memory."""


@dataclass(frozen=True)
class Known:
    case: Case

    # --- what is known ------------------------------------------------------------------------------------------------
    @cached_property
    def records(self) -> Mapping[int, PlanRecord]:
        """Where two bear one revision, as a copy that somebody wrote does, the one that is in force."""
        return {record.spec.revision: record for record in sorted(self.case.plans, key=lambda one: one.is_in_force)}

    @property
    def record(self) -> PlanRecord | None:
        return self.records.get(self.case.profiles[-1].revision)

    @cached_property
    def plan(self) -> RLPlanSpec:
        assert self.record is not None
        return self.record.spec

    @cached_property
    def own(self) -> tuple[Profile, ...]:
        """The profiles of the plan in force."""
        return own_of(self.case.profiles, self.plan.revision)

    @cached_property
    def now(self) -> StepTimes:
        """The steps of the plan in force; once it is settled the newest ones, so that drift is not averaged away."""
        return steps_of(self.newest if self.is_settled else self.own)

    @property
    def newest(self) -> tuple[Profile, ...]:
        return self.newest_of(self.plan.revision)

    def newest_of(self, revision: int) -> tuple[Profile, ...]:
        """Reports, as many as make VERIFIED_STEPS: a plan that drifted is known by the work that it did last."""
        own, count = own_of(self.case.profiles, revision), 0
        for number, profile in enumerate(reversed(own), 1):
            if (count := count + profile.steps) >= VERIFIED_STEPS:
                return own[-number:]
        return own

    @property
    def is_settled(self) -> bool:
        """All candidates were looked at since it is in force. Not by the numbers of steps: a job may go back behind
        them, and the plan's first reports are forgotten."""
        return self.case.settled == self.plan.revision

    @property
    def wanted_steps(self) -> int:
        """The first step of a plan warms up; a gang's job of two steps has none to spare."""
        is_probe = self.plan.reason.code is PlanReason.PROBE
        return max(1, (self.probe_steps if is_probe else self.case.job.placement.profile_steps) - 1)

    @property
    def probe_steps(self) -> int:
        return min(PROBE_STEPS, self.case.job.placement.profile_steps)

    @cached_property
    def fitted(self) -> Fit | Unfit:
        return fit(self.case.job, self.case.profiles, plan=self.plan, most_pods=self.most_pods)

    # --- pools --------------------------------------------------------------------------------------------------------
    @cached_property
    def no_pods_until(self) -> Mapping[str, float]:
        """Until when pools are not asked for more pods, of those for which there was no node a while ago."""
        found = {}
        for pool in self.case.job.pools:
            failures, last = 0, 0.0
            for record in self.case.plans:
                before = self.records.get(record.spec.based_on.revision)
                if before is None or pods_of(record.spec, pool.name) <= pods_of(before.spec, pool.name):
                    continue
                if record.no_node_at:
                    failures, last = failures + 1, record.no_node_at
                elif not record.failed:
                    failures = 0
            until = last + min(MOST_NO_NODE_S, NO_NODE_S * 2 ** (failures - 1)) if failures else 0.0
            if until > self.case.now:
                found[pool.name] = until
        return found

    @property
    def most_pods(self) -> Mapping[str, int]:
        return {name: pods_of(self.plan, name) for name in self.no_pods_until}

    @cached_property
    def problem(self) -> PlanProblem:
        assert isinstance(self.fitted, Fit)
        return self.fitted.problem

    @cached_property
    def remaining(self) -> int:
        return max(0, self.case.job.flow.steps - self.case.profiles[-1].last_step)

    @property
    def next_revision(self) -> int:
        return max(self.case.highest, *self.records) + 1

    # --- expected and measured ----------------------------------------------------------------------------------------
    def predicted(self, plan: RLPlanSpec, problem: PlanProblem) -> Prediction:
        return simulate(problem, plans.read(problem, plan, self.case.job))

    @cached_property
    def off(self) -> float:
        """How many times longer a step takes than the simulator says."""
        return 1e3 * self.now.mean / self.predicted(self.plan, self.problem).period_ms

    def off_of(self, revision: int) -> float | None:
        """How many times longer a step took than the simulator says, under a plan that was in force before, by the work
        that was done last then."""
        record = self.records.get(revision)
        until = [p for p in self.case.profiles if p.revision <= revision]
        last = self.newest_of(revision)
        if record is None or not last:
            return None
        then = fit(self.case.job, until, plan=record.spec)
        if isinstance(then, Unfit):
            return None
        return 1e3 * steps_of(last).mean / self.predicted(record.spec, then.problem).period_ms


def pods_of(plan: RLPlanSpec, pool: str) -> int:
    return next((entry.pods for entry in plan.pools if entry.name == pool), 0)
