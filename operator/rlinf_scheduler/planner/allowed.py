"""How many workers a role may have, where not every number between min and max will do: `ranks` of a gang. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rlinf_api.job import RoleSpec, as_range

T = TypeVar("T")


def counts(role: RoleSpec) -> tuple[int, ...]:
    """World sizes that the role's config lists; none: any."""
    ranks = role.config.get("ranks")
    return tuple(r for r in ranks if isinstance(r, int)) if isinstance(ranks, list) else ()


def most(role: RoleSpec, room: int) -> int:
    """The largest allowed number of workers up to `room` and the role's own bounds; 0: none.

    >>> role = RoleSpec.model_validate({"name": "train", "kind": "synthetic", "workers": {"min": 1, "max": 16},
    ...                                 "config": {"ranks": [1, 2, 4, 8, 16]}})
    >>> most(role, 7), most(role, 100)
    (4, 16)
    """
    bounds = as_range(role.workers)
    room = min(room, bounds.max)
    able = [n for n in counts(role) or (room,) if max(1, bounds.min) <= n <= room]
    return max(able, default=0)


def trimmed(role: RoleSpec, workers: Sequence[T]) -> list[T]:
    """As many of these as are allowed; all of them where no number of them is, which is the role's to refuse."""
    return list(workers[: most(role, len(workers)) or len(workers)])
