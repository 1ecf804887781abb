"""What a role writes on an item and cannot be sent: refused where it puts, asks or answers, counted, and neither the
link nor the stream to the driver notices. And a stream to the driver that cannot be written all the same ends, and the
worker says why."""

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels.labels import LabelError
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.runtime import numbers
from tests.fakes.channels_driver import cycle, queue
from tests.fakes.workers import pod

BAD: list[dict[str, Any]] = [
    {"step": "3"},
    {"branch": 1 << 31},
    {"key": "half\ud800"},
    {"key": 7},
    {"version": 3},
]
BAD_WEIGHTS: list[dict[str, Any]] = [{"weight": "x"}, {"weight": math.nan}, {"weight": -1.0}]


def refused(bad: dict[str, Any]) -> Any:
    return pytest.raises(LabelError, match=f"the {next(iter(bad))} of item .* of channel 'items' cannot be sent")


def counted(worker: Any, side: str) -> float:
    found = {labels: value for account in worker.host.accounts for _, labels, value in numbers.of_account(account)}
    return found["channel=items", f"side={side}", "reason=LabelError"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_what_cannot_be_written_on_a_unit_is_refused_and_counted_and_the_queue_goes_on(tmp_path):
    async with pod(tmp_path, [queue("items", "maker", "taker")]) as p:
        got: list[tuple[str, int, float]] = []

        async def make(ctx):
            await ctx.ready()
            items = ctx.channel("items")
            await items.put(0, key="first", step=1)
            for n, bad in enumerate(BAD + BAD_WEIGHTS):
                with refused(bad):
                    await items.put(n, **{"key": "bad", "step": 1} | bad)
            await items.put(1, key="numpy", step=numpy.int64(3), branch=numpy.int32(0), weight=numpy.float32(2.5))
            await items.put(2, key="masked", step=3, weight=0.0)
            await ctx.stopping.wait()

        async def take(ctx):
            await ctx.ready()
            items = ctx.channel("items")
            while len(got) < 3:
                item = await items.take()
                got.append((item.key, item.step, item.weight))
                items.ack(item)
            await ctx.stopping.wait()

        m = p.start("maker/0", make)
        p.start("taker/0", take)
        await until(lambda: len(got) == 3)
        assert got == [("first", 1, 1.0), ("numpy", 3, 2.5), ("masked", 3, 0.0)]
        assert counted(m, "producer") == len(BAD + BAD_WEIGHTS)
        assert m.host.peers.tally.breaks.total() == 0
        assert m.driver.streams == 1


async def test_what_cannot_be_written_on_a_question_or_an_answer_is_refused_and_counted_and_the_cycle_goes_on(tmp_path):
    async with pod(tmp_path, [cycle("items", "asker", "echo")]) as p:
        got: list[tuple[str, int, PolicyVersion]] = []

        async def ask(ctx):
            await ctx.ready()
            items = ctx.asking("items")
            await items.ask(0, key="first", step=1)
            for n, bad in enumerate(BAD):
                with refused(bad):
                    await items.ask(n, **{"key": "bad", "step": 1} | bad)
            await items.ask(1, key="numpy", step=numpy.int64(3), branch=numpy.int32(0))
            async for answer in items:
                got.append((answer.key, answer.step, answer.version))

        async def echo(ctx):
            await ctx.ready()
            items, seven = ctx.answering("items"), numpy.int64(7)
            held = PolicyVersion(0, seven)  # type: ignore[arg-type]  # as a role without types may have it
            async for question in items:
                with refused({"version": 3}):
                    items.answer(question, question.payload, version=3)
                items.answer(question, question.payload, version=held)

        a, e = p.start("asker/0", ask), p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("items", "asker/0", "echo/0")
        await until(lambda: len(got) == 2)
        assert got == [("first", 1, PolicyVersion(0, 7)), ("numpy", 3, PolicyVersion(0, 7))]
        assert counted(a, "producer") == len(BAD)
        assert counted(e, "producer") == 2, "once for each question"
        assert a.host.peers.tally.breaks.total() == e.host.peers.tally.breaks.total() == 0
        assert a.driver.streams == e.driver.streams == 1


async def test_a_worker_whose_word_to_the_driver_cannot_be_written_is_not_left_mute(tmp_path):
    """Whatever slips through: it must end, so that it is replaced, and not stand there with its reader."""

    class Unwritable:
        comes_last = False

        def drain(self, out):
            out.append(pb.WorkerMessage(held=pb.Keys(channel="items", keys=["half\ud800"])))

    async with pod(tmp_path, [queue("items", "maker", "taker")]) as p:

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
    async with pod(tmp_path, [queue("items", "maker", "taker")]) as p:
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
