"""Payloads that are not what their flow declares, between whole workers: said at the call, counted, and the channel
goes on; a consumer finds out by itself where its producer runs another version of the flow's code."""

import asyncio
from typing import Any

import numpy
import pytest

from rlinf_worker.channels.payload_type import PayloadMismatch, PayloadType
from rlinf_worker.queues.units import Age
from rlinf_worker.runtime import numbers
from tests.fakes.channels_driver import queue, stream
from tests.fakes.workers import pod

DECLARED = PayloadType({"obs": "float32[n, 4]", "t": "int"})
GOOD = {"obs": numpy.zeros((3, 4), "f4"), "t": 1}
WRONG = {"obs": numpy.zeros((3, 5), "f4"), "t": 1}
SAYS = (
    r"item 'wrong' of channel 'units' is not what its flow declares: payload\['obs'\]: "
    r"got float32\[3, 5\], wanted float32\[n, 4\]; convert it before put"
)


def channel(kind: str) -> Any:
    spec = queue("units", "maker", "taker") if kind == "queue" else stream("units", "maker", "taker")
    spec.payload = DECLARED.text
    return spec


def of(worker: Any, kind: str) -> Any:
    return (worker.session.queues if kind == "queue" else worker.session.streams).get("units")


def served(account: Any) -> dict[tuple[str, ...], float]:
    return {(name, *labels): value for name, labels, value in numbers.of_account(account)}


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def taker(got: list[str], wrong: list[str]) -> Any:
    async def run(ctx):
        await ctx.ready()
        units = ctx.channel("units")
        while True:
            try:
                item = await units.take()
            except PayloadMismatch as error:
                wrong.append(str(error))
                continue
            got.append(item.key)
            units.ack(item)

    return run


@pytest.mark.parametrize("kind", ["stream", "queue"])
async def test_a_mismatch_is_said_to_the_producer_and_counted_and_the_channel_goes_on(tmp_path, kind):
    async with pod(tmp_path, [channel(kind)]) as p:
        got: list[str] = []
        seen_wrong: list[str] = []

        async def make(ctx):
            await ctx.ready()
            units = ctx.channel("units")
            await units.put(GOOD, key="a", step=1)
            with pytest.raises(PayloadMismatch, match=SAYS):
                await units.put(WRONG, key="wrong", step=1)
            await units.put(GOOD, key="b", step=1)
            await ctx.stopping.wait()

        m, t = p.start("maker/0", make), p.start("taker/0", taker(got, seen_wrong))
        await p.driver.connected("maker/0", "taker/0")
        if kind == "stream":
            p.driver.route("units", "maker/0", "taker/0")
        await until(lambda: got == ["a", "b"])
        key = ("rlinf_channel_refused_items_total", "channel=units", "side=producer", "reason=PayloadMismatch")
        assert served(of(m, kind).account_out)[key] == 1
        assert of(m, kind).account_out.items == 2
        assert not seen_wrong
        assert not of(t, kind).account_in.dropped


@pytest.mark.parametrize("kind", ["stream", "queue"])
async def test_a_producer_that_does_not_check_is_found_out_by_its_consumer_and_the_channel_goes_on(tmp_path, kind):
    """As an older image does, which knows nothing of declarations."""
    async with pod(tmp_path, [channel(kind)]) as p:
        got: list[str] = []
        seen_wrong: list[str] = []
        go = asyncio.Event()

        async def make(ctx):
            await ctx.ready()
            units = ctx.channel("units")
            await go.wait()
            for key in ("a", "wrong", "b"):
                await units.put(WRONG if key == "wrong" else GOOD, key=key, step=1)
            await ctx.stopping.wait()

        m, t = p.start("maker/0", make), p.start("taker/0", taker(got, seen_wrong))
        await p.driver.connected("maker/0", "taker/0")
        await until(lambda: of(m, kind) is not None and of(t, kind) is not None)
        if kind == "stream":
            of(m, kind).type, of(m, kind)._declared = None, 0
            p.driver.route("units", "maker/0", "taker/0")
        else:
            of(m, kind).out._type = None
        go.set()
        await until(lambda: got == ["a", "b"])
        assert [text.split(";")[0] for text in seen_wrong] == [
            "item 'wrong' of channel 'units' is not what its flow declares: payload['obs']: "
            "got float32[3, 5], wanted float32[n, 4]"
        ]
        key = ("rlinf_channel_dropped_items_total", "channel=units", "side=consumer", "reason=PayloadMismatch")
        assert served(of(t, kind).account_in)[key] == 1
        await until(lambda: of(m, kind).unfinished == 0)  # nobody will ask for it again


