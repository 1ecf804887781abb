"""One message as bytes: the same layout in a shared-memory ring and on a TCP stream.

For: `ring`, `shm`, `tcp`. Not for: anything above a link.

    offset 0    fixed part, 24 bytes: total, bytes of head, bytes of body, number of buffers, kind, sequence
           24   bytes of each buffer, 8 bytes each
           ..   head, body
           64n  each buffer, at the next multiple of 64 from the frame's start

A frame of kind BULK has no buffers in it: it announces them, and they come by the link's lane, each at a multiple of 64
from the start of the first. A frame of kind NOTE is no message: its head is for the lane of GPU buffers (`devices`).

The sequence number is the link's own, modulo 65,536: a frame lost or read twice is seen at once. Little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from rlinf_worker.links.message import Message
from rlinf_worker.links.payload_arrays import Buffer, on_host

FIXED = struct.Struct("<QIIIHH")
FIXED_BYTES = FIXED.size
ALIGN = 64
"""A cache line, and what vector instructions want of an array."""

DATA, PAD, CHUNK, SWITCH, HELLO, GOODBYE, BULK, NOTE = 1, 2, 3, 4, 5, 6, 7, 8
MAX_BUFFERS = 1 << 20
_PADDING = bytes(ALIGN)


class FrameError(ValueError):
    """Bytes that are no frame. The link that met them breaks, and says so."""


class FrameOut:
    """A frame to be written: `prefix` (all but the buffers), `buffers`, how long it will be, and whether gaps align
    the buffers (a chunk is a part of another frame, whose gaps it already holds); `tensors` go beside it."""

    __slots__ = ("align", "buffers", "prefix", "tensors", "total")

    def __init__(self, prefix: bytes, buffers: Sequence[Buffer], total: int, *, align: int = ALIGN) -> None:
        self.prefix, self.buffers, self.total, self.align = prefix, buffers, total, align
        self.tensors: list[Any] = []

    def pieces(self) -> Iterator[bytes | Buffer]:
        """Everything in order, with the gaps."""
        yield self.prefix
        yield from _aligned(self.buffers, len(self.prefix))


def _aligned(buffers: Sequence[Buffer], at: int) -> Iterator[bytes | Buffer]:
    for buffer in buffers:
        if gap := -at % ALIGN:
            yield _PADDING[:gap]
        yield buffer
        at += gap + buffer.nbytes


def _end(sizes: Sequence[int], at: int) -> int:
    for size in sizes:
        at += -at % ALIGN + size
    return at


def of_message(message: Message, sequence: int, kind: int = DATA) -> FrameOut:
    """Raises PayloadError."""
    head = message.head
    body, parts = message.encoded()
    if not parts:
        total = FIXED_BYTES + len(head) + len(body)
        return FrameOut(FIXED.pack(total, len(head), len(body), 0, kind, sequence) + head + body, (), total)
    buffers = on_host(parts)
    sizes = [buffer.nbytes for buffer in buffers]
    total = _end(sizes, FIXED_BYTES + 8 * len(sizes) + len(head) + len(body))
    fixed = FIXED.pack(total, len(head), len(body), len(sizes), kind, sequence)
    return FrameOut(b"".join((fixed, struct.pack(f"<{len(sizes)}Q", *sizes), head, body)), buffers, total)


def chunks(out: FrameOut, nbytes: int, sequence: int) -> Iterator[FrameOut]:
    """`out` as frames of at most `nbytes` of its own each, from `sequence` on."""
    held: list[Buffer] = []
    room = nbytes

    def chunk() -> FrameOut:
        total = FIXED_BYTES + nbytes - room
        return FrameOut(FIXED.pack(total, 0, 0, 0, CHUNK, sequence & 0xFFFF), held, total, align=1)

    for piece in out.pieces():
        rest = memoryview(piece)
        while rest.nbytes:
            held.append(rest[:room])
            room -= held[-1].nbytes
            rest = rest[held[-1].nbytes :]
            if not room:
                yield chunk()
                held, room, sequence = [], nbytes, sequence + 1
    if held:
        yield chunk()


def announced(out: FrameOut) -> tuple[bytes, list[bytes | Buffer], int]:
    """The frame that announces `out`, what the lane carries instead of its buffers, and how many bytes that is."""
    _, head_bytes, body_bytes, count, _, sequence = FIXED.unpack_from(out.prefix)
    fixed = FIXED.pack(len(out.prefix), head_bytes, body_bytes, count, BULK, sequence)
    nbytes = _end([buffer.nbytes for buffer in out.buffers], 0)
    return fixed + out.prefix[FIXED_BYTES:], list(_aligned(out.buffers, 0)), nbytes


def _head(frame: memoryview) -> tuple[bytes, bytes, Sequence[int], int]:
    """Head, body, the buffers' sizes, and where the first may begin. Raises FrameError."""
    total, head_bytes, body_bytes, count, _, _ = FIXED.unpack_from(frame)
    at = FIXED_BYTES + 8 * count
    end = at + head_bytes + body_bytes
    if count > MAX_BUFFERS or total != frame.nbytes or (end > total if count else end != total):
        raise FrameError(
            f"{frame.nbytes} bytes whose fixed part says {total} = {at}+{head_bytes}+{body_bytes} and {count} buffers"
        )
    sizes = struct.unpack_from(f"<{count}Q", frame, FIXED_BYTES)
    raw = bytes(frame[at:end])
    return raw[:head_bytes], raw[head_bytes:], sizes, end


def bulk_bytes(announcement: memoryview) -> int:
    """How many bytes the lane will bring. Raises FrameError."""
    _, _, sizes, end = _head(announcement)
    if not sizes or end != announcement.nbytes:
        raise FrameError(
            f"an announcement of {announcement.nbytes} bytes that ends at {end}, with {len(sizes)} buffers"
        )
    return _end(sizes, 0)


def to_message(frame: memoryview, area: memoryview | None = None) -> Message:
    """The message in a whole frame, or the one that it announces, over what the lane brought to `area`. Its buffers
    view these; head and body are copies."""
    head, body, sizes, at = _head(frame)
    if not sizes:
        return Message(head, body=body)
    buffers: list[Buffer] = []
    memory, at = (frame, at) if area is None else (area, 0)
    for size in sizes:
        at += -at % ALIGN
        buffers.append(memory[at : at + size])
        at += size
    if at != memory.nbytes:
        raise FrameError(f"{len(sizes)} buffers end at {at} of {memory.nbytes}")
    return Message(head, body=body, buffers=buffers)
