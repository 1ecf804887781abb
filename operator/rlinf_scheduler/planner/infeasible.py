"""Why there is no plan: an answer, not an exception. Its sentences go verbatim into the job's condition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedSlots:
    """A role whose fewest workers do not fit: how many of them found no place, where, beside whom. `in_turns`: there is
    a plan in which roles take turns on the slots, and nothing speaks against it but that it was not asked for.

    >>> str(NeedSlots(role="actor", need=4, slots_per_worker=2, placed=1, pools=("gpu",), beside=("rollout",)))
    "role 'actor' needs 4 workers of 2 slots, 1 fits into pool gpu beside rollout; raise spec.pools[gpu].pods or lower \
spec.roles[actor].workers"
    """

    role: str
    need: int
    slots_per_worker: int
    placed: int
    pools: tuple[str, ...]
    beside: tuple[str, ...] = ()
    in_turns: bool = False

    def __str__(self) -> str:
        slots = "1 slot" if self.slots_per_worker == 1 else f"{self.slots_per_worker} slots"
        workers = "1 worker" if self.need == 1 else f"{self.need} workers"
        fits = "none fits" if self.placed == 0 else f"{self.placed} {'fits' if self.placed == 1 else 'fit'}"
        beside = f" beside {', '.join(self.beside)}" if self.beside else ""
        where = f"pool{'s' if len(self.pools) > 1 else ''} {', '.join(self.pools)}"
        remedies = [f"raise spec.pools[{self.pools[0]}].pods"]
        if self.need > 1:
            remedies.append(f"lower spec.roles[{self.role}].workers")
        if self.in_turns:
            remedies.append("write spec.placement.mode: Collocated, so that roles take turns")
        said = " or ".join(part for part in (", ".join(remedies[:-1]), remedies[-1]) if part)
        return f"role {self.role!r} needs {workers} of {slots}, {fits} into {where}{beside}; {said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedRanks:
    """A gang whose bounds leave none of the world sizes that its config allows.

    >>> str(NeedRanks(role="train", ranks=(4, 8), fewest=1, most=3))
    "role 'train' may have 4 or 8 workers (its config.ranks) and 1 to 3 (its workers); change one of them"
    """

    role: str
    ranks: tuple[int, ...]
    fewest: int
    most: int

    def __str__(self) -> str:
        sizes = " or ".join(map(str, self.ranks))
        return (
            f"role {self.role!r} may have {sizes} workers (its config.ranks) and {self.fewest} to {self.most} (its "
            "workers); change one of them"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedMemory:
    """A role whose peak no slot holds: alone, or beside what roles that share the slot in turn leave there.

    >>> str(NeedMemory(role="train", need_mib=104000, pool="main", slot_mib=80000))
    "role 'train' needs 104000 MiB of a slot, the largest it may have is 80000 MiB in pool main; raise \
spec.pools[main].slots.memory or lower the role's peak"
    """

    role: str
    need_mib: int
    pool: str
    slot_mib: int
    beside: tuple[str, ...] = ()

    def __str__(self) -> str:
        beside = f" in turn with {', '.join(self.beside)}" if self.beside else ""
        return (
            f"role {self.role!r} needs {self.need_mib} MiB of a slot{beside}, the largest it may have is "
            f"{self.slot_mib} MiB in pool {self.pool}; raise spec.pools[{self.pool}].slots.memory or lower the "
            "role's peak"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TooManySlots:
    """More than a range of a plan may name (slots.MAX_SLOTS): of a role's fewest workers, or of a lease set's pools.

    >>> str(TooManySlots(what="the fewest workers of role 'env'", slots=200000, most=100000, field="spec.roles[env]"))
    "the fewest workers of role 'env' take 200000 slots, a plan can hold 100000; lower spec.roles[env]"
    """

    what: str
    slots: int
    most: int
    field: str
    role: str = ""

    def __str__(self) -> str:
        return f"{self.what} take {self.slots} slots, a plan can hold {self.most}; lower {self.field}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAPlan:
    """What the job asks for is beyond the bounds of a plan: a channel of its flow's config, a range of too many slots.

    >>> str(NotAPlan(what="ChannelPlan.depth: got 2000000, wanted at most 1000000; change it"))
    'no plan can hold it: ChannelPlan.depth: got 2000000, wanted at most 1000000; change it in spec.flow.config or \
spec.pools'
    """

    what: str
    role: str = ""

    def __str__(self) -> str:
        return f"no plan can hold it: {self.what} in spec.flow.config or spec.pools"


Reason: TypeAlias = NeedSlots | NeedRanks | NeedMemory | TooManySlots | NotAPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.reasons))
