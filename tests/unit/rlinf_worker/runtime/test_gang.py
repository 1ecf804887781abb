"""A rank among the others of its gang: it waits for all, and hears of one that cannot be reached."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import DeadlineExceeded, InvariantBroken, WorkerUnreachable
from rlinf_api.names import WorkerId
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.links import frames
from rlinf_worker.runtime import gang as gangs
from rlinf_worker.runtime.gang import RosteredGang
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.spans import Recorder

PLACE = (0, 1, 0)


class Peer:
    def __init__(self, worker):
        self.worker, self.is_wanted, self.said = worker, True, list[Any]()
        self.drained = asyncio.Event()
        self.drained.set()

    def post(self, message):
        self.said.append(frames.decode(message.head))


class Site:
    """One rank; the test is its driver, its links and the other ranks."""

    def __init__(self, rank: int, *, world: int = 2):
        self.told, self.peers = list[pb.WorkerMessage](), dict[str, Peer]()
        self.wanted, self.given_up = list[tuple[str, str, bool]](), list[tuple[str, str]]()
        links: Any = SimpleNamespace(handlers={}, on_up=[], on_unreachable=[], want=self.want, unwant=self.unwant)
        self.links = links
        host: Any = SimpleNamespace(
            peers=links, waits=Waits(), recorder=Recorder(), tell=self.told.append, peer_wait_s=60.0,
            meet_wait_s=60.0,
        )  # fmt: skip
        me = WorkerIdentity(worker=WorkerId(f"actor/{rank}"), role="actor", kind="fsdp", rank=rank, world=world)
        self.gang, self.waits, self.recorder = RosteredGang(me, host), host.waits, host.recorder

    def want(self, endpoint, *, by, at_once):
        self.wanted.append((endpoint.worker, by, at_once))
        self.peers[endpoint.worker] = Peer(endpoint.worker)
        return self.peers[endpoint.worker]

    def unwant(self, peer, *, by):
        peer.is_wanted = False
        self.given_up.append((peer.worker, by))

    def roster(self, number: int = 1, *, ranks: int = 2, attempt: int = 1) -> None:
        members = [
            pb.Member(rank=n, endpoint=pb.Endpoint(worker=f"actor/{n}", attempt=attempt))
            for n in reversed(range(ranks))
        ]
        self.gang.on_roster(pb.Roster(number=number, world=ranks, members=members))

    def hear(self, worker: str, *values: Any, place: Any = PLACE, roster: int = 1, kept: Any = None) -> None:
        word = frames.GangWord(roster, place, list(values), kept or {})
        self.links.handlers[frames.GangWord](self.peers[worker], word, None)

    def lose(self, worker: str, why: str = "refused") -> None:
        self.links.on_unreachable[0](self.peers[worker], why)


async def begun(waiting: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    return task


async def test_a_rank_that_is_alone_waits_for_nobody():
    site = Site(0, world=1)
    await site.gang.form()
    assert await site.gang.meet(PLACE, "mine") == ["mine"]
    assert site.told == []


async def test_a_rank_that_is_alone_in_its_gang_is_formed_with_the_other_gangs():
    site = Site(0, world=1)
    site.gang.has_others = True
    forming = await begun(site.gang.form())
    assert site.told == [pb.WorkerMessage(join=pb.Join())]
    assert not forming.done()
    site.roster(ranks=1)
    await forming
    assert await site.gang.meet(PLACE, "mine") == ["mine"], "the others are no ranks of this one"


async def test_a_gang_is_asked_for_once_and_is_there_with_its_roster():
    site = Site(0)
    forming = await begun(site.gang.form())
    assert [name for name, _ in site.waits.current()] == ["the roster of gang 'actor' with all 2 ranks"]
    site.roster(attempt=2)
    await asyncio.sleep(0)
    assert not forming.done(), "that roster is of another life"
    site.roster()
    await forming
    await site.gang.form()
    assert [message.WhichOneof("kind") for message in site.told] == ["join"]
    assert [e.worker for e in site.gang.endpoints] == ["actor/0", "actor/1"]


async def test_ranks_meet_when_all_have_come_and_take_what_all_have_brought():
    site = Site(0)
    site.roster()
    meeting = await begun(site.gang.meet(PLACE, "a"))
    assert not meeting.done()
    assert [name for name, _ in site.waits.current()] == ["ranks of roster-1 to meet at step 1 of branch 0"]
    site.hear("actor/1", "b")
    assert await meeting == ["a", "b"]
    assert site.peers["actor/1"].said[-1] == frames.GangWord(1, PLACE, ["a", "b"], {})


async def test_a_rank_that_is_not_in_the_roster_or_is_of_an_older_one_is_not_heard():
    site = Site(0)
    site.roster()
    old = site.peers["actor/1"]
    site.roster(2)
    assert not old.is_wanted
    meeting = await begun(site.gang.meet(PLACE, "a"))
    site.links.handlers[frames.GangWord](old, frames.GangWord(2, PLACE, ["stranger"], {}), None)
    site.hear("actor/1", "late", roster=1)
    await asyncio.sleep(0)
    assert not meeting.done()
    site.hear("actor/1", "b", roster=2)
    assert await meeting == ["a", "b"]


async def test_a_rank_that_cannot_be_reached_for_long_ends_the_wait_with_its_cause(monkeypatch):
    site = Site(0)
    site.roster()
    meeting = await begun(site.gang.meet(PLACE))
    site.lose("actor/1")
    await asyncio.sleep(0)
    assert not meeting.done(), "for a moment"
    monkeypatch.setattr(gangs, "LOST_S", 0.0)
    site.lose("actor/1", "refused once more")
    with pytest.raises(WorkerUnreachable) as raised:
        await meeting
    assert str(raised.value) == (
        "rank 1 of roster-1 cannot be reached: got refused once more, wanted an answer within 0 s; "
        "the gang is formed anew"
    )


async def test_a_rank_that_is_reached_again_is_waited_for(monkeypatch):
    site = Site(0)
    site.roster()
    meeting = await begun(site.gang.meet(PLACE, "a"))
    site.lose("actor/1")
    site.links.on_up[0](site.peers["actor/1"])
    monkeypatch.setattr(gangs, "LOST_S", 0.0)
    site.hear("actor/1", "b")
    assert await meeting == ["a", "b"]
    assert site.peers["actor/1"].said[0].place == PLACE, "said again over the new link"


@pytest.mark.parametrize(("rank", "who"), [(0, "rank 1"), (1, "rank 0, or one that it waits for")])
async def test_a_wait_that_runs_out_names_who_is_away(rank, who):
    site = Site(rank)
    site.gang._host.meet_wait_s = 0.01
    site.roster()
    with pytest.raises(DeadlineExceeded) as raised:
        await site.gang.meet(PLACE)
    assert str(raised.value) == (
        f"ranks of roster-1 to meet at step 1 of branch 0 did not happen within 0.01 s: got still missing: {who}"
    )


async def test_what_one_rank_keeps_all_have():
    site = Site(1)
    site.roster()
    waiting = await begun(site.gang.kept("address"))
    assert not waiting.done()
    site.hear("actor/0", place=None, kept={"address": b"10.0.0.1"})
    assert await waiting == b"10.0.0.1"
    site.gang.keep("mine", b"1")
    assert site.peers["actor/0"].said[-1].kept == {"address": b"10.0.0.1", "mine": b"1"}


async def test_a_rank_that_meets_nobody_yet_says_what_to_do_first():
    with pytest.raises(
        InvariantBroken, match=r"before the gang is formed; await ctx\.gang\.form\(\) as the role loads"
    ):
        await Site(0).gang.meet(PLACE)


async def test_rank_zero_has_links_to_all_and_the_others_to_rank_zero():
    for rank, wanted in ((0, ["actor/1", "actor/2"]), (2, ["actor/0"])):
        site = Site(rank, world=3)
        site.roster(ranks=3)
        assert site.wanted == [(worker, "gang", False) for worker in wanted]
        site.roster(2, ranks=3)
        assert site.given_up == [(worker, "gang") for worker in wanted]
        site.roster(2, ranks=3)
        assert len(site.given_up) == len(wanted), "the same roster, once more"


async def test_a_gang_of_one_has_formed_already_and_nobody_to_reach():
    assert Site(0).gang.endpoints == []


async def test_who_is_told_of_a_roster_has_no_more_to_ask_for():
    site = Site(0)
    forming = await begun(site.gang.form())
    assert site.gang.join == pb.Join()
    assert site.told == [pb.WorkerMessage(join=pb.Join())]
    site.roster()
    assert site.gang.join is None
    await forming


async def test_a_gang_that_does_not_form_says_who_is_missing():
    site = Site(0)
    site.gang._host.peer_wait_s = 0.001
    with pytest.raises(DeadlineExceeded, match=r"roster of gang 'actor' .* a rank that has not joined"):
        await site.gang.form()


async def test_a_word_of_a_roster_that_the_driver_has_not_told_us_yet_is_kept_for_it():
    site = Site(0)
    site.roster(1)
    word = frames.GangWord(2, PLACE, ["b"], {"key": b"1"})
    early = Peer("actor/1")
    site.links.handlers[frames.GangWord](early, word, None)
    meeting = await begun(site.gang.meet(PLACE, "a"))
    assert not meeting.done()
    site.links.want = lambda endpoint, **_: early
    site.roster(2)
    assert await meeting == ["a", "b"]
    assert early.said[-1] == frames.GangWord(2, PLACE, ["a", "b"], {"key": b"1"})


async def test_a_word_that_comes_before_the_first_roster_counts_once_it_is_there():
    site = Site(0)
    early = Peer("actor/1")
    site.links.handlers[frames.GangWord](early, frames.GangWord(0, PLACE, ["b"], {}), None)
    site.links.want = lambda endpoint, **_: early
    site.roster(0)
    assert await site.gang.meet(PLACE, "a") == ["a", "b"]


async def test_whoever_waits_says_its_own_again_under_another_roster():
    site = Site(1)
    site.roster(1)
    meeting = await begun(site.gang.meet(PLACE, "b"))
    assert site.peers["actor/0"].said == [frames.GangWord(1, PLACE, ["b"], {})]
    site.roster(2)
    assert site.peers["actor/0"].said == [frames.GangWord(2, PLACE, ["b"], {})]
    site.hear("actor/0", "a", "b", roster=2)
    assert await meeting == ["a", "b"]
    site.roster(3)
    assert site.peers["actor/0"].said == [], "it waits no more"


async def test_what_was_kept_under_another_roster_is_void():
    site = Site(1)
    site.roster(1)
    site.gang.keep("address", b"1")
    site.roster(2)
    site.gang._host.meet_wait_s = 0.001
    with pytest.raises(DeadlineExceeded, match="'address', which a rank of roster-2 keeps"):
        await site.gang.kept("address")


async def test_a_rank_that_was_lost_under_another_roster_is_waited_for(monkeypatch):
    monkeypatch.setattr(gangs, "LOST_S", 0.0)
    site = Site(0)
    site.roster(1)
    site.lose("actor/1")
    site.roster(2)
    meeting = await begun(site.gang.meet(PLACE, "a"))
    site.links.on_unreachable[0](Peer("actor/9"), "nobody of this gang")
    site.hear("actor/1", "b", roster=2)
    assert await meeting == ["a", "b"]


async def test_the_time_in_which_a_rank_cannot_be_reached_runs_from_the_first_dial(monkeypatch):
    site = Site(0)
    site.roster()
    meeting = await begun(site.gang.meet(PLACE))
    now = asyncio.get_running_loop().time()
    for after_s, is_gone in ((0.0, False), (gangs.LOST_S / 2, False), (gangs.LOST_S, True)):
        loop = SimpleNamespace(time=lambda after_s=after_s: now + after_s)
        monkeypatch.setattr(gangs, "asyncio", SimpleNamespace(get_running_loop=lambda loop=loop: loop))
        site.lose("actor/1", f"refused after {after_s:g} s")
        for _ in range(3):
            await asyncio.sleep(0)
        assert meeting.done() is is_gone
    with pytest.raises(WorkerUnreachable, match="got refused after 5 s"):
        await meeting


async def test_a_meeting_that_has_happened_is_over_though_a_rank_is_lost_since(monkeypatch):
    monkeypatch.setattr(gangs, "LOST_S", 0.0)
    site = Site(0)
    site.roster()
    site.hear("actor/1", "b")
    site.lose("actor/1")
    assert await site.gang.meet(PLACE, "a") == ["a", "b"]


async def test_a_meeting_is_counted_as_communication_of_its_step():
    site = Site(0)
    site.roster()
    site.hear("actor/1", "b", place=(2, 7, 1))
    await site.gang.meet((2, 7, 1), "a")
    recorder = site.recorder
    assert [(span.kind, span.step) for span in recorder.flush()] == [("comm", 7)]
    assert recorder.open == set()


async def test_what_follows_a_meeting_waits_until_the_others_have_been_told():
    site = Site(0)
    site.roster()
    site.peers["actor/1"].drained.clear()
    meeting = await begun(site.gang.meet(PLACE, "a"))
    site.hear("actor/1", "b")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not meeting.done()
    site.peers["actor/1"].drained.set()
    assert await meeting == ["a", "b"]


async def test_a_rank_that_cannot_be_told_of_the_meeting_is_named(monkeypatch):
    monkeypatch.setattr(gangs, "TELL_S", 0.01)
    site = Site(0, world=3)
    site.roster(ranks=3)
    site.peers["actor/2"].drained.clear()
    meeting = await begun(site.gang.meet(PLACE, "a"))
    site.hear("actor/1", "b")
    site.hear("actor/2", "c")
    with pytest.raises(WorkerUnreachable) as raised:
        await meeting
    assert str(raised.value) == (
        "rank 2 of roster-1 was not told that all have met: got words that wait for 0.01 s, wanted a link that takes "
        "them; the gang is formed anew"
    )


async def test_a_word_that_changes_nothing_is_not_answered():
    """Two ranks that answered each other's repeated words would never be silent."""
    site = Site(0)
    site.roster()
    meeting = await begun(site.gang.meet(PLACE, "a"))
    site.hear("actor/1", "b")
    await meeting
    said = len(site.peers["actor/1"].said)
    site.hear("actor/1", "b")
    assert len(site.peers["actor/1"].said) == said
    site.hear("actor/1", "b", kept={"key": b"1"})
    assert site.peers["actor/1"].said[said:] == [frames.GangWord(1, PLACE, ["a", "b"], {"key": b"1"})]
    site.hear("actor/1", "b", kept={"key": b"1"})
    assert len(site.peers["actor/1"].said) == said + 1


