"""The timer that tells an idle worker: it does not wait for a whole millisecond."""

import asyncio
import statistics
import time

from rlinf_worker.runtime.short_timer import ShortTimer


async def waits(timer, fired, seconds):
    took = []
    for _ in range(20):
        begun = time.perf_counter()
        timer.start(seconds)
        async with asyncio.timeout(5):
            await fired.wait()
        took.append(time.perf_counter() - begun)
        fired.clear()
    return took


async def test_half_a_millisecond_is_less_than_one():
    fired = asyncio.Event()
    timer = ShortTimer(fired.set)
    took = await waits(timer, fired, 0.0005)
    assert min(took) >= 0.0005
    assert min(took) < 0.001, "asyncio's own timer takes 1 ms at least"
    assert statistics.median(took) < 0.1
    timer.close()


async def test_without_a_timerfd_it_is_asyncios_timer(monkeypatch):
    fired = asyncio.Event()
    timer = ShortTimer(fired.set)
    monkeypatch.setattr(timer, "_open", lambda: -1)
    assert min(await waits(timer, fired, 0.0005)) >= 0.0005
    timer.close()


async def test_what_was_closed_does_not_fire():
    calls: list[int] = []
    timer = ShortTimer(lambda: calls.append(1))
    timer.start(0.0005)
    assert timer.pending
    timer.close()
    await asyncio.sleep(0.005)
    assert (calls, timer.pending) == ([], False)
