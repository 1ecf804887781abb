"""Condition types and reasons of RLJob and RLPlan, and the pure function that sets one.

KEP-1623 style: a list keyed by type; status True | False | Unknown; `reason` is CamelCase and stable (people alert on
it), `message` is for people; lastTransitionTime moves only when status changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Status(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class JobCondition(StrEnum):
    """In the order in which a job usually reaches them; the terminal two exclude each other, for ever."""

    VALID = "Valid"
    SUSPENDED = "Suspended"
    ADMITTED = "Admitted"
    PODS_READY = "PodsReady"
    RUNNING = "Running"
    PROFILED = "Profiled"
    PLAN_APPLIED = "PlanApplied"
    DEGRADED = "Degraded"
    COMPLETE = "Complete"
    FAILED = "Failed"


class PlanCondition(StrEnum):
    PREPARED = "Prepared"
    APPLIED = "Applied"
    SUPERSEDED = "Superseded"
    ROLLED_BACK = "RolledBack"
    FAILED = "Failed"


class Reason(StrEnum):
    """Every reason that a condition may carry. Added to, never renamed."""

    # Valid
    ACCEPTED = "Accepted"
    INVALID_SPEC = "InvalidSpec"
    NOT_SUPPORTED_YET = "NotSupportedYet"
    INFEASIBLE = "Infeasible"
    RUNTIME_NOT_FOUND = "RuntimeNotFound"
    RUNTIME_INVALID = "RuntimeInvalid"
    RUNTIME_REFUSED = "RuntimeRefused"
    RUNTIME_CHANGED = "RuntimeChanged"
    # Suspended
    SUSPENDED_BY_USER = "SuspendedByUser"
    DRAINING = "Draining"
    DRAIN_DEADLINE_EXCEEDED = "DrainDeadlineExceeded"
    NOT_SUSPENDED = "NotSuspended"
    SUSPENDED_BY_RULE = "SuspendedByRule"
    SUSPENDED_BY_QUEUE = "SuspendedByQueue"
    # Admitted
    NO_QUEUE = "NoQueue"
    NO_PROVIDER = "NoProvider"
    ADMITTED = "Admitted"
    EVICTED = "Evicted"
    DEACTIVATED = "Deactivated"
    QUEUE_REFUSED = "QueueRefused"
    NOT_PLACED = "NotPlaced"
    # Admitted, PodsReady, Running
    QUEUED = "Queued"
    # PodsReady, Running
    PODS_STARTING = "PodsStarting"
    PODS_READY = "PodsReady"
    PODS_MISSING = "PodsMissing"
    QUOTA_EXCEEDED = "QuotaExceeded"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    WAITING_FOR_PLAN = "WaitingForPlan"
    SCHEDULER_UNAVAILABLE = "SchedulerUnavailable"
    WAITING_FOR_DRIVER = "WaitingForDriver"
    WAITING_FOR_WORKERS = "WaitingForWorkers"
    STEPPING = "Stepping"
    STOPPED = "Stopped"
    RECOVERING = "Recovering"
    # Profiled, PlanApplied
    PLAN_IN_FORCE = "PlanInForce"
    PLAN_PENDING = "PlanPending"
    PLAN_FAILED = "PlanFailed"
    PLAN_NOT_ALLOWED = "PlanNotAllowed"
    PIN_NOT_FOUND = "PinNotFound"
    PIN_REFUSED = "PinRefused"
    PROFILING = "Profiling"
    PROFILED = "Profiled"
    PROFILING_OFF = "ProfilingOff"
    UNFIT = "Unfit"
    # Degraded
    HEALTHY = "Healthy"
    WORKER_RESTARTING = "WorkerRestarting"
    TURNS_WITHOUT_ITEMS = "TurnsWithoutItems"
    MEMORY_KEPT = "MemoryKept"
    LOGPROB_MISMATCH = "LogprobMismatch"
    NOTHING_LEARNT = "NothingLearnt"
    STALLED = "Stalled"
    POD_REPLACED = "PodReplaced"
    JOB_RESTARTED = "JobRestarted"
    DRIVER_UNREACHABLE = "DriverUnreachable"
    # Complete, Failed
    FLOW_FINISHED = "FlowFinished"
    USER_ERROR = "UserError"
    TOO_MANY_RESTARTS = "TooManyRestarts"
    FAILURE_RULE = "FailureRule"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    CHECKPOINT_UNREADABLE = "CheckpointUnreadable"
    CHECKPOINT_UNWRITABLE = "CheckpointUnwritable"
    INTERNAL_ERROR = "InternalError"


USERS: Final = frozenset({Reason.USER_ERROR, Reason.CHECKPOINT_UNREADABLE, Reason.CHECKPOINT_UNWRITABLE})
"""Why a job fails that only its user can repair: what exit code 64 may mean."""


def of_user(said: str) -> Reason:
    """The reason of a job whose part ended with exit code 64 and these last words.

    >>> str(of_user("CheckpointUnreadable")), str(of_user("InvalidManifest"))
    ('CheckpointUnreadable', 'UserError')
    """
    return Reason(said) if said in USERS else Reason.USER_ERROR


class JobState(StrEnum):
    """How a job is, in one word: column STATE of `kubectl get rljobs`, made of its conditions by `state_of`."""

    QUEUED = "Queued"  # it waits for its first plan, or for its queue, and has no pods
    STARTING = "Starting"
    PROFILING = "Profiling"  # at work, and the first steps of its plan are measured
    RUNNING = "Running"
    RECOVERING = "Recovering"  # something was lost, and its steps do not go on yet
    STALLED = "Stalled"  # it does not get on by itself: see Valid and Degraded
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


Time = Annotated[
    str | None, BeforeValidator(lambda said: said or None), Field(json_schema_extra={"format": "date-time"})
]
"""RFC 3339. Absent where there is none: an empty text is no time, and clients in Go refuse the object."""


class Condition(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True, frozen=True)

    type: Annotated[str, Field(max_length=316)]
    status: Status
    reason: Annotated[str, Field(max_length=1024)] = ""
    message: Annotated[str, Field(max_length=32768)] = ""
    last_transition_time: Time = None
    observed_generation: int = 0


def set_condition(existing: Sequence[Condition], new: Condition) -> tuple[Condition, ...]:
    """The list with `new` in the place of its type; the old transition time is kept unless the status changed.

    >>> old = Condition(type="Running", status=Status.TRUE, reason="Stepping", last_transition_time="t0")
    >>> new = Condition(type="Running", status=Status.TRUE, reason="Recovering", last_transition_time="t9")
    >>> [(c.reason, c.last_transition_time) for c in set_condition([old], new)]
    [('Recovering', 't0')]
    """
    result = list(existing)
    for position, old in enumerate(result):
        if old.type == new.type:
            kept = old.last_transition_time if old.status == new.status else new.last_transition_time
            result[position] = new.model_copy(update={"last_transition_time": kept})
            return tuple(result)
    return (*result, new)


def find(conditions: Sequence[Condition], kind: str) -> Condition | None:
    return next((c for c in conditions if c.type == kind), None)


def written(obj: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """That condition of an object's status as JSON; empty where it has none.

    >>> written({"status": {"conditions": [{"type": "Running", "status": "True"}]}}, "Running").get("status")
    'True'
    """
    listed = (obj.get("status") or {}).get("conditions") or ()
    return next((c for c in listed if c["type"] == kind), {})


def is_true(conditions: Sequence[Condition], kind: str) -> bool:
    found = find(conditions, kind)
    return found is not None and found.status == Status.TRUE


def is_finished(conditions: Sequence[Condition]) -> bool:
    """Exactly one of Complete and Failed is True, and then for ever."""
    return is_true(conditions, JobCondition.COMPLETE) or is_true(conditions, JobCondition.FAILED)


_WAITS: Final = (Reason.WAITING_FOR_PLAN, Reason.SCHEDULER_UNAVAILABLE, Reason.QUEUED)
_HANGS: Final = (Reason.STALLED, Reason.TURNS_WITHOUT_ITEMS, Reason.DRIVER_UNREACHABLE)


def state_of(conditions: Sequence[Condition]) -> JobState:
    """
    >>> str(state_of([Condition(type="Running", status=Status.TRUE, reason="Stepping")]))
    'Running'
    """
    suspended, admitted = find(conditions, JobCondition.SUSPENDED), find(conditions, JobCondition.ADMITTED)
    by_queue = suspended is not None and suspended.reason == Reason.SUSPENDED_BY_QUEUE
    waits = by_queue and admitted is not None and admitted.reason != Reason.DEACTIVATED
    for kind, state in (
        (JobCondition.FAILED, JobState.FAILED),
        (JobCondition.COMPLETE, JobState.COMPLETE),
        (JobCondition.SUSPENDED, JobState.QUEUED if waits else JobState.SUSPENDED),
    ):
        if is_true(conditions, kind):
            return state
    running, degraded = find(conditions, JobCondition.RUNNING), find(conditions, JobCondition.DEGRADED)
    valid = find(conditions, JobCondition.VALID)
    if degraded is not None and degraded.status == Status.TRUE and degraded.reason in _HANGS:
        return JobState.STALLED
    if running is not None and running.status == Status.TRUE:
        profiled = find(conditions, JobCondition.PROFILED)
        measures = profiled is not None and profiled.reason == Reason.PROFILING
        return JobState.PROFILING if measures else JobState.RUNNING
    if valid is not None and valid.status == Status.FALSE:
        return JobState.STALLED
    if running is not None and running.reason == Reason.STOPPED:  # its last pods are on their way out, and not gone
        return JobState.RUNNING
    if running is None or running.reason in _WAITS:
        return JobState.QUEUED
    lost = degraded is not None and degraded.status == Status.TRUE
    return JobState.RECOVERING if lost or running.reason == Reason.RECOVERING else JobState.STARTING
