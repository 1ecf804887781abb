"""Waits of one worker: each has a name, a bound and an end."""

import asyncio

import pytest

from rlinf_api.errors import DeadlineExceeded
from rlinf_worker.channels.protocol import ChannelClosed
from rlinf_worker.channels.waiting import Waits, each


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


class Gate:
    """What turns.worker is to waits; the test opens and closes it."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open, self.heard = is_open, list[str]()

    def waiting(self) -> None:
        self.heard.append("waiting")

    def look(self) -> None:
        self.heard.append("look")


async def begun(waiting):
    task = asyncio.ensure_future(waiting)
    for _ in range(2):
        await asyncio.sleep(0)
    return task


async def test_what_has_come_is_not_gone_on_with_before_the_roles_turn():
    waits, here = Waits(), [True]
    signal, gate = waits.signal(), Gate()
    waits.gate = gate
    waiting = await begun(waits.until(lambda: bool(here), signal, what="data", timeout_s=None, ripe=lambda: False))
    assert not waiting.done()
    assert gate.heard == ["look", "waiting"]
    (wait,) = waits.gated
    assert (wait.condition(), wait.ripe(), wait.signal is signal) == (True, False, True)
    gate.is_open = True
    waits.notify_gated()
    assert await waiting >= 0.0
    assert (waits.gated, waits.current()) == ([], [])


async def test_a_wait_that_is_no_safe_point_does_not_ask_the_gate():
    waits = Waits()
    gate = Gate()
    waits.gate = gate
    assert await waits.until(lambda: True, waits.signal(), what="x", timeout_s=None, gated=False) == 0.0
    waiting = await begun(waits.until(lambda: False, waits.signal(), what="x", timeout_s=9.0, gated=False))
    assert (gate.heard, waits.gated) == ([], [])
    waiting.cancel()


async def test_whatever_has_come_is_ripe_where_nobody_says_otherwise():
    waits = Waits()
    waiting = await begun(waits.until(lambda: False, waits.signal(), what="x", timeout_s=None))
    assert waits.gated[0].ripe()
    waiting.cancel()


async def test_the_bound_of_a_wait_does_not_run_off_the_slots():
    waits = Waits()
    gate = Gate()
    waits.gate = gate
    loop = asyncio.get_running_loop()
    waiting = await begun(waits.until(lambda: False, waits.signal(), what="room", timeout_s=0.02))
    await asyncio.sleep(0.04)
    assert not waiting.done()
    gate.is_open = True
    opened_at = loop.time()
    waits.gate_moved()
    waits.gate_moved()
    with pytest.raises(DeadlineExceeded, match=r"room did not happen within 0\.02 s"):
        await waiting
    assert loop.time() - opened_at >= 0.019
    waits.gate_moved()


async def test_what_is_left_of_a_bound_is_kept_while_the_gate_is_closed(monkeypatch):
    waits, gate, now = Waits(), Gate(is_open=True), [100.0]
    waits.gate = gate
    limits = list[float | None]()
    reschedule = asyncio.Timeout.reschedule

    def watch(self: asyncio.Timeout, when: float | None) -> None:
        limits.append(when)
        reschedule(self, None)

    waiting = await begun(waits.until(lambda: False, waits.signal(), what="room", timeout_s=60.0))
    loop_time = asyncio.get_running_loop().time
    began = loop_time()
    monkeypatch.setattr(asyncio.Timeout, "reschedule", watch)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: began + now[0])
    for is_open, at in ((False, 20.0), (False, 25.0), (True, 1000.0), (True, 1005.0), (False, 1010.0), (True, 5000.0)):
        gate.is_open, now[0] = is_open, at
        waits.gate_moved()
    monkeypatch.undo()
    assert [limit is None for limit in limits] == [True, False, True, False]
    assert limits[1] == pytest.approx(began + 1000.0 + 40.0, abs=8.0)
    assert limits[3] == pytest.approx(began + 5000.0 + 30.0, abs=8.0)
    waiting.cancel()


async def test_every_signal_is_heard_by_who_watches_and_ends_all_waits_at_a_stop():
    waits, heard = Waits(), list[int]()
    waits.watcher = lambda: heard.append(1)
    first, second = waits.signal(), waits.signal()
    first.notify()
    assert len(heard) == 1
    waiting = await begun(second.wait())
    waits.stop("the first")
    waits.stop("the second")
    await waiting
    assert waits.stopped == "the first"
    with pytest.raises(ChannelClosed, match="got the first; return from run"):
        await waits.until(lambda: True, first, what="x", timeout_s=None)


async def test_a_wait_that_is_cancelled_is_woken_no_more_and_the_others_are():
    waits = Waits()
    signal = waits.signal()
    gone, waiting = await begun(signal.wait()), await begun(signal.wait())
    gone.cancel()
    await asyncio.sleep(0)
    signal.notify()
    await waiting
    assert gone.cancelled()


async def test_the_longest_wait_is_told_first():
    waits = Waits()
    tasks = [await begun(waits.until(lambda: False, waits.signal(), what=w, timeout_s=None)) for w in ("old", "new")]
    assert [what for what, _ in waits.current()] == ["old", "new"]
    assert all(seconds >= 0.0 for _, seconds in waits.current())
    for task in tasks:
        task.cancel()


async def test_what_is_taken_comes_until_the_channel_ends():
    left = [1, 2]

    async def take() -> int:
        if not left:
            raise ChannelClosed("units")
        return left.pop(0)

    assert [item async for item in each(take)] == [1, 2]
