"""Which plan is in force, which one is on its way, and what the driver must be told. Pure.

    Auto     the newest plan of the scheduler; one that a person wrote only once it is in force, and of those that were
             in force before an older one none but what a person pins. With apply: OnApproval the newest that bears the
             annotation rlinf.io/approved-by; a job begins without one
    Pinned   the plan that spec.placement.pin names, older ones too; without it, whatever is in force stays

The driver is soft state: one that names no plan is told the one in force. One that names a plan is right: it alone puts
plans in force, and may have finished a change that nobody had time to write down. A plan that cannot be used, or whose
preparation failed, is passed over with its reason, and what is in force stays as it is.

So does a plan in force that an edited spec no longer allows, or whose object somebody deleted: its pods are at work,
and taken from under a step they would stall it for good. It keeps them until another is in force; `Auto` asks for one.

`Auto` also asks for one where pods of the plan in force find no node and their pools may have fewer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from rlinf_api import conditions, names, plan_rules, times
from rlinf_api.conditions import Condition, JobCondition, PlanCondition, Reason, Status
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import PlacementMode, RLJobSpec, as_range
from rlinf_api.plan import MeasuredPeriod, PlanReason, RLPlanStatus
from rlinf_api.report import DriverReport, DriverState
from rlinf_operator.manifests.metadata import JobMeta, Target
from rlinf_operator.policies import queueing
from rlinf_operator.policies.pod_view import PodView
from rlinf_operator.reconcile.state import Instruct, Observed, PlanView

PLANS_IN_VAIN: Final = 8
"""Plans in a row that could not be used before no other is asked for, but one for each further edit of the spec. 8:
each edit may spoil one that is on its way; a planner and a check that disagree, or a driver that refuses each, would
otherwise write plans without end."""
PLANS_KEPT: Final = 16
"""Newest plans of the scheduler that are kept, besides those that somebody may need. 16: twice PLANS_IN_VAIN, which are
counted by them, and what a person looks through; a job of months would leave thousands."""
FEWEST_MEASURED: Final = 5  # steps that a plan's status tells of: as many as it is judged by
NORMAL_95: Final = 1.96
PREPARE_FAILED: Final = "PrepareFailed"
ENDED: Final = (DriverState.COMPLETE, DriverState.FAILED, DriverState.DRAINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    current: PlanView | None = None
    not_allowed: str = ""
    """Why the plan in force could not come into force today."""
    pods_kept: Mapping[str, int] = field(default_factory=dict)
    """Pods per pool, as they were wanted last, where the plan in force cannot be read any more."""
    pending: PlanView | None = None
    unapproved: PlanView | None = None
    """The newest plan of the scheduler, which waits for the annotation of a person."""
    passed_over: tuple[PlanView, ...] = ()
    """Newest plans that cannot be used, each with its problem."""
    in_doubt: frozenset[str] = frozenset()
    """Pods that the plan on its way adds and that have ended, by name, while no driver says which plan is in force:
    they are its trouble or the job's."""
    failed: PlanView | None = None
    """The plan that was on its way and cannot come into force, with its problem: to be written into its status."""
    failed_for: str = PREPARE_FAILED
    """In one word: the scheduler asks for no more pods for a while after `Unschedulable`."""
    highest_revision: int = 0
    pin_problem: str = ""
    """Why the pinned plan is not used."""
    pin_reason: Reason = Reason.PIN_REFUSED
    request: str = ""
    """Reason for asking the scheduler; empty where an allowed plan is in force, or where a person has chosen one."""
    homed: Mapping[str, int] = field(default_factory=dict)
    """Pods of each pool that have nodes, where others of the plan in force find none and fewer would do."""
    in_vain: bool = False
    """So many plans in a row came to nothing that no other is asked for."""

    def pods(self) -> dict[str, int]:
        """Pods per pool; while a plan is on its way, as many as either needs."""
        wanted: dict[str, int] = {}
        for pods_of in (self.pods_in_force(), _pods(self.pending)):
            for pool, pods in pods_of.items():
                wanted[pool] = max(wanted.get(pool, 0), pods)
        return wanted

    def fewest(self) -> dict[str, int]:
        """Pods per pool with which there would be a plan, too; nobody makes another for a person's."""
        if self.current is None or _is_users(self.current):
            return self.pods_in_force()
        return dict(self.current.fewest)

    def pods_in_force(self) -> dict[str, int]:
        return _pods(self.current) or dict(self.pods_kept)


