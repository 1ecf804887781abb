"""A queue channel in a worker: units are announced to the driver and assigned by it, payloads go from worker to worker.

For: runtime.context, which hands it to the role as a `Channel`. What is kept, bounded and in which order is
queues.given; here is what moves.

    producer   put -> Announce ... Pull of a consumer -> Payload ... held -> parents acknowledged ... released -> freed
    consumer   Credit -> Assign or Round -> Pull -> Payload -> held -> take -> ack or drop

Everything for the driver is gathered and leaves in one batch per turn of the event loop.

| waits | for | unblocked by |
|---|---|---|
| put | room within the capacity | `released`, Capacity, Cancel; PEER_WAIT_S |
| take, take_round | units whose payload is here | a payload; the worker's stop |
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from time import monotonic
from typing import Any, Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker.channels import messages
from rlinf_worker.channels.account import Level
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.payload_type import PayloadType
from rlinf_worker.channels.protocol import FIRST_VERSION, ChannelClosed, Item, LineageKey, PolicyVersion, Round
from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.errors import PayloadError
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.queues import inline
from rlinf_worker.queues.given import Admitted, Parents, QueueConsumer, RoundPart
from rlinf_worker.queues.past import DroppedKeys, Finished
from rlinf_worker.queues.producing import Producing
from rlinf_worker.queues.units import INLINE, UnitId, UnitInfo

logger = logging.getLogger(__name__)

REPEAT_S: Final = 10.0
"""A finished unit is remembered so long: a message that was written into a stream which is still up 10 s later has
arrived, as gRPC's keepalive ends a dead stream within 4 s."""


