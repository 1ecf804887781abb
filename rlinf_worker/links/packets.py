"""The unix socket under a shared-memory link: packets, descriptors, and the kernel's word on who is at the other end.

For: `shm`, and `listener`, which listens. Not for: what a packet means.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct

from rlinf_worker.links import hello
from rlinf_worker.links.errors import SocketPathTooLong

MAX_SOCKET_PATH_BYTES = 107
"""sizeof(sockaddr_un.sun_path) - 1."""

_CREDENTIALS = struct.Struct("3i")


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


def peer_uid(sock: socket.socket) -> int:
    """The kernel's word on who connected."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def send(sock: socket.socket, data: bytes, fds: tuple[int, ...] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def recv(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and its descriptors; b"" at the end. Raises BlockingIOError where nothing is there."""
    room = socket.CMSG_SPACE(2 * array.array("i").itemsize)
    data, ancillary, _, _ = sock.recvmsg(hello.MAX_HELLO_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
    return data, fds.tolist()


async def recv_waiting(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Bounded by the caller's deadline."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return recv(sock)
        except BlockingIOError:
            readable = asyncio.Event()
            loop.add_reader(sock, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(sock)


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