def choose(
    observed: Observed,
    spec: RLJobSpec,
    report: DriverReport | None,
    *,
    fresh: bool = False,
    no_node_since: datetime | None = None,
    most: Mapping[str, int] | None = None,
    homeless_since: datetime | None = None,
) -> PlanChoice:
    """`fresh`: no pod of this life was made yet, so that no plan can be in force. `no_node_since`: a pod that is as old
    and has no node yet is taken to find none; None: a driver is at work that has yet to say which plan is in force.
    `most`: pods per pool that the job's queue admitted; None: nobody counts them. `homeless_since`: pods of the plan in
    force that are as old and have no node are done without, where fewer are allowed; None: they are waited for."""
    usable, passed_over = [], []
    for plan in sorted(observed.plans, key=lambda p: p.revision):
        problem = _problem(plan, observed, spec) or queueing.exceeds(_pods(plan), most)
        if problem:
            passed_over.append(replace(plan, problem=problem))
        else:
            usable.append(plan)
    narrow = _narrow(usable) if observed.queue is not None else set()
    in_force = _in_force(usable, passed_over, observed, spec, report, fresh=fresh)
    if fresh and in_force is not None and in_force.revision in narrow:
        in_force = None  # of the life before
    unapproved = _unapproved(usable, spec, in_force)
    approved = [plan for plan in usable if plan not in unapproved and plan.revision not in narrow]
    target, problem, reason = _target(approved, passed_over, observed, spec, in_force)
    current = in_force or target
    said = report.plan_revision if report is not None else 0
    named = re.fullmatch(rf"{re.escape(observed.job.name)}-p([0-9]{{1,9}})", observed.status.plan.current)
    known = [p.revision for p in observed.plans]
    good = max((p.revision for p in (*usable, in_force) if p is not None), default=0)
    gone = in_force is not None and in_force.spec is None
    in_vain = tuple(p for p in passed_over if p.revision > good and not _is_users(p))
    choice = PlanChoice(
        current=current,
        not_allowed=in_force.problem if in_force is not None else "",
        pods_kept={p.name: p.desired for p in observed.status.pools if p.desired} if gone else {},
        unapproved=next((p for p in reversed(unapproved) if not _was_in_force(p)), None),
        passed_over=in_vain,
        highest_revision=max([*known, said, int(named[1]) if named else 0]),
        pin_problem=problem,
        pin_reason=reason,
        in_vain=len(in_vain) >= PLANS_IN_VAIN and not _is_worth_another(observed),
    )
    if current is None and not problem and not choice.in_vain:
        return replace(choice, request="CapacityChanged" if choice.highest_revision else "Initial")
    if current is not None and (over := _not_admitted(passed_over, current, observed, spec, most)) is not None:
        return replace(choice, failed=over, failed_for=str(Reason.UNSCHEDULABLE))
    if target is None or current is None or target.name == current.name:
        if choice.not_allowed and not problem and report is not None and not choice.in_vain:
            return replace(choice, request="CapacityChanged")
        homed = _homed(choice, observed, spec, report, since=homeless_since)
        asks = homed and homed != observed.status.plan.asked_within and not choice.in_vain
        return replace(choice, homed=homed, request="CapacityChanged" if asks else "")
    ended = tuple(_ended(target, choice, observed))
    # A driver at work may be further than the status knows; one that is gone may need what the plan on its way holds.
    is_heard = no_node_since is not None or (report is not None and report.plan_revision > 0)
    if is_heard and (why := _trouble(target, choice, ended, report)):
        return replace(choice, failed=replace(target, problem=why))
    if no_node_since and (why := _homeless(target, choice, observed, since=no_node_since)):
        return replace(choice, failed=replace(target, problem=why), failed_for=str(Reason.UNSCHEDULABLE))
    return replace(choice, pending=target, in_doubt=frozenset(() if is_heard else (pod.name for pod in ended)))


