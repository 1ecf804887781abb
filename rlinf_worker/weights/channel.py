"""Publish and pull of policy weights: the stream channel `weights`, whose items are versions and not acknowledged.

For: runtime.context, as the role's `Weights`. Who is sent what is published is subscribers', how it is
sent sending's, what comes in receiver's; here is what a role calls and what must hold over all of it:

* a version is used only when every part and the whole have the checksum that they were published with;
* no version is ever seen with two checksums, here or at a receiver (InvariantBroken);
* publish returns when every subscriber has confirmed the version, is gone, or is late.

| waits | for | unblocked by |
|---|---|---|
| publish | every subscriber's word that it has the version | WeightsHave; a link that breaks; RELAY_S + CONFIRM_S |
| pull | a complete version >= at_least | the last part; a refusal; the worker's stop; peer_wait_s |
| newer | a complete version > than | as pull; whoever raced it |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from rlinf_api.errors import DeadlineExceeded, InvariantBroken
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.channels.waiting import Signal
from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.weights import edition as editions
from rlinf_worker.weights import planning
from rlinf_worker.weights import tensors as conversion
from rlinf_worker.weights.arena import Arenas
from rlinf_worker.weights.checksums import OWN, Checksums
from rlinf_worker.weights.edition import Assembly, Edition, Holding
from rlinf_worker.weights.lending import Lender
from rlinf_worker.weights.planning import LentWeights, View
from rlinf_worker.weights.receiver import Receiver
from rlinf_worker.weights.sending import WeightsSender
from rlinf_worker.weights.subscribers import Subscribers

CHANNEL: Final = "weights"
SLOWEST: Final = 50_000_000
"""Bytes a second that a receiver gets at least, where all goes well: a hundredth of a fast network's."""
RELAY_S: Final = 2.0
"""Beyond that, for a version that comes by way of another receiver. Then the publisher sends it itself."""
PAUSE_MAX_S: Final = 60.0
"""Between two times that a receiver to which nothing comes asks the publisher again."""
CONFIRM_S: Final = 8.0
"""And then, until nobody waits for this receiver any more. Its agent knows after 20 s that it is frozen; a training
that waits for it loses a step or two, and one that does not loses nothing: it answers nothing without the version."""

INLINE_BYTES: Final = 8 << 20  # 2 ms of copying and hashing; below it threads gain nothing
FILLERS: Final = 2 if len(os.sched_getaffinity(0)) > 2 else 1
"""Threads that copy and hash a publication: two fill the memory's bandwidth. On two cores the second one takes its time
from whoever sends, receives and checks: 200 MB between pods in 68 ms instead of 76."""


Receives = Callable[[Peer, Any, Message], Awaitable[None]]


