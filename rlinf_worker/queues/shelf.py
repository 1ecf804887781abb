"""What a producer of a queue keeps until its consumers have it: payloads, encoded or still on their accelerator.

For: queues.channel. How much may be kept is queues.given.QueueProducer's; who waits for room goes by the unit's age,
the oldest policy version first, and within one in the order of the calls.

    put ──► kept, as its encoding (host)      ──► Pull ──► Payload ──► released
        └─► kept, as it is (on a GPU) ── spill() at the end of a turn, or the first Pull ──► its encoding (host)

A payload on a GPU is charged to the channel's bytes from the beginning on, so that room for it in host memory is there
whenever the turn ends: a full channel holds its producer back, and never the slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from time import monotonic
from typing import Any

from rlinf_worker.links.message import Message
from rlinf_worker.queues import devices
from rlinf_worker.queues.book import Age
from rlinf_worker.queues.given import QueueProducer

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
        if self.device_bytes:
            self.nbytes = self.device_bytes
        else:
            self.nbytes = self._encode(value)

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


class Shelf(QueueProducer[ShelvedPayload]):
    """QueueProducer with an order among those who wait for room, and with the hour."""

    def __init__(self, *, capacity_units: int, capacity_bytes: int, until_commit: bool = False) -> None:
        super().__init__(capacity_units=capacity_units, capacity_bytes=capacity_bytes, until_commit=until_commit)
        self.waiting: list[Place] = []
        self._places = itertools.count()
        self.spilled_bytes = 0

    def place(self, age: Age) -> Place:
        """Behind all that wait and are of this age or older."""
        return age, next(self._places)

    def lets_in(self, size_bytes: int, place: Place) -> bool:
        """Whether a unit may be put now: there is room, and none that waits is before it."""
        return self.has_room(size_bytes, place[0]) and all(place <= other for other in self.waiting)

    def spill(self) -> int:
        moved = sum(self.payload(unit.id).spill() for unit in self.units())
        self.spilled_bytes += moved
        return moved

    def payload(self, uid: Any) -> ShelvedPayload:
        kept = self.get(uid)
        assert kept is not None
        return kept.payload

    @property
    def device_bytes(self) -> int:
        return sum(self.payload(unit.id).device_bytes for unit in self.units())

    @property
    def oldest_s(self) -> float:
        """Age of what has been kept longest."""
        first = next(iter(self._kept.values()), None)
        return monotonic() - first.payload.since if first is not None else 0.0
