"""Receiving weights: the version that is on its way in, and the one that is here.

For: channel. Not for: whom versions come from (feeds), sending (subscribers), nor what a version is (edition).

A version that is damaged is dropped and fetched anew from its root; one with other tensors is refused, for ever. What
arrived of a version stays when a parent dies: the root is asked for the rest.

| task | waits for | unblocked by |
|---|---|---|
| look for a holder, once | a first version, LATE_S | a version; close |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from rlinf_api.errors import RLinfError, UserError
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.channels.waiting import Signal
from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.errors import PayloadError
from rlinf_worker.links.message import Message
from rlinf_worker.links.payload_arrays import on_host
from rlinf_worker.links.peers import Peer
from rlinf_worker.weights import edition as editions
from rlinf_worker.weights import planning
from rlinf_worker.weights.arena import Arenas
from rlinf_worker.weights.checksums import Checksums
from rlinf_worker.weights.edition import Assembly, SchemaChanged, WeightsCorrupt
from rlinf_worker.weights.feeds import PASSES_ON, PUBLISHES, Borrowed, Feed, Feeds, free, say

logger = logging.getLogger(__name__)

MAX_REFUSED: Final = 5  # times in a row; the next one ends this worker, whose memory or network is not to be trusted
INLINE_BYTES: Final = 1 << 20  # 0.2 ms of copying and hashing, what a thread costs; more is not for the event loop
LATE_S: Final = 0.25  # an actor in a long C call answers nobody; whoever holds a version does


class HolderSearch:
    """For a first version, of whoever has one, where the publisher does not answer."""

    def __init__(
        self, feeds: Feeds, *, has_one: Callable[[], bool], is_coming: Callable[[], bool],
        fatal: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self._feeds, self._has_one, self._is_coming, self._fatal = feeds, has_one, is_coming, fatal
        self.task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Where none is under way."""
        if not self._has_one() and (self.task is None or self.task.done()):
            self.task = asyncio.get_running_loop().create_task(self._look(), name="look for a holder of weights")
            self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal(error)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LATE_S)
            if self._has_one():
                return
            if not self._is_coming():
                self._feeds.try_a_relay()


