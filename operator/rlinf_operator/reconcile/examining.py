"""Whether a job's spec is right, and what a job says where that cannot be told, or where its passes break: a bug of
ours would otherwise stand in the operator's log alone. Pure but for the log.

Called by decide, in each pass, and by the loop, for a pass that broke again. Not for: the rules themselves
(rlinf_api/supported.py).
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Final

from rlinf_api import conditions, supported
from rlinf_api.conditions import JobCondition, Reason, Status
from rlinf_api.job import Problem
from rlinf_api.supported import Examined
from rlinf_operator.reconcile.draft import Draft
from rlinf_operator.reconcile.state import Decision, Observed

logger = logging.getLogger(__name__)
MAX_SHOWN: Final = 500  # characters of an error that nobody wrote for a condition


def examine(observed: Observed) -> tuple[Examined, Reason]:
    """A bug in the rules is said on the job, as a wrong spec is, and holds up neither what runs nor what has ended; its
    stack is logged once, and not in each pass."""
    try:
        found = supported.examine(observed.manifest)
    except Exception as error:
        old = conditions.find(observed.status.conditions, JobCondition.VALID)
        if old is None or old.reason != Reason.INTERNAL_ERROR:
            logger.exception("a spec could not be examined", extra={"job": str(observed.key)})
        why = _shown(error)
        message = f"could not be examined ({why}), which is a bug in the operator; report it with the stack in its log"
        return Examined(spec=None, wrong=(Problem(field="spec", message=message),)), Reason.INTERNAL_ERROR
    if found.wrong:
        return found, Reason.INVALID_SPEC
    return found, Reason.NOT_SUPPORTED_YET if found.later else Reason.ACCEPTED


def broken(observed: Observed, error: Exception, *, now: datetime) -> Decision:
    """The next pass that goes through says how the job is."""
    draft = Draft(observed, now=now)
    if conditions.is_finished(draft.conditions):
        return Decision(status=observed.status)
    why = _shown(error)
    message = f"the operator cannot look after this job ({why}), which is a bug in it; it tries again"
    draft.set(JobCondition.DEGRADED, Status.TRUE, Reason.INTERNAL_ERROR, message)
    return Decision(status=draft.build())


def take_back(draft: Draft) -> None:
    """This pass goes through; what it finds is said after this."""
    said = draft.find(JobCondition.DEGRADED)
    if said is not None and said.reason == Reason.INTERNAL_ERROR:
        draft.set(JobCondition.DEGRADED, Status.FALSE, Reason.HEALTHY)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}"