def _homed(
    choice: PlanChoice,
    observed: Observed,
    spec: RLJobSpec,
    report: DriverReport | None,
    *,
    since: datetime | None,
) -> dict[str, int]:
    """Pods of each pool that have nodes, where one of the plan in force finds none and its pool may have fewer. Nothing
    before the first step, nor where a queue or a person has said how many the job has."""
    current, placement = choice.current, spec.placement
    is_ours = observed.queue is None and placement.apply == "Auto" and placement.mode is not PlacementMode.PINNED
    has_begun = report is not None and report.plan_revision > 0 and max(report.step, observed.status.step) > 0
    if since is None or current is None or choice.not_allowed or _is_users(current) or not (is_ours and has_begun):
        return {}
    applied = conditions.find(current.status.conditions, PlanCondition.APPLIED)
    applied_at = times.parse(applied.last_transition_time) if applied is not None else None
    if applied_at is None or applied_at > since:  # the pods that it has no more may have had the nodes
        return {}
    in_force = _pods(current)
    homeless = Counter(
        pod.pool for pod in observed.pods if _is_homeless(pod, since=since) and pod.ordinal < in_force.get(pod.pool, 0)
    )
    least = {pool.name: as_range(pool.pods).min for pool in spec.pools}
    homed = {pool: count - homeless[pool] for pool, count in in_force.items()}
    return homed if homeless and all(homed[pool] >= max(1, least[pool]) for pool in homeless) else {}


def _is_homeless(pod: PodView, *, since: datetime) -> bool:
    return bool(pod.unschedulable) and not pod.node and pod.created_at <= since


def _not_admitted(
    passed_over: list[PlanView],
    current: PlanView,
    observed: Observed,
    spec: RLJobSpec,
    most: Mapping[str, int] | None,
) -> PlanView | None:
    """The newest plan of the scheduler that wants more pods than the queue admitted. Told as one whose pods find no
    node: the scheduler asks for no more pods for a while. A person's is passed over."""
    newer = (p for p in passed_over if p.revision > current.revision and not _is_users(p))
    over = [p for p in newer if queueing.exceeds(_pods(p), most) and not _problem(p, observed, spec)]
    return over[-1] if over else None


def _narrow(usable: list[PlanView]) -> set[int]:
    """Revisions of plans that were made, or go back to one that was made, because a queue admitted fewer pods than an
    earlier plan has, which may be used today: with the next admission a job asks for what that one has."""
    own = [plan for plan in usable if plan.spec is not None and not _is_users(plan)]
    found: set[int] = set()
    for number, plan in enumerate(own):
        assert plan.spec is not None
        within = plan.spec.reason.code is PlanReason.CAPACITY_CHANGED or plan.spec.based_on.revision in found
        wider = (p for p in own[:number] if p.revision not in found and queueing.exceeds(_pods(p), _pods(plan)))
        if within and any(wider):
            found.add(plan.revision)
    return found


def _unapproved(usable: list[PlanView], spec: RLJobSpec, in_force: PlanView | None) -> list[PlanView]:
    """Newer than what is in force, and nobody has let them."""
    if spec.placement.apply == "Auto" or spec.placement.mode is PlacementMode.PINNED or in_force is None:
        return []
    newer = (plan for plan in usable if plan.revision > in_force.revision and not _is_users(plan))
    return [plan for plan in newer if not plan.approved_by]


def _is_worth_another(observed: Observed) -> bool:
    """Whether one more is asked for after so many: the spec was edited since, or the last request brought no plan."""
    known = observed.status.conditions
    said, valid = conditions.find(known, JobCondition.PLAN_APPLIED), conditions.find(known, JobCondition.VALID)
    if said is None or said.observed_generation != observed.generation:
        return True
    infeasible = valid is not None and valid.reason == Reason.INFEASIBLE
    return infeasible or said.reason == Reason.SCHEDULER_UNAVAILABLE


