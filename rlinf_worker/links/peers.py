"""The worker's links to other workers: one per pair, made when either end needs it, made again when it breaks.

For: cycles, queues and weights, which post messages to a `Peer` and are called for each frame that arrives. Not for:
what a frame means, nor for who may talk to whom (the driver's routes).

Both ends of a pair may dial at once. Of two links the one that the lexicographically smaller worker dialled is kept:
both ends know both, so both keep the same. What was under way on the other is drained; every route replays on the kept
one what is unfinished, and receivers drop what they have seen.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| accept | links that peers dialled | a link | the listener; close |
| keep, one per peer that is wanted | | its link to break; a back-off | the link; `drop`; close |
| pump, one per link | messages of the link | a message | the link; its break |
| drain, one per link | the peer's backlog | room in the link | the peer; the link's break |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec

from rlinf_api.errors import DeadlineExceeded
from rlinf_worker.links import devices, frames, hello
from rlinf_worker.links.certificates import LinkCertificates
from rlinf_worker.links.devices import Gpu
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.errors import LinkBroken, LinkClosed, LinkRefused, LinkStale, ShmTooSmall
from rlinf_worker.links.frames import Frame
from rlinf_worker.links.hello import Certificate, Identity, Refusal
from rlinf_worker.links.link import Link, Tally
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.message import Message

logger = logging.getLogger(__name__)

POLITE_S: Final = 0.2  # the larger id waits so long for the smaller one's dial, where both were told of a route
BACKOFF_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # between dials; a replaced peer has another endpoint anyway
SAY_AGAIN_S: Final = 30.0  # between words to the log about a peer that is not reached
LOST_AFTER_DIALS: Final = 3  # failed dials in a row after which pulls from a peer are given up: about 0.2 s
HANG_UP_S: Final = 2.0  # for what was posted to a peer that reads slowly; it is told again to our next life if need be


class Asks(Protocol):
    """The end of a conversation that asks."""

    def on_answer(self, frame: frames.Answer, message: Message) -> None: ...
    def replay(self) -> None: ...


class Hears(Protocol):
    """The end of a conversation that answers."""

    def on_ask(self, frame: frames.Ask, message: Message) -> None: ...
    def on_close(self) -> None: ...


class Peer:
    """One life of another worker. Messages are posted in order and without waiting: what bounds them is the credit of
    their cycle or queue. While there is no link they are not kept, as whoever posts replays."""

    def __init__(self, identity: Identity) -> None:
        self.worker, self.attempt, self.identity = identity.worker, identity.attempt, identity
        self.endpoint: Endpoint | None = None
        self.link: Link | None = None
        self.dialled_by = ""
        self.asking: dict[int, Asks] = {}  # by conversation: ours
        self.hearing: dict[int, Hears] = {}  # theirs
        self.wanted_by: set[str] = set()
        self.is_urgent = False
        self.failures, self.dial_at, self._said_at = 0, 0.0, -SAY_AGAIN_S  # dials in a row; by the loop's clock
        self.keeper: asyncio.Task[None] | None = None
        self.linked = asyncio.Event()
        self.drainer: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._backlog: deque[Message] = deque()
        self._backlogged, self.drained = asyncio.Event(), asyncio.Event()
        self.drained.set()

    def is_news(self) -> bool:
        """That it is not reached; asked by who says so."""
        is_news = self._loop.time() - self._said_at >= SAY_AGAIN_S
        self._said_at = self._loop.time() if is_news else self._said_at
        return is_news

    def post(self, message: Message) -> None:
        """In order with everything posted before. Raises UserError for what a link refuses (a full /dev/shm)."""
        link = self.link
        if link is None:
            return
        if not self._backlog:
            try:
                if link.send_nowait(message):
                    return
            except LinkBroken:
                return  # its pump sees it too, and the keeper makes another
        self._backlog.append(message)
        self.drained.clear()
        self._backlogged.set()

    async def send(self, message: Message) -> None:
        """With back-pressure, for what is too large to be posted. Raises LinkBroken, also where there is no link."""
        if self.link is None:
            raise LinkBroken(str(self.identity), "there is no link at the moment")
        await self.link.send(message)

    def clear(self) -> None:
        """The link is another one: what was to go over the old is replayed."""
        self._backlog.clear()
        self.drained.set()

    def give_up(self) -> None:
        """Nobody wants it: no dial any more."""
        if self.keeper is not None:
            self.keeper.cancel()
            self.keeper = None

    async def drain(self, link: Link) -> None:
        with contextlib.suppress(LinkBroken):
            while True:
                while self._backlog:
                    message = self._backlog[0]
                    await link.send(message)
                    if self._backlog and self._backlog[0] is message:
                        self._backlog.popleft()
                    del message  # the next may be long in coming, and an answer may be a view into the asker's ring
                self.drained.set()
                self._backlogged.clear()
                await self._backlogged.wait()


_STALE: Final = "stale: "  # a dial that need not be tried again

Handler = Callable[[Peer, Any, Message], Awaitable[None] | None]
"""What is returned is waited for before the link's next message is read: who works beside the event loop is not sent
more than it has worked off."""


class PeerLinks:
    """All links of one worker."""

    def __init__(
        self,
        listener: Listener,
        *,
        certificates: LinkCertificates | None = None,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Without `certificates` what goes by TCP goes plain."""
        self.listener, self._certificates, self._on_fatal = listener, certificates, on_fatal
        self.me = listener.me
        self.handlers: dict[type[Frame], Handler] = {}
        """By kind of frame; those of conversations are dispatched here, by their number."""
        self.on_up: list[Callable[[Peer], None]] = []
        """A peer has a link, perhaps another than before: replay what is unfinished."""
        self.on_unreachable: list[Callable[[Peer, str], None]] = []
        self.on_superseded: list[Callable[[Peer], None]] = []
        """A life that is over, as its worker has another."""
        self.dials = 0
        self.has_begun = self.me.attempt > 1
        """The job trains: this worker has had a unit or an item. A full /dev/shm then costs a link its speed, and not
        the job its life; before, whoever sized the volume has to hear of it. Another life of a worker finds a job that
        has begun."""
        self.around_shm = 0  # links that were made by TCP within the pod, as /dev/shm was full
        self._gpu: Gpu | None = None
        self.tally = Tally()
        self._peers: dict[Identity, Peer] = {}
        self._highest: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def start(self) -> None:
        self._spawn(self._accept(), "links: accept")

    def admit(self, identity: Identity, certificate: Certificate | None) -> None:
        """For the listener: an older life of a worker that has a newer one is refused."""
        highest = self._highest.get(identity.worker, 0)
        if identity.attempt < highest:
            sentence = f"attempt {highest} of worker {identity.worker} has taken the place of {identity.attempt}"
            raise Refusal("stale", sentence)
        known, certified = self._peers.get(identity), hello.certified_part(certificate)
        pool = known.endpoint.pool if known is not None and known.endpoint is not None else ""
        if pool and certified is not None and certified.part != f"pool:{pool}":
            raise Refusal("admit", f"worker {identity} is of pool {pool}, its certificate of {certified.part}")

    def _spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fatal(error)

    # --- who is wanted ------------------------------------------------------------------------------------------------
    def peer(self, worker: str, attempt: int) -> Peer:
        identity = Identity(job=self.me.job, worker=worker, attempt=attempt)
        known = self._peers.get(identity)
        if known is None:
            known = self._peers[identity] = Peer(identity)
        if attempt > self._highest.get(worker, 0):
            self._highest[worker] = attempt
            for other in [p for p in self._peers.values() if p.worker == worker and p.attempt < attempt]:
                self.drop(other, f"attempt {attempt} has taken its place")
                for listener in self.on_superseded:
                    listener(other)
        return known

    def find(self, worker: str, attempt: int) -> Peer | None:
        return self._peers.get(Identity(job=self.me.job, worker=worker, attempt=attempt))

    def want(self, endpoint: Endpoint, *, by: str, at_once: bool) -> Peer:
        """Keep a link to this peer until `unwant`. `at_once`: the other end has not been told, so only we can dial."""
        peer = self.peer(endpoint.worker, endpoint.attempt)
        peer.endpoint = endpoint
        peer.wanted_by.add(by)
        peer.is_urgent = peer.is_urgent or at_once
        if peer.keeper is None and not self._closing:
            peer.keeper = self._spawn(self._keep(peer), f"link to {peer.identity}")
        return peer

    def unwant(self, peer: Peer, *, by: str) -> None:
        """The link stays while it lives: the other end may want it."""
        peer.wanted_by.discard(by)
        if not peer.wanted_by:
            peer.give_up()

    def drop(self, peer: Peer, why: str) -> None:
        """This life is over: no link, no dial, no memory of it."""
        peer.wanted_by.clear()
        peer.give_up()
        if peer.link is not None:
            peer.link.abort(why)
        self._peers.pop(peer.identity, None)

    # --- making links -------------------------------------------------------------------------------------------------
    async def _accept(self) -> None:
        with contextlib.suppress(LinkClosed):
            while True:
                link = await self.listener.accept()
                if link.peer.attempt < self._highest.get(link.peer.worker, 0):
                    link.abort("a newer attempt of this worker is known")
                    continue
                self._adopt(self.peer(link.peer.worker, link.peer.attempt), link, dialled_by=link.peer.worker)

    async def _keep(self, peer: Peer) -> None:
        """The back-off is the peer's: who gave it up a moment ago and wants it again does not dial at once."""
        now = asyncio.get_running_loop().time
        await self._someone_dials(peer, within_s=peer.dial_at - now())
        while not self._closing:
            if (link := peer.link) is not None:
                peer.failures = 0
                await link.wait_broken()
                self._down(peer, link)
                continue
            if not peer.is_urgent and self.me.worker > peer.worker and peer.failures == 0:
                await self._someone_dials(peer, within_s=POLITE_S)
                if peer.link is not None:
                    continue
            why = await self._dial(peer)
            if why is not None:
                peer.failures += 1
                peer.dial_at = now() + BACKOFF_S[min(peer.failures, len(BACKOFF_S)) - 1]
                if peer.failures >= LOST_AFTER_DIALS or why.startswith(_STALE):
                    for listener in self.on_unreachable:
                        listener(peer, why)
                await asyncio.sleep(peer.dial_at - now())

    async def _someone_dials(self, peer: Peer, *, within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, within_s)):
                await peer.linked.wait()

    async def _dial(self, peer: Peer) -> str | None:
        """None when there is a link now, else why not. A UserError (as the job starts: a full /dev/shm) ends us."""
        assert peer.endpoint is not None
        self.dials += 1
        tls = self._certificates.dialling() if self._certificates else None
        try:
            try:
                link = await self.listener.dial(peer.endpoint, tls=tls)
            except ShmTooSmall as error:
                if not self.has_begun:
                    raise
                link = await self.listener.dial(peer.endpoint, tls=tls, with_shm=False)
                self.around_shm += 1
                extra = {"peer": str(peer.identity), "why": str(error)}
                logger.warning("a link within the pod goes by TCP, which is slower", extra=extra)
        except LinkStale as error:
            return _STALE + str(error)
        except (LinkRefused, LinkBroken, DeadlineExceeded) as error:
            by_certificate = isinstance(error.__cause__, ssl.SSLError)  # waiting may not mend it
            level = logging.WARNING if by_certificate and peer.is_news() else logging.DEBUG
            logger.log(level, "no link yet", extra={"peer": str(peer.identity), "error": str(error)})
            return str(error)
        self._adopt(peer, link, dialled_by=self.me.worker)
        return None

    def _adopt(self, peer: Peer, link: Link, *, dialled_by: str) -> None:
        if self._closing:
            link.abort("this worker is ending")
            return
        self._spawn(self._pump(peer, link), f"frames from {peer.identity}")
        preferred = min(self.me.worker, peer.worker)
        old = peer.link
        if old is not None and old.broken is None and peer.dialled_by == preferred != dialled_by:
            self._retire(link, dialled_by)
            return
        if old is not None and old.broken is None:
            self._retire(old, peer.dialled_by)
        peer.link, peer.dialled_by = link, dialled_by
        peer.linked.set()
        peer.clear()
        if peer.drainer is not None:
            peer.drainer.cancel()
        peer.drainer = self._spawn(peer.drain(link), f"backlog to {peer.identity}")
        logger.debug("linked", extra={"peer": str(peer.identity), "link": link.kind, "dialled_by": dialled_by})
        for asking in list(peer.asking.values()):
            asking.replay()
        for listener in self.on_up:
            listener(peer)
        self._renew(peer)  # the device may have come into use between its hello and now

    def on_device(self) -> None:
        """This process may have begun to use its GPU: links that could have a lane for it are made again. Asked at the
        ends of loads, as nothing tells; what is under way is replayed, as on any link that ends."""
        self._gpu = self.listener.gpu()
        for peer in list(self._peers.values()):
            self._renew(peer)

    def _renew(self, peer: Peer) -> None:
        link = peer.link
        if link is None or link.broken is not None or not devices.is_news(link.said_gpu, self._gpu):
            return
        logger.info("a link is made again, with a lane for GPU buffers", extra={"peer": str(peer.identity)})
        self._down(peer, link)  # what is posted meanwhile is replayed too
        self._spawn(link.close(), f"make the link to {peer.identity} again")

    def _retire(self, link: Link, dialled_by: str) -> None:
        """One of two links between the same pair; whoever dialled it hangs up, in good order."""
        if dialled_by == self.me.worker:
            self._spawn(link.close(), f"retire a link to {link.peer}")

    def _down(self, peer: Peer, link: Link) -> None:
        if peer.link is link:
            peer.link = None
            if peer.drainer is not None:
                peer.drainer.cancel()
                peer.drainer = None
            peer.linked.clear()
            peer.clear()

    # --- moving messages ----------------------------------------------------------------------------------------------
    async def _pump(self, peer: Peer, link: Link) -> None:
        handlers, asking, hearing = self.handlers, peer.asking, peer.hearing
        self.tally.began(link)
        try:
            while True:
                message = await link.recv()
                frame = frames.decode(message.head)
                kind = type(frame)
                if kind is frames.Ask:
                    if (heard := hearing.get(frame.conversation)) is not None:  # type: ignore[union-attr]
                        heard.on_ask(frame, message)  # type: ignore[arg-type]
                elif kind is frames.Answer:
                    if (asked := asking.get(frame.conversation)) is not None:  # type: ignore[union-attr]
                        asked.on_answer(frame, message)  # type: ignore[arg-type]
                elif kind is frames.Close:
                    if (heard := hearing.get(frame.conversation)) is not None:  # type: ignore[union-attr]
                        heard.on_close()
                elif (working := handlers[kind](peer, frame, message)) is not None:
                    await working
                del message  # the next may be long in coming, and this one may be a view into the ring
        except LinkBroken as error:
            # Links say it at INFO themselves.
            logger.debug("link ended", extra={"peer": str(peer.identity), "why": error.why})
        except msgspec.MsgspecError as error:
            extra = {"peer": str(peer.identity), "error": str(error)}
            logger.error("a peer sent a head that cannot be read", extra=extra)
            link.abort(f"a head that cannot be read: {error}")
        finally:
            self.tally.ended(link)
            self._down(peer, link)
        await link.close()  # gives its rings back: broken, it would keep them for as long as anybody knows it

    # --- ending -------------------------------------------------------------------------------------------------------
    async def close(self) -> None:
        """Everything posted is sent within the links' linger; then nobody can reach this worker. Idempotent."""
        if self._closing:
            return
        self._closing = True
        closing = [_hang_up(peer, peer.link) for peer in self._peers.values() if peer.link is not None]
        if closing:
            await asyncio.gather(*closing)
        await self.listener.close()
        for task in [*self._tasks]:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)


async def _hang_up(peer: Peer, link: Link) -> None:
    with contextlib.suppress(LinkBroken, TimeoutError):
        async with asyncio.timeout(HANG_UP_S):
            await peer.drained.wait()
    await link.close()