async def test_a_unit_within_a_micro_batch_that_does_not_fit_costs_none_of_the_others(tmp_path):
    spec = channel("queue")
    spec.micro_batch, spec.depth = 4, 2
    async with pod(tmp_path, [spec]) as p:
        go, seen = asyncio.Event(), list[list[str] | str]()

        async def make(ctx):
            await ctx.ready()
            units = ctx.channel("units")
            units.out._type = None
            for key in ("a", "b", "wrong", "c", "d"):
                await units.put(WRONG if key == "wrong" else GOOD, key=key, step=1)
            await ctx.stopping.wait()

        async def take(ctx):
            await ctx.ready()
            units = ctx.channel("units")
            await go.wait()
            while True:
                try:
                    batch = await units.take_batch()
                except PayloadMismatch as error:
                    seen.append(error.reason)
                    continue
                seen.append([item.key for item in batch])
                for item in batch:
                    units.ack(item)

        m, t = p.start("maker/0", make), p.start("taker/0", take)
        await p.driver.connected("maker/0", "taker/0")
        await until(lambda: of(t, "queue") is not None and of(t, "queue").into.given.count_here(most=5) == 5)
        go.set()
        await until(lambda: seen == [["a", "b"], "PayloadMismatch", ["c", "d"]])
        await until(lambda: of(m, "queue").unfinished == 0)


async def test_a_rank_ends_with_the_sentence_where_its_part_of_a_round_does_not_fit(tmp_path):
    """The other ranks train on the round: one that went on without a unit of it would learn something else."""
    spec = channel("queue")
    spec.rounds, spec.micro_batch = True, 1
    async with pod(tmp_path, [spec]) as p:
        caught: list[str] = []

        async def make(ctx):
            await ctx.ready()
            units = ctx.channel("units")
            units.out._type = None
            await units.put(WRONG, key="wrong", step=1)
            await ctx.stopping.wait()

        async def train(ctx):
            await ctx.ready()
            try:
                await ctx.channel("units").take_round()
            except PayloadMismatch as error:
                caught.append(str(error))
            await ctx.stopping.wait()

        p.start("maker/0", make)
        p.start("taker/0", train)
        p.driver.cores["units"].steps.open(Age(0, 1), ["wrong"])
        await until(lambda: bool(caught))
        error = await asyncio.wait_for(asyncio.gather(p.tasks["taker/0"], return_exceptions=True), 20)
        assert "item 'wrong' of channel 'units' is not what its flow declares" in caught[0]
        assert caught[0] in str(error), "though its role would have gone on"


async def test_a_consumer_of_a_stream_does_not_check_what_its_producer_has_checked(tmp_path):
    """A stream's items are small and many; both ends name the declaration that they have when the stream is opened."""
    async with pod(tmp_path, [channel("stream")]) as p:
        got: list[str] = []
        m, t = p.start("maker/0", make_one), p.start("taker/0", taker(got, []))
        await p.driver.connected("maker/0", "taker/0")
        checked: list[str] = []
        await until(lambda: of(t, "stream") is not None and of(m, "stream") is not None)
        of(t, "stream").type = Counting(DECLARED, checked)
        p.driver.route("units", "maker/0", "taker/0")
        await until(lambda: got == ["a"])
        assert checked == []


async def make_one(ctx):
    await ctx.ready()
    await ctx.channel("units").put(GOOD, key="a", step=1)
    await ctx.stopping.wait()


class Counting:
    def __init__(self, type: PayloadType, checked: list[str]) -> None:
        self.fingerprint, self._type, self._checked = type.fingerprint, type, checked

    def check(self, payload: Any, channel: str, key: str) -> None:
        self._checked.append(key)
        self._type.check(payload, channel, key)
