"""Both ends of a cycle in memory: who is asked, what an answer carries, and what becomes of questions later."""

import asyncio
import dataclasses
from typing import Any, cast

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import DeadlineExceeded, UserError
from rlinf_api.names import WorkerId
from rlinf_worker.channels.account import Level
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.payload_type import PayloadMismatch, PayloadType
from rlinf_worker.channels.protocol import ChannelClosed, Item, LineageKey, PolicyVersion
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.cycles import asker as askers
from rlinf_worker.cycles.answerer import Answerer
from rlinf_worker.cycles.asker import Asker
from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.errors import MessageTooLarge
from rlinf_worker.links.message import Message
from rlinf_worker.spans import Recorder
from rlinf_worker.sums import End
from tests.fakes.lines import Line, Lines

NUMBER = PayloadType("int").text
VERSION = PolicyVersion(2, 5)


class Site:
    def __init__(self, *, role: str = "env", payload: str = "", answers: str = "") -> None:
        self.links, self.now = Lines(), 100.0
        self.host = Host(
            worker=f"{role}/0",
            role=role,
            peers=cast(Any, self.links),
            waits=Waits(),
            recorder=Recorder(clock=lambda: self.now),
            tell=lambda message: None,
            mark=lambda source, *, can_wait=False: None,
            finish_item=lambda item: None,
            fatal=lambda error: None,
        )
        self.spec = pb.ChannelSpec(
            name="actions", mode="Cycle", producer="env", consumer="rollout", payload=payload, answers=answers
        )

    def asker(self) -> Asker:
        return Asker(self.host, self.spec)

    def answerer(self) -> Answerer:
        return Answerer(self.host, self.spec)


@pytest.fixture
async def site():
    return Site()


def at(worker: str, attempt: int = 1) -> Endpoint:
    return Endpoint(worker=worker, attempt=attempt)


async def begun(waiting: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.ensure_future(waiting)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def reply(line: Line, number: int, value: Any = None, *, conversation: int = 1, load: int = 0, **more: Any) -> None:
    """As the answerer at the other end of `line` says it."""
    head = frames.Answer(conversation, number, VERSION.branch, VERSION.number, load, **more)
    line.asking[conversation].on_answer(head, Message(b"", value))


def vars_of(item: Item) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}


def keys(heads: list[Any]) -> list[str]:
    return [head.key for head in heads if isinstance(head, frames.Ask)]


class TestMeasured:
    async def test_waits_name_their_end_and_a_question_begins_its_step(self, site):
        asker, line = site.asker(), site.links.line("rollout/0", 3)
        asker.on_route(at("rollout/0", 3), credit=1, number=7)
        await asker.ask(1, key="k", step=4, branch=2)
        asking = await begun(asker.ask(2, key="l", step=4, branch=2))
        taking = await begun(asker.take())
        site.now = 103.0
        reply(line, 0, "left")
        await asyncio.gather(asking, taking)
        spans = site.host.recorder.flush()
        assert {(span.kind, span.on, span.t1 - span.t0) for span in spans} == {
            ("wait_data", End("actions", "producer"), 3.0), ("wait_data", End("actions", "consumer"), 3.0),
        }  # fmt: skip
        site.now = 105.0
        site.host.recorder.released("samples", 4, 2)
        assert site.host.recorder.sums.take(4, 2).releases["samples"].evenly() == [2.0]


async def test_neither_end_works_before_its_role_is_ready(site):
    asker, answerer = site.asker(), Site(role="rollout").answerer()
    for end in (asker, answerer):
        end._host.may_begin = lambda: False
    calls = [asker.ask(1, key="k", step=4), asker.take(), answerer.take()]
    for call, verb in zip(calls, ("ask", "take", "take"), strict=True):
        async with asyncio.timeout(10):
            with pytest.raises(UserError, match=rf"cannot {verb} yet in channel 'actions': .*; call await ctx.ready"):
                await call
    with pytest.raises(UserError, match="cannot take yet"):
        answerer.take_now()


