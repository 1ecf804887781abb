"""What all links share: breaking once, waking whoever waits, fairness, the account.

For: the modules of the links, which subclass `BaseLink`. Not for: users of links (`protocol.Link` is what they see).

    waits                                  woken by
    recv: the one receiver                 a message, a break, cancellation
    send: callers in order of their calls  room, a break, cancellation
    wait_broken                            the first break or close
"""

from __future__ import annotations

import abc
import asyncio
import logging
from time import monotonic

from rlinf_api.errors import InvariantBroken
from rlinf_worker.links import frame
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.message import Message
from rlinf_worker.links.protocol import (
    Counters,
    LinkBroken,
    LinkClosed,
    LinkSettings,
    MessageTooLarge,
    PayloadError,
)

logger = logging.getLogger(__name__)

BURST = 64
"""After so many calls that found room (or a message) at once, a caller lets the event loop run: a flood must not keep
heartbeats and deadlines of the same process from their turn."""


class BaseLink(abc.ABC):
    """State machine: open -> broken (once, with a reason), where LinkClosed is the orderly kind."""

    kind = "base"

    def __init__(self, me: Identity, peer: Identity, *, settings: LinkSettings) -> None:
        self.me, self.peer, self.settings = me, peer, settings
        self.counters = Counters()
        self._loop = asyncio.get_running_loop()
        self._broken: LinkBroken | None = None
        self._closed_here = False
        self._broken_waiters: list[asyncio.Future[None]] = []
        self._receiver: asyncio.Future[None] | None = None
        self._recv_burst = self._send_burst = 0
        self._send_turn = asyncio.Lock()
        self._send_waiting = 0

    @property
    def broken(self) -> LinkBroken | None:
        return self._broken

    async def wait_broken(self) -> LinkBroken:
        while self._broken is None:
            waiter = self._loop.create_future()
            self._broken_waiters.append(waiter)
            try:
                await waiter
            finally:
                self._broken_waiters.remove(waiter)
        return self._broken

    def abort(self, why: str) -> None:
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
        self._on_broken()

    def _on_broken(self) -> None:  # noqa: B027 - a link may have nothing to do here
        """The subclass wakes its senders and gives back what reading what arrived does not need."""

    def _wake_receiver(self) -> None:
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    # --- receiving: subclasses give _pop, _before_sleep, _after_sleep ---

    @abc.abstractmethod
    def _pop(self) -> Message | None:
        """The next message that is wholly here. Never waits."""

    def _before_sleep(self) -> bool:
        """The receiver is about to sleep. False: something came meanwhile, look again."""
        return True

    def _after_sleep(self) -> None:  # noqa: B027 - as above
        """The receiver is awake again."""

    def _still_arriving(self) -> bool:
        """Broken, but what was on its way when it broke is still coming in."""
        return False

    async def recv(self) -> Message:
        if self._receiver is not None:
            raise InvariantBroken(f"two tasks receive from the link to {self.peer}", wanted="one pump per link")
        if self._closed_here:
            self._raise_if_broken()
        if self._recv_burst >= BURST:
            self._recv_burst = 0
            await asyncio.sleep(0)
        message = self._pop()
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
        since = monotonic()
        try:
            while True:
                if (self._broken is None or self._still_arriving()) and self._before_sleep():
                    self._receiver = self._loop.create_future()
                    try:
                        await self._receiver
                    finally:
                        self._receiver = None
                        if not self._closed_here:  # closed while we slept: the ring is unmapped
                            self._after_sleep()
                # Nothing is awaited between finding a message and returning it: a cancelled recv loses none.
                message = None if self._closed_here else self._pop()
                if message is not None:
                    return message
                if self._closed_here or (self._broken is not None and not self._still_arriving()):
                    self._raise_if_broken()
        finally:
            self.counters.recv_wait_s += monotonic() - since

    # --- sending ---

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    async def _let_others_run(self) -> None:
        self._send_burst += 1
        if self._send_burst >= BURST:
            self._send_burst = 0
            await asyncio.sleep(0)
            self._raise_if_broken()

    def _framed(self, message: Message, sequence: int) -> frame.Outgoing:
        """Raises PayloadError and MessageTooLarge, counted: nothing was sent, and the link goes on."""
        try:
            out = frame.of_message(message, sequence & 0xFFFF)
        except PayloadError:
            self.counters.refused_messages += 1
            raise
        if out.total > self.settings.max_message_bytes:
            raise self._too_large(out.total)
        return out

    def _too_large(self, nbytes: int) -> MessageTooLarge:
        self.counters.refused_messages += 1
        return MessageTooLarge(
            f"cannot send a message to worker {self.peer}",
            got=f"{nbytes} bytes",
            wanted=f"at most {self.settings.max_message_bytes}",
            next="split it, or raise max_message_bytes at both ends",
        )
