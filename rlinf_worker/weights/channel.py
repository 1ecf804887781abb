"""Publish and pull of policy weights: the stream channel `weights`, whose items are versions and not acknowledged.

For: runtime.context, as the role's `Weights`. What a version is made of is edition, who is sent what is
subscribers, where it comes from is receiver; here is what a role calls and what must hold over all of it:

* a version is used only when every part and the whole have the checksum that they were published with;
* no version is ever seen with two checksums, here or at a receiver (InvariantBroken);
* publish returns when every subscriber has confirmed the version, or is gone.

| waits | for | unblocked by |
|---|---|---|
| publish | every subscriber's word that it has the version | WeightsHave; a link that breaks; PEER_WAIT_S |
| pull | a complete version >= at_least | the last part; a refusal; the worker's stop |
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels.host import PEER_WAIT_S, Host
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.weights import edition as editions
from rlinf_worker.weights import tensors as conversion
from rlinf_worker.weights.arena import Arenas
from rlinf_worker.weights.edition import Assembly, Edition, Holding, Plans, SchemaChanged
from rlinf_worker.weights.planning import View
from rlinf_worker.weights.receiver import Receiver
from rlinf_worker.weights.subscribers import Subscribers

logger = logging.getLogger(__name__)

CHANNEL: Final = "weights"
REMEMBERED: Final = 64  # checksums of past versions; a version that comes back comes soon
INLINE_BYTES: Final = 8 << 20  # 2 ms of copying and hashing; below it threads gain nothing
FILLERS: Final = 2 if len(os.sched_getaffinity(0)) > 2 else 1
"""Threads that copy and hash a publication: two fill the memory's bandwidth. On two cores the second one takes its time
from whoever sends, receives and checks: 200 MB between pods in 68 ms instead of 76."""
OWN: Final = b""  # in the place of a view: what this rank itself publishes


class WeightsChannel:
    """Both ends; a worker has one."""

    name = CHANNEL

    def __init__(
        self, host: Host, *, shm_dir: str | None = None, rank: int = 0, gang: Callable[[], Sequence[Endpoint]] = list
    ) -> None:
        self._host, self._rank, self._gang = host, rank, gang
        self.account_out, self.account_in = host.account(CHANNEL, "producer"), host.account(CHANNEL, "consumer")
        self._plans, self._arenas = Plans(), Arenas(shm_dir)
        self._moved = host.waits.signal()
        self._edition: Edition | None = None
        self._pulled: PolicyVersion | None = None
        self._tensors: tuple[Assembly, dict[str, Any]] | None = None
        self._checksums: dict[tuple[PolicyVersion, bytes], int] = {}
        self.subscribers = Subscribers(host, moved=self._moved, newest=self._newest, sources=self._sources)
        self.receiver = Receiver(
            host, arenas=self._arenas, plans=self._plans, moved=self._moved, remember=self._remember,
            arrived=self._arrived,
        )  # fmt: skip
        self._threads: ThreadPoolExecutor | None = None
        self.seconds = 0.0
        self.conflicts = self.published = 0
        handlers = host.peers.handlers
        handlers[frames.WeightsHead] = self._timed(lambda p, f, m: self.receiver.on_head(p, f))
        handlers[frames.WeightsParts] = self._timed(self.receiver.on_parts)
        handlers[frames.WeightsEnd] = self._timed(lambda p, f, m: self.receiver.on_end(p, f))
        handlers[frames.WeightsMove] = lambda p, f, m: self.receiver.on_move(p, f)
        handlers[frames.WeightsSubscribe] = lambda p, f, m: self._on_subscribe(p, f)
        handlers[frames.WeightsHave] = lambda p, f, m: self._on_have(p, f)
        handlers[frames.WeightsRefused] = lambda p, f, m: self._on_refused(p, f)
        handlers[frames.WeightsFree] = lambda p, f, m: self.subscribers.free(p, f)
        host.peers.on_unreachable.append(self.receiver.on_unreachable)

    def _timed(self, handle: Callable[[Peer, Any, Message], None]) -> Callable[[Peer, Any, Message], None]:
        recorder = self._host.recorder

        def timed(peer: Peer, frame: Any, message: Message) -> None:
            t0 = recorder.now()
            try:
                handle(peer, frame, message)
            finally:
                message.release()
                t1 = recorder.now()
                self.seconds += t1 - t0
                recorder.add("weights", t0, t1, version=frame.number)

        return timed

    @property
    def version(self) -> PolicyVersion | None:
        return self._pulled

    @property
    def highest_branch(self) -> int:
        """The highest branch of the versions that this worker has, has had lately, or is being sent."""
        under_way = self.receiver.under_way
        coming = [under_way.version] if under_way is not None else []
        return max((v.branch for v in [*coming, *(version for version, _ in self._checksums)]), default=0)

    @property
    def corrupt(self) -> int:
        return self.receiver.corrupt

    def _remember(self, version: PolicyVersion, view: bytes, checksum: int) -> None:
        if (version, view) not in self._checksums and logger.isEnabledFor(logging.DEBUG):  # read by tools/chaos
            extra = {"weights_version": str(version), "view": view.hex()[:32], "checksum": f"{checksum:016x}"}
            logger.debug("weights seen", extra=extra)
        known = self._checksums.setdefault((version, view), checksum)
        if known != checksum:
            self.conflicts += 1
            raise InvariantBroken(
                f"weights {version} exist twice with different bytes", got=f"checksum {checksum:016x}",
                wanted=f"{known:016x}", next="a restored actor must publish on a new branch",
            )  # fmt: skip
        while len(self._checksums) > REMEMBERED:
            del self._checksums[next(iter(self._checksums))]

    def _newest(self) -> Holding | None:
        """What whoever subscribes here is sent: our own, or what we were sent, as far as it is here."""
        under_way = self.receiver.under_way
        if under_way is not None and under_way.arena is None:
            under_way = None
        found = [h for h in (self._edition, under_way, self.receiver.here) if h is not None and h.arena is not None]
        return max(found, key=lambda h: h.version, default=None)

    def _sources(self) -> list[dict[str, Any]]:
        return [e.to_dict() for rank, e in enumerate(self._gang()) if rank != self._rank]

    # --- the driver's word --------------------------------------------------------------------------------------------
    def on_route(self, endpoint: Endpoint, *, outgoing: bool, credit: int, number: int = 0) -> None:
        is_relay = endpoint.worker.rpartition("/")[0] == self._host.role
        if not outgoing:
            self.receiver.on_route(endpoint, is_relay=is_relay)
        elif not is_relay:
            self.subscribers.is_root = True
            self._host.peers.want(endpoint, by=f"{CHANNEL}/out", at_once=False)

    def on_unroute(self, worker: str, attempt: int, *, number: int = 0) -> None:
        self.receiver.on_unroute(worker, attempt)
        if (peer := self._host.peers.find(worker, attempt)) is not None:
            self._host.peers.unwant(peer, by=f"{CHANNEL}/out")
            self.subscribers.gone(peer)
        self._moved.notify()

    def on_up(self, peer: Peer) -> None:
        self.receiver.on_up(peer)

    # --- publishing ---------------------------------------------------------------------------------------------------
    async def publish(self, version: PolicyVersion, tensors: Mapping[str, Any], *, delta: bool = False) -> None:
        host = self._host
        t0 = host.recorder.now()
        try:
            edition = await self._make(version, tensors, delta=delta)
            await host.waits.until(
                lambda: not self._unserved(edition),
                self._moved,
                what=f"sending weights {version}",
                timeout_s=PEER_WAIT_S,
                missing=lambda: ", ".join(self._unserved(edition)),
            )
        finally:
            t1 = host.recorder.now()
            self.seconds += t1 - t0
            host.recorder.add("weights", t0, t1, version=version.number)
        self._raise_if_refused(version)
        self.published += 1
        self.account_out.items += 1
        self.account_out.bytes += edition.memory.nbytes

    async def _make(self, version: PolicyVersion, tensors: Mapping[str, Any], *, delta: bool) -> Edition:
        edition = Edition(
            version, tensors, rank=self._rank, plans=self._plans,
            part_bytes=editions.DELTA_BYTES if delta else editions.PART_BYTES,
        )  # fmt: skip
        self._check_gang(edition)
        old = self._edition
        if old is not None:
            editions.check_schema(old.schema, edition.schema, version=version)
        nbytes = edition.memory.nbytes
        if self._arenas.makes(nbytes):  # zeroing its pages takes 0.4 s per GB
            edition.arena = await asyncio.to_thread(self._arenas.take, nbytes)
        else:
            edition.arena = self._arenas.take(nbytes)
        is_again = (version, OWN) in self._checksums
        if not is_again:
            self._show(edition)
        await self._fill(edition)
        if is_again:
            self._remember(version, OWN, edition.checksum)
            self._show(edition)
        else:
            self._checked(version, edition)
        self._pulled = version
        self._moved.notify()
        return edition

    async def _fill(self, edition: Edition) -> None:
        """In threads, so that parts are sent while others are copied, and that the loop hears the driver meanwhile."""
        if edition.memory.nbytes < INLINE_BYTES:
            for _ in edition.fill():
                self._moved.notify()
            return
        loop = asyncio.get_running_loop()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(FILLERS, thread_name_prefix="weights")
        edition.settle()

        def filled() -> None:
            loop.call_soon_threadsafe(self._moved.notify)

        shares = [
            loop.run_in_executor(self._threads, partial(edition.fill_share, n, FILLERS, filled=filled))
            for n in range(FILLERS)
        ]
        try:
            await asyncio.gather(*shares)
        except BaseException:
            edition.dead = True
            raise
        edition.finish()
        self._moved.notify()

    def _checked(self, version: PolicyVersion, edition: Edition) -> None:
        self._remember(version, OWN, edition.checksum)
        if edition.is_whole:
            self._remember(version, editions.RAW_WHOLE, edition.checksum)
            self.subscribers.remember(edition, editions.RAW_WHOLE, edition.hashes)

    def _show(self, edition: Edition) -> None:
        """From now on it is what subscribers are sent."""
        old, self._edition = self._edition, edition
        if old is not None:
            old.dead = True
            if old.arena is not None:
                old.arena.held -= 1
        self._moved.notify()

    def _check_gang(self, edition: Edition) -> None:
        count = len(self._gang())
        if edition.sources > 1 and edition.sources != count:
            raise InvariantBroken(
                f"weights {edition.version} are sharded over other ranks than the gang has",
                got=f"{edition.sources} shards", wanted=f"{count}", next="shard over all ranks, or publish whole",
            )  # fmt: skip

    def _unserved(self, edition: Edition) -> list[str]:
        """Subscribers that have a link and have not said that they have this version, or a newer one."""
        return [
            str(s.peer.identity)
            for s in self.subscribers.all.values()
            if s.alive and not s.refused and s.lacks(edition.version)
        ]

    def _raise_if_refused(self, version: PolicyVersion) -> None:
        for sub in self.subscribers.all.values():
            if sub.refused:
                raise SchemaChanged(f"worker {sub.peer.identity} refused weights {version}", got=sub.refused)

    # --- subscribers' words -------------------------------------------------------------------------------------------
    def _on_subscribe(self, peer: Peer, frame: frames.WeightsSubscribe) -> None:
        self.subscribers.subscribe(peer, frame)
        if frame.here is not None:
            self._compare(PolicyVersion(*frame.here), frame.view, frame.checksum)

    def _on_have(self, peer: Peer, frame: frames.WeightsHave) -> None:
        version = PolicyVersion(frame.branch, frame.number)
        self._compare(version, frame.view, frame.checksum)
        sub = self.subscribers.all.get(peer)
        if sub is not None and sub.lacks(version):
            sub.here = version
            self._moved.notify()

    def _compare(self, version: PolicyVersion, view: bytes, checksum: int) -> None:
        """One number for one view of a version, whoever says it."""
        try:
            self._remember(version, view, checksum)
        except InvariantBroken as error:
            self._host.fatal(error)

    def _on_refused(self, peer: Peer, frame: frames.WeightsRefused) -> None:
        sub = self.subscribers.all.get(peer)
        logger.error("a receiver refused weights", extra={"peer": str(peer.identity), "why": frame.why})
        if sub is not None:
            sub.refused = frame.why
            self._moved.notify()

    # --- receiving ----------------------------------------------------------------------------------------------------
    def select(self, view: View) -> None:
        raw = editions.raw_view(view)
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

        waited = await host.waits.until(
            lambda: is_here() or receiver.refusal is not None,
            self._moved,
            what=f"weights {at_least} or newer for {host.worker}",
            timeout_s=None,
        )
        if waited:
            host.recorder.add("wait_data", t0, host.recorder.now())
        if not is_here() and receiver.refusal is not None:
            raise receiver.refusal
        here = receiver.here
        assert here is not None
        if self._tensors is None or self._tensors[0] is not here:
            self._tensors = here, here.arrays()
        found = self._tensors[1]
        if into is not None:
            _copy(into, found, version=here.version)
        self._pulled = here.version
        receiver.give_back()
        # Others are served out of this memory, and the next version may be a difference to it.
        return here.version, {name: conversion.read_only(value) for name, value in found.items()}

    def newest(self) -> PolicyVersion | None:
        """Complete and here, pulled or not."""
        return self.receiver.here.version if self.receiver.here is not None else None

    async def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        await self.subscribers.close()
        await self.receiver.close()


def _copy(into: Mapping[str, Any], found: Mapping[str, Any], *, version: PolicyVersion) -> None:
    def schema(values: Mapping[str, Any]) -> editions.Schema:
        return [
            (name, conversion.dtype_of(v, name=name)[0].removeprefix(conversion.TORCH), [*getattr(v, "shape", ())])
            for name, v in sorted(values.items())
        ]

    editions.check_schema(schema(into), schema(found), version=version)
    for name, target in into.items():
        conversion.copy_into(target, found[name])
