"""Messages of one stream: bounded, in batches, closed once."""

import asyncio
from typing import Any

from rlinf_worker.uplink import outbox as module
from rlinf_worker.uplink.outbox import Outbox


async def test_everything_that_waits_is_one_batch():
    outbox: Outbox[Any] = Outbox()
    for number in range(3):
        outbox.put(number)
    assert await outbox.drain() == [0, 1, 2]
    waiting = asyncio.create_task(outbox.drain())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(3)
    assert await waiting == [3]


async def test_a_peer_that_does_not_read_is_disconnected():
    outbox: Outbox[Any] = Outbox(limit=3)
    for number in range(10):
        outbox.put(number)
    assert outbox.closed == "the other end left 3 messages unread"
    assert await outbox.drain() == [0, 1, 2, 3], "the one that found it full is its last"
    assert await outbox.drain() == []


async def test_what_is_in_it_is_still_taken_after_the_close_and_nothing_else():
    outbox: Outbox[Any] = Outbox()
    outbox.put("before")
    outbox.close("a newer connection came")
    outbox.close("too late to say why")
    outbox.put("after")
    assert outbox.closed == "a newer connection came"
    assert [await outbox.drain(), await outbox.drain()] == [["before"], []]


async def test_a_few_of_the_oldest_are_taken():
    outbox: Outbox[Any] = Outbox()
    for number in range(5):
        outbox.put(number)
    assert [outbox.take(2), outbox.take(2), outbox.take(2), outbox.take(2)] == [[0, 1], [2, 3], [4], []]
    outbox.put(5)
    assert outbox.take() == [5]


async def test_a_poke_ends_one_wait():
    outbox: Outbox[Any] = Outbox()
    outbox.poke()
    await outbox.filled()
    again = asyncio.create_task(outbox.filled())
    await asyncio.sleep(0.01)
    assert not again.done()
    outbox.poke()
    await again


# --- what can wait ----------------------------------------------------------------------------------------------------
async def _is_left_alone(waiting: asyncio.Task[Any]) -> bool:
    """As nothing but time would end the wait, and PACE_S is a minute here."""
    for _ in range(5):
        await asyncio.sleep(0)
    return not waiting.done()


async def _after_a_frame() -> Outbox[Any]:
    outbox: Outbox[Any] = Outbox()
    outbox.put("first")
    assert await outbox.drain() == ["first"]
    return outbox


async def test_after_a_rest_what_can_wait_does_not():
    outbox: Outbox[Any] = Outbox()
    waiting = asyncio.create_task(outbox.drain())
    assert await _is_left_alone(waiting)
    outbox.put("held", can_wait=True)
    assert await asyncio.wait_for(waiting, 5) == ["held"]


async def test_what_can_wait_goes_with_the_next_frame_in_order(monkeypatch):
    monkeypatch.setattr(module, "PACE_S", 60.0)
    outbox = await _after_a_frame()
    outbox.put("before anybody waits", can_wait=True)
    waiting = asyncio.create_task(outbox.drain())
    outbox.put("held", can_wait=True)
    assert await _is_left_alone(waiting)
    outbox.put("assigned")
    outbox.put("released", can_wait=True)
    assert await asyncio.wait_for(waiting, 5) == ["before anybody waits", "held", "assigned", "released"]
    waiting = asyncio.create_task(outbox.drain())
    assert await _is_left_alone(waiting), "nothing of it is left, and nothing wakes the writer for it"
    outbox.close("over")
    assert await waiting == []


async def test_a_hundred_words_that_can_wait_are_one_frame_a_pace_after_the_last(monkeypatch):
    monkeypatch.setattr(module, "PACE_S", 0.05)
    outbox, loop = await _after_a_frame(), asyncio.get_running_loop()
    began, waiting = loop.time(), asyncio.create_task(outbox.drain())
    for number in range(100):
        outbox.put(number, can_wait=True)
        await asyncio.sleep(0)
    assert await asyncio.wait_for(waiting, 5) == list(range(100))
    assert loop.time() - began >= 0.04, "not before"


async def test_a_timer_of_words_that_have_gone_does_not_wake_the_writer_early(monkeypatch):
    monkeypatch.setattr(module, "PACE_S", 0.05)
    outbox, loop = await _after_a_frame(), asyncio.get_running_loop()
    waiting = asyncio.create_task(outbox.drain())
    await asyncio.sleep(0)
    outbox.put("held", can_wait=True)  # its timer runs
    await asyncio.sleep(0.03)
    outbox.put("assigned")
    assert await waiting == ["held", "assigned"]
    began = loop.time()
    outbox.put("released", can_wait=True)
    assert await outbox.drain() == ["released"]
    assert loop.time() - began >= 0.04, "a whole pace behind the frame that took the others along"


async def test_what_does_not_fit_into_a_frame_is_due_with_the_next(monkeypatch):
    monkeypatch.setattr(module, "PACE_S", 60.0)
    outbox: Outbox[Any] = Outbox()
    for number in range(2):
        outbox.put(number)
    await outbox.filled()
    assert outbox.take(1) == [0]
    await asyncio.wait_for(outbox.filled(), 5)
    assert outbox.take(1) == [1]


async def test_what_can_wait_is_bounded_as_all_is():
    outbox: Outbox[Any] = Outbox(limit=3)
    for number in range(10):
        outbox.put(number, can_wait=True)
    assert outbox.closed is not None
    assert await outbox.drain() == [0, 1, 2, 3]
