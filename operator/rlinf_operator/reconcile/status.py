"""Conditions, counts and progress of a job that is meant to run, from its pods and its driver's report. Pure.

Who is missing is always named. Reasons are stable; messages change only when something did, as each change is a write.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta

from rlinf_api import failure_rules, names, times
from rlinf_api.conditions import JobCondition, Reason, Status
from rlinf_api.job import (
    CheckpointStatus,
    MetricModel,
    PlanStatusRef,
    PolicyVersionModel,
    PoolStatus,
    RLJobSpec,
    RLJobStatus,
)
from rlinf_api.report import DriverReport, DriverState
from rlinf_operator.policies import failure, restart
from rlinf_operator.policies.failure import Cause, Verdict
from rlinf_operator.policies.pod_view import PodPlace, PodView
from rlinf_operator.reconcile import places
from rlinf_operator.reconcile.draft import Draft
from rlinf_operator.reconcile.places import Pods, Wanted
from rlinf_operator.reconcile.plans import PlanChoice
from rlinf_operator.reconcile.state import Decision

_DRIVERS = frozenset({
    (JobCondition.RUNNING, Reason.STEPPING),
    (JobCondition.RUNNING, Reason.RECOVERING),
    (JobCondition.RUNNING, Reason.WAITING_FOR_WORKERS),
    (JobCondition.PLAN_APPLIED, Reason.PLAN_IN_FORCE),
    (JobCondition.PLAN_APPLIED, Reason.PLAN_PENDING),
    (JobCondition.PLAN_APPLIED, Reason.PLAN_NOT_ALLOWED),
    (JobCondition.PROFILED, Reason.PROFILING),
    (JobCondition.PROFILED, Reason.PROFILED),
    (JobCondition.PROFILED, Reason.UNFIT),
    (JobCondition.PROFILED, Reason.SCHEDULER_UNAVAILABLE),
    (JobCondition.DEGRADED, Reason.WORKER_RESTARTING),
    (JobCondition.DEGRADED, Reason.TURNS_WITHOUT_ITEMS),
    (JobCondition.DEGRADED, Reason.MEMORY_KEPT),
    (JobCondition.DEGRADED, Reason.LOGPROB_MISMATCH),
    (JobCondition.DEGRADED, Reason.NOTHING_LEARNT),
    (JobCondition.DEGRADED, Reason.STALLED),
    (JobCondition.DEGRADED, Reason.DRIVER_UNREACHABLE),
})  # fmt: skip
"""What conditions know from the driver alone, be it by its silence."""
_JUDGED = frozenset({Reason.PROFILED, Reason.UNFIT, Reason.SCHEDULER_UNAVAILABLE})
"""What condition Profiled says of a plan of which enough steps were measured."""
_UNWELL = frozenset({
    Reason.TURNS_WITHOUT_ITEMS, Reason.MEMORY_KEPT, Reason.LOGPROB_MISMATCH, Reason.NOTHING_LEARNT, Reason.STALLED,
})  # fmt: skip
"""What a driver says of a job whose steps go on, or should."""
PROGRESS_FIELDS = ("step", "policy_version", "progress_percentage", "estimated_remaining_seconds", "metrics")
_COUNTED_DOWN = frozenset({
    (JobCondition.PODS_READY, Reason.PODS_STARTING),
    (JobCondition.PODS_READY, Reason.PODS_MISSING),
    (JobCondition.PODS_READY, Reason.UNSCHEDULABLE),
    (JobCondition.PODS_READY, Reason.IMAGE_UNAVAILABLE),
    (JobCondition.RUNNING, Reason.WAITING_FOR_WORKERS),
    (JobCondition.RUNNING, Reason.STEPPING),
    (JobCondition.DEGRADED, Reason.TURNS_WITHOUT_ITEMS),
    (JobCondition.DEGRADED, Reason.MEMORY_KEPT),
    (JobCondition.DEGRADED, Reason.LOGPROB_MISMATCH),
    (JobCondition.DEGRADED, Reason.NOTHING_LEARNT),
    (JobCondition.DEGRADED, Reason.STALLED),
})  # fmt: skip
"""Conditions whose message names who is still missing, or for how many seconds a step has run: a write for each of
1,000 pods, or for each second in each job that waits for one volume, would be 1,000 writes."""


def running(
    draft: Draft, spec: RLJobSpec, choice: PlanChoice, *, wanted: Wanted, pods: Pods, report: DriverReport | None
) -> None:
    """All conditions between Admitted and Complete."""
    needed_now = needed(wanted, choice)
    needed_set = frozenset(needed_now)
    stands = _driver_spoke_before(draft, pods, report)
    if not (stands and _kept(draft, JobCondition.PROFILED)):
        profiled(draft, spec, choice, report)
    draft.set(JobCondition.PODS_READY, *_pods_ready(draft, needed_now, pods))
    if not (stands and _is_said_of_these_plans(draft, choice) and _kept(draft, JobCondition.PLAN_APPLIED)):
        plan_applied(draft, choice, report, late=sorted(wanted.inputs.keys() - needed_set), pods=pods)
    if choice.current is None:
        draft.set(JobCondition.RUNNING, Status.UNKNOWN, Reason.WAITING_FOR_PLAN, "no plan yet")
    elif not (stands and _kept(draft, JobCondition.RUNNING)):
        draft.set(JobCondition.RUNNING, *_running(report))
    replaces = _restarts_whole(draft, wanted, pods, report) or _pods_degrade(draft, wanted, pods, needed=needed_set)
    if not (replaces or (stands and _kept(draft, JobCondition.DEGRADED))):
        draft.set(JobCondition.DEGRADED, *_driver_degrades(draft, pods, report))
    draft.fields["pools"] = pool_counts(draft, spec, choice, pods)
    draft.fields["attempt"] = max(pods.attempt, draft.old.attempt)
    if not draft.old.start_time:
        draft.fields["start_time"] = times.text(draft.now)
    ended(draft, pods, report)
    if report is not None:
        progress(draft, report)


def needed(wanted: Wanted, choice: PlanChoice) -> list[PodPlace]:
    """Places of the plan in force: pods of one that is on its way are no lack of the job."""
    in_force = choice.pods_in_force()
    return [p for p in sorted(wanted.inputs) if not p.pool or p.ordinal < in_force.get(p.pool, 0)]


def queued(draft: Draft, spec: RLJobSpec, choice: PlanChoice) -> None:
    """The status of a job that its queue lets have no pods. Its first plan says how many it asks for."""
    if draft.old.attempt:
        draft.stop()
    else:
        profiled(draft, spec, choice, None)
        why = "no pod before the job is admitted: see Admitted"
        draft.set(JobCondition.PODS_READY, Status.FALSE, Reason.QUEUED, why)
        draft.set(JobCondition.DEGRADED, Status.FALSE, Reason.HEALTHY)
        if choice.current is None:
            draft.set(JobCondition.RUNNING, Status.UNKNOWN, Reason.WAITING_FOR_PLAN, "no plan yet")
        else:
            draft.set(JobCondition.RUNNING, Status.FALSE, Reason.QUEUED, why)
    if choice.current is None or not draft.old.attempt:
        draft.set(JobCondition.PLAN_APPLIED, *_plan_applied(choice, None, late=(), pods=None))
    draft.fields["pools"] = [PoolStatus(name=pool.name) for pool in spec.pools]
    draft.fields["start_time"] = None  # time in a queue does not count against activeDeadlineSeconds


def profiled(draft: Draft, spec: RLJobSpec, choice: PlanChoice, report: DriverReport | None) -> None:
    """Whether enough steps of the plan in force are measured for the scheduler to judge it. Once for each plan: what it
    says of the next one is another sentence."""
    wanted, plan = spec.placement.profile_steps, choice.current
    if not wanted:
        draft.set(
            JobCondition.PROFILED, Status.FALSE, Reason.PROFILING_OFF,
            "spec.placement.profileSteps is 0: the job keeps its plan",
        )  # fmt: skip
        return
    steps = report.plan_steps if report is not None and plan and report.plan_revision == plan.revision else 0
    if plan is None or report is None or not report.plan_revision:
        old = draft.find(JobCondition.PROFILED)
        if old is not None and old.reason in _JUDGED:  # its driver begins again, and what was measured stands
            draft.set(JobCondition.PROFILED, old.status, old.reason, old.message)
        else:
            draft.set(JobCondition.PROFILED, Status.UNKNOWN, Reason.WAITING_FOR_PLAN, "no plan is in force yet")
    elif steps < wanted:
        message = f"the first {wanted} steps of {plan.name} are measured"
        draft.set(JobCondition.PROFILED, Status.UNKNOWN, Reason.PROFILING, message)
    else:
        if report.scheduler_away:
            why = "the scheduler takes no profile; the job runs on, and keeps its plan until one is taken again"
            draft.set(JobCondition.PROFILED, Status.UNKNOWN, Reason.SCHEDULER_UNAVAILABLE, f"{plan.name}: {why}")
            return
        code, _, stays = plan.stays.partition(": ")
        if code == Reason.UNFIT:
            draft.set(JobCondition.PROFILED, Status.FALSE, Reason.UNFIT, f"the planner cannot improve on it: {stays}")
            return
        why = stays or "the scheduler writes another plan where one pays"
        draft.set(JobCondition.PROFILED, Status.TRUE, Reason.PROFILED, f"steps of {plan.name} are measured; {why}")


def ended(draft: Draft, pods: Pods, report: DriverReport | None) -> None:
    """What pods and workers ended of: counted, and the first of it named."""
    draft.fields["restarts"] = [str(entry) for entry in pods.restarts]
    for failed in (*(verdict.failure for _, verdict in pods.ended), *(ruled.failure for ruled in pods.ruled)):
        draft.first_failure(failed)
    if report is not None:
        draft.first_failure(report.first_failure)


def left_alone(draft: Draft, *, why: Reason, pods: Pods, driver: PodView | None, report: DriverReport | None) -> None:
    """The status of a job whose spec is not valid, by reason `why`: what became of its pods, what its driver says."""
    stands = _driver_spoke_before(draft, pods, report)
    if pods.waiting:
        message = f"no pod is left of {_names(pods.waiting)}, and none is made before the spec is valid: see Valid"
        draft.set(JobCondition.PODS_READY, Status.FALSE, Reason.PODS_MISSING, message)
        sentences = [f"{_ended(pod, verdict)} and is not replaced" for pod, verdict in pods.ended]
        sentences = [*sentences, f"{_names(pods.waiting)}: no other pod before the spec is valid"]
        draft.set(JobCondition.DEGRADED, Status.TRUE, Reason.POD_REPLACED, "; ".join(sentences[-8:]))
    else:
        draft.set(JobCondition.PODS_READY, *_pods_ready(draft, sorted(pods.live), pods))
        if not (stands and _kept(draft, JobCondition.DEGRADED)):
            draft.set(JobCondition.DEGRADED, *_driver_degrades(draft, pods, report))
    if driver not in pods.live.values():
        draft.set(JobCondition.RUNNING, Status.FALSE, why)  # a column of `kubectl get`, unlike Valid
    elif not (stands and _kept(draft, JobCondition.RUNNING)):
        draft.set(JobCondition.RUNNING, *_running(report))
    draft.fields["pools"] = [p.model_copy(update=_counts(draft, p.name, pods)) for p in draft.old.pools]
    ended(draft, pods, report)
    last_progress(draft, driver, report)


def progress(draft: Draft, report: DriverReport) -> None:
    """Step, version, share done, estimate, metrics, checkpoint: what the driver says, never a guess of ours."""
    _reached(draft, report)
    if report.steps:
        left = max(0, report.steps - report.step)
        draft.fields["estimated_remaining_seconds"] = round(left * report.step_seconds) if report.step_seconds else None
    draft.fields["metrics"] = [MetricModel(name=n, value=f"{v:.6g}") for n, v in sorted(report.metrics.items())]


def last_progress(draft: Draft, driver: PodView | None, report: DriverReport | None) -> None:
    """What a driver that may have ended said last: in a report or, later than any report, as it ended."""
    if report is not None:
        progress(draft, report)
    said = failure.last_report(driver) if driver is not None else None
    if said is not None:
        _reached(draft, said)


def _reached(draft: Draft, said: DriverReport) -> None:
    draft.fields["step"] = said.step
    draft.fields["policy_version"] = PolicyVersionModel(branch=said.branch, number=said.step)
    if said.steps:
        draft.fields["progress_percentage"] = min(100, 100 * said.step // said.steps)
    old = draft.old.checkpoint
    if said.checkpoint_uri and (old is None or (old.uri, old.step) != (said.checkpoint_uri, said.checkpoint_step)):
        draft.fields["checkpoint"] = CheckpointStatus(
            uri=said.checkpoint_uri, step=said.checkpoint_step, time=times.text(draft.now)
        )


def pool_counts(draft: Draft, spec: RLJobSpec, choice: PlanChoice, pods: Pods) -> list[PoolStatus]:
    desired = choice.pods()
    return [
        PoolStatus(
            name=pool.name,
            desired=desired.get(pool.name, 0),
            slots=desired.get(pool.name, 0) * pool.slots.per_pod,
            **_counts(draft, pool.name, pods),
        )
        for pool in spec.pools
    ]


def _counts(draft: Draft, pool: str, pods: Pods) -> dict[str, int]:
    entries = [e for e in pods.restarts if e.cause != Cause.STALE]  # pods that only made room do not count
    return {
        "ready": sum(1 for place, p in pods.live.items() if place.pool == pool and p.ready),
        "failed": sum(1 for p in draft.observed.pods if p.pool == pool and p.phase == "Failed"),
        "restarts": sum(1 for e in entries if places.is_of_pool(e.pod, draft.observed.job.name, pool)),
    }


def _without_progress(status: RLJobStatus) -> RLJobStatus:
    """What two statuses are compared by when progress alone is not worth a write yet."""
    listed = [
        c.model_copy(update={"message": ""}) if (c.type, c.reason) in _COUNTED_DOWN else c for c in status.conditions
    ]
    pools = [p.model_copy(update={"ready": 0}) for p in status.pools]
    return status.model_copy(update=dict.fromkeys(PROGRESS_FIELDS) | {"conditions": listed, "pools": pools})


def written(draft: Draft, decision: Decision) -> Decision:
    """The decision with its status; progress alone waits for its interval.

    The highest attempt ever seen is written on every path: where the first statuses could not be written, a job may be
    finished or suspended before any pass of a running one was recorded, and an attempt is never given out twice.
    """
    seen = max((p.attempt for p in draft.observed.pods), default=0)
    draft.fields["attempt"] = max(draft.fields.get("attempt", 0), draft.old.attempt, seen)
    after, before = draft.build(), draft.old
    if not draft.observed.progress_due and _without_progress(after) == _without_progress(before):
        if after != before:
            later_s = times.soonest(decision.requeue_after_s, draft.settings.progress_interval_s)
            decision = replace(decision, requeue_after_s=later_s)
        after = before
    return replace(decision, status=after)


Said = tuple[Status, Reason, str]


def _pods_ready(draft: Draft, needed: Sequence[PodPlace], pods: Pods) -> Said:
    """`needed`: by the plan in force; pods of one that is on its way are no lack of the job."""
    missing = [place for place in needed if not (place in pods.live and pods.live[place].ready)]
    if not needed:
        return Status.UNKNOWN, Reason.WAITING_FOR_PLAN, "no plan says which pods are needed"
    if not missing:
        return Status.TRUE, Reason.PODS_READY, f"all {len(needed)} pods are ready"
    waiting = [pods.live[p] for p in missing if p in pods.live]
    stuck = [p for p in waiting if p.unschedulable]
    if stuck:
        who, why = places.summary(stuck), stuck[0].unschedulable
        message = f"no node has room for {who}: {why}; free resources or lower spec.pools"
        return Status.FALSE, Reason.UNSCHEDULABLE, message
    imageless = [p for p in waiting if p.waits_for_its_image]
    if imageless:
        why = f"{imageless[0].waiting_reason} {imageless[0].waiting_message}".strip()
        who = places.summary(imageless)
        message = f"the image of {who} cannot be had: {why}; correct spec.pools[*].image, or the image in a template"
        return Status.FALSE, Reason.IMAGE_UNAVAILABLE, message
    deadline_s = draft.settings.pods_ready_deadline_s
    late = [p for p in waiting if draft.now - p.created_at > timedelta(seconds=deadline_s)]
    if late:
        waits = "; ".join(sorted({f"{p.waiting_reason} {p.waiting_message}".strip() for p in late if p.waiting_reason}))
        message = f"not ready {deadline_s:g} s after their creation: {places.summary(late)}"
        return Status.FALSE, Reason.PODS_MISSING, message + (f" ({waits})" if waits else "")
    return Status.FALSE, Reason.PODS_STARTING, f"waiting for {_names(missing)}"


def plan_applied(
    draft: Draft,
    choice: PlanChoice,
    report: DriverReport | None,
    *,
    late: Sequence[PodPlace] = (),
    pods: Pods | None = None,
) -> None:
    """`late`: places that only the plan on its way needs."""
    if choice.current is not None:
        is_answered = choice.pending is not None or choice.failed is not None  # perhaps by the plan for fewer pods
        draft.fields["plan"] = PlanStatusRef(
            current=choice.current.name,
            pending=choice.pending.name if choice.pending else "",
            switches=max(draft.old.plan.switches, report.plan_switches if report else 0),
            asked_within=draft.old.plan.asked_within if is_answered else dict(choice.homed),
        )
    draft.set(JobCondition.PLAN_APPLIED, *_plan_applied(choice, report, late=late, pods=pods))


def _plan_applied(
    choice: PlanChoice, report: DriverReport | None, *, late: Sequence[PodPlace], pods: Pods | None
) -> Said:
    passed = "".join(f"; {p.name} is passed over: {p.problem}" for p in choice.passed_over[-3:])
    in_vain = f"the last {len(choice.passed_over)} plans in a row could not be used{passed}; "
    in_vain += "correct the spec, pin a plan, or delete these to have another made"
    if choice.current is None:
        if choice.pin_problem:
            return Status.FALSE, choice.pin_reason, choice.pin_problem
        if choice.in_vain:
            return Status.FALSE, Reason.PLAN_FAILED, in_vain
        return Status.UNKNOWN, Reason.WAITING_FOR_PLAN, f"the scheduler is asked{passed}"
    why_not = f"though {'not allowed any more: ' if choice.current.spec else ''}{choice.not_allowed}"
    not_allowed = f", {why_not}" if choice.not_allowed else ""
    stays = f"{choice.current.name} stays in force"
    if choice.pin_problem:
        return Status.FALSE, choice.pin_reason, f"{choice.pin_problem}; {stays}"
    if choice.failed is not None:
        return (
            Status.FALSE,
            Reason.PLAN_FAILED,
            (f"{choice.failed.name} failed: {choice.failed.problem}; {stays}{not_allowed}"),
        )
    if choice.pending is not None:
        stuck = [
            p.unschedulable for place in late if pods and (p := pods.live.get(place)) is not None and p.unschedulable
        ]
        on_its_way = report.plan_message if report is not None and report.plan_revision else ""
        waits = f"no node has room for its pods: {stuck[0]}" if stuck else (on_its_way or "its pods are made")
        message = f"{choice.pending.name} is on its way: {waits}; {stays} meanwhile{not_allowed}"
        return Status.UNKNOWN, Reason.PLAN_PENDING, message
    if choice.not_allowed and choice.in_vain:
        return Status.FALSE, Reason.PLAN_FAILED, f"{stays}{not_allowed}; {in_vain}"
    if choice.not_allowed:
        waits = "its driver is waited for" if report is None else "none is possible: see Valid"
        message = f"{stays}{not_allowed}; {'another is asked for' if choice.request else waits}{passed}"
        return Status.UNKNOWN, Reason.PLAN_NOT_ALLOWED, message
    why = choice.current.spec.reason.message if choice.current.spec else ""
    if report is not None and report.plan_revision == choice.current.revision:
        pause = f"; the change to it took {report.plan_pause_s:.3f} s" if report.plan_pause_s else ""
        return (
            Status.TRUE,
            Reason.PLAN_IN_FORCE,
            f"{choice.current.name}: {why}{pause}{_at_large(choice)}{passed}{_to_approve(choice)}",
        )
    return Status.UNKNOWN, Reason.PLAN_PENDING, f"{choice.current.name} waits for its driver: {why}{passed}"


def _at_large(choice: PlanChoice) -> str:
    """That a plan for fewer pods is, or was, asked for."""
    if not choice.homed:
        return ""
    pods = ", ".join(f"{count} of pool {pool}" for pool, count in sorted(choice.homed.items()))
    asked = "a plan is asked for" if choice.request else "no plan came into force"
    return f"; {asked} for the pods that have nodes, {pods}"


def _to_approve(choice: PlanChoice) -> str:
    plan = choice.unapproved
    if plan is None:
        return ""
    how = f"kubectl annotate rlplan {plan.name} {names.ANNOTATION_APPROVED_BY}=YOU"
    return f"; {plan.name} waits for approval ({how}): {plan.spec.reason.message if plan.spec else ''}"


def _driver_spoke_before(draft: Draft, pods: Pods, report: DriverReport | None) -> bool:
    """Whether a driver that this operator has not heard yet spoke to the one before it: what that one wrote down stands
    until the driver is heard or late, or each restart of the operator would change the conditions of every job."""
    driver = pods.driver
    running = draft.find(JobCondition.RUNNING)
    if driver is None or running is None or (JobCondition.RUNNING, running.reason) not in _DRIVERS:
        return False
    said_at = times.parse(running.last_transition_time)
    by_this_one = said_at is not None and said_at >= driver.created_at
    return by_this_one and draft.unheard_s(driver, report) is not None


def _is_said_of_these_plans(draft: Draft, choice: PlanChoice) -> bool:
    """Whether PlanApplied, as it stands, is about the plans that are chosen now."""
    if choice.current is None or choice.pin_problem or choice.failed is not None:
        return False
    pending = choice.pending.name if choice.pending is not None else ""
    return (draft.old.plan.current, draft.old.plan.pending) == (choice.current.name, pending)


def _kept(draft: Draft, kind: JobCondition) -> bool:
    """Leaves a condition that rests on the driver's word as it stands; False: it does not rest on that."""
    old = draft.find(kind)
    if old is None or (kind, old.reason) not in _DRIVERS:
        return False
    draft.set(kind, old.status, old.reason, old.message)
    return True


