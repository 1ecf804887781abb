"""What a job says whose passes break: a bug of ours would otherwise stand in the operator's log alone. Pure.

Called by the loop, for a pass that broke again. The next one that goes through says how the job is.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from rlinf_api import conditions
from rlinf_api.conditions import JobCondition, Reason, Status
from rlinf_operator.reconcile.draft import Draft
from rlinf_operator.reconcile.state import Decision, Observed

MAX_SHOWN: Final = 500  # characters of an error that nobody wrote for a condition


def told(observed: Observed, error: Exception, *, now: datetime) -> Decision:
    draft = Draft(observed.status, generation=observed.generation, now=now)
    if conditions.is_finished(draft.conditions):
        return Decision(status=observed.status)
    why = f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}"
    message = f"the operator cannot look after this job ({why}), which is a bug in it; it tries again"
    draft.set(JobCondition.DEGRADED, Status.TRUE, Reason.INTERNAL_ERROR, message)
    return Decision(status=draft.build())


def take_back(draft: Draft) -> None:
    """This pass goes through; what it finds is said after this."""
    said = draft.find(JobCondition.DEGRADED)
    if said is not None and said.reason == Reason.INTERNAL_ERROR:
        draft.set(JobCondition.DEGRADED, Status.FALSE, Reason.HEALTHY)
