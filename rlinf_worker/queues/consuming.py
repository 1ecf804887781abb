"""The consumer's end of a queue: what it is given is fetched from where it was made, and the driver hears of it.

What is given, bounded and in which order is queues.given; where it is fetched from queues.sources; here is what moves.
What a role takes and when: channel.

    Credit -> Assign or Round -> Pull -> Payload -> held -> taken -> ack or drop
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from time import monotonic
from typing import Any, Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels import messages
from rlinf_worker.channels.account import Level
from rlinf_worker.channels.host import Host
from rlinf_worker.links import frames
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.queues.given import Admitted, QueueConsumer, RoundPart
from rlinf_worker.queues.pace import Pace
from rlinf_worker.queues.receipts import EndedUnits, PartialsInHand, Receipts
from rlinf_worker.queues.sources import Sources
from rlinf_worker.queues.units import INLINE, UnitId, UnitInfo

logger = logging.getLogger(__name__)

REPEAT_S: Final = 10.0
"""A finished unit is remembered so long: a message that was written into a stream which is still up 10 s later has
arrived, as gRPC's keepalive ends a dead stream within 4 s."""


class Consuming:
    comes_last = True

    def __init__(self, host: Host, spec: pb.ChannelSpec) -> None:
        self._host, self._name = host, spec.name
        self.is_here, self.is_gang = spec.consumer == host.role, spec.rounds
        self.account = host.account(spec.name, "consumer")
        self.account.units, self.account.level = True, self._level
        self.given = QueueConsumer[Message](window=messages.window(spec), rounds=spec.rounds)
        self.arrival = host.waits.signal()
        self._pace = Pace()
        self.ended = EndedUnits()
        self._receipts = Receipts(spec.name, repeat_s=REPEAT_S)
        self.partials = PartialsInHand(spec.name)
        self._sources = Sources(host, spec.name, self.account)

    def _level(self) -> Level:
        depth, nbytes, since = self.given.units.level()
        return Level(depth, nbytes, monotonic() - since if since is not None else 0.0)

    # --- to the driver ------------------------------------------------------------------------------------------------
    def drain(self, out: list[pb.WorkerMessage]) -> None:
        """What has gathered since the last batch, credit last: it is for the state that the rest describes."""
        self._receipts.drain(out, monotonic())
        self.partials.drain(out)
        if self.is_here and (credit := self.given.credit_due()) is not None:
            out.append(pb.WorkerMessage(credit=pb.Credit(channel=self._name, units=credit)))

    def hello(self) -> list[pb.HeldUnit]:
        """What a Hello says of it: what is held here. What is finished is too, and follows as such."""
        self._receipts.hello()
        self.given.hello()
        self._host.mark(self)
        held = [*self.given.units.held(), *self._receipts.units()]
        return [pb.HeldUnit(channel=self._name, unit=unit.to_pb()) for unit in held]

    def on_welcome(self, *, is_new_driver: bool) -> None:
        forgotten, here = self.given.welcomed(is_new_driver=is_new_driver)
        self._receipts.held(here)
        self.partials.welcomed()
        if forgotten:
            logger.info("assignments of the old driver forgotten", extra={"units": forgotten})
        if forgotten or here:
            self.arrival.notify()
        self._host.mark(self)  # its credit, behind what the same batch says again

    def resize(self, window: int) -> None:
        self.given.window = window
        self._host.mark(self)

    def room(self, units: int) -> None:
        self.given.room = units
        self.took()

    def asks(self) -> None:
        """The role is through with what it was given last. One that has run out of units gives its turn away, so as
        many lie here as it works on until more has come."""
        self._pace.asks(now=monotonic())
        in_turns = self._host.waits.gate is not None and not self.is_gang
        self.given.reserve = self._pace.reserve if in_turns else 0

    def gave(self) -> None:
        self._pace.gave(now=monotonic())

    def took(self) -> None:
        """There is room for more."""
        if self.given.is_credit_due:
            self._host.mark(self)

    @contextmanager
    def short(self) -> Iterator[None]:
        """The role waits for more than is here."""
        self.given.waits += 1
        self.took()
        try:
            yield
        finally:
            self.given.waits -= 1

    def state_credit_anew(self) -> None:
        """The driver counts on none that was stated before."""
        self.given.forget_credit()
        self._host.mark(self)

    def finish(self, uid: UnitId, drop_reason: str | None) -> None:
        unit = self.given.units.finish(uid)
        self.partials.forget(uid)
        if unit is not None:
            self._receipts.finished(unit, drop_reason)
            if self.is_gang and drop_reason is not None:
                ended = pb.Ended(key=unit.key, tickets=unit.of_tickets, units=1)
                self.ended.add([ended], step=unit.step, branch=unit.branch)
            self._host.mark(self, can_wait=drop_reason is None)

    def seal(self, uid: UnitId) -> None:
        if (unit := self.given.units.taken(uid)) is not None:
            self._receipts.sealed(unit)
            self._host.mark(self)

    # --- the driver's word --------------------------------------------------------------------------------------------
    def on_assign(self, message: pb.Assign) -> None:
        self._sources.learn(message.producers)
        self._fetch(self.given.assign([UnitInfo.from_pb(u) for u in message.units], now=monotonic()))

    def on_round(self, message: pb.Round) -> None:
        self._sources.learn(message.producers)
        self.ended.add(message.ended, step=message.step, branch=message.branch)
        units = [UnitInfo.from_pb(u) for u in message.units]
        self._fetch(self.given.assign_round(RoundPart.from_pb(message), units, now=monotonic()))
        self.arrival.notify()  # its part may be empty

    def keep(self, uid: UnitId, partial: bytes) -> None:
        if self.given.units.taken(uid) is not None:
            self.partials.keep(uid, partial)
            self._host.mark(self)

    def cancel(self, said: pb.Cancel) -> list[UnitId]:
        """Cancels these units, or those of this branch and of those before it. Returns what was taken; what was not is
        forgotten."""
        self._host.mark(self)
        if said.keys:
            return self.given.cancel_units(UnitId(said.branch, key) for key in said.keys)
        self.partials.cancel(said.branch)
        self.ended.cancel(said.branch)
        self._receipts.cancel(said.branch)
        return self.given.cancel(said.branch)

    # --- fetching -----------------------------------------------------------------------------------------------------
    def _fetch(self, admitted: Admitted) -> None:
        self._receipts.held(admitted.again)
        for producer, group in groupby(admitted.absent, key=attrgetter("producer")):
            why = "the round that it is of was taken without it"
            self._sources.give_up(list(group), worker=producer, attempt=self._sources.attempt(producer), why=why)
        wanted: dict[str, list[UnitId]] = {}
        for unit in sorted(admitted.to_pull, key=attrgetter("age")):
            if unit.producer == INLINE:
                self._arrived(unit.id, Message(b"", _inline_payload(unit)))
            else:
                wanted.setdefault(unit.producer, []).append(unit.id)
        for producer, uids in wanted.items():
            if not self._sources.ask(producer, uids):
                self._lose(uids, worker=producer, attempt=0, why="the driver named no endpoint for it")
        self._host.mark(self, can_wait=not self.given.is_credit_due)

    def on_up(self, peer: Peer) -> None:
        if self._sources.is_one(peer) and (pulling := self.given.units.pulling(producer=peer.worker)):
            self._sources.ask_again(peer, pulling)

    def on_unreachable(self, peer: Peer, why: str) -> None:
        if self._sources.is_one(peer):
            self._sources.let_go(peer)
            uids = self.given.units.pulling(producer=peer.worker)
            self._lose(uids, worker=peer.worker, attempt=peer.attempt, why=why)

    def _lose(self, uids: Iterable[UnitId], *, worker: str, attempt: int, why: str, is_missing: bool = False) -> None:
        if lost := self.given.lost(uids):
            self._sources.give_up(lost, worker=worker, attempt=attempt, why=why, is_missing=is_missing)
            self.arrival.notify()  # a round goes on without them
            self._host.mark(self)

    def on_payload(self, frame: frames.Payload, message: Message) -> None:
        if not self._arrived(UnitId(frame.branch, frame.key), message):
            self.account.duplicates += 1
            message.release()

    def _arrived(self, uid: UnitId, message: Message) -> bool:
        unit = self.given.units.arrived(uid, message)
        if unit is None:
            return False
        if self.given.units.is_here(uid):
            self._receipts.held([unit])
            self._host.mark(self, can_wait=True)
            self.arrival.notify()
        return True

    def on_missing(self, peer: Peer, frame: frames.Missing) -> None:
        uids = [UnitId(branch, key) for branch, key in frame.units]
        why = f"it does not have {uids[0].key} (any more)"
        self._lose(uids, worker=peer.worker, attempt=peer.attempt, why=why, is_missing=True)


def _inline_payload(unit: UnitInfo) -> Any:
    """What the driver put into a unit of its own: JSON."""
    try:
        return json.loads(unit.inline or b"{}")
    except ValueError as error:
        raise InvariantBroken(f"unit {unit.key} of the driver is no JSON", got=repr(unit.inline[:80])) from error
