"""Receiving weights: whom this worker hears them from, and the version that is on its way in.

For: channel. Not for: sending (subscribers), nor for what a version is (weights.edition).

    feed     a peer that sends us versions: the publisher's rank 0 (`root`), its other ranks (`source`), a receiver
             that passes on (`parent`, on rank 0's word), any receiver while nobody else answers (`late`)

A version that is damaged is dropped and fetched anew from its root; one with other tensors is refused, for ever. What
arrived of a version stays when a parent dies: the root is asked for the rest.

| task | waits for | unblocked by |
|---|---|---|
| watch, one per parent | its link's end | the link |
| look for a holder, once | a first version, LATE_S | a version; close |
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from rlinf_worker.weights.arena import Arena, Arenas
from rlinf_worker.weights.edition import Assembly, Plans, SchemaChanged, WeightsCorrupt

logger = logging.getLogger(__name__)

MAX_REFUSED: Final = 5  # times in a row; the next one ends this worker, whose memory or network is not to be trusted
LATE_S: Final = 0.25  # an actor in a long C call answers nobody; whoever holds a version does


@dataclass(slots=True, eq=False)
class Feed:
    peer: Peer
    kind: str  # root | source | parent | late
    mapped: Arena | None = None  # the version under way lies there
    base: Assembly | None = None
    watch: asyncio.Task[None] | None = None


class Receiver:
    def __init__(
        self, host: Host, *, arenas: Arenas, plans: Plans, moved: Signal,
        remember: Callable[[PolicyVersion, bytes, int], None], arrived: Callable[[Assembly], None],
    ) -> None:  # fmt: skip
        self._host, self._arenas, self._plans, self._moved = host, arenas, plans, moved
        self._remember, self._arrived = remember, arrived
        self.view = editions.RAW_WHOLE
        self.feeds: dict[Peer, Feed] = {}
        self.relays: dict[tuple[str, int], Endpoint] = {}
        self.under_way: Assembly | None = None
        self.here: Assembly | None = None
        self.refusal: SchemaChanged | None = None
        self._refused: PolicyVersion | None = None
        self._maps = True
        self._looking: asyncio.Task[None] | None = None
        self._mapped: list[tuple[Peer, PolicyVersion, Arena]] = []
        self._failures = 0
        self.corrupt = self.retries = self.reroutes = self.refused = 0

    def select(self, view: bytes) -> None:
        """Other shards from now on. What has come by now is of the view before: routes are known before a role is."""
        self._abandon()
        self.view, old, self.here = view, self.here, None
        if old is not None and old.arena is not None:
            old.arena.held -= 1
            old.let_go()
        self.give_back()
        for peer in self.feeds:
            self.subscribe(peer)
        if self.feeds:
            self._look_for_one()

    # --- whom -----------------------------------------------------------------------------------------------------
    def on_route(self, endpoint: Endpoint, *, is_relay: bool) -> None:
        if is_relay:
            self.relays[endpoint.worker, endpoint.attempt] = endpoint
        else:
            self._add(endpoint, "root", at_once=False)
        self._look_for_one()

    def _look_for_one(self) -> None:
        if self.here is None and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().create_task(self._look(), name="look for a holder of weights")
            self._looking.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._host.fatal(error)

    def on_unroute(self, worker: str, attempt: int) -> None:
        self.relays.pop((worker, attempt), None)
        for feed in [f for f in self.feeds.values() if (f.peer.worker, f.peer.attempt) == (worker, attempt)]:
            self._drop(feed)

    def _add(self, endpoint: Endpoint, kind: str, *, at_once: bool) -> None:
        peer = self._host.peers.want(endpoint, by=f"weights/{kind}", at_once=at_once)
        if (known := self.feeds.get(peer)) is not None and known.kind != "late":
            return
        self.feeds[peer] = Feed(peer, kind)
        if peer.link is not None:
            self.subscribe(peer)

    def _drop(self, feed: Feed) -> None:
        self.feeds.pop(feed.peer, None)
        if feed.watch is not None:
            feed.watch.cancel()
        self._host.peers.unwant(feed.peer, by=f"weights/{feed.kind}")
        self._say(feed.peer, frames.WeightsSubscribe(b"", None, 0, None, b"", self._mapped_of(feed.peer), os.getpid()))

    def _drop_all(self, *kinds: str) -> None:
        for feed in [f for f in self.feeds.values() if f.kind in kinds]:
            self._drop(feed)

    def _of(self, *kinds: str) -> list[Feed]:
        return [f for f in self.feeds.values() if f.kind in kinds]

    def _say(self, peer: Peer, frame: frames.Frame) -> None:
        peer.post(Message(frames.encode(frame)))

    def _mapped_of(self, peer: Peer) -> list[tuple[int, int]]:
        return [(v.branch, v.number) for p, v, _ in self._mapped if p is peer]

    def subscribe(self, peer: Peer, *, anew: bool = False) -> None:
        """With what is here and what is under way, so that nothing comes twice. `anew`: as who has nothing, so that
        nothing is taken from the version before."""
        here, part = (None, None) if anew else (self.here, self.under_way)
        partial = part is not None and not part.adopted
        self._say(
            peer,
            frames.WeightsSubscribe(
                view=self.view,
                here=(here.version.branch, here.version.number) if here is not None else None,
                checksum=here.checksum if here is not None else 0,
                partial=(part.version.branch, part.version.number) if partial and part is not None else None,
                have=bytes(h is not None for h in part.hashes) if partial and part is not None else b"",
                mapped=self._mapped_of(peer),
                pid=os.getpid() if self._maps else 0,
            ),
        )

    def on_up(self, peer: Peer) -> None:
        feed = self.feeds.get(peer)
        if feed is None:
            return
        self.subscribe(peer)
        if feed.kind in ("parent", "late"):
            if feed.watch is not None:
                feed.watch.cancel()
            feed.watch = asyncio.get_running_loop().create_task(self._watch(feed), name=f"watch {peer.identity}")

    async def _watch(self, feed: Feed) -> None:
        link = feed.peer.link
        if link is not None:
            await link.wait_broken()
        feed.watch = None
        if self.feeds.get(feed.peer) is feed and feed.peer.link in (None, link):
            self._lost(feed)

    def _lost(self, feed: Feed) -> None:
        """Whoever passed versions on to us is out of reach: the root is to say from whom the rest comes."""
        roots = self._of("root", "source")
        if feed.kind == "parent" and roots:
            self.reroutes += 1
            logger.info("weights are asked of the publisher again", extra={"lost": str(feed.peer.identity)})
            self._drop(feed)
            if self.under_way is not None and self.under_way.adopted:
                self._abandon()
            for root in roots:
                self.subscribe(root.peer)
        elif feed.kind == "late":
            self._drop(feed)

    def on_unreachable(self, peer: Peer, why: str) -> None:
        if (feed := self.feeds.get(peer)) is not None and feed.kind in ("parent", "late"):
            self._lost(feed)

    def on_move(self, peer: Peer, frame: frames.WeightsMove) -> None:
        self._drop_all("parent", "source")
        self._add(Endpoint.from_dict(frame.endpoint), "parent", at_once=True)
        parent = next((f for f in self._of("parent")), None)
        if parent is not None and parent.peer.link is not None and parent.watch is None:
            self.on_up(parent.peer)

    async def _look(self) -> None:
        """A first version from whoever has one, where the publisher does not answer."""
        turn = 0
        while True:
            await asyncio.sleep(LATE_S)
            if self.here is not None:
                return
            if self.under_way is not None or not self.relays:
                continue
            self._drop_all("late")
            endpoints = sorted(self.relays.items())
            self._add(endpoints[turn % len(endpoints)][1], "late", at_once=True)
            turn += 1

    # --- a version comes ------------------------------------------------------------------------------------------
    def on_head(self, peer: Peer, frame: frames.WeightsHead) -> None:
        feed = self.feeds.get(peer)
        version = PolicyVersion(frame.branch, frame.number)
        if feed is None or frame.view != self.view:
            self._return(peer, version, frame)
            return
        if feed.kind == "root":
            self._drop_all("parent", "late")
            self._meet_sources(frame)
        feed.mapped = feed.base = None
        if (self.here is not None and version <= self.here.version) or version == self._refused:
            self._return(peer, version, frame)
            return
        try:
            assembly = self._assembly_of(version, frame)
        except (UserError, msgspec.MsgspecError) as error:
            self._refuse(version, error)
            self._return(peer, version, frame)
            return
        if assembly is not None:
            self._place(feed, frame, assembly)

    def _return(self, peer: Peer, version: PolicyVersion, frame: frames.WeightsHead) -> None:
        if frame.memory is not None:
            self._say(peer, frames.WeightsFree(version.branch, version.number))

    def _meet_sources(self, frame: frames.WeightsHead) -> None:
        endpoints = [Endpoint.from_dict(fields) for fields in frame.sources]
        lives = {(e.worker, e.attempt) for e in endpoints}
        for feed in self._of("source"):
            if (feed.peer.worker, feed.peer.attempt) not in lives:
                self._drop(feed)
        for endpoint in endpoints:
            known = self._host.peers.find(endpoint.worker, endpoint.attempt)
            if known is None or known not in self.feeds:
                self._add(endpoint, "source", at_once=True)

    def _assembly_of(self, version: PolicyVersion, frame: frames.WeightsHead) -> Assembly | None:
        known = self.under_way
        if known is not None and known.version > version:
            return None
        if known is not None and known.version == version and known.catalog == frame.catalog:
            return known
        entries = self._plans.catalog(frame.catalog)
        if self.here is not None:
            editions.check_schema(self.here.schema, editions.schema_of(entries), version=version)
        made = Assembly(
            version, catalog=frame.catalog, view=frame.view, plain=frame.plain, sources=frame.source_count,
            part_bytes=frame.part_bytes, plans=self._plans,
        )  # fmt: skip
        self._abandon()
        self.under_way = made
        self._moved.notify()
        return made

    def _place(self, feed: Feed, frame: frames.WeightsHead, assembly: Assembly) -> None:
        """Where its parts will lie: in the sender's memory, if that is laid out as ours is to be, else in our own."""
        mapped = self._arenas.map(frame.memory) if frame.memory is not None else None
        if frame.memory is not None and mapped is None:
            self._maps = False
            self._return(feed.peer, assembly.version, frame)
            self.subscribe(feed.peer)
            return
        if mapped is not None:
            feed.mapped = mapped
            self._mapped.append((feed.peer, assembly.version, mapped))
        if assembly.arena is None:
            same = frame.source < 0 or assembly.is_whole
            assembly.adopted = mapped is not None and same
            if assembly.adopted and mapped is not None:
                assembly.arena = mapped
            else:
                assembly.arena = self._arenas.take(max(assembly.memory.nbytes, 1))
        here = self.here
        if frame.base is not None and here is not None and here.version == PolicyVersion(*frame.base):
            feed.base = here

    def on_parts(self, peer: Peer, frame: frames.WeightsParts, message: Message) -> None:
        feed, assembly = self.feeds.get(peer), self.under_way
        if feed is None or assembly is None or assembly.version != PolicyVersion(frame.branch, frame.number):
            return
        if assembly.arena is None:
            return
        _, buffers = message.encoded()
        arriving = iter(on_host(buffers))
        sent = set(frame.sent)
        try:
            for index, expected in enumerate(frame.hashes, frame.first):
                if index >= len(assembly.parts):
                    raise WeightsCorrupt(f"part {index} of weights {assembly.version}, which has {len(assembly.parts)}")
                if index in sent:
                    pieces = arriving
                    if assembly.hashes[index] is not None:
                        _skip(pieces, assembly.parts[index].nbytes)
                        continue
                elif assembly.hashes[index] is not None:
                    continue
                elif feed.mapped is not None and assembly.arena is feed.mapped:
                    assembly.check(index, expected)
                    continue
                else:
                    pieces = self._known(feed, assembly, index)
                assembly.add(index, expected, pieces)
        except (WeightsCorrupt, PayloadError) as error:
            self._corrupted(feed, error)
        self._moved.notify()

    def _known(self, feed: Feed, assembly: Assembly, index: int) -> Iterator[memoryview]:
        """The bytes of a part that was not sent: they lie in the sender's memory, or in the version before."""
        part = assembly.parts[index]
        if feed.mapped is not None:
            memory, is_here = feed.mapped.memory, feed.kind in ("parent", "late")
            return iter([memory[here if is_here else at :][:n] for at, here, n in part.runs])
        if feed.base is not None:
            memory = feed.base.lent
            return iter([memory[here : here + n] for _, here, n in part.runs])
        raise WeightsCorrupt(f"part {index} of weights {assembly.version} is not here and was not sent")

    def on_end(self, peer: Peer, frame: frames.WeightsEnd) -> None:
        feed, assembly = self.feeds.get(peer), self.under_way
        if feed is None or assembly is None or assembly.version != PolicyVersion(frame.branch, frame.number):
            return
        try:
            assembly.end(frame.source, frame.checksum)
        except WeightsCorrupt as error:
            self._corrupted(feed, error)
            return
        if assembly.complete:
            self._complete(assembly)

    def _complete(self, assembly: Assembly) -> None:
        self._remember(assembly.version, self.view, assembly.checksum)
        self._failures = 0
        old, self.here, self.under_way = self.here, assembly, None
        if assembly.arena is not None:
            assembly.arena.held += assembly.adopted
        if old is not None and old.arena is not None:
            old.arena.held -= 1
            old.let_go()
        for feed in self.feeds.values():
            feed.mapped = feed.base = None
        if self._of("root"):
            self._drop_all("late")
        self._arrived(assembly)
        self.confirm()
        self._moved.notify()

    def confirm(self) -> None:
        """To every rank that published it: this worker works with it from now on. What it gives back is said first: a
        publisher that goes on at once then finds the arena of the version before, and makes no other."""
        self.give_back()
        if self.here is not None:
            version = self.here.version
            for feed in self._of("root", "source"):
                self._say(
                    feed.peer,
                    frames.WeightsHave(version.branch, version.number, self.view, self.here.checksum),
                )

    def give_back(self) -> None:
        """Mapped memory that nothing here reads any more."""
        current = [(a.version, a.arena) for a in (self.here, self.under_way) if a is not None]
        kept = []
        for peer, version, arena in self._mapped:
            if arena.viewed or (version, arena) in current:
                kept.append((peer, version, arena))
            else:
                self._say(peer, frames.WeightsFree(version.branch, version.number))
        self._mapped = kept

    # --- what is wrong --------------------------------------------------------------------------------------------
    def _abandon(self) -> None:
        if self.under_way is not None:
            self.under_way.let_go()
            if self.under_way.arena is not None and not self.under_way.adopted:
                self.under_way.arena.held -= 1
            self.under_way = None
            for feed in self.feeds.values():
                feed.mapped = feed.base = None
            self._moved.notify()

    def _corrupted(self, feed: Feed, error: RLinfError) -> None:
        """Nothing of the version is used; it is asked for anew, of its root where there is one."""
        self.corrupt += 1
        self._failures += feed.kind != "late"  # it is one of several that are asked until the publisher answers
        extra = {"peer": str(feed.peer.identity), "error": str(error), "times": self._failures}
        logger.error("weights refused, asking again", extra=extra)
        self._abandon()
        if feed.kind == "late":  # its sender has it damaged; there are others, and the publisher
            self.relays.pop((feed.peer.worker, feed.peer.attempt), None)
            self._drop(feed)
            return
        if self._failures >= MAX_REFUSED:
            self._host.fatal(error)
            return
        self.retries += 1
        if feed.kind == "parent" and self._of("root"):
            self._lost(feed)
        else:
            for other in self._of("root", "source") or [feed]:
                self.subscribe(other.peer, anew=True)

    def _refuse(self, version: PolicyVersion, error: UserError | msgspec.MsgspecError) -> None:
        """Other tensors than those this worker has: no transfer mends that."""
        self.refused += 1
        self._refused = version
        self.refusal = error if isinstance(error, SchemaChanged) else SchemaChanged(str(error))
        logger.error("weights refused", extra={"version": str(version), "error": str(error)})
        for feed in self._of("root", "source"):
            self._say(feed.peer, frames.WeightsRefused(version.branch, version.number, str(error)))
        self._moved.notify()

    async def close(self) -> None:
        tasks = [t for t in (self._looking, *(f.watch for f in self.feeds.values())) if t is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)


def _skip(pieces: Iterator[memoryview], nbytes: int) -> None:
    while nbytes > 0:
        piece = next(pieces, None)
        if piece is None:
            return
        nbytes -= piece.nbytes
