"""The benchmark of many agents, at the size of a few: the driver hears them all, and the figures are of this run."""

import pytest

from tools.bench.runtime_parts import scale


@pytest.mark.timeout(120)
def test_a_driver_hears_every_beat_of_simulated_agents():
    found = scale.few_agents()
    assert found["agents_missed_beats"] == 0
    # Twice a second each, less what a busy machine makes of half a second.
    assert scale.FEW < found["agents_beats"] <= 1.1 * scale.FEW / scale.BEAT_S
    assert found["agents_credits"] > scale.FEW / 2
    assert 0 < found["agents_driver_cpu"] < 1
