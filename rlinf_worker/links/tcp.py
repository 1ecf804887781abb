"""The link between two pods: frames on one TCP connection, with mTLS or (where the caller says so) without; the buffers
of large messages on a second one (`lane`, `door`).

For: `listener`. Not for: choosing certificates; `ssl.SSLContext`s come from the caller.

Receiving is `wire`'s. Sending: small frames go to the transport as it takes them, never joined; the transport (which
copies what the kernel did not take at once) holds one slice at most. A message whose buffers are together
`bulk_from_bytes` or more is announced there, and its buffers go to the lane, where there is one.

    waits                       for                             woken by
    recv                        a whole frame                   buffer_updated; the lane; a break
    send, in order of calls     room in the outbox              the outbox draining (resume_writing, the lane); a break
    close                       an empty outbox, at most linger_s

A dead peer process: the kernel resets or closes the connection, at once, also while we do not read (back-pressure)
because `_watch` looks at the connection's state once a second. A dead node: keepalive probes on an idle connection;
`_watch` where data is unacknowledged (`diagnose`), as keepalive is silent then and TCP itself tries for 15 minutes.
TCP_USER_TIMEOUT was rejected: Linux counts a receiver that acknowledges but has no room (a stopped process, a consumer
in a long training step) as lost. What is left: node lost *and* our window probes far apart because the peer had long
been full; the control plane notices that one and calls `abort`. The lane's socket has the same probes and is looked at
in the same way, as something between the pods may drop that flow alone. It ends with the link, whatever blocks in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections import deque
from collections.abc import Mapping

from rlinf_worker.links import devices, door, frame, hello, meet_gpus
from rlinf_worker.links.errors import LinkBroken, LinkClosed
from rlinf_worker.links.hello import Admit, Identity, Refusal
from rlinf_worker.links.lane import Lane, SocketLane
from rlinf_worker.links.link import Link
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import MIB, LinkSettings
from rlinf_worker.links.wire import LARGE_FRAME_BYTES, Wire, tune

logger = logging.getLogger(__name__)

SLICE_BYTES = MIB
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


async def dial(
    host: str,
    port: int,
    me: Identity,
    peer: Identity,
    *,
    settings: LinkSettings,
    context: ssl.SSLContext | None,
    to_pool: str = "",
) -> TcpLink:
    """Connect to a worker of another pod. Raises LinkRefused, LinkStale, LinkBroken; the caller bounds it."""
    wire: Wire | None = None
    try:
        _, wire = await asyncio.get_running_loop().create_connection(lambda: Wire(settings), host, port, ssl=context)
        hello.check_certificate(wire.transport.get_extra_info("peercert"), me, pool=to_pool)
        gpu = devices.of(settings)
        wire.say(hello.ask(me, peer, extra={"bulk": settings.bulk, "gpu": gpu}))
        answer = await wire.first_frame()
        extra = hello.check_answer(answer, me, peer)
        link = TcpLink(wire, me, peer, settings=settings)
        meet_gpus.as_dialer(link, gpu, extra, host=host)
        await link._come_in(extra.get("bulk"))
        return link
    except BaseException as err:
        if wire is not None:
            wire.transport.abort()
        if isinstance(err, Refusal):
            raise err.as_error(str(peer)) from None
        if isinstance(err, (OSError, ssl.SSLError, frame.FrameError)):
            raise LinkBroken(str(peer), f"connecting to {host}:{port}: {err}") from err
        raise


async def accept(
    wire: Wire, me: Identity, *, admit: Admit | None, settings: LinkSettings, bulk: door.Door | None = None
) -> TcpLink:
    """Answer a dialer on a connection that is there. Raises Refusal (the dialer has been told), OSError."""
    transport = wire.transport
    link: TcpLink | None = None

    def enter(sock: socket.socket) -> None:
        if link is None:
            sock.close()
        else:
            link._enter(sock)

    try:
        try:
            raw = await wire.first_frame()
            certificate = transport.get_extra_info("peercert")
            hello.check_certificate(certificate, me)
            peer, extra = hello.check_ask(raw, me, certificate=certificate, admit=admit)
        except frame.FrameError as err:
            raise Refusal("garbage", str(err)) from None
        except Refusal as refusal:
            if refusal.code != "garbage":
                wire.say(hello.no(me, refusal))
            raise
        ways = {settings.bulk, extra.get("bulk")}
        ticket = bulk.ticket(enter) if bulk is not None and ways == {SocketLane.kind} else None
        wire.lane_may_come = ticket is not None
        here = wire.here()
        said, begin = await meet_gpus.offer(extra, settings, host=here, same_pod=False, may_be_plain="tls" not in ways)
        wire.here()  # the dialer may have left meanwhile
        wire.say(hello.yes(me, extra={"bulk": ticket, **said}))
        link = TcpLink(wire, me, peer, settings=settings)
        begin(link)
        return link
    except Refusal:
        transport.close()
        raise
    except BaseException:
        transport.abort()
        raise


class TcpLink(Link):
    """See the module."""

    kind = "tcp"

    def __init__(self, wire: Wire, me: Identity, peer: Identity, *, settings: LinkSettings) -> None:
        super().__init__(me, peer, settings=settings)
        self._wire, self._transport = wire, wire.transport
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._empty: asyncio.Future[None] | None = None
        self._lane: Lane | None = None
        self._watcher = self._loop.call_later(1.0, self._watch)
        wire.on_arrived, wire.on_writable = self._wake_receiver, self._drain
        wire.on_note, wire.on_lost = self.beside.hear, self._on_lost
        if wire.lost is not None:
            self._on_lost(wire.lost)

    # --- the lane ---

    async def _come_in(self, ticket: object) -> None:
        """The dialer's side: with the ticket, if there is one."""
        if self._broken is not None:  # it ended right behind its answer: a closed connection has no addresses
            raise self._broken
        there = self._transport.get_extra_info("peername")[0]
        sock = await door.come_in(there, ticket) if isinstance(ticket, Mapping) else None
        if sock is not None:
            self._enter(sock)
        else:
            self._wire.lane_may_come = False

    def _enter(self, sock: socket.socket) -> None:
        if self._broken is not None:
            sock.close()
            return
        tune(sock, self.settings.lost_after_s)
        self._lane = self._wire.lane = SocketLane(sock, on_sent=self._on_lane_sent, on_lost=self._wire.lane_lost)
        self._wire.fill()

    def _on_lane_sent(self, nbytes: int) -> None:
        if self._broken is None:
            self._outbox_bytes -= nbytes
            self._drain()

    def _watch(self) -> None:
        if self._broken is not None:
            return
        why = self._trouble()
        if why is not None and self._wire.paused:
            # The end lies behind bytes that we do not read yet: senders learn of it now, the receiver after the bytes.
            self._draining = True
        if why is not None and (self._draining or "acknowledged" in why):
            self._fail(LinkBroken(str(self.peer), why))
            return
        info = self._lane.info() if self._lane is not None else None
        why = diagnose(info, self.settings.lost_after_s) if info is not None else None
        if why is not None and "acknowledged" in why:  # an end of it is told by the threads that meet it
            self._fail(LinkBroken(str(self.peer), f"{why}, on its bulk connection"))
            return
        self._watcher = self._loop.call_later(1.0, self._watch)

    def _trouble(self) -> str | None:
        if (sock := self._transport.get_extra_info("socket")) is None:  # TLS that is gone already has none
            return "the connection is gone"
        try:
            return diagnose(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), self.settings.lost_after_s)
        except OSError as err:
            return f"the connection is gone: {err.strerror}"

    def _on_broken(self) -> None:
        self._watcher.cancel()
        self._outbox.clear()
        self._outbox_bytes = 0
        if self._empty is not None and not self._empty.done():
            self._empty.set_result(None)
        if self._draining:
            return
        self._end_lane()
        if isinstance(self._broken, LinkClosed):
            self._wire.close()
        else:
            self._reset()

    def _end_lane(self) -> None:
        if self._lane is not None:
            (self._lane.finish if isinstance(self._broken, LinkClosed) else self._lane.kill)()

    def _reset(self) -> None:
        # With a reset, not behind megabytes that a full peer may never read: it must learn of this now.
        with contextlib.suppress(OSError):
            sock = self._transport.get_extra_info("socket")
            if sock is not None:  # TLS that is gone already has none
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def _on_lost(self, why: str) -> None:
        error = (LinkClosed if self._wire.closed_by_peer else LinkBroken)(str(self.peer), why)
        if self._draining:
            self._draining = False
            self._broken = error  # the last bytes know better why
            self._end_lane()
            self._transport.abort()
            self._wake_receiver()
        else:
            self._fail(error)

    # --- receiving ---

    def _pop(self) -> Message | None:
        taken = self._wire.take()
        if taken is None:
            return None
        try:
            if taken.sequence != self._received & 0xFFFF:
                raise frame.FrameError(f"frame {taken.sequence} where {self._received & 0xFFFF} was due")
            self._received += 1
            if taken.kind not in (frame.DATA, frame.BULK):
                raise frame.FrameError(f"a frame of kind {taken.kind}")
            return frame.to_message(taken.whole, taken.area)
        except frame.FrameError as err:
            self._fail(LinkBroken(str(self.peer), f"it sent no valid frame: {err}"))
            return None

    # --- sending ---

    def _accept(self, out: frame.FrameOut) -> None:
        self._sent += 1
        if self._wire.writable and not self._outbox and not out.buffers:
            self._transport.write(out.prefix)
            return
        if self._lane is not None and out.total - len(out.prefix) >= self.settings.bulk_from_bytes:
            announcement, pieces, nbytes = frame.announced(out)
            self._lane.send(self._sent - 1 & 0xFFFF, pieces, nbytes)
            self._outbox_bytes += nbytes + len(announcement)
            self._outbox.append(memoryview(announcement))
            self.counters.bulk_messages += 1
        else:
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
        if self._room is not None and self._outbox_bytes < self.settings.outbox_bytes:
            self._wake_sender()
        if self._empty is not None and not self._empty.done() and not self._leaving():
            self._empty.set_result(None)

    def _try(self, out: frame.FrameOut) -> bool:
        if self._outbox_bytes and self._outbox_bytes + out.total > self.settings.outbox_bytes:
            return False
        self._accept(out)
        return True

    async def _send_in_turn(self, message: Message) -> None:
        out = self._framed(message)
        while not self.beside.fits(out) or not self._try(out):
            await self._sleep_until_room()
        self._accepted(out, message)

    def _say_beside(self, note: bytes) -> None:
        if self._broken is None:
            raw = frame.of_message(Message(note), 0, frame.NOTE).prefix
            self._outbox_bytes += len(raw)
            self._outbox.append(memoryview(raw))
            self._drain()

    def _leaving(self) -> bool:
        return self._broken is None and (self._outbox_bytes > 0 or not self._wire.writable)

    async def close(self) -> None:
        await self.beside.leave()
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
        self._wire.close()
        try:
            async with asyncio.timeout(1.0):
                await asyncio.shield(self._wire.ended)
        except TimeoutError:
            self._transport.abort()
