"""The rules of a worker's links to its peers, with links in memory: who is kept, who is told, when it dials again."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Any, cast

import pytest

from rlinf_api import names
from rlinf_api.errors import DeadlineExceeded
from rlinf_worker.links import frames, peers
from rlinf_worker.links.devices import Gpu
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.errors import LinkBroken, LinkClosed, LinkRefused, LinkStale
from rlinf_worker.links.hello import Identity, Refusal
from rlinf_worker.links.link import Counters, Link
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer, PeerLinks

ME = Identity(job="j", worker="m", attempt=1)


class Wired:
    """A link in memory: what it was given to send, what the test lets it receive, how it ended."""

    kind = "tcp"

    def __init__(self, worker: str = "b", attempt: int = 1) -> None:
        self.me, self.peer = ME, Identity(job="j", worker=worker, attempt=attempt)
        self.counters, self.said_gpu = Counters(), None  # type: Counters, Gpu | None
        self.broken: LinkBroken | None = None
        self.sent, self.closes = list[bytes](), 0
        self.has_room, self.room = True, asyncio.Event()
        self._inbox: asyncio.Queue[Message | LinkBroken] = asyncio.Queue()
        self._over = asyncio.Event()

    def send_nowait(self, message: Message) -> bool:
        if self.broken is not None:
            raise self.broken
        if self.has_room:
            self.sent.append(message.head)
        return self.has_room

    async def send(self, message: Message) -> None:
        await self.room.wait()
        self.sent.append(message.head)

    def arrives(self, frame: Any) -> None:
        self._inbox.put_nowait(Message(frame if isinstance(frame, bytes) else frames.encode(frame)))

    async def recv(self) -> Message:
        got = await self._inbox.get()
        if isinstance(got, LinkBroken):
            raise got
        return got

    def ends(self, error: LinkBroken) -> None:
        if self.broken is None:
            self.broken = error
            self._over.set()
            self._inbox.put_nowait(error)

    def abort(self, why: str) -> None:
        self.ends(LinkBroken(str(self.peer), why))

    async def wait_broken(self) -> LinkBroken:
        await self._over.wait()
        assert self.broken is not None
        return self.broken

    async def close(self) -> None:
        self.closes += 1
        self.ends(LinkClosed(str(self.peer), "it was closed here"))


class Doorman:
    """Stands for the listener: answers of dials, in order (the last for good), and links that peers made."""

    def __init__(self, me: Identity = ME) -> None:
        self.me, self.closes = me, 0
        self.answers, self.dialled = list[Any](), list[tuple[Endpoint, dict[str, Any]]]()
        self.coming: asyncio.Queue[Any] = asyncio.Queue()
        self.on_gpu: Gpu | None = None

    async def dial(self, endpoint: Endpoint, **named: Any) -> Any:
        self.dialled.append((endpoint, named))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer() if callable(answer) else answer

    async def accept(self) -> Any:
        found = await self.coming.get()
        if found is None:
            raise LinkClosed(str(self.me), "its listener is closed")
        return found

    def gpu(self) -> Gpu | None:
        return self.on_gpu

    async def close(self) -> None:
        self.closes += 1
        self.coming.put_nowait(None)


def there(worker: str = "b", attempt: int = 1, *, pool: str = "") -> Endpoint:
    return Endpoint(worker=worker, attempt=attempt, host="10.0.0.1", port=7, pool=pool)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture
def door():
    return Doorman()


@pytest.fixture
async def links(door):
    fatal: list[BaseException] = []
    made = PeerLinks(cast(Any, door), on_fatal=fatal.append)
    made.start()
    yield made
    await made.close()
    assert fatal == []


async def linked(links: PeerLinks, door: Doorman, worker: str = "b") -> tuple[Peer, Any]:
    """A peer whose link it dialled itself."""
    link = Wired(worker)
    door.coming.put_nowait(link)
    await until(lambda: (found := links.find(worker, 1)) is not None and found.link is cast(Link, link))
    return links.peer(worker, 1), link


# --- messages ---


class Ends:
    """Both ends of conversations: what they were told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_answer(self, frame: Any, message: Message) -> None:
        self.told.append((frame, message.head))

    on_ask = on_answer

    def on_close(self) -> None:
        self.told.append("close")

    def replay(self) -> None:
        self.told.append("replay")


