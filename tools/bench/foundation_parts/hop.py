"""A flow and two roles that measure one hop: a payload from one worker to another through Channel.put and take.

For: foundation.py and runtime.py, which run hop.yaml with `rljob run`, so that driver, agent, pods and links are those
of every job. `tensors: 0` sends `bytes` of plain bytes, otherwise a dict of so many arrays that hold them together.

    driver -- tickets --> sender -- messages (a cycle) --> receiver
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
from rlinf_worker.cycles.protocol import Answering, Asking
from rlinf_worker.flows.protocol import Flow, Ticket
from rlinf_worker.roles.protocol import RoleContext

PAUSE_S: Final = 0.001
STEP: Final = "step-{:06d}"


def check_config(config: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {"paced": 1000, "flood": 20_000, "bytes": 1024, "tensors": 0}
    return {name: int(config.get(name, value)) for name, value in defaults.items()}


def payload(*, size: int, tensors: int) -> Any:
    if not tensors:
        return bytes(size)
    import numpy as np  # noqa: PLC0415  not where plain bytes are measured

    return {f"tensor{i}": np.ones(size // tensors // 4, np.float32) for i in range(tensors)}


def declared(*, tensors: int) -> dict[str, Any]:
    """As a flow that people write would, so that what the check costs is in the figures."""
    data = {f"tensor{i}": "float32[n]" for i in range(tensors)} if tensors else "bytes"
    return {"kind": "str", "sent_ns": "int", "data": data}


async def flow(flow: Flow) -> None:
    tickets = flow.source("tickets", to="sender")
    flow.cycle(
        "messages", ask="sender", answer="receiver", question=declared(tensors=flow.config["tensors"]), reply="none"
    )
    flow.queue("results", "sender", "receiver", rounds=True, payload={})
    async for step in flow.steps():
        await tickets.put([Ticket(key=_key(step.number))], step=step)


def _key(step: int) -> Any:
    return STEP.format(step)


class Sender:
    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        messages, results, config = ctx.asking("messages"), ctx.channel("results"), ctx.flow.config
        data = payload(size=config["bytes"], tensors=config["tensors"])
        async for ticket in ctx.channel("tickets"):
            for number in range(config["paced"]):
                await asyncio.sleep(PAUSE_S)
                await _send(messages, "paced", number, data=data, step=ticket.step)
            for number in range(config["flood"]):
                await _send(messages, "flood", number, data=data, step=ticket.step)
            await results.put({}, key=ticket.key, step=ticket.step, branch=ticket.branch, parents=[ticket])


async def _send(messages: Asking, kind: str, number: int, *, data: Any, step: int) -> None:
    sent_ns = time.monotonic_ns()
    await messages.ask({"kind": kind, "sent_ns": sent_ns, "data": data}, key=f"{kind}{number}", step=step)
    while messages.take_now() is not None:
        pass  # an answer says that its message was taken, and nothing else


class Receiver:
    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        messages, results = ctx.answering("messages"), ctx.channel("results")
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
    if commit.checkpoint:  # there is nothing to keep, but a job that wants one waits for it
        ctx.checkpoints.begin(commit.version)
        ctx.checkpoints.finish(commit.version, commit.state_json)
    return commit.last


async def _receive(messages: Answering, *, paced: int, flood: int) -> dict[str, float]:
    latencies_ns = []
    for _ in range(paced):
        item = await messages.take()
        latencies_ns.append(time.monotonic_ns() - item.payload["sent_ns"])
        messages.answer(item, None)
    gc.collect()
    first = await messages.take()
    messages.answer(first, None)
    started = time.monotonic_ns()
    for _ in range(flood - 1):
        messages.answer(await messages.take(), None)
    took_s = (time.monotonic_ns() - started) / 1e9
    found = {"messages_per_s": (flood - 1) / took_s}
    if paced > 1:
        found["p50_us"] = statistics.median(latencies_ns) / 1e3
        found["p99_us"] = statistics.quantiles(latencies_ns, n=100)[98] / 1e3
    return found
