"""What one end of one channel has done since its worker started: the numbers behind the metrics `rlinf_channel_*`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, NamedTuple

from rlinf_worker.spans import Recorder
from rlinf_worker.sums import End

REASONS_KEPT: Final = 32
"""An end has no more: each is a time series, and an agent has room for 96 of each worker."""
OTHERS: Final = "others"
"""Reasons beyond these, and those that no label should have to hold."""
REASON_CHARS: Final = 100


class Level(NamedTuple):
    """What is at one end now. A producer's: kept until it is acknowledged; a consumer's: assigned and not taken."""

    depth: int = 0
    bytes: int = 0
    oldest_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Account:
    channel: str
    side: str  # producer | consumer
    recorder: Recorder | None = None
    units: bool = False  # a queue's
    items: int = 0
    rounds: int = 0  # taken by this rank
    step: int = -1  # the newest that anything taken is of
    bytes: int = 0
    resent: int = 0
    duplicates: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # calls of `put` that raised, by error: the role's mistakes
    level: Callable[[], Level] = Level
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    end: End = field(init=False)
    _waited_s: float = 0.0
    _waiting_since: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = End(self.channel, self.side)

    def drop(self, reason: str) -> str:
        """An item that the role has ended by decision. As what it counts: a role may name a reason of each item."""
        is_new = reason not in self.dropped
        if is_new and (len(self.dropped) >= REASONS_KEPT or len(reason) > REASON_CHARS):
            reason = OTHERS
        self.dropped[reason] += 1
        return reason

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait of `put` or `take`, however it ends; any number at a time. A span that names this end."""
        since = monotonic()
        self._waiting_since.append(since)
        span = self.recorder.begin("wait_data", on=self.end) if self.recorder is not None else None
        try:
            yield
        finally:
            if span is not None:
                span.end()
            self._waiting_since.remove(since)
            self._waited_s += monotonic() - since

    @property
    def wait_s(self) -> float:
        """The time that `put` and `take` have spent suspended, those that still are included."""
        now = monotonic()
        return self._waited_s + sum(now - since for since in self._waiting_since)