def _in_force(
    usable: list[PlanView],
    passed_over: list[PlanView],
    observed: Observed,
    spec: RLJobSpec,
    report: DriverReport | None,
    *,
    fresh: bool,
) -> PlanView | None:
    """What the driver says; of a driver that says nothing, what the status says. `problem`: why the plan is not allowed
    any more. Its spec is None where its object is gone or cannot be read."""
    name, said = observed.status.plan.current, report.plan_revision if report is not None else 0
    if said:
        # Two plans may bear one revision: the one that was in force or on its way, then one that may be used.
        order = (name, observed.status.plan.pending)
        own = [p for p in (*usable, *passed_over) if p.revision == said and _is_own(p, observed)]
        found = min(own, key=lambda p: order.index(p.name) if p.name in order else len(order), default=None)
        if found is None:
            return _gone(names.plan_name(observed.job.name, said), said)
        if report is not None and not _is_of(found, said, report.plan_uid):
            executed = f"the driver executes revision {said} as it was before it was written anew"
            return replace(found, spec=None, problem=f"{executed}; give it another revision")
        # Its status may say Failed: that is over, it has come into force after all.
        return replace(found, problem=_wrong(found, observed, spec))
    if (allowed := next((p for p in usable if p.name == name), None)) is not None:
        return allowed
    if fresh or not name or not observed.status.plan.switches:
        return None  # no driver has ever had it
    barred = next((p for p in passed_over if p.name == name and _is_own(p, observed)), None)
    if report is None:
        return barred or _gone(name, 0)
    return barred if barred is not None and _is_executable(barred, spec) else None


def _gone(name: str, revision: int) -> PlanView:
    return PlanView(
        name=name, revision=revision, generation=0, spec=None, status=RLPlanStatus(), problem="its object is gone"
    )


def _is_executable(plan: PlanView, spec: RLJobSpec) -> bool:
    """Whether a driver that begins would take it: all but the counts is as the spec wants it."""
    try:
        return plan.spec is not None and bool(plan_rules.check(plan.spec, spec, counts=False).workers)
    except InvalidManifest:
        return False


def _target(
    usable: list[PlanView],
    passed_over: list[PlanView],
    observed: Observed,
    spec: RLJobSpec,
    in_force: PlanView | None,
) -> tuple[PlanView | None, str, Reason]:
    """The plan that is wanted, or why the pinned one is not used."""
    if spec.placement.mode is not PlacementMode.PINNED:
        planned = [p for p in usable if not _is_users(p)]
        if in_force is not None and not in_force.problem:
            # One that had its time was left for this one: its return would undo what a person chose by a pin.
            planned = [p for p in planned if p.revision > in_force.revision and not _was_in_force(p)] or [in_force]
        return (planned[-1] if planned else None), "", Reason.PLAN_IN_FORCE
    pin = spec.placement.pin
    if (found := next((p for p in usable if p.name == pin), None)) is not None:
        return found, "", Reason.PLAN_IN_FORCE
    if in_force is not None and in_force.name == pin and in_force.spec is not None:
        if not in_force.problem:
            return in_force, "", Reason.PLAN_IN_FORCE
        text = f"RLPlan {pin!r}, which is pinned, is not allowed any more: {in_force.problem}; pin another"
        return None, text, Reason.PIN_REFUSED
    if (bad := next((p for p in passed_over if p.name == pin), None)) is not None:
        return None, f"RLPlan {pin!r}, which is pinned, cannot be used: {bad.problem}", Reason.PIN_REFUSED
    known = ", ".join(p.name for p in usable[-5:])
    text = f"spec.placement.pin names {pin!r}, got no RLPlan of this name with label {names.LABEL_JOB}: "
    text += f"{observed.job.name}; apply it" + (f" or pin one of {known}" if known else "")
    return None, text, Reason.PIN_NOT_FOUND


def _was_in_force(plan: PlanView) -> bool:
    return conditions.find(plan.status.conditions, PlanCondition.APPLIED) is not None


def _trouble(plan: PlanView, choice: PlanChoice, ended: Iterable[PodView], report: DriverReport | None) -> str:
    """Why a plan on its way cannot come into force: the driver's word, or pods that only it needs and that end."""
    if choice.current is not None and plan.revision == choice.current.revision:
        return f"revision {plan.revision} is also that of {choice.current.name}, which is in force; give it another"
    if report is not None and _is_of(plan, report.plan_failed, report.plan_failed_uid):
        return report.plan_message or "the driver could not prepare it"
    for pod in ended:
        return f"pod {pod.name}, which it adds, ended with exit code {pod.exit_code}: {pod.exit_message[-500:]}"
    return ""


