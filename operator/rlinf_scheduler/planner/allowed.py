"""How many workers a role may have, where not every number between min and max will do: `ranks` of a gang. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rlinf_api import declared
from rlinf_api.job import RLJobSpec, RoleSpec, as_range
from rlinf_api.slots import MAX_SLOTS
from rlinf_scheduler.planner.infeasible import NeedRanks, TooManySlots

T = TypeVar("T")


def most(role: RoleSpec, room: int) -> int:
    """The largest allowed number of workers up to `room` and the role's own bounds; 0: none.

    >>> role = RoleSpec.model_validate({"name": "train", "kind": "synthetic", "workers": {"min": 1, "max": 16},
    ...                                 "config": {"ranks": [1, 2, 4, 8, 16]}})
    >>> most(role, 7), most(role, 100)
    (4, 16)
    """
    bounds = as_range(role.workers)
    room = min(room, bounds.max)
    able = [n for n in declared.world_sizes(role) or (room,) if max(1, bounds.min) <= n <= room]
    return max(able, default=0)


def fewest(role: RoleSpec) -> int:
    """The smallest allowed number of workers within the role's own bounds; 0: there is none.

    >>> role = RoleSpec.model_validate({"name": "train", "kind": "synthetic", "workers": {"min": 3, "max": 16},
    ...                                 "config": {"ranks": [1, 2, 4, 8, 16]}})
    >>> fewest(role)
    4
    """
    bounds = as_range(role.workers)
    low = max(1, bounds.min)
    return min((n for n in declared.world_sizes(role) or (low,) if low <= n <= bounds.max), default=0)


def limit(role: RoleSpec) -> int:
    """The most workers that a plan can hold: by the role's own bounds, and by what a range of slots may name."""
    return min(as_range(role.workers).max, MAX_SLOTS // role.slots_per_worker)


def too_many(spec: RLJobSpec) -> list[TooManySlots]:
    """Roles whose fewest workers no plan could hold; before millions of slots are laid out, which takes seconds."""
    return [
        TooManySlots(
            what=f"the fewest workers of role {role.name!r}", slots=fewest(role) * role.slots_per_worker,
            most=MAX_SLOTS, field=f"spec.roles[{role.name}].workers", role=role.name,
        )
        for role in spec.roles
        if fewest(role) > limit(role)
    ]  # fmt: skip


def none_of(spec: RLJobSpec) -> list[NeedRanks]:
    """Roles whose bounds leave no allowed number."""
    roles = [(role, as_range(role.workers)) for role in spec.roles if not fewest(role)]
    return [
        NeedRanks(role=role.name, ranks=declared.world_sizes(role), fewest=max(1, bounds.min), most=bounds.max)
        for role, bounds in roles
    ]


def trimmed(role: RoleSpec, workers: Sequence[T]) -> list[T]:
    """As many of these as are allowed."""
    return list(workers[: most(role, len(workers))])
