"""The first plan of roles that share slots: all roles of a pool on all its slots, in turns. Pure.

Pools that have a role in common form one lease set, as a role's workers change hands together; a pool with a single
role needs none. Turns follow the order of spec.roles. Each turn lasts until the role has nothing to do: how much of a
step a turn should take is what measuring will tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from rlinf_api.job import PoolSpec, RLJobSpec, RoleSpec, as_range
from rlinf_api.plan import LeaseSetPlan, TurnPlan
from rlinf_api.slots import MAX_SLOTS, Slot, compress
from rlinf_scheduler.planner import allowed, memory
from rlinf_scheduler.planner.infeasible import NeedSlots, Reason, TooManySlots


@dataclass(slots=True)
class Collocated:
    pods: dict[str, int]
    workers: list[list[tuple[Slot, ...]]] = field(default_factory=list)
    """Slots of each worker of each role."""
    lease_sets: list[LeaseSetPlan] = field(default_factory=list)
    short: tuple[Reason, ...] = ()
    """Why there is none."""


def place(spec: RLJobSpec) -> Collocated:
    pods = {pool.name: as_range(pool.pods).min or 1 for pool in spec.pools}
    found = Collocated(pods=pods, short=_too_many_slots(spec, pods))
    if found.short:
        return found
    reasons: list[Reason] = []
    for role in spec.roles:
        homes = [pool for pool in spec.pools if role.name in pool.roles and memory.fits(role, pool)]
        possible = (group for pool in homes for group in _groups(pool, role, pods[pool.name]))
        groups = list(islice(possible, allowed.limit(role)))
        count = allowed.most(role, len(groups))
        if count == 0:
            need, at = allowed.fewest(role), tuple(pool.name for pool in homes)
            short = NeedSlots(
                role=role.name, need=need, slots_per_worker=role.slots_per_worker, placed=len(groups), pools=at
            )
            reasons.append(short)
        found.workers.append(groups[:count])
    for number, pools in enumerate(_joined(spec)):
        joined = {pool.name for pool in pools}
        sharing = [r for r, groups in zip(spec.roles, found.workers, strict=True) if _is_in(groups, joined)]
        if len(sharing) < 2:
            continue
        reasons += memory.together(sharing, pools)
        slots = [slot for pool in pools for slot in _slots(pool, pods[pool.name])]
        turns = [TurnPlan(role=role.name) for role in sharing]
        found.lease_sets.append(LeaseSetPlan(name=f"set-{number}", slots=compress(slots), turns=turns))
    found.short = tuple(reasons)
    return found


def _too_many_slots(spec: RLJobSpec, pods: dict[str, int]) -> tuple[Reason, ...]:
    """Whether a lease set has too many slots. Asked before slots are laid out, as allowed.too_many is."""
    found = []
    for pools in _joined(spec):
        roles = [role.name for role in spec.roles if any(role.name in pool.roles for pool in pools)]
        slots = sum(pods[pool.name] * pool.slots.per_pod for pool in pools)
        if len(roles) > 1 and slots > MAX_SLOTS:
            widest = max(pools, key=lambda pool: pods[pool.name] * pool.slots.per_pod)
            what, field = f"turns of {', '.join(roles)}", f"spec.pools[{widest.name}].pods"
            found.append(TooManySlots(what=what, slots=slots, most=MAX_SLOTS, field=field))
    return tuple(found)


def _is_in(groups: list[tuple[Slot, ...]], pools: set[str]) -> bool:
    return any(group[0].pool in pools for group in groups)


def _slots(pool: PoolSpec, pods: int) -> list[Slot]:
    return [Slot(pool.name, ordinal, index) for ordinal in range(pods) for index in range(pool.slots.per_pod)]


def _groups(pool: PoolSpec, role: RoleSpec, pods: int) -> Iterator[tuple[Slot, ...]]:
    """As many workers as the pods hold, each in one pod."""
    size = role.slots_per_worker
    for ordinal in range(pods):
        for first in range(0, pool.slots.per_pod - size + 1, size):
            yield tuple(Slot(pool.name, ordinal, first + i) for i in range(size))


def _joined(spec: RLJobSpec) -> list[list[PoolSpec]]:
    """Pools with a role in common, transitively."""
    sets: list[list[PoolSpec]] = []
    for pool in spec.pools:
        mine = [s for s in sets if any(set(pool.roles) & set(other.roles) for other in s)]
        sets = [s for s in sets if s not in mine] + [[*(p for s in mine for p in s), pool]]
    return sets
