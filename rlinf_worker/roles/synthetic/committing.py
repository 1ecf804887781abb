"""The synthetic role that ends steps, as a trainer: timers where an update would be, a real publish of a small edition.

As a gang (`gang: true`) its ranks take a round together, which lasts as long as the largest part; else each rank works
on its own part and only the step is common.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlinf_worker.channels.protocol import PolicyVersion, Round
from rlinf_worker.roles.protocol import RoleContext, Trainer, TrainerStep
from rlinf_worker.roles.synthetic.desk import Desk

CHECKPOINT_FILE = "synthetic.json"


class Committing(Trainer):
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
        if not figures.gang:
            if part.items:
                with desk.ctx.span("compute", step=step):
                    await desk.pacer.spend(desk.jitter(figures.batch_s() + own_s))
            return
        gang, factor = desk.ctx.gang, desk.jitter(1.0)
        parts = await gang.meet((part.branch, step, part.number), (own_s, factor))
        largest_s, of_rank_0 = max(seconds for seconds, _ in parts), parts[0][1]
        total_s = (figures.batch_s() + largest_s + figures.gang_sync_s * (gang.world - 1) / gang.world) * of_rank_0
        compute_s = min(total_s, figures.batch_s() + own_s)
        with desk.ctx.span("compute", step=step):
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
