"""Workers that do not reach others which live: an event per pair and half a minute, and words for the job's message
while it lasts. For: core.py, which hears of each unit that is handed back, and notices.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.job import Job

SAY_AGAIN_S: Final = 30.0
LASTS_S: Final = 3.0
"""A worker tries about once a second; of a link that is made again, or a worker that ends, one hears for less long."""


@dataclass(slots=True)
class _Pair:
    since: float
    newest: float
    said_at: float
    reason: str


class Losses:
    def __init__(self, job: Job, exchange: Exchange) -> None:
        self._job, self._exchange = job, exchange
        self._pairs: dict[tuple[WorkerId, str, bool], _Pair] = {}  # forgotten when nothing is heard of them any more

    def heard(self, worker: WorkerId, lost: pb.PeerLost) -> None:
        """What the peer keeps, or lacks, goes back to its queue."""
        job, now, key = self._job, self._job.clock(), (worker, lost.worker, lost.missing)
        self._pairs = {known: pair for known, pair in self._pairs.items() if now - pair.newest < SAY_AGAIN_S}
        pair = self._pairs.setdefault(key, _Pair(now, now, now - SAY_AGAIN_S, lost.reason))
        if now - pair.newest > LASTS_S:
            pair.since = now
        pair.newest, pair.reason = now, lost.reason
        if now - pair.said_at >= SAY_AGAIN_S:
            pair.said_at = now
            job.event("peer-lost", f"{worker} lost {lost.worker} (attempt {lost.attempt}): {lost.reason}")
        peer = job.members.find(WorkerId(lost.worker))
        if peer is not None and lost.attempt in (0, peer.attempt):
            self._exchange.peer_lost(worker, peer.placed.id, lost)

    def words(self, now: float) -> list[str]:
        """Names pairs that have not reached each other for a while, and still do not."""
        return [
            f"{worker} has not reached {peer} for {pair.newest - pair.since:.0f} s: {pair.reason}"
            for (worker, peer, is_missing), pair in self._pairs.items()
            if not is_missing and pair.newest - pair.since >= LASTS_S and now - pair.newest <= LASTS_S
        ]
