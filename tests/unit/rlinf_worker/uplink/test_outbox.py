"""Messages of one stream: bounded, in batches, closed once."""

import asyncio
from typing import Any

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
