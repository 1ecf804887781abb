"""Log lines at INFO for what a pass changed: each condition whose status or reason moved, each pod made or deleted.

Called by `apply`, once the write landed. One line per change and none for a pass that changes nothing, so their number
is that of the writes; `attempt` is the job's, or the pod's in lines about a pod.
"""

from __future__ import annotations

import logging
from typing import Any

from rlinf_api import names
from rlinf_api.job import RLJobStatus
from rlinf_operator.manifests.metadata import Manifest
from rlinf_operator.policies.pod_view import PodView
from rlinf_operator.reconcile.state import DeletePod, Observed

logger = logging.getLogger(__name__)
MESSAGE_CHARS = 500  # a condition's message: an admission webhook's answer may be pages


def conditions_changed(observed: Observed, after: RLJobStatus) -> None:
    old = {c.type: (c.status, str(c.reason)) for c in observed.status.conditions}
    for new in after.conditions:
        if old.get(new.type) != (new.status, str(new.reason)):
            told = {"type": str(new.type), "status": str(new.status), "reason": str(new.reason)}
            message = new.message[:MESSAGE_CHARS]
            _tell("condition changed", observed, {"attempt": after.attempt, **told, "why": message})


def pod_made(observed: Observed, pod: Manifest) -> None:
    label = pod["metadata"]["labels"]
    attempt, ordinal = int(label[names.LABEL_ATTEMPT]), int(label.get(names.LABEL_ORDINAL, "0"))
    place = (label[names.LABEL_COMPONENT], label.get(names.LABEL_POOL, ""), ordinal)
    before = [p for p in observed.pods if (p.component, p.pool, p.ordinal) == place and p.attempt < attempt]
    why = _ended(max(before, key=lambda p: p.attempt)) if before else "its place has no pod"
    _tell("pod made", observed, {"attempt": attempt, "pod": pod["metadata"]["name"], "why": why})


def pod_deleted(observed: Observed, pod: DeletePod) -> None:
    attempt = next((p.attempt for p in observed.pods if p.uid == pod.uid), 0)
    _tell("pod deleted", observed, {"attempt": attempt, "pod": pod.name, "why": pod.why})


def _ended(pod: PodView) -> str:
    """>>> _ended(PodView(name="math-train-0-a1", ..., phase="Failed", exit_code=1, exit_reason="OOMKilled"))
    'takes the place of math-train-0-a1 (Failed, OOMKilled, exit code 1)'
    """
    code = f"exit code {pod.exit_code}" if pod.exit_code is not None else ""
    known = filter(None, (pod.phase, pod.pod_reason, pod.disruption, pod.exit_reason, code))
    return f"takes the place of {pod.name} ({', '.join(known)})"


def _tell(what: str, observed: Observed, fields: dict[str, Any]) -> None:
    logger.info(what, extra={"job": str(observed.key), **fields})
