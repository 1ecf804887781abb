"""Making a link between two workers of one pod: the hello over a unix socket, and what each end brings.

For: `listener`. Not for: the link itself (`shm_link`, which has the whole picture).
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket

from rlinf_worker.links import devices, hello, meet_gpus, packets, ring, segments
from rlinf_worker.links.errors import LinkBroken, LinkRefused, ShmTooSmall
from rlinf_worker.links.hello import Admit, Identity, Refusal
from rlinf_worker.links.settings import LinkSettings
from rlinf_worker.links.shm_link import Outfit, ShmLink

_GOODBYE, _SEGMENT = b"goodbye", b"segment"


def _check_uid(sock: socket.socket) -> None:
    uid = packets.peer_uid(sock)
    if uid != os.getuid():
        raise Refusal("uid", f"the other end of the unix socket runs as uid {uid}, this end as uid {os.getuid()}")


def _adopt(fds: list[int]) -> tuple[mmap.mmap, int]:
    if len(fds) != 2:
        packets.close_all(fds)
        raise Refusal("garbage", f"got a hello with {len(fds)} descriptors, wanted a ring and a doorbell")
    try:
        return segments.map_segment(fds[0]), fds[1]
    except (OSError, ValueError) as err:
        os.close(fds[1])
        raise Refusal("garbage", f"cannot map the peer's ring: {err}") from None


async def dial(path: str, me: Identity, peer: Identity, *, shm_dir: str, settings: LinkSettings) -> ShmLink:
    """Connect to a worker of this pod. Raises LinkRefused, LinkStale, ShmTooSmall, LinkBroken; the caller bounds it."""
    if (why := segments.supported()) is not None:
        raise LinkRefused(f"no shared-memory link to worker {peer}", got=why)
    packets.check_path(path)
    sock = packets.make_socket()
    outfit: Outfit | None = None
    try:
        await asyncio.get_running_loop().sock_connect(sock, path)
        _check_uid(sock)
        outfit = Outfit(shm_dir, settings)
        gpu = devices.of(settings)
        packets.send(sock, hello.ask(me, peer, extra=devices.hello_extra(gpu)), outfit.fds())
        data, fds = await packets.recv_waiting(sock)
        try:
            if not data:
                raise LinkBroken(str(peer), "it hung up without an answer to the hello")
            extra = hello.check_answer(data, me, peer)
        except BaseException:
            packets.close_all(fds)
            raise
        link = _link(sock, me, peer, outfit=outfit, fds=fds, settings=settings)
        link.said_gpu = gpu
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
            data, fds = await packets.recv_waiting(sock)
            if not data:
                raise ConnectionAbortedError("it hung up before its hello")
            peer, extra = hello.check_ask(data, me, admit=admit)
            try:
                outfit = Outfit(shm_dir, settings)
            except ShmTooSmall as err:
                raise Refusal("shm", str(err)) from err
        except Refusal as refusal:
            if refusal.code != "garbage":
                packets.send(sock, hello.no(me, refusal))
            raise
        gpu = devices.of(settings)
        offer = await meet_gpus.offer(extra, gpu, host=meet_gpus.LOOPBACK, same_pod=True, may_be_plain=True)
        packets.send(sock, hello.yes(me, extra=offer.extra), outfit.fds())
        fds, own = [], fds
        link = _link(sock, me, peer, outfit=outfit, fds=own, settings=settings)
        link.said_gpu = gpu
        offer.begin(link)
        return link
    except BaseException:
        sock.close()
        packets.close_all(fds)
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
