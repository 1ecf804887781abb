"""Whether a slot holds the roles that a plan puts there, by what they declare. Pure.

Kind `synthetic` declares its memory, those of language models where their config does (rlinf_api/declared.py); of any
other role nothing is known before it was measured, and it is taken to fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlinf_api import quantities
from rlinf_api.declared import MIB
from rlinf_api.declared import of_role as of
from rlinf_api.job import PoolSpec, RLJobSpec, RoleSpec
from rlinf_api.plan import WorkerMemory
from rlinf_scheduler.planner.infeasible import Objection


def is_known(role: RoleSpec) -> bool:
    return of(role).active > 0


def planned(role: RoleSpec) -> WorkerMemory | None:
    """As it stands in a plan, for who has to know what fits beside what."""
    declared = of(role)
    if not is_known(role):
        return None
    resident, peak, offloaded = map(quantities.from_bytes, (declared.resident, declared.active, declared.offloaded))
    return WorkerMemory(resident=resident, peak=peak, offloaded=offloaded)


def of_slot(pool: PoolSpec) -> int:
    return quantities.to_bytes(pool.slots.memory, field="spec.pools[*].slots.memory")


def fits(role: RoleSpec, pool: PoolSpec) -> bool:
    return of(role).active <= of_slot(pool)


def too_large(spec: RLJobSpec) -> Iterator[Objection]:
    """Roles that no pool of theirs could hold, alone on a slot."""
    for role in spec.roles:
        homes = [pool for pool in spec.pools if role.name in pool.roles]
        if homes and not any(fits(role, pool) for pool in homes):
            yield _refused(role, homes, kept={})


def together(roles: Sequence[RoleSpec], pools: Iterable[PoolSpec]) -> Iterator[Objection]:
    """Roles that cannot take turns on the slots of these pools: one's peak, with what the others leave there."""
    for role in roles:
        kept = {other.name: _mib(of(other).offloaded) for other in roles if other is not role}
        needed = _mib(of(role).active) + sum(kept.values())
        homes = [pool for pool in pools if role.name in pool.roles]
        if not all(needed * MIB <= of_slot(pool) for pool in homes):
            yield _refused(role, homes, kept=kept)


def _refused(role: RoleSpec, homes: Sequence[PoolSpec], *, kept: Mapping[str, int]) -> Objection:
    """`kept`: MiB that others leave on the slot in turn. The numbers add up."""
    largest = max(homes, key=of_slot)
    peak, room = _mib(of(role).active), of_slot(largest) // MIB
    told = " and ".join(f"{name} keeps {mib} MiB" for name, mib in kept.items() if mib)
    beside = f", while {told}," if told else ""
    memory = f"raise spec.pools[{largest.name}].slots.memory"
    remedy = f"{memory}, or its pods, so that fewer share a slot" if kept else f"{memory} or lower the role's peak"
    return Objection(
        f"role {role.name!r} peaks at {peak} MiB{beside} and the largest slot that it may have is "
        f"{room} MiB in pool {largest.name}, which lacks {peak + sum(kept.values()) - room} MiB; {remedy}",
        role.name,
    )


def _mib(size: int) -> int:
    return -(-size // MIB)
