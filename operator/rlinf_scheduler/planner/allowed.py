"""How many workers a role may have, where not every number between min and max will do: `ranks` of a gang. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rlinf_api import declared
from rlinf_api.job import RLJobSpec, RoleSpec, as_range
from rlinf_api.slots import MAX_SLOTS
from rlinf_scheduler.planner.infeasible import Objection, too_many_slots


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


def never(spec: RLJobSpec) -> Iterator[Objection]:
    """Roles whose bounds leave no allowed number, or whose fewest workers no plan could hold: said before millions of
    slots are laid out, which takes seconds."""
    for role in spec.roles:
        need, bounds = fewest(role), as_range(role.workers)
        if not need:
            sizes = " or ".join(map(str, declared.world_sizes(role)))
            yield Objection(
                f"role {role.name!r} may have {sizes} workers (its config.ranks) and {max(1, bounds.min)} to "
                f"{bounds.max} (its workers); change one of them",
                role.name,
            )
        elif need > limit(role):
            what, field = f"the fewest workers of role {role.name!r}", f"spec.roles[{role.name}].workers"
            yield too_many_slots(what, need * role.slots_per_worker, field=field, role=role.name)
