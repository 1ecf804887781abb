"""Queue channels between whole workers, under a driver that is a script."""

import asyncio
from typing import Any

import numpy
import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.channels.protocol import ChannelClosed
from rlinf_worker.queues.units import Age
from tests.fakes.channels_driver import FakeDriver, queue
from tests.fakes.workers import pod


async def forever(ctx):
    await ctx.stopping.wait()


def maker(count: int, *, prefix: str = "u"):
    async def run(ctx):
        await ctx.ready()
        for n in range(count):
            payload = {"n": n, "array": numpy.full(3000, n, "f4")}
            await ctx.channel("units").put(payload, key=f"{prefix}{n}", step=1, weight=2.0)
        await ctx.stopping.wait()

    return run


def taker(got: list[str], *, ack: bool = True):
    async def run(ctx):
        await ctx.ready()
        async for item in ctx.channel("units"):
            assert (item.payload["array"] == item.payload["n"]).all()
            got.append(item.key)
            if ack:
                ctx.channel("units").ack(item)

    return run


async def until(condition, *, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_units_go_from_two_producers_to_two_consumers_once(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker")]) as p:
        a: list[str] = []
        b: list[str] = []
        p.driver.is_matching = False
        m = p.start("maker/0", maker(50, prefix="x"))
        p.start("maker/1", maker(50, prefix="y"))
        p.start("taker/0", taker(a))
        p.start("taker/1", taker(b))
        await until(lambda: all("credit" in p.driver.kinds(f"taker/{n}") for n in range(2)))  # else one may take it all
        p.driver.is_matching = True
        p.driver._match()
        await until(lambda: len(a) + len(b) == 100)
        assert sorted(a + b) == sorted(f"{w}{n}" for w in "xy" for n in range(50))
        assert a
        assert b
        await until(lambda: len(m.session.queues["units"].out.shelf) == 0)  # released


async def test_a_consumer_never_has_more_than_its_credit_waiting(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker", micro_batch=3, depth=2)]) as p:
        most = 0

        async def slow(ctx):
            nonlocal most
            await ctx.ready()
            await until(lambda: w.session.queues["units"].into.given.waiting == 6)
            for _ in range(40):
                item = await ctx.channel("units").take()
                most = max(most, w.session.queues["units"].into.given.waiting)
                await asyncio.sleep(0.001)
                ctx.channel("units").ack(item)
            await ctx.stopping.wait()

        p.start("maker/0", maker(40))
        w = p.start("taker/0", slow)
        await until(lambda: p.driver.cores["units"].counts["acked"] == 40)
        assert 0 < most <= 6


async def test_a_large_unit_that_waits_for_room_is_not_passed_by_smaller_ones_of_its_step(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker", capacity_bytes=1000, depth=1, micro_batch=1)]) as p:
        put: list[str] = []

        async def make(ctx):
            await ctx.ready()

            async def one(key: str, size: int, *, step: int = 1) -> None:
                await ctx.channel("units").put(b"x" * size, key=key, step=step)
                put.append(key)

            await one("first", 300)
            calls = [asyncio.create_task(one("large", 900))]
            await until(lambda: len(shelf().waiting) == 1)
            calls += [asyncio.create_task(one(f"small {n}", 100)) for n in range(3)]
            calls += [asyncio.create_task(one("older", 100, step=0))]
            await until(lambda: len(shelf().waiting) == 4)
            p.start("taker/0", take)
            await asyncio.gather(*calls)
            await ctx.stopping.wait()

        async def take(ctx):
            await ctx.ready()
            async for item in ctx.channel("units"):
                ctx.channel("units").ack(item)

        def shelf():
            return m.session.queues["units"].out.shelf

        m = p.start("maker/0", make)
        await until(lambda: len(put) == 6)
        assert put == ["first", "older", "large", "small 0", "small 1", "small 2"]


async def test_put_waits_for_room_and_goes_on_when_units_are_released(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker", capacity_units=4)]) as p:
        m = p.start("maker/0", maker(12))
        await until(lambda: [what for what, _ in m._waits.current() if what.startswith("room for unit 'u4' of ")])
        account = m.session.queues["units"].account_out
        assert account.items == 4
        assert account.wait_s > 0, "also of a wait that lasts"
        got: list[str] = []
        p.start("taker/0", taker(got))
        await until(lambda: len(got) == 12)


async def test_a_parent_is_acknowledged_when_its_child_is_held_downstream(tmp_path):
    channels = [queue("tickets", "", "maker"), queue("units", "maker", "taker")]
    async with pod(tmp_path, channels) as p:

        async def make(ctx):
            await ctx.ready()
            async for ticket in ctx.channel("tickets"):
                assert ticket.payload == {"seed": 7}
                await ctx.channel("units").put(1, key=ticket.key, step=ticket.step, parents=[ticket])
                ctx.channel("tickets").ack(ticket)

        p.start("maker/0", make)
        await p.driver.connected("maker/0")
        for number in (1, 2):  # who announces the second unit has said all that it had to say of the first
            p.driver.put("tickets", f"t{number}", payload={"seed": 7})
            await until(lambda number=number: p.driver.cores["units"].counts["announced"] == number)
        assert "acked" not in p.driver.kinds("maker/0"), "the unit is nowhere but in its producer"

        async def hold(ctx):
            await ctx.ready()
            await ctx.stopping.wait()

        p.start("taker/0", hold)
        await until(lambda: "acked" in p.driver.kinds("maker/0"))
        assert "held" in p.driver.kinds("taker/0")


async def test_a_gang_takes_rounds_together(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker", micro_batch=2, depth=2, rounds=True)]) as p:
        p.driver.roles["taker"] = {"taker/0", "taker/1"}
        core = p.driver.cores["units"]
        core.steps.at(Age(0, 1)).open(dict.fromkeys([f"u{n}" for n in range(10)], 1))
        rounds: dict[int, list[Any]] = {0: [], 1: []}

        async def train(ctx):
            await ctx.ready()
            while True:
                taken = await ctx.channel("units").take_round()
                rounds[ctx.rank].append((taken.number, [i.payload["n"] for i in taken.items], taken.last))
                for item in taken.items:
                    ctx.channel("units").ack(item)
                if taken.last:
                    break
            await ctx.stopping.wait()

        p.start("maker/0", maker(10))
        p.start("taker/0", train, world=2)
        p.start("taker/1", train, world=2)
        await until(lambda: all(r and r[-1][2] for r in rounds.values()))
        assert sorted(n for r in rounds.values() for _, ns, _ in r for n in ns) == list(range(10))
        assert [(number, last) for number, _, last in rounds[0]] == [(number, last) for number, _, last in rounds[1]]


async def test_a_producer_lost_while_its_unit_is_pulled_is_reported_and_the_consumer_goes_on(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker")]) as p:
        got: list[str] = []
        p.driver.is_matching = False
        p.start("maker/0", maker(1))
        p.start("taker/0", taker(got))
        await until(lambda: "announce" in p.driver.kinds("maker/0") and "credit" in p.driver.kinds("taker/0"))
        endpoint = p.driver.connections["maker/0"].hello.endpoint
        await p.kill("maker/0")
        unit = pb.Unit(key="u0", step=1, weight=1, producer="maker/0")
        p.driver.send("taker/0", assign=pb.Assign(channel="units", units=[unit], producers=[endpoint]))
        await until(lambda: "peer_lost" in p.driver.kinds("taker/0"))
        p.driver.cores["units"].departures.remove_producer(WorkerId("maker/0"))
        p.start("maker/0", maker(2), attempt=2)
        await p.driver.connected("maker/0", attempt=2)
        p.driver.is_matching = True
        p.driver._match()
        await until(lambda: sorted(got) == ["u0", "u1"])


def held(driver: FakeDriver, worker: str) -> list[str]:
    """Keys that it has said to hold."""
    said = [message.held.keys for message in driver.messages[worker] if message.WhichOneof("kind") == "held"]
    return sorted(key for keys in said for key in keys)


async def test_cancelled_units_are_marked_or_never_seen(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker", micro_batch=1, depth=3)]) as p:
        seen: list[str] = []
        taken = asyncio.Event()

        async def take_one(ctx):
            await ctx.ready()
            channel = ctx.channel("units")
            first = await channel.take()
            taken.set()
            await until(lambda: first.cancelled)
            channel.drop(first, "dead branch")
            seen.append(first.key)
            async for item in channel:
                seen.append(item.key)
                channel.ack(item)

        p.start("maker/0", maker(3))
        w = p.start("taker/0", take_one)
        await until(lambda: taken.is_set() and held(p.driver, "taker/0") == ["u0", "u1", "u2"])
        p.driver.cores["units"].forget(Age.end_of(0))
        for worker in ("maker/0", "taker/0"):
            p.driver.send(worker, cancel=pb.Cancel(channel="units", branch=0))
        await until(lambda: seen == ["u0"])
        p.driver.send("taker/0", assign=pb.Assign(channel="units", units=[pb.Unit(key="next", branch=1, inline=b"{}")]))
        await until(lambda: seen == ["u0", "next"])
        assert w.session.queues["units"].account_in.dropped["dead branch"] == 1


async def test_a_driver_that_comes_back_learns_what_is_held_and_nothing_happens_twice(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker", micro_batch=2, depth=2)]) as p:
        got: list[str] = []
        go, taken = asyncio.Event(), asyncio.Event()

        async def take(ctx):
            await ctx.ready()
            channel = ctx.channel("units")
            first = await channel.take()
            second = await channel.take()
            taken.set()
            await go.wait()  # the driver is dead now
            channel.ack(first)
            got.append(first.key)
            got.append(second.key)
            channel.ack(second)
            async for item in channel:
                got.append(item.key)
                channel.ack(item)

        p.start("maker/0", maker(10))
        p.start("taker/0", take)
        await until(lambda: p.driver.cores["units"].counts["announced"] == 10 and taken.is_set())
        await p.driver.stop()
        go.set()
        await until(lambda: len(got) >= 2)  # both are acknowledged, and nobody hears it
        old = p.driver
        p.driver = await FakeDriver.start(list(old.channels.values()), attempt=2)
        await until(lambda: len(got) == 10)
        await until(lambda: p.driver.cores["units"].counts["acked"] == 10)
        await asyncio.sleep(0.1)
        assert sorted(got) == sorted(f"u{n}" for n in range(10))
        hello = next(h for h in p.driver.hellos if h.worker == "taker/0")
        assert hello.ready
        assert hello.highest_driver_attempt == 1
        assert {"u0", "u1"} <= {held.unit.key for held in hello.taken}
        assert len(next(h for h in p.driver.hellos if h.worker == "maker/0").produced) == 10
        assert "ready" not in p.driver.kinds("taker/0")


async def test_a_driver_of_an_older_attempt_is_not_obeyed(tmp_path):
    async with pod(tmp_path, [queue("tickets", "", "taker")], attempt=2) as p:
        seen: list[str] = []

        async def take(ctx):
            await ctx.ready()
            async for item in ctx.channel("tickets"):
                seen.append(item.key)

        p.start("taker/0", take)
        await until(lambda: "credit" in p.driver.kinds("taker/0"))  # it has read the welcome, and knows of attempt 2
        await p.driver.stop()
        channels = list(p.driver.channels.values())
        old = p.driver = await FakeDriver.start(channels, attempt=1)
        old.put("tickets", "of the old one")
        await until(lambda: len(old.hellos) >= 2)
        assert old.hellos[0].highest_driver_attempt == 2
        await old.stop()
        p.driver = await FakeDriver.start(channels, attempt=3)
        p.driver.put("tickets", "of the new one")
        await until(lambda: bool(seen))
        assert seen == ["of the new one"]


async def test_a_wait_ends_with_the_worker(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker")]) as p:
        ended: list[bool] = []

        async def take(ctx):
            await ctx.ready()
            with pytest.raises(ChannelClosed, match="stopping"):
                await ctx.channel("units").take()
            ended.append(True)

        w = p.start("taker/0", take)
        await p.driver.connected("taker/0")
        await until(lambda: [what for what, _ in w._waits.current()] == ["a unit of channel 'units' for taker/0"])
        w.stop("enough")
        assert await asyncio.wait_for(p.tasks["taker/0"], 20) == 0
        assert ended
