"""Where a consumer of a queue fetches from: the lives of producers that the driver has named, and none besides.

For: queues.consuming, which knows what is to be fetched.

    learn() of an Assign or Round -> ask() -> Pull ... a new link: ask_again() ... out of reach: let_go(), give_up()
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels import messages
from rlinf_worker.channels.account import Account
from rlinf_worker.channels.host import Host
from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.queues.units import UnitId, UnitInfo, keys_of

logger = logging.getLogger(__name__)


class Sources:
    def __init__(self, host: Host, channel: str, account: Account) -> None:
        self._host, self._channel, self._account = host, channel, account
        self._by = f"{channel}/pull"
        self._producers: dict[str, Endpoint] = {}

    def learn(self, producers: Iterable[pb.Endpoint]) -> None:
        for producer in producers:
            self._producers[producer.worker] = messages.endpoint_from_pb(producer)

    def is_one(self, peer: Peer) -> bool:
        endpoint = self._producers.get(peer.worker)
        return endpoint is not None and endpoint.attempt == peer.attempt

    def attempt(self, worker: str) -> int:
        """The life of it that the driver has named; 0: none."""
        endpoint = self._producers.get(worker)
        return endpoint.attempt if endpoint is not None else 0

    def ask(self, worker: str, uids: Sequence[UnitId]) -> bool:
        """False: nobody has said where that is."""
        endpoint = self._producers.get(worker)
        if endpoint is not None:
            self.ask_again(self._host.peers.want(endpoint, by=self._by, at_once=True), uids)
        return endpoint is not None

    def ask_again(self, peer: Peer, uids: Sequence[UnitId]) -> None:
        peer.post(Message(frames.encode(frames.Pull(self._channel, [(uid.branch, uid.key) for uid in uids]))))

    def let_go(self, peer: Peer) -> None:
        self._host.peers.unwant(peer, by=self._by)

    def give_up(
        self, lost: Sequence[UnitInfo], *, worker: str, attempt: int, why: str, is_missing: bool = False
    ) -> None:
        """By name: what else this worker fetches from there it will have."""
        self._account.dropped["PeerLost"] += len(lost)
        peer = self._host.peers.find(worker, attempt)
        if peer is None or peer.is_news():
            logger.warning("payloads were not fetched", extra={"peer": worker, "units": len(lost), "why": why})
        for keys in keys_of(self._channel, lost):
            said = pb.PeerLost(worker=worker, attempt=attempt, reason=why, units=keys, missing=is_missing)
            self._host.tell(pb.WorkerMessage(peer_lost=said))