ASK = frames.Ask(7, 44, "k", step=4, branch=0, version_branch=0, version_number=3, got=[41])
ANSWER = frames.Answer(8, 44, 0, 3, 1)


async def test_frames_go_to_the_ends_of_their_conversation_and_all_others_to_the_handler_of_their_kind(links, door):
    got = []
    links.handlers[frames.Pull] = lambda peer, frame, message: got.append((peer, frame, message.head))
    peer, link = await linked(links, door)
    asks, hears, others = Ends(), Ends(), Ends()
    peer.asking.update({8: asks, 7: others})
    peer.hearing.update({7: hears, 8: others})
    pull = frames.Pull("c", [(0, "k")])
    for frame in (ASK, ANSWER, frames.Close(7), pull):
        link.arrives(frame)
    await until(lambda: got)
    assert hears.told == [(ASK, frames.encode(ASK)), "close"]
    assert asks.told == [(ANSWER, frames.encode(ANSWER))]
    assert (others.told, got) == ([], [(peer, pull, frames.encode(pull))])


async def test_a_handler_that_works_beside_the_loop_holds_up_its_own_link_and_no_other(links, door):
    got, done = [], asyncio.Event()

    async def work(peer, frame, message):
        got.append((peer.worker, frame.channel))
        if frame.channel == "slow":
            await done.wait()

    links.handlers[frames.Pull] = work
    (_, link), (_, other) = await linked(links, door, "b"), await linked(links, door, "c")
    link.arrives(frames.Pull("slow", []))
    link.arrives(frames.Pull("next", []))
    await until(lambda: got)
    other.arrives(frames.Pull("there", []))
    await turns()
    assert got == [("b", "slow"), ("c", "there")]
    done.set()
    await until(lambda: len(got) == 3)
    assert got[-1] == ("b", "next")


async def test_frames_of_conversations_that_are_over_are_nobodys(links, door):
    peer, link = await linked(links, door)
    for frame in (ASK, ANSWER, frames.Close(7)):
        link.arrives(frame)
    await turns()
    assert (peer.link, link.broken) == (link, None)


async def test_a_head_that_cannot_be_read_breaks_the_link_and_is_an_error_in_the_log(links, door, caplog):
    peer, link = await linked(links, door)
    link.arrives(b"\xc1")
    await until(lambda: link.closes)
    assert link.broken.why.startswith("a head that cannot be read: ")
    assert peer.link is None
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert (record.message, record.peer) == ("a peer sent a head that cannot be read", "b#1")
    assert links.tally.breaks == {"tcp": 1}


async def test_what_is_posted_goes_at_once_while_there_is_room_and_then_waits_in_its_order(links, door):
    peer, link = await linked(links, door)
    peer.post(Message(b"1"))
    link.has_room = False
    peer.post(Message(b"2"))
    link.has_room = True
    peer.post(Message(b"3"))
    assert (link.sent, peer.drained.is_set()) == ([b"1"], False)
    link.room.set()
    await asyncio.wait_for(peer.drained.wait(), 5)
    assert link.sent == [b"1", b"2", b"3"]
    link.has_room = False
    peer.post(Message(b"4"))
    assert not peer.drained.is_set()
    await asyncio.wait_for(peer.drained.wait(), 5)
    assert link.sent == [b"1", b"2", b"3", b"4"]


async def test_what_waits_for_a_link_that_ends_is_forgotten_as_it_is_replayed(links, door):
    peer, link = await linked(links, door)
    link.has_room = False
    peer.post(Message(b"old"))
    link.abort("its process is gone")
    peer.post(Message(b"nor this"))
    await until(lambda: peer.link is None)
    assert peer.drained.is_set()
    assert not peer.linked.is_set()
    peer.post(Message(b"nor without a link"))
    assert peer.drained.is_set()
    second: Any = Wired()
    second.room.set()
    door.coming.put_nowait(second)
    await until(lambda: peer.link is second)
    peer.post(Message(b"new"))
    await turns()
    assert (link.sent, second.sent) == ([], [b"new"])


