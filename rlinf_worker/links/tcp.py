"""The link between two pods: frames on one TCP connection, with mTLS or (where the caller says so) without.

For: `endpoint`. Not for: choosing certificates; `ssl.SSLContext`s come from the caller.

Receiving: an asyncio.BufferedProtocol. Small frames are cut out of a staging buffer, a large one is received straight
into the memory that its arrays will view. Sending: large buffers go to the transport in slices as it takes them, never
joined; the transport (which copies what the kernel did not take at once) holds one slice at most.

    waits                       for                             woken by
    recv                        a whole frame                   buffer_updated; a break
    send, in order of calls     room in the outbox              the outbox draining (resume_writing); a break
    close                       an empty outbox, at most linger_s

A dead peer process: the kernel resets or closes the connection, at once, also while we do not read (back-pressure)
because `_watch` looks at the connection's state once a second. A dead node: keepalive probes on an idle connection;
`_watch` where data is unacknowledged (`diagnose`), as keepalive is silent then and TCP itself tries for 15 minutes.
TCP_USER_TIMEOUT was rejected: Linux counts a receiver that acknowledges but has no room (a stopped process, a consumer
in a long training step) as lost. What is left: node lost *and* our window probes far apart because the peer had long
been full; the control plane notices that one and calls `abort`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from rlinf_worker.links import areas, frame, hello
from rlinf_worker.links.base import BaseLink
from rlinf_worker.links.hello import Admit, Identity, Proof, Refusal
from rlinf_worker.links.message import Message
from rlinf_worker.links.protocol import KIB, LinkBroken, LinkClosed, LinkSettings

logger = logging.getLogger(__name__)

STAGING_BYTES = 256 * KIB
"""One recv call's worth of small frames."""

LARGE_FRAME_BYTES = 64 * KIB
"""From here a frame gets memory of its own while it arrives; below, cutting it out of the staging buffer is cheaper."""

SLICE_BYTES = 1024 * KIB
"""What is offered to the kernel at once: more than a socket buffer takes, so that it is always full."""

_INFO = struct.Struct("<8B16I")
_ESTABLISHED, _CLOSE_WAIT, _CLOSED = 1, 8, 7


def diagnose(info: bytes, lost_after_s: float) -> str | None:
    """What the kernel's TCP_INFO says of a peer: None while it may be alive, else why it is lost. Pure."""
    state, _, retransmits, probes, *_ = fields = _INFO.unpack_from(info)
    unacked, last_ack_ms = fields[12], fields[20]
    if state == _CLOSE_WAIT:
        return "its process is gone (the connection was closed)"
    if state == _CLOSED:
        return "its process or node is gone (the connection was reset or timed out)"
    if state == _ESTABLISHED and last_ack_ms > lost_after_s * 1000 and (probes >= 2 or (unacked and retransmits)):
        return f"its node has acknowledged nothing for {last_ack_ms / 1000:.1f} s"
    return None


