"""Queues as a role sees them: typed, bounded, acknowledged units from one role to another. Cycles are cycles.protocol.

Any producer, any consumer: the producer announces units, the driver matches them with consumers by credit, the consumer
pulls the payload once from where it was made.

Order of calls on a consumed item: take -> (put of what was made from it, with parents=[item]) -> ack or drop, exactly
one of them. An item whose worker dies before that is redelivered. On a producer, `put` returns once the item is
accepted within the bounds; its payload is kept until the consumer has acknowledged it.

How often an item is taken: a unit counts in one step once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NewType, Protocol

from rlinf_api.errors import RLinfError
from rlinf_api.names import WorkerId

LineageKey = NewType("LineageKey", str)
PARTIAL_BYTES: Final = 256 << 10
"""The most bytes that are kept of one unfinished unit, as JSON: 30,000 tokens with the versions of their weights. They
go through the driver."""


class ChannelClosed(RLinfError):
    """The end: this worker stops. Not a time-out, not a failure."""


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """Which weights: (branch, number). Restoring a checkpoint opens a new branch; a newer branch is newer throughout.

    >>> PolicyVersion(0, 41) < PolicyVersion(1, 20)
    True
    """

    branch: int
    number: int

    def __str__(self) -> str:
        return f"b{self.branch}-{self.number}"


FIRST_VERSION: Final = PolicyVersion(0, 0)


def oldest_version(step: int, *, branch: int, max_staleness: int) -> PolicyVersion:
    """The oldest weights that a unit of a step may be made with. What is of a branch before it is older throughout.

    >>> oldest_version(17, branch=2, max_staleness=1)
    PolicyVersion(branch=2, number=15)
    """
    return PolicyVersion(branch, max(0, step - 1 - max_staleness))


@dataclass(slots=True, kw_only=True, eq=False)
class Item:
    """What `take` returns. Units carry a lineage key that is unique within (channel, branch); questions and their
    answers carry whatever key the asker gave.

    `cancelled` turns True when nobody will need what is made from it (its branch is dead, its asker gone, another has
    made it): a role may stop working on it at its next safe point and must still ack, answer or drop it. Who works on
    many at once is told by `on_cancel`. `partial`: what whoever had it before has left (`Channel.keep`). `release()`
    frees the memory that a large payload borrows from a link; called by ack and drop, earlier where the role has copied
    what it needs.
    """

    channel: str
    key: LineageKey
    payload: Any
    step: int
    branch: int
    source: WorkerId
    version: PolicyVersion
    weight: float = 1.0
    cancelled: bool = False
    tickets: tuple[str, ...] = ()
    """Keys of the tickets that it comes of, its own among them where it is one; none, of what a cycle brings."""
    wants_seal: bool = False
    """The driver has to hear that no more is made of it."""
    partial: Any = None
    is_settled: bool = field(default=False, repr=False)
    """The role has acknowledged, answered or dropped it. Set by the runtime."""
    _borrows: bool = field(default=False, repr=False)
    _on_cancel: tuple[Callable[[], object], ...] = field(default=(), repr=False)

    def on_cancel(self, tell: Callable[[], object]) -> None:
        """`tell` is called once, in the event loop, as `cancelled` turns True; at once where it has. It must neither
        block nor raise: `lambda: engine.abort(item.key)`, `event.set`."""
        if self.cancelled:
            tell()
        else:
            self._on_cancel = (*self._on_cancel, tell)

    def cancel(self) -> None:
        """The runtime's. Told again, nothing happens."""
        self.cancelled = True
        told, self._on_cancel = self._on_cancel, ()
        for tell in told:
            tell()

    def settle(self) -> None:
        """The runtime's: the role has acknowledged, answered or dropped it, and is told nothing more of it."""
        self.is_settled, self._on_cancel = True, ()
        self.release()

    def release(self) -> None:
        if self._borrows:
            self._borrows, self.payload = False, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One micro-batch for every rank of a gang; `items` is this rank's part and may be empty (padding)."""

    step: int
    branch: int
    number: int
    last: bool  # the step's last one
    items: tuple[Item, ...]
    total_weight: float  # all ranks' together


class Channel(Protocol):
    """One end of one channel, in one worker. `name` is what the flow called it."""

    @property
    def name(self) -> str: ...

    @property
    def micro_batch(self) -> int:
        """How many units a consumer takes at once, says the plan in force."""

    async def put(
        self,
        payload: Any,
        *,
        key: LineageKey | str,
        step: int | None = None,
        branch: int | None = None,
        version: PolicyVersion | None = None,
        weight: float = 1.0,
        parents: Sequence[Item] = (),
    ) -> None:
        """Producer. Waits while the channel is full (the wait is a span `wait_data`).

        What is not given comes from `parents`: step and branch of the newest of them, version of the oldest, or of the
        weights that this worker has where those are older. Without parents `step` has to be given, `branch` is the
        newest that this worker knows of, and the version, where it has no weights, the oldest that the step allows.

        Raises StaleVersion where the version is older than the step allows (spec.flow.maxStaleness): it was made with
        weights that nobody may train its step on, and UserError where a parent is acknowledged or dropped already, or
        where it has none and its key is no ticket of what the role has in hand (docs/channels.md says which roles).

        Of one parent any number of units may be made, and one of several parents. `ack` says of a parent that no more
        come: it is finished once the next consumers hold all that name it, and made again where its worker dies before.
        What is made again has to get the same key. After `put` the payload must not be changed.
        """

    async def take(self) -> Item:
        """Consumer, one item. Raises ChannelClosed at the end."""

    def take_now(self) -> Item | None:
        """Consumer: the next item, if it is here already. Never waits, not for the end either."""

    def room(self, units: int) -> None:
        """Consumer that works on many at once, as an engine does: how many it could begin now. So many may come, where
        the plan's `micro_batch * depth` are fewer: what can be begun waits for nothing. To be said again whenever it
        has changed; 0: the plan's alone. What was given by an earlier word still comes. Never blocks."""

    async def take_batch(self, *, at_least: int = 1) -> list[Item]:
        """Consumer that is no gang: up to `micro_batch` units, the oldest policy version first. Waits until
        `at_least` of them are here (never for more than `micro_batch`) and takes what else is here already: units that
        finish one by one are coalesced, and what is more than the plan's size is left for the next call. Each payload
        stays the memory that it came in; nothing is copied. A unit that cannot be read costs none before it: its error
        is raised by the next call."""

    def __aiter__(self) -> AsyncIterator[Item]:
        """`async for item in channel`, until the end."""

    async def take_round(self) -> Round:
        """Consumer that is a gang: every rank calls it, every rank gets its part of the same round."""

    def ack(self, item: Item) -> None:
        """Consumer: no more is put that is made of this item, or it entered a committed step. Never blocks: the item
        is finished once the next consumers hold what was."""

    def keep(self, item: Item, partial: Any) -> bool:
        """Consumer: what there is of what it makes from this item, plain (JSON) and small; the last one counts. Should
        this worker not finish it, whoever is given the item next finds it as `item.partial`. It may be lost, with the
        driver and the worker at once or for want of room, and then only costs work: who finds none begins anew. False:
        it is larger than PARTIAL_BYTES, and the one before stands. Never blocks; as often as you like."""

    def drop(self, item: Item, reason: str) -> None:
        """Consumer: nothing will be made from this item, by decision. Counted under `reason`, of which there are a
        few; its step commits without what was to come of it: of a ticket all that has not come, of anything else one
        unit."""