def _running(report: DriverReport | None) -> Said:
    if report is None:
        return Status.UNKNOWN, Reason.WAITING_FOR_DRIVER, "the driver has not reported yet"
    if report.state is DriverState.RUNNING:
        return Status.TRUE, Reason.STEPPING, report.message
    missing = f": {', '.join(report.missing[:8])}" if report.missing else ""
    reason = Reason.RECOVERING if report.state is DriverState.RECOVERING else Reason.WAITING_FOR_WORKERS
    return Status.FALSE, reason, report.message or f"waiting for workers{missing}"


def _restarts_whole(draft: Draft, wanted: Wanted, pods: Pods, report: DriverReport | None) -> bool:
    """Sets Degraded from when a rule of failurePolicy restarts the job until it makes steps; whether it did."""
    newest = restart.newest_life(pods.restarts)
    if newest is None or newest.life != wanted.life or (report is not None and report.state is DriverState.RUNNING):
        return False
    said = draft.find(JobCondition.DEGRADED)
    if not wanted.fresh and (said is None or said.reason != Reason.JOB_RESTARTED):
        return False
    rule = failure_rules.called(wanted.rules, newest.rule)
    message = f"rule {rule!r} of spec.failurePolicy restarts the job, as its life {newest.life}"
    draft.set(JobCondition.DEGRADED, Status.TRUE, Reason.JOB_RESTARTED, message)
    return True


