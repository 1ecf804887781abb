"""What a link carries: the channel's own header bytes and one payload.

For: channels (they make and take messages) and links (they move them). Not for: what the head means; a link never
looks into it (kind of message, route, sequence number, lineage keys, policy version: the channel layer's business).

    await link.send(Message(head, {"obs": obs}))           # encoded by the link, if it has to be
    with await link.recv() as message:                     # decoded when asked for
        learn(message.value())

Who lets go of what. A large message received over shared memory views the ring: its part of the ring is free for the
sender again when the message has been released (or collected) *and* nothing decoded from it lives any more. Whoever
takes a message out of `recv` calls `release()`, and keeps copies, not views, of what it stores for long. Forgetting it
costs room, that is, back-pressure; it never costs correctness.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from rlinf_api.errors import InvariantBroken
from rlinf_worker.links import payload
from rlinf_worker.links.payload_arrays import Part

_ABSENT: Final = object()


class Message:
    """`head` and a payload, held as a value, as its encoding, or as both. Immutable once it has been sent."""

    __slots__ = ("__weakref__", "_body", "_buffers", "_value", "head")

    def __init__(
        self, head: bytes, value: object = _ABSENT, *, body: bytes = b"", buffers: Sequence[Part] = ()
    ) -> None:
        self.head = head
        self._value = value
        self._body: bytes | None = None if value is not _ABSENT else body
        self._buffers = buffers

    def encoded(self) -> tuple[bytes, Sequence[Part]]:
        """The payload's header and buffers; (b"", ()) where there is no payload. Raises PayloadError."""
        if self._body is None:
            if self._value is _ABSENT:
                raise InvariantBroken("a message was used after its release")
            self._body, self._buffers = payload.encode(self._value)
        return self._body, self._buffers

    @property
    def nbytes(self) -> int:
        """What it weighs: head, payload header and buffers."""
        body, buffers = self.encoded()
        size = len(self.head) + len(body)
        for buffer in buffers:
            size += buffer.nbytes
        return size

    def value(self) -> Any:
        """The payload, decoded at the first call; None where there is none. Raises PayloadError."""
        if self._value is _ABSENT:
            if self._body is None:
                raise InvariantBroken("a message was used after its release")
            self._value = payload.decode(self._body, self._buffers) if self._body else None
        return self._value

    def release(self) -> None:
        """Let go of the payload; idempotent. What was decoded from it stays valid, and keeps its memory."""
        self._value, self._body, self._buffers = _ABSENT, None, ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
