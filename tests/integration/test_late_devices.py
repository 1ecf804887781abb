"""A worker that begins to use its GPU after its links were made: they are made again under way, with the lane between
GPUs, and every item arrives once. CUDA IPC is a fake; the workers, their channels and their links are not."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from rlinf_worker.links import devices
from rlinf_worker.links.settings import LinkSettings
from tests.fakes.channels_driver import cycle, queue
from tests.fakes.workers import pod
from tests.unit.rlinf_worker.links import ipc_fake

COUNT = 60


@pytest.fixture
def begin(monkeypatch):
    """`begin(worker)`: this one uses its GPU from now on."""
    ipc_fake.install(monkeypatch)
    using: list[LinkSettings] = []
    monkeypatch.setattr(devices, "of", lambda settings: ipc_fake.GPU if any(settings is its for its in using) else None)
    return lambda worker: using.append(worker.host.peers.listener._settings)


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def link_of(worker: Any) -> Any:
    return next((peer.link for peer in worker.host.peers._peers.values()), None)


def tensor(n: int) -> torch.Tensor:
    return torch.full((ipc_fake.SIZE,), n, dtype=torch.uint8)


def number(item: Any) -> int:
    """Of what was made of it, and nothing else."""
    assert bool((item.payload == int(item.key)).all())
    return int(item.key)


Loaded = Callable[[Any, Any], Awaitable[None]]


@pytest.fixture(params=["ready", "turn"])
def loaded(begin, request) -> Loaded:
    """`await loaded(ctx, worker)`: its role has loaded, and says so in one of the two ways."""

    async def loaded(ctx: Any, worker: Any) -> None:
        await until(lambda: link_of(worker) is not None)
        begin(worker)
        await ctx.ready()
        if request.param == "turn":
            async with ctx.turn():
                pass

    return loaded


async def has_lanes(worker: Any) -> None:
    await until(lambda: (link := link_of(worker)) is not None and link.beside.lane is not None)
    assert link_of(worker).beside.lane.kind == "ipc"
    assert worker.host.peers.tally.totals()["shm"].device_messages > 0
    assert worker.host.peers.tally.breaks.total() == 0


async def test_links_are_made_again_under_way_and_every_unit_arrives_once(tmp_path, loaded):
    async with pod(tmp_path, [queue("items", "maker", "taker")]) as p:
        got: list[int] = []

        async def make(ctx):
            await ctx.ready()
            for n in range(COUNT):
                await ctx.channel("items").put(tensor(n), key=str(n), step=1)
                if n == 20:
                    await loaded(ctx, m)
            await ctx.stopping.wait()

        async def take(ctx):
            await ctx.ready()
            async for item in ctx.channel("items"):
                got.append(number(item))
                ctx.channel("items").ack(item)
                if len(got) == 35:
                    await loaded(ctx, t)

        p.link_settings = LinkSettings()
        m = p.start("maker/0", make)
        p.link_settings = dataclasses.replace(LinkSettings())
        t = p.start("taker/0", take)
        await until(lambda: len(got) == COUNT)
        assert sorted(got) == list(range(COUNT))
        await has_lanes(m)
        assert sum(account.items for account in t.host.accounts) == COUNT


async def test_links_are_made_again_under_way_and_every_question_and_answer_arrives_once(tmp_path, loaded):
    async with pod(tmp_path, [cycle("items", "asker", "echo")]) as p:
        asked: list[int] = []
        answered: list[int] = []

        async def ask(ctx):
            await ctx.ready()
            items = ctx.asking("items")
            for n in range(COUNT):
                await items.ask(tensor(n), key=str(n), step=1)
                if n == 20:
                    await loaded(ctx, a)
                while (answer := items.take_now()) is not None:
                    answered.append(number(answer))
            async for answer in items:
                answered.append(number(answer))

        async def echo(ctx):
            await ctx.ready()
            items = ctx.answering("items")
            async for question in items:
                asked.append(number(question))
                items.answer(question, tensor(asked[-1]))
                if len(asked) == 35:
                    await loaded(ctx, e)

        p.link_settings = LinkSettings()
        a = p.start("asker/0", ask)
        p.link_settings = dataclasses.replace(LinkSettings())
        e = p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("items", "asker/0", "echo/0", credit=4)
        await until(lambda: len(answered) == COUNT)
        assert asked == answered == list(range(COUNT))
        for worker in (a, e):
            await has_lanes(worker)
            assert {account.side: account.items for account in worker.host.accounts if account.channel == "items"} == {
                "producer": COUNT, "consumer": COUNT
            }  # fmt: skip
