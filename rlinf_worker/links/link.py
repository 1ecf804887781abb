"""A connection between two workers: what it owes to those who hold it, and what all kinds of links share.

For: `peers` and weights, which hold `Link`s and know no kind of them, and the modules of the links, which subclass
`Link`. Not for: making links (`listener`), what is in a message (`message`, `payload`), the ways in which a link fails
(`errors`), its bounds (`settings`).

A new link joins the parametrised suite in `tests/unit/rlinf_worker/links/test_every_link.py` and takes its place in
`listener.dial`.

    waits                                  woken by
    recv: the one receiver                 a message, a break, cancellation
    send: callers in order of their calls  room, a break, cancellation
    wait_broken                            the first break or close
    a message with buffers on a GPU        its lane (`beside`), a break
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field, fields
from time import monotonic

from rlinf_api.errors import InvariantBroken
from rlinf_worker.links import frame
from rlinf_worker.links.beside import Beside
from rlinf_worker.links.devices import Gpu
from rlinf_worker.links.errors import LinkBroken, LinkClosed, MessageTooLarge, PayloadError
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import LinkSettings

logger = logging.getLogger(__name__)

BURST = 64
"""After so many calls that found room (or a message) at once, a caller lets the event loop run: a flood must not keep
heartbeats and deadlines of the same process from their turn."""


@dataclass(slots=True)
class Counters:
    """One link end's account since it was made. Waits are the time that a caller spent suspended."""

    sent_messages: int = 0
    sent_bytes: int = 0
    received_messages: int = 0
    received_bytes: int = 0
    send_wait_s: float = 0.0
    chunked_messages: int = 0
    """Shared memory: messages that did not fit in any ring."""
    refused_messages: int = 0
    """PayloadError and MessageTooLarge at `send`; nothing of these left."""
    bulk_messages: int = 0
    """TCP: messages whose buffers went by the lane."""
    device_messages: int = 0
    """Messages whose buffers went from GPU to GPU."""


