"""What people are told: events from the difference between two statuses, and from what a pass does; and log lines at
INFO for what it changed: each condition whose status or reason moved, each pod made or deleted. Pure but for the log.

Emitted after the status write and only if it landed, so that an event never tells of something that did not happen. One
line per change and none for a pass that changes nothing; `attempt` is the job's, or the pod's in lines about a pod.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from rlinf_api import names
from rlinf_api.conditions import Condition, JobCondition, Reason, Status
from rlinf_api.job import RLJobStatus
from rlinf_api.plan import PlanReason
from rlinf_operator.manifests.metadata import Manifest
from rlinf_operator.policies.failure import Verdict
from rlinf_operator.policies.pod_view import PodPlace, PodView
from rlinf_operator.policies.rules import NO_RULE, Ruled
from rlinf_operator.reconcile.state import Adjust, DeletePod, Event, Observed, PlanView

logger = logging.getLogger(__name__)
MAX_NAMED = 8  # pods in one sentence
MESSAGE_CHARS = 500  # a condition's message: an admission webhook's answer may be pages
_TOLD = {
    (JobCondition.VALID, Status.FALSE): "Warning",
    (JobCondition.SUSPENDED, Status.TRUE): "Normal",
    (JobCondition.ADMITTED, Status.TRUE): "Normal",
    (JobCondition.PODS_READY, Status.TRUE): "Normal",
    (JobCondition.RUNNING, Status.TRUE): "Normal",
    (JobCondition.COMPLETE, Status.TRUE): "Normal",
    (JobCondition.FAILED, Status.TRUE): "Warning",
}
_TROUBLES = frozenset(
    {Reason.UNSCHEDULABLE, Reason.IMAGE_UNAVAILABLE, Reason.PODS_MISSING, Reason.SCHEDULER_UNAVAILABLE,
     Reason.DRIVER_UNREACHABLE, Reason.DRAIN_DEADLINE_EXCEEDED, Reason.PLAN_NOT_ALLOWED, Reason.NO_PROVIDER,
     Reason.EVICTED, Reason.DEACTIVATED, Reason.QUEUE_REFUSED, Reason.QUOTA_EXCEEDED,
     Reason.NOT_PLACED}
)  # fmt: skip


def of_transition(before: RLJobStatus, after: RLJobStatus) -> tuple[Event, ...]:
    old = {c.type: c for c in before.conditions}
    return tuple(e for c in after.conditions if (e := _event(old.get(c.type), c)) is not None)


def of_plan(before: RLJobStatus, after: RLJobStatus, plans: Iterable[PlanView]) -> tuple[Event, ...]:
    """The event of a plan that has come into force, with its reason; condition Running tells of the first plan."""
    name = after.plan.current
    if name == before.plan.current or not before.plan.current:
        return ()
    found = next((plan for plan in plans if plan.name == name and plan.spec is not None), None)
    if found is None or found.spec is None:
        return ()
    reason = found.spec.reason
    message = f"{name} is in force instead of {before.plan.current}: {reason.message}"
    back = reason.code is PlanReason.ROLLED_BACK
    return (Event(type="Warning" if back else "Normal", reason=f"Plan{reason.code}", message=message[:1000]),)


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


def of_rules(ruled: Iterable[Ruled]) -> tuple[Event, ...]:
    return tuple(
        Event(type="Warning", reason="FailureRule", message=r.message[:1000], pod=r.pod.name)
        if r.met.key != NO_RULE
        else Event(type="Warning", reason="AgentSilent", message=r.message[:1000], pod=r.pod.name)
        for r in ruled
    )


def of_adjusted(adjust: Adjust) -> Event:
    return Event(type="Normal", reason="Adjusted", message=f"{adjust.why}; no pod is replaced")


def of_no_smaller_plan(why: Iterable[str]) -> Event:
    """Pods of the plan in force find no node, and there is no plan without them."""
    message = f"no plan for the pods that have nodes: {'; '.join(why)}; the others are waited for"
    return Event(type="Warning", reason="NoSmallerPlan", message=message)


def of_roll(deleted: Iterable[DeletePod]) -> tuple[Event, ...]:
    """The events of live pods that go because what they were made from changed, or by a rule: one for each reason.

    >>> old = [DeletePod(name=f"a-cpu-{n}-a1", uid="u", why="spec.seed changed", makes_room="x") for n in (0, 1)]
    >>> [event.message for event in of_roll(old)]
    ['spec.seed changed: 2 pods are replaced (a-cpu-0-a1, a-cpu-1-a1)']
    """
    by_reason: dict[str, list[str]] = {}
    for pod in deleted:
        if pod.makes_room:
            by_reason.setdefault(pod.why, []).append(pod.name)
    return tuple(
        Event(type="Normal", reason="PodsReplaced", message=f"{why}: {_pods(names)}")
        for why, names in sorted(by_reason.items())
    )


def _pods(found: list[str]) -> str:
    shown = ", ".join(found[:MAX_NAMED]) + (", ..." if len(found) > MAX_NAMED else "")
    return f"{len(found)} pods are replaced ({shown})" if len(found) > 1 else f"pod {shown} is replaced"


def _event(old: Condition | None, new: Condition) -> Event | None:
    if old is not None and (old.status, old.reason) == (new.status, str(new.reason)):
        return None
    if new.reason == Reason.NO_QUEUE:  # of each job that has none
        return None
    kind = JobCondition(new.type) if new.type in set(JobCondition) else None
    level = _TOLD.get((kind, new.status)) if kind else None
    if level is None and new.reason in _TROUBLES:
        level = "Warning"
    if level is None or (old is not None and old.status == new.status and new.reason not in _TROUBLES):
        return None
    return Event(type="Warning" if level == "Warning" else "Normal", reason=str(new.reason), message=new.message[:1000])


# --- the log ---------------------------------------------------------------------------------------------------------


def log_changes(observed: Observed, after: RLJobStatus) -> None:
    old = {c.type: (c.status, str(c.reason)) for c in observed.status.conditions}
    for new in after.conditions:
        if old.get(new.type) != (new.status, str(new.reason)):
            told = {"type": str(new.type), "status": str(new.status), "reason": str(new.reason)}
            message = new.message[:MESSAGE_CHARS]
            _tell("condition changed", observed, {"attempt": after.attempt, **told, "why": message})


class PodLog:
    """What one pass makes and deletes. A job of thousands has its pods looked through once, not for each of them."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed

    def made(self, pod: Manifest) -> None:
        label = pod["metadata"]["labels"]
        attempt, ordinal = int(label[names.LABEL_ATTEMPT]), int(label.get(names.LABEL_ORDINAL, "0"))
        place = PodPlace(component=label[names.LABEL_COMPONENT], pool=label.get(names.LABEL_POOL, ""), ordinal=ordinal)
        before = [p for p in self._here.get(place, ()) if p.attempt < attempt]
        why = _ended(max(before, key=lambda p: p.attempt)) if before else "its place has no pod"
        _tell("pod made", self._observed, {"attempt": attempt, "pod": pod["metadata"]["name"], "why": why})

    def deleted(self, pod: DeletePod) -> None:
        attempt = self._attempts.get(pod.uid, 0)
        _tell("pod deleted", self._observed, {"attempt": attempt, "pod": pod.name, "why": pod.why})

    @cached_property
    def _here(self) -> dict[PodPlace, list[PodView]]:
        found: dict[PodPlace, list[PodView]] = {}
        for pod in self._observed.pods:
            found.setdefault(pod.place, []).append(pod)
        return found

    @cached_property
    def _attempts(self) -> dict[str, int]:
        return {pod.uid: pod.attempt for pod in self._observed.pods}


def _ended(pod: PodView) -> str:
    """>>> _ended(PodView(name="math-train-0-a1", ..., phase="Failed", exit_code=1, exit_reason="OOMKilled"))
    'takes the place of math-train-0-a1 (Failed, OOMKilled, exit code 1)'
    """
    code = f"exit code {pod.exit_code}" if pod.exit_code is not None else ""
    known = filter(None, (pod.phase, pod.pod_reason, pod.disruption, pod.exit_reason, code))
    return f"takes the place of {pod.name} ({', '.join(known)})"


def _tell(what: str, observed: Observed, fields: dict[str, Any]) -> None:
    logger.info(what, extra={"job": str(observed.key), **fields})
