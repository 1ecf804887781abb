"""What the planner is asked: roles with their measured costs, how they feed each other, and where they may run. Frozen
values, milliseconds and MiB. For: search, simulate. Not for: where the numbers come from (a profile; in proofs
tools/prove, from a workload), nor how a plan is written for the runtime (spec.py).

A role's times are those of one slot of a pool of speed 1. A unit is ready for a role when all of the role's inputs have
it; the roles that feed nobody end the step.

>>> rollout = RoleCosts(name="rollout", options=(Option(per_item_ms=Cost(4.0), peak_mib=60_000),))
>>> train = RoleCosts(name="train", service=InRounds(ranks=(1, 2, 4)), options=(Option(per_item_ms=Cost(2.0)),))
>>> problem = PlanProblem(
...     roles=(rollout, train), edges=(QueueEdge("rollout", "train"),), items=64,
...     pools=(Pool(name="gpu", slots=4, memory_mib=80_000, roles=("rollout", "train")),))
>>> problem.terminal, problem.role("rollout").options[0].per_item_ms.by.value
(('train',), 'assumed')
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from rlinf_api.slots import MAX_SLOTS


class Provenance(StrEnum):
    MEASURED = "measured"
    FITTED = "fitted"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Cost:
    """A cost, and how far it is to be believed. `spread`: its standard deviation."""

    value: float
    spread: float = 0.0
    by: Provenance = Provenance.ASSUMED


ZERO = Cost(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class InBatches:
    """One micro-batch after the other: per batch, then unit by unit; each goes on when its own part is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InLanes:
    """An engine with `lanes` units at once; one holds its lane for lanes x its time. Per batch: once a step."""

    lanes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InRounds:
    """All ranks take a round together; it lasts as long as the slowest rank's part, and sync_ms * (r - 1) / r."""

    sync_ms: Cost = ZERO
    ranks: tuple[int, ...] = ()
    """World sizes that are allowed. Empty: any."""


Service = InBatches | InLanes | InRounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A speed, and the memory of a slot that it takes while at work, what is resident included."""

    per_item_ms: Cost
    peak_mib: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCosts:
    name: str
    service: Service = field(default_factory=InBatches)
    options: tuple[Option, ...]
    """The plan chooses one; the first is as the role stands."""
    per_batch_ms: Cost = ZERO
    sizes: tuple[float, ...] = (1.0,)
    """Of the units of a step, relative to the mean, in the order of their keys; repeated where there are more units."""
    load_ms: Cost = ZERO
    offload_ms: Cost = ZERO
    resident_mib: float = 0.0
    offloaded_mib: float = 0.0
    may_stay: bool = False
    """Whether the runtime can leave it resident while others have the turn."""
    slots_per_worker: int = 1
    scaling: float = 1.0
    """A worker on s slots is s ** scaling times as fast as on one."""
    fewest: int = 1
    most: int = MAX_SLOTS
    tickets: str = "tickets"
    """The channel from the driver, of a role that has no other input."""

    @property
    def is_gang(self) -> bool:
        return isinstance(self.service, InRounds)

    def allows(self, workers: int) -> bool:
        ranks = self.service.ranks if isinstance(self.service, InRounds) else ()
        return self.fewest <= workers <= self.most and (not ranks or workers in ranks)


@dataclass(frozen=True, slots=True)
class QueueEdge:
    producer: str
    consumer: str
    name: str = ""
    """Of the channel; empty: both roles', with a dash."""

    @property
    def channel(self) -> str:
        return self.name or f"{self.producer}-{self.consumer}"


@dataclass(frozen=True, slots=True)
class WeightsEdge:
    """The edge that closes a step. The publisher is busy for `sync_ms` behind the commit; who receives works with the
    new policy from `lag_ms` behind it on."""

    producer: str
    consumer: str
    sync_ms: Cost = ZERO
    lag_ms: Cost = ZERO


@dataclass(frozen=True, slots=True)
class CycleEdge:
    """A step's units travel `round_trips` times through front and back, in sub-batches."""

    front: str
    back: str
    round_trips: int
    hop_ms: Cost = ZERO


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    name: str
    slots: int
    memory_mib: float = 0.0
    """Of a slot. 0: not known, and taken to suffice."""
    roles: tuple[str, ...]
    speed: float = 1.0
    slots_per_pod: int = MAX_SLOTS
    """No worker spans two pods."""


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    roles: tuple[RoleCosts, ...]
    edges: tuple[QueueEdge, ...]
    pools: tuple[Pool, ...]
    items: int
    """Units of a step."""
    weights: WeightsEdge | None = None
    cycle: CycleEdge | None = None
    staleness: int = 0
    hand_over_ms: Cost = ZERO
    """From the end of a unit's work to where its next role may take it."""
    turn_ms: Cost = ZERO
    """A change of turn, without loads and offloads."""

    @cached_property
    def index(self) -> dict[str, int]:
        return {role.name: i for i, role in enumerate(self.roles)}

    def role(self, name: str) -> RoleCosts:
        return self.roles[self.index[name]]

    def inputs(self, name: str) -> tuple[str, ...]:
        return tuple(e.producer for e in self.edges if e.consumer == name)

    def outputs(self, name: str) -> tuple[str, ...]:
        return tuple(e.consumer for e in self.edges if e.producer == name)

    def channel(self, name: str) -> str:
        """Whose micro-batches the role takes: of several inputs the first, which the others join."""
        return next((e.channel for e in self.edges if e.consumer == name), self.role(name).tickets)

    @cached_property
    def first(self) -> tuple[str, ...]:
        """Roles that take tickets."""
        back = self.cycle.back if self.cycle else ""
        return tuple(r.name for r in self.roles if not self.inputs(r.name) and r.name != back)

    @cached_property
    def terminal(self) -> tuple[str, ...]:
        """Roles that end a step: who feeds nobody."""
        front = self.cycle.front if self.cycle else ""
        return tuple(r.name for r in self.roles if not self.outputs(r.name) and r.name != front)