async def test_a_post_to_a_link_that_has_just_broken_is_no_error(links, door):
    peer, link = await linked(links, door)
    link.broken = LinkBroken("b#1", "a moment ago")
    peer.post(Message(b"x"))
    assert (link.sent, peer.drained.is_set()) == ([], True)


async def test_a_large_message_waits_for_room_and_needs_a_link(links, door):
    peer, link = await linked(links, door)
    sending = asyncio.create_task(peer.send(Message(b"large")))
    await turns()
    assert not sending.done()
    link.room.set()
    await asyncio.wait_for(sending, 5)
    assert link.sent == [b"large"]
    with pytest.raises(LinkBroken, match="the link to worker c#1 is broken: there is no link at the moment"):
        await links.peer("c", 1).send(Message(b"large"))


# --- who is kept ---


async def test_who_waits_for_a_link_is_told_when_there_is_one_and_asks_are_replayed_on_it(links, door):
    up: list[Peer] = []
    links.on_up.append(up.append)
    peer = links.peer("b", 1)
    peer.asking[1] = asks = Ends()
    _, first = await linked(links, door)
    assert (up, asks.told, peer.linked.is_set(), peer.dialled_by) == ([peer], ["replay"], True, "b")
    first.abort("gone")
    await until(lambda: peer.link is None)
    await linked(links, door)
    assert (up, asks.told) == ([peer, peer], ["replay", "replay"])


@pytest.mark.parametrize(("other", "kept"), [("b", "theirs"), ("z", "ours")])
@pytest.mark.parametrize("first", ["ours", "theirs"])
async def test_of_two_links_the_one_that_the_smaller_worker_dialled_is_kept_and_its_dialler_ends_the_other(
    links, door, other, kept, first
):
    ours, theirs = Wired(other), Wired(other)
    door.answers = [ours]
    peer = links.peer(other, 1)
    if first == "theirs":
        door.coming.put_nowait(theirs)
        await until(lambda: peer.link)
        links._adopt(peer, cast(Any, ours), dialled_by=ME.worker)
    else:
        links.want(there(other), by="test", at_once=True)
        await until(lambda: peer.link)
        door.coming.put_nowait(theirs)
    await turns()
    assert peer.link is cast(Any, ours if kept == "ours" else theirs)
    assert peer.dialled_by == (ME.worker if kept == "ours" else other)
    assert (ours.closes > 0, theirs.closes) == (kept == "theirs", 0), "the other end hangs up on what it dialled"


async def test_a_second_link_that_the_same_end_dialled_takes_the_place_of_the_first(links, door):
    peer, first = await linked(links, door)
    second: Any = Wired()
    door.coming.put_nowait(second)
    await until(lambda: peer.link is second)
    assert first.closes == 0
    first.arrives(b"\xc1")
    await until(lambda: first.closes)
    assert peer.link is second, "the end of the old one is not the end of this one"
    assert peer.linked.is_set()


async def test_a_newer_life_ends_the_older_one_and_a_link_of_the_older_is_not_taken(links, door):
    over: list[Peer] = []
    links.on_superseded.append(over.append)
    old, link = await linked(links, door)
    links.want(there(), by="test", at_once=False)
    unlike, _ = await linked(links, door, "c")
    links.peer("b", 2)
    assert link.broken.why == "attempt 2 has taken its place"
    assert (over, old.keeper, old.wanted_by, unlike.link is None) == ([old], None, set(), False)
    assert links.find("b", 1) is None
    late: Any = Wired("b", 1)
    door.coming.put_nowait(late)
    await until(lambda: late.broken)
    assert late.broken.why == "a newer attempt of this worker is known"
    assert links.find("b", 1) is None
    same: Any = Wired("b", 2)
    door.coming.put_nowait(same)
    await until(lambda: links.peer("b", 2).link is same)


def certificate(pool: str) -> Any:
    return {"subjectAltName": (("URI", names.spiffe_id("team", "j", f"pool:{pool}")),)}


