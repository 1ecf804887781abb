"""Payloads that are not what their flow declares, between whole workers: said at the call, counted, and the channel
goes on; a consumer finds out by itself where its producer runs another version of the flow's code."""

import asyncio
import re
from typing import Any

import numpy
import pytest

from rlinf_worker.channels.payload_type import PayloadMismatch, PayloadType
from rlinf_worker.queues.units import Age
from rlinf_worker.runtime import numbers
from tests.fakes.channels_driver import cycle, queue
from tests.fakes.workers import Pod, pod

DECLARED = PayloadType({"obs": "float32[n, 4]", "t": "int"})
GOOD = {"obs": numpy.zeros((3, 4), "f4"), "t": 1}
WRONG = {"obs": numpy.zeros((3, 5), "f4"), "t": 1}
WHAT = (
    "item 'wrong' of channel 'units' is not what its flow declares: payload['obs']: "
    "got float32[3, 5], wanted float32[n, 4]"
)
SAYS = f"{WHAT}; convert it first"


def units() -> Any:
    spec = queue("units", "maker", "taker")
    spec.payload = DECLARED.text
    return spec


def questions() -> Any:
    return cycle("units", "asker", "echo", question=DECLARED.text)


def answers() -> Any:
    return cycle("units", "asker", "echo", answer=DECLARED.text)


def count(account: Any, what: str) -> float:
    """Of PayloadMismatch."""
    labels = ("channel=units", f"side={account.side}", "reason=PayloadMismatch")
    found = {(name, *labels): value for name, labels, value in numbers.of_account(account)}
    return found.get((f"rlinf_channel_{what}_items_total", *labels), 0)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


# --- units of a queue -------------------------------------------------------------------------------------------------
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


async def test_a_mismatch_is_said_to_the_producer_and_counted_and_the_queue_goes_on(tmp_path):
    async with pod(tmp_path, [units()]) as p:
        got: list[str] = []
        seen_wrong: list[str] = []

        async def make(ctx):
            await ctx.ready()
            units = ctx.channel("units")
            await units.put(GOOD, key="a", step=1)
            with pytest.raises(PayloadMismatch, match=re.escape(SAYS)):
                await units.put(WRONG, key="wrong", step=1)
            await units.put(GOOD, key="b", step=1)
            await ctx.stopping.wait()

        m, t = p.start("maker/0", make), p.start("taker/0", taker(got, seen_wrong))
        await until(lambda: got == ["a", "b"])
        made = m.session.queues["units"].account_out
        assert (count(made, "refused"), made.items) == (1, 2)
        assert not seen_wrong
        assert not t.session.queues["units"].account_in.dropped


async def test_a_producer_that_does_not_check_is_found_out_by_its_consumer_and_the_queue_goes_on(tmp_path):
    """As an older image does, which knows nothing of declarations."""
    async with pod(tmp_path, [units()]) as p:
        got: list[str] = []
        seen_wrong: list[str] = []

        async def make(ctx):
            await ctx.ready()
            units = ctx.channel("units")
            units.out._type = None
            for key in ("a", "wrong", "b"):
                await units.put(WRONG if key == "wrong" else GOOD, key=key, step=1)
            await ctx.stopping.wait()

        m, t = p.start("maker/0", make), p.start("taker/0", taker(got, seen_wrong))
        await until(lambda: got == ["a", "b"])
        assert [text.split(";")[0] for text in seen_wrong] == [WHAT]
        assert count(t.session.queues["units"].account_in, "dropped") == 1
        await until(lambda: len(m.session.queues["units"].out.shelf) == 0)  # nobody will ask for it again


async def test_a_unit_within_a_micro_batch_that_does_not_fit_costs_none_of_the_others(tmp_path):
    spec = units()
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
        await until(lambda: t.session.queues and t.session.queues["units"].into.given.count_here(most=5) == 5)
        go.set()
        await until(lambda: seen == [["a", "b"], "PayloadMismatch", ["c", "d"]])
        await until(lambda: len(m.session.queues["units"].out.shelf) == 0)


async def test_a_rank_ends_with_the_sentence_where_its_part_of_a_round_does_not_fit(tmp_path):
    """The other ranks train on the round: one that went on without a unit of it would learn something else."""
    spec = units()
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
        p.driver.cores["units"].steps.at(Age(0, 1)).open(dict.fromkeys(["wrong"], 1))
        await until(lambda: bool(caught))
        error = await asyncio.wait_for(asyncio.gather(p.tasks["taker/0"], return_exceptions=True), 20)
        assert "item 'wrong' of channel 'units' is not what its flow declares" in caught[0]
        assert caught[0] in str(error), "though its role would have gone on"


# --- questions and answers of a cycle ---------------------------------------------------------------------------------
class Asker:
    """Asks three, one of them perhaps with the wrong payload, and takes what comes of them."""

    def __init__(self, question: Any, *, wrong: Any = None) -> None:
        self._question, self._wrong = question, wrong if wrong is not None else question
        self.refused: list[str] = []
        self.got: list[str | tuple[str, bool]] = []  # what an answer said, or its key and whether there is none

    async def run(self, ctx: Any) -> None:
        await ctx.ready()
        units = ctx.asking("units")
        for key in ("a", "wrong", "b"):
            try:
                await units.ask(self._wrong if key == "wrong" else self._question, key=key, step=1)
            except PayloadMismatch as error:
                self.refused.append(str(error))
        while True:
            try:
                answer = await units.take()
            except PayloadMismatch as error:
                self.got.append(str(error).split(";")[0])
                continue
            self.got.append((answer.key, answer.cancelled))


