"""What two workers say to each other on a link: one typed head per message, as msgpack arrays. Pure.

For: runtime.peers (dispatch), runtime.streams and runtime.queues, weights. Not for: what workers and driver say to
each other (channels.proto). A head names its kind by its first number, so that a reader decodes it once, checked.

    stream   Open, Data, Ack, Close      queue   Pull, Payload, Missing      weights   WeightsHead, WeightsBucket

A *stream id* is a number that the producer gives to one route of its own life, and never again: a route that is taken
away and given back is another stream, so nothing of the first can be taken for the second.
"""

from __future__ import annotations

from typing import Final

import msgspec

Acks = list[tuple[int, int]]
"""(stream id, n): everything below sequence number n of that stream is finished with."""


class Data(msgspec.Struct, array_like=True, tag=1, gc=False):
    """One item of a stream. `acks` are those of the opposite direction, which ride along for nothing."""

    stream: int
    sequence: int
    key: str
    step: int
    branch: int
    version_branch: int
    version_number: int
    weight: float
    acks: Acks


class Open(msgspec.Struct, array_like=True, tag=2, gc=False):
    """Before any data of a stream on a link: what follows begins at `base`, all before it is finished with."""

    stream: int
    channel: str
    base: int


class Ack(msgspec.Struct, array_like=True, tag=3, gc=False):
    acks: Acks


class Close(msgspec.Struct, array_like=True, tag=4, gc=False):
    """No items from `sequence` on, ever."""

    stream: int
    sequence: int


class Pull(msgspec.Struct, array_like=True, tag=5, gc=False):
    channel: str
    units: list[tuple[int, str]]  # (branch, key)


class Payload(msgspec.Struct, array_like=True, tag=6, gc=False):
    """The answer to a Pull, one per unit."""

    channel: str
    branch: int
    key: str


class Missing(msgspec.Struct, array_like=True, tag=7, gc=False):
    """Units that were pulled and are not here: released, cancelled, or of another life."""

    channel: str
    units: list[tuple[int, str]]


class WeightsHead(msgspec.Struct, array_like=True, tag=8, gc=False):
    """A version begins. `schema` lists (name, dtype, shape) in the order of the buckets."""

    branch: int
    number: int
    buckets: int
    checksum: int
    schema: list[tuple[str, str, list[int]]]


class WeightsBucket(msgspec.Struct, array_like=True, tag=9, gc=False):
    """Payload: a list of the next tensors of the schema. `checksum` is over the encoded payload."""

    branch: int
    number: int
    index: int
    count: int
    checksum: int


Frame = Data | Open | Ack | Close | Pull | Payload | Missing | WeightsHead | WeightsBucket

encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder[Frame](Frame).decode


def decode(head: bytes) -> Frame:
    """Raises msgspec.MsgspecError for a head of another version or of garbage."""
    frame: Frame = _decode(head)
    return frame