def _pods_degrade(draft: Draft, wanted: Wanted, pods: Pods, *, needed: Collection[PodPlace]) -> bool:
    """Sets Degraded where a pod of the plan in force is replaced; whether it did."""
    resumed = draft.find(JobCondition.SUSPENDED) if wanted.life > 1 else None
    since = times.parse(resumed.last_transition_time) if resumed is not None else None
    has_ended = places.which_ended(pods, job=draft.observed.job.name, since=since)
    ended = [(pod, verdict) for pod, verdict in pods.ended if pod.place in needed]
    waiting = [place for place in pods.waiting if place in needed]
    starting = {} if wanted.fresh else {place: p for place, p in pods.live.items() if not p.ready}
    replaced = sorted(p.name for place, p in starting.items() if place in needed and has_ended(place))
    # Between its pause and its next pod a place has neither; it is not well for that moment.
    again = [] if wanted.fresh else [place for place in pods.create if place in needed and has_ended(place)]
    if ended or replaced or waiting or again:
        sentences = [f"{_ended(pod, verdict)} and is replaced" for pod, verdict in ended]
        sentences += [f"{name} is starting" for name in replaced]
        sentences += [f"{place} waits for its next attempt" for place in waiting]
        sentences = sentences or [f"{place} gets its next attempt" for place in again]
        draft.set(JobCondition.DEGRADED, Status.TRUE, Reason.POD_REPLACED, "; ".join(sentences[:8]))
        return True
    return False


