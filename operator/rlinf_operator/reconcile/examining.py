"""Whether a job's spec is right, and the reason that condition Valid has for it. Pure but for the log.

Called by decide, in each pass. Not for: the rules themselves (rlinf_api/supported.py).
"""

from __future__ import annotations

import logging
from typing import Final

from rlinf_api import conditions, supported
from rlinf_api.conditions import JobCondition, Reason
from rlinf_api.job import Problem
from rlinf_api.supported import Examined
from rlinf_operator.reconcile.state import Observed

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
        why = f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}"
        message = f"could not be examined ({why}), which is a bug in the operator; report it with the stack in its log"
        return Examined(spec=None, wrong=(Problem(field="spec", message=message),)), Reason.INTERNAL_ERROR
    if found.wrong:
        return found, Reason.INVALID_SPEC
    return found, Reason.NOT_SUPPORTED_YET if found.later else Reason.ACCEPTED
