"""What a pod whose main container is not running any more means, and what follows from it. Pure; the one table of
causes. Whatever else runs in the pod says nothing (pod_view.py).

| met | cause | follows |
|---|---|---|
| exit 64 | User | the job fails: trying again is pointless |
| exit 76 | Stale | replaced, not counted: a newer attempt of it was seen |
| exit 75, DriverAbsent, no driver ready | NoDriver | replaced, not counted: why there is no driver is the cause |
| exit 75, DriverAbsent, a driver ready | Infrastructure | as below: the network lies between them |
| exit 255/Unknown, eviction, DisruptionTarget, deletion, lost node | Infrastructure | replaced, bounded by a setting |
| anything else, OOMKilled included | Program | replaced, counted against failurePolicy.maxRestarts |
| an init container of the user's template failed | Program | the same, whatever its exit code |
| exit 0 of the driver | none | the flow has finished |
| exit 0 of a worker pod | none for a moment, then Infrastructure | its driver's last report comes first |

A drained pod that exits 0 looks successful: DisruptionTarget and deletionTimestamp are looked at before the exit code.
Exit codes come with `rlinf_api.names`; what a real kubelet reports in each case was measured (255 with reason "Unknown"
after a node's crash; a child's OOM kill shows as OOMKilled with the main process's own exit code).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from rlinf_api import names
from rlinf_api.report import DriverReport, DriverState, Failure, failure_of
from rlinf_operator.policies.pod_view import PodView


class Cause(StrEnum):
    NONE = "None"
    PROGRAM = "Program"
    INFRASTRUCTURE = "Infrastructure"
    STALE = "Stale"
    NO_DRIVER = "NoDriver"
    USER = "User"
    RULED = "Ruled"
    """A rule of failurePolicy fails or suspends the job for it, or restarts it as a whole, which counts by itself."""


DRIVER_ABSENT: Final = "DriverAbsent"  # an agent's last words: nobody answered at the driver's name for 300 s
UNKNOWN_EXIT: Final = 255  # with reason Unknown: the node died under the pod
KILLED: Final = 137
EXIT_REASONS: Final[dict[int, str]] = {
    names.EXIT_USER_ERROR: "UserError",
    names.EXIT_BUG: "InternalError",
    names.EXIT_RETRYABLE: "RetryableError",
    names.EXIT_STALE: "Stale",
    names.EXIT_TERMINATED: "Terminated",
    KILLED: "Killed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`alive`: still the pod of its place. Otherwise `cause` says why not and `failure` how it ended."""

    alive: bool
    cause: Cause = Cause.NONE
    failure: Failure | None = None
    look_again_s: float | None = None
    """The verdict changes by time alone after so long."""


def judge(pod: PodView, *, now: datetime, exit_zero_grace_s: float, driver_ready: bool = True) -> Verdict:
    """The verdict on one pod of a job that is meant to run. `driver_ready`: whether its job has a driver to reach."""
    ended = pod.has_ended
    if ended and pod.exit_code == names.EXIT_USER_ERROR and not pod.failed_init:
        return Verdict(alive=False, cause=Cause.USER, failure=_failure(pod, ""))
    if pod.component == names.COMPONENT_DRIVER and pod.phase == "Succeeded":
        if driver_state(pod) is DriverState.DRAINED:
            return Verdict(alive=False, cause=Cause.INFRASTRUCTURE, failure=_failure(pod, "Drained"))
        return Verdict(alive=True)  # it exits 0 only when the flow has finished (143 on SIGTERM): the end, not a loss
    if pod.deleted_at is not None or pod.disruption:
        if not ended and pod.deleted_at is None:
            return Verdict(alive=True)  # announced, not yet begun: the deletionTimestamp comes with the next event
        reason = pod.disruption or ("Terminated" if ended else "Deleted")
        return Verdict(alive=False, cause=Cause.INFRASTRUCTURE, failure=_failure(pod, reason))
    if not ended:
        return Verdict(alive=True)
    if pod.exit_code == 0 or (pod.exit_code is None and pod.phase == "Succeeded"):
        return _succeeded(pod, now=now, exit_zero_grace_s=exit_zero_grace_s)
    if pod.exit_code == names.EXIT_STALE and not pod.failed_init:
        return Verdict(alive=False, cause=Cause.STALE, failure=_failure(pod, ""))
    if pod.exit_code is None or (pod.exit_code == UNKNOWN_EXIT and pod.exit_reason == "Unknown") or pod.pod_reason:
        reason = pod.pod_reason or "NodeLost"
        return Verdict(alive=False, cause=Cause.INFRASTRUCTURE, failure=_failure(pod, reason))
    if pod.failed_init:
        return Verdict(alive=False, cause=Cause.PROGRAM, failure=_failure(pod, ""))
    if pod.exit_code == names.EXIT_RETRYABLE and _words(pod.exit_message).get("reason") == DRIVER_ABSENT:
        if driver_ready:
            return Verdict(alive=False, cause=Cause.INFRASTRUCTURE, failure=_failure(pod, ""))
        return Verdict(alive=False, cause=Cause.NO_DRIVER)  # no failure of its own: why no driver runs is the cause
    return Verdict(alive=False, cause=Cause.PROGRAM, failure=_failure(pod, ""))


