"""Stream channels between whole workers, under a driver that is a script."""

import asyncio

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.links.errors import PayloadError
from rlinf_worker.roles.protocol import RoleContext
from tests.fakes.channels_driver import stream
from tests.fakes.workers import pod

CYCLE = [stream("questions", "asker", "echo"), stream("answers", "echo", "asker")]


async def echo(ctx: RoleContext) -> None:
    await ctx.ready()
    questions, answers = ctx.channel("questions"), ctx.channel("answers")
    async for item in questions:
        await answers.put(item.payload, key=item.key, step=item.step, to=item.source)
        questions.ack(item)


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def silent(taken: asyncio.Event):
    async def run(ctx: RoleContext) -> None:
        await ctx.ready()
        await ctx.channel("questions").take()
        taken.set()
        await asyncio.Event().wait()

    return run


def asker(count: int, got: list[str], *, window: int = 4):
    async def run(ctx: RoleContext) -> None:
        await ctx.ready()
        questions, answers = ctx.channel("questions"), ctx.channel("answers")
        open_keys: set[str] = set()
        asked = 0
        while asked < count or open_keys:
            while asked < count and len(open_keys) < window:
                key = f"q{asked}"
                open_keys.add(key)
                await questions.put({"n": asked}, key=key, step=asked)
                asked += 1
            item = await answers.take()
            if item.key in open_keys:
                open_keys.remove(item.key)
                got.append(item.key)
                assert item.payload == {"n": int(item.key[1:])}
            answers.ack(item)

    return run