def _driver_degrades(draft: Draft, pods: Pods, report: DriverReport | None) -> Said:
    driver = pods.driver
    if driver is not None and driver.at_work and draft.observed.silent_s(driver) >= draft.settings.driver_late_s:
        # No seconds in the message: it would change with every pass, and each change is a write.
        message = f"driver pod {driver.name}{_on(driver)} runs but does not answer the operator"
        return Status.TRUE, Reason.DRIVER_UNREACHABLE, message
    if report is not None and report.state in (DriverState.RUNNING, DriverState.RECOVERING):
        if report.reason in _UNWELL:
            return Status.TRUE, Reason(report.reason), report.message
        if report.state is DriverState.RECOVERING:
            return Status.TRUE, Reason.WORKER_RESTARTING, report.message
    return Status.FALSE, Reason.HEALTHY, ""


def _ended(pod: PodView, verdict: Verdict) -> str:
    reason = verdict.failure.reason if verdict.failure else str(verdict.cause)
    code = f", exit code {pod.exit_code}" if pod.exit_code is not None else ""
    why = f": {pod.pod_message}" if pod.pod_message else ""
    return f"{pod.name}{_on(pod)} ended ({reason}{code}{why})"


def _on(pod: PodView) -> str:
    return f" on node {pod.node}" if pod.node else ""


def _names(missing: list[PodPlace]) -> str:
    return places.listed([str(p) for p in missing])


def terminal_reason(text: str) -> Reason:
    """A driver's reason as a condition's: its own where it is one of ours, InternalError otherwise."""
    return Reason(text) if text in set(Reason) else Reason.INTERNAL_ERROR
