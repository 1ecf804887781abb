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

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import exp, inf, log

from rlinf_api.errors import InvariantBroken
from rlinf_api.job import Objective, PlacementMode
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
    at_once: bool = False
    """The step's units are trained on when the last of them is there, whatever the micro-batch."""
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
    items: int = 0
    """Units of a step that it works on; 0: as many as the problem says. Between roles of different numbers units are
    split, or put together, evenly and in the order of their keys: of 8 and 64 each makes 8, of 64 and 8 each 8 make
    one, which is there when the last of them is."""
    tokens: float = 0.0
    """The tokens of a mean unit, where its time goes by them and `sizes` are theirs: for who reads it."""
    sizes: tuple[float, ...] = (1.0,)
    """The sizes of the units of a step, relative to the mean, in the order of their keys; repeated where there are more
    units."""
    later_sizes: tuple[tuple[float, ...], ...] = ()
    """The same of the steps behind it. A long tail differs from step to step, and a prediction is of the mean step;
    the steps behind the last one begin with the first again."""
    load_ms: Cost = ZERO
    offload_ms: Cost = ZERO
    resident_mib: float = 0.0
    offloaded_mib: float = 0.0
    kv_mib: float = 0.0
    """The part of what is resident that is keys and values, for which a plan gives it room: for who reads it."""
    may_stay: bool = False
    """Whether the runtime can leave it resident while others have the turn."""
    slots_per_worker: int = 1
    scaling: float = 1.0
    """A worker on s slots is s ** scaling times as fast as on one."""
    fewest: int = 1
    most: int = MAX_SLOTS
    tickets: str = "tickets"
    """The channel from the driver, of a role that has no other input."""
    bundle: int = 1
    """Units that come of one ticket and stay with the worker that has it: an engine's samples of a prompt."""

    @property
    def is_gang(self) -> bool:
        return isinstance(self.service, InRounds)

    @property
    def all_sizes(self) -> tuple[tuple[float, ...], ...]:
        return (self.sizes, *self.later_sizes)

    @property
    def least(self) -> int:
        """The fewest workers that it may have."""
        ranks = self.service.ranks if isinstance(self.service, InRounds) else ()
        return min((n for n in ranks if n >= self.fewest), default=max(1, self.fewest))

    def worlds(self, room: int, most: int, step: int) -> list[int]:
        """The largest allowed numbers of workers up to `room`; where any is allowed, multiples of `step`."""
        if isinstance(self.service, InRounds) and self.service.ranks:
            able = sorted((n for n in self.service.ranks if n <= room and self.allows(n)), reverse=True)
            return able[:most]
        top = min(room, self.most)
        step = 1 if top < step or self.fewest == self.most else step
        return [n for n in range(top // step * step, 0, -step) if n >= self.fewest][:most]

    @property
    def smallest(self) -> int:
        """The option that takes least memory."""
        return min(range(len(self.options)), key=lambda i: self.options[i].peak_mib)

    def pinned(self, workers: int) -> RoleCosts:
        return replace(self, fewest=workers, most=workers)

    def allows(self, workers: int) -> bool:
        ranks = self.service.ranks if isinstance(self.service, InRounds) else ()
        return self.fewest <= workers <= self.most and (not ranks or workers in ranks)


@dataclass(frozen=True, slots=True)
class QueueEdge:
    producer: str
    consumer: str
    name: str = ""
    """The channel's name; empty: both roles' names with a dash."""

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
    """A step's units travel `round_trips` times through front and back: front asks, back answers. Where back feeds the
    next role, front works before it asks; where front does, it asks at once and works on each answer. No role is in two
    cycles."""

    front: str
    back: str
    round_trips: int
    hop_ms: Cost = ZERO
    is_single: bool = False
    """Each unit travels by itself, and `stages` of a front worker's are under way at once. Otherwise its share of a
    step travels in so many sub-batches; a front that another role feeds has no share of a step that it knows of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    name: str
    slots: int
    memory_mib: float = 0.0
    """The memory of a slot, in MiB. 0: not known, and taken to suffice."""
    roles: tuple[str, ...]
    speed: float = 1.0
    slots_per_pod: int = MAX_SLOTS
    """No worker spans two pods."""
    fewest_pods: int | None = None
    """Pods that are there and paid whatever the plan; `slots` are those of the most pods. None: all of them."""

    @property
    def most_pods(self) -> int:
        return -(-self.slots // self.slots_per_pod)

    @property
    def least_pods(self) -> int:
        return self.most_pods if self.fewest_pods is None else min(self.fewest_pods, self.most_pods)


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    roles: tuple[RoleCosts, ...]
    edges: tuple[QueueEdge, ...]
    pools: tuple[Pool, ...]
    items: int
    """Units of a step, of roles that say nothing else. Both ends of a cycle have those of its front."""
    weights: WeightsEdge | None = None
    cycles: tuple[CycleEdge, ...] = ()
    staleness: int = 0
    hand_over_ms: Cost = ZERO
    """From the end of a unit's work to where its next role may take it."""
    turn_ms: Cost = ZERO
    """A change of turn, without loads and offloads."""
    objective: Objective = Objective.STEP_TIME
    min_gain_per_slot: float = 0.0
    """Share of step time that one more slot must save; CostPerStep: at least what it costs."""
    mode: PlacementMode = PlacementMode.AUTO
    """Collocated: all roles of a pool take turns on its slots; Disaggregated: nobody does; else what is best."""
    pins: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Workers of a role, where a person has said how many."""

    def __post_init__(self) -> None:
        ends = [name for cycle in self.cycles for name in (cycle.front, cycle.back)]
        if twice := sorted({name for name in ends if ends.count(name) > 1}):
            raise InvariantBroken(f"role {twice[0]!r} is in two cycles, and one of a role is planned")
        for cycle in self.cycles:
            if not cycle.is_single and self.inputs(cycle.front):
                raise InvariantBroken(f"role {cycle.front!r} is fed by a role, so that its units travel by themselves")

    @cached_property
    def index(self) -> dict[str, int]:
        return {role.name: i for i, role in enumerate(self.roles)}

    @cached_property
    def units(self) -> dict[str, int]:
        """The units of a step, by role."""
        found = {role.name: role.items or self.items for role in self.roles}
        return found | {cycle.back: found[cycle.front] for cycle in self.cycles}

    @cached_property
    def unpinned(self) -> PlanProblem:
        """The same with pins as bounds of the roles' workers."""
        if not self.pins:
            return self
        if unknown := sorted(set(self.pins) - set(self.index)):
            raise InvariantBroken(f"pins of {', '.join(unknown)}, and the roles are {', '.join(self.index)}")
        roles = tuple(r.pinned(self.pins[r.name]) if r.name in self.pins else r for r in self.roles)
        return replace(self, roles=roles, pins={})

    def price(self, slots: int) -> float:
        """The price of a step of one millisecond on so many slots, as a logarithm. A further slot must save
        `min_gain_per_slot`; with CostPerStep its own share, where that is more.

        >>> p = PlanProblem(roles=(), edges=(), pools=(), items=1, objective=Objective.COST_PER_STEP)
        >>> round(p.price(8) - p.price(4), 3)  # twice the slots: worth it where a step takes less than half as long
        0.693
        >>> q = PlanProblem(roles=(), edges=(), pools=(), items=1, min_gain_per_slot=0.01)
        >>> round(exp(q.price(4) - q.price(8)), 4)  # four slots more: worth it where a step takes so much of the time
        0.9606
        """
        if not self.has_price or slots < 1:
            return 0.0
        share, bare = min(self.min_gain_per_slot, 1 - 1e-9), 1
        if self.objective is Objective.COST_PER_STEP:
            bare = min(slots, int(1 / share) if share else slots)
        return log(bare) - (slots - bare) * log(1 - share)

    @property
    def has_price(self) -> bool:
        """Slots do not come for nothing."""
        return self.objective is Objective.COST_PER_STEP or self.min_gain_per_slot > 0

    def score(self, period_ms: float, slots: int) -> float:
        """What the best plan has least of."""
        if not self.has_price:
            return period_ms
        return log(period_ms) + self.price(slots) if period_ms > 0 else -inf

    def within(self, score: float, slots: int) -> float:
        """The period that has this score on so many slots."""
        return exp(score - self.price(slots)) if self.has_price else score

    @cached_property
    def size_sets(self) -> int:
        """Steps behind which units have the sizes of the first one again."""
        return max((len(role.all_sizes) for role in self.roles), default=1)

    @cached_property
    def _by_name(self) -> dict[str, RoleCosts]:
        return {role.name: role for role in self.roles}

    @cached_property
    def _inputs(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(e.producer for e in self.edges if e.consumer == name) for name in self.index}

    def role(self, name: str) -> RoleCosts:
        return self._by_name[name]

    def inputs(self, name: str) -> tuple[str, ...]:
        return self._inputs[name]

    def outputs(self, name: str) -> tuple[str, ...]:
        return tuple(e.consumer for e in self.edges if e.producer == name)

    def channel(self, name: str) -> str:
        """Whose micro-batches the role takes: of several inputs the first, which the others join."""
        return next((e.channel for e in self.edges if e.consumer == name), self.role(name).tickets)

    @cached_property
    def cycle_of(self) -> dict[str, CycleEdge]:
        """By both of its roles."""
        return {name: cycle for cycle in self.cycles for name in (cycle.front, cycle.back)}

    @cached_property
    def first(self) -> tuple[str, ...]:
        """Roles that take tickets."""
        backs = {cycle.back for cycle in self.cycles}
        return tuple(r.name for r in self.roles if not self.inputs(r.name) and r.name not in backs)

    def asker_feeds(self, cycle: CycleEdge) -> bool:
        """Whether what has gone through the cycle leaves it at the front."""
        return bool(self.outputs(cycle.front))

    @cached_property
    def terminal(self) -> tuple[str, ...]:
        """Roles that end a step: who feeds nobody. Of a cycle's roles that one does not where units turn back."""
        turns = {cycle.back if self.asker_feeds(cycle) else cycle.front for cycle in self.cycles}
        return tuple(r.name for r in self.roles if not self.outputs(r.name) and r.name not in turns)


def resampled(sizes: Sequence[float], *, items: int, steps: int, name: str) -> tuple[tuple[float, ...], ...]:
    """Sizes of the units of several steps, drawn from those that were seen: for `sizes` and `later_sizes` of a long
    tail, where one step says little of the mean step. The same ones for the same name on any machine.

    >>> [len(step) for step in resampled([1.0, 9.0], items=3, steps=2, name="roll")]
    [3, 3]
    """
    drawn = [random.Random(f"{name} {step}").choices(sizes, k=items) for step in range(steps)]
    mean = sum(map(sum, drawn)) / (items * steps)
    wanted = sum(sizes) / len(sizes)
    return tuple(tuple(size * wanted / mean for size in step) for step in drawn)
