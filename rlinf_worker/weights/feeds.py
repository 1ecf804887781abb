"""The peers that send this worker versions of the weights, and what of their memory is mapped here.

For: receiver. Not for: what they send, nor for serving others (subscribers).

    root     the publisher's rank 0; `source`: its other ranks, which root names with a sharded version
    parent   a receiver that passes on, on root's word
    late     any receiver, while there is no version yet and nobody else answers

| task | waits for | unblocked by |
|---|---|---|
| watch, one per parent or late | its link's end | the link |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.weights.arena import Arena, Arenas, Shared
from rlinf_worker.weights.edition import Assembly

PASSES_ON = ("parent", "late")
PUBLISHES = ("root", "source")


def say(peer: Peer, frame: frames.Frame) -> None:
    peer.post(Message(frames.encode(frame)))


def free(peer: Peer, version: PolicyVersion) -> None:
    say(peer, frames.WeightsFree(version.branch, version.number))


@dataclass(slots=True, eq=False)
class Feed:
    peer: Peer
    kind: str
    sends: PolicyVersion | None = None  # what it said is to come, and has a place here; other parts are not looked at
    mapped: Arena | None = None  # the version under way lies there
    base: Assembly | None = None
    watch: asyncio.Task[None] | None = None


class Feeds:
    """`subscribe` is called with each that has a link, `leave` with each that is given up, `lost` with one that passed
    on and is out of reach."""

    def __init__(
        self, host: Host, *, subscribe: Callable[[Peer], None], leave: Callable[[Peer], None],
        lost: Callable[[Feed], None],
    ) -> None:  # fmt: skip
        self._host, self._subscribe, self._leave, self._lost = host, subscribe, leave, lost
        self.all: dict[Peer, Feed] = {}
        self.relays: dict[tuple[str, int], Endpoint] = {}
        self._turn = 0
        host.peers.on_unreachable.append(lambda peer, why: self._is_lost(self.all.get(peer)))

    def of(self, kinds: Sequence[str]) -> list[Feed]:
        return [f for f in self.all.values() if f.kind in kinds]

    def add(self, endpoint: Endpoint, kind: str, *, at_once: bool) -> None:
        peer = self._host.peers.want(endpoint, by=f"weights/{kind}", at_once=at_once)
        if (known := self.all.get(peer)) is None or known.kind == "late":
            self.all[peer] = Feed(peer, kind)
            if peer.link is not None:
                self.on_up(peer)

    def drop(self, feed: Feed) -> None:
        self.all.pop(feed.peer, None)
        if feed.watch is not None:
            feed.watch.cancel()
        self._host.peers.unwant(feed.peer, by=f"weights/{feed.kind}")
        self._leave(feed.peer)

    def drop_all(self, kinds: Sequence[str]) -> None:
        for feed in self.of(kinds):
            self.drop(feed)

    def on_unroute(self, worker: str, attempt: int) -> None:
        self.relays.pop((worker, attempt), None)
        for feed in [f for f in self.all.values() if (f.peer.worker, f.peer.attempt) == (worker, attempt)]:
            self._is_lost(feed)  # the driver may know of it before its link ends: who is frozen keeps that
            if self.all.get(feed.peer) is feed:
                self.drop(feed)

    def on_up(self, peer: Peer) -> None:
        if (feed := self.all.get(peer)) is None:
            return
        self._subscribe(peer)
        if feed.kind in PASSES_ON:
            if feed.watch is not None:
                feed.watch.cancel()
            feed.watch = asyncio.get_running_loop().create_task(self._watch(feed), name=f"watch {peer.identity}")

    async def _watch(self, feed: Feed) -> None:
        link = feed.peer.link
        if link is not None:
            await link.wait_broken()
        feed.watch = None
        if feed.peer.link in (None, link):
            self._is_lost(feed)

    def _is_lost(self, feed: Feed | None) -> None:
        if feed is not None and feed.kind in PASSES_ON and self.all.get(feed.peer) is feed:
            self._lost(feed)

    # --- whom root names, and whom we try ourselves -------------------------------------------------------------------
    def move(self, endpoint: Endpoint) -> None:
        self.drop_all(("parent", "source"))
        self.add(endpoint, "parent", at_once=True)

    def meet_sources(self, sources: Sequence[Mapping[str, Any]]) -> None:
        endpoints = [Endpoint.from_dict(fields) for fields in sources]
        lives = {(e.worker, e.attempt) for e in endpoints}
        for feed in self.of(["source"]):
            if (feed.peer.worker, feed.peer.attempt) not in lives:
                self.drop(feed)
        for endpoint in endpoints:
            known = self._host.peers.find(endpoint.worker, endpoint.attempt)
            if known is None or known not in self.all:
                self.add(endpoint, "source", at_once=True)

    def try_a_relay(self) -> None:
        """Another one each time."""
        if self.relays:
            self.drop_all(["late"])
            endpoints = sorted(self.relays.items())
            self.add(endpoints[self._turn % len(endpoints)][1], "late", at_once=True)
            self._turn += 1

    def blame(self, feed: Feed) -> None:
        """What a relay sent is damaged: it is not tried again."""
        self.relays.pop((feed.peer.worker, feed.peer.attempt), None)
        self.drop(feed)

    def forget_version(self) -> None:
        """None is under way: what they had of it, and what it built on, is nothing of theirs any more."""
        for feed in self.all.values():
            feed.sends = feed.mapped = feed.base = None


class Borrowed:
    """Versions that lie in the memory of other workers of the pod, mapped here. Each is said to be free, once."""

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self._all: list[tuple[Peer, PolicyVersion, Arena]] = []
        self.works = True
        """False once a peer's memory could not be mapped: from then on versions are to be sent."""

    def of(self, peer: Peer) -> list[tuple[int, int]]:
        return [(v.branch, v.number) for p, v, _ in self._all if p is peer]

    def borrow(self, peer: Peer, version: PolicyVersion, shared: Shared) -> Arena | None:
        found = self._arenas.map(shared)
        if found is not None:
            self._all.append((peer, version, found))
        self.works = self.works and found is not None
        return found

    def give_back(self, current: Sequence[tuple[PolicyVersion, Arena | None]]) -> None:
        """All but what is `current`, and what something here still reads."""
        kept = []
        for peer, version, arena in self._all:
            if arena.viewed or (version, arena) in current:
                kept.append((peer, version, arena))
            else:
                free(peer, version)
        self._all = kept
