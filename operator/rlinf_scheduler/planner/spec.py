"""A candidate as an RLPlan says it, and the reverse. For: the chosen plan, and what-if over a plan that exists. Pure.

A role's options are numbered: 0 is the role as it stands, of which a plan says nothing, 1 the first of its list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from operator import gt
from typing import Final

from rlinf_api import placement, quantities
from rlinf_api.job import RLJobSpec
from rlinf_api.plan import (
    BasedOn,
    Capacity,
    ChannelPlan,
    CyclePlan,
    JobRef,
    LeaseSetPlan,
    PlanReasonModel,
    PoolPlan,
    Predicted,
    PredictedParts,
    RLPlanSpec,
    TurnPlan,
    Until,
    WorkerMemory,
    WorkerPlan,
)
from rlinf_api.slots import PlacedWorker, Slot, compress
from rlinf_scheduler.planner import candidate as candidates
from rlinf_scheduler.planner.candidate import Candidate, Choice, PlannedTurn, Region, shape
from rlinf_scheduler.planner.problem import PlanProblem, RoleCosts
from rlinf_scheduler.planner.simulate import Prediction

MIB: Final = 1 << 20
ROOM: Final = 4
"""Times the units of all open steps that a channel holds: its producers share the room out evenly, and one may make
several times its share. What waits costs a header each."""


def write(
    problem: PlanProblem,
    candidate: Candidate,
    prediction: Prediction,
    *,
    job: JobRef,
    revision: int,
    reason: PlanReasonModel,
    based_on: BasedOn | None = None,
    instead_of: Sequence[StandingRegion] = (),
    channels: Sequence[ChannelPlan] = (),
    workers: Sequence[WorkerPlan] = (),
) -> RLPlanSpec | None:
    """`instead_of`: regions of the plan in force, whose workers stay where they are as far as the candidate has them
    too, unless that costs a pod. `channels`: its own, whose capacities stay. `workers`: its own, whose options,
    token budgets and caches do. None: a worker of several slots finds no pod that has them side by side."""
    pods = candidates.pods(problem, candidate)
    layout = _layout(problem, candidate, instead_of) if instead_of else None
    if layout is None or any(map(gt, layout.pods(problem), pods)):
        layout = _layout(problem, candidate, ())
    if layout is None:
        return None
    there = {entry.role: entry for entry in reversed(workers)}
    entries = [_worker(problem.role(name), slots, candidate.choices[name]) for name, slots in layout.of_roles(problem)]
    shared = [placed for placed in layout.regions if len(placed.region.turns) > 1]
    unused = (name for number in count() if (name := f"set-{number}") not in {placed.name for placed in shared})
    lease_sets = [
        LeaseSetPlan(
            name=placed.name or next(unused),
            slots=compress(placed.slots),
            turns=[
                TurnPlan(role=t.role, until=Until(units=t.until) if t.until else Until()) for t in placed.region.turns
            ],
        )
        for placed in shared
    ]
    return RLPlanSpec(
        job=job,
        revision=revision,
        based_on=based_on or BasedOn(),
        pools=[
            PoolPlan(name=p.name, pods=max(n, of_slots))
            for p, n, of_slots in zip(problem.pools, pods, layout.pods(problem), strict=True)
        ],
        workers=[_alike(e, there[e.role], problem.role(e.role)) if e.role in there else e for e in entries],
        lease_sets=lease_sets,
        channels=list(_channels(problem, candidate, channels)),
        cycles=[CyclePlan(roles=[c.front, c.back], stages=candidate.choices[c.front].stages) for c in problem.cycles],
        predicted=predicted(prediction),
        reason=reason,
    )


@dataclass(frozen=True, slots=True)
class StandingRegion:
    """A region of a plan with its slots, and those of each role's workers there, in the order of their ranks."""

    region: Region
    slots: tuple[Slot, ...]
    workers: Mapping[str, tuple[Slot, ...]]
    name: str = ""
    """The name of its lease set."""

    @property
    def shape(self) -> object:
        return shape(self.region)


@dataclass(frozen=True, slots=True)
class _Laid:
    regions: tuple[StandingRegion, ...]

    def pods(self, problem: PlanProblem) -> tuple[int, ...]:
        """The pods of each pool, up to the last slot that somebody has."""
        last = {pool.name: 0 for pool in problem.pools}
        for placed in self.regions:
            for slot in placed.slots:
                last[slot.pool] = max(last[slot.pool], slot.ordinal + 1)
        return tuple(last.values())

    def of_roles(self, problem: PlanProblem) -> Iterator[tuple[str, list[Slot]]]:
        """A role's workers, region by region."""
        for role in problem.roles:
            for placed in self.regions:
                if role.name in placed.workers:
                    yield role.name, list(placed.workers[role.name])