class Publisher:
    """What this worker itself publishes: one edition at a time, copied once, served until the next one is there."""

    def __init__(
        self, *, arenas: Arenas, moved: Signal, checksums: Checksums, rank: int,
        gang: Callable[[], Sequence[Endpoint]],
    ) -> None:  # fmt: skip
        self._arenas, self._moved, self._checksums = arenas, moved, checksums
        self._rank, self._gang = rank, gang
        self._threads: ThreadPoolExecutor | None = None
        self.edition: Edition | None = None

    def sources(self) -> list[dict[str, Any]]:
        """Where the other ranks are that publish the rest of it."""
        return [e.to_dict() for rank, e in enumerate(self._gang()) if rank != self._rank]

    async def make(self, version: PolicyVersion, tensors: Mapping[str, Any], *, delta: bool) -> Edition:
        edition = Edition(
            version, tensors, rank=self._rank, part_bytes=editions.DELTA_BYTES if delta else editions.PART_BYTES
        )
        self._check_gang(edition)
        if self.edition is not None:
            editions.check_schema(self.edition.schema, edition.schema, version=version)
        edition.lie_in(await self._arenas.taken(edition.memory.nbytes))
        is_again = self._checksums.knows(version, OWN)  # it has to be the same before anybody is sent it
        if not is_again:
            self._show(edition)
        await self._fill(edition)
        self._checksums.note(version, OWN, edition.checksum)
        if is_again:
            self._show(edition)
        if edition.is_whole:
            self._checksums.note(version, planning.RAW_WHOLE, edition.checksum)
        return edition

    def _check_gang(self, edition: Edition) -> None:
        count = len(self._gang())
        if edition.sources > 1 and edition.sources != count:
            raise InvariantBroken(
                f"weights {edition.version} are sharded over other ranks than the gang has",
                got=f"{edition.sources} shards", wanted=f"{count}", next="shard over all ranks, or publish whole",
            )  # fmt: skip

    def _show(self, edition: Edition) -> None:
        """From now on it is what subscribers are sent."""
        old, self.edition = self.edition, edition
        if old is not None:
            old.dead = True
            if old.arena is not None:
                old.arena.held -= 1
        self._moved.notify()

    async def _fill(self, edition: Edition) -> None:
        """In threads, so that parts are sent while others are copied, and that the loop hears the driver meanwhile."""
        if edition.memory.nbytes < INLINE_BYTES:
            edition.fill(filled=self._moved.notify)
        else:
            await self._fill_in_threads(edition)
        edition.finish()
        self._moved.notify()

    async def _fill_in_threads(self, edition: Edition) -> None:
        loop = asyncio.get_running_loop()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(FILLERS, thread_name_prefix="weights")

        def filled() -> None:
            loop.call_soon_threadsafe(self._moved.notify)

        shares = [
            loop.run_in_executor(self._threads, partial(edition.fill, n, FILLERS, filled=filled))
            for n in range(FILLERS)
        ]
        try:
            await asyncio.gather(*shares)
        except BaseException:
            edition.dead = True
            raise

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


