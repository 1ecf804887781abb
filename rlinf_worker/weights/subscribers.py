"""Serving weights: the subscribers of one worker, and what each is sent. At the publisher and at whoever passes on.

For: channel. Not for: what comes in (receiver), nor for what a version is (weights.edition).

A subscriber is sent the newest version there is, part by part as the parts come about, and again from the beginning
after a link was made anew. The publisher's rank 0 serves FANOUT of them over the network itself and sends the others to
those (a tree); in a pod it serves everybody, as memory that is mapped costs nobody anything.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| serve, one per subscriber | parts of the newest version | a part; room in the link | `moved`; the link |
| watch, one per subscriber | | its link's end | the link |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.channels.waiting import Signal
from rlinf_worker.links import frames
from rlinf_worker.links.errors import LinkBroken
from rlinf_worker.links.link import Link
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.weights import edition as editions
from rlinf_worker.weights.arena import Arenas
from rlinf_worker.weights.checksums import Checksums
from rlinf_worker.weights.edition import Holding, SchemaChanged
from rlinf_worker.weights.feeds import say

logger = logging.getLogger(__name__)

FANOUT: Final = 2
"""Subscribers that one worker sends to over the network. With more, each of them would wait longer for its first part
than a level of the tree costs (a part, 4 MiB, is 2 ms)."""

WINDOW_BYTES: Final = 8 << 20
"""How much of parts goes in one message, as far as it is there: one message keeps both ends' loops busy for 0.3 ms."""

WINDOW_PARTS: Final = 64
HASHES_KEPT: Final = 4  # versions whose hashes a delta can be told from: a receiver is one version behind, or two


