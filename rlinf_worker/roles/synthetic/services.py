"""How a synthetic role works on units: one after the other, or several at once as an engine with continuous batching.

| service | takes | waits for | released |
|---|---|---|---|
| Serial | up to micro-batch units that are there | the first unit | each when its own part is done |
| Concurrent | a unit per free lane | a unit, a lane | each at the end of its lane time |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rlinf_worker.channels.protocol import ChannelClosed, Item, PolicyVersion
from rlinf_worker.queues.joined import Joined
from rlinf_worker.roles.synthetic.desk import Courier, Desk, together
from rlinf_worker.roles.synthetic.pace import Pacer


class Serial:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._channels = desk.inputs()
        self._joined = Joined(self._channels)
        self._courier = Courier(desk, self._channels)
        self._in_hand: tuple[Item, ...] | None = None  # of the next batch

    async def run(self) -> None:
        async for batch in self._batches():
            version = await self._desk.weights_for(batch[0][0])
            await self._work(batch, version)
            await self._courier.empty()
            if self._in_hand is None:  # else nothing would ask a role back that is off its slots
                await self._desk.ctx.safe_point()

    async def _batches(self) -> AsyncIterator[list[tuple[Item, ...]]]:
        """Never of two steps: what a newer step waits for would hold up the older one."""
        while not self._desk.ctx.stopping.is_set():
            try:
                first, self._in_hand = self._in_hand or await self._joined.take(), None
                batch, size = [first], self._desk.figures.micro_batch or self._channels[0].micro_batch
                while len(batch) < size and (more := await self._joined.take_now()) is not None:
                    if more[0].step != first[0].step:
                        self._in_hand = more
                        break
                    batch.append(more)
            except ChannelClosed:
                return
            self._joined.forget(first[0].branch)
            if alive := [items for items in batch if not self._given_up(items)]:
                yield alive

    def _given_up(self, items: tuple[Item, ...]) -> bool:
        if items[0].cancelled:
            self._joined.drop(items, "cancelled")
        return items[0].cancelled

    async def _work(self, batch: list[tuple[Item, ...]], version: PolicyVersion) -> None:
        desk, step = self._desk, batch[0][0].step
        with desk.ctx.span("compute", step=step):
            seconds = [desk.figures.batch_s(), *(desk.figures.item_s(items[0].key, step=step) for items in batch)]
            await desk.pacer.spend(
                *map(desk.jitter, seconds),
                after=lambda number: self._courier.send(batch[number - 1], version=version) if number else None,
            )


class Concurrent:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._channels = desk.inputs()
        self._joined = Joined(self._channels)
        self._free = [Pacer() for _ in range(desk.figures.lanes)]
        self._lane_freed = asyncio.Event()
        self._step = 0

    async def run(self) -> None:
        async with together() as tasks:
            await self._take_all(tasks)

    async def _take_all(self, tasks: asyncio.TaskGroup) -> None:
        while not self._desk.ctx.stopping.is_set():
            if len(self._free) == self._desk.figures.lanes:
                await self._desk.ctx.safe_point()  # with nothing in hand
            items = await self._joined.take()
            version = await self._desk.weights_for(items[0])
            self._joined.forget(items[0].branch)
            await self._begin_step(items[0])
            lane = await self._lane()
            tasks.create_task(self._work(lane, items, version))

    async def _begin_step(self, item: Item) -> None:
        if item.step != self._step and item.step > self._step:
            self._step = item.step
            with self._desk.ctx.span("compute", step=item.step):
                await self._desk.pacer.spend(self._desk.jitter(self._desk.figures.batch_s()))

    async def _lane(self) -> Pacer:
        while not self._free:
            self._lane_freed.clear()
            await self._lane_freed.wait()
        return self._free.pop(0)

    async def _work(self, lane: Pacer, items: tuple[Item, ...], version: PolicyVersion) -> None:
        desk, first = self._desk, items[0]
        try:
            if first.cancelled:
                self._joined.drop(items, "cancelled")
                return
            with desk.ctx.span("compute", step=first.step):
                await lane.spend(desk.jitter(desk.figures.lane_s(first.key, step=first.step)))
            await desk.hand_on(first.key, step=first.step, branch=first.branch, version=version, parents=items)
            for channel, item in zip(self._channels, items, strict=True):
                channel.ack(item)
        finally:
            self._free.append(lane)
            self._lane_freed.set()
