"""What two workers say to each other on a link: one typed head per message, as msgpack arrays. Pure.

For: links.peers (dispatch), runtime.streams and queues.channel, weights, gang. Not for: what workers and driver say
to each other (channels.proto). A head names its kind by its first number, so that a reader decodes it once, checked.

    stream   Open, Data, Ack, Close      queue   Pull, Payload, Missing      weights   Weights*      gang   GangWord

A *stream id* is a number that the producer gives to one route of its own life, and never again: a route that is taken
away and given back is another stream, so nothing of the first can be taken for the second.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

Acks = list[tuple[int, int]]
"""(stream id, n): everything below sequence number n of that stream is finished with."""


class Data(msgspec.Struct, array_like=True, tag=1, gc=False):
    """One item of a stream. `acks` are those of the opposite direction, which ride along for nothing. `is_answer`: it
    is for this life alone, and does not come again by another route."""

    stream: int
    sequence: int
    key: str
    step: int
    branch: int
    version_branch: int
    version_number: int
    weight: float
    acks: Acks
    is_answer: bool = False


class Open(msgspec.Struct, array_like=True, tag=2, gc=False):
    """Before any data of a stream on a link: what follows begins at `base`, all before it is finished with. `declared`:
    fingerprint of the declaration that its payloads are checked by before they are sent; 0: they are not. `route`: the
    number of the route, as the driver has told the producer last; 0: it is not numbered."""

    stream: int
    channel: str
    base: int
    declared: int = 0
    route: int = 0


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
    """A version begins: its parts follow, and an end. `catalog` and `view` are weights.edition's; `source` is the rank
    of the publishing gang whose parts these are, -1 where all ranks' are passed on; `sources` are the other ranks.
    `memory`: the parts need not be sent, they lie there. `base`: a part that is not sent is the same in that version.
    """

    branch: int
    number: int
    catalog: bytes
    view: bytes
    plain: dict[str, bool | int | float | str]
    sources: list[dict[str, str | int]]
    source_count: int
    source: int
    part_bytes: int
    memory: tuple[int, int, int, int, int] | None
    base: tuple[int, int] | None


class WeightsParts(msgspec.Struct, array_like=True, tag=9, gc=False):
    """Parts `first`, `first + 1`, ... and their hashes. Payload: the bytes of those in `sent`, in that order."""

    branch: int
    number: int
    first: int
    hashes: list[int]
    sent: list[int]


class WeightsEnd(msgspec.Struct, array_like=True, tag=30, gc=False):
    """All parts of `source` (-1: of every one) have been sent; this is the checksum over them."""

    branch: int
    number: int
    source: int
    checksum: int


class WeightsSubscribe(msgspec.Struct, array_like=True, tag=31, gc=False):
    """Send me every version that is newer than `here`. Of `partial` I have the parts whose byte in `have` is 1.
    `mapped`: versions of yours whose memory I still read, as process `pid`; 0: do not offer me memory. An empty view:
    send me nothing more."""

    view: bytes
    here: tuple[int, int] | None
    checksum: int
    partial: tuple[int, int] | None
    have: bytes
    mapped: list[tuple[int, int]]
    pid: int


class WeightsHave(msgspec.Struct, array_like=True, tag=32, gc=False):
    """To whoever published: this version is here, whole and verified."""

    branch: int
    number: int
    view: bytes
    checksum: int


class WeightsRefused(msgspec.Struct, array_like=True, tag=33, gc=False):
    """To whoever published: this version cannot be used here, ever."""

    branch: int
    number: int
    why: str


class WeightsMove(msgspec.Struct, array_like=True, tag=34, gc=False):
    """Subscribe there instead; come back here if that one is lost."""

    endpoint: dict[str, str | int]


class WeightsFree(msgspec.Struct, array_like=True, tag=35, gc=False):
    """The memory of this version is no longer read."""

    branch: int
    number: int


class GangWord(msgspec.Struct, array_like=True, tag=40, gc=False):
    """All that a rank has to say to the ranks of its roster: where it stands with what value (of rank 0: where all
    stand, with the values of all), and what it keeps for them."""

    roster: int
    place: tuple[int, int, int] | None
    values: list[Any]
    kept: dict[str, bytes]


WeightsFrame = (
    WeightsHead
    | WeightsParts
    | WeightsEnd
    | WeightsSubscribe
    | WeightsHave
    | WeightsRefused
    | WeightsMove
    | WeightsFree
)
Frame = Data | Open | Ack | Close | Pull | Payload | Missing | WeightsFrame | GangWord

encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder[Frame](Frame).decode


def decode(head: bytes) -> Frame:
    """Raises msgspec.MsgspecError for a head of another version or of garbage."""
    frame: Frame = _decode(head)
    return frame