class TestAsking:
    async def test_a_question_goes_out_whole_and_its_answer_comes_back_with_its_labels(self, site):
        asker, line = site.asker(), site.links.line("rollout/0", 3)
        asker.on_route(at("rollout/0", 3), credit=4, number=7)
        assert site.links.wanted == [("rollout/0", 3, "actions", True)]
        assert line.heads() == [frames.Open(1, "actions", [], 0)]
        await asker.ask({"x": 1}, key="k", step=4, branch=2, version=VERSION)
        ((head, message),) = line.said
        assert head == frames.Ask(1, 0, "k", 4, 2, 2, 5, [])
        assert Message(b"", body=message.encoded()[0]).value() == {"x": 1}
        reply(line, 0, "left")
        assert site.links.has_begun is False
        item = await asker.take()
        assert vars_of(item) == {
            "channel": "actions", "key": "k", "payload": "left", "step": 4, "branch": 2, "source": "rollout/0",
            "version": VERSION, "weight": 1.0, "cancelled": False, "tickets": (), "wants_seal": False,
            "partial": None, "is_settled": False, "_borrows": False, "_on_cancel": (),
        }  # fmt: skip
        assert site.links.has_begun is True
        assert asker.take_now() is None
        sent, came = Message(b"", {"x": 1}).nbytes, Message(b"", "left").nbytes
        assert (asker.account_out.items, asker.account_out.bytes, asker.account_out.resent) == (1, sent, 0)
        assert (asker.account_in.items, asker.account_in.bytes, asker.account_in.duplicates) == (1, came, 0)

    async def test_the_next_question_tells_what_has_come(self, site):
        asker, line = site.asker(), site.links.line("rollout/0")
        asker.on_route(at("rollout/0"), credit=4)
        for key in "abc":
            await asker.ask(1, key=key, step=1)
        reply(line, 1)
        reply(line, 0)
        line.heads()
        await asker.ask(1, key="d", step=1)
        (head,) = line.heads()
        assert (head.number, head.got) == (3, [1, 0])

    async def test_a_question_without_a_place_waits_and_says_for_what(self, site):
        asker = site.asker()
        asking = await begun(asker.ask(1, key="a", step=1))
        assert [name for name, _ in site.host.waits.current()] == ["room for a question of env/0 in cycle 'actions'"]
        site.now += 3.0
        asker.on_route(at("rollout/0"), credit=1)
        await asking
        (span,) = site.host.recorder.flush()
        assert (span.kind, span.t0, span.t1) == ("wait_data", 100.0, 103.0)
        assert asker.account_out.wait_s > 0.0
        second = await begun(asker.ask(1, key="b", step=1))
        assert not second.done()
        reply(site.links.line("rollout/0"), 0)
        await second

    @pytest.mark.parametrize(
        ("routed", "missing"),
        [([], "still missing: a route"), (["a/0", "b/0"], "still missing: an answer of a/0, b/0")],
    )
    async def test_a_wait_for_room_is_bounded(self, site, routed, missing):
        site.host.peer_wait_s = 0.001
        asker = site.asker()
        for worker in routed:
            asker.on_route(at(worker), credit=1)
            await asker.ask(1, key=worker, step=1)
        with pytest.raises(DeadlineExceeded, match=missing):
            await asker.ask(1, key="k", step=1)

    async def test_a_question_goes_to_whoever_has_least_to_do_and_then_to_whoever_has_most_room(self, site):
        asker = site.asker()
        for worker, credit in (("a/0", 2), ("b/0", 5), ("c/0", 1)):
            asker.on_route(at(worker), credit=credit)
        went = list[str]()
        for number in range(5):
            await asker.ask(1, key=str(number), step=1)
            went += [worker for worker in ("a/0", "b/0", "c/0") if keys(site.links.line(worker).heads())]
        assert went == ["b/0", "a/0", "c/0", "b/0", "a/0"]
        reply(site.links.line("c/0"), 0, conversation=3, load=9)
        await asker.ask(1, key="busy elsewhere", step=1)
        assert keys(site.links.line("b/0").heads()) == ["busy elsewhere"]

    async def test_an_affinity_stays_with_whoever_had_the_one_before(self, site):
        asker, first, other = site.asker(), site.links.line("a/0"), site.links.line("b/0")
        asker.on_route(at("a/0"), credit=2)
        await asker.ask(1, key="1", step=1, affinity="talk")
        asker.on_route(at("b/0"), credit=9)
        await asker.ask(1, key="2", step=1, affinity="talk")
        assert keys(first.heads()) == ["1", "2"]
        waiting = await begun(asker.ask(1, key="3", step=1, affinity="talk"))
        assert not waiting.done(), "though another has room"
        await asker.ask(1, key="4", step=1, affinity="another talk")
        await asker.ask(1, key="5", step=1)
        assert keys(other.heads()) == ["4", "5"]
        reply(first, 0)
        await waiting
        assert keys(first.heads()) == ["3"]

    async def test_affinities_are_bounded_and_the_oldest_goes(self, site, monkeypatch):
        monkeypatch.setattr(askers, "MAX_AFFINITIES", 2)
        asker, first, other = site.asker(), site.links.line("a/0"), site.links.line("b/0")
        asker.on_route(at("a/0"), credit=9)
        for name in ("x", "y", "x", "z"):
            await asker.ask(1, key=name, step=1, affinity=name)
        first.heads()
        asker.on_route(at("b/0"), credit=9)
        for name in ("x", "z", "y"):
            await asker.ask(1, key=name, step=1, affinity=name)
        assert (keys(first.heads()), keys(other.heads())) == (["x", "z"], ["y"])

    async def test_what_is_asked_again_on_another_link_is_told_first_and_counted(self, site):
        asker, line = site.asker(), site.links.line("rollout/0")
        asker.on_route(at("rollout/0"), credit=9)
        line.link = None
        await asker.ask(1, key="a", step=1)
        line.link = cast(Any, "up")
        for key in "bc":
            await asker.ask(1, key=key, step=1)
        reply(line, 1)
        line.heads()
        line.asking[1].replay()
        heads = line.heads()
        assert heads[0] == frames.Open(1, "actions", [0, 2], 0)
        assert [(head.key, head.number, head.got) for head in heads[1:]] == [("a", 0, []), ("c", 2, [])]
        assert asker.account_out.resent == 1, "the first never left"

    async def test_an_answer_that_comes_twice_is_counted_and_let_go(self, site):
        asker, line = site.asker(), site.links.line("rollout/0")
        asker.on_route(at("rollout/0"), credit=9)
        await asker.ask(1, key="a", step=1)
        reply(line, 0, "yes")
        reply(line, 0, "yes")
        assert (len(asker.inbox), asker.account_in.duplicates) == (1, 1)

    async def test_an_answer_that_will_not_come_is_an_item_all_the_same(self, site):
        asker, line = site.asker(), site.links.line("rollout/0")
        asker.on_route(at("rollout/0"), credit=9)
        await asker.ask(1, key="a", step=1)
        reply(line, 0, is_dropped=True)
        item = await asker.take()
        assert (item.cancelled, item.payload, dict(asker.account_in.dropped)) == (True, None, {"Unanswered": 1})

    async def test_a_route_that_ends_gives_its_questions_to_others_in_order(self, site):
        asker, gone, other = site.asker(), site.links.line("a/0"), site.links.line("b/0")
        asker.on_route(at("a/0"), credit=3, number=4)
        for key in "xyz":
            await asker.ask(1, key=key, step=1)
        gone.heads()
        asker.on_unroute("a/0", 1, number=3)
        assert gone.heads() == [], "an older route's end"
        asker.on_unroute("a/0", 1, number=4)
        assert gone.heads() == [frames.Close(1)]
        assert gone.asking == {}
        assert site.links.unwanted == [("a/0", 1, "actions")]
        assert [question.key for question in asker.unanswered] == ["x", "y", "z"]
        asker.on_route(at("b/0"), credit=2, number=5)
        assert keys(other.heads()) == ["x", "y"]
        reply(other, 0, conversation=2)
        assert keys(other.heads()) == ["z"]
        asker.on_unroute("a/0", 1, number=4)
        assert len(site.links.unwanted) == 1, "told twice"

    @pytest.mark.parametrize("number", [0, 4, 5])
    async def test_a_route_ends_with_its_number_a_later_one_or_none(self, site, number):
        asker = site.asker()
        asker.on_route(at("a/0"), credit=1, number=4)
        asker.on_unroute("a/0", 1, number=number)
        assert site.links.unwanted == [("a/0", 1, "actions")]

    async def test_a_question_that_waits_for_room_goes_behind_those_that_have_lost_their_own(self, site):
        asker, other = site.asker(), site.links.line("b/0")
        asker.on_route(at("a/0"), credit=1)
        await asker.ask(1, key="first", step=1)
        waiting = await begun(asker.ask(1, key="second", step=1))
        asker.on_unroute("a/0", 1)
        asker.on_route(at("b/0"), credit=2)
        await waiting
        assert keys(other.heads()) == ["first", "second"]

    async def test_a_route_that_is_told_again_changes_the_credit_alone(self, site):
        asker, line = site.asker(), site.links.line("a/0")
        asker.on_route(at("a/0"), credit=1, number=4)
        await asker.ask(1, key="1", step=1)
        waiting = await begun(asker.ask(1, key="2", step=1))
        line.heads()
        asker.on_route(at("a/0"), credit=2, number=4)
        await waiting
        assert keys(line.heads()) == ["2"]
        assert site.links.unwanted == []

    async def test_a_route_of_no_credit_has_room_for_one(self, site):
        asker = site.asker()
        asker.on_route(at("a/0"), credit=0)
        await asker.ask(1, key="1", step=1)
        second = await begun(asker.ask(1, key="2", step=1))
        assert not second.done()
        second.cancel()

    async def test_a_route_of_another_number_begins_another_conversation(self, site):
        asker, line = site.asker(), site.links.line("a/0")
        asker.on_route(at("a/0"), credit=2, number=4)
        await asker.ask(1, key="1", step=1)
        line.heads()
        asker.on_route(at("a/0"), credit=2, number=5)
        assert line.heads() == [
            frames.Close(1), frames.Open(2, "actions", [], 0), frames.Ask(2, 0, "1", 1, 0, 0, 0, []),
        ]  # fmt: skip

    async def test_a_new_driver_numbers_anew_and_what_it_has_not_named_ends_when_it_is_not_reached(self, site):
        asker = site.asker()
        kept, left = site.links.line("a/0"), site.links.line("b/0")
        for worker in ("a/0", "b/0"):
            asker.on_route(at(worker), credit=2, number=4)
        asker.on_unreachable(left)
        assert site.links.unwanted == [], "the driver says when"
        asker.on_new_driver()
        asker.on_route(at("a/0"), credit=2, number=1)
        assert kept.heads() == [frames.Open(1, "actions", [], 0)], "the same conversation goes on"
        asker.on_unreachable(kept)
        assert site.links.unwanted == []
        asker.on_unreachable(left)
        assert site.links.unwanted == [("b/0", 1, "actions")]
        asker.on_unroute("a/0", 1, number=1)
        assert len(site.links.unwanted) == 2, "its number is the new driver's"

    async def test_the_old_life_of_a_worker_that_has_another_is_over(self, site):
        asker = site.asker()
        asker.on_route(at("a/0"), credit=2, number=4)
        asker.on_superseded(site.links.line("a/0", 9))
        assert site.links.unwanted == []
        asker.on_superseded(site.links.line("a/0"))
        assert site.links.unwanted == [("a/0", 1, "actions")]

    async def test_whoever_takes_no_answers_is_told_so(self, site, monkeypatch):
        monkeypatch.setattr(askers, "MAX_UNTAKEN", 2)
        asker, line = site.asker(), site.links.line("a/0")
        asker.on_route(at("a/0"), credit=9)
        for key in "123":
            await asker.ask(1, key=key, step=1)
        reply(line, 0)
        reply(line, 1)
        with pytest.raises(
            UserError, match="role 'env' asks in cycle 'actions' and takes no answers: got 2 that lie here"
        ):
            reply(line, 2)

    async def test_what_is_unanswered_is_this_ends_level(self, site, monkeypatch):
        asker = site.asker()
        monkeypatch.setattr(askers, "monotonic", lambda: 60.0)
        assert asker.account_out.level() == Level(0, 0, 0.0)
        asker.on_route(at("a/0"), credit=9)
        for key in "12":
            await asker.ask("data", key=key, step=1)
        asker.unanswered[0].since, asker.unanswered[1].since = 52.0, 55.0
        assert asker.account_out.level() == Level(2, 2 * Message(b"", "data").nbytes, 8.0)

    async def test_questions_and_answers_are_checked_by_what_the_flow_declares(self):
        site = Site(payload=NUMBER, answers=NUMBER)
        asker, line = site.asker(), site.links.line("a/0")
        asker.on_route(at("a/0"), credit=9)
        fingerprint = PayloadType("int").fingerprint
        assert line.heads() == [frames.Open(1, "actions", [], fingerprint)]
        with pytest.raises(PayloadMismatch):
            await asker.ask("text", key="a", step=1)
        assert (dict(asker.account_out.refused), asker.account_out.items) == ({"PayloadMismatch": 1}, 0)
        for key in "abc":
            await asker.ask(1, key=key, step=1)
        reply(line, 0, "text")
        reply(line, 1, "checked by who sent it", declared=fingerprint)
        reply(line, 2, None, is_dropped=True)
        with pytest.raises(PayloadMismatch):
            await asker.take()
        assert dict(asker.account_in.dropped) == {"PayloadMismatch": 1}
        assert [(await asker.take()).payload for _ in range(2)] == ["checked by who sent it", None]
        assert asker.account_in.items == 2

    async def test_a_question_that_no_link_takes_is_refused_where_it_is_asked(self, site, monkeypatch):
        asker = site.asker()
        site.host.link_settings = type("S", (), {"max_message_bytes": 65536 + 4 + 100})()
        asker.on_route(at("a/0"), credit=9)
        with pytest.raises(MessageTooLarge, match="wanted at most 100"):
            await asker.ask("x" * 200, key="k", step=1)
        assert dict(asker.account_out.refused) == {"MessageTooLarge": 1}

    async def test_arrays_of_an_answer_are_lent_until_it_is_released_and_numbers_are_its_own(self, site):
        numpy = pytest.importorskip("numpy", reason="only what has buffers is lent, and without numpy nothing has")
        asker, line = site.asker(), site.links.line("rollout/0")
        asker.on_route(at("rollout/0"), credit=4)
        for number, value in enumerate((numpy.ones(100_000), 7)):
            await asker.ask(1, key=str(number), step=1)
            reply(line, number, value)
        lent, own = await asker.take(), await asker.take()
        assert lent.payload.sum() == 100_000
        for item in (lent, own):
            item.release()
        assert (lent.payload, own.payload) == (None, 7)

    async def test_answers_come_until_the_worker_stops(self, site):
        asker, line = site.asker(), site.links.line("a/0")
        asker.on_route(at("a/0"), credit=9)
        got = list[Any]()

        async def work() -> None:
            async for item in asker:
                got.append(item.payload)

        working = await begun(work())
        assert [name for name, _ in site.host.waits.current()] == ["an answer of cycle 'actions' for env/0"]
        await asker.ask(1, key="a", step=1)
        reply(line, 0, "yes")
        await begun(asyncio.sleep(0))
        site.host.waits.stop("SIGTERM")
        await working
        assert got == ["yes"]
        with pytest.raises(ChannelClosed):
            asker.take_now()


