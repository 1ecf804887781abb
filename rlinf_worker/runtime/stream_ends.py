"""The two ends of one stream route: what was sent and is not finished with, what came and is not taken.

For: runtime.streams, whose channel has one `Outgoing` per route of a producer and one `Incoming` per route of a
consumer. The rules are channels.stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels import frames
from rlinf_worker.channels.protocol import Item
from rlinf_worker.channels.stream import StreamReceiver, StreamSender
from rlinf_worker.links.message import Message
from rlinf_worker.runtime.peers import Peer

if TYPE_CHECKING:
    from rlinf_worker.runtime.streams import StreamChannel


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

    def __init__(self, channel: StreamChannel, peer: Peer, *, stream: int, credit: int, route: int) -> None:
        """`route`: its number, as the driver gave it last."""
        self.peer, self.sender, self.route = peer, StreamSender[Parcel](stream, credit=credit), route
        self._channel = channel
        self.finished_items = self.finished_bytes = 0
        self._reported_items = 0

    def open(self) -> None:
        type = self._channel.type
        declared = type.fingerprint if type is not None else 0
        sender = self.sender
        head = frames.Open(sender.stream, self._channel.name, sender.base, declared, self.route)
        self.peer.post(Message(frames.encode(head)))

    def replay(self) -> None:
        self.open()
        for sequence, parcel in self.sender.replay():
            frame = parcel.frame
            frame.stream, frame.sequence, frame.acks = self.sender.stream, sequence, []
            self._channel.account_out.resent += 1
            self.peer.post(Message(frames.encode(frame), body=parcel.body, buffers=parcel.buffers))
        if self.sender.closed:
            self.close()

    def close(self) -> None:
        self.sender.closed = True
        self.peer.post(Message(frames.encode(frames.Close(self.sender.stream, self.sender.sequence))))

    def on_ack(self, floor: int) -> None:
        freed = self.sender.acked(floor)
        if freed:
            self.finished_items += len(freed)
            self.finished_bytes += sum(parcel.nbytes for parcel in freed)
            self._channel.on_room()

    def send(self, parcel: Parcel, message: Message) -> None:
        frame, sender = parcel.frame, self.sender
        frame.stream, frame.sequence = sender.stream, sender.sequence
        frame.acks = self.peer.take_acks()
        message.head = frames.encode(frame)  # before it has its number: what has no head would leave a gap
        sender.add(parcel)
        self.peer.post(message)

    def receipt(self) -> pb.Receipt | None:
        if self.finished_items == self._reported_items:
            return None
        self._reported_items = self.finished_items
        return pb.Receipt(
            channel=self._channel.name, peer=self.peer.worker, items=self.finished_items, bytes=self.finished_bytes
        )


class Incoming:
    """One incoming stream of one life of a producer."""

    def __init__(self, channel: StreamChannel, peer: Peer, *, stream: int, base: int) -> None:
        self.peer, self.stream, self.receiver = peer, stream, StreamReceiver(base=base)
        self.source = SourceId.of(peer.worker, peer.attempt)
        self.taken: dict[int, Item] = {}
        self.route = 0  # the number that its producer has it under
        self.is_gone = False  # its producer died, or its route ended
        self.is_parted = False  # there is no route: what comes is put aside
        self.aside: list[tuple[frames.Data, Message]] = []
        self._channel = channel
        self.is_checked = True  # its producer checks its payloads by the declaration that this end has
        self.urgent_at = 4  # half of the credit: the sender must not wait for the timer of our acknowledgements

    def on_data(self, frame: frames.Data, message: Message) -> None:
        channel = self._channel
        if not self.receiver.accept(frame.sequence):
            channel.account_in.duplicates += 1
            message.release()
            return
        if self.is_parted:
            self.aside.append((frame, message.copied()))  # perhaps for good, and the ring is given back in order
            return
        channel.inbox.append((self, frame, message, monotonic()))
        channel.arrival.notify()

    def on_close(self, frame: frames.Close) -> None:
        self.receiver.end = frame.sequence
        self._channel.arrival.notify()

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
        channel = self._channel
        channel.inbox = deque(entry for entry in channel.inbox if entry[0] is not self or entry[1].is_answer)

    def rejoin(self) -> None:
        """There is a route again, and its producer may have heard of no end, or of this route before us."""
        self.is_parted = self.is_gone = False
        aside, self.aside = self.aside, []
        self._channel.inbox.extend((self, frame, message, monotonic()) for frame, message in aside)
        self._channel.arrival.notify()

    def report(self) -> int:
        return self.receiver.report()


class StreamItem(Item):
    __slots__ = ("sequence", "stream")
    stream: Incoming
    sequence: int
