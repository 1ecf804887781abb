"""A flow and its one other role for `third_trainer`: points of a line, a ticket each."""

import asyncio
import threading

from rlinf_worker.channels import lineage
from rlinf_worker.channels.protocol import Item
from rlinf_worker.flows.protocol import Flow, Ticket
from rlinf_worker.roles.protocol import RoleContext

SLOPE, OFFSET = 3.0, -1.0
POINTS = 6  # of a step


async def flow(flow: Flow) -> None:
    tickets = flow.source("tickets", to="sampler")
    flow.queue("points", "sampler", "trainer", rounds=True)
    flow.weights("trainer", "sampler")
    async for step in flow.steps():
        made = [Ticket(key=lineage.segment(n, step=step.number), payload={"n": n}) for n in range(POINTS)]
        await tickets.put(made, step=step)


class Sampler:
    """Waits for the line that the step begins with, as a rollout does. Reports how far off it is."""

    async def think(self, ctx: RoleContext, ticket: Item) -> None:
        """Takes no time."""

    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        tickets, points = ctx.channel("tickets"), ctx.channel("points")
        async for ticket in tickets:
            version, line = await ctx.weights.pull(ticket.version)
            off = abs(line["slope"] - SLOPE) + abs(line["offset"] - OFFSET)
            ctx.report(step=ticket.step, metrics={"off": off}, key=ticket.key)
            await self.think(ctx, ticket)
            x = (ticket.payload["n"] - POINTS / 2) / POINTS
            await points.put(
                {"x": x, "y": SLOPE * x + OFFSET}, key=ticket.key, step=ticket.step, branch=ticket.branch,
                version=version, parents=[ticket],
            )  # fmt: skip
            tickets.ack(ticket)


class Forgetful(Sampler):
    """In its first life it awaits something that never comes, with its event loop alive."""

    async def think(self, ctx: RoleContext, ticket: Item) -> None:
        if (ctx.attempt, ticket.step) == (1, 4):
            await asyncio.Event().wait()


class DeadEngine(Sampler):
    """In its first life a thread of it never returns, as one in a collective whose other rank is gone."""

    async def think(self, ctx: RoleContext, ticket: Item) -> None:
        with ctx.span("compute", step=ticket.step):
            if (ctx.attempt, ticket.step) == (1, 4):
                await asyncio.to_thread(threading.Event().wait)
