"""The synthetic role that ends steps: takes rounds, commits with its other ranks, publishes weights, keeps checkpoints.

take_round ... last ──> step_done ──(all ranks)──> syncMs and a real publish ──> checkpoint ──> ack

As a gang (`gang: true`) its ranks take a round together, which lasts as long as the largest part; else each rank works
on its own part and only the step is common.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from rlinf_worker.channels import lineage
from rlinf_worker.channels.protocol import ChannelClosed, Item, PolicyVersion, Round
from rlinf_worker.roles import saving
from rlinf_worker.roles.protocol import GangStore, StepCommit
from rlinf_worker.roles.synthetic.desk import Desk
from rlinf_worker.roles.synthetic.gang import Meeting
from rlinf_worker.roles.synthetic.services import Joined

CHECKPOINT_FILE = "synthetic.json"


class Committing:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._channels = desk.inputs()
        self._joined = Joined(self._channels)
        self._store: GangStore | None = None
        self._meeting: Meeting | None = None
        self._version = PolicyVersion(0, 0)

    async def ready(self) -> None:
        ctx = self._desk.ctx
        if ctx.world > 1:
            self._store = await ctx.join_gang()
            if self._desk.figures.gang:
                self._meeting = Meeting(self._store, total=self._round_s)
                await self._meeting.open()
        found = ctx.checkpoints.latest()
        version, _, state_json = found if found is not None else (None, "", "")
        self._version = await ctx.ready(version=version, state_json=state_json)

    async def run(self) -> None:
        try:
            await self._publish(closes_step=False)
            await self._steps()
        finally:
            if self._meeting is not None:
                await self._meeting.close()

    async def _steps(self) -> None:
        ctx, taken = self._desk.ctx, list[tuple[Item, ...]]()
        while not ctx.stopping.is_set():
            try:
                part = await self._channels[0].take_round()
                if (part.branch, part.step) <= (self._version.branch, self._version.number):
                    continue  # a new driver cannot know that this step's last round had come
                self._joined.forget(part.branch)
                given = [await self._joined.complete(item) for item in part.items]
            except ChannelClosed:
                return
            taken = [i for i in taken if (i[0].branch, i[0].step) == (part.branch, part.step)] + given
            if not part.last:
                await self._work(part)
                continue
            commit = await self._commit(taken, part)
            for items in taken:
                for channel, item in zip(self._channels, items, strict=True):
                    channel.ack(item)
            taken = []
            if commit.last:
                return
            await ctx.safe_point()  # with nothing in hand: a role that is off its slots is asked back by what waits

    # --- one round ----------------------------------------------------------------------------------------------------
    def _round_s(self, largest_s: float) -> float:
        figures, world = self._desk.figures, self._desk.ctx.world
        seconds = figures.batch_s() + largest_s + figures.gang_sync_s * (world - 1) / world
        return self._desk.jitter(seconds)

    async def _work(self, part: Round) -> None:
        desk, figures, step = self._desk, self._desk.figures, part.step
        own_s = sum(figures.item_s(item.key, step=step) for item in part.items)
        if not figures.gang:
            if part.items:
                with desk.ctx.span("compute", step=step):
                    await desk.pacer.spend(desk.jitter(figures.batch_s() + own_s))
            return
        if self._meeting is not None:
            with desk.ctx.span("comm", step=step):
                total_s = await self._meeting.agree((part.branch, step, part.number), own_s)
        else:
            total_s = self._round_s(own_s)
        compute_s = min(total_s, figures.batch_s() + own_s)
        with desk.ctx.span("compute", step=step):
            await desk.pacer.spend(compute_s)
        if total_s > compute_s:  # the largest part of another rank, and syncMs
            with desk.ctx.span("comm", step=step):
                await desk.pacer.spend(total_s - compute_s)

    # --- the end of a step --------------------------------------------------------------------------------------------
    async def _commit(self, taken: list[tuple[Item, ...]], part: Round) -> StepCommit:
        ctx = self._desk.ctx
        keys = tuple(sorted((items[0].key for items in taken), key=lineage.sort_key))
        metrics: Mapping[str, float] = {"units_count": float(len(keys))}
        commit = await ctx.step_done(part.step, branch=part.branch, keys=keys, metrics=metrics)
        self._version = commit.version
        await self._publish(closes_step=True)  # before the turn may end: the others wait for these weights
        if commit.checkpoint and ctx.rank == 0:
            await self._save(commit)
        return commit

    async def _publish(self, *, closes_step: bool) -> None:
        """syncMs is how long it takes; the real publish is a part of it."""
        desk, weights = self._desk, self._desk.graph.weights
        if weights is None or weights.producer != desk.ctx.role:
            return
        with desk.ctx.span("weights", step=self._version.number):
            begun = monotonic()
            if desk.ctx.rank == 0:
                await desk.ctx.weights.publish(self._version, self._edition())
            if closes_step:
                await desk.pacer.spend(max(0.0, desk.jitter(weights.sync_s) - (monotonic() - begun)))

    def _edition(self) -> dict[str, Any]:
        """Other bytes for each version: a receiver that mixed two of them up would notice."""
        seed = f"{self._version}/".encode()
        size = self._desk.figures.weights_bytes
        return {"weights": (seed * (size // len(seed) + 1))[:size]}

    async def _save(self, commit: StepCommit) -> None:
        ctx = self._desk.ctx

        def write(folder: Path) -> None:
            (folder / CHECKPOINT_FILE).write_text(json.dumps({"step": commit.step}), encoding="utf-8")

        ctx.phase("load")
        with ctx.span("other", step=commit.step):
            await saving.save(ctx, commit, write)
        ctx.phase("step")
