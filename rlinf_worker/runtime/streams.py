"""A stream channel in a worker: items go over the links to the peers of its routes, and no driver message with them.

For: runtime.context, which hands it to the role as a `Channel`. The rules (credit, order, replay, de-duplication) are
channels.stream; here is what moves.

Several routes, and no `to`: the item goes to the route with the fewest unfinished items. When a route ends, its
unfinished items go to the others, or wait for the next; answers (`to=`) to a worker that is gone are dropped by name.
An answer is for the life that asked: `item.source` remembers it, so the worker's next life never gets it.

A route ends on the driver's word. A new driver knows nothing of routes to lives that died with the one before it: these
end when the worker has another life, or, where the new driver has not named it, when the peer is not reached.

The two ends of a route hear of it at their own times, and a word may be lost with the stream that it was on. So a
consumer keeps a stream whose route has ended, and what comes on it is put aside (the credit bounds it): a route between
the same two lives goes on with it, unless the producer has opened another, which takes its place. Routes are numbered,
and the end of one leaves alone what was opened for a later one. A question whose answer went nowhere, as the route of
answers had ended at this end, is put aside again and not acknowledged: its producer may not have heard of the end yet,
and asks no other for what is finished with.

| waits | for | unblocked by |
|---|---|---|
| put | a route with room | an acknowledgement; a new route; PEER_WAIT_S |
| take | an item | data; the end of the stream; the worker's stop |
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from time import monotonic
from typing import Any

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker.channels import labels
from rlinf_worker.channels.account import Level
from rlinf_worker.channels.host import PEER_WAIT_S, Host
from rlinf_worker.channels.payload_type import PayloadType
from rlinf_worker.channels.protocol import ChannelClosed, Item, LineageKey, PolicyVersion, Round
from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.errors import MessageTooLarge, PayloadError
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.runtime.stream_ends import Inbox, Incoming, Outgoing, Parcel, SourceId, StreamItem


class StreamChannel:
    """`Channel` over routes. One per channel and worker, both directions, as a role may have either."""

    def __init__(self, host: Host, spec: pb.ChannelSpec) -> None:
        self._host, self.name, self.micro_batch = host, spec.name, 1
        self.type = PayloadType.of(spec.payload)
        self._declared = self.type.fingerprint if self.type is not None else 0
        self.account_out, self.account_in = host.account(self.name, "producer"), host.account(self.name, "consumer")
        self.room, self.arrival = host.waits.signal(), host.waits.signal()
        self.account_out.level, self.account_in.level = self._level_out, self._level_in
        self.inbox = Inbox(self.account_in, self.arrival)
        self._out: dict[tuple[str, int], Outgoing] = {}
        self._in: dict[tuple[str, int], Incoming | None] = {}  # None: a route of which nothing has come yet
        self._gone: dict[tuple[str, int], int] = {}  # the number of the route that ended last
        self._parted: dict[tuple[str, int], Incoming] = {}  # streams of lives that have no route
        self._homeless: deque[Parcel] = deque()
        self._has_closed = self._saw_end = False
        self._awaited = f"an item of channel {self.name!r} for {host.worker}"
        self._credit_in: dict[tuple[str, int], int] = {}
        self._of_old_driver: set[tuple[str, int]] = set()  # the driver of today has not named them
        host.on_routed.append(self._answerable)

    # --- the driver's word --------------------------------------------------------------------------------------------
    def on_route(self, endpoint: Endpoint, *, outgoing: bool, credit: int, number: int = 0) -> None:
        """Told again for the same life, nothing changes but the credit. `number`: another for each time that the route
        is given; 0 of a driver that does not number them."""
        life = (endpoint.worker, endpoint.attempt)
        is_of_old_driver = life in self._of_old_driver
        self._gone.pop(life, None)
        self._of_old_driver.discard(life)
        peer = self._host.peers.want(endpoint, by=f"{self.name}/{outgoing}", at_once=False)
        if not outgoing:
            self._route_in(life, credit)
            return
        out = self._out.get(life)
        if out is not None and out.route != number and not is_of_old_driver:
            self._end_outgoing(life)  # it has ended meanwhile: the word was lost with a stream to the driver
            self._host.peers.want(endpoint, by=f"{self.name}/{outgoing}", at_once=False)
            out = None
        if out is None:
            out = self._out[life] = Outgoing(
                peer, stream=self._host.new_stream(), credit=credit, route=number, declared=self._declared,
                account=self.account_out, on_room=self.on_room,
            )  # fmt: skip
            peer.outgoing[out.sender.stream] = out
            out.open()
        out.route = number
        out.sender.credit = max(1, credit)
        for tell in self._host.on_routed:
            tell(life)
        self.on_room()
        if self._has_closed:
            out.close()

    def _route_in(self, life: tuple[str, int], credit: int) -> None:
        self._credit_in[life] = credit
        if life not in self._in:
            stream = self._in[life] = self._parted.pop(life, None)
            if stream is not None:
                stream.rejoin()
        if (stream := self._in[life]) is not None:
            stream.urgent_at = max(1, credit // 2)

    def _answerable(self, life: tuple[str, int]) -> None:
        stream = self._in.get(life)
        if stream is not None and stream.aside:
            stream.rejoin()

    def on_new_driver(self) -> None:
        """A route may have ended at this end alone: what its producer goes on sending is for nobody else."""
        self._of_old_driver = {*self._out, *self._in}
        for stream in self._parted.values():
            stream.rejoin()

    def on_unreachable(self, peer: Peer) -> None:
        if (peer.worker, peer.attempt) in self._of_old_driver:
            self.on_unroute(peer.worker, peer.attempt)

    def on_superseded(self, peer: Peer) -> None:
        life = (peer.worker, peer.attempt)
        if life in {*self._out, *self._in}:
            self.on_unroute(peer.worker, peer.attempt)
        self._parted.pop(life, None)

    def on_unroute(self, worker: str, attempt: int, *, number: int = 0) -> None:
        life = (worker, attempt)
        self._gone[life] = number
        self._of_old_driver.discard(life)
        self._end_outgoing(life)
        self._end_incoming(life, number)
        self.room.notify()
        self.arrival.notify()

    def _end_outgoing(self, life: tuple[str, int]) -> None:
        out = self._out.pop(life, None)
        if out is None:
            return
        out.peer.outgoing.pop(out.sender.stream, None)
        self._host.peers.unwant(out.peer, by=f"{self.name}/True")
        for parcel in out.sender.take_back():
            if parcel.frame.is_answer:
                self.account_out.dropped["PeerGone"] += 1
                continue
            self._homeless.append(parcel)
        self.on_room()

    def on_room(self) -> None:
        """A route has more room, or is new: what has lost its own goes first, in order, then what waits in `put`."""
        while self._homeless and (out := self._roomiest()) is not None:
            parcel = self._homeless.popleft()
            self.account_out.resent += 1
            out.send(parcel, Message(b"", body=parcel.body, buffers=parcel.buffers))
        self.room.notify()

    def _end_incoming(self, life: tuple[str, int], number: int) -> None:
        """What has come stays, also of one that died: it may have acknowledged what it made it from, as soon as it had
        put it, and then nobody makes it again. Its items are marked as cancelled."""
        if life not in self._in:
            if life in self._parted:
                self._parted[life].part()
            return
        stream = self._in[life]
        if stream is not None and stream.route > number > 0:
            return  # its producer has heard of the next route already
        del self._in[life]
        peer = self._host.peers.find(*life)
        if peer is not None:
            self._host.peers.unwant(peer, by=f"{self.name}/False")
        # One that died has not closed: its next life is yet to come, however many others have ended meanwhile.
        self._saw_end = stream is not None and stream.receiver.ended
        if stream is not None:
            stream.part()
            self._parted[life] = stream

    def on_open(self, peer: Peer, frame: frames.Open) -> None:
        life = (peer.worker, peer.attempt)
        known = self._in.get(life) or self._parted.pop(life, None)
        if known is not None and known.stream == frame.stream:
            known.receiver.reopen(frame.base)
            if known.receiver.due:
                peer.owe(known.stream, known, at_once=False)
            stream = known
        else:
            if known is not None:
                peer.incoming.pop(known.stream, None)
                known.supersede()
            stream = peer.incoming[frame.stream] = Incoming(self.inbox, peer, stream=frame.stream, base=frame.base)
            stream.is_checked = self.type is None or frame.declared == self._declared
            stream.urgent_at = max(1, self._credit_in.get(life, 8) // 2)
        stream.route = frame.route
        if life not in self._in and life in self._gone and not frame.route > self._gone[life]:
            stream.is_parted, self._parted[life] = True, stream
        else:
            self._in[life] = stream
            if stream.is_parted:
                stream.rejoin()

    def _streams(self) -> list[Incoming]:
        """Also those without a route: their items are as much in the role's hands."""
        return [*filter(None, self._in.values()), *self._parted.values()]

    def on_cancel(self, branch: int) -> None:
        for stream in self._streams():
            for item in stream.taken.values():
                if item.branch <= branch:
                    item.cancelled = True

    def _level_out(self) -> Level:
        parcels = [parcel for out in self._out.values() for _, parcel in out.sender.replay()]
        parcels += self._homeless
        since = min((parcel.since for parcel in parcels), default=monotonic())
        return Level(len(parcels), sum(parcel.nbytes for parcel in parcels), monotonic() - since)

    def _level_in(self) -> Level:
        since = self.inbox[0][3] if self.inbox else monotonic()
        return Level(len(self.inbox), sum(entry[2].nbytes for entry in self.inbox), monotonic() - since)

    @property
    def in_hand(self) -> int:
        """Items that the role has taken and is not through with."""
        return sum(len(stream.taken) for stream in self._streams())

    @property
    def unfinished(self) -> int:
        """Items that nobody has acknowledged; a worker that ends in good order waits for these."""
        return sum(out.sender.in_flight for out in self._out.values()) + len(self._homeless)

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
        if parents:
            raise UserError(
                f"channel {self.name!r} is a stream and acknowledges nothing for its producer", got="parents=...",
                wanted="a queue channel", next="ack the item after put",
            )  # fmt: skip
        if self._has_closed:
            raise UserError(f"channel {self.name!r} was closed by this worker", got="put(...)", next="put before close")
        message, account = Message(b"", payload), self.account_out
        try:
            key, step, branch, weight, number = labels.checked(
                self.name, key=key, step=step, branch=branch, weight=weight, version=version
            )
            if self.type is not None:
                self.type.check(payload, self.name, key)
            body, buffers = message.encoded()
            nbytes = len(body)
            for buffer in buffers:
                nbytes += buffer.nbytes
            self._host.check_size(nbytes, channel=self.name, key=key)
        except (PayloadError, MessageTooLarge) as error:
            account.refused[error.reason] += 1
            raise
        out = self._find(to)
        if out is None:
            with account.waiting():
                await self._wait_for_room(to)
            out = self._find(to)
            if out is None:  # only where `to` is gone
                account.dropped["PeerGone"] += 1
                if isinstance(to, SourceId):
                    self._host.note_unanswered(to, to.attempt, key)
                return
        frame = frames.Data(0, 0, key, step, branch, number.branch, number.number, weight, [], to is not None)
        out.send(Parcel(frame, body, buffers, nbytes), message)
        account.items += 1
        account.bytes += nbytes

    def _find(self, to: WorkerId | None) -> Outgoing | None:
        """A route with room, now."""
        if to is None:
            return None if self._homeless else self._roomiest()
        attempt = getattr(to, "attempt", None)
        if attempt is None:
            out = max((o for (w, _), o in self._out.items() if w == to), key=lambda o: o.peer.attempt, default=None)
        else:
            out = self._out.get((to, attempt))
        return out if out is not None and out.sender.room > 0 else None

    def _roomiest(self) -> Outgoing | None:
        best, room = None, 0
        for out in self._out.values():
            if out.sender.room > room and not out.sender.closed:
                best, room = out, out.sender.room
        return best

    def _is_gone(self, to: WorkerId | None) -> bool:
        if to is None:
            return False
        attempt = getattr(to, "attempt", None)
        if attempt is not None:
            newest = max((a for w, a in self._out if w == to), default=0)
            return (to, attempt) in self._gone or newest > attempt
        return any(w == to for w, _ in self._gone) and not any(w == to for w, _ in self._out)

    async def _wait_for_room(self, to: WorkerId | None) -> None:
        host = self._host
        t0 = host.recorder.now()
        waited = await host.waits.until(
            lambda: self._find(to) is not None or self._is_gone(to),
            self.room,
            what=f"room for an item of {host.worker} in channel {self.name!r}",
            timeout_s=PEER_WAIT_S,
            missing=f"an acknowledgement of {to or 'any consumer'}" if self._out else "a route from the driver",
        )
        if waited:
            host.recorder.add("wait_data", t0, host.recorder.now())

    def seal(self, parent: Item) -> None:
        raise UserError(f"channel {self.name!r} is a stream: it acknowledges nothing for its producer", next="ack")

    def close(self) -> None:
        self._has_closed = True
        for out in self._out.values():
            out.close()

    # --- consumer -----------------------------------------------------------------------------------------------------
    async def take(self) -> Item:
        if not self.inbox:
            await self._wait_for_item()
        return self._next()

    def take_now(self) -> Item | None:
        self._host.waits.raise_if_stopped()
        return self._next() if self.inbox else None

    def _next(self) -> Item:
        stream, frame, message, _ = self.inbox.popleft()
        account, self._host.peers.has_begun = self.account_in, True
        body, buffers = message.encoded()
        try:
            payload = message.value()
            if not stream.is_checked and self.type is not None:
                self.type.check(payload, self.name, frame.key)
        except PayloadError as error:
            account.dropped[error.reason] += 1
            stream.finish(frame.sequence)
            raise
        item = StreamItem(
            channel=self.name,
            key=LineageKey(frame.key),
            payload=payload,
            step=frame.step,
            branch=frame.branch,
            source=stream.source,  # type: ignore[arg-type]
            version=PolicyVersion(frame.version_branch, frame.version_number),
            weight=frame.weight,
        )
        item.stream, item.sequence, item.cancelled = stream, frame.sequence, stream.is_gone
        nbytes = len(body)
        if buffers:
            for buffer in buffers:
                nbytes += buffer.nbytes
            message.release()
            item._release = lambda: setattr(item, "payload", None)
        stream.taken[frame.sequence] = item
        account.items += 1
        account.bytes += nbytes
        return item

    async def _wait_for_item(self) -> None:
        host = self._host
        waiting = host.recorder.begin("wait_data")
        try:
            with self.account_in.waiting():
                await host.waits.until(self._is_takeable, self.arrival, what=self._awaited, timeout_s=None)
        finally:
            waiting.end()
        if not self.inbox:
            raise ChannelClosed(f"channel {self.name!r} has ended")

    def _is_takeable(self) -> bool:
        return bool(self.inbox) or self._has_ended()

    def _has_ended(self) -> bool:
        streams = list(self._in.values())
        if not streams:
            return self._saw_end
        return all(stream is not None and stream.receiver.ended for stream in streams)

    async def __aiter__(self) -> AsyncIterator[Item]:
        while True:
            try:
                yield await self.take()
            except ChannelClosed:
                return

    async def take_batch(self, *, at_least: int = 1) -> list[Item]:
        raise UserError(f"channel {self.name!r} is a stream and has no micro-batches", next="take(), then take_now()")

    async def take_round(self) -> Round:
        raise UserError(
            f"channel {self.name!r} is a stream and has no rounds", wanted="a queue with rounds=True", next="take()"
        )

    def ack(self, item: Item) -> None:
        if isinstance(item, StreamItem):
            source = item.stream.source
            if self._host.was_unanswered(source, source.attempt, item.key):
                item.stream.hand_back(item)
            else:
                item.stream.finish(item.sequence)
        item.release()

    def finish(self, item: Item) -> None:
        self.ack(item)

    def drop(self, item: Item, reason: str) -> None:
        self.account_in.dropped[reason] += 1
        self.ack(item)
