"""What workers have left of units that they hold, for whoever is given them next (`Channel.keep`). Bounded: what finds
no room is made again from the beginning. For: driver.flow_queue.
"""

from __future__ import annotations

from typing import Final

from rlinf_worker.queues.units import Age, UnitId

MAX_BYTES: Final = 64 << 20
"""The most bytes of one queue: 1,000 answers of 8,000 tokens. The driver's pod has 512 MiB by default."""


class Partials:
    def __init__(self) -> None:
        self._kept: dict[UnitId, tuple[Age, bytes]] = {}  # who said it last is last
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, uid: UnitId, age: Age, partial: bytes) -> None:
        """In place of what was kept of it; the ones of which nothing has been heard for longest go."""
        self.forget(uid)
        self._kept[uid] = age, partial
        self._bytes += len(partial)
        while self._bytes > MAX_BYTES:
            self.forget(next(iter(self._kept)))

    def of(self, uid: UnitId) -> bytes:
        """Empty: nothing."""
        return self._kept[uid][1] if uid in self._kept else b""

    def forget(self, uid: UnitId) -> None:
        if (known := self._kept.pop(uid, None)) is not None:
            self._bytes -= len(known[1])

    def close(self, upto: Age) -> None:
        for uid in [uid for uid, (age, _) in self._kept.items() if age <= upto]:
            self.forget(uid)