async def test_a_peer_whose_certificate_is_of_another_pool_than_its_endpoint_is_not_admitted(links, door):
    door.answers = [LinkBroken("b#1", "away")]
    peer = links.want(there(pool="gpu"), by="test", at_once=True)
    links.admit(peer.identity, certificate("gpu"))
    links.admit(peer.identity, None)
    with pytest.raises(Refusal) as caught:
        links.admit(peer.identity, certificate("cpu"))
    assert (caught.value.code, caught.value.sentence) == (
        "admit", "worker b#1 is of pool gpu, its certificate of pool:cpu",
    )  # fmt: skip
    links.admit(links.want(there("c"), by="test", at_once=True).identity, certificate("cpu"))
    links.admit(links.peer("d", 1).identity, certificate("cpu"))


# --- dialling ---


@pytest.fixture
def pauses(monkeypatch):
    """They take no time: how long each of a dialler's was to be."""
    found: list[float] = []
    sleep = asyncio.sleep

    async def nap(seconds: float) -> None:
        if seconds > 0:
            found.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", nap)
    return found


async def test_a_peer_that_stays_away_is_dialled_ever_more_rarely_but_every_second(links, door, pauses):
    door.answers = [LinkBroken("b#1", "away")]
    links.want(there(), by="test", at_once=True)
    await until(lambda: len(pauses) >= 12)
    assert pauses[:6] == sorted(pauses[:6])
    assert 0.9 < min(pauses[5:]) <= max(pauses) <= 1.0
    assert sum(pauses[:3]) < 0.2, "until its units are given to others"


async def test_dials_that_fail_are_tried_again_ever_later_to_a_bound_and_from_the_third_on_it_is_unreachable(
    links, door, monkeypatch
):
    monkeypatch.setattr(peers, "BACKOFF_S", (0.0, 0.0, 0.0, 60.0))
    lost = []
    links.on_unreachable.append(lambda peer, why: lost.append((peer.failures, why)))
    door.answers = [
        LinkBroken("b#1", "away"), LinkRefused("no link"), DeadlineExceeded("a link", timeout_s=1.0),
        LinkBroken("b#1", "still away"),
    ]  # fmt: skip
    peer = links.want(there(), by="test", at_once=True)
    await until(lambda: peer.failures == 4)
    await turns()
    assert (len(door.dialled), links.dials) == (4, 4), "the fourth pause is a minute"
    assert lost == [
        (3, "a link did not happen within 1 s"),
        (4, "the link to worker b#1 is broken: still away; dial its next attempt"),
    ]
    assert door.dialled[0] == (there(), {"tls": None})
    assert 50.0 < peer.dial_at - asyncio.get_running_loop().time() <= 60.0


async def test_the_back_off_stays_at_its_last_step(links, door, monkeypatch):
    monkeypatch.setattr(peers, "BACKOFF_S", (0.0,))
    door.answers = [LinkBroken("b#1", "away")] * 5 + [link := Wired()]
    peer = links.want(there(), by="test", at_once=True)
    await until(lambda: peer.link is link)
    await until(lambda: peer.failures == 0)
    assert links.dials == 6


async def test_a_peer_that_is_stale_is_unreachable_at_once(links, door):
    lost = []
    links.on_unreachable.append(lambda peer, why: lost.append(why))
    door.answers = [LinkStale("worker b#1 is at 2")]
    peer = links.want(there(), by="test", at_once=True)
    await until(lambda: peer.failures)
    assert lost == ["stale: worker b#1 is at 2"]


@pytest.mark.parametrize(
    ("other", "at_once", "waits"), [("b", False, True), ("b", True, False), ("z", False, False), ("z", True, False)]
)
async def test_the_larger_worker_waits_for_the_smaller_ones_dial_where_both_were_told(
    links, door, monkeypatch, other, at_once, waits
):
    monkeypatch.setattr(peers, "POLITE_S", 60.0)
    door.answers = [lambda: Wired(other)]
    peer = links.want(there(other), by="test", at_once=at_once)
    await turns()
    assert (len(door.dialled), peer.link is None) == ((0, True) if waits else (1, False))
    if waits:
        theirs: Any = Wired(other)
        door.coming.put_nowait(theirs)
        await until(lambda: peer.link is theirs)
        await turns()
        assert door.dialled == []
        links.want(there(other), by="another", at_once=True)
        links.want(there(other), by="a third", at_once=False)
        theirs.abort("gone")
        await until(lambda: peer.link not in (None, theirs))
        assert len(door.dialled) == 1, "urgent once, urgent from then on"


