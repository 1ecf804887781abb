"""What a queue remembers of units that are over or lost, so that one that comes again is known: until their step has
committed. For: matching, and with Ended and Finished queues.channel. Bounded by the units of open steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlinf_api.names import WorkerId
from rlinf_worker.queues.units import UnitId, UnitInfo


class Past:
    """`ended`: not to come at all, as a filter dropped what they were to be made of."""

    def __init__(self) -> None:
        self._steps: dict[UnitId, int] = {}
        self._ended: set[UnitId] = set()
        self._closed = (0, 0)  # (branch, step): units up to here are remembered no more

    def __contains__(self, uid: UnitId) -> bool:
        return uid in self._steps

    def __iter__(self) -> Iterator[UnitId]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def is_closed(self, branch: int, step: int) -> bool:
        return (branch, step) <= self._closed

    def add(self, unit: UnitInfo, *, ended: bool = False) -> None:
        if not self.is_closed(unit.branch, unit.step):
            self._steps[unit.id] = unit.step
            if ended:
                self._ended.add(unit.id)

    def ended(self, branch: int, keys: Iterable[str]) -> tuple[str, ...]:
        return tuple(key for key in keys if UnitId(branch, key) in self._ended)

    def forget(self, uid: UnitId) -> None:
        """It is to come once more."""
        self._steps.pop(uid, None)
        self._ended.discard(uid)

    def close(self, step: int, *, branch: int) -> None:
        self._closed = (branch, step)
        self._keep({uid: n for uid, n in self._steps.items() if not self.is_closed(uid.branch, n)})

    def cancel(self, branch: int) -> None:
        self._keep({uid: n for uid, n in self._steps.items() if uid.branch > branch})

    def _keep(self, steps: dict[UnitId, int]) -> None:
        self._steps = steps
        self._ended &= steps.keys()


class OnTheWay:
    """Units whose producer died when they had just been handed out: lost, unless their consumer says `held` yet. Of a
    gang, whose ranks must not train on one twice, only this rank may be given it again."""

    def __init__(self) -> None:
        self._ways: dict[UnitId, tuple[UnitInfo, WorkerId]] = {}

    def add(self, unit: UnitInfo, consumer: WorkerId) -> None:
        self._ways[unit.id] = unit, consumer

    def consumer(self, uid: UnitId) -> WorkerId | None:
        way = self._ways.get(uid)
        return way[1] if way is not None else None

    def take(self, uid: UnitId) -> UnitInfo | None:
        way = self._ways.pop(uid, None)
        return way[0] if way is not None else None

    def gone(self, consumer: WorkerId) -> None:
        self._ways = {uid: way for uid, way in self._ways.items() if way[1] != consumer}

    def close(self, step: int, *, branch: int) -> None:
        self._ways = {uid: way for uid, way in self._ways.items() if (uid.branch, way[0].step) > (branch, step)}

    def cancel(self, branch: int) -> None:
        self._ways = {uid: way for uid, way in self._ways.items() if uid.branch > branch}
