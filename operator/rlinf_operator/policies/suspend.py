"""Suspending a job: drain at a step boundary with a checkpoint, then delete the pods; late, without it. Pure.

A job that has nowhere to write checkpoints is suspended as well, as a queue must be able to; it loses its steps, also
where the wish is taken back (a new life begins), and says so.

The condition Suspended is the whole memory: False is running, Unknown (Draining) began at its lastTransitionTime, True
is done. `life` grows with a resume, so that pods of the earlier life are never taken for pods of this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from rlinf_api import times
from rlinf_api.conditions import Condition, Reason, Status

LOST: Final = "without checkpoint.uri there is no checkpoint, and a resume begins at step 0"


class SuspendPhase(StrEnum):
    DRAINING = "Draining"
    STOPPING = "Stopping"  # pods are being deleted
    SUSPENDED = "Suspended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspension:
    phase: SuspendPhase
    reason: Reason
    message: str
    drain_left_s: float = 0.0
    warning: str = ""
    """For an event, once, as the drain begins."""

    @property
    def status(self) -> Status:
        return Status.TRUE if self.phase is SuspendPhase.SUSPENDED else Status.UNKNOWN


def judge(
    *,
    condition: Condition | None,
    pods_left: int,
    driver_alive: bool,
    drained: bool,
    step: int,
    checkpoint_step: int | None,
    has_place: bool,
    now: datetime,
    deadline_s: float,
    why: str = "spec.suspend is true",
) -> Suspension:
    """`pods_left` counts the pods that still exist; `drained` is the driver's word; `step`: how far the job has come;
    `checkpoint_step`: of the last checkpoint that is known; `has_place`: it has somewhere to write them."""
    began = times.parse(condition.last_transition_time) if condition and condition.status is Status.UNKNOWN else None
    left_s = deadline_s - (now - began).total_seconds() if began else deadline_s
    loses_all = step > 0 and not has_place
    lost = _lost(step, checkpoint_step=checkpoint_step, has_place=has_place)
    late = condition is not None and condition.reason == Reason.DRAIN_DEADLINE_EXCEEDED
    if pods_left == 0:
        if late:
            message = condition.message if condition else ""
            return Suspension(phase=SuspendPhase.SUSPENDED, reason=Reason.DRAIN_DEADLINE_EXCEEDED, message=message)
        message = f"{why}; no pods" + lost
        return Suspension(phase=SuspendPhase.SUSPENDED, reason=Reason.SUSPENDED_BY_USER, message=message)
    if late or (left_s <= 0 and not drained):
        return Suspension(
            phase=SuspendPhase.STOPPING,
            reason=Reason.DRAIN_DEADLINE_EXCEEDED,
            message=f"the driver did not reach a step boundary within {deadline_s:g} s; pods are deleted"
            + (lost or "; a resume goes on from the last checkpoint"),
        )
    if drained or not driver_alive:
        why = "drained" if drained else "there is no running driver to drain"
        return Suspension(
            phase=SuspendPhase.STOPPING, reason=Reason.DRAINING, message=f"{why}; pods are being deleted{lost}"
        )
    return Suspension(
        phase=SuspendPhase.DRAINING,
        reason=Reason.DRAINING,
        message=f"waiting for a step boundary{lost}" if loses_all else "waiting for a step boundary and a checkpoint",
        drain_left_s=max(0.0, left_s),
        warning=LOST if loses_all and began is None else "",
    )


def _lost(step: int, *, checkpoint_step: int | None, has_place: bool) -> str:
    """What a job that stops now loses; nothing where its last checkpoint is of the step that it has reached.

    >>> _lost(57, checkpoint_step=40, has_place=True)
    '; without a new checkpoint, the last one is of step 40'
    """
    if step == 0 or (has_place and checkpoint_step == step):
        return ""
    if not has_place:
        return f"; {LOST}"
    if checkpoint_step is None:  # it may stand on another job's, of which its driver does not tell
        return "; without a checkpoint of its own so far"
    if checkpoint_step > step:  # it was damaged: the job went on from an older one, and has not come as far again
        return f"; without a new checkpoint, and that of step {checkpoint_step} could not be gone on from"
    return f"; without a new checkpoint, the last one is of step {checkpoint_step}"