def _ended(plan: PlanView, choice: PlanChoice, observed: Observed) -> Iterator[PodView]:
    """Pods that only this plan needs and that ended by themselves."""
    for pod in _added(plan, choice, observed):
        by_itself = pod.phase == "Failed" and pod.exit_code not in (None, names.EXIT_STALE) and pod.deleted_at is None
        if by_itself and not (pod.pod_reason or pod.disruption):
            yield pod


def _homeless(plan: PlanView, choice: PlanChoice, observed: Observed, *, since: datetime) -> str:
    """A pod that only a plan of the scheduler needs, and that no node takes. A person's plan waits for the node that
    the person may be about to add."""
    if _is_users(plan):
        return ""
    for pod in _added(plan, choice, observed):
        if pod.unschedulable and pod.created_at <= since:
            return f"pod {pod.name}, which it adds, finds no node: {pod.unschedulable[-500:]}"
    return ""


def _added(plan: PlanView, choice: PlanChoice, observed: Observed) -> Iterator[PodView]:
    """Pods that only this plan needs."""
    before, wanted = choice.pods_in_force(), _pods(plan)
    for pod in sorted(observed.pods, key=lambda p: p.name):
        if pod.pool and before.get(pod.pool, 0) <= pod.ordinal < wanted.get(pod.pool, 0):
            yield pod


def instruct(
    choice: PlanChoice, *, report: DriverReport | None, target: Target | None, switches: int
) -> Instruct | None:
    """At once where the driver has no plan; else Prepare, and Commit when it says that the plan is prepared."""
    current, pending = choice.current, choice.pending
    if report is None or current is None or target is None or report.state in ENDED:
        return None

    def order(plan: PlanView, *steps: str) -> Instruct | None:
        if plan.spec is None:
            return None
        return Instruct(target=target, plan=plan.spec, steps=steps, switches=switches, uid=plan.uid)

    if report.plan_revision == 0:
        return order(current, "Prepare", "Commit")
    if pending is None:
        return order(current, "Abort") if report.plan_preparing or report.plan_prepared else None
    if _is_of(pending, report.plan_prepared, report.plan_pending_uid):
        return order(pending, "Commit")
    is_under_way = _is_of(pending, report.plan_preparing, report.plan_pending_uid)
    return None if is_under_way else order(pending, "Prepare")


def _is_of(plan: PlanView, revision: int, uid: str) -> bool:
    """Whether the driver speaks of this object, and not of one that a person has written anew under its revision. A
    driver that was told no uid says none."""
    return revision == plan.revision and uid in ("", plan.uid)


def surplus(
    choice: PlanChoice, observed: Observed, spec: RLJobSpec, report: DriverReport | None
) -> tuple[tuple[str, str], ...]:
    """(name, uid) of old plans that nobody needs: of the scheduler, as those of people are theirs, and neither in force
    nor on their way, by anybody's word."""
    status = observed.status.plan
    needed = {plan.name for plan in (choice.current, choice.pending, choice.failed) if plan is not None}
    needed |= {status.current, status.pending, spec.placement.pin}
    said = {report.plan_revision, report.plan_preparing, report.plan_prepared} if report is not None else set()
    own = [p for p in observed.plans if p.spec is not None and _is_own(p, observed) and not _is_users(p)]
    old = sorted(own, key=lambda p: -p.revision)[PLANS_KEPT:]
    return tuple((p.name, p.uid) for p in old if p.name not in needed and p.revision not in said)


def statuses(
    choice: PlanChoice, observed: Observed, *, report: DriverReport | None, now: datetime
) -> tuple[tuple[str, RLPlanStatus], ...]:
    """Status of each plan whose conditions must change."""

    def measures(plan: PlanView) -> MeasuredPeriod | None:
        is_current = choice.current is not None and choice.current.spec is not None and plan.name == choice.current.name
        return _measured(plan, report) if is_current else plan.status.measured

    return _changed(observed, lambda plan, old: _says(plan, old, choice, report), measures=measures, now=now)