def tune(sock: Any, lost_after_s: float) -> None:
    """No delay for small frames; an idle connection to a lost node ends within `lost_after_s`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = max(1, int(lost_after_s) - 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


class Wire(asyncio.BufferedProtocol):
    """Bytes <-> frames, from the first byte on; first the hello asks for a frame, then the link does."""

    def __init__(self, settings: LinkSettings, on_connect: Callable[[Wire], None] | None = None) -> None:
        self.transport: asyncio.Transport | None = None
        self.link: TcpLink | None = None
        self.frames: deque[tuple[int, int, memoryview]] = deque()
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
        if self._large is not None:
            self._large_at += nbytes
            if self._large_at < self._large.nbytes:
                return
            whole, self._large = self._large, None
            self._arrived(whole)
        else:
            self._end += nbytes
            try:
                self._cut()
            except frame.FrameError as err:
                self.fail(f"it sent no valid frame: {err}")
                return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.link is not None:
            self.link._wake_receiver()

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
        if self.link is not None:
            self.link._drain()

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
                    assert self.transport is not None
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
            self.closed_by_peer = True
            self.fail("the peer closed it")
            return
        self.frames.append((kind, sequence, whole))
        self.frame_bytes += whole.nbytes
        if self._reading and self.frame_bytes > self._settings.inbox_bytes and self.transport is not None:
            self._reading = False
            self.transport.pause_reading()

    def take(self) -> tuple[int, int, memoryview] | None:
        if not self.frames:
            return None
        taken = self.frames.popleft()
        self.frame_bytes -= taken[2].nbytes
        if not self._reading and self.frame_bytes <= self._settings.inbox_bytes // 2 and self.transport is not None:
            self._reading = True
            if not self.transport.is_closing():
                self.transport.resume_reading()
        return taken

    @property
    def paused(self) -> bool:
        return not self._reading

    def fail(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.link is not None:
            self.link._on_lost(why)

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
        kind, _, whole = self.frames.popleft()
        self.frame_bytes -= whole.nbytes
        if kind != frame.HELLO:
            raise Refusal("garbage", f"got a frame of kind {kind} before any hello")
        self._greet()
        return memoryview(frame.to_message(whole).head)

    def _greet(self) -> None:
        self._max_frame_bytes = self._settings.max_message_bytes
        self._greeted = True
        try:
            self._cut()
        except frame.FrameError as err:
            self.fail(f"it sent no valid frame: {err}")
        if self._reading and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def say(self, raw: bytes) -> None:
        assert self.transport is not None
        self.transport.write(frame.of_message(Message(raw), 0, frame.HELLO).prefix)


async def dial(
    host: str,
    port: int,
    me: Identity,
    *,
    to_worker: str,
    to_attempt: int,
    settings: LinkSettings,
    context: ssl.SSLContext | None,
    server_name: str | None,
) -> TcpLink:
    """Connect to a worker of another pod. Raises LinkRefused, LinkStale, LinkBroken; the caller bounds it."""
    peer = Identity(job=me.job, worker=to_worker, attempt=to_attempt)
    wire: Wire | None = None
    try:
        _, wire = await asyncio.get_running_loop().create_connection(
            lambda: Wire(settings), host, port, ssl=context, server_hostname=server_name if context else None
        )
        wire.say(hello.ask(me, to_worker, to_attempt=to_attempt))
        answer = await wire.first_frame()
        hello.check_answer(answer, me, to_worker=to_worker, to_attempt=to_attempt)
        return TcpLink(wire, me, peer, settings=settings)
    except BaseException as err:
        if wire is not None and wire.transport is not None:
            wire.transport.abort()
        if isinstance(err, Refusal):
            raise err.as_error(str(peer)) from None
        if isinstance(err, (OSError, ssl.SSLError, frame.FrameError)):
            raise LinkBroken(str(peer), f"connecting to {host}:{port}: {err}") from err
        raise


async def accept(wire: Wire, me: Identity, *, admit: Admit | None, settings: LinkSettings) -> TcpLink:
    """Answer a dialer on a connection that is there. Raises Refusal (the dialer has been told), OSError."""
    transport = wire.transport
    assert transport is not None
    try:
        try:
            raw = await wire.first_frame()
            proof = Proof(kind="tcp", certificate=transport.get_extra_info("peercert"))
            peer, _ = hello.check_ask(raw, me, proof=proof, admit=admit)
        except frame.FrameError as err:
            raise Refusal("garbage", str(err)) from None
        except Refusal as refusal:
            if refusal.code != "garbage":
                wire.say(hello.no(me, refusal))
            raise
        wire.say(hello.yes(me))
        return TcpLink(wire, me, peer, settings=settings)
    except Refusal:
        transport.close()
        raise
    except BaseException:
        transport.abort()
        raise


class TcpLink(BaseLink):
    """See the module."""

    kind = "tcp"

    def __init__(self, wire: Wire, me: Identity, peer: Identity, *, settings: LinkSettings) -> None:
        super().__init__(me, peer, settings=settings)
        assert wire.transport is not None
        self._wire, self._transport = wire, wire.transport
        self._sent = self._received = 0
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._room: asyncio.Future[None] | None = None
        self._empty: asyncio.Future[None] | None = None
        self._draining = False
        self._watcher = self._loop.call_later(1.0, self._watch)
        wire.link = self
        if wire.lost is not None:
            self._on_lost(wire.lost)

    def _watch(self) -> None:
        if self._broken is not None:
            return
        sock = self._transport.get_extra_info("socket")
        try:
            why = diagnose(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), self.settings.lost_after_s)
        except OSError as err:
            why = f"the connection is gone: {err.strerror}"
        if why is not None and self._wire.paused:
            # The end lies behind bytes that we do not read yet: senders learn of it now, the receiver after the bytes.
            self._draining = True
        if why is not None and (self._draining or "acknowledged" in why):
            self._fail(LinkBroken(str(self.peer), why))
            return
        self._watcher = self._loop.call_later(1.0, self._watch)

    def _on_broken(self) -> None:
        self._watcher.cancel()
        self._outbox.clear()
        self._outbox_bytes = 0
        for waiter in (self._room, self._empty):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        if self._draining:
            return
        if isinstance(self._broken, LinkClosed):
            self._transport.close()
        else:
            self._reset()

    def _reset(self) -> None:
        # With a reset, not behind megabytes that a full peer may never read: it must learn of this now.
        with contextlib.suppress(OSError):
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def _on_lost(self, why: str) -> None:
        error = (LinkClosed if self._wire.closed_by_peer else LinkBroken)(str(self.peer), why)
        if self._draining:
            self._draining = False
            self._broken = error  # the last bytes know better why
            self._transport.abort()
            self._wake_receiver()
        else:
            self._fail(error)

    def _still_arriving(self) -> bool:
        return self._draining

    # --- receiving ---

    def _pop(self) -> Message | None:
        taken = self._wire.take()
        if taken is None:
            return None
        kind, sequence, whole = taken
        try:
            if sequence != self._received & 0xFFFF:
                raise frame.FrameError(f"frame {sequence} where {self._received & 0xFFFF} was due")
            self._received += 1
            if kind != frame.DATA:
                raise frame.FrameError(f"a frame of kind {kind}")
            return frame.to_message(whole)
        except frame.FrameError as err:
            self._fail(LinkBroken(str(self.peer), f"it sent no valid frame: {err}"))
            return None

    # --- sending ---

    def _accept(self, out: frame.Outgoing) -> None:
        self._sent += 1
        if self._wire.writable and not self._outbox and not out.buffers:
            self._transport.write(out.prefix)
            return
        self._outbox_bytes += out.total
        for piece in out.pieces():
            self._outbox.append(memoryview(piece))
        self._drain()

    def _drain(self) -> None:
        """Give the transport what it takes. Small pieces go together, large ones in slices."""
        outbox, transport, wire = self._outbox, self._transport, self._wire
        while outbox and wire.writable and self._broken is None:
            piece = outbox[0]
            if piece.nbytes > SLICE_BYTES:
                outbox[0] = piece[SLICE_BYTES:]
                piece = piece[:SLICE_BYTES]
                size = piece.nbytes
            else:
                outbox.popleft()
                size = piece.nbytes
                if size < LARGE_FRAME_BYTES and outbox:
                    group = [piece]
                    while outbox and size + outbox[0].nbytes <= LARGE_FRAME_BYTES:
                        size += outbox[0].nbytes
                        group.append(outbox.popleft())
                    if len(group) > 1:
                        piece = memoryview(b"".join(group))
            self._outbox_bytes -= size
            transport.write(piece)
        if self._room is not None and not self._room.done() and self._outbox_bytes < self.settings.outbox_bytes:
            self._room.set_result(None)
        if self._empty is not None and not self._empty.done() and not outbox and wire.writable:
            self._empty.set_result(None)

    def _fits(self, total: int) -> bool:
        return not self._outbox or self._outbox_bytes + total <= self.settings.outbox_bytes

    def _frame(self, message: Message) -> frame.Outgoing:
        out = frame.of_message(message, self._sent & 0xFFFF)
        if out.total > self.settings.max_message_bytes:
            raise self._too_large(out.total)
        return out

    def _count(self, nbytes: int) -> None:
        self.counters.sent_messages += 1
        self.counters.sent_bytes += nbytes

    def send_nowait(self, message: Message) -> bool:
        self._raise_if_broken()
        out = self._frame(message)
        if self._send_waiting or not self._fits(out.total):
            return False
        self._accept(out)
        self._count(message.nbytes)
        return True

    async def send(self, message: Message) -> None:
        await self._let_others_run()
        if self.send_nowait(message):
            return
        since = monotonic()
        self._send_waiting += 1
        try:
            async with self._send_turn:
                self._raise_if_broken()
                out = self._frame(message)
                while not self._fits(out.total):
                    self._room = self._loop.create_future()
                    try:
                        await self._room
                    finally:
                        self._room = None
                    self._raise_if_broken()
                self._accept(out)
                self._count(message.nbytes)
        finally:
            self._send_waiting -= 1
            self.counters.send_wait_s += monotonic() - since

    def _leaving(self) -> bool:
        return self._broken is None and (bool(self._outbox) or not self._wire.writable)

    async def close(self) -> None:
        if self._broken is None:
            self._accept(frame.of_message(Message(b"", body=b""), self._sent & 0xFFFF, frame.GOODBYE))
            self._closed_here = True
            deadline = self._loop.time() + self.settings.linger_s
            try:
                async with asyncio.timeout_at(deadline):
                    while self._leaving():
                        self._empty = self._loop.create_future()
                        await self._empty
            except TimeoutError:
                self.abort(f"{self._outbox_bytes} bytes were not taken within {self.settings.linger_s:g} s of closing")
            self._fail(LinkClosed(str(self.peer), "it was closed here"))
        self._closed_here = True
        self._transport.close()
        try:
            async with asyncio.timeout(1.0):
                await asyncio.shield(self._wire.ended)
        except TimeoutError:
            self._transport.abort()
