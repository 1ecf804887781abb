"""An engine on two slots of one pod and a gang of four ranks over two pods, in turns on the same slots.

Each role holds a file lock per slot while it is loaded: two roles on one slot at a time end the job with a sentence. A
lock goes with its process, as an accelerator's memory does. Imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_worker.channels import lineage
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.flows.protocol import Flow, Ticket
from rlinf_worker.roles.protocol import Memory, RoleContext, Trainer, TrainerStep

UNITS = 8  # of a step


async def flow(flow: Flow) -> None:
    tickets = flow.source("tickets", to="engine")
    flow.queue("units", "engine", "trainer", rounds=True)
    async for step in flow.steps():
        made = [Ticket(key=lineage.segment(n, step=step.number), payload={"n": n}) for n in range(UNITS)]
        await tickets.put(made, step=step)


class OnSlots:
    """Offloadable: what is moved is the right to the slots."""

    folder = ""
    _locks: tuple[int, ...] = ()

    def memory(self) -> Memory:
        return Memory(now=len(self._locks))

    async def load(self) -> None:
        if self._locks:
            return
        folder, ordinal = Path(self.folder), os.environ[names.ENV_ORDINAL]
        for slot in os.environ[names.ENV_WORKER_SLOTS].split(","):
            fd = os.open(folder / f"slot-{ordinal}-{slot}", os.O_RDWR | os.O_CREAT)
            self._locks = (*self._locks, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"slot {ordinal}/{slot} is held by two roles", got=type(self).__name__) from error

    async def offload(self) -> None:
        for fd in self._locks:
            os.close(fd)
        self._locks = ()


class Engine(OnSlots):
    async def run(self, ctx: RoleContext) -> None:
        self.folder = str(ctx.config["locks"])
        async with ctx.turn():
            await self.load()
            await ctx.ready()
            ctx.phase("step", deadline_s=1.5)
            tickets, units = ctx.channel("tickets"), ctx.channel("units")
            async for ticket in tickets:
                with ctx.span("compute", step=ticket.step):
                    await asyncio.sleep(0.001)
                await units.put(
                    ticket.payload, key=ticket.key, step=ticket.step, branch=ticket.branch, version=ticket.version,
                    parents=[ticket],
                )  # fmt: skip
                tickets.ack(ticket)
                await ctx.safe_point()


class Rank(OnSlots, Trainer):
    inputs = ("units",)

    async def run(self, ctx: RoleContext) -> None:
        await ctx.train(self)

    async def build(self, ctx: RoleContext) -> None:
        self.folder, self._ctx = str(ctx.config["locks"]), ctx
        await self.load()

    def weights(self, version: PolicyVersion) -> None:
        self._ctx.phase("step", deadline_s=1.5)

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        return {}

    def write(self, folder: Path, state: None) -> None:
        (folder / "weights").write_text("none")