class QueueChannel:
    """`Channel` over units. One per channel and worker; a role has one end of it."""

    def __init__(self, host: Host, spec: pb.ChannelSpec, parents: Parents[Item]) -> None:
        self._host, self.name, self._parents = host, spec.name, parents
        self.is_consumer, self.is_gang = spec.consumer == host.role, spec.rounds
        self.out = Producing(host, spec, parents)
        self.account_out, self.account_in = self.out.account, host.account(self.name, "consumer")
        self.account_in.units = True
        self._type = PayloadType.of(spec.payload)
        self._arrival = host.waits.signal()
        self._given = QueueConsumer[Message](window=messages.window(spec), rounds=spec.rounds)
        self.micro_batch = max(1, spec.micro_batch)
        self.account_in.level = self._level
        self._items: dict[UnitId, Item] = {}  # taken, for cancellation
        self._producers: dict[str, Endpoint] = {}
        self._to_hold: dict[int, list[str]] = {}  # by branch
        self._finished = Finished(repeat_s=REPEAT_S)
        self._unread: PayloadError | None = None  # a unit's, behind others of its micro-batch; raised by the next call
        self._to_pull: dict[str, list[UnitId]] = {}
        self.ended = DroppedKeys()

    # --- to the driver ------------------------------------------------------------------------------------------------
    def drain(self, out: list[pb.WorkerMessage]) -> None:
        """What has gathered since the last batch, credit last: it is for the state that the rest describes."""
        self._send_pulls()
        name = self.name
        if made := self.out.take_announcements():
            out.append(pb.WorkerMessage(announce=pb.Announce(channel=name, units=[u.to_pb() for u in made])))
        if self._to_hold:
            held, self._to_hold = self._to_hold, {}
            for branch, keys in held.items():
                out.append(pb.WorkerMessage(held=pb.Keys(channel=name, keys=keys, branch=branch)))
        self._tell_finished(out)
        if self.is_consumer and (credit := self._given.credit_due()) is not None:
            out.append(pb.WorkerMessage(credit=pb.Credit(channel=name, units=credit)))

    def _tell_finished(self, out: list[pb.WorkerMessage]) -> None:
        acked = dict[int, list[str]]()
        for unit, drop_reason in self._finished.tell(monotonic()):
            if drop_reason is None:
                acked.setdefault(unit.branch, []).append(unit.key)
            else:
                drop = pb.Drop(channel=self.name, key=unit.key, branch=unit.branch, reason=drop_reason)
                out.append(pb.WorkerMessage(drop=drop))
        for branch, keys in acked.items():
            out.append(pb.WorkerMessage(acked=pb.Keys(channel=self.name, keys=keys, branch=branch)))

    def on_hello(self) -> None:
        """A Hello is being made: it tells what is made and held here; what is finished follows."""
        self.out.take_announcements()
        self._to_hold.clear()
        self._finished.tell_again()
        self._given.hello()
        self._host.mark(self)

    def on_welcome(self, *, is_new_driver: bool) -> None:
        forgotten, here = self._given.welcomed(is_new_driver=is_new_driver)
        for unit in here:
            self._to_hold.setdefault(unit.branch, []).append(unit.key)
        if forgotten:
            logger.info("assignments of the old driver forgotten", extra={"units": forgotten})
        if forgotten or here:
            self._arrival.notify()
        self._host.mark(self)  # its credit, behind what the same batch says again

    def produced(self) -> list[pb.HeldUnit]:
        return [pb.HeldUnit(channel=self.name, unit=u.to_pb()) for u in self.out.shelf.units()]

    def taken(self) -> list[pb.HeldUnit]:
        """Finished ones too: a driver takes an acknowledgement only from whom it knows to hold the unit."""
        held = [*self._given.held_units(), *self._finished.units()]
        return [pb.HeldUnit(channel=self.name, unit=u.to_pb()) for u in held]

    @property
    def waiting(self) -> int:
        """Units (rounds) assigned here and not taken."""
        return self._given.waiting

    @property
    def in_hand(self) -> int:
        """Units that the role has taken and is not through with."""
        return len(self._items)

    @property
    def unfinished(self) -> int:
        """Units that others may still ask for; a worker that ends in good order waits for these."""
        return len(self.out.shelf)

    # --- the driver's word --------------------------------------------------------------------------------------------
    def on_released(self, keys: Iterable[str], *, branch: int) -> None:
        self.out.released([UnitId(branch, key) for key in keys])

    def on_held(self, keys: Iterable[str], *, branch: int) -> None:
        self.out.settle([UnitId(branch, key) for key in keys])

    def on_assign(self, assigned: Sequence[UnitInfo], producers: Iterable[Endpoint]) -> None:
        self._learn(producers)
        self._fetch(self._given.assign(assigned, now=monotonic()))

    def on_round(self, part: RoundPart, assigned: Sequence[UnitInfo], producers: Iterable[Endpoint]) -> None:
        self._learn(producers)
        self.ended.add(part.ended, step=part.step, branch=part.branch)
        self._fetch(self._given.assign_round(part, assigned, now=monotonic()))
        self._arrival.notify()  # its part may be empty

    def on_cancel(self, branch: int) -> None:
        for uid in self._given.cancel(branch):
            if (item := self._items.get(uid)) is not None:
                item.cancelled = True
        self.out.cancel(branch)
        self.ended.cancel(branch)
        self._host.mark(self)

    def on_spec(self, spec: pb.ChannelSpec) -> None:
        """Another plan's sizes, or the same."""
        self.out.shelf.resize(capacity_units=spec.capacity_units, capacity_bytes=spec.capacity_bytes)
        self._given.window, self.micro_batch = messages.window(spec), max(1, spec.micro_batch)
        self.out.room.notify()
        self._host.mark(self)

    def state_credit_anew(self) -> None:
        """The driver counts on none that was stated before."""
        self._given.forget_credit()
        self._host.mark(self)

    # --- fetching -----------------------------------------------------------------------------------------------------
    def _learn(self, producers: Iterable[Endpoint]) -> None:
        for endpoint in producers:
            self._producers[endpoint.worker] = endpoint

    def _fetch(self, admitted: Admitted) -> None:
        for unit in admitted.again:
            self._to_hold.setdefault(unit.branch, []).append(unit.key)
        for producer, group in groupby(admitted.absent, key=attrgetter("producer")):
            endpoint = self._producers.get(producer)
            why = "the round that it is of was taken without it"
            self._give_up(list(group), worker=producer, attempt=endpoint.attempt if endpoint else 0, why=why)
        for unit in sorted(admitted.to_pull, key=attrgetter("branch", "step")):
            if unit.producer == INLINE:
                self._arrived(unit.id, Message(b"", inline.inline_payload(unit)))
            else:
                self._to_pull.setdefault(unit.producer, []).append(unit.id)
        self._host.mark(self)

    def _send_pulls(self) -> None:
        wanted, self._to_pull = self._to_pull, {}
        for producer, uids in wanted.items():
            endpoint = self._producers.get(producer)
            if endpoint is None:
                self._lose(uids, worker=producer, attempt=0, why="the driver named no endpoint for it")
                continue
            peer = self._host.peers.want(endpoint, by=f"{self.name}/pull", at_once=True)
            peer.post(Message(frames.encode(frames.Pull(self.name, [(uid.branch, uid.key) for uid in uids]))))

    def on_up(self, peer: Peer) -> None:
        """A new link: what was asked over the old one is asked again."""
        endpoint = self._producers.get(peer.worker)
        if endpoint is not None and endpoint.attempt == peer.attempt:
            pulling = [(unit.branch, unit.key) for unit in self._given.pulling_from(peer.worker)]
            if pulling:
                peer.post(Message(frames.encode(frames.Pull(self.name, pulling))))

    def on_unreachable(self, peer: Peer, why: str) -> None:
        endpoint = self._producers.get(peer.worker)
        if endpoint is not None and endpoint.attempt == peer.attempt:
            uids = [unit.id for unit in self._given.pulling_from(peer.worker)]
            self._host.peers.unwant(peer, by=f"{self.name}/pull")
            if uids:
                self._lose(uids, worker=peer.worker, attempt=peer.attempt, why=why)

    def _lose(self, uids: Iterable[UnitId], *, worker: str, attempt: int, why: str, is_missing: bool = False) -> None:
        lost = self._given.lost(uids)
        if lost:
            self._give_up(lost, worker=worker, attempt=attempt, why=why, is_missing=is_missing)
            self._arrival.notify()  # a round goes on without them
            self._host.mark(self)

    def _give_up(
        self, lost: Sequence[UnitInfo], *, worker: str, attempt: int, why: str, is_missing: bool = False
    ) -> None:
        """By name: what else this worker fetches from there it will have."""
        self.account_in.dropped["PeerLost"] += len(lost)
        peer = self._host.peers.find(worker, attempt)
        if peer is None or peer.is_news():
            logger.warning("payloads were not fetched", extra={"peer": worker, "units": len(lost), "why": why})
        for branch in sorted({unit.branch for unit in lost}):
            keys = pb.Keys(channel=self.name, keys=[u.key for u in lost if u.branch == branch], branch=branch)
            said = pb.PeerLost(worker=worker, attempt=attempt, reason=why, units=keys, missing=is_missing)
            self._host.tell(pb.WorkerMessage(peer_lost=said))

    def on_payload(self, frame: frames.Payload, message: Message) -> None:
        if not self._arrived(UnitId(frame.branch, frame.key), message):
            self.account_in.duplicates += 1
            message.release()

    def _arrived(self, uid: UnitId, message: Message) -> bool:
        if self._given.arrived(uid, message) is None:
            return False
        if not self._given.is_early(uid):
            self._to_hold.setdefault(uid.branch, []).append(uid.key)
            self._host.mark(self)
            self._arrival.notify()
        return True

    def on_missing(self, peer: Peer, frame: frames.Missing) -> None:
        uids = [UnitId(branch, key) for branch, key in frame.units]
        why = f"it does not have {uids[0].key} (any more)"
        self._lose(uids, worker=peer.worker, attempt=peer.attempt, why=why, is_missing=True)

    def on_pull(self, peer: Peer, frame: frames.Pull) -> None:
        self.out.serve(peer, [UnitId(branch, key) for branch, key in frame.units])

    # --- producer -----------------------------------------------------------------------------------------------------
    async def put(
        self,
        payload: Any,
        *,
        key: LineageKey | str,
        step: int,
        branch: int = 0,
        version: PolicyVersion | None = None,
        weight: float = 1.0,
        parents: Sequence[Item] = (),
        to: WorkerId | None = None,
    ) -> None:
        if to is not None:
            raise UserError(
                f"channel {self.name!r} is a queue, whose units go to whoever has room", got=f"to={to!r}",
                next="leave out to=, or declare a stream",
            )  # fmt: skip
        unit = UnitInfo(
            key=key,
            branch=branch,
            step=step,
            weight=weight,
            version=version or FIRST_VERSION,
            parents=tuple(parent.key for parent in parents),
            producer=WorkerId(self._host.worker),
        )
        if await self.out.put(payload, unit, parents=parents):
            self._host.mark(self)

    def seal(self, parent: Item) -> None:
        if self._parents.seal(parent):
            self._host.finish_item(parent)

    def close(self) -> None:
        """The driver knows the units of a step: a queue needs no end of its own."""

    def spill(self) -> int:
        """The turn on the slots ends: what is kept there goes to host memory. Bytes that moved."""
        return self.out.shelf.spill()

    # --- consumer -----------------------------------------------------------------------------------------------------
    def _level(self) -> Level:
        depth, nbytes, since = self._given.level()
        return Level(depth, nbytes, monotonic() - since if since is not None else 0.0)

    async def take(self) -> Item:
        self._refuse(gang=True, instead="take_round()")
        if not self._given.has_next():
            await self._wait(self._given.has_next, "a unit")
        item = self.take_now()
        assert item is not None
        return item

    def take_now(self) -> Item | None:
        self._refuse(gang=True, instead="take_round()")
        given = self._given.take()
        if given is None:
            return None
        self._host.mark(self)
        return self._item(*given)

    async def take_batch(self, *, at_least: int = 1) -> list[Item]:
        self._refuse(gang=True, instead="take_round()")
        unread, self._unread = self._unread, None
        if unread is not None:
            raise unread

        def is_enough() -> bool:
            wanted = max(1, min(at_least, self.micro_batch))  # another plan may change it meanwhile
            return self._given.count_here(most=wanted) >= wanted

        if not is_enough():
            await self._wait(is_enough, "a micro-batch")
        batch: list[Item] = []
        try:
            while len(batch) < self.micro_batch and (item := self.take_now()) is not None:
                batch.append(item)
        except PayloadError as error:
            if not batch:
                raise
            self._unread = error
        return batch

    async def take_round(self) -> Round:
        self._refuse(gang=False, instead="take()")
        if not self._given.has_next():
            await self._wait(self._given.has_next, "a round")
        taken = self._given.take_round()
        assert taken is not None
        part, given = taken
        self.account_in.rounds += 1
        self.account_in.step = max(self.account_in.step, part.step)
        self._host.mark(self)
        try:
            items = tuple(self._item(unit, message) for unit, message in given)
        except PayloadError as error:
            self._host.fatal(error)  # the others train on this round: a rank without all of its part must not go on
            raise
        return Round(
            step=part.step, branch=part.branch, number=part.number, last=part.last, items=items,
            total_weight=part.total_weight,
        )  # fmt: skip

    def _refuse(self, *, gang: bool, instead: str) -> None:
        if self.is_gang is gang or not self.is_consumer:
            what = f"role {self._host.role!r} cannot take like this from channel {self.name!r}"
            kind = f"its consumer, {'of rounds' if self.is_gang else 'of single units'}"
            got = kind if self.is_consumer else "not its consumer"
            raise UserError(what, got=got, next=f"use {instead}")

    async def _wait(self, condition: Any, noun: str) -> None:
        what, ripe = f"{noun} of channel {self.name!r} for {self._host.worker}", self._given.is_quarter_full
        waiting = self._host.recorder.begin("wait_data")
        try:
            with self.account_in.waiting():
                await self._host.waits.until(condition, self._arrival, what=what, timeout_s=None, ripe=ripe)
        finally:
            waiting.end()

    def _item(self, unit: UnitInfo, message: Message) -> Item:
        try:
            payload = message.value()
            if self._type is not None:  # its producer may run another version of the flow's code
                self._type.check(payload, self.name, unit.key)
        except PayloadError as error:
            self.account_in.dropped[error.reason] += 1
            self._finish(unit.id, error.reason)
            raise
        nbytes = unit.size_bytes or message.nbytes
        item = Item(
            channel=self.name,
            key=LineageKey(unit.key),
            payload=payload,
            step=unit.step,
            branch=unit.branch,
            source=unit.producer,
            version=unit.version,
            weight=unit.weight,
        )
        if unit.producer != INLINE:
            message.release()
            item._release = lambda: setattr(item, "payload", None)
        self._items[unit.id] = item
        self.account_in.items += 1
        self.account_in.step = max(self.account_in.step, unit.step)
        self.account_in.bytes += nbytes
        return item

    async def __aiter__(self) -> AsyncIterator[Item]:
        while True:
            try:
                yield await self.take()
            except ChannelClosed:
                return

    def ack(self, item: Item) -> None:
        """Deferred while units made from it are not held by the next consumer."""
        item.release()
        if self._parents.seal(item):
            self.finish(item)

    def finish(self, item: Item) -> None:
        self._finish(UnitId(item.branch, item.key), None)

    def drop(self, item: Item, reason: str) -> None:
        item.release()
        self._parents.forget(item)
        self.account_in.dropped[reason] += 1
        if self._host.waits.stopped is not None:
            return  # not by decision: who leaves lets go of what it has, and the driver gives it to another
        self._finish(UnitId(item.branch, item.key), reason)

    def _finish(self, uid: UnitId, drop_reason: str | None) -> None:
        self._items.pop(uid, None)
        unit = self._given.finish(uid)
        if unit is not None:
            self._finished.add(unit, drop_reason)
            if self.is_gang and drop_reason is not None:
                self.ended.add([unit.key], step=unit.step, branch=unit.branch)
            self._host.mark(self)
