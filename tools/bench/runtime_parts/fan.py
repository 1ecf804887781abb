"""A flow and two roles that measure a queue: units of 1 KB from two producers, each in a pod of its own, to two
consumers in a third, whoever has room.

For: channels.py, which runs fan.yaml with `rljob run`.

    driver -- tickets --> producer x 2 -- units (queue) --> consumer x 2 (the gang that commits)
                              └──────── results (rounds) ───────┘

A ticket is a producer's share of a step; its result goes to the gang once all its units have been put. Each consumer
takes and acknowledges until the gang has both results and every unit is taken: it counts its own, and both see the end
of the step in `results`. Both clocks are the machine's: `rate` is of one window for both consumers, from the moment at
which the first batch had been taken by either until the last one had, over the units that were taken within it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any, Final

from rlinf_worker.channels.protocol import Channel, ChannelClosed, Item
from rlinf_worker.flows.protocol import Flow, Ticket
from rlinf_worker.roles.protocol import RoleContext

SHARES: Final = 2
CONSUMERS: Final = 2
LOOK_S: Final = 0.02


def check_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: int(config.get(name, value)) for name, value in {"units": 10_000, "bytes": 1024}.items()}


def rate(told: Mapping[str, float]) -> float:
    """Units a second, by what the consumers report of a step.

    >>> rate({"taken_0": 64, "first_ns_0": 1e9, "first_batch_0": 8, "last_ns_0": 2e9,
    ...       "taken_1": 64, "first_ns_1": 2e9, "first_batch_1": 8, "last_ns_1": 3e9})
    60.0
    """
    ranks = [rank for rank in range(CONSUMERS) if told[f"taken_{rank}"]]
    earliest = min(ranks, key=lambda rank: told[f"first_ns_{rank}"])
    seconds = (max(told[f"last_ns_{rank}"] for rank in ranks) - told[f"first_ns_{earliest}"]) / 1e9
    within = sum(told[f"taken_{rank}"] for rank in ranks) - told[f"first_batch_{earliest}"]
    return within / seconds


async def flow(flow: Flow) -> None:
    tickets = flow.source("tickets", to="producer")
    flow.queue("units", "producer", "consumer")
    flow.queue("results", "producer", "consumer", rounds=True)
    async for step in flow.steps():
        shares = [Ticket(key=f"share:{n}@{step.number}", affinity=n) for n in range(SHARES)]  # type: ignore[arg-type]
        await tickets.put(shares, step=step)


class Producer:
    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        units, results = ctx.channel("units"), ctx.channel("results")
        data, count = bytes(ctx.flow.config["bytes"]), ctx.flow.config["units"] // SHARES
        async for ticket in ctx.channel("tickets"):
            for number in range(count):
                await units.put(data, key=f"{ticket.key}/{number}", step=ticket.step, branch=ticket.branch)
            await results.put({}, key=ticket.key, step=ticket.step, branch=ticket.branch, parents=[ticket])
            ctx.channel("tickets").ack(ticket)


class Consumer:
    async def run(self, ctx: RoleContext) -> None:
        await ctx.gang.form()
        await ctx.ready()
        self.taken = self.first_batch = self.first_ns = self.last_ns = 0
        taking = asyncio.create_task(self.take(ctx.channel("units")))
        try:
            with contextlib.suppress(ChannelClosed):
                while not await self.step(ctx):
                    pass
            await ctx.stopping.wait()
        finally:
            taking.cancel()
            await asyncio.wait([taking])

    async def take(self, units: Channel) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                for item in await units.take_batch():
                    units.ack(item)
                    self.taken += 1
                self.last_ns = time.monotonic_ns()
                if not self.first_ns:
                    self.first_ns, self.first_batch = self.last_ns, self.taken

    async def step(self, ctx: RoleContext) -> bool:
        """A producer has put all its units before its result; the gang has taken them when its counts say so."""
        results, items, is_last = ctx.channel("results"), list[Item](), False
        while not is_last:
            taken = await results.take_round()
            items += taken.items
            is_last = taken.last
        units, looks = ctx.flow.config["units"] // SHARES * SHARES, 0
        while sum(await ctx.gang.meet((taken.branch, taken.step, looks), self.taken)) < units:
            looks += 1
            await asyncio.sleep(LOOK_S)
        own = {"taken": self.taken, "first_batch": self.first_batch, "first_ns": self.first_ns, "last_ns": self.last_ns}
        told = {f"{name}_{ctx.rank}": float(value) for name, value in own.items()}  # exact: 2^53 ns are 104 days
        ctx.report(step=taken.step, metrics=told)
        self.taken = self.first_ns = 0
        keys = tuple(item.key for item in items)
        commit = await ctx.step_done(taken.step, branch=taken.branch, keys=keys, metrics={})
        for item in items:
            results.ack(item)
        if commit.checkpoint and ctx.rank == 0:  # nothing to keep, but a job that wants one waits for it
            ctx.checkpoints.begin(commit.version)
            ctx.checkpoints.finish(commit.version, commit.state_json)
        return commit.last
