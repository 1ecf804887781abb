"""The producer's end of a queue: what it has made is announced, kept, sent to whoever asks, forgotten when released.

What is kept, and how much of it: shelf.

    put -> Announce ... Pull of a consumer -> Payload ... held -> parents acknowledged ... released -> freed

| waits | for | unblocked by |
|---|---|---|
| put | room within the capacity, behind all older units that wait | released, capacity, cancel; peer_wait_s |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker.channels import labels, plain
from rlinf_worker.channels.account import Level
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.payload_type import PayloadType
from rlinf_worker.channels.protocol import Item, LineageKey, PolicyVersion, oldest_version
from rlinf_worker.links import frames
from rlinf_worker.links.errors import MessageTooLarge, PayloadError
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.queues.parents import Parents
from rlinf_worker.queues.shelf import Place, Shelf, ShelvedPayload
from rlinf_worker.queues.units import Age, UnitId, UnitInfo


class Producing:
    comes_last = False

    def __init__(self, host: Host, spec: pb.ChannelSpec, parents: Parents[Item]) -> None:
        self._host, self._name, self._parents = host, spec.name, parents
        self._type = PayloadType.of(spec.payload)
        self._producer, self._goes_to_the_flow = spec.producer, not spec.consumer
        self._is_end = spec.until_commit
        self.account = host.account(spec.name, "producer")
        self.account.level = lambda: Level(len(self.shelf), self.shelf.kept_bytes, self.shelf.oldest_s)
        self.shelf = Shelf(
            capacity_units=spec.capacity_units,
            capacity_bytes=spec.capacity_bytes,
            until_commit=spec.until_commit,
        )
        self.room = host.waits.signal()
        self._micro_batch = spec.micro_batch
        """So many are taken together where they go: they may be announced together."""
        self._to_announce: list[UnitInfo] = []

    async def put(
        self,
        payload: Any,
        *,
        key: LineageKey | str,
        step: int | None = None,
        branch: int | None = None,
        version: PolicyVersion | None = None,
        weight: float = 1.0,
        parents: Sequence[Item] = (),
    ) -> None:
        """As `Channel.put`. Raises PayloadError (LabelError, StaleVersion), MessageTooLarge; the channel goes on."""
        self._refuse_others()
        self._host.check_begun("put", self._name)
        self._refuse_ended(key, parents)
        if parents:
            newest = max(parents, key=lambda parent: (parent.branch, parent.step))
            step = newest.step if step is None else step
            branch = newest.branch if branch is None else branch
        elif branch is None:
            branch = self._host.newest_branch()
        try:
            if step is None:
                raise labels.LabelError(
                    f"the step of item {ascii(key)[:80]} of channel {self._name!r} cannot be sent", got="none",
                    wanted="the items that it was made from, or a step", next="pass parents=[...] or step=int(...)",
                )  # fmt: skip
            if version is None:
                version = self._version(parents)
            said = labels.checked(self._name, key=key, step=step, branch=branch, weight=weight, version=version)
            key, step, branch = said.key, said.step, said.branch
            oldest = oldest_version(step, branch=branch, max_staleness=self._host.max_staleness())
            if version is None:
                said = said._replace(version=oldest)
            if not self._goes_to_the_flow:  # which may be told of any weights
                labels.check_age(self._name, key=key, step=step, version=said.version, oldest=oldest)
            if self._type is not None:
                self._type.check(payload, self._name, key)
            inline = self._result(payload, key) if self._goes_to_the_flow else b""
            kept = ShelvedPayload(payload)
            self._host.check_size(kept.nbytes, channel=self._name, key=key)
        except (PayloadError, MessageTooLarge) as error:
            self.account.refused[error.reason] += 1
            raise
        tickets = tuple(dict.fromkeys(ticket for parent in parents for ticket in parent.tickets))
        if not tickets:
            self._refuse_unknown(key)
        place = self.shelf.place(Age(branch, step))
        if not self.shelf.lets_in(kept.nbytes, place):
            await self._wait_for_room(kept.nbytes, key, place)
        unit = UnitInfo(
            **said._asdict(),
            tickets=tickets if tickets != (key,) else (),
            wants_seal=any(parent.wants_seal for parent in parents),
            inline=inline,
            size_bytes=kept.nbytes,
            producer=WorkerId(self._host.worker),
        )
        if not self.shelf.add(unit, kept):
            self.account.duplicates += 1  # made again, and kept already
            return
        if parents:
            self._parents.add((self._name, unit.id), parents)
        self._to_announce.append(unit)
        self.account.items += 1
        self.account.bytes += kept.nbytes
        self._host.recorder.released(self._name, step, branch)
        self._host.mark(self, can_wait=len(self._to_announce) < self._micro_batch)

    def _refuse_others(self) -> None:
        if self._producer != self._host.role:
            raise UserError(
                f"role {self._host.role!r} cannot put into channel {self._name!r}", got="not its producer",
                wanted=f"role {self._producer!r}" if self._producer else "the flow alone",
                next="put what it makes into a channel that the flow gives it as the producer",
            )  # fmt: skip

    def _refuse_ended(self, key: str, parents: Sequence[Item]) -> None:
        """The driver may have heard by now that no more comes of it."""
        ended = next((parent for parent in parents if parent.is_settled), None)
        if ended is not None:
            raise UserError(
                f"unit {ascii(key)[:80]} of channel {self._name!r} is made of what has ended",
                got=f"item {ended.key!r} of channel {ended.channel!r}, acknowledged or dropped before",
                wanted="parents that the role has in hand", next="put what is made of an item, then ack or drop it",
            )  # fmt: skip

    def _refuse_unknown(self, key: str) -> None:
        """The driver would: where the units of a step end, each is of a ticket of the step."""
        in_hand = self._host.in_hand
        if self._is_end and in_hand.has_all and key not in in_hand:
            raise UserError(
                f"unit {ascii(key)[:80]} of channel {self._name!r} is made of nothing",
                got="no parents, and a key that is no ticket of what the role has in hand",
                wanted="what it was made of",
                next="put it with parents=[...], or with the ticket's key, before the ack",
            )  # fmt: skip

    def _version(self, parents: Sequence[Item]) -> PolicyVersion | None:
        """What it was made with, as far as this worker knows; None: no weights had a part in it."""
        known, here = [parent.version for parent in parents], self._host.weights_version()
        return min(known if here is None else [*known, here], default=None)

    def _result(self, value: Any, key: str) -> bytes:
        what = f"result {ascii(key)[:80]} of channel {self._name!r} cannot be told to the flow"
        return plain.encoded(value, what, next="pass what it decides by", error=PayloadError).encode()

    async def _wait_for_room(self, nbytes: int, key: str, place: Place) -> None:
        host = self._host
        self.shelf.waiting.append(place)
        try:
            with self.account.waiting():
                await host.waits.until(
                    lambda: self.shelf.lets_in(nbytes, place),
                    self.room,
                    what=f"room for unit {key!r} of {nbytes} bytes in channel {self._name!r}",
                    timeout_s=host.peer_wait_s,
                    ripe=lambda: self.shelf.is_drained(place[0]),
                    missing=f"a consumer that takes one of the {len(self.shelf)} units kept",
                )
        finally:
            self.shelf.waiting.remove(place)
            self.room.notify()  # another may have waited behind this one

    def drain(self, out: list[pb.WorkerMessage]) -> None:
        made, self._to_announce = self._to_announce, []
        if made:
            out.append(pb.WorkerMessage(announce=pb.Announce(channel=self._name, units=[u.to_pb() for u in made])))

    def hello(self) -> list[pb.HeldUnit]:
        """What a Hello says of it: all that is kept here."""
        self._to_announce.clear()
        return [pb.HeldUnit(channel=self._name, unit=unit.to_pb()) for unit in self.shelf.units()]

    def resize(self, spec: pb.ChannelSpec) -> None:
        self._micro_batch = spec.micro_batch
        self.shelf.resize(capacity_units=spec.capacity_units, capacity_bytes=spec.capacity_bytes)
        self.room.notify()

    def on_released(self, uids: Sequence[UnitId]) -> None:
        self.shelf.release(uids)
        self.on_held(uids)  # acknowledged implies held
        self.room.notify()

    def on_held(self, uids: Iterable[UnitId]) -> None:
        """By the next consumer."""
        for uid in uids:
            for parent in self._parents.held((self._name, uid)):
                self._host.finish_item(parent)

    def cancel(self, branch: int) -> None:
        self.on_held(self.shelf.cancel(branch))
        self._to_announce = [unit for unit in self._to_announce if unit.branch > branch]
        self.room.notify()

    def on_pull(self, peer: Peer, frame: frames.Pull) -> None:
        """A consumer asks: in its order, which is the oldest policy version first."""
        missing = []
        for branch, key in frame.units:
            kept = self.shelf.get(UnitId(branch, key))
            if kept is None:
                missing.append((branch, key))
                continue
            body, buffers = kept.encoded()
            peer.post(Message(frames.encode(frames.Payload(self._name, branch, key)), body=body, buffers=buffers))
        if missing:
            peer.post(Message(frames.encode(frames.Missing(self._name, missing))))