class WeightsChannel:
    """Both ends; a worker has one."""

    name = CHANNEL

    def __init__(
        self, host: Host, *, shm_dir: str | None = None, rank: int = 0, gang: Callable[[], Sequence[Endpoint]] = list
    ) -> None:
        self._host = host
        self.account_out, self.account_in = host.account(CHANNEL, "producer"), host.account(CHANNEL, "consumer")
        self._arenas = Arenas(shm_dir)
        self._moved = host.waits.signal()
        self._arriving = asyncio.Lock()
        self._pulled: PolicyVersion | None = None
        self._tensors: tuple[Assembly, dict[str, Any]] | None = None
        self.checksums = Checksums()
        self._lender = Lender()
        self.publisher = Publisher(
            arenas=self._arenas, moved=self._moved, checksums=self.checksums, rank=rank, gang=gang
        )
        self.sender = WeightsSender(moved=self._moved, newest=self._newest, sources=self.publisher.sources)
        self.subscribers = Subscribers(
            host, moved=self._moved, sender=self.sender, checksums=self.checksums, arenas=self._arenas
        )
        self.receiver = Receiver(
            host, arenas=self._arenas, moved=self._moved, checksums=self.checksums, arrived=self._arrived
        )
        self.seconds = 0.0
        self.published = 0
        handlers = host.peers.handlers
        handlers[frames.WeightsHead] = self._one_by_one(self.receiver.on_head)
        handlers[frames.WeightsParts] = self._one_by_one(self.receiver.on_parts)
        handlers[frames.WeightsEnd] = self._one_by_one(self.receiver.on_end)
        handlers[frames.WeightsMove] = lambda p, f, m: self.receiver.feeds.move(Endpoint.from_dict(f.endpoint))
        handlers[frames.WeightsLeave] = lambda p, f, m: self.receiver.leave_relay(f.worker, f.attempt)
        handlers[frames.WeightsSubscribe] = lambda p, f, m: self.subscribers.subscribe(p, f)
        handlers[frames.WeightsHave] = lambda p, f, m: self.subscribers.on_have(p, f)
        handlers[frames.WeightsRefused] = lambda p, f, m: self.subscribers.on_refused(p, f)
        handlers[frames.WeightsFree] = lambda p, f, m: self.subscribers.free(p, f)

    def _one_by_one(self, handle: Receives) -> Receives:
        """What comes of versions, in the order in which it came, from whichever link: its work is done in threads."""
        recorder = self._host.recorder

        async def handled(peer: Peer, frame: Any, message: Message) -> None:
            try:
                async with self._arriving:
                    t0 = recorder.now()
                    await handle(peer, frame, message)
                    t1 = recorder.now()
            finally:
                message.release()
            self.seconds += t1 - t0
            recorder.add("weights", t0, t1, version=frame.number)

        return handled

    @property
    def version(self) -> PolicyVersion | None:
        return self._pulled

    @property
    def highest_branch(self) -> int:
        """The highest branch of the versions that this worker has, has had lately, or is being sent."""
        under_way = self.receiver.under_way
        return max(self.checksums.highest_branch, under_way.version.branch if under_way is not None else 0)

    def _newest(self) -> Holding | None:
        """What whoever subscribes here is sent: our own, or what we were sent, as far as it is here."""
        held = (self.publisher.edition, self.receiver.under_way, self.receiver.here)
        return max((h for h in held if h is not None and h.arena is not None), key=lambda h: h.version, default=None)

    # --- the driver's word --------------------------------------------------------------------------------------------
    def on_route(self, endpoint: Endpoint, *, outgoing: bool) -> None:
        is_relay = endpoint.worker.rpartition("/")[0] == self._host.role
        if not outgoing:
            self.receiver.on_route(endpoint, is_relay=is_relay)
        elif not is_relay:
            self.subscribers.is_root = True
            self._host.peers.want(endpoint, by=f"{CHANNEL}/out", at_once=False)

    def on_unroute(self, worker: str, attempt: int) -> None:
        self.receiver.feeds.on_unroute(worker, attempt)
        if (peer := self._host.peers.find(worker, attempt)) is not None:
            self._host.peers.unwant(peer, by=f"{CHANNEL}/out")
            self.subscribers.gone(peer)
        self._moved.notify()

    def on_up(self, peer: Peer) -> None:
        self.receiver.feeds.on_up(peer)

    # --- publishing ---------------------------------------------------------------------------------------------------
    async def publish(self, version: PolicyVersion, tensors: Mapping[str, Any], *, delta: bool = False) -> None:
        host = self._host
        t0 = host.recorder.now()
        try:
            edition = await self.publisher.make(version, tensors, delta=delta)
            if edition.is_whole:
                self.sender.remember(edition, planning.RAW_WHOLE, edition.hashes)
            self._pulled = version
            self._moved.notify()
            await self._confirmed(version, edition.memory.nbytes)
        finally:
            t1 = host.recorder.now()
            self.seconds += t1 - t0
            host.recorder.add("weights", t0, t1, version=version.number)
        self.subscribers.check_refusals(version)
        self.published += 1
        self.account_out.items += 1
        self.account_out.bytes += edition.memory.nbytes

    async def _confirmed(self, version: PolicyVersion, nbytes: int) -> None:
        """By everybody who does so in time. No receiver holds up the publisher for longer than that."""
        moving_s = nbytes / SLOWEST
        for limit_s, then in ((RELAY_S, self.subscribers.without_relays), (CONFIRM_S, self.subscribers.wait_no_more)):
            try:
                await self._host.waits.until(
                    lambda: not self.subscribers.without(version),
                    self._moved,
                    what=f"sending weights {version}",
                    timeout_s=limit_s + moving_s,
                    missing=lambda: ", ".join(str(sub.peer.identity) for sub in self.subscribers.without(version)),
                )
            except DeadlineExceeded:
                then(version)
            else:
                return

    # --- receiving ----------------------------------------------------------------------------------------------------
    def select(self, view: View) -> None:
        raw = planning.raw_view(view)
        if raw != self.receiver.view:
            self._tensors = None
            self.receiver.select(raw)

    def _arrived(self, assembly: Assembly) -> None:
        self.account_in.items += 1
        self.account_in.bytes += assembly.nbytes
        self._tensors = None

    async def pull(
        self, at_least: PolicyVersion, *, into: Mapping[str, Any] | None = None
    ) -> tuple[PolicyVersion, Mapping[str, Any]]:
        host, receiver = self._host, self.receiver
        t0 = host.recorder.now()

        def is_here() -> bool:
            return receiver.here is not None and receiver.here.version >= at_least

        if await self._until(lambda: is_here() or receiver.refusal is not None, f"weights {at_least} or newer"):
            host.recorder.add("wait_data", t0, host.recorder.now(), on=self.account_in.end)
        if not is_here() and receiver.refusal is not None:
            raise receiver.refusal
        here = receiver.here
        assert here is not None
        if self._tensors is None or self._tensors[0] is not here:
            self._tensors = here, here.arrays()
        found = self._tensors[1]
        if into is not None:
            await self._copy(into, here, found)
        self._pulled = here.version
        receiver.give_back()
        # Others are served out of this memory, and the next version may be a difference to it.
        return here.version, {name: conversion.read_only(value) for name, value in found.items()}

    async def _copy(self, into: Mapping[str, Any], here: Assembly, found: Mapping[str, Any]) -> None:
        editions.check_targets(into, found, version=here.version)
        if here.nbytes < INLINE_BYTES:
            editions.copy_all(into, found)
            return
        copying = asyncio.ensure_future(asyncio.to_thread(editions.copy_all, into, found))
        try:
            await asyncio.shield(copying)
        finally:
            await asyncio.wait([copying])  # a role that is cancelled has its tensors for itself

    @contextlib.asynccontextmanager
    async def lent(self, at_least: PolicyVersion) -> AsyncIterator[LentWeights]:
        await self.pull(at_least)
        here = self.receiver.here
        assert here is not None
        try:
            async with self._lender.lend(here) as lent:
                yield lent
        finally:
            self.receiver.give_back()

    async def newer(self, than: PolicyVersion) -> PolicyVersion:
        receiver = self.receiver

        def is_news() -> bool:
            return (receiver.here is not None and receiver.here.version > than) or receiver.refusal is not None

        await self._host.waits.beside(is_news, self._moved)
        if receiver.here is not None and receiver.here.version > than:
            return receiver.here.version
        assert receiver.refusal is not None
        raise receiver.refusal

    async def _until(self, holds: Callable[[], bool], what: str) -> bool:
        """Whether there was a wait. The publisher is asked again where nothing comes by way of another: after a pause,
        then after twice as long, as the next version may not be there yet. peer_wait_s count from what came last."""
        waits, receiver, idle_s, pause_s, has_waited = self._host.waits, self.receiver, 0.0, RELAY_S, False
        while idle_s < self._host.peer_wait_s:
            came = receiver.arrivals
            try:
                return await waits.until(holds, self._moved, what=what, timeout_s=pause_s) > 0 or has_waited
            except DeadlineExceeded:
                has_waited = True
            if receiver.arrivals != came:
                idle_s, pause_s = 0.0, RELAY_S
            else:
                idle_s, pause_s = idle_s + pause_s, min(2 * pause_s, PAUSE_MAX_S)
                receiver.leave_relays()
        missing = ", ".join(str(peer.identity) for peer in receiver.feeds.all) or "a route to whoever has them"
        raise DeadlineExceeded(f"{what} for {self._host.worker}", timeout_s=self._host.peer_wait_s, missing=missing)

    async def close(self) -> None:
        self.publisher.close()
        await self.subscribers.close()
        await self.receiver.close()
