"""The clock that stands still while its process does."""

import asyncio
from time import monotonic

import pytest

from rlinf_worker.clock import GAPS_KEPT, Clock


class Raw:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def lives(self, seconds: float, clock: Clock) -> None:
        """Ten looks in each second."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            clock()

    def sleeps(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def raw() -> Raw:
    return Raw()


def test_it_goes_on_as_the_process_does_and_stands_still_with_it(raw):
    clock = Clock(notice_s=1.0, raw=raw)
    raw.lives(5.0, clock)
    assert clock() == pytest.approx(105.0)
    raw.sleeps(3600.0)
    assert clock() == pytest.approx(105.0)
    assert clock.stood_still_s == pytest.approx(3600.0)
    raw.lives(2.0, clock)
    raw.sleeps(7.0)
    assert clock() == pytest.approx(107.0)
    assert clock.stood_still_s == pytest.approx(3607.0)


def test_a_busy_loop_is_not_one_that_stands_still(raw):
    clock = Clock(notice_s=1.0, raw=raw)
    raw.sleeps(1.0)
    assert clock() == pytest.approx(101.0)
    assert clock.stood_still_s == 0.0


def test_whoever_looks_first_after_it_sees_it_too(raw):
    """A message is worked on before the tick that would notice."""
    clock = Clock(notice_s=1.0, raw=raw)
    heard_at = clock()
    raw.sleeps(60.0)
    assert clock() - heard_at == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("noted", "shown"),
    [
        (103.0, 103.0),  # before the first gap, 105 to 115
        (105.0, 105.0),
        (110.0, 105.0),  # in it: another process went on
        (115.0, 105.0),
        (117.0, 107.0),  # between them
        (140.0, 107.0),  # in the second one, 117 to 147
        (148.0, 108.0),
    ],
)
def test_what_another_process_has_noted_is_placed_where_this_clock_was(raw, noted, shown):
    clock = Clock(notice_s=1.0, raw=raw)
    raw.lives(5.0, clock)
    raw.sleeps(10.0)
    raw.lives(2.0, clock)
    raw.sleeps(30.0)
    raw.lives(2.0, clock)
    assert clock.at(noted) == pytest.approx(shown, abs=0.25), "a gap is seen a tenth of a second late"


def test_gaps_are_bounded_and_none_is_counted_less(raw):
    clock = Clock(notice_s=1.0, raw=raw)
    for _ in range(GAPS_KEPT + 10):
        raw.sleeps(2.0)
        clock()
    assert clock.stood_still_s == pytest.approx(2.0 * (GAPS_KEPT + 10))
    assert clock() == pytest.approx(100.0)


async def test_a_tick_of_its_own_looks_often_enough():
    looks: list[float] = []

    def raw() -> float:
        looks.append(monotonic())
        return looks[-1]

    ticks = asyncio.create_task(Clock(notice_s=0.04, raw=raw).tick())
    async with asyncio.timeout(5.0):
        while len(looks) < 5:  # two in each time that is noticed, at the least
            await asyncio.sleep(0.001)
    ticks.cancel()
    assert looks[-1] - looks[0] >= 0.02, "and not all the time"


async def test_a_call_waits_for_the_time_that_the_process_has_lived():
    raw, called = Raw(), asyncio.Event()
    clock = Clock(notice_s=1.0, raw=raw)
    clock.call_later(0.02, called.set)
    raw.sleeps(500.0)  # the loop's own timer is due all the same
    await asyncio.sleep(0.06)
    assert not called.is_set()
    raw.now += 0.03
    async with asyncio.timeout(5.0):
        await called.wait()


async def test_a_call_comes_though_nobody_else_looks_at_the_clock():
    called = asyncio.Event()
    Clock(notice_s=0.5, raw=monotonic).call_later(0.6, called.set)
    async with asyncio.timeout(20.0):
        await called.wait()


async def test_a_call_that_was_cancelled_does_not_come(raw):
    called: list[int] = []
    clock = Clock(notice_s=1.0, raw=raw)
    later = clock.call_later(0.0, called.append, 1)
    later.cancel()
    await asyncio.sleep(0.02)
    assert called == []
    clock.call_later(0.0, called.append, 2)
    await asyncio.sleep(0.02)
    assert called == [2]
