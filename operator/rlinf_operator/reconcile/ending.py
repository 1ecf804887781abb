"""The end of a job: by its driver's word, or by a decision; what is left of it then, and until when. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rlinf_api import names, times
from rlinf_api.conditions import JobCondition, Reason, Status
from rlinf_api.job import RLJobSpec
from rlinf_api.report import DriverReport, DriverState, Failure
from rlinf_operator.policies import failure, queueing
from rlinf_operator.policies.pod_view import PodView
from rlinf_operator.reconcile import examining, plans, status
from rlinf_operator.reconcile.draft import Draft
from rlinf_operator.reconcile.plans import PlanChoice
from rlinf_operator.reconcile.state import Decision, DeletePod, Observed

LINGERS_S: Final = 10.0
"""So long a driver's pod may outlive its main container: a kubelet says a pod's end later than its container's, seconds
on a busy node, and a log shipper has something left."""


def finish_by_driver(draft: Draft, *, life: int) -> Decision | None:
    """The end of the flow by the driver's word, or by its exit code where its last word was not heard."""
    if (ended := _said(*draft.observed.driver_of(life))) is None:
        return None
    kind, reason, message, first = ended
    return finish(draft, kind, reason=reason, message=message, life=life, first=first)


def _said(
    driver: PodView | None, report: DriverReport | None
) -> tuple[JobCondition, Reason, str, Failure | None] | None:
    if report is not None and report.state is DriverState.COMPLETE:
        message = report.message or f"the flow finished after {report.step} steps"
        return JobCondition.COMPLETE, Reason.FLOW_FINISHED, message, None
    if report is not None and report.state is DriverState.FAILED:
        message = report.message or "the driver gave up without a message; look at its log"
        return JobCondition.FAILED, status.terminal_reason(report.reason), message, report.first_failure
    state = failure.driver_state(driver) if driver is not None else None
    if driver is None or state not in (DriverState.COMPLETE, DriverState.FAILED):
        return None
    words = failure.last_words(driver.exit_message)
    if state is DriverState.COMPLETE:
        return JobCondition.COMPLETE, Reason.FLOW_FINISHED, words.message if words else "the flow finished", None
    reason = status.terminal_reason(words.reason) if words else Reason.INTERNAL_ERROR
    message = words.message if words and words.message else "the driver gave up without a message; look at its log"
    return JobCondition.FAILED, reason, message, words


def finish(
    draft: Draft, kind: JobCondition, *, reason: Reason, message: str, life: int, first: Failure | None = None
) -> Decision:
    observed = draft.observed
    driver, report = observed.driver_of(life)
    status.last_progress(draft, driver, report)
    if report is not None and kind is JobCondition.FAILED:
        draft.first_failure(report.first_failure)
    draft.first_failure(first, final=True)
    if not draft.old.start_time and observed.pods:
        draft.fields["start_time"] = times.text(min(p.created_at for p in observed.pods))
    if kind is JobCondition.COMPLETE:
        draft.fields["progress_percentage"] = 100
    spec = examining.examine(observed)[0].spec
    executed = _executed(observed, spec, report)
    if spec is not None and executed is not None:
        status.plan_applied(draft, executed, report)
        status.profiled(draft, spec, executed, report)
    draft.finish(kind, reason, message)
    decision = finished(draft)
    if executed is None:
        return decision
    return replace(decision, plan_statuses=plans.statuses(executed, observed, report=report, now=draft.now))


def _executed(observed: Observed, spec: RLJobSpec | None, report: DriverReport | None) -> PlanChoice | None:
    """The plan that the ended driver executed. An operator that was away from its begin to its end hears of it now."""
    choice = plans.choose(observed, spec, report) if spec is not None and report is not None else None
    if choice is None or choice.current is None or report is None or report.plan_revision != choice.current.revision:
        return None
    return replace(choice, not_allowed="", pending=None)  # it was in force to the end


def finished(draft: Draft) -> Decision:
    """Complete or Failed is True: worker pods go, the driver's stays for readers, the TTL ends it all. One that a
    sidecar keeps running goes, too: it would hold its node for ever."""
    observed, now = draft.observed, draft.now
    ended_at = times.parse(draft.fields.get("completion_time", observed.status.completion_time)) or now
    spec = examining.examine(observed)[0].spec
    limit = spec.ttl_seconds_after_finished if spec else None
    left_s = times.remaining_s(ended_at, limit, now=now)
    if left_s is not None and left_s <= 0 and draft.fields.get("completion_time") is None:
        return Decision(status=observed.status, delete_job=True)
    grace_left_s = draft.settings.finish_grace_s - (now - ended_at).total_seconds()
    newest = max((p.attempt for p in observed.pods if p.component == names.COMPONENT_DRIVER), default=0)
    deleted, wait_s = [], None
    for pod in sorted(observed.pods, key=lambda p: p.name):
        if pod.deleted_at is not None:
            continue
        is_driver = pod.component == names.COMPONENT_DRIVER and pod.attempt == newest
        if is_driver and pod.has_ended:
            left_of_it_s = LINGERS_S - (now - (pod.finished_at or ended_at)).total_seconds()
            if not pod.lingers or left_of_it_s > 0:
                wait_s = left_of_it_s if pod.lingers else None
                continue
        if is_driver and not pod.has_ended and grace_left_s > 0 and not _is_over_time(draft):
            wait_s = grace_left_s
            continue
        deleted.append(DeletePod(name=pod.name, uid=pod.uid, why="the job is finished"))
    draft.fields["pools"] = [p.model_copy(update={"ready": 0, "desired": 0, "slots": 0}) for p in observed.status.pools]
    complete = draft.find(JobCondition.COMPLETE)
    said = complete if complete is not None and complete.status is Status.TRUE else draft.find(JobCondition.FAILED)
    decision = Decision(
        status=observed.status, delete_pods=tuple(deleted), requeue_after_s=times.soonest(left_s, wait_s),
        queue=queueing.finishes(
            observed.queue, at_work=any(not p.has_ended for p in observed.pods), succeeded=said is complete,
            message=said.message if said is not None else "",
        ),
        plan_statuses=plans.statuses_of_stopped(observed, now=now),
        delete_disruption_budget=observed.disruption_budget,  # what is left of its driver is to be read, and no more
    )  # fmt: skip
    return status.written(draft, decision)


def _is_over_time(draft: Draft) -> bool:
    """Its driver is still at work. Any other end is the driver's own, or leaves it none: it exits and can be read."""
    failed = draft.find(JobCondition.FAILED)
    return failed is not None and failed.reason == Reason.DEADLINE_EXCEEDED
