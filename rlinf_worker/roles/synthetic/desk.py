"""What the services of a synthetic role share: its numbers, its clock, its weights, and handing units on.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| Courier | units that are done | room in the next channels | their consumers |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from rlinf_worker.channels.protocol import Channel, ChannelClosed, Item, PolicyVersion
from rlinf_worker.roles.protocol import RoleContext
from rlinf_worker.roles.synthetic.figures import Figures, Jitter
from rlinf_worker.roles.synthetic.graph import Graph

NO_WEIGHTS: Final = PolicyVersion(-1, 0)

MAX_DEBT_S: Final = 0.25
"""Lateness that is made up for. A process that was frozen for seconds must not work for nothing afterwards."""
WORTH_SLEEPING_S: Final = 0.0002
"""Less than this left of a piece is carried on as credit: a sleep would take a millisecond."""
MOVES_EVERY_S: Final = 5.0
"""In a longer piece the runtime is told that work moves, as an engine tells of its tokens: else a unit of the long
tail, longer than the deadline of its worker's phase (20 s at least), is taken for a hang, and made again for ever."""


class Pacer:
    """Timers that come out even, on a machine that wakes late: by up to a millisecond (epoll counts in them), on busy
    cores by more. What one piece took too long, the next one takes less: the sum is right, and nobody spins. One lane,
    whose pieces follow each other. `moved` is called within long ones. `clock` and `sleep` are the test's."""

    def __init__(
        self,
        moved: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], object] = asyncio.sleep,
    ) -> None:
        self._moved, self._clock, self._sleep = moved, clock, sleep
        self.debt_s = 0.0  # how much too long the pieces so far took; negative: too short

    async def spend(self, *pieces: float, after: Callable[[int], None] = lambda number: None) -> float:
        """Pieces that follow each other without a gap; `after` is called at the end of each, and must not block. How
        long they really took in all."""
        begun = now = self._clock()
        for number, seconds in enumerate(pieces):
            due = now + seconds - self.debt_s
            left = due - self._clock()
            while left > MOVES_EVERY_S:
                await self._sleep(MOVES_EVERY_S)  # type: ignore[misc]
                self._moved()
                left = due - self._clock()
            if left > WORTH_SLEEPING_S:
                await self._sleep(left)  # type: ignore[misc]
            ended = self._clock()
            self.debt_s = min(MAX_DEBT_S, ended - due)
            now = ended
            after(number)
        return now - begun


def figures_of(ctx: RoleContext) -> Figures:
    flow = ctx.flow.config
    drift = flow.get("drift") or {}
    return Figures.of(
        ctx.config,
        role=ctx.role,
        workload=str(flow.get("workload", "")),
        slots=max(1, len(ctx.slots)),
        speed=float((flow.get("speeds") or {}).get(ctx.pool, 1.0)),
        drift=drift if drift.get("role") == ctx.role else None,
        option=ctx.allotment.option,
        tokens=flow.get("tokens"),
    )


@dataclass(slots=True)
class _Group:
    """Units that one of the next role's is made of, as far as they are here: by key, what each of them came of."""

    parts: dict[str, Sequence[Item]] = field(default_factory=dict)
    versions: list[PolicyVersion] = field(default_factory=list)

    @property
    def parents(self) -> tuple[Item, ...]:
        return tuple(dict.fromkeys(item for items in self.parts.values() for item in items))


class Desk:
    """One per worker."""

    def __init__(self, ctx: RoleContext, figures: Figures) -> None:
        self.ctx, self._figures, self._option = ctx, figures, ctx.allotment.option
        self.graph = Graph.of(ctx.flow.config)
        self.pacer = Pacer(ctx.moved)
        self.jitter = Jitter(
            jitter=figures.jitter, seed=f"{ctx.flow.seed}/{figures.workload}/{figures.role}/{ctx.rank}/{ctx.attempt}"
        )
        self.held = NO_WEIGHTS
        self._payload = bytes(figures.payload_bytes)
        self._groups: dict[tuple[int, str], _Group] = {}  # by (branch, key); bounded by the units of open steps
        weights = self.graph.weights
        self._pulls = weights is not None and weights.consumer == ctx.role

    @property
    def figures(self) -> Figures:
        """By the plan in force: another option counts from the next piece on, before anything of the next step."""
        if self._option != self.ctx.allotment.option:
            self._figures, self._option = figures_of(self.ctx), self.ctx.allotment.option
        return self._figures

    def inputs(self) -> list[Channel]:
        return [self.ctx.channel(name) for name in self.graph.takes_from(self.ctx.role)]

    async def weights_for(self, item: Item) -> PolicyVersion:
        """The version that works on this item: what it asks for, or newer where that is here."""
        if self._pulls:
            weights = self.ctx.weights
            newer = weights.version is not None and weights.version > self.held
            if newer or item.version > self.held:
                self.held, _ = await weights.pull(item.version)
        return self.version_of(item)

    def version_of(self, item: Item) -> PolicyVersion:
        """The version of what is made from this item: that of the weights here, else that of the item."""
        return self.held if self._pulls else item.version

    async def hand_on(
        self, key: str, *, step: int, branch: int, version: PolicyVersion, parents: Sequence[Item]
    ) -> tuple[Item, ...]:
        """To every role that is fed by this one: one unit, its parts, or what it is a part of, once all of that is
        here. Of which items nothing more is made."""
        for edge in self.graph.outputs(self.ctx.role):
            names, of = self.graph.becomes(key, self.ctx.role, edge.consumer)
            if of > 1:  # its one edge: the flow refuses others beside it
                group = self._groups.setdefault((branch, names[0]), _Group())
                self._drop(group.parts.pop(key, ()))  # it comes anew, and the one before was taken back
                group.parts[key] = parents
                group.versions.append(version)
                if len(group.parts) < of:
                    return ()
                del self._groups[branch, names[0]]
                parents, version = group.parents, min(group.versions)
            for name in names:
                await self.ctx.channel(edge.channel).put(
                    {"bytes": self._payload}, key=name, step=step, branch=branch, version=version, parents=parents
                )
        return tuple(parents)

    def ack(self, items: Sequence[Item]) -> None:
        for item in items:
            self.ctx.channel(item.channel).ack(item)

    def _drop(self, items: Sequence[Item]) -> None:
        for item in items:
            self.ctx.channel(item.channel).drop(item, "cancelled")

    def forget(self, branch: int) -> None:
        """What would be put together of dead branches, whose other parts will not come any more."""
        for uid in [uid for uid in self._groups if uid[0] < branch]:
            self._drop(self._groups.pop(uid).parents)


class Courier:
    """Puts what is done while the next unit is worked on; a full channel is waited for in `empty`, not in between."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._task: asyncio.Task[None] | None = None

    def send(self, items: Sequence[Item], *, version: PolicyVersion) -> None:
        self._task = asyncio.ensure_future(self._send(items, version, self._task))

    async def _send(self, items: Sequence[Item], version: PolicyVersion, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        first = items[0]
        self._desk.ack(
            await self._desk.hand_on(first.key, step=first.step, branch=first.branch, version=version, parents=items)
        )

    async def empty(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            await task


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """Tasks of a role: the first failure is raised as itself, as the others follow from it; the end of the channels,
    which a stopping worker meets in each of them, is none."""
    with contextlib.suppress(ChannelClosed):
        try:
            async with asyncio.TaskGroup() as tasks:
                yield tasks
        except ExceptionGroup as group:  # not except*: before Python 3.11.4 it puts what it raises into a group again
            first = group.exceptions[0]
            raise first from first.__cause__
