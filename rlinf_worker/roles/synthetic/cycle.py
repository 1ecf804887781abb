"""A cycle: sub-batches of a step's units travel between two roles, round trip by round trip. The front asks.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| Front.run | tickets, gathers them to sub-batches | a ticket | the driver |
| Front, answers | sub-batches that come back | an answer | the back |
| Back.run | sub-batches | a question | the front |
| both, one server | passages, one after the other | a passage | the above |

A sub-batch is one question of the cycle. The front keeps its tickets until the back has handed on what came of them;
where a front dies, its tickets are handed out again and the sub-batch begins its journey anew. Of a front that another
role feeds a sub-batch is one unit, and as many of them are asked for at once as there are stages: it knows of no share.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from rlinf_worker.channels.protocol import Channel, Item, LineageKey
from rlinf_worker.roles.synthetic.desk import Desk, together
from rlinf_worker.roles.synthetic.graph import Cycle

GATHER_S: Final = 0.05
"""After so long without a further ticket a sub-batch leaves incomplete. Only a front that was started again meets it:
what its earlier life had finished does not come again."""


@dataclass(slots=True, eq=False)
class _SubBatch:
    tickets: list[Item]
    number: int
    trips: int = 0  # passages through the front so far
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def keys(self) -> list[str]:
        return [ticket.key for ticket in self.tickets]


class _Server:
    """The slot: one passage at a time, in order of arrival. From its arrival on a passage has a span open: what is in
    hand here is not waited for in any channel, and the slots must not be given away over it."""

    def __init__(self, desk: Desk, work: Callable[[Any], Awaitable[None]], *, hop_s: float) -> None:
        self._desk, self._work, self._hop_s = desk, work, hop_s
        # bounded by the sub-batches that there are
        self._waiting: asyncio.Queue[tuple[Any, AbstractContextManager[object]]] = asyncio.Queue()

    def add(self, passage: Any, *, delay_s: float = 0.0) -> None:
        in_hand = self._desk.ctx.span("comm")
        in_hand.__enter__()
        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, self._waiting.put_nowait, (passage, in_hand))
        else:
            self._waiting.put_nowait((passage, in_hand))

    def arrived(self, passage: Any, item: Item) -> None:
        """A hand-over takes hopMs, the real one included."""
        under_way = max(0.0, time.time() - float(item.payload["sent"]))
        self.add(passage, delay_s=self._hop_s - under_way)

    async def run(self) -> None:
        while True:
            passage, in_hand = await self._waiting.get()
            try:
                await self._work(passage)
            finally:
                in_hand.__exit__(None, None, None)

    async def passage(self, keys: list[str], *, step: int) -> None:
        desk, figures = self._desk, self._desk.figures
        seconds = figures.per_batch_s + sum(figures.item_s(key, step=step) for key in keys)
        with desk.ctx.span("compute", step=step, units=len(keys), tokens=figures.tokens(keys)):
            await desk.pacer.spend(desk.jitter(seconds))


class Front:
    def __init__(self, desk: Desk, cycle: Cycle) -> None:
        self._desk, self._cycle = desk, cycle
        self._tickets: Channel = desk.inputs()[0]
        self._asking = desk.ctx.asking(cycle.channel)
        self._server = _Server(desk, self._passage, hop_s=cycle.hop_s)
        self._gathering: dict[tuple[int, int, int], _SubBatch] = {}
        self._asked: dict[str, _SubBatch] = {}  # by the key of its question
        self._numbers = itertools.count(1)
        self._is_fed = bool(desk.graph.inputs(desk.ctx.role))
        self._under_way = 0
        self._to_ask: deque[_SubBatch] = deque()  # of a front that is fed; bounded by the units that it has

    async def run(self) -> None:
        async with together() as tasks:
            others = [tasks.create_task(self._server.run()), tasks.create_task(self._answers())]
            async for ticket in self._tickets:
                if self._is_fed:
                    self._server.add(_SubBatch([ticket], number=next(self._numbers)))
                else:
                    self._gather(ticket)
            for task in others:
                task.cancel()

    # --- tickets ------------------------------------------------------------------------------------------------------
    def _gather(self, ticket: Item) -> None:
        share = int(ticket.payload["of"])
        stages = min(share, self._stages)
        number = int(ticket.payload["at"]) % stages
        size, uid = len(range(number, share, stages)), (ticket.branch, ticket.step, number)
        batch = self._gathering.get(uid)
        if batch is None:
            batch = self._gathering[uid] = _SubBatch([], number=next(self._numbers))
        batch.tickets.append(ticket)
        if batch.timer is not None:
            batch.timer.cancel()
        if len(batch.tickets) >= size:
            self._leave(uid)
        else:
            batch.timer = asyncio.get_running_loop().call_later(GATHER_S, self._leave, uid)

    @property
    def _stages(self) -> int:
        return self._desk.ctx.stages(self._cycle.channel) or self._cycle.stages

    def _leave(self, uid: tuple[int, int, int]) -> None:
        batch = self._gathering.pop(uid, None)
        if batch is not None:
            self._server.add(batch)

    # --- passages -----------------------------------------------------------------------------------------------------
    async def _passage(self, batch: _SubBatch) -> None:
        for ticket in [t for t in batch.tickets if t.cancelled]:
            batch.tickets.remove(ticket)
            self._tickets.drop(ticket, "cancelled")
        self._under_way -= bool(batch.trips)
        if batch.tickets:
            await self._server.passage(batch.keys, step=batch.tickets[0].step)
            batch.trips += 1
            self._to_ask.append(batch)
        await self._ask()

    async def _ask(self) -> None:
        while self._to_ask and (self._under_way < self._stages or not self._is_fed):
            batch = self._to_ask.popleft()
            self._under_way += 1
            first = batch.tickets[0]
            key = f"{first.branch}/{first.step}/{batch.number}/{batch.trips}"
            self._asked[key] = batch
            await self._asking.ask(
                {
                    "keys": batch.keys,
                    "tickets": [list(ticket.tickets) for ticket in batch.tickets],
                    "trip": batch.trips,
                    "sent": time.time(),
                },
                key=key,
                step=first.step,
                branch=first.branch,
                version=first.version,
            )

    async def _answers(self) -> None:
        async for answer in self._asking:
            batch = self._asked.pop(answer.key)
            if answer.cancelled:
                for ticket in batch.tickets:
                    self._tickets.drop(ticket, "unanswered")
            elif batch.trips < self._cycle.round_trips:
                self._server.arrived(batch, answer)
                continue
            else:
                for ticket in batch.tickets:
                    self._tickets.ack(ticket)
            self._under_way -= 1
            await self._ask()


class Back:
    def __init__(self, desk: Desk, cycle: Cycle) -> None:
        self._desk, self._cycle = desk, cycle
        self._answering = desk.ctx.answering(cycle.channel)
        self._server = _Server(desk, self._passage, hop_s=cycle.hop_s)

    async def run(self) -> None:
        async with together() as tasks:
            server = tasks.create_task(self._server.run())
            async for item in self._answering:
                await self._desk.weights_for(item)
                self._server.arrived(item, item)
            server.cancel()

    async def _passage(self, item: Item) -> None:
        if item.cancelled:
            self._answering.drop(item, "cancelled")
            return
        keys: list[str] = item.payload["keys"]
        await self._server.passage(keys, step=item.step)
        if item.payload["trip"] >= self._cycle.round_trips:
            for key, tickets in zip(keys, item.payload["tickets"], strict=True):
                made_from = ticket(item, key, tickets)
                await self._desk.hand_on(
                    key, step=item.step, branch=item.branch, version=self._desk.version_of(item), parents=[made_from]
                )
        self._answering.answer(item, {"sent": time.time()}, version=self._desk.version_of(item))


def ticket(item: Item, key: str, tickets: Sequence[str]) -> Item:
    """What a unit is made from: the front's, whose tickets the driver hands out again where the unit is lost. Not an
    item of this worker, so that nothing is acknowledged here."""
    return Item(
        channel="",
        key=LineageKey(key),
        payload=None,
        step=item.step,
        branch=item.branch,
        source=item.source,
        version=item.version,
        tickets=tuple(tickets),
    )
