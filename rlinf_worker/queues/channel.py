"""A queue as its role calls it: what it makes is put, what it is given is taken and acknowledged.

For: runtime.context, which hands it to the role as a `Channel`. Its two ends are queues.producing and queues.consuming,
which hear the driver and peers; a role has one of them. Units of several queues with the same key are `Joined`.

| waits | for | unblocked by |
|---|---|---|
| take, take_round | units whose payload is here | a payload; the worker's stop |
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_worker.channels import messages, plain
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.payload_type import PayloadType
from rlinf_worker.channels.protocol import PARTIAL_BYTES, Channel, Item, LineageKey, Round
from rlinf_worker.channels.waiting import each
from rlinf_worker.links.errors import PayloadError
from rlinf_worker.links.message import Message
from rlinf_worker.queues.consuming import Consuming
from rlinf_worker.queues.parents import Parents
from rlinf_worker.queues.producing import Producing
from rlinf_worker.queues.units import INLINE, UnitId, UnitInfo


class QueueChannel:
    """`Channel` over units. One per channel and worker."""

    def __init__(self, host: Host, spec: pb.ChannelSpec, parents: Parents[Item]) -> None:
        self._host, self.name, self._parents = host, spec.name, parents
        self.out, self.into = Producing(host, spec, parents), Consuming(host, spec)
        self.account_out, self.account_in = self.out.account, self.into.account
        self.micro_batch = max(1, spec.micro_batch)
        self.put = self.out.put
        self._type = PayloadType.of(spec.payload)
        self._items: dict[UnitId, Item] = {}  # taken, for cancellation
        self._unread: PayloadError | None = None  # a unit's, behind others of its micro-batch; raised by the next call

    @property
    def in_hand(self) -> int:
        """Units that the role has taken and is not through with."""
        return len(self._items)

    # --- the driver's word, where it is for both ends -----------------------------------------------------------------
    def on_cancel(self, said: pb.Cancel) -> None:
        for item in [item for uid in self.into.cancel(said) if (item := self._items.get(uid)) is not None]:
            item.cancel()
        if not said.keys:
            self.out.cancel(said.branch)

    def on_spec(self, spec: pb.ChannelSpec) -> None:
        """Another plan's sizes, or the same."""
        self.micro_batch = max(1, spec.micro_batch)
        self.out.resize(spec)
        self.into.resize(messages.window(spec))

    # --- consumer -----------------------------------------------------------------------------------------------------
    async def take(self) -> Item:
        self._refuse_take(gang=True, instead="take_round()")
        self.into.asks()
        if not self.into.given.has_next():
            await self._wait(self.into.given.has_next, "a unit")
        item = self.take_now()
        assert item is not None
        return item

    def take_now(self) -> Item | None:
        self._refuse_take(gang=True, instead="take_round()")
        given = self.into.given.take()
        if given is None:
            return None
        self.into.took()
        self.into.gave()
        return self._item(*given)

    def room(self, units: int) -> None:
        self._refuse(gang=True, instead="take_round()")
        self.into.room(units)

    async def take_batch(self, *, at_least: int = 1) -> list[Item]:
        self._refuse_take(gang=True, instead="take_round()")
        unread, self._unread = self._unread, None
        if unread is not None:
            raise unread
        self.into.asks()

        def is_enough() -> bool:
            wanted = max(1, min(at_least, self.micro_batch))  # another plan may change it meanwhile
            return self.into.given.count_here(most=wanted) >= wanted

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
        self._refuse_take(gang=False, instead="take()")
        if not self.into.given.has_next():
            await self._wait(self.into.given.has_next, "a round")
        taken = self.into.given.take_round()
        assert taken is not None
        part, given = taken
        self.account_in.rounds += 1
        self.account_in.step = max(self.account_in.step, part.step)
        self._host.taken(part.step)
        self.into.took()
        try:
            items = tuple(self._item(unit, message) for unit, message in given)
        except PayloadError as error:
            self._host.fatal(error)  # the others train on this round: a rank without all of its part must not go on
            raise
        return Round(
            step=part.step, branch=part.branch, number=part.number, last=part.last, items=items,
            total_weight=part.total_weight,
        )  # fmt: skip

    def _refuse_take(self, *, gang: bool, instead: str) -> None:
        self._refuse(gang=gang, instead=instead)
        self._host.check_begun("take", self.name)

    def _refuse(self, *, gang: bool, instead: str) -> None:
        if self.into.is_gang is gang or not self.into.is_here:
            what = f"role {self._host.role!r} cannot take like this from channel {self.name!r}"
            kind = f"its consumer, {'of rounds' if self.into.is_gang else 'of single units'}"
            got = kind if self.into.is_here else "not its consumer"
            raise UserError(what, got=got, next=f"use {instead}")

    async def _wait(self, condition: Any, noun: str) -> None:
        what, ripe = f"{noun} of channel {self.name!r} for {self._host.worker}", self.into.given.is_quarter_full
        with self.account_in.waiting(), self.into.short():
            await self._host.waits.until(condition, self.into.arrival, what=what, timeout_s=None, ripe=ripe)

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
            tickets=unit.of_tickets,
            wants_seal=unit.wants_seal,
            partial=json.loads(unit.partial) if unit.partial else None,
        )
        if unit.producer != INLINE:
            message.release()
            item._borrows = True
        self._items[unit.id] = item
        self._host.in_hand.take(item)
        if unit.partial:
            self.into.partials.inherit(unit)
        self.account_in.items += 1
        self.account_in.step = max(self.account_in.step, unit.step)
        self._host.recorder.took(unit.step, unit.branch, self.account_in.end)
        self.account_in.bytes += nbytes
        self._host.taken(unit.step)
        return item

    def __aiter__(self) -> AsyncIterator[Item]:
        return each(self.take)

    def ack(self, item: Item) -> None:
        """Deferred while units made from it are not held by the next consumer."""
        self._settle(item)
        if self._parents.seal(item):
            self.finish(item)
        elif item.wants_seal:  # else the driver knows what is to come of it
            self.into.seal(UnitId(item.branch, item.key))

    def finish(self, item: Item) -> None:
        self._finish(UnitId(item.branch, item.key), None)

    def keep(self, item: Item, partial: Any) -> bool:
        next = "keep numbers, texts, lists and objects of them"
        said = plain.as_json(partial, f"what there is of {item.key!r} cannot be kept", next=next).encode()
        if len(said) > PARTIAL_BYTES:
            self.account_in.dropped["PartialTooLarge"] += 1
            return False
        if not item.cancelled:
            self.into.keep(UnitId(item.branch, item.key), said)
        return True

    def drop(self, item: Item, reason: str) -> None:
        self._settle(item)
        self._parents.forget(item)
        counted = self.account_in.drop(reason)
        if self._host.waits.stopped is not None:
            return  # not by decision: who leaves lets go of what it has, and the driver gives it to another
        self._finish(UnitId(item.branch, item.key), counted)

    def _settle(self, item: Item) -> None:
        if item.channel != self.name or item.is_settled:
            raise UserError(
                f"channel {self.name!r} was told the end of what is no item of it, or has ended",
                got=f"item {item.key!r} of channel {item.channel!r}, {'ended' if item.is_settled else 'in hand'}",
                wanted=f"an item of {self.name!r} that the role has in hand",
                next="give each item that take() returns once to ack() or drop() of its own channel",
            )
        self._host.in_hand.end(item)
        item.settle()

    def _finish(self, uid: UnitId, drop_reason: str | None) -> None:
        self._items.pop(uid, None)
        self.into.finish(uid, drop_reason)


