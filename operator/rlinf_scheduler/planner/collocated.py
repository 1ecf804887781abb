"""The first plan of roles that share slots: all roles of a pool on all its slots, in turns. Pure.

Pools that have a role in common form one lease set, as a role's workers change hands together; a pool with a single
role needs none. Turns follow the order of spec.roles. Each turn lasts until the role has nothing to do: how much of a
step a turn should take is what measuring will tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlinf_api.job import PoolSpec, RLJobSpec, RoleSpec, as_range
from rlinf_api.plan import LeaseSetPlan, TurnPlan
from rlinf_api.slots import Slot, compress
from rlinf_scheduler.planner import allowed, memory
from rlinf_scheduler.planner.infeasible import NeedSlots, Reason


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
    reasons: list[Reason] = []
    found = Collocated(pods=pods)
    for role in spec.roles:
        homes = [pool for pool in spec.pools if role.name in pool.roles and memory.fits(role, pool)]
        groups = [group for pool in homes for group in _groups(pool, role, pods[pool.name])]
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


def _is_in(groups: list[tuple[Slot, ...]], pools: set[str]) -> bool:
    return any(group[0].pool in pools for group in groups)


def _slots(pool: PoolSpec, pods: int) -> list[Slot]:
    return [Slot(pool.name, ordinal, index) for ordinal in range(pods) for index in range(pool.slots.per_pod)]


def _groups(pool: PoolSpec, role: RoleSpec, pods: int) -> list[tuple[Slot, ...]]:
    """As many workers as the pods hold, each in one pod."""
    size, found = role.slots_per_worker, []
    for ordinal in range(pods):
        for first in range(0, pool.slots.per_pod - size + 1, size):
            found.append(tuple(Slot(pool.name, ordinal, first + i) for i in range(size)))
    return found


def _joined(spec: RLJobSpec) -> list[list[PoolSpec]]:
    """Pools with a role in common, transitively."""
    sets: list[list[PoolSpec]] = []
    for pool in spec.pools:
        mine = [s for s in sets if any(set(pool.roles) & set(other.roles) for other in s)]
        sets = [s for s in sets if s not in mine] + [[*(p for s in mine for p in s), pool]]
    return sets
