"""`kind: tests.fakes.third_trainer:LineFit`: a trainer that is neither PPO nor a timer, as somebody would write one.

Fits y = slope * x + offset to the points of a step by least mean squares, over all ranks of its gang. The loop of steps
(rounds, commits, publishing, acknowledging, checkpoints, recovery) is none of its business. Config: `rate`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.roles.protocol import RoleContext, Trainer, TrainerStep


class LineFit(Trainer):
    inputs = ("points",)
    holds_collectives = False  # its ranks wait for each other in `meet`

    async def run(self, ctx: RoleContext) -> None:
        await ctx.train(self)

    async def build(self, ctx: RoleContext) -> None:
        self._gang, self._span, self._rate = ctx.gang, ctx.span, float(ctx.config.get("rate", 0.1))
        self.line = {"slope": 0.0, "offset": 0.0}

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        slope, offset = self.line["slope"], self.line["offset"]
        with self._span("compute", step=step.number):
            errors = [(slope * point["x"] + offset - point["y"], point["x"]) for point in step.payloads]
        mine = [sum(e * x for e, x in errors), sum(e for e, _ in errors), sum(e * e for e, _ in errors), len(errors)]
        ranks = await self._gang.meet((step.branch, step.number, 0), mine)
        by_slope, by_offset, squares, count = (sum(column) for column in zip(*ranks, strict=True))
        self.line = {
            "slope": slope - self._rate * by_slope / max(1, count),
            "offset": offset - self._rate * by_offset / max(1, count),
        }
        return {"loss": squares / max(1, count), "points_count": float(len(errors))}

    def weights(self, version: PolicyVersion) -> Mapping[str, Any]:
        return dict(self.line) if self._gang.rank == 0 else {}

    # --- checkpoints --------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, float]:
        return self.line

    def write(self, folder: Path, state: dict[str, float]) -> None:
        (folder / "line.json").write_text(json.dumps(state), encoding="utf-8")

    def read(self, folder: Path) -> dict[str, float]:
        return dict(json.loads((folder / "line.json").read_text(encoding="utf-8")))

    def restore(self, state: dict[str, float]) -> None:
        self.line = state
