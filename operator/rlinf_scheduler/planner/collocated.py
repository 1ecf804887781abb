"""The first plan of roles that share slots: all roles of a pool on all its slots, in turns. Pure.

Pools that have a role in common form one lease set, as a role's workers change hands together; a pool with a single
role needs none. Turns follow the order of spec.roles. Each turn lasts until the role has nothing to do: how much of a
step a turn should take is what measuring will tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from rlinf_api.job import PoolSpec, RLJobSpec, RoleSpec, as_range
from rlinf_api.plan import LeaseSetPlan, TurnPlan
from rlinf_api.slots import MAX_SLOTS, Slot, compress
from rlinf_scheduler.planner import allowed, memory
from rlinf_scheduler.planner.infeasible import Infeasible, NeedSlots, Objection, Reason, too_many_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLayout:
    """Where all of a job runs. `workers`: the slots of each worker of each role; `said`: why so."""

    pods: Mapping[str, int]
    workers: Sequence[Sequence[tuple[Slot, ...]]]
    lease_sets: Sequence[LeaseSetPlan] = ()
    said: str


def place(spec: RLJobSpec) -> FirstLayout | Infeasible:
    pods = {pool.name: as_range(pool.pods).min or 1 for pool in spec.pools}
    reasons: list[Reason] = list(_too_many_slots(spec, pods))
    if reasons:
        return Infeasible(reasons=tuple(reasons))
    workers: list[list[tuple[Slot, ...]]] = []
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
        workers.append(groups[:count])
    lease_sets = []
    for number, pools in enumerate(_joined(spec)):
        joined = {pool.name for pool in pools}
        sharing = [r for r, groups in zip(spec.roles, workers, strict=True) if _is_in(groups, joined)]
        if len(sharing) < 2:
            continue
        reasons += memory.together(sharing, pools)
        slots = [slot for pool in pools for slot in _slots(pool, pods[pool.name])]
        turns = [TurnPlan(role=role.name) for role in sharing]
        lease_sets.append(LeaseSetPlan(name=f"set-{number}", slots=compress(slots), turns=turns))
    if reasons:
        return Infeasible(reasons=tuple(reasons))
    sets = ", ".join(f"{s.name} ({' | '.join(turn.role for turn in s.turns)})" for s in lease_sets)
    said = (
        f"roles share slots in turns: {roles_text(spec, workers)}; lease sets {sets or 'none'}. Assumed, as nothing is "
        "measured yet: every slot holds its role's memory beside what the others keep when they are off it"
    )
    return FirstLayout(pods=pods, workers=workers, lease_sets=lease_sets, said=said)


def roles_text(spec: RLJobSpec, workers: Sequence[Sequence[tuple[Slot, ...]]]) -> str:
    """How many workers of each role are in which pools."""
    return ", ".join(_role_text(role, groups) for role, groups in zip(spec.roles, workers, strict=True))


def _role_text(role: RoleSpec, groups: Sequence[tuple[Slot, ...]]) -> str:
    pools = Counter(group[0].pool for group in groups)
    slots = f" of {role.slots_per_worker} slots" if role.slots_per_worker > 1 else ""
    where = ", ".join(pools) if len(pools) == 1 else ", ".join(f"{p} ({n})" for p, n in pools.items())
    return f"{len(groups)} {role.name}{slots} in {where}"


def _too_many_slots(spec: RLJobSpec, pods: Mapping[str, int]) -> Iterator[Objection]:
    """Whether a lease set has too many slots. Asked before slots are laid out, as allowed.never is."""
    for pools in _joined(spec):
        roles = [role.name for role in spec.roles if any(role.name in pool.roles for pool in pools)]
        slots = sum(pods[pool.name] * pool.slots.per_pod for pool in pools)
        if len(roles) > 1 and slots > MAX_SLOTS:
            widest = max(pools, key=lambda pool: pods[pool.name] * pool.slots.per_pod)
            yield too_many_slots(f"turns of {', '.join(roles)}", slots, field=f"spec.pools[{widest.name}].pods")


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
