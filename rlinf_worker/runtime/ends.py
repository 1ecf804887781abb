"""This worker's ends of the flow's channels: found by name, opened as the Welcome says, told what peers say."""

from __future__ import annotations

import logging

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import Item
from rlinf_worker.cycles.answerer import Answerer
from rlinf_worker.cycles.asker import Asker
from rlinf_worker.links import frames
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.queues.channel import QueueChannel
from rlinf_worker.queues.parents import Parents
from rlinf_worker.weights.channel import WeightsChannel

logger = logging.getLogger(__name__)


class ChannelEnds:
    def __init__(self, host: Host, weights: WeightsChannel) -> None:
        self._host, self._weights = host, weights
        self.askers: dict[str, Asker] = {}
        self.answerers: dict[str, Answerer] = {}
        self.queues: dict[str, QueueChannel] = {}
        self._parents: Parents[Item] = Parents()
        peers = host.peers
        peers.handlers[frames.Open] = self._on_open
        peers.handlers[frames.Pull] = self._on_pull
        peers.handlers[frames.Payload] = self._on_payload
        peers.handlers[frames.Missing] = self._on_missing
        peers.on_up.append(self._on_up)
        peers.on_unreachable.append(self._on_unreachable)
        peers.on_superseded.append(self._on_superseded)

    def open(self, spec: pb.ChannelSpec) -> None:
        if spec.mode == "Cycle" and spec.producer == self._host.role:
            self.askers[spec.name] = Asker(self._host, spec)
        elif spec.mode == "Cycle":
            self.answerers[spec.name] = Answerer(self._host, spec)
        else:
            self.queues[spec.name] = QueueChannel(self._host, spec, self._parents)

    # --- what the driver speaks of ------------------------------------------------------------------------------------
    def asker(self, channel: str) -> Asker:
        asker = self.askers.get(channel)
        if asker is None:
            raise InvariantBroken(f"the driver gave a route of cycle {channel!r}", wanted=", ".join(self.askers))
        return asker

    def queue(self, channel: str) -> QueueChannel:
        queue = self.queues.get(channel)
        if queue is None:
            raise InvariantBroken(f"the driver spoke of queue {channel!r}", wanted=", ".join(self.queues))
        return queue

    # --- what peers say -----------------------------------------------------------------------------------------------
    def _on_open(self, peer: Peer, frame: frames.Open, message: Message) -> None:
        answerer = self.answerers.get(frame.channel)
        if answerer is None:
            logger.error("a peer asks in a cycle in which we do not answer", extra={"channel": frame.channel})
            return
        answerer.on_open(peer, frame)

    def _on_pull(self, peer: Peer, frame: frames.Pull, message: Message) -> None:
        if (queue := self.queues.get(frame.channel)) is not None:
            queue.out.on_pull(peer, frame)

    def _on_payload(self, peer: Peer, frame: frames.Payload, message: Message) -> None:
        if (queue := self.queues.get(frame.channel)) is not None:
            queue.into.on_payload(frame, message)

    def _on_missing(self, peer: Peer, frame: frames.Missing, message: Message) -> None:
        if (queue := self.queues.get(frame.channel)) is not None:
            queue.into.on_missing(peer, frame)

    def _on_up(self, peer: Peer) -> None:
        self._weights.on_up(peer)
        for queue in self.queues.values():
            queue.into.on_up(peer)

    def _on_unreachable(self, peer: Peer, why: str) -> None:
        for queue in self.queues.values():
            queue.into.on_unreachable(peer, why)
        for asker in self.askers.values():
            asker.on_unreachable(peer)

    def _on_superseded(self, peer: Peer) -> None:
        for asker in self.askers.values():
            asker.on_superseded(peer)
        for answerer in self.answerers.values():
            answerer.on_superseded(peer)

    # --- items --------------------------------------------------------------------------------------------------------
    def finish_item(self, item: Item) -> None:
        if (queue := self.queues.get(item.channel)) is not None:
            queue.finish(item)

    def spill(self) -> int:
        """This worker's turn on its slots ends: what its queues keep there goes to host memory. Bytes that moved."""
        return sum(queue.out.shelf.spill() for queue in self.queues.values())

    @property
    def unfinished(self) -> int:
        """Units that others may still ask for; a worker that ends in good order waits for these."""
        return sum(len(queue.out.shelf) for queue in self.queues.values())

    @property
    def has_input(self) -> bool:
        """Whether a role that was stopped at a safe point has something to go on with: an item that waits for it, or
        one that it has in hand, or nothing ever came to it this way."""
        queues, askers, answerers = self.queues.values(), self.askers.values(), self.answerers.values()
        if any(queue.in_hand for queue in queues) or any(answerer.in_hand for answerer in answerers):
            return True
        waits = [bool(queue.into.given.waiting) for queue in queues if queue.account_in.items]
        waits += [bool(asker.inbox) for asker in askers if asker.account_in.items]
        waits += [bool(answerer.inbox) for answerer in answerers if answerer.account_in.items]
        return any(waits) or not waits
