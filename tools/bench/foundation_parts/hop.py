"""A flow and two roles that measure one hop: 1 KB from one worker to another of its pod, through Channel.put and take.

For: foundation.py, which runs hop.yaml with `rljob run`, so that driver, agent, pods and links are those of every job.

    driver -- tickets --> sender -- messages (stream) --> receiver
                            └────── results (rounds) ───────┘     the receiver commits the steps

Step 1 warms up. Each step sends `paced` messages one at a time, PAUSE_S apart, for the latency of a message that finds
its receiver asleep, and then `flood` messages as fast as credit allows, for the rate. Both processes read
CLOCK_MONOTONIC, which is one clock for the whole machine.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Mapping
from typing import Any, Final

from rlinf_worker.channels.protocol import Channel, ChannelClosed, Item
from rlinf_worker.flows.protocol import Flow, Ticket
from rlinf_worker.roles.protocol import RoleContext

PAUSE_S: Final = 0.001
PAYLOAD: Final = bytes(1024)
STEP: Final = "step-{:06d}"


def check_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"paced": int(config.get("paced", 1000)), "flood": int(config.get("flood", 20_000))}


async def flow(flow: Flow) -> None:
    tickets = flow.source("tickets", to="sender")
    flow.stream("messages", "sender", "receiver")
    flow.queue("results", "sender", "receiver", rounds=True)
    async for step in flow.steps():
        await tickets.put([Ticket(key=_key(step.number))], step=step)


def _key(step: int) -> Any:
    return STEP.format(step)


class Sender:
    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        messages, results = ctx.channel("messages"), ctx.channel("results")
        async for ticket in ctx.channel("tickets"):
            for number in range(ctx.flow.config["paced"]):
                await asyncio.sleep(PAUSE_S)
                await _send(messages, "paced", number, step=ticket.step)
            for number in range(ctx.flow.config["flood"]):
                await _send(messages, "flood", number, step=ticket.step)
            await results.put({}, key=ticket.key, step=ticket.step, branch=ticket.branch, parents=[ticket])


async def _send(messages: Channel, kind: str, number: int, *, step: int) -> None:
    sent_ns = time.monotonic_ns()
    await messages.put({"kind": kind, "sent_ns": sent_ns, "data": PAYLOAD}, key=f"{kind}{number}", step=step)


class Receiver:
    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        messages, results = ctx.channel("messages"), ctx.channel("results")
        config = ctx.flow.config
        is_last = False
        while not is_last:
            try:
                numbers = await _receive(messages, paced=config["paced"], flood=config["flood"])
                is_last = await _commit(ctx, results, numbers)
            except ChannelClosed:
                break
        await ctx.stopping.wait()


async def _commit(ctx: RoleContext, results: Channel, numbers: Mapping[str, float]) -> bool:
    """The step whose messages have all come. Its last round is one without units."""
    items = list[Item]()
    while True:
        taken = await results.take_round()
        items += taken.items
        if taken.last:
            break
    keys = tuple(item.key for item in items)
    commit = await ctx.step_done(taken.step, branch=taken.branch, keys=keys, metrics=numbers)
    for item in items:
        results.ack(item)
    return commit.last


async def _receive(messages: Channel, *, paced: int, flood: int) -> dict[str, float]:
    latencies_ns = []
    for _ in range(paced):
        item = await messages.take()
        latencies_ns.append(time.monotonic_ns() - item.payload["sent_ns"])
        messages.ack(item)
    gc.collect()
    first = await messages.take()
    messages.ack(first)
    started = time.monotonic_ns()
    for _ in range(flood - 1):
        messages.ack(await messages.take())
    took_s = (time.monotonic_ns() - started) / 1e9
    percentiles = statistics.quantiles(latencies_ns, n=100)
    return {
        "p50_us": statistics.median(latencies_ns) / 1e3,
        "p99_us": percentiles[98] / 1e3,
        "messages_per_s": (flood - 1) / took_s,
    }
