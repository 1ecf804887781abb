"""What all links share: breaking once, waking whoever waits, fairness, the account.

For: the modules of the links, which subclass `BaseLink`. Not for: users of links (`protocol.Link` is what they see).

    waits                                  woken by
    recv: the one receiver                 a message, a break, cancellation
    send: callers in order of their calls  room, a break, cancellation
    wait_broken                            the first break or close
    a message with buffers on a GPU        its lane (`devices`), a break
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

from rlinf_api.errors import InvariantBroken
from rlinf_worker.links import devices, frame
from rlinf_worker.links.devices import BuffersBeside, DeviceLane, Gpu
from rlinf_worker.links.errors import LinkBroken, LinkClosed, MessageTooLarge, PayloadError
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.message import Message
from rlinf_worker.links.protocol import Counters
from rlinf_worker.links.settings import LinkSettings

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
        self.said_gpu: Gpu | None = None
        self._loop = asyncio.get_running_loop()
        self._broken: LinkBroken | None = None
        self._closed_here = False
        self._broken_waiters: list[asyncio.Future[None]] = []
        self._receiver: asyncio.Future[None] | None = None
        self._recv_burst = self._send_burst = 0
        self._send_turn = asyncio.Lock()
        self._send_waiting = 0
        self._beside = False
        self._devices: DeviceLane | None = None
        self._devices_coming = False
        self._abandon_meeting: Callable[[], None] | None = None
        self._arriving: tuple[Message, BuffersBeside] | None = None
        self._arrived: list[Any] | None = None

    def could_gain(self, now: Gpu | None) -> bool:
        return devices.is_news(self.said_gpu, now)

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
        self._end_beside()
        self._on_room_beside()
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
        since = monotonic()
        try:
            while True:
                # Buffers on a GPU that are on their way wake us, not what lies behind them in the inbox.
                beside = self._arriving is not None
                if (self._broken is None or self._still_arriving()) and (beside or self._before_sleep()):
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
                if self._closed_here or (self._broken is not None and not self._still_arriving()):
                    self._raise_if_broken()
        finally:
            self.counters.recv_wait_s += monotonic() - since

    # --- buffers on a GPU that go beside the link (`devices`); subclasses give _say_beside, _on_room_beside ---

    def _expect_beside(self, abandon: Callable[[], None] | None = None) -> None:
        """Both ends have agreed on a lane. Until it is there, or where it does not come, all goes by the link."""
        self._beside = self._devices_coming = True
        self._abandon_meeting = abandon

    def _have_beside(self, lane: DeviceLane | None) -> None:
        self._devices_coming = False
        if lane is not None and self._broken is not None:
            lane.kill()
            return
        self._devices = lane
        self._begin_arrival()

    def _end_beside(self) -> None:
        self._devices_coming = False
        if self._abandon_meeting is not None:
            self._abandon_meeting()
        if self._devices is not None:
            self._devices.kill()

    def _lost_beside(self, why: str) -> None:
        self._fail(LinkBroken(str(self.peer), why))

    def _say_beside(self, note: bytes) -> None:  # noqa: B027 - as above
        """To the peer's lane; overtakes messages."""

    def _on_room_beside(self) -> None:  # noqa: B027 - as above
        """The lane has let go of a message, or is at its end: wake who waits for that."""

    def _hear_beside(self, note: bytes | memoryview) -> None:
        if self._devices is not None:
            self._devices.hear(note)

    def _frame(self, message: Message, sequence: int) -> frame.FrameOut:
        """Raises PayloadError. Changes nothing: `_offer_beside` does, once the frame is on its way."""
        lane = self._devices
        if lane is not None:
            found = devices.device_buffers(message)
            here = all(devices.device_index(part.tensor) == lane.gpu.index for _, part in found)
            if found and here and sum(part.nbytes for _, part in found) >= self.settings.bulk_from_bytes:
                out = frame.of_message(devices.split(message, found, lane.next_number), sequence & 0xFFFF)
                out.tensors = [devices.bytes_of(part.tensor) for _, part in found]
                return out
        return frame.of_message(message, sequence & 0xFFFF)

    def _fits_beside(self, out: frame.FrameOut) -> bool:
        if not out.tensors or self._devices is None:
            return True
        return self._devices.has_room(sum(tensor.nbytes for tensor in out.tensors))

    def _offer_beside(self, out: frame.FrameOut) -> None:
        if out.tensors and self._devices is not None:
            self._devices.offer(out.tensors)
            self.counters.device_messages += 1

    def _next(self) -> Message | None:
        if not self._beside:
            return self._pop()
        if self._arriving is None:
            message = self._pop()
            if message is None:
                return None
            try:
                manifest = devices.manifest_of(message, max_bytes=self.settings.max_message_bytes)
            except ValueError as err:
                self._lost_beside(str(err))
                return None
            if manifest is None:
                return message
            self._arriving = (message, manifest)
            self._begin_arrival()
        if self._arrived is None:
            return None
        (message, manifest), tensors = self._arriving, self._arrived
        self._arriving = self._arrived = None
        return devices.join(message, manifest, tensors)

    def _begin_arrival(self) -> None:
        if self._arriving is None or self._broken is not None or self._devices_coming:
            return
        if self._devices is None:
            self._lost_beside("it announced GPU buffers, and this end has no lane for them")
            return
        manifest = self._arriving[1]
        try:
            self._devices.receive(manifest.number, [size for _, size in manifest.places], self._on_arrived)
        except devices.DEVICE_ERRORS as err:
            self._lost_beside(f"this end has no room for its {manifest.nbytes} bytes on the GPU: {str(err)[:200]}")

    def _on_arrived(self, tensors: list[Any]) -> None:
        if self._broken is None:
            self._arrived = tensors
            self._wake_receiver()

    async def _let_beside_leave(self) -> None:
        """Before a goodbye: what was offered is taken from this process, while it lives."""
        deadline = self._loop.time() + self.settings.linger_s
        while self._broken is None and self._devices is not None and self._devices.holds:
            if self._loop.time() >= deadline:
                self.abort(
                    f"{self._devices.holds} messages on a GPU were not taken within {self.settings.linger_s:g} s"
                )
                return
            await asyncio.sleep(0.002)  # a close is rare; the lane has one listener, and a sender may be it

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

    def _framed(self, message: Message, sequence: int) -> frame.FrameOut:
        """Raises PayloadError and MessageTooLarge, counted: nothing was sent, and the link goes on."""
        try:
            out = self._frame(message, sequence)
        except PayloadError:
            self.counters.refused_messages += 1
            raise
        total = out.total + sum(tensor.nbytes for tensor in out.tensors)
        if total > self.settings.max_message_bytes:
            raise self._too_large(total)
        return out

    def _too_large(self, nbytes: int) -> MessageTooLarge:
        self.counters.refused_messages += 1
        return MessageTooLarge(
            f"cannot send a message to worker {self.peer}",
            got=f"{nbytes} bytes",
            wanted=f"at most {self.settings.max_message_bytes}",
            next="split it, or raise max_message_bytes at both ends",
        )
