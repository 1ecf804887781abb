"""One message as bytes: the same layout in a shared-memory ring and on a TCP stream.

For: `ring`, `shm`, `tcp`. Not for: anything above a link.

    offset 0    fixed part, 24 bytes: total, bytes of head, bytes of body, number of buffers, kind, sequence
           24   bytes of each buffer, 8 bytes each
           ..   head, body
           64n  each buffer, at the next multiple of 64 from the frame's start

The sequence number is the link's own, modulo 65,536: a frame lost or read twice is seen at once. Little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from rlinf_worker.links.message import Message
from rlinf_worker.links.payload import Buffer

FIXED = struct.Struct("<QIIIHH")
FIXED_BYTES = FIXED.size
ALIGN = 64
"""A cache line, and what vector instructions want of an array."""

DATA, PAD, CHUNK, SWITCH, HELLO, GOODBYE = 1, 2, 3, 4, 5, 6
MAX_BUFFERS = 1 << 20
_PADDING = bytes(ALIGN)


class FrameError(ValueError):
    """Bytes that are no frame. The link that met them breaks, and says so."""


class Outgoing:
    """A frame to be written: `prefix` (all but the buffers), `buffers`, how long it will be, and whether gaps align
    the buffers (a chunk is a part of another frame, whose gaps it already holds)."""

    __slots__ = ("align", "buffers", "prefix", "total")

    def __init__(self, prefix: bytes, buffers: Sequence[Buffer], total: int, *, align: int = ALIGN) -> None:
        self.prefix, self.buffers, self.total, self.align = prefix, buffers, total, align

    def pieces(self) -> Iterator[bytes | Buffer]:
        """Everything in order, with the gaps."""
        yield self.prefix
        at = len(self.prefix)
        for buffer in self.buffers:
            if gap := -at % ALIGN:
                yield _PADDING[:gap]
            yield buffer
            at += gap + buffer.nbytes


def of_message(message: Message, sequence: int, kind: int = DATA) -> Outgoing:
    """Raises PayloadError."""
    head = message.head
    body, buffers = message.encoded()
    if not buffers:
        total = FIXED_BYTES + len(head) + len(body)
        return Outgoing(FIXED.pack(total, len(head), len(body), 0, kind, sequence) + head + body, (), total)
    sizes = [buffer.nbytes for buffer in buffers]
    total = at = FIXED_BYTES + 8 * len(sizes) + len(head) + len(body)
    for size in sizes:
        total = at + -at % ALIGN + size
        at = total
    fixed = FIXED.pack(total, len(head), len(body), len(sizes), kind, sequence)
    return Outgoing(b"".join((fixed, struct.pack(f"<{len(sizes)}Q", *sizes), head, body)), buffers, total)


def to_message(frame: memoryview) -> Message:
    """The message in a whole frame. Its buffers view `frame`; head and body are copies."""
    total, head_bytes, body_bytes, count, _, _ = FIXED.unpack_from(frame)
    at = FIXED_BYTES
    if not count:
        if total != at + head_bytes + body_bytes or total != frame.nbytes:
            raise FrameError(f"{frame.nbytes} bytes whose fixed part says {total} = {at}+{head_bytes}+{body_bytes}")
        raw = bytes(frame)
        return Message(raw[at : at + head_bytes], body=raw[at + head_bytes :])
    at += 8 * count
    if count > MAX_BUFFERS or total != frame.nbytes or at + head_bytes + body_bytes > total:
        raise FrameError(f"{frame.nbytes} bytes whose fixed part says {total} with {count} buffers")
    sizes = struct.unpack_from(f"<{count}Q", frame, FIXED_BYTES)
    head = bytes(frame[at : at + head_bytes])
    at += head_bytes
    body = bytes(frame[at : at + body_bytes])
    at += body_bytes
    buffers: list[Buffer] = []
    for size in sizes:
        at += -at % ALIGN
        buffers.append(frame[at : at + size])
        at += size
    if at != total:
        raise FrameError(f"{count} buffers end at {at} of {total}")
    return Message(head, body=body, buffers=buffers)