def _succeeded(pod: PodView, *, now: datetime, exit_zero_grace_s: float) -> Verdict:
    left_s = exit_zero_grace_s - (now - (pod.finished_at or now)).total_seconds()
    if left_s > 0 and pod.finished_at is not None:
        return Verdict(alive=True, look_again_s=left_s)
    return Verdict(alive=False, cause=Cause.INFRASTRUCTURE, failure=_failure(pod, "ExitedEarly"))


def driver_state(pod: PodView) -> DriverState | None:
    """The state in which a driver ended, by its last words: for an operator that was away when it reported."""
    if not pod.has_ended:
        return None
    words = _words(pod.exit_message).get("state")
    if isinstance(words, str) and words in set(DriverState):
        return DriverState(words)
    return DriverState.COMPLETE if pod.phase == "Succeeded" and pod.exit_code in (0, None) else None


def last_report(pod: PodView) -> DriverReport | None:
    """What an ended driver's termination message says of its progress, and nothing else: its last report may have gone
    unheard. None where it says nothing of it: it was killed, is of a version that did not say, or ended before it had
    learnt from the workers at which step they are."""
    words = _words(pod.exit_message)

    def number(key: str) -> int:
        value = words.get(key)
        return value if isinstance(value, int) and value >= 0 else 0

    if not pod.has_ended or number("step") == 0:
        return None
    return DriverReport(
        job_uid="",
        driver_attempt=pod.attempt,
        state=driver_state(pod) or DriverState.FAILED,
        step=number("step"),
        steps=number("steps"),
        branch=number("branch"),
        checkpoint_uri=str(words.get("checkpoint_uri") or ""),
        checkpoint_step=number("checkpoint_step"),
    )


def last_words(text: str) -> Failure | None:
    """The termination message as a first failure; None where it is no JSON object (a log's tail, nothing)."""
    fields = _words(text)
    return failure_of(fields) if fields else None


def _failure(pod: PodView, reason: str) -> Failure:
    """How a pod ended, its own words first."""
    words = last_words(pod.exit_message) if not pod.failed_init else None
    code = pod.exit_code if pod.exit_code is not None else -1
    kubelets = pod.exit_reason if pod.exit_reason not in ("", "Error", "Completed") else ""
    if kubelets == "OOMKilled" and code != KILLED:
        kubelets = ""  # one of its processes was killed, perhaps hours ago; what ended it now says the exit code
    known = "InitFailed" if pod.failed_init else EXIT_REASONS.get(code, f"Exit{code}")
    text = pod.exit_message.strip()[-1000:]
    if pod.failed_init:
        text = f"init container {pod.failed_init}" + (f": {text}" if text else f" ended with exit code {code}")
    return Failure(
        role=words.role if words else "",
        worker=words.worker if words else -1,
        pod=pod.name,
        node=pod.node or (words.node if words else ""),
        exit_code=code,
        reason=reason or kubelets or (words.reason if words else "") or known,
        message=(words.message if words else text) or pod.pod_message,
    )


def _words(text: str) -> dict[str, object]:
    try:
        raw = json.loads(text)
    except ValueError:
        return {}
    return {_snake(key): value for key, value in raw.items()} if isinstance(raw, dict) else {}


def _snake(key: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in key)