def statuses_of_stopped(observed: Observed, *, now: datetime) -> tuple[tuple[str, RLPlanStatus], ...]:
    """For a job that is suspended or has ended: nothing is prepared any more. What was in force is left as it was, and
    said where an operator that died had told the job's end alone."""
    known = observed.status.conditions
    was_applied = conditions.is_finished(known) and conditions.is_true(known, JobCondition.PLAN_APPLIED)

    def says(plan: PlanView, old: tuple[Condition, ...]) -> Iterator[Said]:
        if conditions.is_true(old, PlanCondition.APPLIED):
            return
        if plan.name == observed.status.plan.current:
            if was_applied and plan.spec is not None:
                yield PlanCondition.APPLIED, Status.TRUE, str(Reason.PLAN_IN_FORCE), "it was in force to the end"
        else:
            yield from _not_prepared(old, str(Reason.STOPPED), "the job is suspended or has ended")

    return _changed(observed, says, measures=lambda plan: plan.status.measured, now=now)


Said = tuple[PlanCondition, Status, str, str]


def _changed(
    observed: Observed,
    says: Callable[[PlanView, tuple[Condition, ...]], Iterator[Said]],
    *,
    measures: Callable[[PlanView], MeasuredPeriod | None],
    now: datetime,
) -> tuple[tuple[str, RLPlanStatus], ...]:
    changed = []
    for plan in sorted(observed.plans, key=lambda p: p.revision):
        old = tuple(plan.status.conditions)
        new = old
        for kind, status, reason, message in says(plan, old):
            known = conditions.find(new, kind)
            if known is not None and (known.status, known.reason) == (status, reason):
                continue
            new = conditions.set_condition(
                new,
                Condition(
                    type=kind, status=status, reason=reason, message=message[:4000],
                    last_transition_time=times.text(now), observed_generation=plan.generation,
                ),
            )  # fmt: skip
        measured = measures(plan)
        if new != old or measured != plan.status.measured:
            update = {"conditions": list(new), "measured": measured}
            changed.append((plan.name, plan.status.model_copy(update=update)))
    return tuple(changed)


def _measured(plan: PlanView, report: DriverReport | None) -> MeasuredPeriod | None:
    """Written anew when there are twice as many steps: a write for each step of each job would be thousands."""
    known = plan.status.measured
    if report is None or report.plan_revision != plan.revision or plan.spec is None:
        return known
    steps, mean, spread = report.plan_steps, report.plan_step_s, report.plan_step_spread_s
    if steps < FEWEST_MEASURED or (known is not None and steps < 2 * known.steps and steps >= known.steps):
        return known
    predicted = plan.spec.predicted.period_seconds if plan.spec.predicted is not None else 0.0
    if not predicted:
        return MeasuredPeriod(period_seconds=round(mean, 6), steps=steps)
    error = NORMAL_95 * spread / math.sqrt(steps)
    return MeasuredPeriod(
        period_seconds=round(mean, 6),
        steps=steps,
        ratio_to_prediction=round(mean / predicted, 4),
        confidence95=[f"{(mean - error) / predicted:.3f}", f"{(mean + error) / predicted:.3f}"],
    )


