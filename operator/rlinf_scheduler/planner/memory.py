"""What roles declare of their memory, and whether a slot holds those that a plan puts there. Pure.

Only kind `synthetic` declares it so far (MiB per slot); of any other role nothing is known before it was measured, and
it is taken to fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rlinf_api import quantities
from rlinf_api.job import PoolSpec, RLJobSpec, RoleSpec
from rlinf_api.plan import WorkerMemory
from rlinf_scheduler.planner.infeasible import NeedMemory

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Bytes per slot."""

    resident: int = 0
    peak: int = 0
    offloaded: int = 0


def of(role: RoleSpec) -> Declared:
    memory = role.config.get("memory")
    if role.kind != "synthetic" or not isinstance(memory, dict):
        return Declared()
    peak, options, option = memory.get("peak"), role.config.get("options"), role.config.get("option")
    if isinstance(options, list) and isinstance(option, int) and option < len(options):
        chosen = options[option]
        peak = chosen.get("peak") if isinstance(chosen, dict) else peak
    resident, offloaded = _bytes(memory.get("resident")), _bytes(memory.get("offloaded"))
    return Declared(resident=resident, peak=_bytes(peak), offloaded=offloaded)


def is_known(role: RoleSpec) -> bool:
    return of(role).peak > 0


def planned(role: RoleSpec) -> WorkerMemory | None:
    """As it stands in a plan, for who has to know what fits beside what."""
    declared = of(role)
    if not is_known(role):
        return None
    resident, peak, offloaded = map(quantities.from_bytes, (declared.resident, declared.peak, declared.offloaded))
    return WorkerMemory(resident=resident, peak=peak, offloaded=offloaded)


def _bytes(mebibytes: object) -> int:
    return int(mebibytes * MIB) if isinstance(mebibytes, int | float) else 0


def of_slot(pool: PoolSpec) -> int:
    return quantities.to_bytes(pool.slots.memory, field="spec.pools[*].slots.memory")


def fits(role: RoleSpec, pool: PoolSpec) -> bool:
    return of(role).peak <= of_slot(pool)


def too_large(spec: RLJobSpec) -> list[NeedMemory]:
    """Roles that no pool of theirs could hold, alone on a slot."""
    found = []
    for role in spec.roles:
        homes = [pool for pool in spec.pools if role.name in pool.roles]
        if homes and not any(fits(role, pool) for pool in homes):
            found.append(_reason(role, homes, needed=of(role).peak))
    return found


def together(roles: Sequence[RoleSpec], pools: Iterable[PoolSpec]) -> list[NeedMemory]:
    """Roles that cannot take turns on the slots of these pools: one's peak, with what the others leave there."""
    found = []
    for role in roles:
        others = [other for other in roles if other is not role]
        needed = of(role).peak + sum(of(other).offloaded for other in others)
        homes = [pool for pool in pools if role.name in pool.roles]
        if not all(needed <= of_slot(pool) for pool in homes):
            found.append(_reason(role, homes, needed=needed, beside=tuple(other.name for other in others)))
    return found


def _reason(role: RoleSpec, homes: Sequence[PoolSpec], *, needed: int, beside: tuple[str, ...] = ()) -> NeedMemory:
    largest = max(homes, key=of_slot)
    return NeedMemory(
        role=role.name, need_mib=-(-needed // MIB), pool=largest.name, slot_mib=of_slot(largest) // MIB, beside=beside
    )
