"""Why there is no plan: an answer, not an exception. Its sentences go verbatim into the job's condition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rlinf_api.slots import MAX_SLOTS


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


@dataclass(frozen=True, slots=True)
class Objection:
    """Any other reason, in words. `role`: whose it is, where it is one's."""

    said: str
    role: str = ""

    def __str__(self) -> str:
        return self.said


def too_many_slots(what: str, slots: int, *, field: str, role: str = "") -> Objection:
    """More than a range of a plan may name: of a role's fewest workers, or of a lease set's pools.

    >>> str(too_many_slots("the fewest workers of role 'env'", 200000, field="spec.roles[env]"))
    "the fewest workers of role 'env' take 200000 slots, a plan can hold 100000; lower spec.roles[env]"
    """
    return Objection(f"{what} take {slots} slots, a plan can hold {MAX_SLOTS}; lower {field}", role)


Reason: TypeAlias = NeedSlots | Objection


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.reasons))
