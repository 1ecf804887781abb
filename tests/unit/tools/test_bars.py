"""Bars of tests, stretched by what else the machine does."""

import pytest

from tests.cluster import bars
from tests.cluster.bars import Look


@pytest.mark.parametrize(
    ("load", "cores", "spin", "stolen", "factor"),
    [
        pytest.param(0.0, 2, 1.0, 0.0, 1.0, id="idle"),
        pytest.param(1.9, 2, 1.0, 0.0, 1.0, id="a core each"),
        pytest.param(6.0, 2, 1.0, 0.0, 3.0, id="three for a core"),
        pytest.param(0.0, 2, 3.0, 0.0, 3.0, id="since a moment ago"),
        pytest.param(6.0, 2, 3.0, 0.0, 3.0, id="the same neighbours count once"),
        pytest.param(1.0, 0.5, 1.0, 0.0, 2.0, id="a quota of half a core"),
        pytest.param(0.0, 2, 1.0, 0.6, 2.5, id="stolen"),
        pytest.param(6.0, 2, 1.0, 0.5, 6.0, id="shared and stolen"),
        pytest.param(900.0, 2, 1.0, 0.0, bars.MOST, id="not without end"),
        pytest.param(0.0, 2, 1.0, 1.0, bars.MOST, id="nor where all was stolen"),
    ],
)
def test_a_bar_is_stretched_by_what_its_machine_lacks(load, cores, spin, stolen, factor):
    assert bars.stretch(load=load, cores=cores, spin=spin, stolen=stolen) == pytest.approx(factor)


def test_what_was_stolen_is_a_share_of_the_time_between_two_looks():
    assert bars.stolen(Look(stolen_s=10.0, all_s=100.0), Look(stolen_s=16.0, all_s=110.0)) == pytest.approx(0.6)
    assert bars.stolen(Look(stolen_s=10.0, all_s=100.0), Look(stolen_s=10.1, all_s=100.2)) == 0.0, "two ticks"


def test_cores_are_those_of_the_quota_where_there_is_one(tmp_path):
    path = tmp_path / "cpu.max"
    allowed = bars.cores(path)
    assert allowed >= 1
    path.write_text("max 100000\n")
    assert bars.cores(path) == allowed
    path.write_text("25000 100000\n")
    assert bars.cores(path) == 0.25
    path.write_text("99900000 100000\n")
    assert bars.cores(path) == allowed


def test_a_bar_is_never_tighter_than_on_an_idle_machine_and_never_stretched_without_end():
    assert 2.0 <= bars.by_load(2.0) <= 2.0 * bars.MOST
    later = bars.look()
    assert later.all_s >= bars._AT_IMPORT.all_s
    assert bars.spin() >= 1.0


def test_what_is_near_is_as_near_as_the_machine_is_quick_and_never_anything(monkeypatch):
    monkeypatch.setattr(bars, "by_load", lambda bar_s, **_: 3.0 * bar_s)
    assert bars.near(1.0, rel=0.1) == 1.29
    assert bars.near(1.0, rel=0.1) != 1.31
    assert bars.near(0.2, abs=0.03) == 0.28
    assert bars.near(0.2, abs=0.03) != 0.3
    monkeypatch.setattr(bars, "by_load", lambda bar_s, **_: bars.MOST * bar_s)
    assert bars.near(1.0, rel=0.1) != 1.51
