"""A flow and its one other role for `third_trainer`: points of a line, a ticket each."""

from rlinf_worker.channels import lineage
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

    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        tickets, points = ctx.channel("tickets"), ctx.channel("points")
        async for ticket in tickets:
            version, line = await ctx.weights.pull(ticket.version)
            off = abs(line["slope"] - SLOPE) + abs(line["offset"] - OFFSET)
            ctx.report(step=ticket.step, metrics={"off": off}, key=ticket.key)
            x = (ticket.payload["n"] - POINTS / 2) / POINTS
            await points.put(
                {"x": x, "y": SLOPE * x + OFFSET}, key=ticket.key, step=ticket.step, branch=ticket.branch,
                version=version, parents=[ticket],
            )  # fmt: skip
            tickets.ack(ticket)
