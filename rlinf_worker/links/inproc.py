"""The link between two workers of one process: references, no copies.

For: `listener`, when both ends listen in one process and on one event loop (roles that share a worker, and tests).
Not for: threads with loops of their own; they are two processes that happen to share memory, and use `shm`.

The receiver gets the very objects that were sent, so the rule of `Link.send` (never change a value that was sent) is
all that keeps the two apart here. Each value is encoded once nevertheless, without copying its large arrays: a payload
that another link would refuse is refused here too, so that a plan which moves a role elsewhere meets no new error.
"""

from __future__ import annotations

from collections import deque

from rlinf_worker.links.devices import Gpu
from rlinf_worker.links.errors import LinkBroken, LinkClosed, PayloadError
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.link import Link
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import LinkSettings


def pair(
    a: Identity, b: Identity, *, a_settings: LinkSettings, b_settings: LinkSettings
) -> tuple[InprocLink, InprocLink]:
    """The two ends, a's first."""
    at_a, at_b = InprocLink(a, b, settings=a_settings), InprocLink(b, a, settings=b_settings)
    at_a._other, at_b._other = at_b, at_a
    return at_a, at_b


class InprocLink(Link):
    """See the module. What `a` sends waits in b's inbox; a's settings bound it."""

    kind = "inproc"
    _other: InprocLink

    def __init__(self, me: Identity, peer: Identity, *, settings: LinkSettings) -> None:
        super().__init__(me, peer, settings=settings)
        self._inbox: deque[tuple[Message, int]] = deque()
        self._inbox_bytes = 0

    def could_gain(self, now: Gpu | None) -> bool:
        return False

    def _pop(self) -> Message | None:
        if not self._inbox:
            return None
        message, nbytes = self._inbox.popleft()
        self._inbox_bytes -= nbytes
        self._other._wake_sender()
        return message

    def _on_broken(self) -> None:
        if self._other.broken is None:
            kind = LinkClosed if isinstance(self._broken, LinkClosed) else LinkBroken
            self._other._fail(kind(str(self._other.peer), "the peer closed it"))

    def _offer(self, message: Message, nbytes: int) -> bool:
        other = self._other
        if other._inbox and other._inbox_bytes + nbytes > self.settings.outbox_bytes:
            return False
        # A message of its own: releasing it must not take the value from the sender, who may send it again.
        other._inbox.append((message.twin(), nbytes))
        other._inbox_bytes += nbytes
        other._wake_receiver()
        self.counters.count_sent(nbytes)
        return True

    def _weigh(self, message: Message) -> int:
        try:
            nbytes = message.nbytes
        except PayloadError:
            self.counters.refused_messages += 1
            raise
        if nbytes > self.settings.max_message_bytes:
            raise self._too_large(nbytes)
        return nbytes

    def send_nowait(self, message: Message) -> bool:
        self._raise_if_broken()
        nbytes = self._weigh(message)
        return not self._send_waiting and self._offer(message, nbytes)

    async def _send_in_turn(self, message: Message) -> None:
        nbytes = self._weigh(message)
        while not self._offer(message, nbytes):
            await self._sleep_until_room()

    async def close(self) -> None:
        self._fail(LinkClosed(str(self.peer), "it was closed here"))
        self._closed_here = True
        self._inbox.clear()
