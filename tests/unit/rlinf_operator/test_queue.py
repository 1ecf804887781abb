"""The work queue: one of a key at a time, bursts coalesced, the earliest wish counts."""

import asyncio

import pytest

from rlinf_operator.reconcile.queue import WorkQueue


async def soon(queue, timeout_s=0.05):
    try:
        async with asyncio.timeout(timeout_s):
            return await queue.take()
    except TimeoutError:
        return None


async def test_a_key_is_in_it_once():
    queue: WorkQueue[str] = WorkQueue(coalesce_s=0)
    for _ in range(5):
        queue.add("a")
    assert await soon(queue) == "a"
    queue.done("a")
    assert await soon(queue) is None


async def test_a_key_in_work_waits_until_it_is_done():
    queue: WorkQueue[str] = WorkQueue(coalesce_s=0)
    queue.add("a")
    assert await soon(queue) == "a"
    queue.add("a")
    queue.add("b")
    assert await soon(queue) == "b"
    assert await soon(queue) is None
    queue.done("a")
    assert await soon(queue) == "a"


async def test_the_earliest_wish_counts():
    queue: WorkQueue[str] = WorkQueue(coalesce_s=0)
    queue.add("a", after_s=60)
    assert await soon(queue) is None
    queue.add("a", after_s=0.01)
    assert await soon(queue, timeout_s=20) == "a"


async def test_a_burst_is_one_more_pass_after_a_pause(monkeypatch):
    queue: WorkQueue[str] = WorkQueue(coalesce_s=60)
    queue.add("a")
    assert await soon(queue) == "a"
    queue.done("a")
    for _ in range(9):
        queue.add("a")
    assert await soon(queue) is None
    later = queue._now() + 60
    monkeypatch.setattr(queue, "_now", lambda: later)
    assert await soon(queue) == "a"
    queue.done("a")
    assert await soon(queue) is None
    assert len(queue) == 0


async def test_a_pause_ends_by_itself():
    queue: WorkQueue[str] = WorkQueue(coalesce_s=0.05)
    for _ in range(2):
        queue.add("a")
        assert await soon(queue, timeout_s=20) == "a"
        queue.done("a")


async def test_a_waiting_worker_is_woken_by_a_new_key():
    queue: WorkQueue[str] = WorkQueue(coalesce_s=0)
    queue.add("late", after_s=60)
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0.01)
    queue.add("now")
    async with asyncio.timeout(20):
        assert await waiting == "now"


async def test_two_workers_get_two_keys():
    queue: WorkQueue[str] = WorkQueue(coalesce_s=0)
    first, second = asyncio.create_task(queue.take()), asyncio.create_task(queue.take())
    await asyncio.sleep(0.01)
    queue.add("a")
    queue.add("b")
    async with asyncio.timeout(20):
        assert {await first, await second} == {"a", "b"}


async def test_a_forgotten_key_does_not_come():
    queue: WorkQueue[str] = WorkQueue(coalesce_s=0)
    queue.add("a")
    queue.forget("a")
    assert await soon(queue) is None
    assert len(queue) == 0


async def test_nothing_is_left_of_a_key_that_is_forgotten_while_it_is_in_work():
    """Jobs come and go for years; the queue's tables must not."""
    queue: WorkQueue[str] = WorkQueue(coalesce_s=60)
    for number in range(3):
        queue.add(f"job-{number}")
        key = await queue.take()
        queue.forget(key)
        queue.done(key)
    assert not any(vars(queue)[name] for name in ("_due", "_last", "_in_work", "_forgotten"))
    queue.add("job-0")
    assert await soon(queue) == "job-0", "it was never seen before"


async def test_wishes_that_were_overtaken_do_not_pile_up():
    queue: WorkQueue[str] = WorkQueue(coalesce_s=0)
    for _ in range(2000):
        queue.add("a", after_s=300)
        queue.add("a")
        assert await queue.take() == "a"
        queue.done("a")
    assert len(vars(queue)["_heap"]) < 200


async def test_the_order_is_that_of_the_times():
    queue: WorkQueue[str] = WorkQueue(coalesce_s=0)
    for key, after_s in (("c", 0.03), ("a", 0.01), ("b", 0.02)):
        queue.add(key, after_s=after_s)
    assert [await soon(queue, timeout_s=20) for _ in range(3)] == ["a", "b", "c"]


async def test_the_lag_is_how_long_the_last_key_waited_and_none_once_a_worker_waits(monkeypatch):
    queue: WorkQueue[str] = WorkQueue(coalesce_s=0)
    queue.add("a")
    queue.add("b", after_s=60)
    later = queue._now() + 3
    monkeypatch.setattr(queue, "_now", lambda: later)
    assert await soon(queue) == "a"
    assert queue.lag_s == pytest.approx(3, abs=0.5)
    assert await soon(queue) is None
    assert queue.lag_s == 0
