"""The timer that tells an idle worker: it does not wait for a whole millisecond."""

import asyncio
import ctypes
import time
from types import SimpleNamespace

import pytest

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


async def test_a_timer_that_is_set_anew_runs_once_and_then_is_no_more_pending():
    calls: list[int] = []
    timer = ShortTimer(lambda: calls.append(1))
    timer.start(60.25)
    timer.start(0.0)
    async with asyncio.timeout(20):
        while timer.pending:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.005)
    assert calls == [1]
    timer.close()


async def test_a_process_that_may_open_no_more_files_is_told_so(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(timerfd_create=lambda *_: -1))
    with pytest.raises(OSError, match="timerfd"):
        ShortTimer(lambda: None).start(0.0005)


async def test_what_was_closed_does_not_fire():
    calls: list[int] = []
    timer = ShortTimer(lambda: calls.append(1))
    timer.start(0.0005)
    assert timer.pending
    timer.close()
    await asyncio.sleep(0.005)
    assert (calls, timer.pending) == ([], False)
