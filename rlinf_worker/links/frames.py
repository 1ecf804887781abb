"""What two workers say to each other on a link: one typed head per message, as msgpack arrays. Pure.

For: links.peers (dispatch), cycles, queues, weights, gang. Not for: what workers and driver say
to each other (channels.proto). A head names its kind by its first number, so that a reader decodes it once, checked.

    cycle   Open, Ask, Answer, Close    queue   Pull, Payload, Missing    weights   Weights*    gang   GangWord

A *conversation* is a number that the asker gives to one route of its own life, and never again: a route that is taken
away and given back is another conversation, so nothing of the first can be taken for the second.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec


class Open(msgspec.Struct, array_like=True, tag=2, gc=False):
    """From the asker, before anything else of a conversation on a link: `unanswered` are asked again after it, and the
    answers of all before them have come. `declared`: fingerprint of the declaration that questions are checked by
    before they are sent; 0: they are not.

    Open(conversation=7, channel="actions", unanswered=[41, 43], declared=2774909362)
    """

    conversation: int
    channel: str
    unanswered: list[int]
    declared: int = 0


class Ask(msgspec.Struct, array_like=True, tag=1, gc=False):
    """One question. `got`: answers of this conversation that have come since the last question.

    Ask(7, 44, "s3/0/17", step=4, branch=0, version_branch=0, version_number=3, got=[41])
    """

    conversation: int
    number: int
    key: str
    step: int
    branch: int
    version_branch: int
    version_number: int
    got: list[int]


class Answer(msgspec.Struct, array_like=True, tag=3, gc=False):
    """To the question of this number. `load`: questions that the answerer has yet to answer, of whomever. `declared`:
    as in Open, of answers. `is_dropped`: there will be none, by decision."""

    conversation: int
    number: int
    version_branch: int
    version_number: int
    load: int
    declared: int = 0
    is_dropped: bool = False


class Close(msgspec.Struct, array_like=True, tag=4, gc=False):
    """From the asker: what is unanswered of this conversation is asked elsewhere, and nobody waits for it here."""

    conversation: int


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


class WeightsLeave(msgspec.Struct, array_like=True, tag=36, gc=False):
    """This life passes nothing on any more. Whoever was sent there comes back with what it has by now."""

    worker: str
    attempt: int


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
    | WeightsLeave
    | WeightsFree
)
Frame = Open | Ask | Answer | Close | Pull | Payload | Missing | WeightsFrame | GangWord

encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder[Frame](Frame).decode


def decode(head: bytes) -> Frame:
    """Raises msgspec.MsgspecError for a head of another version or of garbage."""
    frame: Frame = _decode(head)
    return frame
