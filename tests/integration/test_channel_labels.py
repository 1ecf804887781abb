"""What a role writes on an item and cannot be sent: refused where it puts, counted, and neither the link nor the stream
to the driver notices. And a stream to the driver that cannot be written all the same ends, and the worker says why."""

import asyncio
import dataclasses
import math
from typing import Any

import numpy
import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels.labels import LabelError
from rlinf_worker.runtime import numbers
from tests.fakes.channels_driver import queue, stream
from tests.fakes.workers import pod

BAD: list[dict[str, Any]] = [
    {"step": "3"},
    {"branch": 1 << 31},
    {"weight": "x"},
    {"weight": math.nan},
    {"weight": -1.0},
    {"key": "half\ud800"},
    {"key": 7},
    {"version": 3},
]


def producer(done: asyncio.Event):
    async def run(ctx):
        await ctx.ready()
        items = ctx.channel("items")
        await items.put(0, key="first", step=1)
        for n, bad in enumerate(BAD):
            with pytest.raises(LabelError, match=f"the {next(iter(bad))} of item .* of channel 'items' cannot be sent"):
                await items.put(n, **{"key": "bad", "step": 1} | bad)
        await items.put(1, key="numpy", step=numpy.int64(3), branch=numpy.int32(0), weight=numpy.float32(2.5))
        await items.put(2, key="masked", step=3, weight=0.0)
        done.set()
        await ctx.stopping.wait()

    return run


@pytest.mark.parametrize("channel", [stream("items", "maker", "taker"), queue("items", "maker", "taker")])
async def test_what_cannot_be_written_on_an_item_is_refused_and_counted_and_the_channel_goes_on(tmp_path, channel):
    async with pod(tmp_path, [channel]) as p:
        got: list[tuple[str, int, float]] = []
        done = asyncio.Event()

        async def take(ctx):
            await ctx.ready()
            items = ctx.channel("items")
            while len(got) < 3:
                item = await items.take()
                got.append((item.key, item.step, item.weight))
                items.ack(item)
            await ctx.stopping.wait()

        m = p.start("maker/0", producer(done))
        p.start("taker/0", take)
        await p.driver.connected("maker/0", "taker/0")
        if channel.mode == "Stream":
            p.driver.route("items", "maker/0", "taker/0")
        async with asyncio.timeout(10):
            await done.wait()
            while len(got) < 3:
                await asyncio.sleep(0.005)
        assert got == [("first", 1, 1.0), ("numpy", 3, 2.5), ("masked", 3, 0.0)]
        counted = {labels: value for account in m.host.accounts for _, labels, value in numbers.of_account(account)}
        assert counted["channel=items", "side=producer", "reason=LabelError"] == len(BAD)
        assert m.host.peers.tally.breaks.total() == 0
        assert m.driver.streams == 1


async def test_a_worker_whose_word_to_the_driver_cannot_be_written_is_not_left_mute(tmp_path):
    """Whatever slips through: it must end, so that it is replaced, and not stand there with its reader."""

    class Unwritable:
        def drain(self, out):
            out.append(pb.WorkerMessage(held=pb.Keys(channel="items", keys=["half\ud800"])))

    async with pod(tmp_path, [stream("items", "maker", "taker")]) as p:

        async def run(ctx):
            await ctx.ready()
            await ctx.stopping.wait()

        m = p.start("maker/0", run)
        await p.driver.connected("maker/0")
        m.driver.mark(Unwritable())
        with pytest.raises(UnicodeEncodeError):
            await asyncio.wait_for(p.tasks["maker/0"], 5)
        del p.tasks["maker/0"], p.workers["maker/0"]


async def test_a_stream_to_the_driver_that_is_cut_by_the_worker_is_made_again_however_long_it_had_been(tmp_path):
    async with pod(tmp_path, [stream("items", "maker", "taker")]) as p:
        p.settings = dataclasses.replace(p.settings, driver_absence_timeout_s=0.2)

        async def run(ctx):
            await ctx.ready()
            await ctx.stopping.wait()

        m = p.start("maker/0", run)
        await p.driver.connected("maker/0")
        async with asyncio.timeout(10):
            while not m.driver.is_connected:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)  # as long as a driver may be away: it was there all the time
            m.driver.cut("the test says so")
            while len(p.driver.hellos) < 2:
                await asyncio.sleep(0.005)
        assert not p.tasks["maker/0"].done()
