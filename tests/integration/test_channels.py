"""Channels between whole workers: micro-batches, priorities, sizes that change, what is refused, what is counted."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels.account import Account
from rlinf_worker.links.errors import MessageTooLarge, PayloadError
from rlinf_worker.links.hello import Refusal
from rlinf_worker.links.ring import RingWriter
from rlinf_worker.links.settings import LinkSettings
from rlinf_worker.runtime import numbers
from tests.fakes.channels_driver import cycle, queue
from tests.fakes.workers import pod

ROW = 4096  # float32: above what a payload's header takes along


async def until(condition, *, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def forever(ctx):
    await ctx.ready()
    await ctx.stopping.wait()


def maker(count: int, *, prefix: str = "u", step: int = 1):
    async def run(ctx):
        await ctx.ready()
        for n in range(count):
            await ctx.channel("units").put(n, key=f"{prefix}{n}", step=step)
        await ctx.stopping.wait()

    return run


async def test_finished_units_are_coalesced_to_the_plans_micro_batch_and_no_further(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker", micro_batch=4, depth=4)]) as p:
        sizes: list[int] = []
        go = asyncio.Event()

        async def take(ctx):
            await ctx.ready()
            units = ctx.channel("units")
            await go.wait()
            while sum(sizes) < 22:
                batch = await units.take_batch(at_least=2 if sum(sizes) < 20 else 1)
                sizes.append(len(batch))
                for item in batch:
                    units.ack(item)
            await ctx.stopping.wait()

        p.start("maker/0", maker(11, prefix="x"))
        p.start("maker/1", maker(11, prefix="y"))
        w = p.start("taker/0", take)
        await until(
            lambda: (
                "taker/0" in p.driver.connections
                and bool(w.session.queues)
                and w.session.queues["units"].into.given.waiting == 16
            )
        )
        await until(lambda: w.session.queues["units"].into.given.count_here(most=16) == 16)
        go.set()
        await until(lambda: sum(sizes) == 22)
        assert sizes[:4] == [4, 4, 4, 4], "what is here already, in the plan's size"
        assert max(sizes) == 4


async def test_a_micro_batch_waits_for_as_many_units_as_it_was_asked_for(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker", micro_batch=4, depth=2)]) as p:
        got: list[int] = []

        async def take(ctx):
            await ctx.ready()
            got.append(len(await ctx.channel("units").take_batch(at_least=3)))
            await ctx.stopping.wait()

        async def make(ctx):
            await ctx.ready()
            for n in range(3):
                await ctx.channel("units").put(n, key=f"u{n}", step=1)
                await until(lambda n=n: w.session.queues["units"].into.given.count_here(most=9) > n)
                assert not got, f"not with {n + 1}"
                if n == 1:
                    await asyncio.sleep(0.02)
            await ctx.stopping.wait()

        w = p.start("taker/0", take)
        await p.driver.connected("taker/0")
        p.start("maker/0", make)
        await until(lambda: bool(got))
        assert got == [3]


async def test_a_batch_that_is_split_into_units_and_merged_again_is_never_copied(tmp_path, monkeypatch):
    """But into the ring and out of it."""
    written: list[Any] = []
    write = RingWriter.try_write

    def watched(ring, out):
        written.extend(out.buffers)
        return write(ring, out)

    monkeypatch.setattr(RingWriter, "try_write", watched)
    async with pod(tmp_path, [queue("units", "maker", "taker", micro_batch=4)]) as p:
        made = numpy.arange(8 * ROW, dtype="f4").reshape(8, ROW)
        got: list[Any] = []

        async def split(ctx):
            await ctx.ready()
            for n, row in enumerate(made):
                await ctx.channel("units").put({"row": row}, key=f"u{n}", step=1)
            await ctx.stopping.wait()

        async def merge(ctx):
            await ctx.ready()
            while len(got) < 8:
                got.extend((item.key, item.payload["row"]) for item in await ctx.channel("units").take_batch())
            await ctx.stopping.wait()

        p.start("maker/0", split)
        p.start("taker/0", merge)
        await until(lambda: len(got) == 8)
        for key, row in got:
            assert row.base is not None, "a view of what arrived"
            assert (row == made[int(key[1:])]).all()
        assert len(written) == 8
        assert all(numpy.shares_memory(numpy.frombuffer(buffer, "f4"), made) for buffer in written)


async def test_the_oldest_policy_version_is_put_first_where_several_wait_for_room(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker", capacity_units=1, micro_batch=1, depth=1)]) as p:
        order: list[str] = []

        async def make(ctx):
            await ctx.ready()
            units = ctx.channel("units")
            places = (("newest", 6, 1), ("newer", 5, 1), ("old", 9, 0))
            for key, step, branch in places:  # the bound is of each step by itself
                await units.put(0, key=f"before {key}", step=step, branch=branch)

            async def put(key: str, step: int, branch: int) -> None:
                await units.put(0, key=key, step=step, branch=branch)
                order.append(key)

            waiting = []
            for place in places:
                waiting.append(asyncio.create_task(put(*place)))
                await asyncio.sleep(0)
            await asyncio.gather(*waiting)
            await ctx.stopping.wait()

        m = p.start("maker/0", make)
        await until(lambda: "maker/0" in p.driver.connections and bool(m.session.queues))
        await until(lambda: len(m.session.queues["units"].out.shelf.waiting) == 3)
        wide = queue("units", "maker", "taker", capacity_units=9, micro_batch=1, depth=1)
        p.driver.send("maker/0", replan=pb.Replan(plan_revision=2, channels=[wide]))  # room for all at once
        await until(lambda: len(order) == 3)
        assert order == ["old", "newer", "newest"]


@pytest.mark.parametrize("sizes", [((8, 4, 4), (2, 1, 1), (40, 8, 2)), ((2, 1, 1), (40, 8, 4), (4, 2, 1))])
async def test_sizes_change_under_load_and_nothing_is_lost(tmp_path, sizes):
    """(capacity, micro-batch, depth), as three plans have them."""

    def spec(capacity: int, micro_batch: int, depth: int) -> pb.ChannelSpec:
        return queue("units", "maker", "taker", capacity_units=capacity, micro_batch=micro_batch, depth=depth)

    async with pod(tmp_path, [spec(*sizes[0])]) as p:
        got: list[str] = []
        over: list[str] = []
        everybody = ("maker/0", "maker/1", "taker/0")

        async def take(ctx):
            await ctx.ready()
            async for item in ctx.channel("units"):
                got.append(item.key)
                ctx.channel("units").ack(item)
                await asyncio.sleep(0)

        workers = [p.start("maker/0", maker(300, prefix="x")), p.start("maker/1", maker(300, prefix="y"))]
        taker = p.start("taker/0", take)
        for n, plan in enumerate(sizes[1:], start=1):
            await until(lambda n=n: len(got) >= 150 * n)
            for worker in everybody:
                p.driver.send(worker, replan=pb.Replan(plan_revision=n + 1, channels=[spec(*plan)]))
            await until(lambda n=n: all(p.driver.kinds(w).count("replanned") == n for w in everybody))
            before = len(got)
            await until(lambda before=before: len(got) > before + 100)  # what was let in by the old plan has drained
            capacity, micro_batch, depth = plan
            assert taker.session.queues["units"].micro_batch == micro_batch
            for m in workers:
                if len(m.session.queues["units"].out.shelf) > capacity:
                    over.append(f"plan {n}: {len(m.session.queues['units'].out.shelf)} kept")
            if taker.session.queues["units"].into.given.waiting > micro_batch * depth:
                over.append(f"plan {n}: {taker.session.queues['units'].into.given.waiting} waiting")
        await until(lambda: len(got) == 600)
        assert sorted(got) == sorted(f"{w}{n}" for w in "xy" for n in range(300))
        assert over == []


async def refused(send: Callable[..., Any]) -> None:
    """`send(payload, key=...)` is one call of a role, to be awaited or not."""

    async def said(payload: Any, key: str) -> None:
        waiting = send(payload, key=key)
        if waiting is not None:
            await waiting

    with pytest.raises(PayloadError, match=r"cannot send payload\['x'\]\[1\]: got a object"):
        await said({"x": [1, object()]}, "bad")
    with pytest.raises(MessageTooLarge, match=r"item 'large' of channel 'units' cannot be sent.*in parts"):
        await said(numpy.zeros(200_000, "u1"), "large")


def refusals(account: Account) -> dict[str, float]:
    """By error, as served."""
    return {
        labels[-1].removeprefix("reason="): value
        for name, labels, value in numbers.of_account(account)
        if name == "rlinf_channel_refused_items_total"
    }


async def test_what_cannot_be_sent_is_refused_at_the_call_and_counted_and_the_queue_goes_on(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker")]) as p:
        p.link_settings = LinkSettings(max_message_bytes=100_000)
        got: list[Any] = []

        async def make(ctx):
            await ctx.ready()
            units = ctx.channel("units")
            await refused(partial(units.put, step=1))
            await units.put("good", key="good", step=1)
            await ctx.stopping.wait()

        async def take(ctx):
            await ctx.ready()
            got.append(await ctx.channel("units").take())
            await ctx.stopping.wait()

        m = p.start("maker/0", make)
        p.start("taker/0", take)
        await until(lambda: bool(got))
        assert got[0].payload == "good"
        assert refusals(m.session.queues["units"].account_out) == {"PayloadError": 1, "MessageTooLarge": 1}


async def test_what_cannot_be_sent_is_refused_at_the_call_and_counted_and_the_cycle_goes_on(tmp_path):
    async with pod(tmp_path, [cycle("units", "asker", "echo")]) as p:
        p.link_settings = LinkSettings(max_message_bytes=100_000)
        got: list[Any] = []

        async def ask(ctx):
            await ctx.ready()
            units = ctx.asking("units")
            await refused(partial(units.ask, step=1))
            await units.ask("good", key="large", step=1)
            got.append(await units.take())
            await ctx.stopping.wait()

        async def echo(ctx):
            await ctx.ready()
            units = ctx.answering("units")
            question = await units.take()
            await refused(lambda payload, key: units.answer(question, payload))
            units.answer(question, question.payload)
            await ctx.stopping.wait()

        a, e = p.start("asker/0", ask), p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("units", "asker/0", "echo/0")
        await until(lambda: bool(got))
        assert (got[0].key, got[0].payload) == ("large", "good")
        for account in (a.session.askers["units"].account_out, e.session.answerers["units"].account_out):
            assert refusals(account) == {"PayloadError": 1, "MessageTooLarge": 1}


async def test_an_instruction_of_an_older_roster_or_switch_of_plans_is_left_out_and_counted(tmp_path):
    async with pod(tmp_path, [cycle("items", "maker", "taker"), queue("units", "maker", "taker")]) as p:
        told, got = asyncio.Event(), list[str]()

        async def make(ctx):
            await ctx.ready()
            await told.wait()
            await ctx.asking("items").ask(1, key="item", step=1)
            await ctx.asking("items").take()
            await ctx.channel("units").put(1, key="unit", step=1)
            await ctx.stopping.wait()

        async def take(ctx):
            await ctx.ready()
            question = await ctx.answering("items").take()
            got.append(question.key)
            ctx.answering("items").answer(question, None)
            got.append((await ctx.channel("units").take()).key)
            await ctx.stopping.wait()

        m = p.start("maker/0", make)
        t = p.start("taker/0", take)
        await p.driver.connected("maker/0", "taker/0")
        endpoint = p.driver.connections["taker/0"].hello.endpoint
        new = queue("units", "maker", "taker", micro_batch=7)
        p.driver.send("maker/0", route=pb.Route(channel="items", peer=endpoint, outgoing=True, credit=9, roster=4))
        p.driver.send("maker/0", replan=pb.Replan(plan_revision=1, switch_number=3, channels=[new]))
        p.driver.send("maker/0", route=pb.Route(channel="items", peer=endpoint, outgoing=True, credit=1, roster=3))
        old = pb.Replan(plan_revision=2, switch_number=2, channels=[queue("units", "maker", "taker")])
        p.driver.send("maker/0", replan=old)
        await until(lambda: m.session.stale_instructions == 2)
        assert m.session.queues["units"].micro_batch == 7
        (conversation,) = m.session.askers["items"]._with.values()
        assert conversation.asked.credit == 9
        assert t.session.stale_instructions == 0
        told.set()
        await until(lambda: got == ["item", "unit"])


async def test_a_message_of_a_replaced_attempt_is_refused_and_the_channel_goes_on(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker")]) as p:
        got: list[str] = []

        async def take(ctx):
            await ctx.ready()
            async for item in ctx.channel("units"):
                got.append(item.key)
                ctx.channel("units").ack(item)

        t = p.start("taker/0", take)
        p.start("maker/0", maker(1, prefix="old"))
        await until(lambda: got == ["old0"])
        old = t.host.peers.find("maker/0", 1)
        await p.kill("maker/0")
        p.start("maker/0", maker(1, prefix="new"), attempt=2)
        await until(lambda: got == ["old0", "new0"])
        assert t.host.peers.find("maker/0", 1) is None, "its life is over: nothing of it is heard any more"
        with pytest.raises(Refusal, match="attempt 2 of worker maker/0 has taken the place of 1"):
            t.host.peers.admit(old.identity, None)  # type: ignore[union-attr]


async def test_both_ends_say_how_much_they_hold_and_how_old_it_is(tmp_path):
    async with pod(tmp_path, [queue("units", "maker", "taker", micro_batch=2, depth=1)]) as p:
        m = p.start("maker/0", maker(5))
        t = p.start("taker/0", forever)
        await p.driver.connected("maker/0", "taker/0")
        await until(lambda: bool(t.session.queues) and t.session.queues["units"].into.given.count_here(most=2) == 2)
        await until(lambda: m.session.queues["units"].account_out.items == 5)
        # The consumer's first: ages grow between the two looks.
        given, made = t.session.queues["units"].account_in.level(), m.session.queues["units"].account_out.level()
        assert (made.depth, given.depth) == (5, 2)
        assert made.bytes == m.session.queues["units"].account_out.bytes > given.bytes > 0
        assert made.oldest_s >= given.oldest_s > 0
        await asyncio.sleep(0.01)
        assert t.session.queues["units"].account_in.level().oldest_s >= given.oldest_s + 0.01
