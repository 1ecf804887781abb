"""Bytes of one connection <-> frames: the asyncio protocol under a TCP link, from the hello on.

For: `tcp` (and `listener`, which accepts with it). Not for: what frames mean, nor sending (the link writes).

Small frames are cut out of a staging buffer, a large one is received straight into the memory that its arrays will
view. A frame of kind BULK only announces: its buffers come by the link's `lane` into memory that is taken when it is
their turn, and the frames behind it wait, so that order holds. Charged against `inbox_bytes` by arrival or
announcement, freed by `take`; above it the connection is not read.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from rlinf_worker.links import areas, frame, hello
from rlinf_worker.links.hello import Refusal
from rlinf_worker.links.lane import Lane
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import KIB, LinkSettings

logger = logging.getLogger(__name__)

STAGING_BYTES = 256 * KIB
"""One recv call's worth of small frames."""

LARGE_FRAME_BYTES = 64 * KIB
"""From here a frame gets memory of its own while it arrives; below, cutting it out of the staging buffer is cheaper."""


def tune(sock: Any, lost_after_s: float) -> None:
    """No delay for small frames; an idle connection to a lost node ends within `lost_after_s`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = min(max(1, int(lost_after_s) - 1), 127)  # the kernel knows no more
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


class Arrival:
    """A frame in its place. Of a BULK frame `whole` is the announcement and `area` what the lane fills."""

    __slots__ = ("area", "kind", "nbytes", "ready", "sequence", "whole")

    def __init__(self, kind: int, sequence: int, whole: memoryview, *, bulk_bytes: int = 0) -> None:
        self.kind, self.sequence, self.whole = kind, sequence, whole
        self.nbytes = whole.nbytes + bulk_bytes
        self.area: memoryview | None = None
        self.ready = kind != frame.BULK


def _nobody() -> None:
    """There is no link yet."""


class Wire(asyncio.BufferedProtocol):
    """Bytes <-> frames, from the first byte on; first the hello asks for a frame, then the link does."""

    def __init__(self, settings: LinkSettings, on_connect: Callable[[Wire], None] | None = None) -> None:
        self.transport: asyncio.Transport
        """There from `connection_made` on, before which nothing is called."""
        self.on_arrived = self.on_writable = _nobody
        """There may be a frame to take; the transport takes bytes again. All four are the link's, once there is one."""
        self.on_note: Callable[[bytes], None] = lambda note: None
        """A note on GPU buffers came."""
        self.on_lost: Callable[[str], None] = lambda why: None
        """Nothing more will come, and why."""
        self.lane: Lane | None = None
        self.frames: deque[Arrival] = deque()
        self.frame_bytes = 0
        self.lost: str | None = None
        self.closed_by_peer = False
        self.ended = asyncio.get_running_loop().create_future()
        self.writable = True
        self._settings = settings
        self._on_connect = on_connect
        self._max_frame_bytes = hello.MAX_HELLO_BYTES
        self._greeted = False
        self._waiter: asyncio.Future[None] | None = None
        self._reading = True
        self._staging = bytearray(STAGING_BYTES)
        self._view = memoryview(self._staging)
        self._start = self._end = 0
        self._large: memoryview | None = None
        self._large_at = 0
        self.lane_may_come = True
        self._announced: deque[Arrival] = deque()
        self._announced_bytes = self._filling = 0
        self._goodbye = False

    # --- called by whoever makes a link, and by the link ---

    def here(self) -> str:
        """The address of this end. Raises ConnectionResetError where the connection is gone: TLS has none then."""
        found = self.transport.get_extra_info("sockname") if self.lost is None else None
        if found is None:
            raise ConnectionResetError(self.lost or "the connection is gone")
        return str(found[0])

    def close(self) -> None:
        """Idempotent. A second close of asyncio's TLS forgets what it is a transport of: nothing aborts it any more."""
        if not self.transport.is_closing():
            self.transport.close()

    # --- called by the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        # 0: whatever the kernel did not take pauses us. asyncio's TLS takes 0 as "always full" and would never resume.
        transport.set_write_buffer_limits(high=64 * KIB if transport.get_extra_info("sslcontext") else 0)
        tune(transport.get_extra_info("socket"), self._settings.lost_after_s)
        if self._on_connect is not None:
            self._on_connect(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large[self._large_at :]
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._large is not None:
                self._large_at += nbytes
                if self._large_at < self._large.nbytes:
                    return
                whole, self._large = self._large, None
                self._arrived(whole)
            else:
                self._end += nbytes
                self._cut()
        except frame.FrameError as err:
            self.fail(f"it sent no valid frame: {err}")
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self.on_arrived()

    def eof_received(self) -> bool:
        self.fail("its process is gone (the connection ended without a goodbye)")
        return False

    def connection_lost(self, exc: BaseException | None) -> None:
        why = f": {exc}" if exc is not None else ""
        self.fail(f"the connection is gone{why}")
        if not self.ended.done():
            self.ended.set_result(None)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self.on_writable()

    # --- frames ---

    def _cut(self) -> None:
        start, end, view = self._start, self._end, self._view
        while end - start >= frame.FIXED_BYTES:
            total = frame.FIXED.unpack_from(view, start)[0]
            if not frame.FIXED_BYTES <= total <= self._max_frame_bytes:
                raise frame.FrameError(f"a frame of {total} bytes, wanted at most {self._max_frame_bytes}")
            if start + total <= end:
                self._arrived(memoryview(bytearray(view[start : start + total])))
                start += total
                if not self._greeted:  # what follows a hello waits until it was judged: other bounds hold for it
                    self.transport.pause_reading()
                    break
                continue
            if total > LARGE_FRAME_BYTES:
                self._large = areas.take(total)
                self._large_at = end - start
                self._large[: self._large_at] = view[start:end]
                start = end
            break
        if start == end:
            start = end = 0
        elif start > STAGING_BYTES // 2:
            view[: end - start] = bytes(view[start:end])
            start, end = 0, end - start
        self._start, self._end = start, end

    def _arrived(self, whole: memoryview) -> None:
        _, _, _, _, kind, sequence = frame.FIXED.unpack_from(whole)
        if kind == frame.GOODBYE:
            self._goodbye = True
            self._part()
            return
        if kind == frame.NOTE:
            self.on_note(frame.to_message(whole).head)
            return
        if kind == frame.BULK:
            bulk_bytes = frame.bulk_bytes(whole)
            if self.lane is None and not self.lane_may_come:
                raise frame.FrameError("it announced bulk data on a link without a lane")
            if bulk_bytes > self._max_frame_bytes:
                raise frame.FrameError(f"a frame of {bulk_bytes} bytes, wanted at most {self._max_frame_bytes}")
            arrival = Arrival(kind, sequence, whole, bulk_bytes=bulk_bytes)
            self._announced.append(arrival)
            self._announced_bytes += arrival.nbytes
        else:
            arrival = Arrival(kind, sequence, whole)
        self.frames.append(arrival)
        self.frame_bytes += arrival.nbytes
        self.fill()
        if self._reading and self.frame_bytes > self._settings.inbox_bytes:
            self._reading = False
            self.transport.pause_reading()

    def fill(self) -> None:
        """Let the lane bring what was announced and has room now."""
        while self.lane is not None and self._announced:
            arrival = self._announced[0]
            here = self.frame_bytes - self._announced_bytes
            # The first in the queue always: what is here may all lie behind it.
            if arrival is not self.frames[0] and here + arrival.nbytes > self._settings.inbox_bytes:
                return
            self._announced.popleft()
            self._announced_bytes -= arrival.nbytes
            self._filling += 1
            arrival.area = areas.take(arrival.nbytes - arrival.whole.nbytes)
            self.lane.receive(arrival.sequence, arrival.area, functools.partial(self._filled, arrival))

    def _filled(self, arrival: Arrival) -> None:
        arrival.ready = True
        self._filling -= 1
        self._part()
        if self.frames and self.frames[0] is arrival:
            self.on_arrived()

    def _part(self) -> None:
        """The goodbye counts when everything that it followed is here."""
        if self._goodbye and not self._filling and not self._announced:
            self.closed_by_peer = True
            self.fail("the peer closed it")

    def take(self) -> Arrival | None:
        if not self.frames or not self.frames[0].ready:
            return None
        taken = self.frames.popleft()
        self.frame_bytes -= taken.nbytes
        self.fill()
        if not self._reading and self.frame_bytes <= self._settings.inbox_bytes // 2:
            self._reading = True
            if not self.transport.is_closing():
                self.transport.resume_reading()
        return taken

    @property
    def paused(self) -> bool:
        return not self._reading

    def lane_lost(self, why: str) -> None:
        """What was announced will not come any more."""
        self._goodbye = False
        self.fail(why)

    def fail(self, why: str) -> None:
        if self._goodbye and not self.closed_by_peer:
            return  # the connection ended in good order, and its last buffers are still on the lane
        if self.lost is None:
            self.lost = why
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self.on_lost(why)

    # --- the hello ---

    async def first_frame(self) -> memoryview:
        """The hello's bytes; the caller bounds the wait."""
        while not self.frames:
            if self.lost is not None:
                raise ConnectionError(self.lost)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        first = self.frames.popleft()
        self.frame_bytes -= first.nbytes
        if first.kind != frame.HELLO:
            raise Refusal("garbage", f"got a frame of kind {first.kind} before any hello")
        self._greet()
        return memoryview(frame.to_message(first.whole).head)

    def _greet(self) -> None:
        self._max_frame_bytes = self._settings.max_message_bytes
        self._greeted = True
        try:
            self._cut()
        except frame.FrameError as err:
            self.fail(f"it sent no valid frame: {err}")
        if self._reading and not self.transport.is_closing():
            self.transport.resume_reading()

    def say(self, raw: bytes) -> None:
        self.transport.write(frame.of_message(Message(raw), 0, frame.HELLO).prefix)
