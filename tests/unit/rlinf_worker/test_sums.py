"""Sums of a step: what was worked on by size, what was moved, when units were handed on; all of it bounded."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rlinf_worker.sums import (
    CHANNELS,
    COUNTED_STEPS,
    KEPT,
    SIZES,
    STEPS,
    Amount,
    Batches,
    End,
    Moves,
    ReleaseTimes,
    Sums,
    evenly,
    quantiles,
)


def test_spans_are_added_up_by_how_much_they_worked_on():
    sums = Sums()
    sums.worked(0.5, Amount(units=4, tokens=100))
    sums.worked(1.5, Amount(units=4, tokens=300))
    sums.worked(0.25, Amount(units=2))
    sums.worked(0.125, Amount())
    found = sums.take(1, 0).batches
    assert found == {
        4: Batches(
            count=2, units=8, tokens=400, seconds=2.0, seconds_squared=2.5, tokens_squared=100_000, token_seconds=500.0
        ),
        2: Batches(count=1, units=2, seconds=0.25, seconds_squared=0.0625),
        0: Batches(count=1, seconds=0.125, seconds_squared=0.015625),
    }
    assert sums.take(2, 0).batches == {}, "told once"


def test_of_very_many_sizes_the_later_ones_are_put_together_by_powers_of_two():
    sums = Sums()
    for size in range(1, SIZES + 1):
        sums.worked(1.0, Amount(units=size))
    for size in (1000, 600, 512, 20, 3):
        sums.worked(1.0, Amount(units=size))
    found = sums.take(1, 0).batches
    assert set(found) == {*range(1, SIZES + 1), 512}
    assert (found[512].count, found[512].units, found[16].count, found[3].count) == (3, 2112, 2, 2)


def test_moves_are_added_up_by_what_they_are():
    sums = Sums()
    sums.moved("load", 0.5, 100)
    sums.moved("load", 1.0, 300)
    sums.moved("publish", 0.25, 0)
    assert sums.take(1, 0).moves == {
        "load": Moves(count=2, seconds=1.5, seconds_squared=1.25, bytes=400),
        "publish": Moves(count=1, seconds=0.25, seconds_squared=0.0625),
    }
    assert sums.take(2, 0).moves == {}


def test_units_are_released_from_the_first_thing_on_that_was_taken_of_their_step():
    sums = Sums()
    sums.took(1, 0, at=10.0)
    sums.took(1, 0, at=11.0)
    sums.took(2, 0, at=12.0)
    sums.released("a", 1, 0, at=13.0, since=5.0)
    sums.released("b", 1, 0, at=13.5, since=5.0)
    sums.released("a", 1, 0, at=14.0, since=5.0)
    sums.released("a", 2, 0, at=14.5, since=5.0)  # of a step ahead
    sums.released("a", 3, 0, at=15.0, since=14.0)  # nothing of it was taken
    first, second, third = (sums.take(step, 0).releases for step in (1, 2, 3))
    assert {channel: found.evenly() for channel, found in first.items()} == {"a": [3.0, 4.0], "b": [3.5]}
    assert {channel: found.evenly() for channel, found in second.items()} == {"a": [2.5]}
    assert {channel: found.evenly() for channel, found in third.items()} == {"a": [1.0]}
    assert (sums._began, sums._releases) == ({}, {})


def test_what_is_taken_and_handed_on_counts_in_its_own_step_however_far_ahead():
    sums = Sums()
    into, out = End("tickets", "consumer"), End("a", "producer")
    for step, count in ((1, 2), (2, 3)):
        sums.took(step, 0, at=10.0)[into] += count
        sums.released("a", step, 0, at=11.0, since=5.0)
    assert sums.take(1, 0).went == {into: 2, out: 1}
    sums.took(2, 0, at=12.0)[into] += 1
    assert sums.take(2, 0).went == {into: 4, out: 1}
    assert (sums.take(3, 0).went, sums._taken) == ({}, {})
    for step in range(COUNTED_STEPS + 5):
        sums.took(step, 0, at=1.0)[into] += 1
    assert len(sums._taken) == COUNTED_STEPS


def test_what_was_made_of_a_dead_branch_is_of_no_step():
    sums = Sums()
    sums.took(3, 0, at=10.0)
    sums.released("a", 3, 0, at=11.0, since=0.0)
    sums.took(3, 1, at=20.0)
    sums.released("a", 3, 1, at=20.5, since=0.0)
    assert sums.take(3, 1).releases["a"].evenly() == [0.5]
    assert sums.take(3, 0).releases == {}


def test_steps_and_channels_are_bounded():
    sums = Sums()
    for step in range(STEPS + 5):
        sums.took(step, 0, at=1.0)
        sums.released("a", step, 0, at=2.0, since=0.0)
    assert len(sums._began) == len(sums._releases) == STEPS
    for channel in range(CHANNELS + 5):
        sums.released(str(channel), 99, 0, at=2.0, since=0.0)
    assert len(sums.take(99, 0).releases) == CHANNELS


@pytest.mark.parametrize("count", [0, 1, 2, KEPT - 1, KEPT, KEPT + 1, 2 * KEPT, 1000, 12_345])
def test_releases_keep_the_first_the_last_and_what_is_evenly_between(count):
    releases = ReleaseTimes()
    for n in range(count):
        releases.add(float(n))
    kept = releases.evenly()
    assert (releases.count, len(kept)) == (count, min(count, KEPT))
    assert len(releases._seconds) <= 2 * KEPT
    if count:
        assert (kept[0], kept[-1]) == (0.0, count - 1.0)
        assert kept == pytest.approx(evenly(count, KEPT), abs=1 + count / KEPT)
        assert kept == sorted(kept)


def test_a_long_tail_shows_in_the_last_releases():
    releases = ReleaseTimes()
    for _ in range(990):
        releases.add(1.0)
    for n in range(10):
        releases.add(2.0 + n)
    assert releases.evenly()[-2:] == pytest.approx([3.0, 11.0], abs=2.0)
    assert releases.evenly()[-1] == 11.0


def test_quantiles_go_by_weight():
    assert quantiles([(1.0, 1.0)]) == [1.0]
    assert quantiles([(2.0, 1.0), (1.0, 1.0)]) == [1.0, 2.0]
    assert quantiles([(float(n), 1.0) for n in range(101)], most=5) == [0.0, 25.0, 50.0, 75.0, 100.0]
    assert quantiles([(0.0, 1.0), (5.0, 98.0), (9.0, 1.0)], most=5) == [0.0, 5.0, 5.0, 5.0, 9.0]


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0.1, 10)), min_size=1, max_size=300))
def test_quantiles_are_bounded_rise_and_have_both_ends(weighted):
    found = quantiles(weighted)
    assert 1 <= len(found) <= KEPT
    assert found == sorted(found)
    assert (found[0], found[-1]) == (min(weighted)[0], max(weighted)[0])