def _says(
    plan: PlanView, old: tuple[Condition, ...], choice: PlanChoice, report: DriverReport | None
) -> Iterator[Said]:
    current = choice.current
    if choice.failed is not None and plan.name == choice.failed.name:
        yield PlanCondition.FAILED, Status.TRUE, choice.failed_for, choice.failed.problem
        yield from _not_prepared(old, choice.failed_for, choice.failed.problem)
        return
    if choice.pending is not None and plan.name == choice.pending.name:
        if report is not None and _is_of(plan, report.plan_prepared, report.plan_pending_uid):
            message = "its pods and workers are ready; it comes into force at a step boundary"
            yield PlanCondition.PREPARED, Status.TRUE, "Prepared", message
        elif report is not None and _is_of(
            plan, report.plan_preparing, report.plan_pending_uid
        ):  # neither: its commit is told
            yield from _not_prepared(old, "Preparing", f"driver attempt {report.driver_attempt} prepares it anew")
        return
    if report is None or current is None or report.plan_revision != current.revision:
        return
    if plan.name == current.name:
        if current.spec is None:  # another object of the name
            return
        if not conditions.is_true(old, PlanCondition.PREPARED) and report.plan_switches > 1:
            yield PlanCondition.PREPARED, Status.TRUE, "Prepared", "its pods and workers are ready"
        message = f"driver attempt {report.driver_attempt} executes it"
        yield PlanCondition.APPLIED, Status.TRUE, str(Reason.PLAN_IN_FORCE), message
        if conditions.is_true(old, PlanCondition.SUPERSEDED):
            yield PlanCondition.SUPERSEDED, Status.FALSE, str(Reason.PLAN_IN_FORCE), "it is in force again"
        if conditions.is_true(old, PlanCondition.ROLLED_BACK):
            yield PlanCondition.ROLLED_BACK, Status.FALSE, str(Reason.PLAN_IN_FORCE), "it is in force again"
        if conditions.is_true(old, PlanCondition.FAILED):
            yield PlanCondition.FAILED, Status.FALSE, str(Reason.PLAN_IN_FORCE), "it is in force after all"
        return
    applied = conditions.is_true(old, PlanCondition.APPLIED)
    if applied or plan.revision < current.revision:
        message = f"by {current.name}"
        if applied:
            yield PlanCondition.APPLIED, Status.FALSE, "Superseded", message
        yield PlanCondition.SUPERSEDED, Status.TRUE, "Superseded", message
        if _takes_back(current, plan):
            yield (
                PlanCondition.ROLLED_BACK,
                Status.TRUE,
                "RolledBack",
                current.spec.reason.message if current.spec else "",
            )
        yield from _not_prepared(old, "Superseded", message)
    elif report.plan_prepared != plan.revision or report.state in ENDED:
        yield from _not_prepared(old, "Aborted", f"it was given up; {current.name} stays in force")


def _takes_back(current: PlanView, plan: PlanView) -> bool:
    spec = current.spec
    return spec is not None and spec.reason.code is PlanReason.ROLLED_BACK and spec.based_on.revision == plan.revision


def _not_prepared(old: tuple[Condition, ...], reason: str, message: str) -> Iterator[Said]:
    """Said only of a plan that was: its pods may be gone, and `kubectl wait` must not take the old word for it."""
    if conditions.is_true(old, PlanCondition.PREPARED):
        yield PlanCondition.PREPARED, Status.FALSE, reason, message


def target_of(job: JobMeta, driver: PodView | None) -> Target | None:
    """None as long as it has no address."""
    if driver is None or not driver.ip:
        return None
    return Target(job_uid=job.uid, attempt=driver.attempt, address=f"{driver.ip}:{names.PORT_DRIVER_GRPC}")


def _pods(plan: PlanView | None) -> dict[str, int]:
    return {pool.name: pool.pods for pool in plan.spec.pools} if plan and plan.spec else {}


def _is_users(plan: PlanView) -> bool:
    return plan.spec is not None and plan.spec.source == "User"


def _problem(plan: PlanView, observed: Observed, spec: RLJobSpec) -> str:
    """Why it may not come into force; empty: it may."""
    failed = next((c for c in plan.status.conditions if c.type == PlanCondition.FAILED and c.status == "True"), None)
    wrong = _wrong(plan, observed, spec)
    return f"it failed: {failed.message}" if failed is not None and _is_own(plan, observed) else wrong


def _wrong(plan: PlanView, observed: Observed, spec: RLJobSpec) -> str:
    """What a plan is refused for by itself, whatever became of it."""
    if plan.spec is None:
        return plan.problem
    if not _is_own(plan, observed):
        return f"it is a plan of job uid {plan.spec.job.uid}, this job's is {observed.job.uid}"
    try:
        plan_rules.check(plan.spec, spec)
    except InvalidManifest as error:
        return str(error)
    return ""


def _is_own(plan: PlanView, observed: Observed) -> bool:
    return plan.spec is None or plan.spec.job.uid == observed.job.uid
