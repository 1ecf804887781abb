"""Benchmarks at the size of a few: a driver hears all of its agents, units go through three roles, and the figures are
of this run."""

import asyncio

import pytest

from tests.cluster import bars
from tools.bench.runtime_parts import hops, scale

pytestmark = pytest.mark.timeout(120)


def test_hops_of_units_are_counted_by_the_cpu_that_all_processes_take():
    assert 0.05 < hops.few() < 20, "milliseconds: a step's own CPU is in it, which few units share"


def test_a_driver_hears_every_beat_of_simulated_agents(monkeypatch):
    monkeypatch.setattr(scale, "LEAST", 0.5)  # what a busy machine may offer is said below
    began = bars.look()
    found = scale.few_agents()
    assert found["agents_missed_beats"] < scale.FEW, "a busy machine may come late to some, a broken driver to all"
    assert found["agents_beats"] == bars.near(scale.FEW / scale.BEAT_S, rel=0.1, since=began)
    assert found["agents_credits"] == bars.near(scale.FEW / scale.CREDIT_S, rel=0.1, since=began)
    assert 0 < found["agents_driver_cpu"] < 1


def test_beats_that_a_driver_comes_to_when_the_next_is_due_are_missed(monkeypatch):
    monkeypatch.setattr(scale, "LEAST", 0.5)
    measure = scale._Field.measure

    def standing_still(field, driver, told, *, seconds):
        loop = asyncio.get_running_loop()
        loop.call_later(1.5, driver.suspend)
        loop.call_later(3.7, driver.resume)
        return measure(field, driver, told, seconds=seconds)

    monkeypatch.setattr(scale._Field, "measure", standing_still)
    found = scale.few_agents()
    assert found["agents_missed_beats"] >= scale.FEW, "each had one in the first half of that time"
