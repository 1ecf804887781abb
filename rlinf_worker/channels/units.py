"""What a queue hands out, without its payload: the words that driver and workers share about units."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from rlinf_api.names import WorkerId
from rlinf_worker.channels.protocol import PolicyVersion

FIRST_VERSION: Final = PolicyVersion(0, 0)
INLINE: Final = WorkerId("")  # producer of units that the driver itself made
GONE: Final = WorkerId("gone/-1")  # producer of units that live on with their consumer alone


COUNTED: Final = ("announced", "acked", "dropped", "redelivered", "lost", "duplicates", "late", "refused", "rehomed")
"""What may become of a unit, as a queue counts it; `late`: its step had committed without it; `rehomed`: it waits for
one that stands in for its consumer."""


class UnitId(NamedTuple):
    branch: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitInfo:
    """One unit without its payload.

    UnitInfo(key="env:3@17", branch=2, step=17, weight=128.0, size_bytes=65_536, version=PolicyVersion(2, 16),
             parents=("segments:3@17",), producer="env/3")
    """

    key: str
    branch: int
    step: int
    weight: float = 1.0
    size_bytes: int = 0
    version: PolicyVersion = FIRST_VERSION
    parents: tuple[str, ...] = ()
    producer: WorkerId = INLINE
    inline: bytes = b""
    affinity: int | None = None

    @property
    def id(self) -> UnitId:
        return UnitId(self.branch, self.key)


class UnitState(Enum):
    WAITING = "waiting"
    ASSIGNED = "assigned"
    HELD = "held"