def _layout(problem: PlanProblem, candidate: Candidate, stands: Sequence[StandingRegion]) -> _Laid | None:
    """Regions that stand keep their slots; the others get the first that are left, wide workers before narrow ones:
    behind a region of an odd size they would not lie within a pod any more."""
    there, kept, rest = list(stands), [], []
    for region in candidate.regions:
        same = next((one for one in there if one.shape == shape(region)), None)
        if same is None:
            rest.append(region)
        else:
            there.remove(same)
            kept.append(replace(same, region=region))
    kept.sort(key=lambda placed: [one.shape for one in stands].index(placed.shape))
    rest.sort(key=lambda r: -max(problem.role(t.role).slots_per_worker for t in r.turns))
    taken = {slot for placed in kept for slot in placed.slots}
    free = [
        [
            slot
            for i in range(pool.slots)
            if (slot := Slot(pool.name, i // pool.slots_per_pod, i % pool.slots_per_pod)) not in taken
        ]
        for pool in problem.pools
    ]
    for region in rest:
        slots = [of_pool[:n] for of_pool, n in zip(free, region.slots, strict=True)]
        free = [of_pool[n:] for of_pool, n in zip(free, region.slots, strict=True)]
        workers = {turn.role: _places(problem.role(turn.role), turn, slots) for turn in region.turns}
        if any(places is None for places in workers.values()):
            return None
        found = {name: places for name, places in workers.items() if places is not None}
        kept.append(StandingRegion(region, tuple(slot for of_pool in slots for slot in of_pool), found))
    return _Laid(tuple(kept))


def _places(role: RoleCosts, turn: PlannedTurn, slots: Sequence[Sequence[Slot]]) -> tuple[Slot, ...] | None:
    """None: they do not lie side by side."""
    groups: list[Slot] = []
    for of_pool, n in zip(slots, turn.workers, strict=True):
        found = list(_groups(of_pool, role.slots_per_worker))
        if len(found) < n:
            return None
        groups += [slot for group in found[:n] for slot in group]
    return tuple(groups)


def _worker(role: RoleCosts, slots: Sequence[Slot], choice: Choice) -> WorkerPlan:
    memory = [role.resident_mib, role.options[choice.option].peak_mib, role.offloaded_mib]
    resident, peak, offloaded = (quantities.from_bytes(int(mib * MIB)) for mib in memory)
    return WorkerPlan(
        role=role.name,
        count=len(slots) // role.slots_per_worker,
        slots=compress(slots),
        option=str(choice.option - 1) if choice.option else "",
        stays=choice.stays,
        memory=WorkerMemory(resident=resident, peak=peak, offloaded=offloaded) if any(memory) else None,
    )


def _alike(made: WorkerPlan, like: WorkerPlan, role: RoleCosts) -> WorkerPlan:
    """`like`: the entry under which the role's costs were measured. What no candidate says is as there."""
    same: dict[str, object] = {"tokens": like.tokens}
    if _option(role, like.option) == _option(role, made.option):
        same["option"] = like.option
    if like.memory is not None and (kv := quantities.to_bytes(like.memory.kv)):
        memory = made.memory or WorkerMemory()
        # A plan says what is resident without keys and values, and they count beside it; a problem has them in it.
        resident = max(quantities.to_bytes(like.memory.resident), quantities.to_bytes(memory.resident) - kv)
        own = {"kv": like.memory.kv, "resident": quantities.from_bytes(resident)}
        same["memory"] = memory.model_copy(update=own)
    return made.model_copy(update=same)


def _groups(slots: Sequence[Slot], size: int) -> Iterator[Sequence[Slot]]:
    at = 0
    while at + size <= len(slots):
        group = slots[at : at + size]
        if group[0].ordinal == group[-1].ordinal:
            yield group
            at += size
        else:
            at += 1


def _channels(problem: PlanProblem, candidate: Candidate, stands: Sequence[ChannelPlan]) -> Iterator[ChannelPlan]:
    """With the capacities that they have where they stand; those that the problem does not know as they are there."""
    there = {channel.name: channel for channel in stands}
    backs = {cycle.back for cycle in problem.cycles}
    for role in problem.roles:
        names = [e.channel for e in problem.edges if e.consumer == role.name]
        choice = candidate.choices[role.name]
        if not names and role.name not in backs:
            names = [role.tickets]
        for name in names:
            room = ROOM * problem.units[role.name] * (problem.staleness + 1)
            channel = there.pop(name, ChannelPlan(name=name, capacity=Capacity(units=room)))
            if channel.capacity.units == Capacity().units:  # the contract's, and nobody's wish
                channel = _holding(channel, room)
            yield sized(channel, micro_batch=choice.micro_batch, depth=choice.depth)
    yield from there.values()


def sized(channel: ChannelPlan, *, micro_batch: int, depth: int) -> ChannelPlan:
    """The channel with other sizes; it holds what they have under way, or more."""
    sizes = {"micro_batch": micro_batch, "depth": depth}
    return _holding(channel, micro_batch * depth).model_copy(update=sizes)


def _holding(channel: ChannelPlan, units: int) -> ChannelPlan:
    """So many at least."""
    more = {"units": max(units, channel.capacity.units)}
    return channel.model_copy(update={"capacity": channel.capacity.model_copy(update=more)})


def predicted(prediction: Prediction, *, scale: float = 1.0) -> Predicted:
    """`scale`: how many times longer this job takes than the simulator says."""

    def seconds(*kinds: str) -> float:
        return round(scale * sum(prediction.part(kind) for kind in kinds) / 1e3, 6)

    return Predicted(
        period_seconds=round(scale * prediction.period_ms / 1e3, 6),
        parts=PredictedParts(
            compute=seconds("compute"), load=seconds("load"), offload=seconds("offload"), weights=seconds("weights"),
            wait=seconds("wait", "turn"),
        ),
        idle_share=round(prediction.idle_share, 4),
    )  # fmt: skip


def read(problem: PlanProblem, plan: RLPlanSpec, job: RLJobSpec) -> Candidate:
    """The candidate that an existing plan is, to predict it."""
    placed = placement.resolve(plan, job)
    stages = {c.front: placed.stages.get(frozenset((c.front, c.back)), 1) for c in problem.cycles}
    choices = {}
    for role in problem.roles:
        channel = placed.channel(problem.channel(role.name))
        entries = [entry for entry in plan.workers if entry.role == role.name]
        choices[role.name] = Choice(
            micro_batch=channel.micro_batch,
            depth=channel.depth,
            option=_option(role, entries[0].option),
            stays=entries[0].stays,
            stages=stages.get(role.name, 1),
        )
    regions = tuple(standing.region for standing in stands(problem, plan, job))
    return Candidate(regions=regions, choices=choices)


def stands(problem: PlanProblem, plan: RLPlanSpec, job: RLJobSpec) -> tuple[StandingRegion, ...]:
    """Who is where in a plan that exists: lease sets first, then who has slots of its own, in the problem's order."""
    placed = placement.resolve(plan, job)
    at = {pool.name: i for i, pool in enumerate(problem.pools)}
    found: list[StandingRegion] = []
    inside = {worker_id for lease in placed.lease_sets for turn in lease.turns for worker_id in turn.workers}
    for lease in placed.lease_sets:
        workers = {turn.role: [w for w in placed.workers if w.id in turn.workers] for turn in lease.turns}
        turns = [
            PlannedTurn(t.role, _count((w.slots[0].pool for w in workers[t.role]), at), t.until_units)
            for t in lease.turns
        ]
        region = Region(_count((slot.pool for slot in lease.slots), at), tuple(turns))
        own = {name: _slots(of_role) for name, of_role in workers.items()}
        found.append(StandingRegion(region, tuple(lease.slots), own, lease.name))
    for role in problem.roles:
        alone = [w for w in placed.of_role(role.name) if w.id not in inside]
        if alone:
            slots = _slots(alone)
            turn = PlannedTurn(role.name, _count((w.slots[0].pool for w in alone), at))
            found.append(
                StandingRegion(Region(_count((s.pool for s in slots), at), (turn,)), slots, {role.name: slots})
            )
    return tuple(found)


def _slots(workers: Sequence[PlacedWorker]) -> tuple[Slot, ...]:
    return tuple(slot for worker in workers for slot in worker.slots)


def _option(role: RoleCosts, name: str) -> int:
    """By its number among the costs; one that these do not have is taken as it stands."""
    number = int(name) + 1 if name.isdecimal() else 0
    return number if number < len(role.options) else 0


def _count(pools: Iterator[str], at: dict[str, int]) -> tuple[int, ...]:
    found = [0] * len(at)
    for pool in pools:
        found[at[pool]] += 1
    return tuple(found)
