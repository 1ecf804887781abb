"""`kind: tests.fakes.light_actor:Light`: an actor of flow ppo that learns nothing, for tests of what is around it.

It publishes, keeps and restores weights of the policy's shapes, a step later a little more each. It starts without
torch, which is more than half of the CPU of a short job. A pod of the test cluster has this file alone: it imports
nothing of the tests.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.roles import spaces
from rlinf_worker.roles.protocol import RoleContext, Trainer, TrainerStep

MORE = np.float32(2.0**-10)


class Light(Trainer):
    inputs = ("trajectories",)
    holds_collectives = False  # every rank does the same

    async def run(self, ctx: RoleContext) -> None:
        await ctx.train(self)

    async def build(self, ctx: RoleContext) -> None:
        self._gang, self._span = ctx.gang, ctx.span
        spec = spaces.policy_spec(await ctx.shared(spaces.FACT), ctx.flow.config)
        self._shapes, self._done = spec.policy_parameters(), 0

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        with self._span("compute", step=step.number, units=len(step.units)):
            self._done = step.number
        returns = [float(value) for payload in step.payloads for value in payload["episode_returns"]]
        return {"return_mean": sum(returns) / len(returns)} if returns else {}

    def weights(self, version: PolicyVersion) -> Mapping[str, Any]:
        of_rank_0 = self._shapes if self._gang.rank == 0 else {}
        return {name: np.full(shape, self._done * MORE, np.float32) for name, shape in of_rank_0.items()}

    # --- checkpoints --------------------------------------------------------------------------------------------------
    def state(self) -> int:
        return self._done

    def write(self, folder: Path, state: int) -> None:
        (folder / "done").write_text(str(state), encoding="utf-8")

    def read(self, folder: Path) -> int:
        return int((folder / "done").read_text(encoding="utf-8"))

    def restore(self, state: int) -> None:
        self._done = state
