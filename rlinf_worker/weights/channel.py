"""Publish and pull of policy weights: the stream channel `weights`, whose items are versions and not acknowledged.

For: runtime.context, as the role's `Weights`. What is published is publisher's, who is sent it subscribers', what comes
in receiver's; here is what a role calls and what must hold over all of it:

* a version is used only when every part and the whole have the checksum that they were published with;
* no version is ever seen with two checksums, here or at a receiver (InvariantBroken);
* publish returns when every subscriber has confirmed the version, or is gone.

| waits | for | unblocked by |
|---|---|---|
| publish | every subscriber's word that it has the version | WeightsHave; a link that breaks; PEER_WAIT_S |
| pull | a complete version >= at_least | the last part; a refusal; the worker's stop |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rlinf_worker.channels.host import PEER_WAIT_S, Host
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.weights import edition as editions
from rlinf_worker.weights import planning
from rlinf_worker.weights import tensors as conversion
from rlinf_worker.weights.arena import Arenas
from rlinf_worker.weights.checksums import Checksums
from rlinf_worker.weights.edition import Assembly, Holding
from rlinf_worker.weights.planning import View
from rlinf_worker.weights.publisher import Publisher
from rlinf_worker.weights.receiver import Receiver
from rlinf_worker.weights.subscribers import Subscribers

CHANNEL: Final = "weights"


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
        self._pulled: PolicyVersion | None = None
        self._tensors: tuple[Assembly, dict[str, Any]] | None = None
        self.checksums = Checksums()
        self.publisher = Publisher(
            arenas=self._arenas, moved=self._moved, checksums=self.checksums, rank=rank, gang=gang
        )
        self.subscribers = Subscribers(
            host,
            moved=self._moved,
            newest=self._newest,
            sources=self.publisher.sources,
            checksums=self.checksums,
            arenas=self._arenas,
        )
        self.receiver = Receiver(
            host, arenas=self._arenas, moved=self._moved, checksums=self.checksums, arrived=self._arrived
        )
        self.seconds = 0.0
        self.published = 0
        handlers = host.peers.handlers
        handlers[frames.WeightsHead] = self._timed(lambda p, f, m: self.receiver.on_head(p, f))
        handlers[frames.WeightsParts] = self._timed(self.receiver.on_parts)
        handlers[frames.WeightsEnd] = self._timed(lambda p, f, m: self.receiver.on_end(p, f))
        handlers[frames.WeightsMove] = lambda p, f, m: self.receiver.feeds.move(Endpoint.from_dict(f.endpoint))
        handlers[frames.WeightsSubscribe] = lambda p, f, m: self.subscribers.subscribe(p, f)
        handlers[frames.WeightsHave] = lambda p, f, m: self.subscribers.on_have(p, f)
        handlers[frames.WeightsRefused] = lambda p, f, m: self.subscribers.on_refused(p, f)
        handlers[frames.WeightsFree] = lambda p, f, m: self.subscribers.free(p, f)

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
                self.subscribers.remember(edition, planning.RAW_WHOLE, edition.hashes)
            self._pulled = version
            self._moved.notify()
            await host.waits.until(
                lambda: not self.subscribers.without(version),
                self._moved,
                what=f"sending weights {version}",
                timeout_s=PEER_WAIT_S,
                missing=lambda: ", ".join(self.subscribers.without(version)),
            )
        finally:
            t1 = host.recorder.now()
            self.seconds += t1 - t0
            host.recorder.add("weights", t0, t1, version=version.number)
        self.subscribers.check_refusals(version)
        self.published += 1
        self.account_out.items += 1
        self.account_out.bytes += edition.memory.nbytes

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
        self.publisher.close()
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