class Link(abc.ABC):
    """A bidirectional, ordered connection between two workers; one message is one unit of everything.

    Side and order: made by `listener`, then used by one event loop. Any number of tasks may `send`; one task `recv`s
    (the layer above has one pump per link, which hands messages to routes). `close` may be called at any time.

    open -> broken (once, with a reason), where LinkClosed is the orderly kind.
    """

    kind = "link"
    """`shm` or `tcp`."""

    def __init__(self, me: Identity, peer: Identity, *, settings: LinkSettings) -> None:
        self.me, self.peer, self.settings = me, peer, settings
        self.counters = Counters()
        self.said_gpu: Gpu | None = None
        """What the hello said of this process's GPU, which it may have begun to use only after that."""
        self.beside = Beside(
            settings,
            say=self._say_beside,
            on_room=self._wake_sender,
            on_arrived=self._wake_receiver,
            lost=self.abort,
        )
        self._loop = asyncio.get_running_loop()
        self._broken: LinkBroken | None = None
        self._closed_here = False
        self._draining = False  # broken, but what was on its way when it broke is still coming in
        self._broken_waiters: list[asyncio.Future[None]] = []
        self._receiver: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._recv_burst = self._send_burst = 0
        self._sent = self._received = 0
        self._send_turn = asyncio.Lock()
        self._send_waiting = 0

    @property
    def broken(self) -> LinkBroken | None:
        """Why the link is of no more use (LinkClosed after a close), or None. Messages may still wait in `recv`."""
        return self._broken

    async def wait_broken(self) -> LinkBroken:
        """Returns (does not raise) the reason once there is one. Cancellable."""
        while self._broken is None:
            waiter = self._loop.create_future()
            self._broken_waiters.append(waiter)
            try:
                await waiter
            finally:
                self._broken_waiters.remove(waiter)
        return self._broken

    def abort(self, why: str) -> None:
        """Break the link now, for example on the control plane's word that the peer's node is lost."""
        self._fail(LinkBroken(str(self.peer), why))

    def _fail(self, error: LinkBroken) -> None:
        """The first reason stays."""
        if self._broken is not None:
            return
        self._broken = error
        level = logging.DEBUG if isinstance(error, LinkClosed) else logging.INFO
        logger.log(level, "link broken", extra={"peer": str(self.peer), "link": self.kind, "why": error.why})
        for waiter in self._broken_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._wake_receiver()
        self.beside.end()
        self._wake_sender()
        self._on_broken()

    def _on_broken(self) -> None:  # noqa: B027 - a link may have nothing to do here
        """The subclass gives back what reading what arrived does not need."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Send what was accepted (at most `linger_s`), say goodbye, give everything back. Idempotent."""

    def _wake_receiver(self) -> None:
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    def _wake_sender(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _say_beside(self, note: bytes) -> None:  # noqa: B027 - a link may have no lane beside it
        """To the peer's lane of GPU buffers; overtakes messages."""

    # --- receiving: subclasses give _pop, _before_sleep, _after_sleep ---

    @abc.abstractmethod
    def _pop(self) -> Message | None:
        """The next message that is wholly here. Never waits."""

    def _before_sleep(self) -> bool:
        """The receiver is about to sleep. False: something came meanwhile, look again."""
        return True

    def _after_sleep(self) -> None:  # noqa: B027 - as above
        """The receiver is awake again."""

    async def recv(self) -> Message:
        """The next message. One caller at a time. Cancelled: no message is lost.

        Raises LinkBroken, after everything that arrived whole has been returned. Large messages may view the link's
        memory: whoever takes the message out of `recv` lets go of it and of all arrays decoded from it (or calls
        `Message.release` and lets go of the arrays); until then the sender has that much less room, and nothing is ever
        overwritten under a living view.
        """
        if self._receiver is not None:
            raise InvariantBroken(f"two tasks receive from the link to {self.peer}", wanted="one pump per link")
        if self._closed_here:
            self._raise_if_broken()
        if self._recv_burst >= BURST:
            self._recv_burst = 0
            await asyncio.sleep(0)
        message = self._next()
        if message is None:
            message = await self._recv_waiting()
        else:
            self._recv_burst += 1
        counters = self.counters
        counters.received_messages += 1
        counters.received_bytes += message.nbytes
        return message

    async def _recv_waiting(self) -> Message:
        self._recv_burst = 0
        while True:
            # Buffers on a GPU that are on their way wake us, not what lies behind them in the inbox.
            beside = self.beside.arriving
            if (self._broken is None or self._draining) and (beside or self._before_sleep()):
                self._receiver = self._loop.create_future()
                try:
                    await self._receiver
                finally:
                    self._receiver = None
                    if not beside and not self._closed_here:  # closed while we slept: the ring is unmapped
                        self._after_sleep()
            # Nothing is awaited between finding a message and returning it: a cancelled recv loses none.
            message = None if self._closed_here else self._next()
            if message is not None:
                return message
            if self._closed_here or (self._broken is not None and not self._draining):
                self._raise_if_broken()

    def _next(self) -> Message | None:
        return self.beside.next(self._pop) if self.beside.expected else self._pop()

    # --- sending: subclasses give _try, _send_in_turn, and count frames in _sent ---

    @abc.abstractmethod
    def _try(self, out: frame.FrameOut) -> bool:
        """Take the frame, as the next. False: no room."""

    @abc.abstractmethod
    async def _send_in_turn(self, message: Message) -> None:
        """Its turn among those who wait for room: `_sleep_until_room` until there is some."""

    def send_nowait(self, message: Message) -> bool:
        """As `send`, but False where `send` would wait. Overtakes nobody."""
        self._raise_if_broken()
        out = self._framed(message)
        if self._send_waiting or not self.beside.fits(out) or not self._try(out):
            return False
        self._accepted(out, message)
        return True

    def _accepted(self, out: frame.FrameOut, message: Message) -> None:
        """It is on its way by the link."""
        counters = self.counters
        counters.sent_messages += 1
        counters.sent_bytes += message.nbytes
        if out.tensors:
            self.beside.offer(out.tensors)
            counters.device_messages += 1

    async def send(self, message: Message) -> None:
        """Hand over a message; waits while the link is full.

        Returns when the link has accepted it: it will be received, in order, unless the link breaks. The value must not
        be changed afterwards, as large arrays are not copied. Raises PayloadError, MessageTooLarge (the link goes on)
        and LinkBroken. Cancelled: accepted whole or not at all; callers that must
        know number their messages. Callers are served in the order in which they called.
        """
        self._send_burst += 1
        if self._send_burst >= BURST:
            self._send_burst = 0
            await asyncio.sleep(0)
            self._raise_if_broken()
        if self.send_nowait(message):
            return
        since = monotonic()
        self._send_waiting += 1
        try:
            async with self._send_turn:
                self._raise_if_broken()
                await self._send_in_turn(message)
        finally:
            self._send_waiting -= 1
            self.counters.send_wait_s += monotonic() - since

    async def _sleep_until_room(self) -> None:
        """Raises what has broken the link meanwhile."""
        self._room = self._loop.create_future()
        try:
            await self._room
        finally:
            self._room = None
        self._raise_if_broken()

    def _framed(self, message: Message) -> frame.FrameOut:
        """Raises PayloadError and MessageTooLarge, counted: nothing was sent, and the link goes on."""
        try:
            out = self.beside.framed(message, self._sent)
        except PayloadError:
            self.counters.refused_messages += 1
            raise
        total = out.total + sum(tensor.nbytes for tensor in out.tensors)
        if total > self.settings.max_message_bytes:
            self.counters.refused_messages += 1
            raise MessageTooLarge(
                f"cannot send a message to worker {self.peer}",
                got=f"{total} bytes",
                wanted=f"at most {self.settings.max_message_bytes}",
                next="split it, or raise max_message_bytes at both ends",
            )
        return out


@dataclass(slots=True)
class Tally:
    """What all links of one worker have carried, by kind of link, those that have ended included: the numbers behind
    the metrics `rlinf_link_*`. `began` with each link, `ended` once it is of no more use."""

    breaks: Counter[str] = field(default_factory=Counter)  # ended otherwise than in good order, by kind
    _open: list[Link] = field(default_factory=list)
    _ended: dict[str, Counters] = field(default_factory=dict)

    def began(self, link: Link) -> None:
        self._open.append(link)

    def ended(self, link: Link) -> None:
        if link not in self._open:
            return
        self._open.remove(link)
        _add(self._ended.setdefault(link.kind, Counters()), link.counters)
        if link.broken is not None and not isinstance(link.broken, LinkClosed):
            self.breaks[link.kind] += 1

    def open(self) -> Counter[str]:
        """Links that are up, by kind; 0 for a kind that there was."""
        found = Counter(dict.fromkeys(self._ended, 0))
        found.update(link.kind for link in self._open)
        return found

    def totals(self) -> dict[str, Counters]:
        found: dict[str, Counters] = {}
        for kind, counters in [*self._ended.items(), *((link.kind, link.counters) for link in self._open)]:
            _add(found.setdefault(kind, Counters()), counters)
        return found


def _add(into: Counters, more: Counters) -> None:
    for each in fields(Counters):
        setattr(into, each.name, getattr(into, each.name) + getattr(more, each.name))