class Receiver:
    def __init__(
        self, host: Host, *, arenas: Arenas, moved: Signal,
        checksums: Checksums, arrived: Callable[[Assembly], None],
    ) -> None:  # fmt: skip
        self._host, self._arenas, self._moved = host, arenas, moved
        self._checksums, self._arrived = checksums, arrived
        self.view = planning.RAW_WHOLE
        self.feeds = Feeds(host, subscribe=self._subscribe, leave=self._leave, lost=self._lost)
        self.under_way: Assembly | None = None
        self.here: Assembly | None = None
        self.refusal: SchemaChanged | None = None
        self._refused: PolicyVersion | None = None
        self._search = HolderSearch(
            self.feeds,
            has_one=lambda: self.here is not None,
            is_coming=lambda: self.under_way is not None,
            fatal=host.fatal,
        )
        self._borrowed = Borrowed(arenas)
        self._failures = 0
        self.corrupt = self.retries = self.reroutes = self.refused = 0
        self.arrivals = 0
        """Messages with parts of a version."""

    def select(self, view: bytes) -> None:
        """Other shards from now on. What has come by now is of the view before: routes are known before a role is."""
        self._abandon()
        self.view, old, self.here = view, self.here, None
        if old is not None:
            old.let_go()
        self.give_back()
        for peer in self.feeds.all:
            self._subscribe(peer)
        if self.feeds.all:
            self._search.begin()

    # --- whom -----------------------------------------------------------------------------------------------------
    def on_route(self, endpoint: Endpoint, *, is_relay: bool) -> None:
        if is_relay:
            self.feeds.relays[endpoint.worker, endpoint.attempt] = endpoint
        else:
            self.feeds.add(endpoint, "root", at_once=False)
        self._search.begin()

    def _subscribe(self, peer: Peer, *, anew: bool = False) -> None:
        """With what is here and what is under way, so that nothing comes twice. `anew`: as who has nothing, so that
        nothing is taken from the version before."""
        here, part = (None, None) if anew else (self.here, self.under_way)
        if part is not None and part.adopted:
            part = None
        said = frames.WeightsSubscribe(
            view=self.view,
            here=(here.version.branch, here.version.number) if here is not None else None,
            checksum=here.checksum if here is not None else 0,
            partial=(part.version.branch, part.version.number) if part is not None else None,
            have=bytes(h is not None for h in part.hashes) if part is not None else b"",
            mapped=self._borrowed.of(peer),
            pid=os.getpid() if self._borrowed.works else 0,
        )
        say(peer, said)

    def _leave(self, peer: Peer) -> None:
        say(peer, frames.WeightsSubscribe(b"", None, 0, None, b"", self._borrowed.of(peer), os.getpid()))

    def _lost(self, feed: Feed) -> None:
        """Whoever passed versions on to us is out of reach."""
        if feed.kind == "parent" and self._ask_the_root(without=feed):
            self.reroutes += 1
            logger.info("weights are asked of the publisher again", extra={"lost": str(feed.peer.identity)})
        elif feed.kind == "late":
            self.feeds.drop(feed)

    def _ask_the_root(self, *, without: Feed) -> bool:
        """It is to say from whom the rest comes. False: there is none."""
        roots = self.feeds.of(PUBLISHES)
        if roots:
            self.feeds.drop(without)
            if self.under_way is not None and self.under_way.adopted:
                self._abandon()
            for root in roots:
                self._subscribe(root.peer)
        return bool(roots)

    def leave_relays(self) -> None:
        """Nothing comes by way of them, which may have nothing yet."""
        for feed in self.feeds.of(["parent"]):
            self._ask_the_root(without=feed)

    def leave_relay(self, worker: str, attempt: int) -> None:
        """The root knows that its life is over, which its link may not show: who is frozen keeps that."""
        for feed in self.feeds.of(["parent"]):
            if (feed.peer.worker, feed.peer.attempt) == (worker, attempt):
                self._lost(feed)

    # --- a version comes ------------------------------------------------------------------------------------------
    async def on_head(self, peer: Peer, frame: frames.WeightsHead, message: Message) -> None:
        if frame.view == self.view != planning.RAW_WHOLE:
            await self._plan(frame)
        if not await self._begin(peer, frame) and frame.memory is not None:
            free(peer, PolicyVersion(frame.branch, frame.number))

    async def _plan(self, frame: frames.WeightsHead) -> None:
        """It is kept: 1.3 s the first time for an eighth of 562 tensors, whose rows are cut."""
        with contextlib.suppress(UserError, msgspec.MsgspecError):  # raised again where it is answered
            sizes = {"sources": frame.source_count, "part_bytes": frame.part_bytes}
            await asyncio.to_thread(planning.parts_of, frame.catalog, frame.view, **sizes)

    async def _begin(self, peer: Peer, frame: frames.WeightsHead) -> bool:
        """False: nothing of the memory that the head offers will be read."""
        feed, version = self.feeds.all.get(peer), PolicyVersion(frame.branch, frame.number)
        if feed is None or frame.view != self.view:
            return False
        if feed.kind == "root":
            if self.feeds.of(PASSES_ON) and self.under_way is not None and self.under_way.adopted:
                self._abandon()  # it lies in the memory of one of those
            self.feeds.drop_all(PASSES_ON)
            self.feeds.meet_sources(frame.sources)
        feed.sends = feed.mapped = feed.base = None
        if (self.here is not None and version <= self.here.version) or version == self._refused:
            return False
        try:
            assembly = self._assembly_of(version, frame)
        except (UserError, msgspec.MsgspecError) as error:
            self._refuse(version, error)
            return False
        return assembly is not None and await self._place(feed, frame, assembly)

    def _assembly_of(self, version: PolicyVersion, frame: frames.WeightsHead) -> Assembly | None:
        known = self.under_way
        if known is not None and known.version > version:
            return None
        if known is not None and known.version == version and known.catalog == frame.catalog:
            return known
        entries = planning.catalog_of(frame.catalog)
        if self.here is not None:
            editions.check_schema(self.here.schema, editions.schema_of(entries), version=version)
        made = Assembly(
            version, catalog=frame.catalog, view=frame.view, plain=frame.plain, sources=frame.source_count,
            part_bytes=frame.part_bytes,
        )  # fmt: skip
        self._abandon()
        self.under_way = made
        self._moved.notify()
        return made

    async def _place(self, feed: Feed, frame: frames.WeightsHead, assembly: Assembly) -> bool:
        """Where its parts will lie: in the sender's memory, if that is laid out as ours is to be, else in our own."""
        if frame.memory is not None:
            feed.mapped = self._borrowed.borrow(feed.peer, assembly.version, frame.memory)
            if feed.mapped is None:
                self._subscribe(feed.peer)
                return False
        if assembly.arena is None and feed.mapped is not None and (frame.source < 0 or assembly.is_whole):
            assembly.lie_in(feed.mapped, adopted=True)
        elif assembly.arena is None:
            assembly.lie_in(await self._arenas.taken(assembly.memory.nbytes))
            if assembly.dead:  # given up meanwhile
                assembly.let_go()
                return False
        if self.here is not None and frame.base is not None and self.here.version == PolicyVersion(*frame.base):
            feed.base = self.here
        feed.sends = assembly.version
        return True

    async def on_parts(self, peer: Peer, frame: frames.WeightsParts, message: Message) -> None:
        feed, assembly = self.feeds.all.get(peer), self.under_way
        if feed is None or assembly is None or feed.sends != PolicyVersion(frame.branch, frame.number):
            return
        self.arrivals += 1
        coming = _Coming(assembly, feed, frame, message)
        nbytes = sum(part.nbytes for part in assembly.parts[frame.first : frame.first + len(frame.hashes)])
        try:
            if nbytes < INLINE_BYTES:
                coming.take()
            else:
                await asyncio.to_thread(coming.take)
        except (WeightsCorrupt, PayloadError) as error:
            if self.under_way is assembly:  # else it was given up meanwhile
                self._corrupted(feed, error)
        self._moved.notify()

    async def on_end(self, peer: Peer, frame: frames.WeightsEnd, message: Message) -> None:
        feed, assembly = self.feeds.all.get(peer), self.under_way
        if feed is None or assembly is None or feed.sends != PolicyVersion(frame.branch, frame.number):
            return
        try:
            assembly.end(frame.source, frame.checksum)
        except WeightsCorrupt as error:
            self._corrupted(feed, error)
            return
        if assembly.complete:
            self._complete(assembly)

    def _complete(self, assembly: Assembly) -> None:
        self._checksums.note(assembly.version, self.view, assembly.checksum)
        self._failures = 0
        old, self.here, self.under_way = self.here, assembly, None
        if old is not None:
            old.let_go()
        self.feeds.forget_version()
        if self.feeds.of(["root"]):
            self.feeds.drop_all(["late"])
        self._arrived(assembly)
        self.confirm()
        self._moved.notify()

    def confirm(self) -> None:
        """To every rank that published it: this worker works with it from now on. What it gives back is said first: a
        publisher that goes on at once then finds the arena of the version before, and makes no other."""
        self.give_back()
        if self.here is not None:
            version = self.here.version
            said = frames.WeightsHave(version.branch, version.number, self.view, self.here.checksum)
            for feed in self.feeds.of(PUBLISHES):
                say(feed.peer, said)

    def give_back(self) -> None:
        """Mapped memory that nothing here reads any more."""
        self._borrowed.give_back([(a.version, a.arena) for a in (self.here, self.under_way) if a is not None])

    # --- what is wrong --------------------------------------------------------------------------------------------
    def _abandon(self) -> None:
        if self.under_way is not None:
            self.under_way.let_go()
            self.under_way = None
            self.feeds.forget_version()
            self._moved.notify()

    def _corrupted(self, feed: Feed, error: RLinfError) -> None:
        """Nothing of the version is used; it is asked for anew, of its root where there is one."""
        self.corrupt += 1
        self._failures += feed.kind != "late"  # it is one of several that are asked until the publisher answers
        extra = {"peer": str(feed.peer.identity), "error": str(error), "times": self._failures}
        logger.error("weights refused, asking again", extra=extra)
        self._abandon()
        if feed.kind == "late":  # its sender has it damaged; there are others, and the publisher
            self.feeds.blame(feed)
            return
        if self._failures >= MAX_REFUSED:
            self._host.fatal(error)
            return
        self.retries += 1
        if feed.kind == "parent" and self.feeds.of(["root"]):
            self._lost(feed)
        else:
            for other in self.feeds.of(PUBLISHES) or [feed]:
                self._subscribe(other.peer, anew=True)

    def _refuse(self, version: PolicyVersion, error: UserError | msgspec.MsgspecError) -> None:
        """Other tensors than those this worker has: no transfer mends that."""
        self.refused += 1
        self._refused = version
        self.refusal = error if isinstance(error, SchemaChanged) else SchemaChanged(str(error))
        logger.error("weights refused", extra={"version": str(version), "error": str(error)})
        for feed in self.feeds.of(PUBLISHES):
            say(feed.peer, frames.WeightsRefused(version.branch, version.number, str(error)))
        self._moved.notify()

    async def close(self) -> None:
        tasks = [t for t in (self._search.task, *(f.watch for f in self.feeds.all.values())) if t is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)


