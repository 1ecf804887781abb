"""A worker that begins to use its GPU after its links were made: they are made again under way, with the lane between
GPUs, and every item arrives once. CUDA IPC is a fake; the workers, their channels and their links are not."""

import asyncio
import dataclasses
from typing import Any

import pytest
import torch

from rlinf_worker.links import devices
from rlinf_worker.links.settings import LinkSettings
from tests.fakes.channels_driver import queue, stream
from tests.fakes.workers import pod
from tests.unit.rlinf_worker.links import ipc_fake

COUNT = 60


class Nowhere(dict[Any, Any]):
    """No listener is of this process, as far as a dial can see."""

    def __setitem__(self, key: Any, value: Any) -> None: ...


@pytest.fixture
def begin(monkeypatch):
    """`begin(worker)`: this one uses its GPU from now on."""
    ipc_fake.install(monkeypatch)
    monkeypatch.setattr("rlinf_worker.links.listener._HERE", Nowhere())
    using: list[LinkSettings] = []
    monkeypatch.setattr(devices, "of", lambda settings: ipc_fake.GPU if any(settings is its for its in using) else None)
    return lambda worker: using.append(worker.host.peers.listener._settings)


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def link_of(worker: Any) -> Any:
    return next((peer.link for peer in worker.host.peers._peers.values()), None)


@pytest.mark.parametrize("channel", [stream("items", "maker", "taker"), queue("items", "maker", "taker")])
@pytest.mark.parametrize("by", ["ready", "turn"])
async def test_links_are_made_again_under_way_and_every_item_arrives_once(tmp_path, begin, channel, by):
    async with pod(tmp_path, [channel]) as p:
        got: list[int] = []
        made = asyncio.Event()

        async def loaded(ctx, worker):
            await until(lambda: link_of(worker) is not None)
            begin(worker)
            if by == "turn":
                await ctx.ready()
                async with ctx.turn():
                    pass
            else:
                await ctx.ready()

        async def make(ctx):
            items = ctx.channel("items")
            for n in range(COUNT):
                await items.put(torch.full((ipc_fake.SIZE,), n, dtype=torch.uint8), key=str(n), step=1)
                if n == 20:
                    await loaded(ctx, m)
            made.set()
            await ctx.stopping.wait()

        async def take(ctx):
            items = ctx.channel("items")
            while len(got) < COUNT:
                item = await items.take()
                assert bool((item.payload == int(item.key)).all())
                got.append(int(item.key))
                items.ack(item)
                if len(got) == 35:
                    await loaded(ctx, t)
            await ctx.stopping.wait()

        p.link_settings = LinkSettings()
        m = p.start("maker/0", make)
        p.link_settings = dataclasses.replace(LinkSettings())
        t = p.start("taker/0", take)
        await p.driver.connected("maker/0", "taker/0")
        if channel.mode == "Stream":
            p.driver.route("items", "maker/0", "taker/0", credit=4)
        await until(lambda: len(got) == COUNT)
        assert sorted(got) == list(range(COUNT)) if channel.mode == "Queue" else got == list(range(COUNT))
        await until(lambda: (link := link_of(m)) is not None and link.beside.lane is not None)
        assert link_of(m).beside.lane.kind == "ipc"
        assert m.host.peers.tally.totals()["shm"].device_messages > 0
        assert sum(account.items for account in t.host.accounts) == COUNT
        assert m.host.peers.tally.breaks.total() == 0
