"""What one end of one channel has done since its worker started: the numbers behind the metrics `rlinf_channel_*`.

Called by runtime.streams and runtime.queues from the event loop; read by runtime.counters twice a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Level(NamedTuple):
    """What is at one end now. A producer's: kept until it is acknowledged; a consumer's: assigned and not taken."""

    depth: int = 0
    bytes: int = 0
    oldest_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Account:
    """`wait_s` is the time that `put` or `take` spent suspended."""

    channel: str
    side: str  # producer | consumer
    units: bool = False  # of a queue
    items: int = 0
    rounds: int = 0  # taken by this rank
    step: int = -1  # the newest that anything taken is of
    bytes: int = 0
    wait_s: float = 0.0
    resent: int = 0
    duplicates: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # calls of `put` that raised, by error: the role's mistakes
    level: Callable[[], Level] = Level
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
