"""What a queue hands out, without its payload: the words that driver and workers share about units."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import force_setattr

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.channels import messages
from rlinf_worker.channels.protocol import FIRST_VERSION, PolicyVersion

INLINE: Final = WorkerId("")  # producer of units that the driver itself made
GONE: Final = WorkerId("gone/-1")  # producer of units that live on with their consumer alone


COUNTED: Final = ("announced", "acked", "dropped", "redelivered", "lost", "duplicates", "late", "refused", "rehomed")
"""What may become of a unit, as a queue counts it; `late`: its step had committed without it; `rehomed`: it waits for
one that stands in for its consumer."""


class UnitId(NamedTuple):
    branch: int
    key: str


class Age(NamedTuple):
    """What is handed out first: the older policy, then the older step."""

    branch: int
    step: int

    @classmethod
    def at(cls, version: PolicyVersion) -> Age:
        """The age of the step that made that version."""
        return cls(version.branch, version.number)

    @classmethod
    def end_of(cls, branch: int) -> Age:
        """Older branches are before it, too."""
        return cls(branch, sys.maxsize)


@lru_cache(maxsize=64)
def _age(branch: int, step: int) -> Age:
    """One value for each age, which is found by being the same: of thousands of units few steps are open at a time."""
    return Age(branch, step)


class UnitInfo(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One unit without its payload.

    UnitInfo(key="env:3@17", branch=2, step=17, weight=128.0, size_bytes=65_536, version=PolicyVersion(2, 16),
             producer="env/3")
    UnitInfo(key="p:3/7", branch=0, step=1, tickets=("p:3",), producer="rollout/0")
    """

    key: str
    branch: int
    step: int
    weight: float = 1.0
    size_bytes: int = 0
    version: PolicyVersion = FIRST_VERSION
    producer: WorkerId = INLINE
    inline: bytes = b""
    affinity: int | None = None
    tickets: tuple[str, ...] = ()
    """Keys of the tickets that it comes of; empty: of the one with its own key."""
    wants_seal: bool = False
    """Somebody has to hear that no more is made of it, before what was is held."""
    partial: bytes = b""
    """What whoever had it before has left of what it made from it: to its consumer, and in no other word of it."""

    # What follows from the others, whatever is said; asked for many times in the life of a unit:
    id: UnitId = UnitId(0, "")
    age: Age = Age(0, 0)
    of_tickets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        force_setattr(self, "id", UnitId(self.branch, self.key))
        force_setattr(self, "age", _age(self.branch, self.step))
        force_setattr(self, "of_tickets", self.tickets or (self.key,))

    @property
    def first_ticket(self) -> str:
        """What it belongs together by."""
        return self.of_tickets[0]

    @classmethod
    def from_pb(cls, message: pb.Unit, *, producer: WorkerId | None = None) -> UnitInfo:
        """`producer`: who has just announced it; None: as the message says."""
        return cls(
            key=message.key,
            branch=message.branch,
            step=message.step,
            weight=message.weight if message.HasField("weight") else 1.0,
            size_bytes=message.bytes,
            version=messages.version_from_pb(message.version),
            producer=WorkerId(message.producer) if producer is None else producer,
            inline=message.inline,
            tickets=tuple(message.tickets[:]),  # a slice of it is read in half the time
            wants_seal=message.wants_seal,
            partial=message.partial,
        )

    def to_pb(self) -> pb.Unit:
        return self.written(pb.Unit)

    def written(self, made: Callable[..., pb.Unit]) -> pb.Unit:
        """`unit.written(assign.units.add)`: where it is to be, without a copy."""
        return made(
            key=self.key,
            branch=self.branch,
            step=self.step,
            weight=self.weight,
            bytes=self.size_bytes,
            version=messages.version_to_pb(self.version),
            producer=self.producer,
            inline=self.inline,
            tickets=self.tickets,
            wants_seal=self.wants_seal,
        )


class UnitState(Enum):
    WAITING = "waiting"
    ASSIGNED = "assigned"
    HELD = "held"


class UnitEntry(msgspec.Struct, eq=False, gc=False):
    """A unit where one queue has it.

    Neither it nor its unit refers to anything that refers back: of the 200,000 of a step none is the collector's.
    """

    unit: UnitInfo
    arrival: int  # keeps its place when it waits again
    state: UnitState = UnitState.WAITING
    consumer: WorkerId | None = None
    round: int = 0  # number of the round that it is in
    is_sealed: bool = False  # its consumer makes no more of it
    is_ready: bool = True  # it lacks no part that another queue has of it
    only: WorkerId | None = None  # while it waits: who alone may have it; None: anybody


def keys_of(channel: str, units: Iterable[UnitInfo]) -> list[pb.Keys]:
    """As messages name units: by branch."""
    found: dict[int, list[str]] = {}
    for unit in units:
        found.setdefault(unit.branch, []).append(unit.key)
    return [pb.Keys(channel=channel, branch=branch, keys=keys) for branch, keys in found.items()]


def uids_of(keys: pb.Keys) -> list[UnitId]:
    return [UnitId(keys.branch, key) for key in keys.keys]
