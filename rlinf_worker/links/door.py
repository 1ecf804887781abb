"""How the second connection of a link is let in: a one-time ticket, told over the first connection, which is mTLS.

For: `tcp` and `listener`: a Listener has one Door. Not for: what travels there (`lane`).

    dialer   -- hello, "I take tickets" -->             listener      on the mTLS connection
    dialer   <-- yes, ticket: port, number, secret --   listener
    dialer   == number, secret ==>                      door          on a new, plain connection
    dialer   <== ENTERED ==                             door          and each end has its lane

A ticket is good once and for `hello_timeout_s`; the secret is 32 random bytes and is never logged. Whoever shows none
that is known is hung up on, and counted. A dialer that does not get in goes on without a lane: everything then
travels on the first connection, more slowly.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from rlinf_worker.links.settings import LinkSettings

logger = logging.getLogger(__name__)

MAX_TICKETS: Final = 256
"""Tickets out, and connections that have not shown theirs, of each as many: as MAX_WAITING_LINKS of `listener`."""

ENTER_TIMEOUT_S: Final = 2.0
"""A connection and one answer in the same network as the hello a moment ago: milliseconds, or never."""

DEAF_S: Final = 0.5
"""After an accept that failed, as for want of descriptors: who waits would wake the loop again and again. A quarter of
the time that a dialer gives us."""

ENTERED: Final = b"\x01"
_SECRET_BYTES: Final = 32
_NUMBER: Final = struct.Struct("<Q")

Enter = Callable[[socket.socket], None]


class Door:
    """The plain port of one listener, opened when the first ticket is asked for."""

    def __init__(self, host: str, *, settings: LinkSettings, refused: Counter[str]) -> None:
        self._host, self._settings, self._refused = host, settings, refused
        self._loop = asyncio.get_running_loop()
        self._sock: socket.socket | None = None
        self._closed = False
        self._next = 1
        self._tickets: dict[int, tuple[bytes, Enter]] = {}
        self._greetings: set[asyncio.Task[None]] = set()

    def ticket(self, enter: Enter) -> dict[str, Any] | None:
        """Plain values for the dialer, who comes in once with them: `enter` gets the socket. None: no lane today."""
        if self._closed or len(self._tickets) >= MAX_TICKETS or not self._open():
            return None
        assert self._sock is not None
        number, secret = self._next, secrets.token_bytes(_SECRET_BYTES)
        self._next += 1
        self._tickets[number] = (secret, enter)
        self._loop.call_later(self._settings.hello_timeout_s, self._tickets.pop, number, None)
        return {"port": self._sock.getsockname()[1], "number": number, "secret": secret}

    def _open(self) -> bool:
        if self._sock is not None:
            return True
        try:
            family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][0]
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                sock.bind((self._host, 0))
                sock.listen(128)
            except OSError:
                sock.close()
                raise
        except OSError as err:
            logger.warning("no port for bulk data, all goes over TLS", extra={"host": self._host, "why": str(err)})
            return False
        self._sock = sock
        self._loop.add_reader(sock, self._on_connection)
        return True

    def _on_connection(self) -> None:
        assert self._sock is not None
        try:
            while len(self._greetings) < MAX_TICKETS:
                sock, _ = self._sock.accept()
                sock.setblocking(False)
                task = self._loop.create_task(self._greet(sock), name="ticket of a bulk connection")
                self._greetings.add(task)
                task.add_done_callback(self._greetings.discard)
                task.add_done_callback(functools.partial(_close_if_cancelled, sock))
            # As many as we wait for have shown nothing yet: the rest is hung up on, or the loop would spin here.
            self._sock.accept()[0].close()
        except BlockingIOError:
            return
        except OSError as err:
            logger.warning("cannot accept a bulk connection", extra={"why": str(err)})
            self._loop.remove_reader(self._sock)
            self._loop.call_later(DEAF_S, self._hear_again)

    def _hear_again(self) -> None:
        if self._sock is not None:
            self._loop.add_reader(self._sock, self._on_connection)

    async def _greet(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(self._settings.hello_timeout_s):
                shown = await _read(sock, _NUMBER.size + _SECRET_BYTES)
            number = _NUMBER.unpack_from(shown)[0]
            secret, enter = self._tickets.get(number, (b"", None))
            if enter is None or not hmac.compare_digest(secret, shown[_NUMBER.size :]):
                raise ConnectionRefusedError("it showed no ticket of ours")
            del self._tickets[number]
            sock.send(ENTERED)
        except (OSError, TimeoutError) as err:
            self._refused["ticket"] += 1
            logger.warning("refused a bulk connection", extra={"why": str(err) or type(err).__name__})
            sock.close()
            return
        enter(sock)

    async def close(self) -> None:
        """Nobody comes in any more. Idempotent."""
        self._closed = True
        self._tickets.clear()
        if self._sock is not None:
            self._loop.remove_reader(self._sock)
            self._sock.close()
            self._sock = None
        for task in [*self._greetings]:
            task.cancel()
        if self._greetings:
            await asyncio.wait(self._greetings, timeout=self._settings.linger_s)


def _close_if_cancelled(sock: socket.socket, greeting: asyncio.Task[None]) -> None:
    if greeting.cancelled():
        sock.close()


async def _read(sock: socket.socket, nbytes: int) -> bytes:
    raw = b""
    while len(raw) < nbytes:
        more = await asyncio.get_running_loop().sock_recv(sock, nbytes - len(raw))
        if not more:
            raise ConnectionAbortedError("it hung up")
        raw += more
    return raw


async def come_in(host: str, ticket: Mapping[str, Any]) -> socket.socket | None:
    """The dialer's end of the lane; None, with the reason in the log, where there is no way in."""
    sock: socket.socket | None = None
    loop = asyncio.get_running_loop()
    try:
        port, number, secret = ticket["port"], ticket["number"], ticket["secret"]
        async with asyncio.timeout(ENTER_TIMEOUT_S):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            await loop.sock_connect(sock, (host, port))
            await loop.sock_sendall(sock, _NUMBER.pack(number) + secret)
            if await _read(sock, len(ENTERED)) != ENTERED:
                raise ConnectionRefusedError("the peer took no ticket")
            return sock
    except (OSError, TimeoutError, KeyError, TypeError, ValueError, OverflowError, struct.error) as err:
        logger.warning("no bulk connection, all goes over TLS", extra={"host": host, "why": str(err) or repr(err)})
        if sock is not None:
            sock.close()
        return None
    except BaseException:
        if sock is not None:
            sock.close()
        raise
