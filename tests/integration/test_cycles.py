"""Cycles between whole workers, under a driver that is a script: links that break, lives that end, routes that move."""

import asyncio

import numpy as np
import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_worker.links import frames
from rlinf_worker.links.errors import PayloadError
from rlinf_worker.links.message import Message
from rlinf_worker.roles.protocol import RoleContext
from tests.fakes.channels_driver import cycle
from tests.fakes.workers import pod

CYCLE = [cycle("c", "asker", "echo")]


async def echo(ctx: RoleContext) -> None:
    await ctx.ready()
    answering = ctx.answering("c")
    async for question in answering:
        answering.answer(question, question.payload)


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def silent(taken: asyncio.Event):
    async def run(ctx: RoleContext) -> None:
        await ctx.ready()
        await ctx.answering("c").take()
        taken.set()
        await ctx.stopping.wait()

    return run


def asker(count: int, got: list[str], *, window: int = 4):
    """Every answer is of a question that is open: a second one is a KeyError."""

    async def run(ctx: RoleContext) -> None:
        await ctx.ready()
        asking, asked = ctx.asking("c"), 0
        open_keys: set[str] = set()
        while asked < count or open_keys:
            while asked < count and len(open_keys) < window:
                open_keys.add(f"q{asked}")
                await asking.ask({"n": asked}, key=f"q{asked}", step=asked)
                asked += 1
            answer = await asking.take()
            open_keys.remove(answer.key)
            got.append(answer.key)
            assert (answer.payload, answer.step) == ({"n": int(answer.key[1:])}, int(answer.key[1:]))

    return run


def pull_out(*workers) -> None:
    for worker in workers:
        for peer in list(worker.host.peers._peers.values()):
            if peer.link is not None:
                peer.link.abort("pulled out")