async def test_a_peer_is_dialled_while_anybody_wants_it(links, door):
    door.answers = [lambda: Wired()]
    peer = links.want(there(), by="one", at_once=True)
    assert links.want(there(), by="two", at_once=True) is peer
    await until(lambda: peer.link)
    links.unwant(peer, by="one")
    links.unwant(peer, by="nobody")
    peer.link.abort("gone")
    await until(lambda: len(door.dialled) == 2)
    await until(lambda: peer.link)
    links.unwant(peer, by="two")
    link = peer.link
    assert (peer.keeper, link.broken) == (None, None), "the other end may want it"
    link.abort("gone")
    await turns()
    assert (peer.link, len(door.dialled)) == (None, 2)


@pytest.mark.parametrize(("cause", "level"), [(ssl.SSLError("bad certificate"), 30), (OSError("refused"), 10)])
async def test_only_what_a_certificate_prevents_is_said_aloud_and_that_once_in_a_while(
    links, door, monkeypatch, caplog, cause, level
):
    caplog.set_level(10, logger=peers.__name__)
    monkeypatch.setattr(peers, "BACKOFF_S", (0.0, 0.0, 60.0))
    error = LinkBroken("b#1", "connecting")
    error.__cause__ = cause
    door.answers = [error]
    peer = links.want(there(), by="test", at_once=True)
    await until(lambda: peer.failures == 3)
    said = [r for r in caplog.records if r.message == "no link yet"]
    assert [r.levelno for r in said] == [level, 10, 10]
    assert (said[0].__dict__["peer"], said[0].__dict__["error"]) == ("b#1", str(error))


async def test_a_bug_in_a_dial_ends_the_worker(door):
    fatal: list[BaseException] = []
    links = PeerLinks(cast(Any, door), on_fatal=fatal.append)
    door.answers = [KeyError("half")]
    links.want(there(), by="test", at_once=True)
    await until(lambda: fatal)
    assert [repr(error) for error in fatal] == ["KeyError('half')"]
    await links.close()


async def test_a_later_life_of_a_worker_finds_a_job_that_has_begun(door):
    for attempt, has_begun in ((0, False), (1, False), (2, True)):
        door.me = Identity(job="j", worker="m", attempt=attempt)
        assert PeerLinks(cast(Any, door), on_fatal=lambda error: None).has_begun is has_begun


# --- the end ---


async def test_a_close_ends_every_link_and_takes_no_more(links, door):
    peer, link = await linked(links, door)
    door.answers = [LinkBroken("c#1", "away")]
    await links.close()
    await links.close()
    assert (link.closes > 0, door.closes) == (True, 1)
    late: Any = Wired("c")
    links._adopt(links.peer("c", 1), cast(Any, late), dialled_by="c")
    assert late.broken.why == "this worker is ending"
    assert links.want(there("d"), by="test", at_once=True).keeper is None
    assert (links._tasks, door.dialled, peer.link) == (set(), [], None)


async def test_a_close_waits_for_what_was_posted_and_not_for_good(links, door, monkeypatch):
    slow, never = await linked(links, door), await linked(links, door, "c")
    for peer, link in (slow, never):
        link.has_room = False
        peer.post(Message(b"last"))
    monkeypatch.setattr(peers, "HANG_UP_S", 0.05)
    closing = asyncio.create_task(links.close())
    await turns()
    slow[1].room.set()
    await asyncio.wait_for(closing, 5)
    assert (slow[1].sent, never[1].sent) == ([b"last"], [])
    assert min(slow[1].closes, never[1].closes) > 0


async def test_a_peer_is_news_once_in_a_while(monkeypatch):
    peer = Peer(Identity(job="j", worker="b", attempt=1))
    now = [1000.0]
    monkeypatch.setattr(peer, "_loop", type("Clock", (), {"time": lambda self: now[0]})())
    found = []
    for at in (1000.0, 1029.9, 1030.0, 1059.9, 1060.0):
        now[0] = at
        found.append(peer.is_news())
    assert found == [True, False, True, False, True]
