"""Sending weights to one subscriber: the newest version there is, part by part as the parts come about.

For: subscribers, which says to whom. Not for: what a version is (weights.edition).

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| serve, one per subscriber | parts of the newest version | a part; room in the link | `moved`; the link |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.channels.waiting import Signal
from rlinf_worker.links import frames
from rlinf_worker.links.errors import LinkBroken
from rlinf_worker.links.link import Link
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.weights import edition as editions
from rlinf_worker.weights.edition import Holding

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


class WeightsSender:
    """`newest` gives what there is to serve; `moved` is notified whenever that, or a part of it, has come about."""

    def __init__(
        self, *, moved: Signal, newest: Callable[[], Holding | None], sources: Callable[[], list[Any]]
    ) -> None:
        self._moved, self._newest, self._sources = moved, newest, sources
        self._hashes: dict[tuple[PolicyVersion, bytes, bytes, int], list[int]] = {}
        self.sent_bytes = 0

    async def serve(self, sub: Subscriber) -> None:
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