class Echo:
    """Answers each, one of them perhaps with the wrong payload."""

    def __init__(self, answer: Any, *, wrong: Any = None) -> None:
        self._answer, self._wrong = answer, wrong if wrong is not None else answer
        self.refused: list[str] = []
        self.seen_wrong: list[str] = []

    async def run(self, ctx: Any) -> None:
        await ctx.ready()
        units = ctx.answering("units")
        while True:
            try:
                question = await units.take()
            except PayloadMismatch as error:
                self.seen_wrong.append(str(error).split(";")[0])
                continue
            try:
                units.answer(question, self._wrong if question.key == "wrong" else self._answer)
            except PayloadMismatch as error:
                self.refused.append(str(error))
                units.drop(question, error.reason)


async def ends(p: Pod, asker: Asker, echo: Echo) -> tuple[Any, Any]:
    """Of the cycle, in their workers, which have no route yet."""
    a, e = p.start("asker/0", asker.run), p.start("echo/0", echo.run)
    await p.driver.connected("asker/0", "echo/0")
    await until(lambda: a.session.askers and e.session.answerers)
    return a.session.askers["units"], e.session.answerers["units"]


async def test_a_question_that_does_not_fit_is_said_to_who_asks_and_counted_and_the_cycle_goes_on(tmp_path):
    async with pod(tmp_path, [questions()]) as p:
        asker, echo = Asker(GOOD, wrong=WRONG), Echo("fine")
        asking, answering = await ends(p, asker, echo)
        p.driver.route("units", "asker/0", "echo/0")
        await until(lambda: asker.got == [("a", False), ("b", False)])
        (said,) = asker.refused
        assert said.startswith(SAYS)
        assert (count(asking.account_out, "refused"), asking.account_out.items) == (1, 2)
        assert not echo.seen_wrong
        assert not answering.account_in.dropped


async def test_an_asker_that_does_not_check_is_found_out_by_who_answers_and_the_cycle_goes_on(tmp_path):
    async with pod(tmp_path, [questions()]) as p:
        asker, echo = Asker(GOOD, wrong=WRONG), Echo("fine")
        asking, answering = await ends(p, asker, echo)
        asking._gives, asking.declared = None, 0
        p.driver.route("units", "asker/0", "echo/0")
        await until(lambda: len(asker.got) == 3)
        assert sorted(asker.got) == [("a", False), ("b", False), ("wrong", True)], "nobody waits for it"
        assert echo.seen_wrong == [WHAT]
        assert count(answering.account_in, "dropped") == 1
        assert asking.account_out.level().depth == 0


async def test_an_answer_that_does_not_fit_is_said_to_who_answers_and_counted_and_the_cycle_goes_on(tmp_path):
    async with pod(tmp_path, [answers()]) as p:
        asker, echo = Asker("what now"), Echo(GOOD, wrong=WRONG)
        asking, answering = await ends(p, asker, echo)
        p.driver.route("units", "asker/0", "echo/0")
        await until(lambda: asker.got == [("a", False), ("wrong", True), ("b", False)])
        (said,) = echo.refused
        assert said.startswith(SAYS)
        assert (count(answering.account_out, "refused"), answering.account_out.items) == (1, 2)
        assert count(asking.account_in, "dropped") == 0


async def test_who_answers_and_does_not_check_is_found_out_by_the_asker_and_the_cycle_goes_on(tmp_path):
    async with pod(tmp_path, [answers()]) as p:
        asker, echo = Asker("what now"), Echo(GOOD, wrong=WRONG)
        asking, answering = await ends(p, asker, echo)
        answering._gives, answering.declared = None, 0
        p.driver.route("units", "asker/0", "echo/0")
        await until(lambda: asker.got == [("a", False), WHAT, ("b", False)])
        assert not echo.refused
        assert count(asking.account_in, "dropped") == 1
        assert asking.account_out.level().depth == 0


@pytest.mark.parametrize("made", [questions(), answers()], ids=["questions", "answers"])
async def test_one_end_of_a_cycle_does_not_check_what_the_other_has_checked(tmp_path, made):
    """Questions are small and many: each end names the declaration that it checks by."""
    async with pod(tmp_path, [made]) as p:
        asker, echo = Asker(GOOD), Echo(GOOD)
        asking, answering = await ends(p, asker, echo)
        checked: list[str] = []
        if made.payload:
            answering._takes = Counting(DECLARED, checked)
        else:
            asking._takes = Counting(DECLARED, checked)
        p.driver.route("units", "asker/0", "echo/0")
        await until(lambda: len(asker.got) == 3)
        assert checked == []


class Counting:
    def __init__(self, type: PayloadType, checked: list[str]) -> None:
        self.fingerprint, self._type, self._checked = type.fingerprint, type, checked

    def check(self, payload: Any, channel: str, key: str) -> None:
        self._checked.append(key)
        self._type.check(payload, channel, key)