@dataclass(slots=True, eq=False)
class Subscriber:
    peer: Peer
    link: Link
    view: bytes
    pid: int
    here: PolicyVersion | None
    partial: PolicyVersion | None = None
    have: bytes = b""
    sent: PolicyVersion | None = None
    via: Peer | None = None
    avoid: Peer | None = None
    """By way of which it had the last version, or should have had it."""
    refused: str = ""
    is_late: bool = False
    """It did not confirm a version in time: until it confirms one, nobody waits for it and it passes nothing on."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.peer.link is self.link and self.link.broken is None

    def said(self, version: PolicyVersion) -> dict[str, str]:
        """For logs."""
        return {"peer": str(self.peer.identity), "version": str(version), "via": str(self.via and self.via.identity)}

    def lacks(self, version: PolicyVersion) -> bool:
        return self.here is None or self.here < version

    def is_due(self, version: PolicyVersion) -> bool:
        """To be sent. Who is late gets one version at a time, as each that it has mapped takes an arena here."""
        if self.sent is not None and (self.sent >= version or (self.is_late and self.lacks(self.sent))):
            return False
        return self.lacks(version)


class Subscribers:
    """`newest` gives what there is to serve; `moved` is notified whenever that, or a part of it, has come about."""

    def __init__(
        self, host: Host, *, moved: Signal, newest: Callable[[], Holding | None], sources: Callable[[], list[Any]],
        checksums: Checksums, arenas: Arenas,
    ) -> None:  # fmt: skip
        self._host, self._moved, self._newest, self._sources = host, moved, newest, sources
        self._checksums, self._arenas = checksums, arenas
        self.all: dict[Peer, Subscriber] = {}
        self.is_root = False
        self._hashes: dict[tuple[PolicyVersion, bytes, bytes, int], list[int]] = {}
        self.sent_bytes = self.taken_over = self.late = 0

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
            self._start(sub, self._serve(sub), f"weights to {sub.peer.identity}")
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

    # --- sending ------------------------------------------------------------------------------------------------------
    async def _serve(self, sub: Subscriber) -> None:
        while sub.alive:
            holding = self._newest()
            if holding is None or holding.dead or not sub.is_due(holding.version):
                await self._moved.wait()
                continue
            try:
                if await self._send(sub, holding):
                    sub.sent = holding.version
            except LinkBroken:
                return
            self._moved.notify()

    def _is_mapped(self, sub: Subscriber, holding: Holding) -> bool:
        is_shared = holding.arena is not None and holding.arena.shared is not None
        return bool(is_shared and sub.link.kind == "shm" and sub.pid and holding.maps_to(sub.view))

    def _head(self, sub: Subscriber, holding: Holding, *, is_mapped: bool, has_base: bool) -> Message:
        version, base = holding.version, sub.here if has_base else None
        head = frames.WeightsHead(
            branch=version.branch,
            number=version.number,
            catalog=holding.catalog,
            view=sub.view,
            plain=dict(holding.plain),
            sources=self._sources() if holding.sources > 1 else [],
            source_count=holding.sources,
            source=holding.rank,
            part_bytes=holding.part_bytes,
            memory=holding.arena.shared if is_mapped and holding.arena is not None else None,
            base=(base.branch, base.number) if base is not None else None,
        )
        return Message(frames.encode(head))

    async def _send(self, sub: Subscriber, holding: Holding) -> bool:
        """False: the version was replaced, or found wrong, half-way."""
        assert holding.arena is not None
        version, is_mapped = holding.version, self._is_mapped(sub, holding)
        if not holding.has_hashes(sub.view):
            await asyncio.to_thread(holding.numbers, sub.view)  # they are kept; to plan them takes long
        memory = holding.arena.lend()
        base = None if is_mapped else self._base(sub, holding)
        if is_mapped:
            holding.arena.leases[str(sub.peer.identity), version.branch, version.number] = sub.pid
        await sub.link.send(self._head(sub, holding, is_mapped=is_mapped, has_base=base is not None))
        numbers, index = holding.numbers(sub.view), 0
        while index < len(numbers):
            if holding.dead:
                return False
            first, looked = numbers[index], self._moved.count
            here = self._here(holding, sub.view, numbers[index : index + WINDOW_PARTS])
            hashes = list(here) if holding.has_hashes(sub.view) else await asyncio.to_thread(list, here)
            if not hashes:
                await self._moved.wait(after=looked)  # a thread may have looked, and what it looked for come meanwhile
                continue
            sent: list[int] = []
            buffers: list[memoryview] = []
            size = 0
            for n, found in enumerate(hashes):
                part = first + n
                if size >= WINDOW_BYTES:
                    hashes = hashes[:n]
                    break
                if not is_mapped and self._must_go(sub, version, part, found, base):
                    ranges = holding.ranges(sub.view, part)
                    buffers += editions.buffers_of(memory, ranges)
                    sent.append(part)
                    size += sum(n for _, n in ranges)
            head = frames.encode(frames.WeightsParts(version.branch, version.number, first, hashes, sent))
            await sub.link.send(Message(head, buffers=buffers))
            self.sent_bytes += size
            index += len(hashes)
        return await self._end(sub, holding)

    def _here(self, holding: Holding, view: bytes, numbers: Any) -> Iterator[int]:
        for number in numbers:
            found = holding.hash_of(view, number)
            if found is None:
                return
            yield found

    def _must_go(self, sub: Subscriber, version: PolicyVersion, part: int, found: int, base: list[int] | None) -> bool:
        if sub.partial == version and part < len(sub.have) and sub.have[part]:
            return False
        return base is None or base[part] != found

    async def _end(self, sub: Subscriber, holding: Holding) -> bool:
        while not holding.complete:
            if holding.dead:
                return False
            await self._moved.wait()
        numbers = holding.numbers(sub.view)
        hashes = [h for h in (holding.hash_of(sub.view, n) for n in numbers) if h is not None]
        self.remember(holding, sub.view, hashes)
        checksum = editions.combine(holding.catalog, holding.plain, hashes)
        version = holding.version
        end = frames.WeightsEnd(version.branch, version.number, holding.rank, checksum)
        await sub.link.send(Message(frames.encode(end)))
        return True

    # --- deltas -------------------------------------------------------------------------------------------------------
    def remember(self, holding: Holding, view: bytes, hashes: list[int]) -> None:
        """So that a next version can be told from this one without its bytes."""
        if holding.part_bytes != editions.DELTA_BYTES:
            return
        self._hashes[holding.version, view, holding.catalog, holding.part_bytes] = hashes
        versions = sorted({key[0] for key in self._hashes})
        for key in [k for k in self._hashes if k[0] in versions[:-HASHES_KEPT]]:
            del self._hashes[key]

    def _base(self, sub: Subscriber, holding: Holding) -> list[int] | None:
        """Hashes by part of the version that it has; None where it is sent everything."""
        if sub.here is None:
            return None
        found = self._hashes.get((sub.here, sub.view, holding.catalog, holding.part_bytes))
        if found is None:
            return None
        numbers = holding.numbers(sub.view)
        return [0] * numbers[0] + found if numbers else None

    async def close(self) -> None:
        tasks = [task for sub in self.all.values() for task in sub.tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