class Joined:
    """Units with all their inputs: taken from the first channel, completed from the others, whichever comes first."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._first, self._others = channels[0], channels[1:]
        self._early: list[dict[tuple[int, str], Item]] = [{} for _ in self._others]

    async def take(self) -> tuple[Item, ...]:
        return await self.complete(await self._first.take())

    async def take_now(self) -> tuple[Item, ...] | None:
        """None where no unit is there; its other inputs are waited for: they are on their way."""
        item = self._first.take_now()
        return None if item is None else await self.complete(item)

    async def complete(self, item: Item) -> tuple[Item, ...]:
        found = [item]
        for channel, early in zip(self._others, self._early, strict=True):
            while (part := early.pop((item.branch, item.key), None)) is None:
                came = await channel.take()
                early[(came.branch, came.key)] = came
            found.append(part)
        return tuple(found)

    def drop(self, items: Sequence[Item], reason: str) -> None:
        for channel, item in zip((self._first, *self._others), items, strict=True):
            channel.drop(item, reason)

    def forget(self, branch: int) -> None:
        """Parts of units of dead branches, whose first part will not come any more."""
        for channel, early in zip(self._others, self._early, strict=True):
            for uid in [uid for uid in early if uid[0] < branch]:
                channel.drop(early.pop(uid), "cancelled")
