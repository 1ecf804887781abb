"""How many units lie at a role that takes turns: as many as it works on until more has come."""

import pytest

from rlinf_worker.queues.pace import MOST, REFILL_S, Pace
from tests.unit.rlinf_worker.queues.test_ends_of_a_queue import end, give


def paced(*unit_s: float, units: int = 1) -> Pace:
    """Of a role whose calls gave `units` each, and who took so long for one."""
    pace, now = Pace(), 100.0
    for each_s in unit_s:
        for _ in range(units):
            pace.gave(now=now)
        now += each_s * units
        pace.asks(now=now)
        now += 60.0  # it waits: for units, or for its turn
    return pace


@pytest.mark.parametrize(
    ("unit_s", "reserve"),
    [(0.0, MOST), (0.0001, MOST), (0.00025, 48), (0.0005, 24), (0.001, 12), (0.003, 4), (REFILL_S, 1), (0.5, 1)],
)
@pytest.mark.parametrize("units", [1, 4])
def test_what_lies_there_lasts_for_the_way_of_more_and_long_units_are_not_bound_beforehand(unit_s, reserve, units):
    assert paced(unit_s, units=units).reserve == reserve


def test_one_long_call_counts_for_little_and_four_of_another_length_for_most():
    """Between two calls a role may have waited for room, or at a safe point for another's turn."""
    assert paced(*[0.0005] * 9).reserve == 24
    assert 3 <= paced(*[0.0005] * 9, 30.0).reserve <= 5
    assert paced(*[0.0005] * 9, *[0.004] * 4).reserve == 4


def test_nobody_knows_before_the_second_call_and_a_call_that_gave_nothing_tells_nothing():
    pace = Pace()
    assert pace.reserve == 0
    pace.asks(now=5.0)
    assert pace.reserve == 0
    pace.gave(now=5.0)
    pace.asks(now=5.001)
    pace.asks(now=9.0)
    assert pace.reserve == 12


class Open:
    """The gate of a role that has its turn."""

    is_open = True

    def waiting(self) -> None: ...

    def look(self) -> None: ...


async def stated(monkeypatch, *, in_turns, unit_s=0.001, batches=False, **spec):
    """The credit that a role of such units states once it knows them, with nothing lying there."""
    channel, waits = end("actor", **spec)
    waits.gate = Open() if in_turns else None
    now = [50.0]
    monkeypatch.setattr("rlinf_worker.queues.consuming.monotonic", lambda: now[0])
    for number in range(3):
        give(channel, f"{number}a", f"{number}b")
        if batches:
            await channel.take_batch(at_least=2)
        else:
            await channel.take()
            channel.take_now()
        now[0] += 2 * unit_s
    channel.into.asks()
    channel.into.given.forget_credit()
    return channel.into.given.credit_due()


@pytest.mark.parametrize("batches", [False, True])
async def test_a_role_that_takes_turns_asks_for_so_many_and_else_for_what_the_plan_says(monkeypatch, batches):
    assert await stated(monkeypatch, in_turns=True, batches=batches, micro_batch=2, depth=1) == 12
    assert await stated(monkeypatch, in_turns=False, batches=batches, micro_batch=2, depth=1) == 2
    assert await stated(monkeypatch, in_turns=True, unit_s=0.1, batches=batches, micro_batch=2, depth=1) == 2
    assert await stated(monkeypatch, in_turns=True, batches=batches, micro_batch=16, depth=2) == 32


async def test_what_the_role_waits_for_is_not_its_own_time(monkeypatch):
    """It calls as soon as it is through, and the next unit comes a minute later."""
    channel, waits = end("actor", micro_batch=1, depth=1)
    waits.gate = Open()
    now = [50.0]
    monkeypatch.setattr("rlinf_worker.queues.consuming.monotonic", lambda: now[0])
    give(channel, "a")
    await channel.take()
    now[0] += 0.002
    channel.into.asks()
    now[0] += 60.0
    give(channel, "b")
    await channel.take()
    assert channel.into.given.reserve == 6


async def test_a_role_that_takes_no_turns_any_more_has_the_plans_window(monkeypatch):
    channel, waits = end("actor", micro_batch=1, depth=1)
    waits.gate = Open()
    channel.into._pace.gave(now=1.0)
    channel.into._pace.asks(now=1.001)
    channel.into.asks()
    assert channel.into.given.reserve == 12
    waits.gate = None
    channel.into.asks()
    assert channel.into.given.reserve == 0
