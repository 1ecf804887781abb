"""Whether a running job gets another plan, and which. Pure: the same case has the same answer, on any machine, so that
a scheduler that is started again goes on as the one before.

    decide(case) -> Stay(code, why) | NextPlan(plan)

A job's first plans go like this; each line is one report of its driver:

    p1 Initial    steps 1, 2 measured           Stay(Profiling)
                  step 3; batches had one size   NextPlan: p2 Probe, the same with half of each micro-batch, in place
    p2 Probe      two steps measured            NextPlan: p3 Profiled, the best that the simulator knows, if that pays
    p3 Profiled   five steps measured           Stay(Verified), or NextPlan: p4 RolledBack, which is p2 again
                  ... 10% slower than they were  NextPlan: p5 Drift, if another plan is better by now

What a plan is expected to take is what the simulator says of it times how far the simulator is off for this job: for a
plan that was in force by its own steps, for any other by those of the plan in force. A change has to save more than
SAFETY times what it costs, over the steps that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from rlinf_api import plan_rules
from rlinf_api.job import PlacementMode
from rlinf_api.plan import (
    MOST_STAGES,
    Alternative,
    BasedOn,
    ChannelPlan,
    CyclePlan,
    PlanReason,
    PlanReasonModel,
    RLPlanSpec,
)
from rlinf_scheduler.planner import spec as plans
from rlinf_scheduler.planner import words
from rlinf_scheduler.planner.problem import ZERO, PlanProblem, Provenance, RoleCosts
from rlinf_scheduler.planner.simulate import Prediction, simulate
from rlinf_scheduler.replan.evidence import StepTimes, computed, slower, steps_of
from rlinf_scheduler.replan.fit import Fit, Unfit
from rlinf_scheduler.replan.known import VERIFIED_STEPS, Case, Known, PlanRecord
from rlinf_scheduler.replan.others import Other, Others, content, place

MIN_GAIN: Final = 0.05
"""The share of the step that another plan must save: the simulator is off by 3% in the median and 8% at most in 95 of
100."""
PROBE_GAIN: Final = 0.10
"""The share of the step that a plan must promise, if nothing that is assumed cost anything, to be tried."""
SAFETY: Final = 2.0
"""Times the cost of a change that it must save: what it costs is guessed more roughly than what it saves."""
PROBE_SHARE: Final = 0.05
"""The share of the time that is left that a probe may cost at most."""
WORSE: Final = 0.02  # than before, beyond noise: less is not worth another change
KILLED: Final = 2
"""Workers of one role, for memory, that take a plan back which nobody has judged: one may be an accident."""
DRIFT: Final = 0.10  # of the step, up or down
ROLE_DRIFT: Final = 0.15
"""The change in what a role on the critical path computes in a step, as a share, up or down: others may hide it from
the step."""
CODES: Final = (
    "Off", "Pinned", "Pending", "Profiling", "Unfit", "Best", "Verifying", "Verified", "NotWorthIt",
    "NoneLeft",
)  # fmt: skip
"""Why a plan stays, in one word."""
WRITTEN: Final = (
    PlanReason.PROBE, PlanReason.PROFILED, PlanReason.DRIFT, PlanReason.CAPACITY_CHANGED, PlanReason.ROLLED_BACK,
)  # fmt: skip
"""Why another is written."""
ALTERNATIVES: Final = 4  # runners-up that a plan names: what a person reads


@dataclass(frozen=True, slots=True)
class Stay:
    """`code`: one of CODES."""

    code: str
    why: str
    considered: int = 0
    """The last step that was looked at with all candidates; 0: none was."""
    again_at: float = 0.0
    """When there may be nodes for more pods again, in seconds since 1970; 0: nothing was left out for want of them."""


@dataclass(frozen=True, slots=True)
class NextPlan:
    plan: RLPlanSpec


def decide(case: Case) -> Stay | NextPlan:
    return _Decision(case).made()


class _Decision(Known):
    @cached_property
    def others(self) -> Others:
        return Others(self)

    # --- in which order it is asked -----------------------------------------------------------------------------------
    def made(self) -> Stay | NextPlan:
        job, newest = self.case.job, self.case.profiles[-1]
        if job.placement.mode is PlacementMode.PINNED:
            return Stay("Pinned", f"spec.placement.pin keeps {job.placement.pin}")
        if not job.placement.profile_steps:
            return Stay("Off", "spec.placement.profileSteps is 0")
        if self.record is None:
            return Stay("Pending", f"revision {newest.revision}, which was measured, is not there any more")
        if back := self._from_too_little_memory():
            return back
        if waiting := [p.spec.revision for p in self.case.plans if self._is_awaited(p)]:
            return Stay("Pending", f"revision {max(waiting)} is on its way")
        if unheard := self._in_force_besides:
            return Stay("Pending", f"revision {max(unheard)} is in force by now, and none of its steps is reported yet")
        if self.now.count < self.wanted_steps:
            return Stay(
                "Profiling",
                f"{self.now.count} of {self.wanted_steps} steps of revision {newest.revision} are measured",
            )
        if isinstance(self.fitted, Unfit):
            return Stay("Unfit", str(self.fitted))
        if self.is_unverified:
            if self.now.count < VERIFIED_STEPS:
                return Stay(
                    "Verifying",
                    f"{self.now.count} of {VERIFIED_STEPS} steps of revision {newest.revision} are measured",
                )
            if back := self._back():
                return back
        if self.is_settled:
            if not self._has_drifted and not self.case.again:
                said = f"revision {newest.revision} takes {self.now.mean:.4g} s a step, as it did"
                return Stay("Verified", said, again_at=self._again_at)
        elif probe := self._probe_of_sizes(self.fitted):
            return probe
        return self._choice(self.fitted)

    @property
    def _in_force_besides(self) -> list[int]:
        """By the operator's word, of which no step is reported yet: the driver's last report is of the plan before."""
        revisions = [p.spec.revision for p in self.case.plans if p.is_in_force]
        return [revision for revision in revisions if revision != self.plan.revision]

    def _is_awaited(self, record: PlanRecord) -> bool:
        """Newer, and the operator takes it up by itself or once somebody has approved of it. It passes over a person's
        plan that is not pinned, what an edit of the job no longer allows, and one that was left for that in force."""
        plan = record.spec
        if plan.revision <= self.plan.revision or record.failed or plan.source != "Scheduler" or record.was_in_force:
            return False
        return plan_rules.allows(plan, self.case.job)

    # --- back ---------------------------------------------------------------------------------------------------------
    @property
    def is_unverified(self) -> bool:
        return self._is_chosen(self.plan) and not self.is_settled

    def _is_chosen(self, plan: RLPlanSpec) -> bool:
        """Instead of another, which is known."""
        chosen = plan.reason.code in (PlanReason.PROFILED, PlanReason.DRIFT, PlanReason.CAPACITY_CHANGED)
        return chosen and plan.based_on.revision in self.records

    def _from_too_little_memory(self) -> NextPlan | None:
        """The way back to what a plan came from under which workers die before it was judged: steps in which somebody
        is lost are in no profile, so it might never be."""
        (revision, killed), newest = self.case.killed, self.case.profiles[-1].revision
        role = max(killed, key=lambda name: killed[name], default="")
        record = self.records.get(revision)
        if record is None or killed.get(role, 0) < KILLED or not self._is_chosen(record.spec):
            return None
        is_judged = revision == newest and self.is_settled
        later = [r for r, other in self.records.items() if self._is_awaited(other)]
        is_over = revision < max([newest, *later, *self._in_force_besides])
        base = self.records[record.spec.based_on.revision].spec
        if is_judged or is_over or isinstance(self.fitted, Unfit) or not self.others.may_be_used(base):
            return None
        said = (
            f"{killed[role]} workers of role {role!r} were killed for memory under revision {revision} before it was "
            f"judged; revision {base.revision} comes again, and {revision} is not tried again"
        )
        return self._written(base, PlanReason.ROLLED_BACK, said, instead_of=revision)

    def _back(self) -> NextPlan | None:
        """The way back to what the plan came from, where that would take less for the work that is done now, its slots'
        price included, and the change pays over the steps that are left."""
        base = self.records[self.plan.based_on.revision].spec
        off = self.off_of(base.revision)
        if off is None or not self.others.may_be_used(base):
            return None
        expected = 1e-3 * self.predicted(base, self.problem).period_ms * off
        worth_s = expected * self.others.price(base)
        before = steps_of(self.newest_of(base.revision))
        if not slower(self.now, before.scaled_to(worth_s), by=WORSE):
            return None
        if (self.now.mean - worth_s) * self.remaining <= SAFETY * self.others.change_s(base):
            return None
        back = self._instead_of_a_probe(base)
        expected *= self.predicted(back, self.problem).period_ms / self.predicted(base, self.problem).period_ms
        said = (
            f"revision {self.plan.revision} takes {self.now.mean:.4g} s a step ({self.now.count} steps), and revision "
            f"{back.revision} would take {expected:.4g} s for the same work; it is not tried again"
        )
        return self._written(back, PlanReason.ROLLED_BACK, said, seconds=expected)

    def _instead_of_a_probe(self, base: RLPlanSpec) -> RLPlanSpec:
        """The sizes of a probe were there to be measured only: where the simulator, which knows by now what a batch
        costs, has those of before quicker, they are what is gone back to."""
        before = self.records.get(base.based_on.revision) if base.reason.code is PlanReason.PROBE else None
        if before is None or self.off_of(before.spec.revision) is None or not self.others.may_be_used(before.spec):
            return base
        return min((base, before.spec), key=lambda plan: self.predicted(plan, self.problem).period_ms)

    # --- probes -------------------------------------------------------------------------------------------------------
    def _probe_of_sizes(self, fitted: Fit) -> NextPlan | None:
        """The same plan with half of each micro-batch, and of each sub-batch of a cycle, whose size never changed: two
        sizes make a line."""
        if self.case.job.placement.apply != "Auto":
            return None  # each would wait for a person
        if self.plan.reason.code is PlanReason.PROBE:
            return None
        if any(p.spec.reason.code is PlanReason.PROBE for p in self.case.plans):
            return None  # it was tried, and batches are of one size all the same
        channels: dict[str, ChannelPlan] = {channel.name: channel for channel in self.plan.channels}
        halved = []
        for name in fitted.one_size:
            channel = channels.get(name, ChannelPlan(name=name))
            if channel.micro_batch > 1:
                smaller = channel.micro_batch // 2
                depth = -(-channel.micro_batch * channel.depth // smaller)  # as many units are under way
                channels[name] = plans.sized(channel, micro_batch=smaller, depth=depth)
                halved.append(f"{name} with half of the micro-batch")
        cycles = {frozenset(cycle.roles): cycle for cycle in self.plan.cycles}
        for ends in fitted.one_stage:
            cycle = cycles.get(frozenset(ends), CyclePlan(roles=list(ends)))
            if 2 * cycle.stages <= MOST_STAGES:
                cycles[frozenset(ends)] = cycle.model_copy(update={"stages": 2 * cycle.stages})
                halved.append(f"the cycle of {' and '.join(ends)} with twice the stages")
        changed = {"channels": list(channels.values()), "cycles": list(cycles.values())}
        probe = self.plan.model_copy(update=changed)
        # Twice as many batches cost what they cost by themselves once more: nothing, all of the step, or between.
        cost = self.probe_steps * self.now.mean / 2 + 2 * self.others.change_s(probe)
        if not halved or cost > PROBE_SHARE * self.remaining * self.now.mean:
            return None
        said = (
            f"what a batch costs by itself is not known where all have one size: {', '.join(halved)}, for "
            f"{self.probe_steps} steps"
        )
        return self._written(probe, PlanReason.PROBE, said)

    def _probe_of_costs(self, fitted: Fit, *, best_s: float) -> NextPlan | None:
        """The plan that would be best if what nobody has measured cost nothing, where it promises much. One in a job:
        what is still assumed behind it no other would measure either."""
        probes = [p.spec for p in self.case.plans if p.spec.reason.code is PlanReason.PROBE]
        has_tried = any(place(p) != place(self.records[p.based_on.revision].spec) for p in probes
                        if p.based_on.revision in self.records)  # fmt: skip
        if not fitted.assumed or has_tried or self.case.job.placement.apply != "Auto":
            return None
        hopeful = replace(fitted.problem, roles=tuple(_free_moves(role) for role in fitted.problem.roles))
        for scored, written in self.others.ranked(hopeful, excluded={content(self.plan)}):
            price = self.others.price(written)
            hoped, feared = (
                1e-3 * simulate(p, scored.candidate).period_ms * self.off * price for p in (hopeful, fitted.problem)
            )
            steps = self.probe_steps
            cost = steps * max(0.0, feared - self.now.mean) + 2 * self.others.change_s(written)
            left = self.remaining * self.now.mean
            if feared <= best_s or hoped > (1 - PROBE_GAIN) * best_s or cost > PROBE_SHARE * left:
                return None  # it needs no probe, or is not worth one
            said = (
                f"{words.describe(hopeful, scored.candidate)} would take {hoped:.4g} s a step instead of {best_s:.4g} "
                f"if {', '.join(fitted.assumed)} cost nothing, and nobody has measured that; {steps} steps will tell"
            )
            return self._written(written, PlanReason.PROBE, said, seconds=hoped)
        return None

    @property
    def _again_at(self) -> float:
        return min(self.no_pods_until.values(), default=0.0)

    # --- the choice ---------------------------------------------------------------------------------------------------
    @property
    def _has_drifted(self) -> bool:
        """Against the steps since it was settled, those included by which it was, and against the latter alone."""
        rest = self.own[: len(self.own) - len(self.newest)]
        since = [p for p in rest if p.last_step > self.case.considered - VERIFIED_STEPS]
        before = (since, self.case.judged_by)  # what drifts slowly moves the first with it
        if any(_differs(self.now, steps_of(judged), by=DRIFT) for judged in before):
            return True
        critical = {role for role, _, _ in self.predicted(self.plan, self.problem).critical}
        return any(
            _differs(computed(self.newest, role), computed(judged, role), by=ROLE_DRIFT)
            for role in sorted(critical) for judged in before
        )  # fmt: skip

    def _choice(self, fitted: Fit) -> Stay | NextPlan:
        last, current_s = self.case.profiles[-1].last_step, self.now.mean
        others = list(self.others.of(fitted.problem))
        best_s = min([current_s, *(other.worth_s for other in others)])
        is_first = not self.is_settled
        if is_first and (probe := self._probe_of_costs(fitted, best_s=best_s)):
            return probe
        again_at = self._again_at
        if not others:
            return Stay("NoneLeft", "no other plan is allowed", considered=last, again_at=again_at)
        best = min(filter(self._may_be_better, others), key=self._total_s, default=None)
        if best is not None and self._total_s(best) < current_s * self.remaining:
            return self._next(best, others, fitted.problem, is_first=is_first)
        if self.now.count < VERIFIED_STEPS and any(self._total_s(o) < current_s * self.remaining for o in others):
            return Stay(
                "Verifying",
                f"{self.now.count} of {VERIFIED_STEPS} steps of revision {self.plan.revision} are measured, which do "
                f"not say for sure whether a plan before it was quicker",
            )
        if (fewer := self._on_fewer_slots(others)) is not None:
            return self._next(fewer, others, fitted.problem, is_first=is_first)
        code, why = self._none_pays(min(others, key=lambda other: other.worth_s), fitted.problem)
        return Stay(code, why, considered=last, again_at=again_at)

    def _may_be_better(self, other: Other) -> bool:
        """What was in force before has to be surely better, by its own steps, as it would have to be to be taken back:
        of two plans as good as each other now this one and now that one has had the quicker steps. Not instead of a
        probe, which is there to be measured only."""
        if other.is_new or self.plan.reason.code is PlanReason.PROBE:
            return True
        before = steps_of(self.newest_of(other.plan.revision))
        return slower(self.now, before.scaled_to(other.worth_s), by=WORSE)

    def _on_fewer_slots(self, others: Sequence[Other]) -> Other | None:
        """Whose pods are fewer and whose steps are as long: the gain that they were made for is gone. It saves slots
        and no time, so what the change costs is bounded as a probe's is; what was rolled back makes it ask for more."""
        doubt = 1 + MIN_GAIN * (2 ** len(self.others.rolled_back) - 1)
        now, most_s = self.others.paid(self.plan), PROBE_SHARE * self.remaining * self.now.mean
        fewer = [
            other for other in others
            if self.others.paid(other.plan) < now
            and other.seconds * doubt <= (1 + WORSE) * self.now.mean
            and SAFETY * other.change_s <= most_s
        ]  # fmt: skip
        return min(fewer, key=lambda other: (self.others.paid(other.plan), other.seconds), default=None)

    def _none_pays(self, best: Other, problem: PlanProblem) -> tuple[str, str]:
        """Code and sentence; `best` has the shortest step, whatever the change to it costs."""
        current_s = self.now.mean
        gain = current_s - best.worth_s
        said = (
            f"revision {self.plan.revision} takes {current_s:.4g} s a step, the best other would take "
            f"{best.seconds:.4g} s ({words.describe(problem, best.candidate)}){self._priced(best)}"
        )
        for pool, until in self.no_pods_until.items():
            said += f"; more pods of pool {pool} are not tried for {until - self.case.now:.0f} s, as one had no node"
        if gain < MIN_GAIN * current_s:
            return "Best", f"{said}; that is no gain of {MIN_GAIN:.0%}"
        if not self._may_be_better(best):
            return "Best", f"{said}; by the steps of both that is not sure"
        return "NotWorthIt", (
            f"{said}: {gain * self.remaining:.4g} s over the {self.remaining} steps that are left, and a change costs "
            f"about {best.change_s:.4g} s"
        )

    def _next(self, best: Other, others: Sequence[Other], problem: PlanProblem, *, is_first: bool) -> NextPlan:
        instead_s = self.now.mean
        if self.plan.reason.code is PlanReason.PROBE:  # what it is better than is the best that was there before
            instead_s = min([instead_s, *(other.seconds for other in others if not other.is_new and other is not best)])
        said = f"{words.describe(problem, best.candidate)}: {best.seconds:.4g} s a step"
        if not best.is_new:
            said += ", as was measured before"
        elif best.seconds <= instead_s:
            said += f" instead of {instead_s:.4g}, which saves {1 - best.seconds / instead_s:.0%}"
        else:
            said += f" instead of {instead_s:.4g}"
        said += self._priced(best)
        said += f"; a step of revision {self.plan.revision} takes {self.off:.3f} times what the simulator says"
        code = PlanReason.CAPACITY_CHANGED if self.case.again else PlanReason.DRIFT
        return self._written(
            best.plan, PlanReason.PROFILED if is_first else code, said, seconds=best.seconds,
            prediction=best.prediction, others=self._runners_up(problem, best, others),
        )  # fmt: skip

    def _total_s(self, other: Other) -> float:
        """The seconds that the steps that are left, and the change, are expected to cost. What was never in force has
        to promise MIN_GAIN more than what it would replace, twice that after each plan that was rolled back; what was
        in force, more than the noise, unless what it replaces was there to be measured only."""
        was_probe = self.plan.reason.code is PlanReason.PROBE
        margin = MIN_GAIN * 2 ** len(self.others.rolled_back) if other.is_new else 0.0 if was_probe else WORSE
        return (1 + margin) * other.worth_s * self.remaining + SAFETY * other.change_s

    def _priced(self, other: Other) -> str:
        """What it costs where slots have a price, and what it gives back where they have none."""
        paid, now = self.others.paid(other.plan), self.others.paid(self.plan)
        is_said = paid < now or (self.problem.has_price and paid > now)
        return f", on {paid} slots instead of {now}" if is_said else ""

    def _runners_up(self, problem: PlanProblem, best: Other, others: Sequence[Other]) -> list[Alternative]:
        rest = sorted((other for other in others if other is not best), key=lambda other: other.worth_s)
        return [
            Alternative(
                summary=words.describe(problem, other.candidate),
                period_seconds=round(other.seconds, 6),
                lost_because=str(
                    words.lost_because(
                        best.prediction,
                        other.prediction,
                        more_slots=self.others.paid(other.plan) - self.others.paid(best.plan),
                    )
                ),
            )
            for other in rest[:ALTERNATIVES]
        ]

    # --- writing ------------------------------------------------------------------------------------------------------
    def _written(
        self,
        plan: RLPlanSpec,
        code: PlanReason,
        said: str,
        *,
        seconds: float | None = None,
        prediction: Prediction | None = None,
        others: Sequence[Alternative] = (),
        instead_of: int = 0,
    ) -> NextPlan:
        """`seconds`: that it is expected to take a step. `instead_of`: a revision, where it is another than that which
        was measured last."""
        of = prediction or self.predicted(plan, self.problem)
        expected = seconds if seconds is not None else 1e-3 * of.period_ms * self.off
        return NextPlan(
            plan.model_copy(
                update={
                    "job": self.plan.job,
                    "revision": self.next_revision,
                    "based_on": BasedOn(revision=instead_of or self.plan.revision, profile=self.case.profiles[-1].key),
                    "source": "Scheduler",
                    "predicted": plans.predicted(of, scale=1e3 * expected / of.period_ms),
                    "reason": PlanReasonModel(code=code, message=said),
                    "alternatives": list(others),
                }
            )
        )


def _differs(these: StepTimes, those: StepTimes, *, by: float) -> bool:
    return slower(these, those, by=by) or slower(those, these, by=by)


def _free_moves(role: RoleCosts) -> RoleCosts:
    load = ZERO if role.load_ms.by is Provenance.ASSUMED else role.load_ms
    offload = ZERO if role.offload_ms.by is Provenance.ASSUMED else role.offload_ms
    return replace(role, load_ms=load, offload_ms=offload)
