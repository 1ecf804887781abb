"""The role of kind `synthetic`: reads its numbers, chooses the service, and lets the runtime load and offload it.

Timers stand for work; channels, turns, control and weights are those of any role. docs/synthetic.md says what each
number means. Imports neither numpy nor torch: a worker of it starts in a third of a second of CPU and holds 45 MiB.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_worker.channels.protocol import ChannelClosed, Item, PolicyVersion, Round
from rlinf_worker.queues.channel import Joined
from rlinf_worker.roles.protocol import Memory, RoleContext, Trainer, TrainerStep
from rlinf_worker.roles.synthetic.cycle import Back, Front
from rlinf_worker.roles.synthetic.desk import Courier, Desk, Pacer, figures_of, together
from rlinf_worker.roles.synthetic.figures import Figures

CHECKPOINT_FILE = "synthetic.json"


class Serial:
    """Up to micro-batch units that are there, one after the other; each is released when its own part is done."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._channels = desk.inputs()
        self._joined = Joined(self._channels)
        self._courier = Courier(desk)
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
            self._desk.forget(first[0].branch)
            if alive := [items for items in batch if not self._given_up(items)]:
                yield alive

    def _given_up(self, items: tuple[Item, ...]) -> bool:
        if items[0].cancelled:
            self._joined.drop(items, "cancelled")
        return items[0].cancelled

    async def _work(self, batch: list[tuple[Item, ...]], version: PolicyVersion) -> None:
        desk, step = self._desk, batch[0][0].step
        tokens = desk.figures.tokens(items[0].key for items in batch)
        with desk.ctx.span("compute", step=step, units=len(batch), tokens=tokens):
            seconds = [desk.figures.per_batch_s, *(desk.figures.item_s(items[0].key, step=step) for items in batch)]
            await desk.pacer.spend(
                *map(desk.jitter, seconds),
                after=lambda number: self._courier.send(batch[number - 1], version=version) if number else None,
            )


@dataclass(slots=True)
class _Taken:
    """What was taken, with all its inputs; of a prompt's ticket several units, each in a lane of its own."""

    items: tuple[Item, ...]
    left: int
    is_cut_off: bool = False
    """Cancelled before all of it was made."""


