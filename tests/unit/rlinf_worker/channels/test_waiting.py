"""Waits of one worker: each has a name, a bound and an end."""

import asyncio

import pytest

from rlinf_api.errors import DeadlineExceeded
from rlinf_worker.channels.protocol import ChannelClosed
from rlinf_worker.channels.waiting import Waits


async def test_a_wait_has_a_name_a_bound_and_an_end():
    waits = Waits()
    signal = waits.signal()
    with pytest.raises(DeadlineExceeded, match=r"the moon did not happen within 0.01 s: got still missing: night"):
        await waits.until(lambda: False, signal, what="the moon", timeout_s=0.01, missing="night")
    waiting = asyncio.create_task(waits.until(lambda: False, signal, what="the sun", timeout_s=None))
    await asyncio.sleep(0.01)
    assert [what for what, _ in waits.current()] == ["the sun"]
    waits.stop("it is late")
    with pytest.raises(ChannelClosed, match="it is late"):
        await waiting
    assert waits.current() == []


async def test_what_is_missing_is_named_as_it_is_when_the_time_is_over():
    waits, left = Waits(), ["rollout/0", "rollout/1"]
    signal = waits.signal()
    asyncio.get_running_loop().call_soon(left.pop)
    with pytest.raises(DeadlineExceeded, match=r"still missing: rollout/0$"):
        await waits.until(lambda: not left, signal, what="all", timeout_s=0.05, missing=lambda: ", ".join(left))


async def test_a_wait_whose_condition_holds_does_not_wait():
    waits = Waits()
    assert await waits.until(lambda: True, waits.signal(), what="x", timeout_s=None) == 0.0
