"""Whether a slot holds the roles that a plan puts there, by what they declare. Pure.

Kind `synthetic` declares its memory, those of language models where their config does (rlinf_api/declared.py); of any
other role nothing is known before it was measured, and it is taken to fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
            yield _refused(role, homes, needed=of(role).active)


def together(roles: Sequence[RoleSpec], pools: Iterable[PoolSpec]) -> Iterator[Objection]:
    """Roles that cannot take turns on the slots of these pools: one's peak, with what the others leave there."""
    for role in roles:
        others = [other for other in roles if other is not role]
        needed = of(role).active + sum(of(other).offloaded for other in others)
        homes = [pool for pool in pools if role.name in pool.roles]
        if not all(needed <= of_slot(pool) for pool in homes):
            beside = f" in turn with {', '.join(other.name for other in others)}"
            yield _refused(role, homes, needed=needed, beside=beside)


def _refused(role: RoleSpec, homes: Sequence[PoolSpec], *, needed: int, beside: str = "") -> Objection:
    largest = max(homes, key=of_slot)
    return Objection(
        f"role {role.name!r} needs {-(-needed // MIB)} MiB of a slot{beside}, the largest it may have is "
        f"{of_slot(largest) // MIB} MiB in pool {largest.name}; raise spec.pools[{largest.name}].slots.memory or lower "
        "the role's peak",
        role.name,
    )
