"""Workers that do not reach others which live: an event per pair and half a minute, and words for the job's message
while it lasts. For: core.py, which hears of each unit that is handed back, and status.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId

if TYPE_CHECKING:
    from rlinf_worker.driver.core import Driver

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
    def __init__(self, driver: Driver, clock: Callable[[], float]) -> None:
        self._driver, self._clock = driver, clock
        self._pairs: dict[tuple[WorkerId, str, bool], _Pair] = {}  # forgotten when nothing is heard of them any more

    def heard(self, worker: WorkerId, lost: pb.PeerLost) -> None:
        """What the peer keeps, or lacks, goes back to its queue."""
        driver, now, key = self._driver, self._clock(), (worker, lost.worker, lost.missing)
        self._pairs = {known: pair for known, pair in self._pairs.items() if now - pair.newest < SAY_AGAIN_S}
        pair = self._pairs.setdefault(key, _Pair(now, now, now - SAY_AGAIN_S, lost.reason))
        if now - pair.newest > LASTS_S:
            pair.since = now
        pair.newest, pair.reason = now, lost.reason
        if now - pair.said_at >= SAY_AGAIN_S:
            pair.said_at = now
            driver.event("peer-lost", f"{worker} lost {lost.worker} (attempt {lost.attempt}): {lost.reason}")
        peer = driver.members.find(WorkerId(lost.worker))
        if peer is not None and lost.attempt in (0, peer.attempt) and driver.exchange is not None:
            driver.exchange.peer_lost(worker, peer.placed.id, lost)

    def words(self, now: float) -> list[str]:
        """Of pairs that have not reached each other for a while, and still do not."""
        return [
            f"{worker} has not reached {peer} for {pair.newest - pair.since:.0f} s: {pair.reason}"
            for (worker, peer, is_missing), pair in self._pairs.items()
            if not is_missing and pair.newest - pair.since >= LASTS_S and now - pair.newest <= LASTS_S
        ]
