"""Listening where a worker can be reached, and dialling another by the cheapest link that both ends share.

For: the channel layer of a worker, which has one Listener and dials when the driver hands it a route. Which of the two
ends dials is the driver's choice; two dials make two links. Not for: dialling again (the caller decides, with the
peer's next attempt), nor for finding endpoints (`endpoint`; the control plane carries them).

    listener = await Listener.open(me, pod_uid=..., run_dir=..., shm_dir="/dev/shm", host=pod_ip, tls=server_context)
    await driver.announce(listener.endpoint.to_dict())
    link = await listener.dial(peer_endpoint, tls=client_context)     # at one end
    link = await listener.accept()                                     # at the other

    same pod, its socket is there, x86     -> shm
    otherwise                              -> tcp

    waits                  bound                          woken by
    dial                   dial_timeout_s                 the answer, a refusal, a closed connection
    accept (the caller)    the caller's                   a link; closing the listener
    a connection's hello   hello_timeout_s                the hello
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import re
import socket
import ssl
from collections import Counter, deque
from dataclasses import replace
from typing import Any

from rlinf_api.errors import DeadlineExceeded, UserError
from rlinf_worker.links import devices, segments, shm, tcp, wire
from rlinf_worker.links.devices import Gpu
from rlinf_worker.links.door import Door
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.errors import LinkBroken, LinkClosed
from rlinf_worker.links.hello import Admit, Identity, Refusal
from rlinf_worker.links.link import Link
from rlinf_worker.links.settings import LinkSettings

logger = logging.getLogger(__name__)

MAX_WAITING_LINKS = 256
"""Links accepted and not yet taken, and hellos under way, of each as many: more wait in the kernel (unix) or are hung
up on (TCP), and come again."""

DEAF_S = 0.5  # after an accept that failed, as for want of descriptors: the dialer gives up after ten times that


def socket_path(run_dir: str, me: Identity) -> str:
    """Short, readable, and its own for every job, worker and attempt: `.../rollout-0-1-5c1d2a90-0.sock`."""
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", me.worker)[-24:]
    mark = hashlib.sha256(f"{me.job}\0{me.worker}".encode()).hexdigest()[:8]
    return os.path.join(run_dir, f"{name}-{mark}-{me.attempt}.sock")


class Listener:
    """One worker's door: accepts and dials. Made by `open`, ended by `close`, which does not close its links."""

    def __init__(
        self, me: Identity, endpoint: Endpoint, *, shm_dir: str, admit: Admit | None, settings: LinkSettings
    ) -> None:
        self.me, self.endpoint = me, endpoint
        self.refused: Counter[str] = Counter()
        """By code: garbage, protocol, job, worker, certificate, stale, admit, uid, shm, silent, lost; `ticket`: to the
        door of the bulk lane, with none of ours."""
        self._shm_dir, self._admit, self._settings = shm_dir, admit, settings
        self._loop = asyncio.get_running_loop()
        self._links: deque[Link] = deque()
        self._arrival = asyncio.Event()
        self._closed = False
        self._hellos: set[asyncio.Task[None]] = set()
        self._is_deaf = False  # full: the unix socket is not looked at
        self._unix: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._door: Door | None = None

    @classmethod
    async def open(
        cls,
        me: Identity,
        *,
        pod_uid: str,
        run_dir: str,
        shm_dir: str,
        host: str | None,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        admit: Admit | None = None,
        settings: LinkSettings | None = None,
        pool: str = "",
    ) -> Listener:
        """Listens at a unix socket in `run_dir` and, with a `host`, on TCP (`port` 0: any). `tls` None: plain TCP.

        Raises SocketPathTooLong, and UserError where a path or a port is taken.
        """
        path = socket_path(run_dir, me)
        unix = _listen_unix(path)
        settings = settings or LinkSettings()
        endpoint = Endpoint(
            worker=me.worker,
            attempt=me.attempt,
            pod_uid=pod_uid,
            unix_path=path,
            host=host or "",
            port=port,
            pool=pool,
        )
        listener = cls(me, endpoint, shm_dir=shm_dir, admit=admit, settings=settings)
        listener._unix = unix
        try:
            if host is not None:
                await listener._listen_tcp(host, port, tls=tls)
        except BaseException:
            listener._close_unix()
            raise
        listener._loop.add_reader(unix, listener._on_unix)
        return listener

    async def _listen_tcp(self, host: str, port: int, *, tls: ssl.SSLContext | None) -> None:
        try:
            self._server = await self._loop.create_server(
                lambda: wire.Wire(self._settings, self._on_tcp), host, port, ssl=tls, backlog=128
            )
        except OSError as err:
            raise UserError(
                f"worker {self.me} cannot listen at {host}:{port}",
                got=err.strerror or str(err),
                wanted="an address of this pod and a free port",
                next="use port 0, which takes any free one" if port else "check the pod's address",
            ) from err
        host, port = self._server.sockets[0].getsockname()[:2]
        self._door = Door(host, settings=self._settings, refused=self.refused)
        self.endpoint = replace(self.endpoint, port=port)

    # --- accepting ---

    def _on_unix(self) -> None:
        assert self._unix is not None
        while True:
            if self._is_full():
                self._be_deaf()
                return
            try:
                sock, _ = self._unix.accept()
            except BlockingIOError:
                return
            except OSError as err:
                # ECONNABORTED: the dialer left. EMFILE and the like: say so, and look again in a while.
                logger.warning("cannot accept a link", extra={"worker": str(self.me), "why": str(err)})
                self._be_deaf()
                self._loop.call_later(DEAF_S, self._hear_again)
                return
            sock.setblocking(False)
            self._start_hello(
                shm.accept(sock, self.me, admit=self._admit, shm_dir=self._shm_dir, settings=self._settings), "shm"
            )

    def _is_full(self) -> bool:
        return len(self._hellos) >= MAX_WAITING_LINKS or len(self._links) >= MAX_WAITING_LINKS

    def _be_deaf(self) -> None:
        """Who waits to be accepted would wake the loop again and again."""
        if self._unix is not None and not self._is_deaf:
            self._loop.remove_reader(self._unix)
            self._is_deaf = True

    def _hear_again(self) -> None:
        if self._is_deaf and self._unix is not None and not self._is_full():
            self._is_deaf = False
            self._loop.add_reader(self._unix, self._on_unix)

    def _on_tcp(self, connection: wire.Wire) -> None:
        if self._is_full():
            connection.transport.abort()
            return
        self._start_hello(
            tcp.accept(connection, self.me, admit=self._admit, settings=self._settings, bulk=self._door), "tcp"
        )

    def _start_hello(self, accepting: Any, kind: str) -> None:
        task = self._loop.create_task(self._hello(accepting, kind), name=f"hello over {kind} at {self.me}")
        self._hellos.add(task)
        task.add_done_callback(self._hellos.discard)
        task.add_done_callback(lambda _: accepting.close())  # cancelled before it ran: the coroutine was never awaited
        task.add_done_callback(lambda _: self._hear_again())

    async def _hello(self, accepting: Any, kind: str) -> None:
        try:
            async with asyncio.timeout(self._settings.hello_timeout_s):
                link = await accepting
        except Refusal as refusal:
            self._count_refusal(refusal.code, refusal.sentence, kind)
        except TimeoutError:
            self._count_refusal("silent", f"no hello within {self._settings.hello_timeout_s:g} s", kind)
        except OSError as err:
            self._count_refusal("lost", f"the dialer left: {err}", kind)
        else:
            if self._closed:
                await link.close()
            else:
                self._links.append(link)
                self._arrival.set()

    def _count_refusal(self, code: str, sentence: str, kind: str) -> None:
        self.refused[code] += 1
        logger.warning("refused a link", extra={"worker": str(self.me), "link": kind, "code": code, "why": sentence})

    async def accept(self) -> Link:
        """The next link that a peer made to this worker. Cancellable. Raises LinkClosed once the listener is closed."""
        while not self._links:
            if self._closed:
                raise LinkClosed(str(self.me), "its listener is closed")
            self._arrival.clear()
            await self._arrival.wait()
        link = self._links.popleft()
        self._hear_again()
        return link

    # --- dialling ---

    async def dial(
        self,
        peer: Endpoint,
        *,
        tls: ssl.SSLContext | None = None,
        with_shm: bool = True,
    ) -> Link:
        """A link to `peer`, as this worker. See `dial` of the module."""
        return await dial(
            peer,
            self.me,
            pod_uid=self.endpoint.pod_uid,
            shm_dir=self._shm_dir,
            tls=tls,
            settings=self._settings,
            with_shm=with_shm,
        )

    def gpu(self) -> Gpu | None:
        """What this worker would say of its GPU in the hello of a link made now."""
        return devices.of(self._settings)

    # --- ending ---

    def _close_unix(self) -> None:
        if self._unix is not None:
            self._loop.remove_reader(self._unix)
            self._unix.close()
            self._unix = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.endpoint.unix_path)

    async def close(self) -> None:
        """No new links; those waiting to be accepted are closed. Idempotent."""
        self._close_unix()
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._door is not None:
            await self._door.close()
        for task in [*self._hellos]:
            task.cancel()
        if self._hellos:
            await asyncio.wait(self._hellos, timeout=self._settings.linger_s)
        self._closed = True
        self._arrival.set()
        while self._links:
            await self._links.popleft().close()


