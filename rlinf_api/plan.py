"""The execution plan of one job: the RLPlan. Spec by the scheduler (or a person, to pin one), immutable, one object per
revision; status by the operator. The driver executes nothing else.

A plan names logical slots, never nodes or pod uids, so it survives a lost pod. `placement.resolve` expands and checks
it; nothing but the shape is judged here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field

from rlinf_api.job import Conditions, Model, Name, Quantity, StatusModel, by, cel


class PlanReason(StrEnum):
    INITIAL = "Initial"
    PROFILED = "Profiled"
    DRIFT = "Drift"
    CAPACITY_CHANGED = "CapacityChanged"
    PROBE = "Probe"
    ROLLED_BACK = "RolledBack"
    PINNED = "Pinned"


MOST_STAGES: Final = 1000  # of a cycle
SlotRange = Annotated[str, Field(min_length=1, max_length=4096)]
EntryName = Annotated[str, Field(min_length=1, max_length=63)]
Sentence = Annotated[str, Field(max_length=8192)]
MicroBatch = Annotated[int, Field(ge=1, le=1_000_000_000)]
Depth = Annotated[int, Field(ge=1, le=1_000_000)]


class JobRef(Model):
    name: Annotated[str, Field(max_length=63)]
    uid: Annotated[str, Field(max_length=64)]


class BasedOn(Model):
    revision: int = 0
    profile: Annotated[str, Field(max_length=128)] = ""


class PoolPlan(Model):
    name: Name
    pods: Annotated[int, Field(ge=0, le=100_000)]
    together: Annotated[list[Annotated[list[int], Field(max_length=1000)]], Field(max_length=1000)] = []
    """Groups of ordinals that must share a node or topology domain."""


class WorkerMemory(Model):
    """Bytes of one slot. Where the role's config declares them too, the larger number counts."""

    resident: Quantity = "0"
    peak: Quantity = "0"
    offloaded: Quantity = "0"
    kv: Quantity = "0"


class WorkerPlan(Model):
    """Workers of one role. Several entries of a role are one role: its ranks go on from one entry to the next."""

    role: Name
    count: Annotated[int, Field(ge=1, le=100_000)]
    slots: SlotRange
    memory: WorkerMemory | None = None
    option: Annotated[str, Field(max_length=63)] = ""
    """Which of its ways of working the role takes, by a name of its own; empty: as its config says. Of a synthetic role
    the index in its `options`, or `base`."""
    tokens: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    """Tokens that one worker may have at work at once, its batch. 0: as its config says."""
    stays: bool = False
    """Resident while others have their turns on its slots: neither offloaded nor loaded again. false: memory is what
    roles in turns lack most."""


class Until(Model):
    """What ends a turn: so many units, or the end of the step."""

    units: Annotated[int, Field(ge=1)] | None = None
    step: Literal["end"] | None = None


class TurnPlan(Model):
    role: Name
    until: Until = Until(step="end")


class LeaseSetPlan(Model):
    name: EntryName
    slots: SlotRange
    turns: Annotated[list[TurnPlan], Field(max_length=16)] = []


class ChannelMode(StrEnum):
    QUEUE = "Queue"
    CYCLE = "Cycle"


class Capacity(Model):
    units: Annotated[int, Field(ge=1, le=1_000_000_000_000_000)] = 1024
    """Units a channel holds before its producers wait. 1,024: some steps of a small job, kilobytes of headers. At most
    what microBatch * depth may be."""
    bytes: Quantity = "1Gi"
    """Bytes a channel holds before its producers wait. 1 GiB: what a host can spare per channel."""


class ChannelPlan(Model):
    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "self.capacity.units >= self.microBatch * self.depth",
                    "spec.channels[*].capacity.units is below microBatch * depth, so the channel would stand still; "
                    "raise capacity.units or lower depth",
                )
            ]
        }
    )
    name: EntryName
    mode: ChannelMode = ChannelMode.QUEUE
    micro_batch: MicroBatch = 1
    depth: Depth = 2
    """Micro-batches in flight per consumer. 2: one worked on, one arriving."""
    capacity: Capacity = Capacity()


class CyclePlan(Model):
    roles: Annotated[list[Name], Field(min_length=2, max_length=16)]
    stages: Annotated[int, Field(ge=1, le=MOST_STAGES)] = 1
    """Sub-batches in flight, so that simulator and policy work at once. 1: in turn."""


class PredictedParts(Model):
    compute: float = 0.0
    load: float = 0.0
    offload: float = 0.0
    weights: float = 0.0
    wait: float = 0.0


class Predicted(Model):
    period_seconds: float = 0.0
    parts: PredictedParts = PredictedParts()
    idle_share: float = 0.0


class PlanReasonModel(Model):
    code: PlanReason
    message: Sentence = ""


class Alternative(Model):
    summary: Sentence
    period_seconds: float = 0.0
    lost_because: Sentence = ""


class RLPlanSpec(Model):
    """An execution plan of one job: which workers have which slots, when, and what is in flight between them.

    >>> RLPlanSpec.model_validate({
    ...     "job": {"name": "math", "uid": "5f2c"}, "revision": 1, "pools": [{"name": "gpu", "pods": 1}],
    ...     "workers": [
    ...         {"role": "rollout", "count": 2, "slots": "gpu/0/[0-1]"},
    ...         {"role": "actor", "count": 1, "slots": "gpu/0/[0-1]"},
    ...     ],
    ...     "leaseSets": [
    ...         {"name": "all", "slots": "gpu/0/[0-1]", "turns": [{"role": "rollout"}, {"role": "actor"}]},
    ...     ],
    ...     "channels": [{"name": "samples", "microBatch": 8, "depth": 2}],
    ...     "reason": {"code": "Profiled", "message": "in turns: side by side the actor waits for 40% of the step"},
    ... }).workers[1].slots
    'gpu/0/[0-1]'
    """

    job: JobRef
    revision: Annotated[int, Field(ge=1)]
    based_on: BasedOn = BasedOn()
    source: Literal["Scheduler", "User"] = "Scheduler"
    pools: Annotated[list[PoolPlan], Field(min_length=1, max_length=16, json_schema_extra=by("name"))]
    workers: Annotated[list[WorkerPlan], Field(min_length=1, max_length=64)]
    lease_sets: Annotated[list[LeaseSetPlan], Field(max_length=1000, json_schema_extra=by("name"))] = []
    channels: Annotated[list[ChannelPlan], Field(max_length=64, json_schema_extra=by("name"))] = []
    cycles: Annotated[list[CyclePlan], Field(max_length=16)] = []
    predicted: Predicted | None = None
    reason: PlanReasonModel
    alternatives: Annotated[list[Alternative], Field(max_length=16)] = []


class MeasuredPeriod(StatusModel):
    period_seconds: float = 0.0
    steps: int = 0
    ratio_to_prediction: float = 0.0
    confidence95: list[str] = []


class RLPlanStatus(StatusModel):
    conditions: Conditions = []
    measured: MeasuredPeriod | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The scheduler's answer: a plan that exists now, or the sentences why there can be none."""

    plan: str = ""
    """Its name."""
    revision: int = 0
    infeasible: tuple[str, ...] = ()
