"""Publish and pull of policy weights: the stream channel `weights`, whose items are versions and not acknowledged.

For: runtime.context, as the role's `Weights`. What a version is made of is weights.edition; here is what moves.

A receiver's route has one task that sends the newest edition which this link has not carried: after a publish, after a
new route (a late joiner) and after a link was made anew. So nothing has to be acknowledged: what did not arrive whole
is sent again, and only the newest version matters.

| waits | for | unblocked by |
|---|---|---|
| publish | every linked receiver to be sent it | _serve; a link that breaks; PEER_WAIT_S |
| _serve, one per receiver | a newer edition, a link | publish; on_up |
| pull | a complete version >= at_least | the last bucket; the worker's stop |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels import frames
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.message import Message
from rlinf_worker.links.protocol import LinkBroken, PayloadError
from rlinf_worker.runtime.host import PEER_WAIT_S, Host
from rlinf_worker.runtime.peers import Peer
from rlinf_worker.weights import edition as editions
from rlinf_worker.weights.edition import Assembly, Edition, Schema, WeightsCorrupt

logger = logging.getLogger(__name__)

CHANNEL = "weights"
REMEMBERED = 64  # checksums of past versions; a version that comes back comes soon


@dataclass(slots=True)
class _Receiver:
    peer: Peer
    task: asyncio.Task[None] | None = None
    sent: Edition | None = None  # over the present link


class WeightsChannel:
    """Both ends; a worker has one."""

    name = CHANNEL

    def __init__(self, host: Host) -> None:
        self._host = host
        self.account_out, self.account_in = host.account(CHANNEL, "producer"), host.account(CHANNEL, "consumer")
        self._edition: Edition | None = None
        self._receivers: dict[tuple[str, int], _Receiver] = {}
        self._news, self._progress = host.waits.signal(), host.waits.signal()
        self._arrival = host.waits.signal()
        self._assemblies: dict[Peer, Assembly] = {}
        self._here: tuple[PolicyVersion, dict[str, Any]] | None = None
        self._schema: Schema | None = None
        self._pulled: PolicyVersion | None = None
        self._checksums: dict[PolicyVersion, int] = {}
        self.seconds = 0.0
        self.corrupt = 0

    @property
    def version(self) -> PolicyVersion | None:
        return self._pulled

    def _remember(self, version: PolicyVersion, checksum: int) -> None:
        known = self._checksums.setdefault(version, checksum)
        if known != checksum:
            raise InvariantBroken(
                f"weights {version} exist twice with different bytes", got=f"checksum {checksum:016x}",
                wanted=f"{known:016x}", next="a restored actor must publish on a new branch",
            )  # fmt: skip
        while len(self._checksums) > REMEMBERED:
            del self._checksums[next(iter(self._checksums))]

    # --- the driver's word --------------------------------------------------------------------------------------------
    def on_route(self, endpoint: Endpoint, *, outgoing: bool, credit: int) -> None:
        peer = self._host.peers.want(endpoint, by=f"{CHANNEL}/{outgoing}", at_once=False)
        life = (endpoint.worker, endpoint.attempt)
        if outgoing and life not in self._receivers:
            receiver = self._receivers[life] = _Receiver(peer)
            receiver.task = asyncio.get_running_loop().create_task(self._serve(receiver), name=f"weights to {life}")
            receiver.task.add_done_callback(self._served)

    def on_unroute(self, worker: str, attempt: int) -> None:
        receiver = self._receivers.pop((worker, attempt), None)
        if receiver is not None and receiver.task is not None:
            receiver.task.cancel()
            self._host.peers.unwant(receiver.peer, by=f"{CHANNEL}/True")
        elif (peer := self._host.peers.find(worker, attempt)) is not None:
            self._host.peers.unwant(peer, by=f"{CHANNEL}/False")
        self._progress.notify()

    def on_up(self, peer: Peer) -> None:
        self._assemblies.pop(peer, None)
        receiver = self._receivers.get((peer.worker, peer.attempt))
        if receiver is not None:
            receiver.sent = None
            self._news.notify()

    # --- publishing ---------------------------------------------------------------------------------------------------
    async def publish(self, version: PolicyVersion, tensors: Mapping[str, Any]) -> None:
        host = self._host
        t0 = host.recorder.now()
        edition = editions.make(version, tensors)
        if self._schema is not None:
            editions.check_schema(self._schema, edition.schema, version=version)
        self._remember(version, edition.checksum)
        self._schema, self._edition, self._pulled = edition.schema, edition, version
        self._news.notify()
        try:
            await host.waits.until(
                lambda: not self._unserved(edition),
                self._progress,
                what=f"sending weights {version}",
                timeout_s=PEER_WAIT_S,
                missing=", ".join(self._unserved(edition)),
            )
        finally:
            t1 = host.recorder.now()
            self.seconds += t1 - t0
            host.recorder.add("weights", t0, t1, version=version.number)
        self.account_out.items += 1
        self.account_out.bytes += edition.nbytes

    def _unserved(self, edition: Edition) -> list[str]:
        """Receivers that have a link and not yet this edition, or a newer one."""
        return [
            str(r.peer.identity)
            for r in self._receivers.values()
            if r.peer.link is not None and (r.sent is None or r.sent.version < edition.version)
        ]

    def _served(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._host.fatal(error)

    async def _serve(self, receiver: _Receiver) -> None:
        while True:
            edition = self._edition
            if edition is None or receiver.sent is edition or receiver.peer.link is None:
                await self._news.wait()
                continue
            link = receiver.peer.link
            try:
                complete = await self._send(receiver, edition)
            except LinkBroken:
                self._progress.notify()
                if receiver.peer.link is link or receiver.peer.link is None:
                    await self._news.wait()  # on_up
                continue
            if complete:
                receiver.sent = edition
                self._progress.notify()

    async def _send(self, receiver: _Receiver, edition: Edition) -> bool:
        """False: the link or the edition was replaced half-way."""
        peer, link = receiver.peer, receiver.peer.link
        await peer.send(Message(frames.encode(edition.head())))
        for index, bucket in enumerate(edition.buckets):
            if peer.link is not link or self._edition is not edition:
                return False
            head = frames.encode(edition.bucket_head(index))
            await peer.send(Message(head, body=bucket.body, buffers=bucket.buffers))
        return peer.link is link

    # --- receiving ----------------------------------------------------------------------------------------------------
    def on_head(self, peer: Peer, frame: frames.WeightsHead, message: Message) -> None:
        assembly = Assembly(frame)
        self._remember(assembly.version, assembly.checksum)
        if frame.buckets == 0:
            self._complete(assembly)
        elif self._here is None or assembly.version > self._here[0]:
            self._assemblies[peer] = assembly
        else:
            self._assemblies.pop(peer, None)  # known already: its buckets are let pass

    def on_bucket(self, peer: Peer, frame: frames.WeightsBucket, message: Message) -> None:
        assembly = self._assemblies.get(peer)
        if assembly is None or assembly.version != PolicyVersion(frame.branch, frame.number):
            message.release()
            return
        t0 = self._host.recorder.now()
        body, buffers = message.encoded()
        try:
            if assembly.add(frame, body, buffers):
                del self._assemblies[peer]
                self._complete(assembly)
        except (WeightsCorrupt, PayloadError) as error:
            self.corrupt += 1
            self._assemblies.pop(peer, None)
            logger.error("weights refused, asking again", extra={"peer": str(peer.identity), "error": str(error)})
            if peer.link is not None:
                peer.link.abort(str(error))  # the next link carries the newest version from its beginning
        finally:
            message.release()
            t1 = self._host.recorder.now()
            self.seconds += t1 - t0
            self._host.recorder.add("weights", t0, t1, version=frame.number)

    def _complete(self, assembly: Assembly) -> None:
        tensors = assembly.finish()
        if self._schema is not None:
            editions.check_schema(self._schema, assembly.schema, version=assembly.version)
        self._schema = assembly.schema
        self.account_in.items += 1
        self.account_in.bytes += assembly.nbytes
        if self._here is None or assembly.version > self._here[0]:
            self._here = (assembly.version, tensors)
            self._arrival.notify()

    async def pull(self, at_least: PolicyVersion) -> tuple[PolicyVersion, Mapping[str, Any]]:
        host = self._host
        t0 = host.recorder.now()
        waited = await host.waits.until(
            lambda: self._here is not None and self._here[0] >= at_least,
            self._arrival,
            what=f"weights {at_least} or newer for {host.worker}",
            timeout_s=None,
        )
        if waited:
            host.recorder.add("wait_data", t0, host.recorder.now())
        assert self._here is not None
        self._pulled = self._here[0]
        return self._here

    def newest(self) -> PolicyVersion | None:
        """Complete and here, pulled or not."""
        return self._here[0] if self._here is not None else None

    async def close(self) -> None:
        tasks = [r.task for r in self._receivers.values() if r.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