class TestAnswering:
    def opened(self, site: Site, worker: str = "env/0", attempt: int = 1, *, number: int = 1) -> tuple[Answerer, Line]:
        answerer, line = site.answerer(), site.links.line(worker, attempt)
        answerer.on_open(line, frames.Open(number, "actions", [], 0))
        return answerer, line

    def ask(self, line: Line, number: int, value: Any = None, *, conversation: int = 1, got: Any = ()) -> None:
        head = frames.Ask(conversation, number, f"k{number}", 4, 2, 2, 5, list(got))
        line.hearing[conversation].on_ask(head, Message(b"", value))

    async def test_a_question_is_taken_whole_and_its_answer_goes_where_it_was_asked(self, site):
        answerer, line = self.opened(site)
        self.ask(line, 0, {"x": 1})
        question = await answerer.take()
        assert (question.channel, question.key, question.payload) == ("actions", "k0", {"x": 1})
        assert (question.step, question.branch, question.source, question.version) == (4, 2, "env/0", VERSION)
        assert (question.cancelled, answerer.in_hand) == (False, 1)
        answerer.answer(question, "left", version=PolicyVersion(3, 9))
        ((head, message),) = line.said
        assert head == frames.Answer(1, 0, 3, 9, 0, 0, False)
        assert message.value() == "left"
        assert answerer.in_hand == 0
        sent, came = Message(b"", "left").nbytes, Message(b"", {"x": 1}).nbytes
        assert (answerer.account_out.items, answerer.account_out.bytes) == (1, sent)
        assert (answerer.account_in.items, answerer.account_in.bytes) == (1, came)

    async def test_an_answer_tells_how_much_there_is_to_do(self, site):
        answerer, line = self.opened(site)
        other = site.links.line("env/1")
        answerer.on_open(other, frames.Open(1, "actions", [], 0))
        for number in range(2):
            self.ask(line, number)
        self.ask(other, 0)
        for _ in range(2):
            answerer.answer(await answerer.take(), 1)
        assert [head.load for head in line.heads()] == [2, 1]
        answerer.on_superseded(other)
        self.ask(line, 2)
        answerer.answer(await answerer.take(), 1)
        assert [head.load for head in line.heads()] == [0]

    async def test_a_question_that_comes_twice_is_answered_once(self, site):
        answerer, line = self.opened(site)
        self.ask(line, 0)
        self.ask(line, 0)
        assert (len(answerer.inbox), answerer.account_in.duplicates) == (1, 1)

    async def test_on_a_new_link_answers_that_have_not_come_are_said_again(self, site):
        answerer, line = self.opened(site)
        for number in range(3):
            self.ask(line, number)
            answerer.answer(await answerer.take(), f"answer {number}")
        assert answerer.account_out.level() == Level(3, sum(Message(b"", f"answer {n}").nbytes for n in range(3)))
        self.ask(line, 3, got=[0])
        assert answerer.account_out.level().depth == 2
        line.heads()
        answerer.on_open(line, frames.Open(1, "actions", [2, 3], 0))
        ((head, message),) = line.said
        assert (head.number, message.value(), answerer.account_out.resent) == (2, "answer 2", 1)

    async def test_another_conversation_ends_the_one_before_and_an_older_one_is_left_out(self, site):
        answerer, line = self.opened(site, number=5)
        self.ask(line, 0, conversation=5)
        self.ask(line, 1, conversation=5)
        taken = await answerer.take()
        answerer.on_open(line, frames.Open(4, "actions", [], 0))
        assert list(line.hearing) == [5]
        answerer.on_open(line, frames.Open(6, "actions", [], 0))
        assert list(line.hearing) == [6]
        assert (taken.cancelled, len(answerer.inbox)) == (True, 0)
        answerer.answer(taken, "late")
        assert line.said == []
        assert (dict(answerer.account_out.dropped), answerer.account_out.items) == ({"PeerGone": 1}, 0)
        assert answerer.in_hand == 0
        self.ask(line, 0, conversation=6)
        answerer.answer(await answerer.take(), 1)
        assert [head.load for head in line.heads()] == [0], "what is over is no load"

    async def test_a_conversation_with_another_life_ends_the_one_before(self, site):
        answerer, old = self.opened(site, number=5)
        new = site.links.line("env/0", 2)
        answerer.on_open(new, frames.Open(1, "actions", [], 0))
        assert (old.hearing, list(new.hearing)) == ({}, [1])
        answerer.on_superseded(old)
        assert list(new.hearing) == [1], "the old life is over already"

    async def test_who_closes_leaves_out_its_own_questions_alone(self, site):
        answerer, line = self.opened(site)
        other = site.links.line("env/1")
        answerer.on_open(other, frames.Open(1, "actions", [], 0))
        self.ask(line, 0)
        self.ask(other, 0)
        line.hearing[1].on_close()
        assert line.hearing == {}
        left = answerer.take_now()
        assert left is not None
        assert (left.source, answerer.take_now()) == ("env/1", None)
        answerer.on_open(line, frames.Open(2, "actions", [], 0))
        assert list(line.hearing) == [2]

    async def test_a_question_that_is_dropped_is_told_so(self, site):
        answerer, line = self.opened(site)
        self.ask(line, 0)
        answerer.drop(await answerer.take(), "stale")
        ((head, message),) = line.said
        assert head == frames.Answer(1, 0, 2, 5, 0, 0, True)
        assert message.encoded() == (b"", ())
        assert dict(answerer.account_in.dropped) == {"stale": 1}
        assert answerer.in_hand == 0

    async def test_only_a_question_of_this_cycle_is_answered_and_once(self, site):
        answerer, line = self.opened(site)
        self.ask(line, 0)
        question = await answerer.take()
        answerer.answer(question, 1)
        of_another: dict[str, Any] = {"channel": "other", "key": LineageKey("k"), "payload": 1, "step": 1, "branch": 0}
        stranger = Item(**of_another, source=WorkerId("env/0"), version=VERSION)
        for item in (question, stranger):
            with pytest.raises(UserError, match="give each item that take"):
                answerer.answer(item, 1)

    async def test_questions_are_checked_where_their_asker_has_not_and_answers_where_they_are_given(self):
        site = Site(role="rollout", payload=NUMBER, answers=NUMBER)
        answerer, line = self.opened(site)
        fingerprint = PayloadType("int").fingerprint
        self.ask(line, 0, "text")
        with pytest.raises(PayloadMismatch):
            await answerer.take()
        ((head, _),) = line.said
        assert (head.number, head.is_dropped, head.declared) == (0, True, fingerprint)
        assert dict(answerer.account_in.dropped) == {"PayloadMismatch": 1}
        assert (answerer.account_in.items, answerer.in_hand) == (0, 0)
        answerer.on_open(line, frames.Open(1, "actions", [], fingerprint))
        self.ask(line, 1, "checked by who sent it")
        question = await answerer.take()
        with pytest.raises(PayloadMismatch):
            answerer.answer(question, "text")
        assert dict(answerer.account_out.refused) == {"PayloadMismatch": 1}
        answerer.answer(question, 3)
        assert answerer.account_out.items == 1

    async def test_questions_come_until_the_worker_stops(self, site):
        answerer, line = self.opened(site)
        got = list[Any]()

        async def work() -> None:
            async for item in answerer:
                got.append(item.key)

        working = await begun(work())
        assert [name for name, _ in site.host.waits.current()] == ["a question of cycle 'actions' for env/0"]
        self.ask(line, 0)
        await begun(asyncio.sleep(0))
        site.host.waits.stop("SIGTERM")
        await working
        assert got == ["k0"]
        assert [span.kind for span in site.host.recorder.flush()] == ["wait_data"] * 2
        assert site.host.recorder.open == set()

    async def test_what_waits_to_be_taken_is_this_ends_level(self, site):
        answerer, line = self.opened(site)
        assert answerer.account_in.level()[:2] == (0, 0)
        for number in range(2):
            self.ask(line, number, "data")
        level = answerer.account_in.level()
        assert (level.depth, level.bytes) == (2, 2 * Message(b"", "data").nbytes)
        assert level.oldest_s >= 0.0

    async def test_arrays_are_lent_until_the_question_is_answered(self, site):
        numpy = pytest.importorskip("numpy", reason="only what has buffers is lent, and without numpy nothing has")
        answerer, line = self.opened(site)
        self.ask(line, 0, numpy.zeros(100_000))
        question = await answerer.take()
        assert question.payload is not None
        answerer.answer(question, 1)
        assert question.payload is None