class _Coming:
    """The parts of one message, which a thread copies to their places and checks. It holds all memory that it reads and
    writes: whoever gives the version up meanwhile gives none of that to another."""

    def __init__(self, assembly: Assembly, feed: Feed, frame: frames.WeightsParts, message: Message) -> None:
        self._assembly, self._frame, self._message = assembly, frame, message
        self._memory = assembly.lent
        self._is_in_place = feed.mapped is not None and assembly.arena is feed.mapped
        self._mapped = feed.mapped.lend() if feed.mapped is not None else None
        self._is_laid_out_here = feed.kind in PASSES_ON
        self._base = feed.base.lent if feed.base is not None else None

    def take(self) -> None:
        """Raises WeightsCorrupt, PayloadError."""
        assembly, frame = self._assembly, self._frame
        _, buffers = self._message.encoded()
        arriving = iter(on_host(buffers))
        sent = set(frame.sent)
        for index, expected in enumerate(frame.hashes, frame.first):
            if index >= len(assembly.parts):
                raise WeightsCorrupt(f"part {index} of weights {assembly.version}, which has {len(assembly.parts)}")
            is_here = assembly.hashes[index] is not None
            if index in sent:
                if is_here:
                    _skip(arriving, assembly.parts[index].nbytes)
                else:
                    assembly.add(index, expected, arriving)
            elif is_here:
                continue
            elif self._is_in_place:
                assembly.check(index, expected)
            else:
                assembly.add(index, expected, self._known(index))

    def _known(self, index: int) -> Iterator[memoryview]:
        """The bytes of a part that was not sent: they lie in the sender's memory, or in the version before."""
        part = self._assembly.parts[index]
        if (mapped := self._mapped) is not None:
            return iter([mapped[here if self._is_laid_out_here else at :][:n] for at, here, n in part.runs])
        if (base := self._base) is not None:
            return iter([base[here : here + n] for _, here, n in part.runs])
        raise WeightsCorrupt(f"part {index} of weights {self._assembly.version} is not here and was not sent")


def _skip(pieces: Iterator[memoryview], nbytes: int) -> None:
    while nbytes > 0:
        piece = next(pieces, None)
        if piece is None:
            return
        nbytes -= piece.nbytes
