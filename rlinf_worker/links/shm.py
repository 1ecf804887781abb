"""The link between two workers of one pod: a ring in shared memory each way, a unix socket, two eventfds.

For: `listener`, which dials and accepts by it. Not for: workers of different pods, even on one node (another mount of
/dev/shm), nor machines with a weaker memory order than x86 (see `ring`): `supported()` says so in a sentence.

The socket (SOCK_SEQPACKET, so that a hello is one packet) carries
  (a) the hello, with the kernel's word that the peer runs under the same uid (SO_PEERCRED);
  (b) descriptors (SCM_RIGHTS): each side's outgoing ring and the eventfd by which it wants to be woken;
  (c) death: the kernel closes it with the process, however that ended, and end-of-file breaks the link at once;
  (d) larger rings later, and goodbye.

Each direction's segment is made by its writer: an O_TMPFILE file in the pod's shared-memory directory, which never had
a name there, so that no crash leaks it. Its pages are reserved before it is mapped: a directory without room is a
sentence now instead of a SIGBUS later. (A memory cgroup's limit is not reserved so; the pages are charged, and
the kernel kills the pod, at the same moment and not later.)

A message above half the ring: the writer makes a larger ring (three times the message, up to `max_ring_bytes`), passes
it by the socket, writes SWITCH as the last frame of the old one and goes on there; the old one lives until its last
view dies. A segment per message was rejected: reserving and mapping 64 MiB takes eight times as long as copying
it (80 ms, 10 ms). What even the largest ring cannot take, or what finds /dev/shm full, goes through the ring in chunks
of a quarter of it: one copy more at the receiver, and no memory that was not there at connect time.

    waits                            for                    woken by (eventfd of the waiter, or its socket)
    recv, READER_SLEEP odd           a frame                the writer after publishing; socket
    first sender, WRITER_SLEEP odd   room in the ring       the reader after giving back; a collected view; socket
    further senders                  their turn (FIFO)      the sender before
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import mmap
import os
import socket
import struct
from collections import deque

from rlinf_worker.links import areas, devices, frame, hello, meet_gpus, ring, segments
from rlinf_worker.links.errors import LinkBroken, LinkClosed, ShmTooSmall, SocketPathTooLong
from rlinf_worker.links.hello import Admit, Identity, Refusal
from rlinf_worker.links.link import Link
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import MIB, LinkSettings

_GOODBYE, _SEGMENT, _NOTE = b"goodbye", b"segment", b"note:"

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH_BYTES = 107
"""sizeof(sockaddr_un.sun_path) - 1."""

_CREDENTIALS = struct.Struct("3i")


class Outfit:
    """What one end brings to a link; closed as a whole if the link does not come about."""

    def __init__(self, shm_dir: str, settings: LinkSettings) -> None:
        size = max(ring.MIN_RING_BYTES, settings.ring_bytes + -settings.ring_bytes % frame.ALIGN)
        self.shm_dir = shm_dir
        self.segment_fd = segments.make_segment(shm_dir, ring.mapping_bytes(size))
        try:
            self.writer = ring.RingWriter(segments.map_segment(os.dup(self.segment_fd)))
            self.bell_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            os.close(self.segment_fd)
            raise

    def fds(self) -> tuple[int, int]:
        return self.segment_fd, self.bell_fd

    def close(self) -> None:
        os.close(self.segment_fd)
        os.close(self.bell_fd)


class ShmLink(Link):
    """See the module."""

    kind = "shm"

    def __init__(
        self,
        sock: socket.socket,
        me: Identity,
        peer: Identity,
        *,
        outfit: Outfit,
        memory: mmap.mmap,
        peer_bell_fd: int,
        settings: LinkSettings,
    ) -> None:
        super().__init__(me, peer, settings=settings)
        self._sock = sock
        self._shm_dir = outfit.shm_dir
        self._bell_fd, self._peer_bell_fd = outfit.bell_fd, peer_bell_fd
        self._writer = outfit.writer
        self._reader = self._make_reader(memory)
        self._old_readers: list[ring.RingReader] = []
        self._segments: deque[int] = deque()
        self._partial: memoryview | None = None
        self._partial_at = 0
        self._large: asyncio.Task[None] | None = None
        self._cannot_grow_to = 1 << 62
        self._reclaiming = False
        self._loop.add_reader(self._bell_fd, self._on_bell)
        self._loop.add_reader(self._sock, self._on_socket)

    def _make_reader(self, memory: mmap.mmap) -> ring.RingReader:
        return ring.RingReader(memory, copy_out_bytes=self.settings.copy_out_bytes, on_free=self._on_collected)

    # --- being woken ---

    def _on_bell(self) -> None:
        try:
            os.eventfd_read(self._bell_fd)
        except BlockingIOError:
            return
        self._wake_receiver()
        self._wake_sender()

    def _ring_bell(self) -> None:
        os.eventfd_write(self._peer_bell_fd, 1)

    def _on_socket(self) -> None:
        while self._broken is None:
            try:
                data, fds = _recv(self._sock)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it died with packets of ours unread; told once, before what it had still sent to us
            except OSError as err:
                self._fail(LinkBroken(str(self.peer), f"its socket failed: {err.strerror}"))
                return
            if data == _SEGMENT and len(fds) == 1:
                self._segments.append(fds[0])
                continue
            _close_all(fds)
            if data.startswith(_NOTE):
                self.beside.hear(data[len(_NOTE) :])
            elif data == _GOODBYE:
                self._fail(LinkClosed(str(self.peer), "the peer closed it"))
            elif not data:
                self._fail(LinkBroken(str(self.peer), "its process is gone (the socket closed without a goodbye)"))
            else:
                self._fail(LinkBroken(str(self.peer), f"it sent an unknown packet of {len(data)} bytes"))

    def _on_broken(self) -> None:
        self._loop.remove_reader(self._bell_fd)
        self._loop.remove_reader(self._sock)
        self._sock.close()
        os.close(self._bell_fd)
        os.close(self._peer_bell_fd)

    def _on_collected(self) -> None:
        # From whatever thread dropped the last view; the ring belongs to the loop's thread.
        if self._reclaiming:
            return
        self._reclaiming = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the link
            self._loop.call_soon_threadsafe(self._reclaim)

    def _reclaim(self) -> None:
        self._reclaiming = False
        if self._closed_here:
            return
        self._old_readers = [old for old in self._old_readers if old.lent]
        if self._reader.reclaim() and self._broken is None:
            self._bell_if_blocked(even_if_little=self._receiver is not None)

    def _bell_if_blocked(self, *, even_if_little: bool = False) -> None:
        if self._reader.peer_blocked(even_if_little=even_if_little):
            self._ring_bell()

    # --- receiving ---

    def _pop(self) -> Message | None:
        try:
            while True:
                taken = self._reader.take()
                if taken is None:
                    return None
                kind, sequence, view = taken
                if sequence != self._received & 0xFFFF:
                    raise ring.RingCorrupt(f"frame {sequence} where {self._received & 0xFFFF} was due")
                self._received += 1
                if kind == frame.DATA:
                    message: Message | None = frame.to_message(view)
                elif kind == frame.CHUNK:
                    message = self._add_chunk(view)
                    del view, taken
                    self._reader.reclaim()
                elif kind == frame.SWITCH:
                    self._switch()
                    continue
                else:
                    raise ring.RingCorrupt(f"a frame of kind {kind}")
                if self._broken is None:
                    self._bell_if_blocked()
                if message is not None:
                    return message
        except (ring.RingCorrupt, frame.FrameError, OSError, ValueError) as err:
            self._fail(LinkBroken(str(self.peer), f"its ring holds no valid frame: {err}"))
            return None

    def _before_sleep(self) -> bool:
        if not self._reader.sleep():
            return False
        self._bell_if_blocked(even_if_little=True)
        return True

    def _after_sleep(self) -> None:
        self._reader.awake()

    def _add_chunk(self, view: memoryview) -> Message | None:
        piece = view[frame.FIXED_BYTES :]
        if self._partial is None:
            total = frame.FIXED.unpack_from(piece)[0]
            if total > self.settings.max_message_bytes:
                raise frame.FrameError(f"a message of {total} bytes above {self.settings.max_message_bytes}")
            self._partial, self._partial_at = areas.take(total), 0
        end = self._partial_at + piece.nbytes
        if end > self._partial.nbytes:
            raise frame.FrameError(f"chunks of more than the {self._partial.nbytes} bytes announced")
        self._partial[self._partial_at : end] = piece
        self._partial_at = end
        if end < self._partial.nbytes:
            return None
        whole, self._partial = self._partial, None
        return frame.to_message(whole)

    def _switch(self) -> None:
        if not self._segments and self._broken is None:
            self._on_socket()  # it was sent before the frame that brought us here
        if not self._segments:
            raise ring.RingCorrupt("a switch to a ring that was not passed")
        memory = segments.map_segment(self._segments.popleft())
        segments.populate_aside(memory)
        old, self._reader = self._reader, self._make_reader(memory)
        if old.lent:
            self._old_readers.append(old)

    # --- sending ---

    def _try(self, out: frame.FrameOut) -> bool:
        if out.total > self._writer.max_frame or not self._writer.try_write(out):
            return False
        self._wrote()
        return True

    def _wrote(self) -> None:
        """A frame."""
        self._sent += 1
        if self._writer.peer_asleep():
            self._ring_bell()

    async def _send_in_turn(self, message: Message) -> None:
        if self._large is not None:  # its caller was cancelled
            await asyncio.wait({self._large})
            self._raise_if_broken()
        out = self.beside.framed(message, self._sent)
        if out.total <= self._writer.max_frame:
            await self._send_frame(out, message)
            return
        # Once its first byte is in the ring a message must follow whole, or it would be half of the next: the link
        # owns this task, and a caller that is cancelled leaves it running. Nobody overtakes it.
        large = self._large = asyncio.create_task(self._send_large(message), name=f"a large message to {self.peer}")
        self._send_waiting += 1
        large.add_done_callback(self._sent_large)
        await asyncio.wait({large})
        large.result()

    def _sent_large(self, large: asyncio.Task[None]) -> None:
        self._large = None
        self._send_waiting -= 1
        if not large.cancelled():
            large.exception()  # for callers that are gone; the others see it in result()

    async def _send_frame(self, out: frame.FrameOut, message: Message) -> None:
        while not self.beside.fits(out):
            await self._sleep_until_room()
        if out.total <= self._writer.max_frame:
            await self._write_waiting(out)
        else:
            self.counters.chunked_messages += 1
            for chunk in frame.chunks(out, self._writer.size // 4, self._sent):
                await self._write_waiting(chunk)
        self._accepted(out, message)

    async def _write_waiting(self, out: frame.FrameOut) -> None:
        """Cancellable until the frame is in the ring; nothing is awaited after that."""
        writer = self._writer
        while not writer.try_write(out):
            if writer.blocked(out.total):
                try:
                    await self._sleep_until_room()
                finally:
                    if not self._closed_here:  # closed while we waited: the ring is unmapped
                        writer.unblocked()
        self._wrote()

    def _say_beside(self, note: bytes) -> None:
        if self._broken is None:
            try:
                _send(self._sock, _NOTE + note)
            except OSError as err:
                self.abort(f"a note on GPU buffers cannot be sent: {err.strerror or err}")

    async def _send_large(self, message: Message) -> None:
        total = self.beside.framed(message, 0).total
        grown = max(3 * total, 2 * self._writer.size)
        if 2 * total <= self.settings.max_ring_bytes and grown < self._cannot_grow_to:
            await self._grow(min(grown + -grown % MIB, self.settings.max_ring_bytes))
        await self._send_frame(self.beside.framed(message, self._sent), message)

    async def _grow(self, ring_bytes: int) -> None:
        try:
            # Reserving zeroes every page: 22 ms for 64 MiB. A ring grows a few times in its life.
            fd = await asyncio.to_thread(segments.make_segment, self._shm_dir, ring.mapping_bytes(ring_bytes))
        except ShmTooSmall as err:
            self._cannot_grow_to = ring_bytes
            logger.warning("large messages go in chunks", extra={"peer": str(self.peer), "why": str(err)})
            return
        try:
            self._raise_if_broken()
            memory = segments.map_segment(os.dup(fd))
            await asyncio.to_thread(segments.populate, memory)
            self._raise_if_broken()
            writer = ring.RingWriter(memory)
            _send(self._sock, _SEGMENT, (fd,))
        except OSError as err:
            self._fail(LinkBroken(str(self.peer), f"passing it a larger ring: {err.strerror or err}"))
            self._raise_if_broken()
        finally:
            os.close(fd)
        await self._write_waiting(frame.of_message(Message(b"", body=b""), self._sent & 0xFFFF, frame.SWITCH))
        self._writer = writer

    async def close(self) -> None:
        if self._closed_here:
            return
        await self.beside.leave()
        if self._broken is None and self._large is not None:
            await asyncio.wait({self._large}, timeout=self.settings.linger_s)
        if self._closed_here:
            return  # the peer ended meanwhile, and who reads from this link has closed it
        if self._broken is None:
            try:
                _send(self._sock, _GOODBYE)
            except OSError as err:
                logger.debug("no goodbye", extra={"peer": str(self.peer), "why": str(err)})
            self._fail(LinkClosed(str(self.peer), "it was closed here"))
        self._closed_here = True
        _close_all(list(self._segments))
        self._segments.clear()
        self._writer.close()
        for reader in (*self._old_readers, self._reader):
            reader.close()


# --- the unix socket: packets, descriptors, the kernel's word on who is at the other end ---


def check_path(path: str) -> None:
    """Raises SocketPathTooLong before the kernel says EINVAL."""
    if (got := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
        raise SocketPathTooLong(
            f"cannot listen at {path}",
            got=f"{got} bytes",
            wanted=f"at most {MAX_SOCKET_PATH_BYTES}, the kernel's limit for a unix socket",
            next="use a shorter run directory (in local mode a shorter --work-dir)",
        )


def make_socket() -> socket.socket:
    """A unix socket that keeps packets apart, non-blocking."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def _peer_uid(sock: socket.socket) -> int:
    """The kernel's word on who connected."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def _send(sock: socket.socket, data: bytes, fds: tuple[int, ...] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def _recv(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and its descriptors; b"" at the end. Raises BlockingIOError where nothing is there."""
    room = socket.CMSG_SPACE(2 * array.array("i").itemsize)
    data, ancillary, _, _ = sock.recvmsg(hello.MAX_HELLO_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(raw)
    return data, fds.tolist()


async def _recv_waiting(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Bounded by the caller's deadline."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return _recv(sock)
        except BlockingIOError:
            readable = asyncio.Event()
            loop.add_reader(sock, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(sock)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


# --- making a link ---


def _check_uid(sock: socket.socket) -> None:
    uid = _peer_uid(sock)
    if uid != os.getuid():
        raise Refusal("uid", f"the other end of the unix socket runs as uid {uid}, this end as uid {os.getuid()}")


def _adopt(fds: list[int]) -> tuple[mmap.mmap, int]:
    if len(fds) != 2:
        _close_all(fds)
        raise Refusal("garbage", f"got a hello with {len(fds)} descriptors, wanted a ring and a doorbell")
    try:
        return segments.map_segment(fds[0]), fds[1]
    except (OSError, ValueError) as err:
        os.close(fds[1])
        raise Refusal("garbage", f"cannot map the peer's ring: {err}") from None


async def dial(path: str, me: Identity, peer: Identity, *, shm_dir: str, settings: LinkSettings) -> ShmLink:
    """Connect to a worker of this pod. Raises LinkRefused, LinkStale, ShmTooSmall, LinkBroken; the caller bounds it."""
    sock = make_socket()
    outfit: Outfit | None = None
    try:
        await asyncio.get_running_loop().sock_connect(sock, path)
        _check_uid(sock)
        outfit = Outfit(shm_dir, settings)
        gpu = devices.of(settings)
        _send(sock, hello.ask(me, peer, extra={"gpu": gpu}), outfit.fds())
        data, fds = await _recv_waiting(sock)
        try:
            if not data:
                raise LinkBroken(str(peer), "it hung up without an answer to the hello")
            extra = hello.check_answer(data, me, peer)
        except BaseException:
            _close_all(fds)
            raise
        link = _link(sock, me, peer, outfit=outfit, fds=fds, settings=settings)
        meet_gpus.as_dialer(link, gpu, extra, host=meet_gpus.LOOPBACK)
        return link
    except BaseException as err:
        sock.close()
        if outfit is not None:
            outfit.close()
        if isinstance(err, Refusal):
            raise err.as_error(str(peer)) from None
        if isinstance(err, OSError):
            raise LinkBroken(str(peer), f"connecting to {path}: {err.strerror or err}") from err
        raise


async def accept(
    sock: socket.socket, me: Identity, *, admit: Admit | None, shm_dir: str, settings: LinkSettings
) -> ShmLink:
    """Answer a dialer. Takes the socket over. Raises Refusal (the dialer has been told), ShmTooSmall, OSError."""
    outfit: Outfit | None = None
    fds: list[int] = []
    try:
        try:
            _check_uid(sock)
            data, fds = await _recv_waiting(sock)
            if not data:
                raise ConnectionAbortedError("it hung up before its hello")
            peer, extra = hello.check_ask(data, me, admit=admit)
            try:
                outfit = Outfit(shm_dir, settings)
            except ShmTooSmall as err:
                raise Refusal("shm", str(err)) from err
        except Refusal as refusal:
            if refusal.code != "garbage":
                _send(sock, hello.no(me, refusal))
            raise
        said, begin = await meet_gpus.offer(extra, settings, host=meet_gpus.LOOPBACK, same_pod=True, may_be_plain=True)
        _send(sock, hello.yes(me, extra=said), outfit.fds())
        fds, own = [], fds
        link = _link(sock, me, peer, outfit=outfit, fds=own, settings=settings)
        begin(link)
        return link
    except BaseException:
        sock.close()
        _close_all(fds)
        if outfit is not None:
            outfit.close()
        raise


def _link(
    sock: socket.socket, me: Identity, peer: Identity, *, outfit: Outfit, fds: list[int], settings: LinkSettings
) -> ShmLink:
    memory, peer_bell_fd = _adopt(fds)
    try:
        link = ShmLink(sock, me, peer, outfit=outfit, memory=memory, peer_bell_fd=peer_bell_fd, settings=settings)
    except ring.RingCorrupt as err:
        os.close(peer_bell_fd)
        raise Refusal("garbage", str(err)) from None
    os.close(outfit.segment_fd)
    return link
