"""Answers that have come and are not taken, as the route that they came by ends and is given again.

A question is finished with as soon as its answer is put, so nobody asks again, and whoever answered gives up what it
has put for a route that ended: what lies at the end that asked is the only copy.
"""

import asyncio

import pytest

from tests.fakes.channels_driver import stream
from tests.fakes.workers import pod

LIFE = ("b/0", 1)


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


class Asking:
    """a/0 asks, b/0 answers at once, and a/0 takes the answer when it may."""

    def __init__(self, p) -> None:
        self.driver, self.got = p.driver, list[int]()
        self.may_ask, self.may_take, self.may_answer = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_answer.set()
        self.a, self.b = p.start("a/0", self.ask), p.start("b/0", self.answer)

    async def ask(self, ctx):
        await self.may_ask.wait()
        await ctx.channel("q").put(1, key="one", step=0)
        await self.may_take.wait()
        async for item in ctx.channel("r"):
            self.got.append(item.payload)
            ctx.channel("r").ack(item)

    async def answer(self, ctx):
        async for item in ctx.channel("q"):
            await self.may_answer.wait()
            await ctx.channel("r").put(item.payload, key=item.key, step=0, to=item.source)
            ctx.channel("q").ack(item)

    def give(self, worker: str, *, number: int) -> None:
        peer = {"a/0": "b/0", "b/0": "a/0"}[worker]
        self.driver.route_to(worker, "q", peer=peer, outgoing=worker == "a/0", number=number)
        self.driver.route_to(worker, "r", peer=peer, outgoing=worker == "b/0", number=number)

    def end(self, worker: str, *channels: str, number: int) -> None:
        peer = {"a/0": "b/0", "b/0": "a/0"}[worker]
        for channel in channels:
            self.driver.unroute(channel, worker, peer, attempt=1, number=number)

    @property
    def answers(self):
        return self.a.session.streams["r"]

    async def asked(self) -> None:
        """And answered, and through with the question."""
        questions = self.a.session.streams["q"]
        await until(lambda: next(iter(questions._out.values())).sender.base == 1 and not questions.unfinished)

    async def opened_anew(self, known) -> None:
        """The next stream of answers has come to a/0."""
        streams = self.answers
        await until(lambda: (streams._in.get(LIFE) or streams._parted.get(LIFE)) not in (known, None))


@pytest.mark.parametrize("number", [0, 1], ids=["not-numbered", "numbered"])
@pytest.mark.parametrize("heard", ["by both", "by the one that answers"])
async def test_an_answer_that_is_not_taken_yet_outlives_its_route(tmp_path, number, heard):
    async with pod(tmp_path, [stream("q", "a", "b"), stream("r", "b", "a")]) as p:
        asking = Asking(p)
        asking.may_ask.set()
        await p.driver.connected("a/0", "b/0")
        for worker in ("a/0", "b/0"):
            asking.give(worker, number=number)
        await until(lambda: "r" in asking.a.session.streams and len(asking.answers.inbox) == 1)
        await asking.asked()
        known = asking.answers._in[LIFE]
        if heard == "by both":
            asking.end("a/0", "q", "r", number=number)
            await until(lambda: LIFE in asking.answers._gone)
        asking.end("b/0", "q", "r", number=number)
        asking.give("b/0", number=number and number + 1)
        await asking.opened_anew(known)
        asking.give("a/0", number=number and number + 1)
        asking.may_take.set()
        await until(lambda: asking.got)
        assert asking.got == [1]


async def test_an_answer_that_was_put_aside_outlives_its_route(tmp_path):
    """The word of the end of one channel's route came before that of the other's."""
    async with pod(tmp_path, [stream("q", "a", "b"), stream("r", "b", "a")]) as p:
        asking = Asking(p)
        await p.driver.connected("a/0", "b/0")
        for worker in ("a/0", "b/0"):
            asking.give(worker, number=1)
        await until(lambda: "r" in asking.a.session.streams and asking.answers._in.get(LIFE))
        known = asking.answers._in[LIFE]
        asking.end("a/0", "r", number=1)
        await until(lambda: LIFE in asking.answers._gone)
        asking.may_ask.set()
        await asking.asked()
        assert len(known.aside) == 1
        asking.end("a/0", "q", number=1)
        asking.end("b/0", "q", "r", number=1)
        asking.give("b/0", number=2)
        await asking.opened_anew(known)
        asking.give("a/0", number=2)
        asking.may_take.set()
        await until(lambda: asking.got)
        assert asking.got == [1]


@pytest.mark.parametrize("asks_again", [True, False], ids=["whose asker hears of the end", "whose asker does not"])
@pytest.mark.parametrize("ended", ["qr", "r"])
async def test_a_question_is_answered_though_its_answer_went_nowhere(tmp_path, asks_again, ended):
    """b/0 hears of the end of the routes while it works; what it then puts is for nobody, and a/0 learns of the end
    later, or never, as it is in the same driver's books for both ends or under a new driver."""
    async with pod(tmp_path, [stream("q", "a", "b"), stream("r", "b", "a")]) as p:
        asking = Asking(p)
        asking.may_answer.clear()
        asking.may_ask.set()
        asking.may_take.set()
        await p.driver.connected("a/0", "b/0")
        for worker in ("a/0", "b/0"):
            asking.give(worker, number=1)
        await until(lambda: "q" in asking.b.session.streams and asking.b.session.streams["q"].in_hand)
        answers = asking.b.session.streams["r"]
        asking.end("b/0", *ended, number=1)
        await until(lambda: ("a/0", 1) in answers._gone)
        asking.may_answer.set()
        await until(lambda: answers.account_out.dropped["PeerGone"] and not asking.b.session.streams["q"].in_hand)
        await asyncio.sleep(0.1)  # longer than acknowledgements wait for company
        assert asking.a.session.streams["q"].unfinished == 1, "not finished with: nobody has its answer"
        if asks_again:
            asking.end("a/0", *ended, number=1)
            asking.give("a/0", number=2)
        asking.give("b/0", number=2 if asks_again else 1)
        await until(lambda: asking.got and not asking.a.session.streams["q"].unfinished)
        assert set(asking.got) == {1}, "twice at most, where it was asked again: roles know a repeated answer"
