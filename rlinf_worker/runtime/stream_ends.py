"""The two ends of one stream route: what was sent and is not finished with, what came and is not taken.

For: runtime.streams, whose channel has one `Outgoing` per route of a producer and one `Incoming` per route of a
consumer. The rules are channels.stream.
"""

from __future__ import annotations

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
    is_answer: bool
    since: float = field(default_factory=monotonic)


class Outgoing:
    """One outgoing route."""

    def __init__(self, channel: StreamChannel, peer: Peer, *, stream: int, credit: int) -> None:
        self.peer, self.sender = peer, StreamSender[Parcel](stream, credit=credit)
        self._channel = channel
        self.finished_items = self.finished_bytes = 0
        self._reported_items = 0

    def open(self) -> None:
        type = self._channel.type
        declared = type.fingerprint if type is not None else 0
        head = frames.encode(frames.Open(self.sender.stream, self._channel.name, self.sender.base, declared))
        self.peer.post(Message(head))

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
        self.is_gone = False  # its producer died
        self._channel = channel
        self.is_checked = True  # its producer checks its payloads by the declaration that this end has
        self.urgent_at = 4  # half of the credit: the sender must not wait for the timer of our acknowledgements

    def on_data(self, frame: frames.Data, message: Message) -> None:
        channel = self._channel
        if not self.receiver.accept(frame.sequence):
            channel.account_in.duplicates += 1
            message.release()
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

    def cancel(self) -> None:
        self.is_gone = True
        for item in self.taken.values():
            item.cancelled = True

    def report(self) -> int:
        return self.receiver.report()


class StreamItem(Item):
    __slots__ = ("sequence", "stream")
    stream: Incoming
    sequence: int
