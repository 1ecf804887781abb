"""What people are told: events from the difference between two statuses, and from what a pass does. Pure.

Emitted after the status write and only if it landed, so that an event never tells of something that did not happen.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlinf_api.conditions import Condition, JobCondition, Reason, Status
from rlinf_api.job import RLJobStatus
from rlinf_operator.policies.failure import Verdict
from rlinf_operator.policies.pod_view import PodView
from rlinf_operator.reconcile.state import Event

_TOLD = {
    (JobCondition.VALID, Status.FALSE): "Warning",
    (JobCondition.SUSPENDED, Status.TRUE): "Normal",
    (JobCondition.PODS_READY, Status.TRUE): "Normal",
    (JobCondition.RUNNING, Status.TRUE): "Normal",
    (JobCondition.COMPLETE, Status.TRUE): "Normal",
    (JobCondition.FAILED, Status.TRUE): "Warning",
}
_TROUBLES = frozenset(
    {Reason.UNSCHEDULABLE, Reason.IMAGE_UNAVAILABLE, Reason.PODS_MISSING, Reason.SCHEDULER_UNAVAILABLE,
     Reason.DRIVER_UNREACHABLE, Reason.DRAIN_DEADLINE_EXCEEDED, Reason.PLAN_NOT_ALLOWED}
)  # fmt: skip


def of_transition(before: RLJobStatus, after: RLJobStatus) -> tuple[Event, ...]:
    old = {c.type: c for c in before.conditions}
    return tuple(e for c in after.conditions if (e := _event(old.get(c.type), c)) is not None)


def of_ended(ended: Iterable[tuple[PodView, Verdict]]) -> tuple[Event, ...]:
    found = []
    for pod, verdict in ended:
        reason = verdict.failure.reason if verdict.failure else str(verdict.cause)
        words = f": {verdict.failure.message}" if verdict.failure and verdict.failure.message else ""
        code = f" with exit code {pod.exit_code}" if pod.exit_code is not None else ""
        node = f" on node {pod.node}" if pod.node else ""
        message = f"pod {pod.name}{node} ended ({reason}){code}{words}"[:1000]
        found.append(Event(type="Warning", reason="PodEnded", message=message, pod=pod.name))
    return tuple(found)


def _event(old: Condition | None, new: Condition) -> Event | None:
    if old is not None and (old.status, old.reason) == (new.status, str(new.reason)):
        return None
    kind = JobCondition(new.type) if new.type in set(JobCondition) else None
    level = _TOLD.get((kind, new.status)) if kind else None
    if level is None and new.reason in _TROUBLES:
        level = "Warning"
    if level is None or (old is not None and old.status == new.status and new.reason not in _TROUBLES):
        return None
    return Event(type="Warning" if level == "Warning" else "Normal", reason=str(new.reason), message=new.message[:1000])
