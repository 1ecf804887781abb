"""`kind: tests.fakes.sharded_trainer:Sharded`: a trainer each of whose ranks keeps a shard, as somebody would write it.

Step n adds n to every element of `weights` and halves those of `moments`: what is right after n steps is known, and a
checkpoint that mixes steps is seen. Of the points of its flow (line_job.py) it learns nothing. Config: `folder`, where
each rank says what it has saved last and what it has read. While a file `hold` is there, a save says so, and waits.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints.store import Checkpoint
from rlinf_worker.roles import mesh
from rlinf_worker.roles.protocol import RoleContext, Trainer, TrainerStep
from rlinf_worker.roles.shards import Shards, copied

ROWS, COLUMNS = 64, 1000
HELD_S = 60.0
"""At most, by a test that does not come back."""


class Sharded(Trainer):
    inputs = ("points",)
    sharded = True

    async def run(self, ctx: RoleContext) -> None:
        await ctx.train(self)

    async def build(self, ctx: RoleContext) -> None:
        torch.set_num_threads(1)
        self._folder, self._rank, self._world = Path(ctx.config["folder"]), ctx.rank, ctx.world
        found = await mesh.of_gang(ctx.gang)
        self._shards = await Shards.of_gang(ctx.gang)
        self.step = 0
        self.tensors: dict[str, Any] = {"weights": torch.zeros(ROWS, COLUMNS), "moments": torch.ones(ROWS, COLUMNS)}
        if found is not None:
            self.tensors = {name: distribute_tensor(t, found, [Shard(0)]) for name, t in self.tensors.items()}

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        self.step = step.number
        self.tensors["weights"] += step.number
        self.tensors["moments"] *= 0.5
        return {"points_count": float(len(step.units))}

    def weights(self, version: PolicyVersion) -> Mapping[str, Any]:
        return {"slope": 0.0, "offset": 0.0} if self._rank == 0 else {}

    # --- checkpoints --------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        return copied({**self.tensors, "step": self.step})

    def write(self, folder: Path, state: dict[str, Any]) -> None:
        if (self._folder / "hold").exists():
            (self._folder / f"writes-{state['step']}-{self._rank}").touch()
            deadline = time.monotonic() + HELD_S
            while (self._folder / "hold").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        self._shards.write(folder, state)
        self._tell(state)

    def read_shards(self, saved: Checkpoint) -> None:
        into = {**self.tensors, "step": 0}
        self._shards.read(saved, into=into)
        self.step = into["step"]
        (self._folder / f"read-by-{self._rank}-of-{self._world}").write_text(f"{saved.version} {self.step}")

    def _tell(self, state: dict[str, Any]) -> None:
        """All elements are one value, or it says so."""
        local = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in state.items() if n != "step"}
        values = {name: sorted(set(tensor.flatten().tolist())) for name, tensor in local.items()}
        rows = {name: tensor.shape[0] for name, tensor in local.items()}
        told = f"{state['step']} {values} {rows}"
        (self._folder / f"has-{self._rank}-of-{self._world}").write_text(told)