async def test_questions_are_answered_in_order(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        got: list[str] = []
        p.start("asker/0", asker(200, got))
        p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("questions", "asker/0", "echo/0")
        p.driver.route("answers", "echo/0", "asker/0")
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == [f"q{n}" for n in range(200)]
        told = p.driver.kinds("asker/0") + p.driver.kinds("echo/0")
        assert len(told) <= 12, f"a stream item costs no driver message, but there were {told}"


async def test_a_link_that_breaks_loses_nothing_and_repeats_nothing(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        got: list[str] = []
        a, b = p.start("asker/0", asker(300, got)), p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("questions", "asker/0", "echo/0")
        p.driver.route("answers", "echo/0", "asker/0")
        for number in range(1, 6):
            await until(lambda number=number: len(got) >= 40 * number)
            for worker in (a, b):
                for peer in list(worker.host.peers._peers.values()):
                    if peer.link is not None:
                        peer.link.abort("pulled out")
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == [f"q{n}" for n in range(300)]


async def test_a_killed_consumer_is_replaced_and_gets_what_was_unfinished(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        got: list[str] = []
        p.start("asker/0", asker(400, got, window=8))
        p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("questions", "asker/0", "echo/0")
        p.driver.route("answers", "echo/0", "asker/0")
        for attempt in (2, 3):
            await until(lambda attempt=attempt: len(got) >= 80 * (attempt - 1))
            await p.kill("echo/0")
            p.start("echo/0", echo, attempt=attempt)
            await p.driver.connected("echo/0", attempt=attempt)
            p.driver.unroute("questions", "asker/0", "echo/0", attempt=attempt - 1)
            p.driver.unroute("answers", "asker/0", "echo/0", attempt=attempt - 1)
            p.driver.route("questions", "asker/0", "echo/0")
            p.driver.route("answers", "echo/0", "asker/0")
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert sorted(got, key=lambda k: int(k[1:])) == [f"q{n}" for n in range(400)]


async def test_a_route_to_a_life_that_has_a_successor_is_used_no_more(tmp_path):
    """A driver that dies with the consumer leaves nobody who would end that route: the next one never heard of it."""
    async with pod(tmp_path, CYCLE) as p:
        got, taken = list[str](), asyncio.Event()
        p.start("asker/0", asker(50, got, window=1))
        p.start("echo/0", silent(taken))
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("questions", "asker/0", "echo/0")
        await asyncio.wait_for(taken.wait(), 10)
        await p.kill("echo/0")
        p.start("echo/0", echo, attempt=2)
        await p.driver.connected("echo/0", attempt=2)
        p.driver.route("questions", "asker/0", "echo/0")
        p.driver.route("answers", "echo/0", "asker/0")
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == [f"q{n}" for n in range(50)]


async def test_a_route_that_a_new_driver_does_not_name_ends_when_its_peer_is_not_reached(tmp_path):
    """A worker that the plan took away while its driver died."""
    async with pod(tmp_path, CYCLE) as p:
        got, taken = list[str](), asyncio.Event()
        a = p.start("asker/0", asker(50, got, window=4))
        p.start("echo/0", echo)
        p.start("echo/1", silent(taken))
        await p.driver.connected("asker/0", "echo/0", "echo/1")
        p.driver.route("questions", "asker/0", "echo/1")
        await asyncio.wait_for(taken.wait(), 10)
        a.session.on_welcome(pb.Welcome(driver_attempt=2), is_new_driver=True)
        p.driver.route("questions", "asker/0", "echo/0")
        p.driver.route("answers", "echo/0", "asker/0")
        await p.kill("echo/1")
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert sorted(got) == sorted(f"q{n}" for n in range(50))


async def test_put_waits_when_nobody_acknowledges(tmp_path):
    async with pod(tmp_path, [stream("s", "a", "b")]) as p:
        put = 0
        taken = []
        go = asyncio.Event()

        async def produce(ctx):
            nonlocal put
            channel = ctx.channel("s")
            for n in range(20):
                await channel.put(n, key=str(n), step=0)
                put += 1
            channel.close()

        async def consume(ctx):
            channel = ctx.channel("s")
            items = [await channel.take() for _ in range(5)]
            await go.wait()
            for item in items:
                channel.ack(item)
            async for item in channel:
                taken.append(item.payload)
                channel.ack(item)

        p.start("a/0", produce)
        p.start("b/0", consume)
        await p.driver.connected("a/0", "b/0")
        p.driver.route("s", "a/0", "b/0", credit=5)
        waits = p.workers["a/0"]._waits
        await until(lambda: put == 5 and [what for what, _ in waits.current() if what.startswith("room for an item")])
        go.set()
        assert await asyncio.wait_for(p.tasks["b/0"], 30) == 0
        assert taken == list(range(5, 20))


async def test_a_payload_that_cannot_be_sent_is_an_error_at_the_caller_and_the_stream_goes_on(tmp_path):
    async with pod(tmp_path, [stream("s", "a", "b")]) as p:
        taken = []

        async def produce(ctx):
            channel = ctx.channel("s")
            await channel.put(1, key="1", step=0)
            with pytest.raises(PayloadError, match="set"):
                await channel.put({"x": {1, 2}}, key="bad", step=0)
            await channel.put(2, key="2", step=0)
            channel.close()

        async def consume(ctx):
            channel = ctx.channel("s")
            async for item in channel:
                taken.append(item.payload)
                channel.ack(item)

        p.start("a/0", produce)
        p.start("b/0", consume)
        await p.driver.connected("a/0", "b/0")
        p.driver.route("s", "a/0", "b/0")
        assert await asyncio.wait_for(p.tasks["b/0"], 30) == 0
        assert taken == [1, 2]


async def test_answers_for_a_dead_asker_are_dropped_and_its_next_life_never_gets_them(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        taken, go, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slow_echo(ctx):
            questions, answers = ctx.channel("questions"), ctx.channel("answers")
            first = await questions.take()
            taken.set()
            await go.wait()
            assert first.cancelled
            await answers.put(first.payload, key=first.key, step=0, to=first.source)
            questions.ack(first)
            answered.set()
            async for item in questions:
                await answers.put(item.payload, key=item.key, step=item.step, to=item.source)
                questions.ack(item)

        got: list[str] = []

        async def ask_and_die(ctx):
            await ctx.channel("questions").put({"n": 0}, key="q0", step=0)
            await asyncio.Event().wait()

        async def ask_again(ctx):
            await answered.wait()
            await asker(3, got)(ctx)

        p.start("asker/0", ask_and_die)
        e = p.start("echo/0", slow_echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("questions", "asker/0", "echo/0")
        p.driver.route("answers", "echo/0", "asker/0")
        await asyncio.wait_for(taken.wait(), 30)
        await p.kill("asker/0")
        p.driver.unroute("questions", "echo/0", "asker/0", attempt=1)
        p.driver.unroute("answers", "echo/0", "asker/0", attempt=1)
        p.start("asker/0", ask_again, attempt=2)
        await p.driver.connected("asker/0", attempt=2)
        p.driver.route("questions", "asker/0", "echo/0")
        p.driver.route("answers", "echo/0", "asker/0")
        await until(lambda: ("asker/0", 2) in e.session.streams["answers"]._out)  # the last of what it was told
        go.set()
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == ["q0", "q1", "q2"]
        assert e.session.streams["answers"].account_out.dropped["PeerGone"] == 1


async def test_an_answer_that_has_come_is_taken_though_who_gave_it_is_dead(tmp_path):
    """Its question is acknowledged, so that nobody asks it again; whoever asked was busy when the answer came."""
    async with pod(tmp_path, CYCLE) as p:
        asked, go, got = asyncio.Event(), asyncio.Event(), list[tuple[str, bool]]()

        async def busy(ctx):
            await ctx.ready()
            questions, answers = ctx.channel("questions"), ctx.channel("answers")
            for n in range(2):
                await questions.put({"n": n}, key=f"q{n}", step=n)
                if not n:
                    asked.set()
                    await go.wait()
                item = await answers.take()
                got.append((item.key, item.cancelled))
                answers.ack(item)

        a = p.start("asker/0", busy)
        p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("questions", "asker/0", "echo/0")
        p.driver.route("answers", "echo/0", "asker/0")
        await asyncio.wait_for(asked.wait(), 30)
        await until(lambda: a.session.streams["questions"].unfinished == 0)
        assert len(a.session.streams["answers"].inbox) == 1
        await p.kill("echo/0")
        p.start("echo/0", echo, attempt=2)
        await p.driver.connected("echo/0", attempt=2)
        p.driver.unroute("questions", "asker/0", "echo/0", attempt=1)
        p.driver.unroute("answers", "asker/0", "echo/0", attempt=1)
        p.driver.route("questions", "asker/0", "echo/0")
        p.driver.route("answers", "echo/0", "asker/0")
        await until(lambda: ("echo/0", 2) in a.session.streams["answers"]._in)  # the last of what it was told
        go.set()
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == [("q0", True), ("q1", False)]


async def test_a_consumer_that_ends_acknowledges_the_last_item_first(tmp_path):
    async with pod(tmp_path, [stream("s", "a", "b")]) as p:

        async def produce(ctx):
            await ctx.channel("s").put(1, key="1", step=0)
            ctx.channel("s").close()

        async def consume(ctx):
            async for item in ctx.channel("s"):
                ctx.channel("s").ack(item)

        p.start("a/0", produce)
        p.start("b/0", consume)
        await p.driver.connected("a/0", "b/0")
        p.driver.route("s", "a/0", "b/0")
        assert await asyncio.wait_for(p.tasks["b/0"], 30) == 0
        assert await asyncio.wait_for(p.tasks["a/0"], 30) == 0, "it waits for the acknowledgement"
