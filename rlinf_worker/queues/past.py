"""What a queue remembers of units that it does not have (any more), so that one that comes again is known: until their
step has committed. Pure. For: queues.core. Bounded by the units of open steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from rlinf_worker.queues.units import Age, UnitId, UnitInfo

T = TypeVar("T")


class Past(Generic[T]):
    def __init__(self) -> None:
        self._known: dict[UnitId, tuple[Age, T]] = {}
        self._closed = Age(0, 0)  # units up to here are remembered no more

    def __contains__(self, uid: UnitId) -> bool:
        return uid in self._known

    def __len__(self) -> int:
        return len(self._known)

    def get(self, uid: UnitId) -> T | None:
        known = self._known.get(uid)
        return known[1] if known is not None else None

    def add(self, unit: UnitInfo, what: T) -> None:
        if unit.age > self._closed:
            self._known[unit.id] = unit.age, what

    def pop(self, uid: UnitId) -> T | None:
        """It comes once more, or has come."""
        known = self._known.pop(uid, None)
        return known[1] if known is not None else None

    def drop(self, is_over: Callable[[T], bool]) -> None:
        self._known = {uid: known for uid, known in self._known.items() if not is_over(known[1])}

    def close(self, upto: Age) -> None:
        self._closed = max(self._closed, upto)
        self._known = {uid: known for uid, known in self._known.items() if known[0] > upto}
