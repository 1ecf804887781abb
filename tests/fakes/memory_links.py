"""Links between the models of workers of tests.fakes.driver_world: real frames, real ends of channels, no sockets.

A frame that is posted waits in its link until the world delivers it, one at a time. A link breaks with what is in it; a
peer that is dead is found unreachable later, as by dials that fail.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer

if TYPE_CHECKING:
    from tests.fakes.driver_workers import SimWorker

Life = tuple[str, int]


class MemoryPeer(Peer):
    """One life of another worker, as one life of a worker sees it."""

    def __init__(self, owner: SimWorker, life: Life) -> None:
        super().__init__(Identity(job="j", worker=life[0], attempt=life[1]))
        self.owner, self.life = owner, life
        self.inbox: deque[Message] = deque()  # from there

    def post(self, message: Message) -> None:
        other = self.owner.world.life(self.life)
        if other is not None:
            body, buffers = message.encoded()
            other.links.peer(self.owner.life).inbox.append(Message(message.head, body=body, buffers=buffers))

    def deliver(self) -> None:
        """The next frame, as links.peers dispatches it."""
        message = self.inbox.popleft()
        frame = frames.decode(message.head)
        if isinstance(frame, frames.Ask):
            if (heard := self.hearing.get(frame.conversation)) is not None:
                heard.on_ask(frame, message)
        elif isinstance(frame, frames.Answer):
            if (asked := self.asking.get(frame.conversation)) is not None:
                asked.on_answer(frame, message)
        elif isinstance(frame, frames.Close):
            if (heard := self.hearing.get(frame.conversation)) is not None:
                heard.on_close()
        else:
            self.owner.on_frame(self, frame, message)
        self.owner.work()


class MemoryPeers:
    """In the place of links.peers.Peers: `want` and `unwant` of a channel's end."""

    def __init__(self, owner: SimWorker) -> None:
        self._owner = owner
        self._peers: dict[Life, MemoryPeer] = {}
        self._dialled: list[MemoryPeer] = []  # and nobody is there

    def peer(self, life: Life) -> MemoryPeer:
        return self._peers.setdefault(life, MemoryPeer(self._owner, life))

    def want(self, endpoint: Endpoint, *, by: str, at_once: bool) -> MemoryPeer:
        peer = self.peer((endpoint.worker, endpoint.attempt))
        peer.endpoint = endpoint
        peer.wanted_by.add(by)
        if self._owner.world.life(peer.life) is None:
            self.lost(peer.life)
        return peer

    def unwant(self, peer: MemoryPeer, *, by: str) -> None:
        peer.wanted_by.discard(by)

    def find(self, worker: str, attempt: int) -> MemoryPeer | None:
        return self._peers.get((worker, attempt))

    def lost(self, life: Life) -> None:
        """That life is over: what it had sent may be lost with it; that it is gone is noticed in time."""
        peer = self._peers.get(life)
        if peer is not None:
            peer.inbox.clear()
            self._dialled.append(peer)

    def on_time(self) -> None:
        """Dials have failed for a while."""
        dialled, self._dialled = self._dialled, []
        for peer in dialled:
            self._owner.on_unreachable(peer)

    def broken(self, life: Life) -> None:
        """The link to a living peer breaks in both directions and is made anew."""
        peer = self.peer(life)
        peer.inbox.clear()

    def up(self, life: Life) -> None:
        peer = self.peer(life)
        for asking in list(peer.asking.values()):
            asking.replay()
        self._owner.on_up(peer)

    @property
    def with_frames(self) -> list[MemoryPeer]:
        """A worker accepts links once it has its channels."""
        return [peer for peer in self._peers.values() if peer.inbox] if self._owner.driver_attempt else []


class Silent:
    """Nobody waits here: whoever would is a model that looks again."""

    def notify(self) -> None: ...


class Pauses:
    """In the place of channels.waiting.Waits: whoever waits is resumed after each message and looks again."""

    stopped: str | None = None

    def signal(self) -> Silent:
        return Silent()

    def raise_if_stopped(self) -> None: ...

    async def until(self, condition: Callable[[], bool], *_: Any, **__: Any) -> float:
        while not condition():
            await _pause()
        return 0.0


@types.coroutine
def _pause() -> Generator[None, None, None]:
    yield


_WAITS: Final = object()


def resume(coroutine: Any) -> Any:
    """Its result; `is_waiting` of it: there is none yet."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    return _WAITS


def is_waiting(result: Any) -> bool:
    return result is _WAITS


def at_once(coroutine: Any) -> Any:
    """The result of a coroutine that does not wait."""
    result = resume(coroutine)
    assert not is_waiting(result), "a call that has what it needs waited all the same"
    return result
