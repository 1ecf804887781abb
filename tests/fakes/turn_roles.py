"""An engine on two slots of one pod and a gang of four ranks over two pods, in turns on the same slots.

Each role holds a file lock per slot while it is loaded: two roles on one slot at a time end the job with a sentence. A
lock goes with its process, as an accelerator's memory does. Imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_worker.channels import lineage
from rlinf_worker.channels.protocol import Item, PolicyVersion
from rlinf_worker.flows.protocol import Flow, Ticket
from rlinf_worker.roles.protocol import GangStore, Memory, RoleContext

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


class Rank(OnSlots):
    async def run(self, ctx: RoleContext) -> None:
        self.folder = str(ctx.config["locks"])
        async with ctx.turn():
            await self.load()
            barrier = await Barrier.join(await ctx.join_gang())
            found = ctx.checkpoints.latest()
            version = await ctx.ready(version=found[0] if found else None, state_json=found[2] if found else "")
            ctx.phase("step", deadline_s=1.5)
            units, items = ctx.channel("units"), list[Item]()
            while not ctx.stopping.is_set():
                taken = await units.take_round()
                if (taken.branch, taken.step) <= (version.branch, version.number):
                    continue
                items = [i for i in items if (i.branch, i.step) == (taken.branch, taken.step)] + list(taken.items)
                if taken.last:
                    with ctx.span("comm", step=taken.step):
                        await barrier.wait()
                    keys = tuple(item.key for item in items)
                    commit = await ctx.step_done(taken.step, branch=taken.branch, keys=keys, metrics={})
                    version = commit.version
                    self._save(ctx, version, commit.state_json, wanted=commit.checkpoint)
                    for item in items:
                        units.ack(item)
                    items = []
                    if commit.last:
                        break
                await ctx.safe_point()
        await ctx.stopping.wait()

    def _save(self, ctx: RoleContext, version: PolicyVersion, state_json: str, *, wanted: bool) -> None:
        if wanted and ctx.rank == 0:
            (Path(ctx.checkpoints.begin(version)) / "weights").write_text(str(version))
            ctx.checkpoints.finish(version, state_json)


class Barrier:
    """The collective: nobody goes on before all are there. A rank that has died ends the others' wait with an error."""

    def __init__(self, store: GangStore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._store, self._reader, self._writer = store, reader, writer

    @classmethod
    async def join(cls, store: GangStore) -> Barrier:
        if store.rank == 0:
            arrived: list[asyncio.StreamWriter] = []

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while await reader.read(1):
                    arrived.append(writer)
                    if len(arrived) == store.world:
                        for each in arrived:
                            each.write(b"!")
                        arrived.clear()
                writer.close()

            cls._server = await asyncio.start_server(serve, store.host, store.port)
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(ConnectionError):
                    return cls(store, *await asyncio.open_connection(store.host, store.port))
                await asyncio.sleep(0.01)

    _server: asyncio.Server

    async def wait(self) -> None:
        self._writer.write(b".")
        if not await self._reader.read(1):
            raise ConnectionError("a rank of the gang has gone")
