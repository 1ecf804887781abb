"""What a driver says of its job: the frozen form that `decide` reads. wire.py makes it from and to protobuf."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

REPEATED_S: Final = 10.0
"""An unchanged report is sent again so often: silence on a stream that stands is news of the driver."""


class DriverState(StrEnum):
    WAITING = "Waiting"  # for a plan or for agents
    STARTING = "Starting"  # workers load
    RUNNING = "Running"
    RECOVERING = "Recovering"
    DRAINED = "Drained"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """FirstFailure of the job's status, and the JSON of a termination message."""

    role: str = ""
    worker: int = -1
    pod: str = ""
    node: str = ""
    exit_code: int = 0
    reason: str = ""
    message: str = ""


_NONE: Final = Failure()


def failure_of(fields: Mapping[str, object]) -> Failure:
    """The failure that the fields of a termination message tell; what is not what it must be is left out.

    >>> failure_of({"reason": "Hung", "worker": "first", "state": "Failed"}) == Failure(reason="Hung")
    True
    """
    known = {f.name: getattr(_NONE, f.name) for f in dataclasses.fields(Failure)}
    return Failure(**{k: v for k, v in fields.items() if k in known and type(v) is type(known[k])})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """How far a job goes and how often it is kept: what an edit changes in a running driver.

    >>> Goal(steps=60, every_steps=5, keep=2).since(Goal(steps=40, every_steps=5, keep=3))
    'spec.flow.steps is 60 and was 40; spec.checkpoint.keep is 2 and was 3'
    """

    steps: int
    every_steps: int
    keep: int

    def since(self, before: Goal) -> str:
        """What is other than before, as sentences."""
        moved = ((name, getattr(self, field), getattr(before, field)) for field, name in _GOALS.items())
        return "; ".join(f"{name} is {now} and was {then}" for name, now, then in moved if now != then)


_GOALS: Final = {
    "steps": "spec.flow.steps", "every_steps": "spec.checkpoint.everySteps", "keep": "spec.checkpoint.keep",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """A worker met a rule of failurePolicy whose action is the operator's to carry out. It stands until that has
    happened: RestartPod until another attempt of the pod has come, the others until the driver's end."""

    action: str
    rule: str
    """Its key (failure_rules.key_of)."""
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReport:
    """One message of Job.Watch. `sequence` grows with every change of one driver attempt."""

    job_uid: str
    driver_attempt: int
    state: DriverState
    reason: str = ""
    message: str = ""
    step: int = 0
    steps: int = 0
    branch: int = 0
    plan_revision: int = 0
    plan_uid: str = ""
    """The uid of the object of the plan in force, where it was named: somebody may write another of that revision."""
    plan_prepared: int = 0
    plan_preparing: int = 0
    plan_pending_uid: str = ""
    """The uid of the object of either, likewise."""
    plan_failed: int = 0
    """The revision whose preparation failed last."""
    plan_failed_uid: str = ""
    """The uid of its object, likewise."""
    plan_message: str = ""
    """Why it failed, or what the preparation waits for."""
    plan_pause_s: float = 0.0
    """How long the last switch of plans took: from the step boundary until a unit moved."""
    plan_switches: int = 0
    """Plans put in force so far."""
    missing: tuple[str, ...] = ()
    first_failure: Failure | None = None
    restarts: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint_uri: str = ""
    checkpoint_step: int = 0
    step_seconds: float = 0.0
    plan_steps: int = 0
    """Steps measured under the plan in force: without the first, and without those in which somebody was lost."""
    plan_step_s: float = 0.0
    """Their mean."""
    plan_step_spread_s: float = 0.0
    """Standard deviation of one."""
    goal: Goal | None = None
    """What it goes by; None: its image is from before a driver could be told another."""
    scheduler_away: bool = False
    """It took no answer for the last profile, however often it was sent."""
    rulings: tuple[Ruling, ...] = ()
    silent_agents: tuple[str, ...] = ()
    """Pods of the plan whose agent is not attached, and has not been for so long that only another pod helps: p0-0.
    Whether one has run for long enough to be late, the operator sees."""
    sequence: int = 0