async def test_questions_are_answered_in_order_and_cost_no_word_to_the_driver(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        got: list[str] = []
        a, b = p.start("asker/0", asker(200, got)), p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0")
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == [f"q{n}" for n in range(200)]
        asks, answers = a.session.askers["c"], b.session.answerers["c"]
        for out, into in ((asks.account_out, answers.account_in), (answers.account_out, asks.account_in)):
            assert (into.items, into.bytes) == (out.items, out.bytes) == (200, out.bytes)
        told = p.driver.kinds("asker/0") + p.driver.kinds("echo/0")
        assert len(told) <= 12, f"there were {told}"


async def test_a_link_that_breaks_loses_nothing_and_repeats_nothing(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        got: list[str] = []
        a, b = p.start("asker/0", asker(300, got)), p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0")
        for number in range(1, 6):
            await until(lambda number=number: len(got) >= 40 * number)
            pull_out(a, b)
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == [f"q{n}" for n in range(300)]
        answered = b.session.answerers["c"].account_out.items
        assert answered == 300, "none was answered twice: what was answered is said again"


async def test_an_answer_that_was_lost_with_its_link_is_said_again_and_not_made_again(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        made, got = list[str](), list[str]()

        async def answer_into_a_break(ctx):
            await ctx.ready()
            async for question in (answering := ctx.answering("c")):
                made.append(question.key)
                if question.key == "q0":
                    pull_out(b)
                answering.answer(question, question.payload)

        p.start("asker/0", asker(3, got, window=3))
        b = p.start("echo/0", answer_into_a_break)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0")
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert sorted(got) == made == ["q0", "q1", "q2"]
        assert b.session.answerers["c"].account_out.resent >= 1


async def test_a_killed_answerer_is_replaced_and_gets_what_was_unanswered(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        got: list[str] = []
        p.start("asker/0", asker(400, got, window=8))
        p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0")
        for attempt in (2, 3):
            await until(lambda attempt=attempt: len(got) >= 80 * (attempt - 1))
            await p.kill("echo/0")
            p.start("echo/0", echo, attempt=attempt)
            await p.driver.connected("echo/0", attempt=attempt)
            p.driver.unroute("c", "asker/0", "echo/0", attempt=attempt - 1)
            p.driver.route("c", "asker/0", "echo/0")
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert sorted(got, key=lambda k: int(k[1:])) == [f"q{n}" for n in range(400)]


async def test_a_route_to_a_life_that_has_a_successor_is_used_no_more(tmp_path):
    """A driver that dies with the answerer leaves nobody who would end that route: the next one never heard of it."""
    async with pod(tmp_path, CYCLE) as p:
        got, taken = list[str](), asyncio.Event()
        p.start("asker/0", asker(50, got, window=1))
        p.start("echo/0", silent(taken))
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0")
        await asyncio.wait_for(taken.wait(), 10)
        await p.kill("echo/0")
        p.start("echo/0", echo, attempt=2)
        await p.driver.connected("echo/0", attempt=2)
        p.driver.route("c", "asker/0", "echo/0")
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
        p.driver.route("c", "asker/0", "echo/1")
        await asyncio.wait_for(taken.wait(), 10)
        a.session.on_welcome(pb.Welcome(driver_attempt=2), is_new_driver=True)
        p.driver.route("c", "asker/0", "echo/0")
        await p.kill("echo/1")
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert sorted(got) == sorted(f"q{n}" for n in range(50))


async def test_a_route_that_a_new_driver_numbers_anew_goes_on_as_it_is(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        taken = asyncio.Event()
        a = p.start("asker/0", asker(1, []))
        b = p.start("echo/0", silent(taken))
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0", number=1)
        await asyncio.wait_for(taken.wait(), 10)
        (before,) = a.session.askers["c"]._with.values()
        a.session.on_welcome(pb.Welcome(driver_attempt=2), is_new_driver=True)
        p.driver.route("c", "asker/0", "echo/0", number=1 << 32, credit=11)
        await until(lambda: before.route == 1 << 32)
        assert list(a.session.askers["c"]._with.values()) == [before]
        assert before.asked.credit == 11
        assert b.session.answerers["c"].in_hand == 1


async def test_ask_waits_when_nobody_answers_and_says_for_what(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        asked, go = list[int](), asyncio.Event()

        async def ask(ctx):
            await ctx.ready()
            for n in range(20):
                await ctx.asking("c").ask(n, key=str(n), step=0)
                asked.append(n)
            for n in range(20):
                assert (await ctx.asking("c").take()).payload == n

        async def hold(ctx):
            await ctx.ready()
            held = [await ctx.answering("c").take() for _ in range(5)]
            await go.wait()
            for question in held:
                ctx.answering("c").answer(question, question.payload)
            await echo(ctx)

        p.start("asker/0", ask)
        p.start("echo/0", hold)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0", credit=5)
        waits = p.workers["asker/0"]._waits
        await until(lambda: any(asked and what.startswith("room for a question") for what, _ in waits.current()))
        assert asked == list(range(5))
        go.set()
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0


async def test_a_payload_that_cannot_be_sent_is_an_error_at_the_caller_and_the_cycle_goes_on(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        got: list[int] = []

        async def ask(ctx):
            await ctx.ready()
            asking = ctx.asking("c")
            with pytest.raises(PayloadError, match="set"):
                await asking.ask({"x": {1, 2}}, key="bad", step=0)
            for n in (1, 2):
                await asking.ask(n, key=str(n), step=0)
                got.append((await asking.take()).payload)

        async def answer(ctx):
            await ctx.ready()
            answering = ctx.answering("c")
            async for question in answering:
                with pytest.raises(PayloadError, match="set"):
                    answering.answer(question, {"x": {1, 2}})
                answering.answer(question, 10 * question.payload)
                with pytest.raises(UserError, match="no question of it, or is answered"):
                    answering.answer(question, 0)

        a = p.start("asker/0", ask)
        b = p.start("echo/0", answer)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0")
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == [10, 20]
        assert sum(a.session.askers["c"].account_out.refused.values()) == 1
        assert sum(b.session.answerers["c"].account_out.refused.values()) == 2


async def test_a_question_that_is_dropped_comes_back_as_cancelled(tmp_path):
    async with pod(tmp_path, CYCLE) as p:

        async def ask(ctx):
            await ctx.ready()
            await ctx.asking("c").ask(1, key="1", step=3)
            answer = await ctx.asking("c").take()
            assert (answer.key, answer.cancelled, answer.payload) == ("1", True, None)

        async def drop(ctx):
            await ctx.ready()
            async for question in ctx.answering("c"):
                ctx.answering("c").drop(question, "too long")

        a, b = p.start("asker/0", ask), p.start("echo/0", drop)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0")
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert b.session.answerers["c"].account_in.dropped["too long"] == 1
        assert a.session.askers["c"].account_in.dropped["Unanswered"] == 1


async def test_questions_of_a_dead_asker_are_cancelled_and_its_next_life_gets_no_answer_of_theirs(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        taken, go, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slow_echo(ctx):
            await ctx.ready()
            answering = ctx.answering("c")
            first = await answering.take()
            taken.set()
            await go.wait()
            assert first.cancelled
            answering.answer(first, first.payload)
            answered.set()
            await echo(ctx)

        got: list[str] = []

        async def ask_and_die(ctx):
            await ctx.ready()
            for n in range(3):  # two lie there and are taken by nobody
                await ctx.asking("c").ask({"n": n}, key="q0", step=0)
            await asyncio.Event().wait()

        async def ask_again(ctx):
            await answered.wait()
            await asker(3, got)(ctx)

        p.start("asker/0", ask_and_die)
        e = p.start("echo/0", slow_echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0")
        await asyncio.wait_for(taken.wait(), 30)
        there = e.session.answerers["c"]
        await until(lambda: len(there.inbox) == 2)
        await p.kill("asker/0")
        p.start("asker/0", ask_again, attempt=2)
        await p.driver.connected("asker/0", attempt=2)
        p.driver.route("c", "asker/0", "echo/0")
        await until(lambda: not there.inbox)
        go.set()
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == ["q0", "q1", "q2"]
        assert there.account_out.dropped["PeerGone"] == 1
        assert (there.in_hand, there._load) == (0, 0)


async def test_an_answer_that_has_come_is_taken_though_who_gave_it_is_dead(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        go, got = asyncio.Event(), list[tuple[str, bool]]()

        async def busy(ctx):
            await ctx.ready()
            for n in range(2):
                await ctx.asking("c").ask({"n": n}, key=f"q{n}", step=n)
                await go.wait()
                answer = await ctx.asking("c").take()
                got.append((answer.key, answer.cancelled))

        a = p.start("asker/0", busy)
        p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0")
        await until(lambda: "c" in a.session.askers and len(a.session.askers["c"].inbox) == 1)
        await p.kill("echo/0")
        p.start("echo/0", echo, attempt=2)
        await p.driver.connected("echo/0", attempt=2)
        p.driver.unroute("c", "asker/0", "echo/0", attempt=1)
        p.driver.route("c", "asker/0", "echo/0")
        await until(lambda: ("echo/0", 2) in a.session.askers["c"]._with)
        go.set()
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == [("q0", False), ("q1", False)]


async def test_what_was_asked_before_there_was_a_link_is_not_asked_again(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        got: list[str] = []
        a = p.start("asker/0", asker(4, got))
        p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0")
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == ["q0", "q1", "q2", "q3"]
        assert a.session.askers["c"].account_out.resent == 0


async def test_the_end_of_one_conversation_leaves_the_questions_of_others_where_they_are(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        got, go = list[str](), asyncio.Event()

        async def late_echo(ctx):
            await go.wait()
            await echo(ctx)

        async def leave(ctx):
            await ctx.ready()
            for n in range(2):
                await ctx.asking("c").ask(n, key="left", step=n)
            await ctx.stopping.wait()

        p.start("asker/0", asker(3, got))
        p.start("asker/1", leave)
        e = p.start("echo/0", late_echo)
        await p.driver.connected("asker/0", "asker/1", "echo/0")
        for number in range(2):
            p.driver.route("c", f"asker/{number}", "echo/0")
        await until(lambda: "c" in e.session.answerers and len(e.session.answerers["c"].inbox) == 5)
        p.driver.unroute("c", "asker/1", "echo/0", attempt=1)
        await until(lambda: len(e.session.answerers["c"].inbox) == 3)
        go.set()
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == ["q0", "q1", "q2"]


# --- routes that move, as all live on ---------------------------------------------------------------------------------
async def test_what_a_route_leaves_unanswered_goes_out_as_others_make_room(tmp_path):
    """A plan takes an answerer away that has more in hand than the other has room for."""
    async with pod(tmp_path, CYCLE) as p:
        got, go = list[str](), asyncio.Event()

        async def late_echo(ctx):
            await go.wait()
            await echo(ctx)

        a = p.start("asker/0", asker(20, got, window=10))
        b = p.start("echo/0", silent(asyncio.Event()))
        p.start("echo/1", late_echo)
        await p.driver.connected("asker/0", "echo/0", "echo/1")
        p.driver.route("c", "asker/0", "echo/0", credit=8)
        p.driver.route("c", "asker/0", "echo/1", credit=2)
        await until(lambda: "c" in a.session.askers and len(a.session.askers["c"].unanswered) == 10)
        p.driver.unroute("c", "asker/0", "echo/0", attempt=1)
        await until(lambda: ("echo/0", 1) not in a.session.askers["c"]._with)
        await until(lambda: not b.session.answerers["c"].inbox)
        assert b.session.answerers["c"]._with == {}, "it has been told by the asker"
        go.set()
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert sorted(got, key=lambda k: int(k[1:])) == [f"q{n}" for n in range(20)]


async def test_a_question_whose_route_returns_is_answered_by_the_new_conversation_alone(tmp_path):
    """The first life in hand is cancelled; what it still says of it is left out."""
    async with pod(tmp_path, CYCLE) as p:
        got, held = list[str](), list[bool]()

        async def twice(ctx):
            await ctx.ready()
            answering = ctx.answering("c")
            first = await answering.take()
            held.append(first.cancelled)
            second = await answering.take()
            assert (first.key, first.cancelled, second.key, second.cancelled) == ("q0", True, "q0", False)
            answering.answer(first, {"n": -1})
            answering.answer(second, second.payload)
            await ctx.stopping.wait()

        a = p.start("asker/0", asker(1, got))
        p.start("echo/0", twice)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0", number=1)
        await until(lambda: held)
        p.driver.unroute("c", "asker/0", "echo/0", attempt=1, number=1)
        p.driver.route("c", "asker/0", "echo/0", number=2)
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == ["q0"]
        assert a.session.askers["c"].account_in.duplicates == 0


async def test_the_end_of_a_route_that_comes_late_leaves_the_next_one_alone(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        taken = asyncio.Event()
        a = p.start("asker/0", asker(1, []))
        p.start("echo/0", silent(taken))
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0", number=2)
        await asyncio.wait_for(taken.wait(), 10)
        (before,) = a.session.askers["c"]._with.values()
        p.driver.unroute("c", "asker/0", "echo/0", attempt=1, number=1)
        p.driver.route("c", "asker/0", "echo/0", number=2, credit=9)
        await until(lambda: before.asked.credit == 9)
        assert list(a.session.askers["c"]._with.values()) == [before]


async def test_who_missed_the_end_of_a_route_asks_anew_when_it_is_told_of_the_next(tmp_path):
    """Its stream to the driver broke between the two."""
    async with pod(tmp_path, CYCLE) as p:
        got, taken = list[str](), asyncio.Event()

        async def once_more(ctx):
            await ctx.ready()
            first = await ctx.answering("c").take()
            taken.set()
            await until(lambda: first.cancelled)
            await echo(ctx)

        p.start("asker/0", asker(1, got))
        p.start("echo/0", once_more)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0", number=1)
        await asyncio.wait_for(taken.wait(), 10)
        p.driver.route("c", "asker/0", "echo/0", number=2)
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert got == ["q0"]


async def test_what_opens_an_older_conversation_comes_late_by_a_link_before_and_ends_nothing(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        taken = asyncio.Event()
        p.start("asker/0", asker(1, []))
        b = p.start("echo/0", silent(taken))
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0", number=1)
        await asyncio.wait_for(taken.wait(), 10)
        there = b.session.answerers["c"]
        (open_now,) = there._with.values()
        late = frames.Open(open_now.number - 1, "c", [])
        b.host.peers.handlers[frames.Open](open_now.peer, late, Message(frames.encode(late)))
        assert list(there._with.values()) == [open_now]
        assert (there.in_hand, open_now.heard.is_over) == (1, False)


# --- who answers ------------------------------------------------------------------------------------------------------
def pool(counts: dict[str, list[str]]):
    async def run(ctx: RoleContext) -> None:
        await ctx.ready()
        answering = ctx.answering("c")
        async for question in answering:
            counts.setdefault(ctx.worker, []).append(question.key)
            answering.answer(question, question.payload)

    return run


async def test_questions_of_one_affinity_stay_with_one_and_others_go_to_whoever_has_least_to_do(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        counts: dict[str, list[str]] = {}

        async def agents(ctx):
            await ctx.ready()
            asking = ctx.asking("c")
            for turn in range(6):
                for name in "abcd":
                    await asking.ask(turn, key=f"{name}{turn}", step=0, affinity=name)
                for _ in "abcd":
                    await asking.take()

        p.start("asker/0", agents)
        for number in range(2):
            p.start(f"echo/{number}", pool(counts))
        await p.driver.connected("asker/0", "echo/0", "echo/1")
        for number in range(2):
            p.driver.route("c", "asker/0", f"echo/{number}")
        await until(lambda: "c" in p.workers["asker/0"].session.askers)
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        served = {worker: {key[0] for key in keys} for worker, keys in counts.items()}
        assert sum(len(names) for names in served.values()) == 4, f"each name had one: {served}"
        assert sum(len(keys) for keys in counts.values()) == 24


async def test_an_affinity_waits_for_room_and_moves_only_when_its_answerer_is_gone(tmp_path):
    async with pod(tmp_path, CYCLE) as p:
        counts: dict[str, list[str]] = {}
        taken, go = asyncio.Event(), asyncio.Event()

        async def agent(ctx):
            await ctx.ready()
            await ctx.asking("c").ask(0, key="a0", step=0, affinity="a")
            await taken.wait()
            go.set()
            await ctx.asking("c").ask(1, key="a1", step=0, affinity="a")
            assert {(await ctx.asking("c").take()).key for _ in range(2)} == {"a0", "a1"}

        p.start("asker/0", agent)
        p.start("echo/0", silent(taken))
        p.start("echo/1", pool(counts))
        await p.driver.connected("asker/0", "echo/0", "echo/1")
        p.driver.route("c", "asker/0", "echo/0", credit=1)
        await asyncio.wait_for(taken.wait(), 10)
        p.driver.route("c", "asker/0", "echo/1", credit=1)
        await asyncio.wait_for(go.wait(), 10)
        waits = p.workers["asker/0"]._waits
        await until(lambda: [what for what, _ in waits.current() if what.startswith("room for a question")])
        assert counts == {}
        p.driver.unroute("c", "asker/0", "echo/0", attempt=1)
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert counts == {"echo/1": ["a0", "a1"]}


async def test_so_many_affinities_are_remembered_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr("rlinf_worker.cycles.asker.MAX_AFFINITIES", 2)
    async with pod(tmp_path, CYCLE) as p:

        async def agents(ctx):
            await ctx.ready()
            for name in "abac":
                await ctx.asking("c").ask(0, key=name, step=0, affinity=name)
                await ctx.asking("c").take()

        a = p.start("asker/0", agents)
        p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0")
        assert await asyncio.wait_for(p.tasks["asker/0"], 30) == 0
        assert list(a.session.askers["c"]._had_last) == ["a", "c"]


async def test_a_role_that_asks_and_takes_no_answer_is_ended_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("rlinf_worker.cycles.asker.MAX_UNTAKEN", 5)
    async with pod(tmp_path, CYCLE) as p:

        async def deaf(ctx):
            await ctx.ready()
            for n in range(20):
                await ctx.asking("c").ask(n, key=str(n), step=0)
            await ctx.stopping.wait()

        a = p.start("asker/0", deaf)
        p.start("echo/0", echo)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0")
        (ended,) = await asyncio.wait_for(asyncio.gather(p.tasks["asker/0"], return_exceptions=True), 30)
        assert ended != 0, "a mistake of the role's"
        assert len(a.session.askers["c"].inbox) == 5


async def test_two_askers_share_a_pool_by_what_it_says_it_has_to_do(tmp_path):
    """echo/0 has all of asker/0's, of which asker/1 knows by the load that comes with an answer alone."""
    async with pod(tmp_path, CYCLE) as p:
        counts: dict[str, list[str]] = {}
        go = asyncio.Event()

        async def hold_all_but(ctx):
            await ctx.ready()
            answering = ctx.answering("c")
            async for question in answering:
                counts.setdefault(ctx.worker, []).append(question.key)
                if question.key.startswith("two"):
                    answering.answer(question, None)

        async def one(ctx):
            await ctx.ready()
            for n in range(6):
                await ctx.asking("c").ask(n, key=f"one{n}", step=0)
            await ctx.stopping.wait()

        async def two(ctx):
            await ctx.ready()
            await go.wait()
            for n in range(6):
                await ctx.asking("c").ask(n, key=f"two{n}", step=0)
                await ctx.asking("c").take()

        p.start("asker/0", one)
        p.start("asker/1", two)
        for number in range(2):
            p.start(f"echo/{number}", hold_all_but)
        await p.driver.connected("asker/0", "asker/1", "echo/0", "echo/1")
        p.driver.route("c", "asker/0", "echo/0")
        for number in range(2):
            p.driver.route("c", "asker/1", f"echo/{number}")
        await until(lambda: len(counts.get("echo/0", [])) == 6)
        await until(lambda: len(p.workers["asker/1"].session.askers["c"]._with) == 2)
        go.set()
        assert await asyncio.wait_for(p.tasks["asker/1"], 30) == 0
        assert len([key for key in counts["echo/0"] if key.startswith("two")]) <= 1
        assert len(counts["echo/1"]) >= 5


async def test_large_payloads_keep_coming_while_answers_are_kept_until_they_are_known_to_have_come(tmp_path):
    """Neither end holds the ring: 64 MiB each way, and at most two conversations' worth is kept."""
    async with pod(tmp_path, CYCLE) as p:
        large = np.zeros(1 << 18, np.float32)

        async def ask(ctx):
            await ctx.ready()
            asking = ctx.asking("c")
            for n in range(64):
                await asking.ask(large + n, key=str(n), step=0)
                answer = await asking.take()
                assert float(answer.payload[0]) == n
                answer.release()
                assert answer.payload is None

        async def answer_and_let_go(ctx):
            await ctx.ready()
            answering = ctx.answering("c")
            async for question in answering:
                answering.answer(question, question.payload)
                assert question.payload is None

        p.start("asker/0", ask)
        b = p.start("echo/0", answer_and_let_go)
        await p.driver.connected("asker/0", "echo/0")
        p.driver.route("c", "asker/0", "echo/0", credit=2)
        assert await asyncio.wait_for(p.tasks["asker/0"], 60) == 0
        (kept,) = b.session.answerers["c"]._with.values()
        assert len(kept.heard.answers) <= 4
