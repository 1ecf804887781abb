"""Suspending a job: drain at a step boundary with a checkpoint, then delete the pods; late, without it. Pure.

The condition Suspended is the whole memory: False is running, Unknown (Draining) began at its lastTransitionTime, True
is done. `life` grows with a resume, so that pods of the earlier life are never taken for pods of this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from rlinf_api import times
from rlinf_api.conditions import Condition, Reason, Status


class Phase(StrEnum):
    RUNNING = "Running"
    DRAINING = "Draining"
    STOPPING = "Stopping"  # pods are being deleted
    SUSPENDED = "Suspended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspension:
    phase: Phase
    reason: Reason
    message: str
    drain_left_s: float = 0.0

    @property
    def status(self) -> Status:
        return {
            Phase.RUNNING: Status.FALSE,
            Phase.DRAINING: Status.UNKNOWN,
            Phase.STOPPING: Status.UNKNOWN,
            Phase.SUSPENDED: Status.TRUE,
        }[self.phase]


def judge(
    *,
    wanted: bool,
    condition: Condition | None,
    pods_left: int,
    driver_alive: bool,
    drained: bool,
    checkpoint_step: int,
    now: datetime,
    deadline_s: float,
) -> Suspension:
    """`pods_left` counts the pods that still exist; `drained` is the driver's word."""
    if not wanted:
        return Suspension(phase=Phase.RUNNING, reason=Reason.NOT_SUSPENDED, message="")
    began = times.parse(condition.last_transition_time) if condition and condition.status is Status.UNKNOWN else None
    left_s = deadline_s - (now - began).total_seconds() if began else deadline_s
    late = condition is not None and condition.reason == Reason.DRAIN_DEADLINE_EXCEEDED
    if pods_left == 0:
        if late:
            message = condition.message if condition else ""
            return Suspension(phase=Phase.SUSPENDED, reason=Reason.DRAIN_DEADLINE_EXCEEDED, message=message)
        return Suspension(
            phase=Phase.SUSPENDED, reason=Reason.SUSPENDED_BY_USER, message="spec.suspend is true; no pods"
        )
    if late or (left_s <= 0 and not drained):
        return Suspension(
            phase=Phase.STOPPING,
            reason=Reason.DRAIN_DEADLINE_EXCEEDED,
            message=f"the driver did not reach a step boundary within {deadline_s:g} s; pods are deleted without a new "
            f"checkpoint, the last one is of step {checkpoint_step}",
        )
    if drained or not driver_alive:
        why = "drained" if drained else "there is no running driver to drain"
        return Suspension(phase=Phase.STOPPING, reason=Reason.DRAINING, message=f"{why}; pods are being deleted")
    return Suspension(
        phase=Phase.DRAINING,
        reason=Reason.DRAINING,
        message="waiting for a step boundary and a checkpoint",
        drain_left_s=max(0.0, left_s),
    )
