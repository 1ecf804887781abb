"""The execution plan of one job: the RLPlan. Spec by the scheduler (or a person, to pin one), immutable, one object per
revision; status by the operator. The driver executes nothing else.

A plan names logical slots, never nodes or pod uids, so it survives a lost pod. `resolve()` turns the ranges into the
frozen `Placement` that operator, driver and agents work with, and is where an inconsistent plan is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from rlinf_api import lease_sets
from rlinf_api import slots as slot_ranges
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import Conditions, Model, Name, Quantity, RLJobSpec, by, cel
from rlinf_api.names import WorkerId, worker_id
from rlinf_api.slots import Slot


class PlanReason(StrEnum):
    INITIAL = "Initial"
    PROFILED = "Profiled"
    DRIFT = "Drift"
    CAPACITY_CHANGED = "CapacityChanged"
    PROBE = "Probe"
    ROLLED_BACK = "RolledBack"
    PINNED = "Pinned"


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
    """Of one slot. Where the role's config declares it too, the larger number counts."""

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
    STREAM = "Stream"


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
    stages: Annotated[int, Field(ge=1, le=1000)] = 1
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


class Measured(Model):
    period_seconds: float = 0.0
    steps: int = 0
    ratio_to_prediction: float = 0.0
    confidence95: list[str] = []


class RLPlanStatus(Model):
    conditions: Conditions = []
    measured: Measured | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWorker:
    """One worker of a plan. `rank` counts within its role; the roster of a gang is all of a role's workers."""

    id: WorkerId
    role: str
    rank: int
    world: int
    slots: tuple[Slot, ...]

    @property
    def pod(self) -> tuple[str, int]:
        return self.slots[0].pool, self.slots[0].ordinal


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A plan, expanded and checked against the job."""

    revision: int
    workers: tuple[PlacedWorker, ...]
    pods: dict[str, int]
    channels: dict[str, ChannelPlan]
    stages: dict[frozenset[str], int]
    lease_sets: tuple[lease_sets.LeaseSet, ...] = ()

    def places(self) -> set[tuple[str, int]]:
        """Every pod, with or without a worker: (pool, ordinal)."""
        return {(pool, ordinal) for pool, count in self.pods.items() for ordinal in range(count)}

    def of_role(self, role: str) -> tuple[PlacedWorker, ...]:
        return tuple(w for w in self.workers if w.role == role)

    def in_pod(self, pool: str, ordinal: int) -> tuple[PlacedWorker, ...]:
        return tuple(w for w in self.workers if w.pod == (pool, ordinal))

    def channel(self, name: str) -> ChannelPlan:
        return self.channels.get(name) or ChannelPlan(name=name)


def resolve(plan: RLPlanSpec, job: RLJobSpec) -> Placement:
    """Expand the ranges and refuse what cannot be executed, naming the entry."""
    _names_once(plan)
    pods = {p.name: p.pods for p in plan.pools}
    known_roles = {r.name: r for r in job.roles}
    worlds = _counts(plan)
    workers: list[PlacedWorker] = []
    ranks: Counter[str] = Counter()
    slots = _Slots(plan, job, pods=pods)
    for entry in plan.workers:
        what = f"plan revision {plan.revision}: workers of role {entry.role!r}"
        role = known_roles.get(entry.role)
        if role is None:
            raise InvalidManifest(what, got="a role the job does not have", wanted=f"one of {', '.join(known_roles)}")
        for group in slot_ranges.for_workers(
            entry.slots, entry.count, slots_per_worker=role.slots_per_worker, what=what
        ):
            for slot in group:
                slots.take(slot, entry.role, what=what)
            rank, world = ranks[entry.role], worlds[entry.role]
            wid = worker_id(entry.role, rank)
            workers.append(PlacedWorker(id=wid, role=entry.role, rank=rank, world=world, slots=group))
            ranks[entry.role] += 1
    sets = lease_sets.resolve(plan, job, workers=workers)
    for name in known_roles:
        if not ranks[name]:
            raise InvalidManifest(f"plan revision {plan.revision} has no worker of role {name!r}", next="add one")
    return Placement(
        revision=plan.revision,
        workers=tuple(workers),
        pods=pods,
        channels={c.name: c for c in plan.channels},
        stages={frozenset(c.roles): c.stages for c in plan.cycles},
        lease_sets=sets,
    )


def _counts(plan: RLPlanSpec) -> Counter[str]:
    """Workers of each role, over all of its entries."""
    found: Counter[str] = Counter()
    for entry in plan.workers:
        found[entry.role] += entry.count
    return found


def _names_once(plan: RLPlanSpec) -> None:
    """As the API server has it for lists keyed by name. Without one (local mode) the last would silently win."""
    cycles = [" and ".join(sorted(set(cycle.roles))) for cycle in plan.cycles]
    named: dict[str, Sequence[str]] = {
        "pools": [p.name for p in plan.pools],
        "leaseSets": [s.name for s in plan.lease_sets],
        "channels": [c.name for c in plan.channels],
        "cycles": cycles,
    }
    for where, found in named.items():
        if twice := [name for name, count in Counter(found).items() if count > 1]:
            raise InvalidManifest(
                f"plan revision {plan.revision}: {where}", got=f"{twice[0]!r} twice", wanted="each name once",
                next="remove one of the entries",
            )  # fmt: skip


class _Slots:
    """Who holds which slot: one worker, or, within a lease set, one of each role."""

    def __init__(self, plan: RLPlanSpec, job: RLJobSpec, *, pods: dict[str, int]) -> None:
        self._pods, self._pools = pods, {p.name: p for p in job.pools}
        self._shared = {s for lease in plan.lease_sets for s in slot_ranges.expand(lease.slots)}
        self._taken: dict[Slot, set[str]] = {}

    def take(self, slot: Slot, role: str, *, what: str) -> None:
        pool, pods = self._pools.get(slot.pool), self._pods.get(slot.pool, 0)
        if pool is None or role not in pool.roles:
            raise InvalidManifest(what, got=f"slot {slot}", wanted="a slot of a pool that may run the role")
        if slot.ordinal >= pods or slot.index >= pool.slots.per_pod:
            raise InvalidManifest(
                what, got=f"slot {slot}", wanted=f"ordinal below {pods} and index below {pool.slots.per_pod}",
                next="raise the plan's pods of the pool or choose another slot",
            )  # fmt: skip
        holders = self._taken.setdefault(slot, set())
        if role in holders:
            raise InvalidManifest(
                what, got=f"slot {slot}, which another worker of the role holds", wanted="a slot of its own",
                next="take it out of one of the role's entries",
            )  # fmt: skip
        if holders and slot not in self._shared:
            raise InvalidManifest(
                what, got=f"slot {slot}, held by role {min(holders)!r} too", wanted="one role, or a lease set",
                next="move one of them or list the slot in leaseSets",
            )  # fmt: skip
        holders.add(role)
