"""What a worker says of its links to Prometheus: what went over them, what broke, who was refused."""

import asyncio
from typing import Any

import pytest

from rlinf_worker.links import hello, tcp
from rlinf_worker.links.errors import LinkRefused, LinkStale, MessageTooLarge
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.settings import LinkSettings
from rlinf_worker.runtime import numbers
from tests.fakes.channels_driver import stream
from tests.fakes.workers import pod


def served(worker: Any) -> dict[tuple[str, ...], float]:
    return {
        (name.removeprefix("rlinf_"), *labels): value for name, labels, value in numbers.of_links(worker.host.peers)
    }


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_links_are_counted_by_kind_over_breaks_and_refused_dials_by_reason(tmp_path):
    async with pod(tmp_path, [stream("items", "maker", "taker")]) as p:
        got: list[str] = []

        async def make(ctx):
            await ctx.ready()
            for n in range(100_000):
                await ctx.channel("items").put(n, key=str(n), step=1)
                await asyncio.sleep(0.001)

        async def take(ctx):
            await ctx.ready()
            async for item in ctx.channel("items"):
                got.append(item.key)
                ctx.channel("items").ack(item)

        m, t = p.start("maker/0", make, attempt=2), p.start("taker/0", take)
        await p.driver.connected("taker/0")
        await p.driver.connected("maker/0", attempt=2)
        p.driver.route("items", "maker/0", "taker/0")
        await until(lambda: len(got) >= 10)
        (kind,) = {name[1] for name in served(m) if name[0] == "links"}
        assert served(m)["links", kind] == 1
        before = served(m)["link_messages_total", kind, "direction=sent"]
        for peer in list(m.host.peers._peers.values()):
            assert peer.link is not None
            peer.link.abort("pulled out")
        seen = len(got)
        await until(lambda: len(got) >= seen + 10)
        now = served(m)
        assert now["link_messages_total", kind, "direction=sent"] >= before + 10, "of both links"
        assert now["link_bytes_total", kind, "direction=sent"] > now["link_messages_total", kind, "direction=sent"]
        assert now["link_breaks_total", kind] == 1
        assert served(t)["link_messages_total", kind, "direction=received"] >= before
        assert got == [str(n) for n in range(len(got))], "the stream went on"


async def dial(endpoint: Any, *, attempt: int) -> None:
    me, peer = (Identity(job="job-1", worker=w, attempt=n) for w, n in (("maker/0", attempt), ("taker/0", 1)))
    await tcp.dial(endpoint.host, endpoint.port, me, peer, settings=LinkSettings(), context=None)


async def test_another_protocol_and_a_replaced_attempt_are_told_and_counted_and_the_stream_goes_on(
    tmp_path, monkeypatch
):
    async with pod(tmp_path, [stream("items", "maker", "taker")]) as p:
        got: list[str] = []
        go = asyncio.Event()

        async def make(ctx):
            await ctx.ready()
            await ctx.channel("items").put(1, key="before", step=1)
            await go.wait()
            await ctx.channel("items").put(1, key="after", step=1)
            await ctx.stopping.wait()

        async def take(ctx):
            await ctx.ready()
            async for item in ctx.channel("items"):
                got.append(item.key)
                ctx.channel("items").ack(item)

        m, t = p.start("maker/0", make, attempt=2), p.start("taker/0", take)
        await p.driver.connected("taker/0")
        await p.driver.connected("maker/0", attempt=2)
        p.driver.route("items", "maker/0", "taker/0")
        await until(lambda: got == ["before"])
        link = next(iter(m.host.peers._peers.values())).link
        there = t.host.peers.listener.endpoint
        with pytest.raises(LinkStale, match="attempt 2 of worker maker/0 has taken the place of 1"):
            await dial(there, attempt=1)
        pack = hello._pack

        def of_another(fields, me):  # the dialer's hello; the answer is as ever
            return pack(fields | ({"protocol": 99} if "to_worker" in fields else {}), me)

        with monkeypatch.context() as patch:
            patch.setattr(hello, "_pack", of_another)
            with pytest.raises(LinkRefused, match=r"worker maker/0.* speaks link protocol 99, worker taker/0"):
                await dial(there, attempt=2)
        await until(lambda: served(t).get(("link_refused_dials_total", "reason=protocol")) == 1)
        assert served(t)["link_refused_dials_total", "reason=stale"] == 1
        go.set()
        await until(lambda: got == ["before", "after"])
        assert next(iter(m.host.peers._peers.values())).link is link, "over the link that was there"


@pytest.mark.parametrize("over", [1, 50, 300])
async def test_an_item_that_fits_but_for_its_head_is_refused_at_the_call_and_the_stream_goes_on(tmp_path, over):
    """The bound is of a whole message: what is let in by `put` must not be refused later, by the link."""
    async with pod(tmp_path, [stream("items", "maker", "taker")]) as p:
        p.link_settings = LinkSettings(max_message_bytes=200_000)
        got: list[str] = []
        refused: list[int] = []

        async def make(ctx):
            await ctx.ready()
            items = ctx.channel("items")
            for n, size in enumerate((200_000 - over, 1000)):
                try:
                    await items.put(bytes(size), key="k" * 100 + str(n), step=1)
                except MessageTooLarge:
                    refused.append(n)
            await ctx.stopping.wait()

        async def take(ctx):
            await ctx.ready()
            async for item in ctx.channel("items"):
                got.append(item.key[100:])
                ctx.channel("items").ack(item)

        p.start("maker/0", make)
        p.start("taker/0", take)
        await p.driver.connected("maker/0", "taker/0")
        p.driver.route("items", "maker/0", "taker/0")
        await until(lambda: got[-1:] == ["1"])
        assert (refused, got) == ([0], ["1"])