async def test_a_rank_that_is_not_the_first_answers_nobodys_word():
    site = Site(1)
    site.roster()
    site.hear("actor/0", place=None, kept={"key": b"1"})
    assert site.peers["actor/0"].said == []


async def test_a_link_that_comes_up_hears_nothing_where_there_is_nothing_to_say_and_no_strangers():
    site = Site(0)
    site.roster()
    site.links.on_up[0](site.peers["actor/1"])
    assert site.peers["actor/1"].said == []
    site.gang.keep("key", b"1")
    assert site.peers["actor/1"].said == [frames.GangWord(1, None, [], {"key": b"1"})]
    stranger = Peer("env/0")
    site.links.on_up[0](stranger)
    assert stranger.said == []


async def test_ranks_meet_off_their_slots_too():
    """Not a safe point: whoever is off its slots keeps the others waiting."""
    site = Site(0)
    site.roster()
    site.waits.gate = SimpleNamespace(is_open=False, waiting=lambda: None, look=lambda: None)
    meeting = await begun(site.gang.meet(PLACE, "a"))
    assert site.waits.gated == []
    site.hear("actor/1", "b")
    assert await meeting == ["a", "b"]


async def test_what_a_rank_keeps_is_there_for_itself_at_once():
    site = Site(0)
    site.roster()
    waiting = await begun(site.gang.kept("key"))
    site.gang.keep("key", b"1")
    async with asyncio.timeout(5):
        assert await waiting == b"1"


async def test_a_gang_without_a_roster_is_named_by_its_role():
    with pytest.raises(InvariantBroken, match="'key', which a rank of gang 'actor' keeps before the gang is formed"):
        await Site(0).gang.kept("key")
