"""What all links share, with a link of two lists: who waits for what, what is counted, what a break does."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

import pytest

from rlinf_api.errors import InvariantBroken
from rlinf_worker.links import link as link_module
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.errors import LinkBroken, LinkClosed, MessageTooLarge, PayloadError
from rlinf_worker.links.frame import FrameOut
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.link import Counters, Link
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import LinkSettings

A, B = Identity(job="j", worker="a", attempt=0), Identity(job="j", worker="b", attempt=3)


class Listed(Link):
    """`inbox`: what arrived; `taken`: what was sent; `full`: there is no room."""

    kind = "listed"

    def __init__(self, **settings: Any) -> None:
        super().__init__(A, B, settings=LinkSettings(**settings))
        self.inbox, self.taken = deque[Message](), list[bytes]()
        self.full, self.calls = False, list[str]()

    def _pop(self) -> Message | None:
        return self.inbox.popleft() if self.inbox else None

    def _before_sleep(self) -> bool:
        self.calls.append("sleep")
        return True

    def _after_sleep(self) -> None:
        self.calls.append("awake")

    def _try(self, out: FrameOut) -> bool:
        if self.full:
            return False
        self._sent += 1
        self.taken.append(out.prefix[24:])
        return True

    async def _send_in_turn(self, message: Message) -> None:
        out = self._framed(message)
        while not self._try(out):
            await self._sleep_until_room()
        self._accepted(out, message)

    def _on_broken(self) -> None:
        self.calls.append("broken")

    async def close(self) -> None:
        self._fail(LinkClosed(str(self.peer), "it was closed here"))
        self._closed_here = True

    def arrives(self, head: bytes) -> None:
        self.inbox.append(Message(head))
        self._wake_receiver()

    def empties(self) -> None:
        self.full = False
        self._wake_sender()


@pytest.fixture
async def link():
    return Listed()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_both_directions_are_counted_in_messages_and_bytes(link):
    await link.send(Message(b"head", b"12345"))
    assert link.send_nowait(Message(b"x"))
    link.arrives(b"abc")
    assert (await link.recv()).head == b"abc"
    nbytes = Message(b"head", b"12345").nbytes + 1
    assert link.counters == Counters(sent_messages=2, sent_bytes=nbytes, received_messages=1, received_bytes=3)


async def test_a_full_link_is_waited_for_in_the_order_of_the_calls_and_nobody_overtakes(link):
    link.full = True
    assert not link.send_nowait(Message(b"0"))
    waiting = [asyncio.create_task(link.send(Message(b"%d" % n))) for n in (1, 2)]
    await turns()
    link.full = False
    assert not link.send_nowait(Message(b"3")), "two wait for the room that there is now"
    link.empties()
    await asyncio.gather(*waiting)
    assert link.send_nowait(Message(b"4"))
    assert link.taken == [b"1", b"2", b"4"]
    assert link.counters.sent_messages == 3
    assert link.counters.send_wait_s > 0.0


async def test_a_sender_that_is_cancelled_leaves_its_turn_to_the_next(link):
    link.full = True
    first, second = (asyncio.create_task(link.send(Message(b"%d" % n))) for n in (1, 2))
    await turns()
    first.cancel()
    await turns()
    link.empties()
    await asyncio.wait_for(second, 5)
    assert link.send_nowait(Message(b"3"))
    assert link.taken == [b"2", b"3"]


async def test_a_message_of_just_the_bound_may_go_and_one_byte_more_is_a_sentence():
    link = Listed(max_message_bytes=100)
    await link.send(Message(b"x" * 76))
    with pytest.raises(MessageTooLarge) as caught:
        await link.send(Message(b"x" * 77))
    assert str(caught.value) == (
        "cannot send a message to worker b#3: got 101 bytes, wanted at most 100; "
        "split it, or raise max_message_bytes at both ends"
    )
    with pytest.raises(PayloadError):
        link.send_nowait(Message(b"", print))
    assert (link.counters.refused_messages, link.counters.sent_messages, link._sent) == (2, 1, 1)


@pytest.mark.parametrize("way", ["send", "recv"])
async def test_a_flood_lets_others_run_after_each_burst(link, monkeypatch, way):
    monkeypatch.setattr(link_module, "BURST", 4)
    beats: list[int] = []

    async def heart() -> None:
        while True:
            beats.append(len(link.taken) if way == "send" else 20 - len(link.inbox))
            await asyncio.sleep(0)

    link.inbox.extend(Message(b"") for _ in range(20))
    beating = asyncio.create_task(heart())
    for _ in range(20):
        await (link.send(Message(b"")) if way == "send" else link.recv())
    beating.cancel()
    assert beats == ([3, 7, 11, 15, 19] if way == "send" else [4, 8, 12, 16])


async def test_a_receiver_sleeps_until_something_comes(link):
    receiving = asyncio.create_task(link.recv())
    await turns()
    assert link.calls == ["sleep"]
    with pytest.raises(InvariantBroken) as caught:
        await link.recv()
    assert str(caught.value) == "two tasks receive from the link to b#3: wanted one pump per link"
    link._wake_receiver()  # for nothing
    await turns()
    assert link.calls == ["sleep", "awake", "sleep"]
    link.arrives(b"x")
    link._wake_receiver()
    assert (await asyncio.wait_for(receiving, 5)).head == b"x"
    assert link.calls[-1] == "awake"
    receiving = asyncio.create_task(link.recv())
    await turns()
    receiving.cancel()
    await turns()
    link.arrives(b"y")
    assert (await link.recv()).head == b"y"


async def test_a_break_is_one_wakes_everybody_and_leaves_what_arrived_to_be_received(link, caplog):
    caplog.set_level(logging.DEBUG, logger=link_module.__name__)
    watching = [asyncio.create_task(link.wait_broken()) for _ in range(2)]
    gone = asyncio.create_task(link.wait_broken())
    link.full = True
    sending = [asyncio.create_task(link.send(Message(b"x"))) for _ in range(2)]
    await turns()
    gone.cancel()
    link.arrives(b"last")
    link.abort("its node is lost")
    link.abort("too late to say why")
    assert [(await one).why for one in watching] == ["its node is lost"] * 2
    for one in sending:
        with pytest.raises(LinkBroken, match="its node is lost"):
            await asyncio.wait_for(one, 5)
    assert (await link.recv()).head == b"last"
    for call in (link.recv(), link.send(Message(b"x"))):
        with pytest.raises(LinkBroken, match="its node is lost"):
            await asyncio.wait_for(call, 5)
    assert link.calls == ["broken"]
    assert (await link.wait_broken()) is link.broken
    (record,) = [r for r in caplog.records if r.name == link_module.__name__]
    said = record.__dict__
    assert (record.levelno, record.message) == (logging.INFO, "link broken")
    assert (said["peer"], said["link"], said["why"]) == ("b#3", "listed", "its node is lost")


async def test_an_end_in_good_order_is_no_news_and_nothing_is_received_behind_it(link, caplog):
    caplog.set_level(logging.DEBUG, logger=link_module.__name__)
    receiving = asyncio.create_task(link.recv())
    await turns()
    await link.close()
    link.inbox.append(Message(b"late"))
    with pytest.raises(LinkClosed):
        await asyncio.wait_for(receiving, 5)
    with pytest.raises(LinkClosed):
        await link.recv()
    assert [r.levelno for r in caplog.records if r.message == "link broken"] == [logging.DEBUG]
    assert "awake" not in link.calls, "closed while it slept: there is nothing to wake"


async def test_a_break_that_is_draining_gives_what_still_comes(link):
    receiving = asyncio.create_task(link.recv())
    await turns()
    link._draining = True
    link.abort("it closed, behind what we do not read yet")
    await turns()
    assert not receiving.done()
    link.arrives(b"late")
    assert (await asyncio.wait_for(receiving, 5)).head == b"late"
    link._draining = False
    with pytest.raises(LinkBroken):
        await asyncio.wait_for(link.recv(), 5)


# --- messages --------------------------------------------------------------------------------------------------------


def test_a_message_that_was_released_is_not_used_again():
    for message in (Message(b"h", [1]), Message(b"h", body=b"\x01")):
        with message:
            assert message.nbytes == 1 + len(message.encoded()[0])
        message.release()
        for call in (message.encoded, message.value):
            with pytest.raises(InvariantBroken, match="a message was used after its release"):
                call()


def test_what_was_decoded_is_decoded_once_and_outlives_the_release():
    message = Message(b"h", body=Message(b"", {"a": [1]}).encoded()[0])
    value = message.value()
    assert message.value() is value
    message.release()
    assert value == {"a": [1]}
    assert Message(b"h").value() is None
    assert Message(b"h").encoded() == (b"", ())
    none = Message(b"h", None)
    assert (none.value(), len(none.encoded()[0])) == (None, 1)


def test_an_endpoint_is_plain_values_with_nothing_known_but_who():
    there = Endpoint(worker="w", attempt=1)
    assert there.to_dict() == {
        "worker": "w", "attempt": 1, "pod_uid": "", "unix_path": "", "host": "", "port": 0, "pool": "",
    }  # fmt: skip
    assert Endpoint.from_dict({"worker": "w", "attempt": 1}) == there
