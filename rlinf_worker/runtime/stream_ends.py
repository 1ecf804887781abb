"""The two ends of one stream route: what was sent and is not finished with, what came and is not taken.

For: runtime.streams, whose channel has one `Outgoing` per route of a producer and one `Incoming` per route of a
consumer. The rules are channels.stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from rlinf_worker.channels.account import Account
from rlinf_worker.channels.protocol import Item
from rlinf_worker.channels.stream import StreamReceiver, StreamSender
from rlinf_worker.channels.waiting import Signal
from rlinf_worker.links import frames
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer


class SourceId(str):
    """A WorkerId that remembers which life of the worker an item came from."""

    __slots__ = ("attempt",)
    attempt: int

    @classmethod
    def of(cls, worker: str, attempt: int) -> SourceId:
        source = cls(worker)
        source.attempt = attempt
        return source


@dataclass(slots=True)
class Parcel:
    """An item until it is finished with: its encoding, which a replay sends again under another head."""

    frame: frames.Data
    body: bytes
    buffers: Sequence[Any]
    nbytes: int
    since: float = field(default_factory=monotonic)


class Outgoing:
    """One outgoing route."""

    def __init__(
        self,
        peer: Peer,
        *,
        stream: int,
        credit: int,
        route: int,
        declared: int,
        account: Account,
        on_room: Callable[[], None],
    ) -> None:
        """`route`: its number, as the driver gave it last. `declared`: the fingerprint of what its payloads are said to
        be, 0 for anything. `on_room`: the peer is through with an item."""
        self.peer, self.sender, self.route = peer, StreamSender[Parcel](stream, credit=credit), route
        self._declared, self._account, self._on_room = declared, account, on_room

    def open(self) -> None:
        sender = self.sender
        head = frames.Open(sender.stream, self._account.channel, sender.base, self._declared, self.route)
        self.peer.post(Message(frames.encode(head)))

    def replay(self) -> None:
        self.open()
        for sequence, parcel in self.sender.replay():
            frame = parcel.frame
            frame.stream, frame.sequence, frame.acks = self.sender.stream, sequence, []
            self._account.resent += 1
            self.peer.post(Message(frames.encode(frame), body=parcel.body, buffers=parcel.buffers))
        if self.sender.closed:
            self.close()

    def close(self) -> None:
        self.sender.closed = True
        self.peer.post(Message(frames.encode(frames.Close(self.sender.stream, self.sender.sequence))))

    def on_ack(self, floor: int) -> None:
        if self.sender.acked(floor):
            self._on_room()

    def send(self, parcel: Parcel, message: Message) -> None:
        frame, sender = parcel.frame, self.sender
        frame.stream, frame.sequence = sender.stream, sender.sequence
        frame.acks = self.peer.take_acks()
        message.head = frames.encode(frame)  # before it has its number: what has no head would leave a gap
        sender.add(parcel)
        self.peer.post(message)


class Inbox(deque["tuple[Incoming, frames.Data, Message, float]"]):
    """What has come for a channel and is not taken, on whichever stream, in the order of its coming."""

    def __init__(self, account: Account, arrival: Signal) -> None:
        super().__init__()
        self.account, self.arrival = account, arrival

    def put(self, stream: Incoming, frame: frames.Data, message: Message) -> None:
        self.append((stream, frame, message, monotonic()))
        self.arrival.notify()

    def drop_questions(self, stream: Incoming) -> None:
        kept = [entry for entry in self if entry[0] is not stream or entry[1].is_answer]
        self.clear()
        self.extend(kept)


class Incoming:
    """One incoming stream of one life of a producer."""

    def __init__(self, inbox: Inbox, peer: Peer, *, stream: int, base: int) -> None:
        self.peer, self.stream, self.receiver = peer, stream, StreamReceiver(base=base)
        self.source = SourceId.of(peer.worker, peer.attempt)
        self.taken: dict[int, Item] = {}
        self.route = 0  # the number that its producer has it under
        self.is_gone = False  # its producer died, or its route ended
        self.is_parted = False  # there is no route: what comes is put aside
        self.aside: list[tuple[frames.Data, Message]] = []
        self._inbox = inbox
        self.is_checked = True  # its producer checks its payloads by the declaration that this end has
        self.urgent_at = 4  # half of the credit: the sender must not wait for the timer of our acknowledgements

    def on_data(self, frame: frames.Data, message: Message) -> None:
        if not self.receiver.accept(frame.sequence):
            self._inbox.account.duplicates += 1
            message.release()
            return
        if self.is_parted:
            self.aside.append((frame, message.copied()))  # perhaps for good, and the ring is given back in order
            return
        self._inbox.put(self, frame, message)

    def on_close(self, frame: frames.Close) -> None:
        self.receiver.end = frame.sequence
        self._inbox.arrival.notify()

    def finish(self, sequence: int) -> None:
        self.taken.pop(sequence, None)
        receiver = self.receiver
        receiver.finish(sequence)
        if due := receiver.due:
            self.peer.owe(self.stream, self, at_once=due >= self.urgent_at)

    def hand_back(self, item: StreamItem) -> None:
        """Its answer went nowhere: for a route that comes again, unless its producer asks anew."""
        del self.taken[item.sequence]
        frame = frames.Data(
            self.stream, item.sequence, item.key, item.step, item.branch, item.version.branch, item.version.number,
            item.weight, [],
        )  # fmt: skip
        self.aside.append((frame, Message(b"", item.payload).copied()))

    def cancel(self) -> None:
        self.is_gone = True
        for item in self.taken.values():
            item.cancelled = True

    def part(self) -> None:
        """The route has ended, as far as this end has heard."""
        self.is_parted = True
        if not self.receiver.ended:
            self.cancel()

    def supersede(self) -> None:
        """Its producer has opened another. Questions come again, there or elsewhere; answers do not."""
        self.rejoin()
        self.cancel()
        self._inbox.drop_questions(self)

    def rejoin(self) -> None:
        """There is a route again, and its producer may have heard of no end, or of this route before us."""
        self.is_parted = self.is_gone = False
        aside, self.aside = self.aside, []
        for frame, message in aside:
            self._inbox.put(self, frame, message)
        self._inbox.arrival.notify()

    def report(self) -> int:
        return self.receiver.report()


class StreamItem(Item):
    __slots__ = ("sequence", "stream")
    stream: Incoming
    sequence: int
