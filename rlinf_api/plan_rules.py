"""What a plan must keep beyond its own shape: the job's bounds, its memory, channels that can hold what the plan puts
into them. One check for whoever takes a plan up: the operator before it makes pods, the driver before it prepares.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlinf_api import declared
from rlinf_api import slots as slot_ranges
from rlinf_api.declared import SlotMemory
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import RLJobSpec, as_range
from rlinf_api.placement import Placement, resolve
from rlinf_api.plan import RLPlanSpec
from rlinf_api.quantities import to_bytes
from rlinf_api.slots import Slot


def allows(plan: RLPlanSpec, job: RLJobSpec) -> bool:
    """Whether `check` has nothing against it."""
    try:
        check(plan, job)
    except InvalidManifest:
        return False
    return True


def check(plan: RLPlanSpec, job: RLJobSpec, *, counts: bool = True) -> Placement:
    """The placement; InvalidManifest with a sentence per problem.

    `counts`: also the bounds of pods and workers. Not for a driver: they may change without replacing its pod, and its
    job file says what they were when it began.
    """
    placement = resolve(plan, job)
    bounds = _bounds(plan, placement, job) if counts else ()
    problems = [*bounds, *_world_sizes(placement, job), *_channels(plan), *_options(plan, job), *_memory(plan, job)]
    if problems:
        raise InvalidManifest("; ".join(problems))
    return placement


def _bounds(plan: RLPlanSpec, placement: Placement, job: RLJobSpec) -> Iterator[str]:
    pools = {p.name: p for p in job.pools}
    for pool in plan.pools:
        if (known := pools.get(pool.name)) is None:
            yield f"pool {pool.name!r} is not in spec.pools"
            continue
        if pool.together:
            yield (
                f"it puts pods of pool {pool.name!r} together, which is not supported yet in this version; leave "
                f"together out, and write spec.pools[{pool.name}].topology of the job"
            )
        bounds = as_range(known.pods)
        if pool.pods > bounds.max:
            yield f"it has {pool.pods} pods of pool {pool.name!r}, spec.pools[{pool.name}].pods allows {bounds.max}"
        elif pool.pods < bounds.min:
            yield f"it has {pool.pods} pods of pool {pool.name!r}, spec.pools[{pool.name}].pods wants {bounds.min}"
    planned = {p.name for p in plan.pools}
    for name in pools:
        if name not in planned:
            yield f"it says nothing of pool {name!r}; add it to spec.pools of the plan"
    for role in job.roles:
        allowed, count = as_range(role.workers), len(placement.of_role(role.name))
        if not max(1, allowed.min) <= count <= allowed.max:
            yield (
                f"it has {count} workers of role {role.name!r}, spec.roles[{role.name}].workers allows "
                f"{allowed.min} to {allowed.max}"
            )


def _world_sizes(placement: Placement, job: RLJobSpec) -> Iterator[str]:
    for role in job.roles:
        allowed, count = declared.world_sizes(role), len(placement.of_role(role.name))
        if allowed and count not in allowed:
            sizes = ", ".join(map(str, allowed))
            yield (
                f"it has {count} workers of role {role.name!r}, whose config allows ranks {sizes}; write one of these"
            )


def _channels(plan: RLPlanSpec) -> Iterator[str]:
    for channel in plan.channels:
        if channel.capacity.units < channel.micro_batch * channel.depth:
            yield (
                f"channel {channel.name!r} holds {channel.capacity.units} units, fewer than microBatch * depth = "
                f"{channel.micro_batch * channel.depth}, so that it would stand still; raise capacity.units"
            )


def _options(plan: RLPlanSpec, job: RLJobSpec) -> Iterator[str]:
    for entry in plan.workers:
        allowed = declared.options(job.role(entry.role))
        if entry.option and allowed and entry.option not in allowed:
            yield (
                f"it chooses option {entry.option!r} of role {entry.role!r}, whose config has {', '.join(allowed)}; "
                "write one of these, or leave it out"
            )


def _memory(plan: RLPlanSpec, job: RLJobSpec) -> Iterator[str]:
    """A slot holds the active worker at its peak and what the others keep there: all of it, or, where they take turns,
    what an offload leaves of those that do not stay. All of that is of one slot, however many a worker takes."""
    pools, roles = {p.name: p for p in job.pools}, {r.name: r for r in job.roles}
    in_turns = {s for lease in plan.lease_sets for s in slot_ranges.expand(lease.slots)}
    on: dict[Slot, list[tuple[str, int, int]]] = {}
    for entry in plan.workers:
        memory = declared.of_entry(entry, roles[entry.role])
        if memory == SlotMemory():
            continue
        for slot in slot_ranges.expand(entry.slots):
            on.setdefault(slot, []).append((entry.role, memory.active, declared.kept(entry, memory)))
    for slot, holders in sorted(on.items()):
        room = to_bytes(pools[slot.pool].slots.memory or "0")
        if not room:
            continue
        if slot in in_turns:
            kept_all = sum(kept for _, _, kept in holders)
            need = max(active + kept_all - kept for _, active, kept in holders)
        else:
            need = sum(active for _, active, _ in holders)
        if need > room:
            who = ", ".join(role for role, _, _ in holders)
            yield f"slot {slot} has {room} bytes and {who} need {need}; give them other slots or raise slots.memory"
            return  # the others of the range say the same
