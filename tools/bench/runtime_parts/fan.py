"""A flow and two roles that measure a queue: units of 1 KB from two producers, each in a pod of its own, to two
consumers in a third, whoever has room.

For: channels.py, which runs fan.yaml with `rljob run`.

    driver -- tickets --> producer x 2 -- units (queue) --> consumer x 2 (the gang that commits)
                              └──────── results (rounds) ───────┘

A ticket is a producer's share of a step; its result goes to the gang once all its units have been put. Each consumer
takes and acknowledges until the gang has both results and every unit is taken: it counts its own, and both see the end
of the step in `results`. The rate is units over the time from the first unit to the last, of both consumers together.
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


def check_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: int(config.get(name, value)) for name, value in {"units": 10_000, "bytes": 1024}.items()}


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
        await ctx.ready()
        self.taken, self.first_ns, self.last_ns = 0, 0, 0
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
                self.first_ns = self.first_ns or self.last_ns

    async def step(self, ctx: RoleContext) -> bool:
        """A producer has put all its units before its result; they are taken when nothing comes any more."""
        results, items, is_last = ctx.channel("results"), list[Item](), False
        while not is_last:
            taken = await results.take_round()
            items += taken.items
            is_last = taken.last
        seen = -1
        while seen != self.taken:
            seen = self.taken
            await asyncio.sleep(0.1)
        # Both clocks are the machine's: the last to begin and the first to end would flatter, so each says its own.
        seconds = max(1, self.last_ns - self.first_ns) / 1e9
        numbers = {"units_per_s_sum": self.taken / seconds, "units_count": float(self.taken)}
        ctx.report(step=taken.step, metrics=numbers)
        self.taken, self.first_ns = 0, 0
        keys = tuple(item.key for item in items)
        commit = await ctx.step_done(taken.step, branch=taken.branch, keys=keys, metrics={})
        for item in items:
            results.ack(item)
        if commit.checkpoint and ctx.rank == 0:  # nothing to keep, but a job that wants one waits for it
            ctx.checkpoints.begin(commit.version)
            ctx.checkpoints.finish(commit.version, commit.state_json)
        return commit.last