def _listen_unix(path: str) -> socket.socket:
    shm.check_path(path)
    sock = shm.make_socket()
    try:
        try:
            sock.bind(path)
        except OSError as err:
            if err.errno != errno.EADDRINUSE or not _is_abandoned(path):
                raise
            os.unlink(path)  # an earlier process with the same worker and attempt left it
            sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(128)
    except OSError as err:
        sock.close()
        raise UserError(
            f"cannot listen at {path}",
            got=err.strerror or str(err),
            wanted="a writable run directory in which nobody else is this worker and attempt",
            next="check the run directory of the pod contract",
        ) from err
    return sock


def _is_abandoned(path: str) -> bool:
    with shm.make_socket() as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


async def dial(
    peer: Endpoint,
    me: Identity,
    *,
    pod_uid: str,
    shm_dir: str,
    tls: ssl.SSLContext | None = None,
    settings: LinkSettings | None = None,
    with_shm: bool = True,
) -> Link:
    """A link to `peer`, by the cheapest way that both ends share. `tls` None: plain TCP. `with_shm` False: also within
    a pod by TCP, where shared memory is full.

    Raises LinkRefused and LinkStale (do not try again), LinkBroken and DeadlineExceeded (try again), ShmTooSmall.
    """
    settings = settings or LinkSettings()
    identity = Identity(job=me.job, worker=peer.worker, attempt=peer.attempt)
    try:
        async with asyncio.timeout(settings.dial_timeout_s):
            is_near = with_shm and peer.pod_uid == pod_uid and segments.supported() is None
            if is_near and os.path.exists(peer.unix_path):
                return await shm.dial(peer.unix_path, me, identity, shm_dir=shm_dir, settings=settings)
            if not peer.port:
                raise LinkBroken(str(identity), "it listens at no port and shares no pod (or no memory) with us")
            return await tcp.dial(peer.host, peer.port, me, identity, settings=settings, context=tls, to_pool=peer.pool)
    except TimeoutError as err:
        raise DeadlineExceeded(
            f"a link from worker {me} to worker {identity}",
            timeout_s=settings.dial_timeout_s,
            missing=f"an answer at {peer.unix_path if peer.pod_uid == pod_uid else f'{peer.host}:{peer.port}'}",
            next="it is away, stopped or overloaded; try again",
        ) from err
