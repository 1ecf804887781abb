"""A candidate as an RLPlan says it, and the reverse. For: the chosen plan, and what-if over a plan that exists. Pure.

A role's options are numbered: 0 is the role as it stands, of which a plan says nothing, 1 the first of its list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from rlinf_scheduler.planner.candidate import Candidate, Choice, PlannedTurn, Region
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
) -> RLPlanSpec | None:
    """None: a worker of several slots finds no pod that has them side by side."""
    workers: list[WorkerPlan] = []
    lease_sets: list[LeaseSetPlan] = []
    # Wide workers first: behind a region of an odd size they would not lie within a pod any more.
    regions = sorted(candidate.regions, key=lambda r: -max(problem.role(t.role).slots_per_worker for t in r.turns))
    taken = [0] * len(problem.pools)
    for region in regions:
        slots = [
            [Slot(pool.name, i // pool.slots_per_pod, i % pool.slots_per_pod) for i in range(begin, begin + count)]
            for pool, begin, count in zip(problem.pools, taken, region.slots, strict=True)
        ]
        taken = [begin + count for begin, count in zip(taken, region.slots, strict=True)]
        for turn in region.turns:
            entry = _workers(problem.role(turn.role), turn, slots, candidate.choices[turn.role])
            if entry is None:
                return None
            workers.append(entry)
        if len(region.turns) > 1:
            turns = [TurnPlan(role=t.role, until=Until(units=t.until) if t.until else Until()) for t in region.turns]
            names = compress(slot for of_pool in slots for slot in of_pool)
            lease_sets.append(LeaseSetPlan(name=f"set-{len(lease_sets)}", slots=names, turns=turns))
    order = problem.index
    return RLPlanSpec(
        job=job,
        revision=revision,
        based_on=based_on or BasedOn(),
        pools=[PoolPlan(name=p.name, pods=-(-p.slots // p.slots_per_pod)) for p in problem.pools],
        workers=sorted(workers, key=lambda entry: order[entry.role]),
        lease_sets=lease_sets,
        channels=list(_channels(problem, candidate)),
        cycles=[CyclePlan(roles=[problem.cycle.front, problem.cycle.back], stages=candidate.stages)]
        if problem.cycle
        else [],
        predicted=predicted(prediction),
        reason=reason,
    )


def _workers(role: RoleCosts, turn: PlannedTurn, slots: Sequence[Sequence[Slot]], choice: Choice) -> WorkerPlan | None:
    groups: list[Slot] = []
    for of_pool, count in zip(slots, turn.workers, strict=True):
        found = list(_groups(of_pool, role.slots_per_worker))
        if len(found) < count:
            return None
        groups += [slot for group in found[:count] for slot in group]
    memory = [role.resident_mib, role.options[choice.option].peak_mib, role.offloaded_mib]
    resident, peak, offloaded = (quantities.from_bytes(int(mib * MIB)) for mib in memory)
    return WorkerPlan(
        role=role.name,
        count=sum(turn.workers),
        slots=compress(groups),
        option=str(choice.option - 1) if choice.option else "",
        stays=choice.stays,
        memory=WorkerMemory(resident=resident, peak=peak, offloaded=offloaded) if any(memory) else None,
    )


def _groups(slots: Sequence[Slot], size: int) -> Iterator[Sequence[Slot]]:
    at = 0
    while at + size <= len(slots):
        group = slots[at : at + size]
        if group[0].ordinal == group[-1].ordinal:
            yield group
            at += size
        else:
            at += 1


def _channels(problem: PlanProblem, candidate: Candidate) -> Iterator[ChannelPlan]:
    room = ROOM * problem.items * (problem.staleness + 1)
    back = problem.cycle.back if problem.cycle else ""
    for role in problem.roles:
        names = [e.channel for e in problem.edges if e.consumer == role.name]
        choice = candidate.choices[role.name]
        if not names and role.name != back:
            names = [role.tickets]
        for name in names:
            units = max(room, choice.micro_batch * choice.depth)
            yield ChannelPlan(
                name=name, micro_batch=choice.micro_batch, depth=choice.depth, capacity=Capacity(units=units)
            )


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
    """Of a plan that exists: to predict it."""
    placed = placement.resolve(plan, job)
    at = {pool.name: i for i, pool in enumerate(problem.pools)}
    regions: list[Region] = []
    inside = {worker_id for lease in placed.lease_sets for turn in lease.turns for worker_id in turn.workers}
    for lease in placed.lease_sets:
        slots = _count((slot.pool for slot in lease.slots), at)
        turns = [
            PlannedTurn(turn.role, _count((w.slots[0].pool for w in placed.workers if w.id in turn.workers), at),
                 turn.until_units)
            for turn in lease.turns
        ]  # fmt: skip
        regions.append(Region(slots, tuple(turns)))
    for role in problem.roles:
        alone: list[PlacedWorker] = [w for w in placed.of_role(role.name) if w.id not in inside]
        if alone:
            slots = _count((slot.pool for w in alone for slot in w.slots), at)
            regions.append(Region(slots, (PlannedTurn(role.name, _count((w.slots[0].pool for w in alone), at)),)))
    choices = {}
    for role in problem.roles:
        channel = placed.channel(problem.channel(role.name))
        entries = [entry for entry in plan.workers if entry.role == role.name]
        choices[role.name] = Choice(
            micro_batch=channel.micro_batch,
            depth=channel.depth,
            option=_option(role, entries[0].option),
            stays=entries[0].stays,
        )
    return Candidate(regions=tuple(regions), choices=choices, stages=max(placed.stages.values(), default=1))


def _option(role: RoleCosts, name: str) -> int:
    """By its number among the costs; one that these do not have is taken as it stands."""
    number = int(name) + 1 if name.isdecimal() else 0
    return number if number < len(role.options) else 0


def _count(pools: Iterator[str], at: dict[str, int]) -> tuple[int, ...]:
    found = [0] * len(at)
    for pool in pools:
        found[at[pool]] += 1
    return tuple(found)
