"""The timer that tells an idle worker: it does not wait for a whole millisecond."""

import asyncio
import time

from rlinf_worker.turns.short_timer import ShortTimer


async def waits(timer, fired, seconds, *, until=lambda took: len(took) == 20):
    took: list[float] = []
    while not until(took):
        begun = time.perf_counter()
        timer.start(seconds)
        async with asyncio.timeout(20):
            await fired.wait()
        took.append(time.perf_counter() - begun)
        fired.clear()
    return took


async def test_half_a_millisecond_is_less_than_one():
    fired = asyncio.Event()
    timer = ShortTimer(fired.set)
    async with asyncio.timeout(20):  # a busy machine is late as often as not; asyncio's own timer takes 1 ms at least
        took = await waits(timer, fired, 0.0005, until=lambda took: took[-1:] and took[-1] < 0.001)
    assert min(took) >= 0.0005
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
