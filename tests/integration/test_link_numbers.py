"""What a worker says of its links to Prometheus: what went over them, what broke, who was refused."""

import asyncio
from typing import Any

import pytest

from rlinf_worker.links import hello, tcp
from rlinf_worker.links.errors import LinkRefused, LinkStale, MessageTooLarge
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.settings import LinkSettings
from rlinf_worker.runtime import numbers
from tests.fakes.channels_driver import cycle
from tests.fakes.workers import pod


def served(worker: Any) -> dict[tuple[str, ...], float]:
    return {
        (name.removeprefix("rlinf_"), *labels): value for name, labels, value in numbers.of_links(worker.host.peers)
    }


async def echo(ctx: Any) -> None:
    await ctx.ready()
    async for question in ctx.answering("items"):
        ctx.answering("items").answer(question, question.payload)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_links_are_counted_by_kind_over_breaks_and_refused_dials_by_reason(tmp_path):
    async with pod(tmp_path, [cycle("items", "asker", "echo")]) as p:
        got: list[str] = []

        async def ask(ctx):
            await ctx.ready()
            items = ctx.asking("items")
            for n in range(100_000):
                await items.ask(n, key=str(n), step=1)
                while (answer := items.take_now()) is not None:
                    got.append(answer.key)
                await asyncio.sleep(0.001)

        a, e = p.start("asker/0", ask, attempt=2), p.start("echo/0", echo)
        await p.driver.connected("echo/0")
        await p.driver.connected("asker/0", attempt=2)
        p.driver.route("items", "asker/0", "echo/0")
        await until(lambda: len(got) >= 10)
        (kind,) = {name[1] for name in served(a) if name[0] == "links"}
        assert served(a)["links", kind] == 1
        before = served(a)["link_messages_total", kind, "direction=sent"]
        for peer in list(a.host.peers._peers.values()):
            assert peer.link is not None
            peer.link.abort("pulled out")
        seen = len(got)
        await until(lambda: len(got) >= seen + 10)
        now = served(a)
        assert now["link_messages_total", kind, "direction=sent"] >= before + 10, "of both links"
        assert now["link_bytes_total", kind, "direction=sent"] > now["link_messages_total", kind, "direction=sent"]
        assert now["link_breaks_total", kind] == 1
        assert served(e)["link_messages_total", kind, "direction=received"] >= before
        assert got == [str(n) for n in range(len(got))], "the cycle went on"


async def dial(endpoint: Any, *, attempt: int) -> None:
    me, peer = (Identity(job="job-1", worker=w, attempt=n) for w, n in (("asker/0", attempt), ("echo/0", 1)))
    await tcp.dial(endpoint.host, endpoint.port, me, peer, settings=LinkSettings(), context=None)


async def test_another_protocol_and_a_replaced_attempt_are_told_and_counted_and_the_cycle_goes_on(
    tmp_path, monkeypatch
):
    async with pod(tmp_path, [cycle("items", "asker", "echo")]) as p:
        got: list[str] = []
        go = asyncio.Event()

        async def ask(ctx):
            await ctx.ready()
            items = ctx.asking("items")
            await items.ask(1, key="before", step=1)
            got.append((await items.take()).key)
            await go.wait()
            await items.ask(1, key="after", step=1)
            got.append((await items.take()).key)
            await ctx.stopping.wait()

        a, e = p.start("asker/0", ask, attempt=2), p.start("echo/0", echo)
        await p.driver.connected("echo/0")
        await p.driver.connected("asker/0", attempt=2)
        p.driver.route("items", "asker/0", "echo/0")
        await until(lambda: got == ["before"])
        link = next(iter(a.host.peers._peers.values())).link
        there = e.host.peers.listener.endpoint
        with pytest.raises(LinkStale, match="attempt 2 of worker asker/0 has taken the place of 1"):
            await dial(there, attempt=1)
        pack = hello._pack

        def of_another(fields, me):  # the dialer's hello; the answer is as ever
            return pack(fields | ({"protocol": 99} if "to_worker" in fields else {}), me)

        with monkeypatch.context() as patch:
            patch.setattr(hello, "_pack", of_another)
            with pytest.raises(LinkRefused, match=r"worker asker/0.* speaks link protocol 99, worker echo/0"):
                await dial(there, attempt=2)
        await until(lambda: served(e).get(("link_refused_dials_total", "reason=protocol")) == 1)
        assert served(e)["link_refused_dials_total", "reason=stale"] == 1
        go.set()
        await until(lambda: got == ["before", "after"])
        assert next(iter(a.host.peers._peers.values())).link is link, "over the link that was there"


@pytest.mark.parametrize("over", [1, 50, 300])
async def test_what_fits_but_for_its_head_is_refused_at_the_call_and_the_cycle_goes_on(tmp_path, over):
    """The bound is of a whole message: what is let in by `ask` or `answer` must not be refused later, by the link."""
    async with pod(tmp_path, [cycle("items", "asker", "echo")]) as p:
        p.link_settings = LinkSettings(max_message_bytes=200_000)
        got: list[str] = []
        refused: list[int] = []

        async def ask(ctx):
            await ctx.ready()
            items = ctx.asking("items")
            for n, size in enumerate((200_000 - over, 1000)):
                try:
                    await items.ask(bytes(size), key="k" * 100 + str(n), step=1)
                except MessageTooLarge:
                    refused.append(n)
            async for item in items:
                got.append(item.key[100:])

        async def answer(ctx):
            await ctx.ready()
            items = ctx.answering("items")
            async for question in items:
                try:
                    items.answer(question, bytes(200_000 - over))
                except MessageTooLarge:
                    refused.append(-1)
                    items.answer(question, None)

        p.start("asker/0", ask)
        p.start("echo/0", answer)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("items", "asker/0", "echo/0")
        await until(lambda: got[-1:] == ["1"])
        assert (refused, got) == ([0, -1], ["1"])
