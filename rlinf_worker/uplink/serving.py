"""The end of an uplink that serves: one stream of one agent or worker, from its hello to its end.

For: driver.server, whose two services give it a `Reception` (who may come, what to do with what they say) and a
`Frames` (how the service carries messages). Not for: who of two lives is the older one; the reception refuses it.

    hello within a deadline ─► admit ─► what the outbox has, and what the peer says ─► gone
          else a status           └► refused: one Refusal, and the end of the stream

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| `serve` (gRPC's) | the outbox | something in it | `Outbox.put`, `Outbox.close` |
| its reader | the peer's messages | the next one | the peer; the end of its stream; keepalive, where it is frozen |

The outbox is the stream: closing it ends the stream when what is in it has been written, and what the peer says from
then on counts no more. It is closed where a newer stream of the same peer comes (`Guests`), by itself where the peer
does not read, and by the end of the peer's side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

from rlinf_api import rpc
from rlinf_api.errors import RLinfError
from rlinf_worker.uplink.outbox import LIMIT, Outbox

Key = TypeVar("Key", bound=Hashable)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Guest:
    outbox: Outbox[Any]
    attempt: int


class Guests(dict[Key, Guest], Generic[Key]):
    """The peers of one kind that have a stream now. A second stream of a peer takes the place of its first."""

    def enter(self, key: Key, outbox: Outbox[Any], attempt: int) -> None:
        self.close(key, "a newer connection of this peer came")
        self[key] = Guest(outbox, attempt)

    def left(self, key: Key, outbox: Outbox[Any]) -> bool:
        """Its stream has ended; False: it has a newer one, or was sent away."""
        if (guest := self.get(key)) is None or guest.outbox is not outbox:
            return False
        del self[key]
        return True

    def close(self, key: Key, why: str) -> None:
        if guest := self.pop(key, None):
            guest.outbox.close(why)

    def dismiss(self, key: Key) -> None:
        """Its stream is left to it, so that it ends in good order; what it still says counts no more."""
        if guest := self.pop(key, None):
            guest.outbox.deaf = True

    def tell(self, key: Key, message: Any, *, can_wait: bool = False) -> None:
        """Nothing, where it is away: its next hello says what it holds, and it is told the rest."""
        if guest := self.get(key):
            guest.outbox.put(message, can_wait=can_wait)


class Reception(Protocol[Key]):
    """Whom the peers are guests of. All but `admit` are called in the event loop and must not block."""

    def key(self, hello: Any) -> Key:
        """Who says this hello; nothing has been checked."""
        ...

    async def admit(self, hello: Any, part: str, outbox: Outbox[Any]) -> None:
        """`part`: what the caller's certificate says. Puts a Welcome into the outbox and knows the peer from then on,
        or raises an RLinfError, which is told as a Refusal."""
        ...

    def refused(self, hello: Any, error: RLinfError) -> Any:
        """The message that says so. `gone` has been called."""
        ...

    def heard(self, key: Key, message: Any, *, more: bool) -> None:
        """`more`: the next message of the same frame follows at once."""
        ...

    def gone(self, key: Key, outbox: Outbox[Any]) -> None:
        """Called once for each `admit`, also for one that has failed; the peer may have a newer stream by now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """How one service carries messages, seen from the driver.

    Frames(method="Attach", unpack=lambda frame: [frame], pack=lambda batch: batch)
    """

    method: str
    unpack: Callable[[Any], Sequence[Any]]
    pack: Callable[[list[Any]], Iterable[Any]]


async def serve(
    requests: AsyncIterator[Any],
    context: Context,
    *,
    frames: Frames,
    reception: Reception[Key],
    hello_timeout_s: float,
    unread: int = LIMIT,
) -> AsyncGenerator[Any, None]:
    """The frames to the peer, of which it may leave `unread` messages. To be closed (`contextlib.aclosing`) by whoever
    does not take them to their end."""
    hello, more = await _hello(requests, context, frames=frames, timeout_s=hello_timeout_s)
    key, outbox = reception.key(hello), Outbox[Any](limit=unread)
    reader: asyncio.Task[None] | None = None
    try:
        try:
            await reception.admit(hello, rpc.peer_identity(context).part, outbox)
        except RLinfError as error:
            refusal: RLinfError | None = error
        else:
            refusal = None
        if refusal is None:
            reader = asyncio.create_task(_read(more, requests, frames, reception, key, outbox), name=f"words of {key}")
            reader.add_done_callback(lambda _: outbox.close("the peer ended its stream"))
            while batch := await outbox.drain():
                for frame in frames.pack(batch):
                    yield frame
    finally:
        if reader is not None:
            reader.cancel()
        reception.gone(key, outbox)
    if refusal is not None:
        for frame in frames.pack([reception.refused(hello, refusal)]):
            yield frame


async def _read(
    first: Sequence[Any], requests: AsyncIterator[Any], frames: Frames, reception: Reception[Key], key: Key,
    outbox: Outbox[Any],
) -> None:  # fmt: skip
    _hear(first, reception, key, outbox)
    async for frame in requests:
        if outbox.closed is not None:  # given up, or connected anew
            return
        _hear(frames.unpack(frame), reception, key, outbox)


def _hear(messages: Sequence[Any], reception: Reception[Key], key: Key, outbox: Outbox[Any]) -> None:
    last = len(messages) - 1
    for number, message in enumerate(messages):
        if outbox.closed is None and not outbox.deaf:  # either may change with each of them
            reception.heard(key, message, more=number < last)


async def _hello(
    requests: AsyncIterator[Any], context: Context, *, frames: Frames, timeout_s: float
) -> tuple[Any, Sequence[Any]]:
    """The first message, and what its frame has behind it. The call ends where something else comes first, as trying
    again does not change, and where none comes in time: whoever stood still may try again."""
    try:
        async with asyncio.timeout(timeout_s):
            async for frame in requests:
                messages = frames.unpack(frame)
                if messages and messages[0].WhichOneof("kind") == "hello":
                    return messages[0].hello, messages[1:]
                break
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"{frames.method} heard no hello for {timeout_s:g} s")
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the first message of {frames.method} must be a hello")
