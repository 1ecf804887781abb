"""Numbers of steps for TensorBoard, as it reads them: one file of events, appended to by rank 0 of the actor.

    events = EventFile(Path("/runs/tb"))
    events.write(7, {"reward_mean": 0.5})      a scalar of each name at step 7

Written by hand, as the format is four fields and a checksum, and TensorBoard brings 40 packages. For: the trainer of
texts. Not for: what the driver measures (metrics.jsonl), nor for anything that is read again here.

A life of the actor begins with a mark by which TensorBoard forgets what an earlier one has said of that step and later
ones, which are made again.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rlinf_worker.bounded_file import BoundedFile

NAME: Final = "events.out.tfevents.0.actor"
MOST_BYTES: Final = 64 << 20
"""Then it becomes NAME.1, which TensorBoard reads as well: of 30 numbers, which are 1.2 KB, 50,000 steps each."""
_FLOAT, _DOUBLE, _VARINT, _BYTES = 5, 1, 0, 2
"""Wire types of protobuf."""
_WALL_TIME, _STEP, _VERSION, _SUMMARY, _SESSION = 1, 2, 3, 5, 7
"""Fields of tensorflow.Event, whose Summary has values (1) of tag (1) and simple_value (2), and whose SessionLog has a
status (1)."""
_START = 1


class EventFile:
    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._file, self._clock = BoundedFile(folder / NAME, limit=MOST_BYTES), clock
        self._has_begun = False

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """In one write: a reader sees all of it or nothing. What a full disk does not take is dropped and said."""
        records = b""
        if not self._has_begun:
            self._has_begun = True
            records += self._record(_field(_VERSION, _BYTES, b"brain.Event:2"))
            session = _field(1, _VARINT, _varint(_START))
            records += self._record(_field(_STEP, _VARINT, _varint(step)) + _field(_SESSION, _BYTES, session))
        values = b"".join(_field(1, _BYTES, _value(name, number)) for name, number in sorted(numbers.items()))
        event = _field(_STEP, _VARINT, _varint(step)) + _field(_SUMMARY, _BYTES, values)
        self._file.write(records + self._record(event))

    def _record(self, event: bytes) -> bytes:
        """Length, its checksum, the event, its checksum."""
        event = _field(_WALL_TIME, _DOUBLE, struct.pack("<d", self._clock())) + event
        length = struct.pack("<Q", len(event))
        return length + _masked(length) + event + _masked(event)

    def close(self) -> None:
        self._file.close()


def _value(name: str, number: float) -> bytes:
    return _field(1, _BYTES, name.encode()) + _field(2, _FLOAT, struct.pack("<f", number))


def _field(number: int, wire: int, body: bytes) -> bytes:
    length = _varint(len(body)) if wire == _BYTES else b""
    return _varint(number << 3 | wire) + length + body


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        found.append(byte)
    return tuple(found)


_CRC32C: Final = _table()


def crc32c(data: bytes) -> int:
    """
    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    found = 0xFFFFFFFF
    for byte in data:
        found = found >> 8 ^ _CRC32C[(found ^ byte) & 0xFF]
    return found ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    """As TensorFlow's records have it: a checksum of what has checksums in it would be weak."""
    found = crc32c(data)
    return struct.pack("<I", ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF)
