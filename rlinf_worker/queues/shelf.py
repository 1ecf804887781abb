"""What a producer of a queue keeps until its consumers have it: payloads, encoded or still on their accelerator.

For: queues.producing.

    put ──► kept, as its encoding (host)      ──► Pull ──► Payload ──► released
        └─► kept, as it is (on a GPU) ── spill() at the end of a turn, or the first Pull ──► its encoding (host)

A payload on a GPU is charged to the channel's bytes from the beginning on, so that room for it in host memory is there
whenever the turn ends: a full channel holds its producer back, and never the slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any

from rlinf_worker.links.message import Message
from rlinf_worker.queues import devices
from rlinf_worker.queues.units import Age, UnitId, UnitInfo

Place = tuple[Age, int]
"""Among those who wait for room: by age, then in the order of their calls, so that a large unit is not passed by ever
smaller ones."""


class ShelvedPayload:
    """Any number of consumers may ask for it."""

    __slots__ = ("_body", "_buffers", "_value", "device_bytes", "nbytes", "since")

    def __init__(self, value: Any) -> None:
        self.since = monotonic()
        self.device_bytes = devices.on_device(value)
        self._value, self._body, self._buffers = value, b"", ()  # type: tuple[Any, bytes, Sequence[Any]]
        self.nbytes = self.device_bytes or self._encode(value)

    def _encode(self, value: Any) -> int:
        message = Message(b"", value)
        self._body, self._buffers = message.encoded()
        self._value = None
        return message.nbytes

    def spill(self) -> int:
        """Bytes that left the accelerator."""
        moved, self.device_bytes = self.device_bytes, 0
        if moved:
            self._encode(devices.to_host(self._value))
        return moved

    def encoded(self) -> tuple[bytes, Sequence[Any]]:
        self.spill()
        return self._body, self._buffers


class Shelf:
    """Owns the bound on units and bytes that wait for consumers: charged by add(), freed by release() and cancel().

    The bound is of each open step: the units of a later one take no room from those that an earlier one lacks. And
    `until_commit`, of a queue whose units are kept until their step commits: the oldest step that there is anything of
    here gets in whole, as it would wait for its own end. At worst that is each open step, whose number the driver
    bounds: others may keep units of an older step, and what got in whole stays as an older one comes after it.
    """

    def __init__(self, *, capacity_units: int, capacity_bytes: int, until_commit: bool = False) -> None:
        self._kept: dict[UnitId, tuple[UnitInfo, ShelvedPayload]] = {}
        self._of_age: dict[Age, tuple[int, int]] = {}  # units, bytes
        self._until_commit = until_commit
        self.kept_bytes = 0
        self.waiting: list[Place] = []
        self._places = itertools.count()
        self.resize(capacity_units=capacity_units, capacity_bytes=capacity_bytes)

    def resize(self, *, capacity_units: int, capacity_bytes: int) -> None:
        """Another plan's bound, over what is kept already: below that, nothing is let in until some of it is freed."""
        self.capacity_units, self.capacity_bytes = capacity_units or 1 << 40, capacity_bytes or 1 << 60

    # --- room ---------------------------------------------------------------------------------------------------------
    def place(self, age: Age) -> Place:
        """Behind all that wait and are of this age or older."""
        return age, next(self._places)

    def lets_in(self, size_bytes: int, place: Place) -> bool:
        """Whether a unit may be put now: there is room, and none that waits is before it."""
        return self.has_room(size_bytes, place[0]) and all(place <= other for other in self.waiting)

    def has_room(self, size_bytes: int, age: Age) -> bool:
        """One unit is always let in when there is none: a bound below the largest unit would wait for ever."""
        units, nbytes = self._of_age.get(age, (0, 0))
        if not units or self._is_oldest(age):
            return True
        return units < self.capacity_units and nbytes + size_bytes <= self.capacity_bytes

    def _is_oldest(self, age: Age) -> bool:
        return self._until_commit and age <= min(self._of_age, default=age)

    def is_drained(self, age: Age) -> bool:
        """To a quarter of what may be kept: a producer that was stopped by a full channel goes on for more than one."""
        return 4 * len(self._kept) <= self.capacity_units or self._is_oldest(age)

    # --- units --------------------------------------------------------------------------------------------------------
    def add(self, unit: UnitInfo, payload: ShelvedPayload) -> bool:
        """False: this very unit is kept already (made again), and the first copy stays."""
        if unit.id in self._kept:
            return False
        self._kept[unit.id] = unit, payload
        self._charge(unit, 1)
        return True

    def _charge(self, unit: UnitInfo, sign: int) -> None:
        units, nbytes = self._of_age.get(unit.age, (0, 0))
        self._of_age[unit.age] = units + sign, nbytes + sign * unit.size_bytes
        if not self._of_age[unit.age][0]:
            del self._of_age[unit.age]
        self.kept_bytes += sign * unit.size_bytes

    def get(self, uid: UnitId) -> ShelvedPayload | None:
        kept = self._kept.get(uid)
        return kept[1] if kept is not None else None

    def release(self, uids: Iterable[UnitId]) -> list[UnitId]:
        """What was kept of these and is forgotten now; again without effect."""
        gone = []
        for uid in uids:
            if (kept := self._kept.pop(uid, None)) is not None:
                self._charge(kept[0], -1)
                gone.append(uid)
        return gone

    def cancel(self, branch: int) -> list[UnitId]:
        """Forget this branch and older ones."""
        return self.release([uid for uid in self._kept if uid.branch <= branch])

    def spill(self) -> int:
        """The turn on the slots ends: what is kept there goes to host memory. Bytes that moved."""
        return sum(payload.spill() for _, payload in self._kept.values())

    def units(self) -> list[UnitInfo]:
        return [unit for unit, _ in self._kept.values()]

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def oldest_s(self) -> float:
        """Age of what has been kept longest."""
        _, first = next(iter(self._kept.values()), (None, None))
        return monotonic() - first.since if first is not None else 0.0