class Concurrent:
    """A unit per free lane, as an engine with continuous batching; each is released at the end of its lane time."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._channels = desk.inputs()
        self._joined = Joined(self._channels)
        self._free = [Pacer(desk.ctx.moved) for _ in range(desk.figures.lanes)]
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
            self._desk.forget(items[0].branch)
            await self._begin_step(items[0])
            keys = self._desk.graph.inside(items[0].key, self._desk.ctx.role)
            taken = _Taken(items, left=len(keys))
            for key in keys:
                lane = await self._lane()
                tasks.create_task(self._work(lane, taken, key, version))

    async def _begin_step(self, item: Item) -> None:
        if item.step != self._step and item.step > self._step:
            self._step = item.step
            with self._desk.ctx.span("compute", step=item.step):
                await self._desk.pacer.spend(self._desk.jitter(self._desk.figures.per_batch_s))

    async def _lane(self) -> Pacer:
        while not self._free:
            self._lane_freed.clear()
            await self._lane_freed.wait()
        return self._free.pop(0)

    async def _work(self, lane: Pacer, taken: _Taken, key: str, version: PolicyVersion) -> None:
        desk, first = self._desk, taken.items[0]
        try:
            finished: tuple[Item, ...] = ()
            if first.cancelled:
                taken.is_cut_off = True
            else:
                with desk.ctx.span("compute", step=first.step, units=1, tokens=desk.figures.tokens([key])):
                    await lane.spend(desk.jitter(desk.figures.lane_s(key, step=first.step)))
                finished = await desk.hand_on(
                    key, step=first.step, branch=first.branch, version=version, parents=taken.items
                )
            taken.left -= 1
            if taken.left == 0 and taken.is_cut_off:
                self._joined.drop(taken.items, "cancelled")
            elif taken.left == 0:
                desk.ack(finished)
        finally:
            self._free.append(lane)
            self._lane_freed.set()


Service = Serial | Concurrent | Front | Back


class SyntheticRole:
    def __init__(self) -> None:
        self._desk: Desk | None = None
        self._is_loaded = False
        self._switching = Pacer()

    async def run(self, ctx: RoleContext) -> None:
        desk = self._desk = Desk(ctx, figures_of(ctx))
        if ctx.role == desk.graph.committing:
            await ctx.train(Committing(desk, in_turn=self._in_turn))
            return
        service = self._service(desk)
        await ctx.ready()
        async with ctx.turn():
            self._in_turn()
            await service.run()

    def _in_turn(self) -> None:
        self._is_loaded = True  # where no lease set is over its slots, nobody loads it

    @staticmethod
    def _service(desk: Desk) -> Service:
        if (cycle := desk.graph.cycle_of(desk.ctx.role)) is not None:
            return Front(desk, cycle) if desk.ctx.role == cycle.front else Back(desk, cycle)
        return Concurrent(desk) if desk.figures.concurrent else Serial(desk)

    @property
    def _figures(self) -> Figures | None:
        return self._desk.figures if self._desk is not None else None

    # --- Offloadable: called by the runtime ---------------------------------------------------------------------------
    def memory(self) -> Memory:
        figures = self._figures
        if figures is None:
            return Memory(now=0)
        now = figures.resident_bytes if self._is_loaded else figures.offloaded_bytes
        return Memory(now=now, resident=figures.resident_bytes, peak=figures.peak_bytes)

    async def load(self) -> None:
        if self._figures is not None and not self._is_loaded:
            await self._switching.spend(self._figures.load_s)
            self._is_loaded = True

    async def offload(self) -> None:
        if self._figures is not None and self._is_loaded:
            await self._switching.spend(self._figures.offload_s)
            self._is_loaded = False


class Committing(Trainer):
    """The role that ends steps: timers where an update would be, a real publish of a small edition. As a gang
    (`gang: true`) its ranks take a round together, which lasts as long as the largest part; else each rank works on its
    own part and only the step is common."""

    holds_collectives = False

    def __init__(self, desk: Desk, *, in_turn: Callable[[], None]) -> None:
        self._desk, self.inputs = desk, desk.graph.takes_from(desk.ctx.role)
        weights = desk.graph.weights
        self._sync_s = weights.sync_s if weights is not None and weights.producer == desk.ctx.role else None
        self._in_turn, self._step = in_turn, 0

    async def build(self, ctx: RoleContext) -> None:
        self._in_turn()

    async def take(self, part: Round) -> None:
        desk, figures, step = self._desk, self._desk.figures, part.step
        own_s = sum(figures.item_s(item.key, step=step) for item in part.items)
        tokens = figures.tokens(item.key for item in part.items)
        if not figures.gang:
            if part.items:
                with desk.ctx.span("compute", step=step, units=len(part.items), tokens=tokens):
                    await desk.pacer.spend(desk.jitter(figures.per_batch_s + own_s))
            return
        gang, factor = desk.ctx.gang, desk.jitter(1.0)
        parts = await gang.meet((part.branch, step, part.number), (own_s, factor))
        largest_s, of_rank_0 = max(seconds for seconds, _ in parts), parts[0][1]
        total_s = (figures.per_batch_s + largest_s + figures.gang_sync_s * (gang.world - 1) / gang.world) * of_rank_0
        compute_s = min(total_s, figures.per_batch_s + own_s)
        with desk.ctx.span("compute", step=step, units=len(part.items), tokens=tokens):
            await desk.pacer.spend(compute_s)
        if total_s > compute_s:  # the largest part of another rank, and syncMs
            with desk.ctx.span("comm", step=step):
                await desk.pacer.spend(total_s - compute_s)

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        self._step = step.number
        return {"units_count": float(len(step.units))}

    def weights(self, version: PolicyVersion) -> Mapping[str, Any] | None:
        """Other bytes for each version: a receiver that mixed two of them up would notice."""
        if self._sync_s is None:
            return None
        if self._desk.ctx.rank != 0:
            return {}
        seed = f"{version}/".encode()
        size = self._desk.figures.weights_bytes
        return {"weights": (seed * (size // len(seed) + 1))[:size]}

    async def committed(self, version: PolicyVersion, *, publish_s: float) -> None:
        """syncMs is how long it takes; the real publish is a part of it."""
        if self._sync_s is not None:
            await self._desk.pacer.spend(max(0.0, self._desk.jitter(self._sync_s) - publish_s))

    def state(self) -> int:
        return self._step

    def write(self, folder: Path, state: int) -> None:
        (folder / CHECKPOINT_FILE).write_text(json.dumps({"step": state}), encoding="utf-8")
