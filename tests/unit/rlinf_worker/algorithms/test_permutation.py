"""The order of a pass: each row once, another order for another seed and pass, no list of it."""

import pytest

from rlinf_worker.algorithms.permutation import row_at


def order(count, *, seed=1, data_pass=0):
    return [row_at(place, count=count, seed=seed, data_pass=data_pass) for place in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000])
def test_each_row_comes_once(count):
    assert sorted(order(count)) == list(range(count))


def test_seed_and_pass_decide_the_order():
    first = order(100)
    assert first == order(100)
    assert first != list(range(100))
    assert order(100, seed=2) != first
    assert order(100, data_pass=1) != first


def test_rows_are_spread_evenly():
    """Each place gets each row about as often as another, over seeds."""
    found = [row_at(0, count=8, seed=seed, data_pass=0) for seed in range(4000)]
    counts = [found.count(row) for row in range(8)]
    assert min(counts) > 400, counts
    assert max(counts) < 600, counts


def test_a_place_in_a_large_set_costs_no_list():
    assert 0 <= row_at(10**12, count=10**12 + 7, seed=0, data_pass=3) < 10**12 + 7
