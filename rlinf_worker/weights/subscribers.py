"""Serving weights: the subscribers of one worker, and what each is sent. At the publisher and at whoever passes on.

For: channel. Not for: what comes in (receiver), nor for how a version is sent (sending).

A subscriber is sent the newest version there is, and again from the beginning after a link was made anew. The
publisher's rank 0 serves FANOUT of them over the network itself and sends the others to those (a tree); in a pod it
serves everybody, as memory that is mapped costs nobody anything.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| watch, one per subscriber | | its link's end | the link |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.channels.waiting import Signal
from rlinf_worker.links import frames
from rlinf_worker.links.peers import Peer
from rlinf_worker.weights.arena import Arenas
from rlinf_worker.weights.checksums import Checksums
from rlinf_worker.weights.edition import SchemaChanged
from rlinf_worker.weights.feeds import say
from rlinf_worker.weights.sending import Subscriber, WeightsSender

logger = logging.getLogger(__name__)

FANOUT: Final = 2
"""Subscribers that one worker sends to over the network. With more, each of them would wait longer for its first part
than a level of the tree costs (a part, 4 MiB, is 2 ms)."""


class Subscribers:
    """`moved` is notified whenever somebody comes or goes, or says what it has."""

    def __init__(
        self, host: Host, *, moved: Signal, sender: WeightsSender, checksums: Checksums, arenas: Arenas
    ) -> None:
        self._host, self._moved, self._sender = host, moved, sender
        self._checksums, self._arenas = checksums, arenas
        self.all: dict[Peer, Subscriber] = {}
        self.is_root = False
        self.taken_over = self.late = 0

    # --- who ----------------------------------------------------------------------------------------------------------
    def subscribe(self, peer: Peer, frame: frames.WeightsSubscribe) -> None:
        if frame.here is not None:
            self._compare(PolicyVersion(*frame.here), frame.view, frame.checksum)
        old = self.all.get(peer)
        self._forget(peer)
        self._arenas.end_leases(str(peer.identity), lambda version: version not in frame.mapped)
        if not frame.view or peer.link is None:
            return
        sub = Subscriber(
            peer, peer.link, frame.view, frame.pid, PolicyVersion(*frame.here) if frame.here else None,
            PolicyVersion(*frame.partial) if frame.partial else None, frame.have,
        )  # fmt: skip
        self.all[peer] = sub
        if old is not None:
            sub.is_late, sub.avoid = old.is_late, old.via or old.avoid
        sub.via = self._place(sub)
        self._start(sub, self._watch(sub), f"weights: {peer.identity}")
        self._send_it(sub)
        self._moved.notify()

    def _send_it(self, sub: Subscriber) -> None:
        """From here, or by way of whom `_place` chose."""
        if sub.via is None:
            self._start(sub, self._sender.serve(sub), f"weights to {sub.peer.identity}")
        else:
            assert sub.via.endpoint is not None
            say(sub.peer, frames.WeightsMove(sub.via.endpoint.to_dict()))

    def _start(self, sub: Subscriber, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(self._ended)
        sub.tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._host.fatal(error)

    def _forget(self, peer: Peer) -> None:
        sub = self.all.pop(peer, None)
        if sub is not None:
            for task in sub.tasks:
                task.cancel()
            self._moved.notify()

    def gone(self, peer: Peer) -> None:
        """Its life is over."""
        self._lose(peer)
        self._arenas.end_leases(str(peer.identity), lambda version: True)

    async def _watch(self, sub: Subscriber) -> None:
        await sub.link.wait_broken()
        if self.all.get(sub.peer) is sub:
            self._lose(sub.peer)

    def _lose(self, peer: Peer) -> None:
        """Whoever had versions by way of it subscribes anew, as only that one knows what it has of the next."""
        self._forget(peer)
        for below in self.all.values():
            if below.via is peer:
                say(below.peer, frames.WeightsLeave(peer.worker, peer.attempt))

    # --- what they say ------------------------------------------------------------------------------------------------
    def on_have(self, peer: Peer, frame: frames.WeightsHave) -> None:
        version = PolicyVersion(frame.branch, frame.number)
        self._compare(version, frame.view, frame.checksum)
        sub = self.all.get(peer)
        if sub is not None and sub.lacks(version):
            sub.here, sub.is_late = version, False
            self._moved.notify()

    def _compare(self, version: PolicyVersion, view: bytes, checksum: int) -> None:
        try:
            self._checksums.note(version, view, checksum)
        except InvariantBroken as error:
            self._host.fatal(error)

    def on_refused(self, peer: Peer, frame: frames.WeightsRefused) -> None:
        logger.error("a receiver refused weights", extra={"peer": str(peer.identity), "why": frame.why})
        if (sub := self.all.get(peer)) is not None:
            sub.refused = frame.why
            self._moved.notify()

    def without(self, version: PolicyVersion) -> list[Subscriber]:
        """Those that are waited for: they have not said that they have this version, or a newer one."""
        return [s for s in self.all.values() if s.alive and not s.refused and not s.is_late and s.lacks(version)]

    def without_relays(self, version: PolicyVersion) -> None:
        """Who has it from another, and has not got it in time, gets it from here: the other may be slow, or frozen."""
        for sub in self.without(version):
            if sub.via is not None:
                logger.warning("weights did not come by way of another", extra=sub.said(version))
                sub.via, sub.avoid = None, sub.via
                self.taken_over += 1
                self._send_it(sub)

    def wait_no_more(self, version: PolicyVersion) -> None:
        """For who has not confirmed it: it may be frozen. A worker uses no version that it lacks."""
        for sub in self.without(version):
            logger.warning("weights were not confirmed in time; nobody waits for it", extra=sub.said(version))
            sub.is_late = True
            self.late += 1

    def check_refusals(self, version: PolicyVersion) -> None:
        for sub in self.all.values():
            if sub.refused:
                raise SchemaChanged(f"worker {sub.peer.identity} refused weights {version}", got=sub.refused)

    # --- the tree -----------------------------------------------------------------------------------------------------
    def _place(self, sub: Subscriber) -> Peer | None:
        """None: served from here. Else who passes it on; never one of its own descendants, nor who is to be avoided."""
        if not self.is_root or sub.link.kind == "shm" or sub.peer.endpoint is None:
            return None
        others = [
            s for s in self.all.values()
            if s is not sub and s.alive and not s.is_late and s.view == sub.view and s.link.kind != "shm"
            and s.peer.endpoint is not None and s.peer is not sub.avoid and sub.peer not in self._ancestors(s)
        ]  # fmt: skip
        pod = sub.peer.endpoint.pod_uid
        neighbours = [s for s in others if s.peer.endpoint is not None and s.peer.endpoint.pod_uid == pod and sub.pid]
        if neighbours:
            return neighbours[0].peer  # whose memory it maps
        if sum(s.via is None for s in others) < FANOUT:
            return None
        children = [(len(self._ancestors(s)), sum(c.via is s.peer for c in self.all.values()), s) for s in others]
        free = [(depth, n) for n, (depth, count, _) in enumerate(children) if count < FANOUT]
        return children[min(free)[1]][2].peer if free else None

    def _ancestors(self, sub: Subscriber) -> list[Peer]:
        found: list[Peer] = []
        via = sub.via
        while via is not None and via not in found:
            found.append(via)
            parent = self.all.get(via)
            via = parent.via if parent is not None else None
        return found

    def free(self, peer: Peer, frame: frames.WeightsFree) -> None:
        self._arenas.end_leases(str(peer.identity), lambda version: version == (frame.branch, frame.number))

    async def close(self) -> None:
        tasks = [task for sub in self.all.values() for task in sub.tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
