"""Routes of a stream that come and go with what is under way on them, under a driver that is a script."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import Item
from tests.fakes.channels_driver import stream
from tests.fakes.workers import pod


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


async def test_items_of_a_route_that_ended_go_out_as_others_make_room_and_put_goes_on(tmp_path):
    """A plan takes a consumer away that has more in flight than the other has room for."""
    async with pod(tmp_path, [stream("s", "a", "b")]) as p:
        taken: list[int] = []
        go, full = asyncio.Event(), asyncio.Event()

        async def produce(ctx):
            channel = ctx.channel("s")
            for n in range(20):
                if n == 10:
                    full.set()
                await channel.put(n, key=str(n), step=0)
            channel.close()

        async def hold(ctx):
            await ctx.channel("s").take()
            await ctx.stopping.wait()

        async def consume(ctx):
            channel = ctx.channel("s")
            await go.wait()
            async for item in channel:
                taken.append(item.payload)
                channel.ack(item)

        a = p.start("a/0", produce)
        p.start("b/0", hold)
        p.start("b/1", consume)
        await p.driver.connected("a/0", "b/0", "b/1")
        p.driver.route("s", "a/0", "b/0", credit=8)
        p.driver.route("s", "a/0", "b/1", credit=2)
        await asyncio.wait_for(full.wait(), 30)
        p.driver.unroute("s", "a/0", "b/0", attempt=1)
        await until(lambda: ("b/0", 1) not in a.session.streams["s"]._out)
        go.set()
        assert await asyncio.wait_for(p.tasks["b/1"], 30) == 0
        assert sorted(taken) == list(range(20))
        assert len(taken) == 20


async def test_more_credit_for_a_route_that_there_is_is_used_at_once(tmp_path):
    async with pod(tmp_path, [stream("s", "a", "b")]) as p:
        put: list[int] = []

        async def produce(ctx):
            for n in range(5):
                await ctx.channel("s").put(n, key=str(n), step=0)
                put.append(n)
            await ctx.stopping.wait()

        async def hold(ctx):
            await ctx.stopping.wait()

        a = p.start("a/0", produce)
        p.start("b/0", hold)
        p.start("b/1", hold)
        await p.driver.connected("a/0", "b/0", "b/1")
        p.driver.route("s", "a/0", "b/0", credit=2)
        p.driver.route("s", "a/0", "b/1", credit=3)
        await until(lambda: len(put) == 5)
        channel = a.session.streams["s"]
        p.driver.unroute("s", "a/0", "b/0", attempt=1)
        await until(lambda: channel._homeless)
        p.driver.route("s", "a/0", "b/1", credit=5)
        await until(lambda: not channel._homeless)
        assert channel.unfinished == 5


async def test_a_stream_of_two_producers_has_not_ended_while_the_next_life_of_one_is_yet_to_come(tmp_path):
    async with pod(tmp_path, [stream("s", "a", "b")]) as p:
        taken: list[str] = []
        waiting = asyncio.Event()

        async def one_and_close(ctx):
            if ctx.worker == "a/0":  # not before its consumer has heard of both: it knows of no other
                await until(lambda: "s" in b.session.streams and ("a/1", 1) in b.session.streams["s"]._in)
            await ctx.channel("s").put(1, key=f"{ctx.worker}#{ctx.attempt}", step=0)
            ctx.channel("s").close()

        async def silent(ctx):
            await ctx.stopping.wait()

        async def consume(ctx):
            channel = ctx.channel("s")
            async for item in channel:
                taken.append(item.key)
                channel.ack(item)
                waiting.set()

        p.start("a/0", one_and_close)
        p.start("a/1", silent)
        b = p.start("b/0", consume)
        await p.driver.connected("a/0", "a/1", "b/0")
        p.driver.route("s", "a/0", "b/0")
        p.driver.route("s", "a/1", "b/0")
        assert await asyncio.wait_for(p.tasks["a/0"], 30) == 0
        p.driver.unroute("s", "b/0", "a/0", attempt=1)
        await asyncio.wait_for(waiting.wait(), 30)
        await p.kill("a/1")
        p.driver.unroute("s", "b/0", "a/1", attempt=1)
        p.start("a/1", one_and_close, attempt=2)
        await p.driver.connected("a/1", attempt=2)
        p.driver.route("s", "a/1", "b/0")
        assert await asyncio.wait_for(p.tasks["b/0"], 30) == 0
        assert taken == ["a/0#1", "a/1#2"]


async def test_a_consumer_that_dies_when_its_producer_has_closed_is_replaced_and_gets_what_was_left(tmp_path):
    async with pod(tmp_path, [stream("s", "a", "b")]) as p:
        taken: list[int] = []

        async def produce(ctx):
            channel = ctx.channel("s")
            for n in range(8):
                await channel.put(n, key=str(n), step=0)
            channel.close()
            with pytest.raises(UserError, match="channel 's' was closed by this worker"):
                await channel.put(8, key="8", step=0)

        async def hold(ctx):
            await ctx.stopping.wait()

        async def consume(ctx):
            async for item in ctx.channel("s"):
                taken.append(item.payload)
                ctx.channel("s").ack(item)

        a = p.start("a/0", produce)
        p.start("b/0", hold)
        p.start("b/1", consume)
        await p.driver.connected("a/0", "b/0", "b/1")
        p.driver.route("s", "a/0", "b/0")
        p.driver.route("s", "a/0", "b/1")
        assert await asyncio.wait_for(p.tasks["b/1"], 30) == 0
        await p.kill("b/0")
        p.driver.unroute("s", "a/0", "b/0", attempt=1)
        await until(lambda: a.session.streams["s"]._homeless)
        p.start("b/0", consume, attempt=2)
        await p.driver.connected("b/0", attempt=2)
        p.driver.route("s", "a/0", "b/0")
        assert await asyncio.wait_for(p.tasks["a/0"], 30) == 0
        assert sorted(taken) == list(range(8))


@pytest.mark.parametrize("numbers", [(0, 0), (1, 2)], ids=["not-numbered", "numbered"])
async def test_what_comes_by_a_route_before_its_consumer_hears_that_it_is_back_is_not_lost(tmp_path, numbers):
    """A pair that was parted, as both live on, has a route again; the producer hears of it first."""
    old, new = numbers
    async with pod(tmp_path, [stream("s", "a", "b")]) as p:
        go, taken = asyncio.Event(), list[int]()

        async def produce(ctx):
            channel = ctx.channel("s")
            await channel.put(0, key="0", step=0)
            await go.wait()
            for n in range(1, 8):
                await channel.put(n, key=str(n), step=0)
            channel.close()

        async def consume(ctx):
            channel = ctx.channel("s")
            async for item in channel:
                taken.append(item.payload)
                assert not item.cancelled or not old, "nobody else has it"
                channel.ack(item)

        a, b = p.start("a/0", produce), p.start("b/0", consume)
        await p.driver.connected("a/0", "b/0")
        p.driver.route("s", "a/0", "b/0", credit=2, number=old)
        await until(lambda: taken and not a.session.streams["s"].unfinished)
        p.driver.unroute("s", "a/0", "b/0", attempt=1, number=old)
        p.driver.unroute("s", "b/0", "a/0", attempt=1, number=old)
        life, there = ("a/0", 1), b.session.streams["s"]
        await until(lambda: life not in there._in)
        p.driver.route_to("a/0", "s", peer="b/0", outgoing=True, credit=2, number=new)
        go.set()
        await until(lambda: a.session.streams["s"].unfinished == 2 or len(taken) == 8)  # not numbered, it is put aside
        p.driver.route_to("b/0", "s", peer="a/0", outgoing=False, credit=2, number=new)
        assert await asyncio.wait_for(p.tasks["b/0"], 30) == 0
        assert taken == list(range(8))


async def test_a_stream_that_is_opened_again_for_a_later_route_goes_on_with_what_was_put_aside(tmp_path):
    """The end was heard by the consumer alone, and the link breaks when the producer knows the next number."""
    async with pod(tmp_path, [stream("s", "a", "b")]) as p:
        taken = list[int]()

        async def produce(ctx):
            for n in range(4):
                await ctx.channel("s").put(n, key=str(n), step=0)
            await ctx.stopping.wait()

        async def consume(ctx):
            channel = ctx.channel("s")
            async for item in channel:
                taken.append(item.payload)
                channel.ack(item)

        a, b = p.start("a/0", produce), p.start("b/0", consume)
        await p.driver.connected("a/0", "b/0")
        p.driver.unroute("s", "b/0", "a/0", attempt=1, number=1)
        await until(lambda: "s" in b.session.streams and b.session.streams["s"]._gone)
        p.driver.route_to("a/0", "s", peer="b/0", outgoing=True, number=1)
        await until(lambda: any(len(s.aside) == 4 for s in b.session.streams["s"]._parted.values()))
        a.session.streams["s"].on_new_driver()
        p.driver.route_to("a/0", "s", peer="b/0", outgoing=True, number=2)
        out = a.session.streams["s"]._out["b/0", 1]
        await until(lambda: out.route == 2)
        assert out.peer.link is not None
        out.peer.link.abort("a test")
        await until(lambda: len(taken) == 4 and not a.session.streams["s"].unfinished)


async def test_the_end_of_a_route_that_comes_late_leaves_the_next_one_alone(tmp_path):
    """The producer has heard of the end and of the next route, and its consumer of neither."""
    async with pod(tmp_path, [stream("s", "a", "b")]) as p:
        go, taken = asyncio.Event(), list[int]()

        async def produce(ctx):
            channel = ctx.channel("s")
            for n in range(8):
                await channel.put(n, key=str(n), step=0)
            channel.close()

        async def consume(ctx):
            channel = ctx.channel("s")
            await go.wait()
            async for item in channel:
                taken.append(item.payload)
                assert not item.cancelled, "nobody else has it"
                channel.ack(item)

        a, b = p.start("a/0", produce), p.start("b/0", consume)
        await p.driver.connected("a/0", "b/0")
        p.driver.route("s", "a/0", "b/0", credit=2, number=1)
        await until(lambda: "s" in b.session.streams and len(b.session.streams["s"].inbox) == 2)
        p.driver.unroute("s", "a/0", "b/0", attempt=1, number=1)
        p.driver.route_to("a/0", "s", peer="b/0", outgoing=True, credit=3, number=2)
        await until(lambda: len(b.session.streams["s"].inbox) == 3)
        p.driver.unroute("s", "b/0", "a/0", attempt=1, number=1)
        await until(lambda: ("a/0", 1) in b.session.streams["s"]._gone)
        go.set()
        await until(lambda: len(taken) >= 3)
        p.driver.route_to("b/0", "s", peer="a/0", outgoing=False, credit=3, number=2)
        assert await asyncio.wait_for(p.tasks["b/0"], 30) == 0
        assert taken == list(range(8))
        assert await asyncio.wait_for(p.tasks["a/0"], 30) == 0
        assert not a.session.streams["s"].unfinished


async def test_a_producer_that_missed_the_end_of_a_route_begins_anew_when_it_is_told_of_the_next(tmp_path):
    """Its stream to the driver broke. Its consumer has heard that what it had goes elsewhere."""
    async with pod(tmp_path, [stream("s", "a", "b")]) as p:
        taken = list[tuple[int, bool]]()

        async def produce(ctx):
            await ctx.channel("s").put(0, key="0", step=0)
            await ctx.stopping.wait()

        async def consume(ctx):
            channel = ctx.channel("s")
            while True:
                item = await channel.take()
                if not taken:
                    await until(lambda first=item: first.cancelled)
                taken.append((item.payload, item.cancelled))
                if not item.cancelled:
                    channel.ack(item)

        a, b = p.start("a/0", produce), p.start("b/0", consume)
        await p.driver.connected("a/0", "b/0")
        p.driver.route("s", "a/0", "b/0", number=1)
        await until(lambda: "s" in b.session.streams and b.session.streams["s"].in_hand)
        p.driver.unroute("s", "b/0", "a/0", attempt=1, number=1)
        await until(lambda: taken)
        p.driver.route("s", "a/0", "b/0", number=2)
        await until(lambda: len(taken) == 2 and not a.session.streams["s"].unfinished)
        assert taken == [(0, True), (0, False)]


class Nobody(dict[Any, Any]):
    """No listener of this process: links go as between processes of a pod."""

    def get(self, *_: Any) -> None:
        return None


async def test_what_is_put_aside_for_good_takes_no_room_of_the_link(tmp_path, monkeypatch):
    """The consumer hears of the end first, and the route does not come back. Another channel goes by the same ring."""
    monkeypatch.setattr("rlinf_worker.links.listener._HERE", Nobody())
    async with pod(tmp_path, [stream("s", "a", "b"), stream("t", "a", "b")]) as p:
        go, ended, taken = asyncio.Event(), asyncio.Event(), list[float]()
        large = np.zeros(1 << 15, np.float32)  # an eighth of the ring, which its receiver views

        async def produce(ctx):
            await ctx.channel("s").put(0, key="0", step=0)
            await go.wait()
            await ctx.channel("s").put(large, key="1", step=0)
            await ended.wait()
            for n in range(100):
                await ctx.channel("t").put(large + n, key=str(n), step=0)
            await ctx.stopping.wait()

        async def consume(ctx):
            ctx.channel("s").ack(await ctx.channel("s").take())
            while True:
                item = await ctx.channel("t").take()
                taken.append(float(item.payload[0]))
                ctx.channel("t").ack(item)
                del item

        a, b = p.start("a/0", produce), p.start("b/0", consume)
        await p.driver.connected("a/0", "b/0")
        p.driver.route("s", "a/0", "b/0", number=1)
        p.driver.route("t", "a/0", "b/0", number=2)
        await until(lambda: "s" in b.session.streams and any(b.session.streams["s"]._in.values()))
        await until(lambda: all(out.sender.base == 1 for out in a.session.streams["s"]._out.values()))
        p.driver.unroute("s", "b/0", "a/0", attempt=1, number=1)
        await until(lambda: b.session.streams["s"]._parted)
        go.set()
        await until(lambda: b.session.streams["s"]._parted["a/0", 1].aside)
        p.driver.unroute("s", "a/0", "b/0", attempt=1, number=1)
        await until(lambda: not a.session.streams["s"]._out)
        ended.set()
        await until(lambda: len(taken) == 100)
        assert taken == list(range(100))
        link = next(iter(a.session.streams["t"]._out.values())).peer.link
        assert link is not None
        assert link.kind == "shm"


async def test_what_a_new_driver_lets_flow_again_is_in_hand_and_is_cancelled_with_its_branch(tmp_path):
    """It names no route for the stream: nobody else has the items, and the turn of a role must not skip them."""
    async with pod(tmp_path, [stream("s", "a", "b")]) as p:
        go, taken = asyncio.Event(), list[Item]()

        async def produce(ctx):
            await go.wait()
            await ctx.channel("s").put(0, key="0", step=0)
            await ctx.stopping.wait()

        async def consume(ctx):
            taken.append(await ctx.channel("s").take())
            await ctx.stopping.wait()

        p.start("a/0", produce)
        b = p.start("b/0", consume)
        await p.driver.connected("a/0", "b/0")
        p.driver.route("s", "a/0", "b/0", number=1)
        await until(lambda: "s" in b.session.streams and any(b.session.streams["s"]._in.values()))
        p.driver.unroute("s", "b/0", "a/0", attempt=1, number=1)
        there = b.session.streams["s"]
        await until(lambda: there._parted)
        go.set()
        await until(lambda: there._parted["a/0", 1].aside)
        there.on_new_driver()
        await until(lambda: taken)
        assert there.in_hand == 1
        assert not taken[0].cancelled
        there.on_cancel(0)
        assert taken[0].cancelled
        there.ack(taken[0])
        assert there.in_hand == 0
