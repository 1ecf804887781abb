"""What the numbers of a synthetic role come to: sizes, times on slots and pools, drift; timers that come out even."""

import itertools
import math
import statistics
from dataclasses import replace

import pytest

from rlinf_worker.roles.synthetic.desk import MAX_DEBT_S, Pacer
from rlinf_worker.roles.synthetic.figures import Figures, Jitter
from rlinf_worker.settings import Settings

SERIAL = {"time": {"perItemMs": 4.0, "perBatchMs": 10.0}}


def test_sizes_have_mean_one_and_are_the_same_wherever_a_unit_is_worked_on():
    keys = [f"w:1/{n}/0" for n in range(20_000)]
    config = {"time": {"perItemMs": 4.0, "sigma": 0.8}}
    rollout, reward = (Figures.of(config, role=role, workload="w") for role in ("rollout", "reward"))
    sizes = [rollout.size(key) for key in keys]
    assert statistics.fmean(sizes) == pytest.approx(1.0, abs=0.03)
    assert statistics.stdev(map(math.log, sizes)) == pytest.approx(0.8, rel=0.03)
    assert sizes == [replace(rollout).size(key) for key in keys]
    assert sizes != [reward.size(key) for key in keys]
    assert Figures.of(SERIAL, role="rollout", workload="w").size("w:1/0/0") == 1.0


def test_slots_and_the_speed_of_a_pool_divide_all_times():
    config = {**SERIAL, "scaling": 0.5, "syncMs": 8.0, "loadMs": 3.0}
    figures = Figures.of(config, role="train", slots=4, speed=2.0)
    assert figures.item_s("k", step=1) == pytest.approx(0.001)
    assert figures.per_batch_s == pytest.approx(0.0025)
    assert figures.gang_sync_s == pytest.approx(0.002)
    assert figures.load_s == pytest.approx(0.0015)


def test_a_unit_of_an_engine_holds_its_lane_as_many_times_longer():
    figures = Figures.of({**SERIAL, "service": "concurrent", "lanes": 16}, role="rollout")
    assert (figures.resident_bytes, figures.peak_bytes, figures.offloaded_bytes) == (0, 0, 0)
    assert figures.lane_s("k", step=1) == pytest.approx(0.064)


def test_all_but_the_time_of_an_item_can_be_left_out():
    assert Figures.of({"time": {"perItemMs": 4.0}}, role="rollout") == Figures(
        role="rollout", workload="", per_item_s=0.004, per_batch_s=0.0, sigma=0.0, jitter=0.0, concurrent=False,
        lanes=1, gang=False, gang_sync_s=0.0, load_s=0.0, offload_s=0.0, resident_bytes=0, peak_bytes=0,
        offloaded_bytes=0, micro_batch=None, payload_bytes=256, weights_bytes=4096, drift_step=0, drift_factor=1.0,
    )  # fmt: skip


def test_all_that_a_config_says_is_in_the_figures():
    config = {
        "name": "judge", "time": {"perItemMs": 8.0, "perBatchMs": 16.0, "sigma": 0.5, "jitter": 0.25}, "gang": True,
        "service": "concurrent", "lanes": 3, "syncMs": 32.0, "loadMs": 5.0, "offloadMs": 7.0, "microBatch": 6,
        "memory": {"resident": 1.5, "peak": 4, "offloaded": 0.5}, "payloadBytes": 11, "weightsBytes": 13,
    }  # fmt: skip
    drift = {"step": 9, "factor": 3}
    assert Figures.of(config, role="reward", workload="w", slots=2, speed=2.0, drift=drift) == Figures(
        role="judge", workload="w", per_item_s=0.002, per_batch_s=0.004, sigma=0.5, jitter=0.25, concurrent=True,
        lanes=3, gang=True, gang_sync_s=0.008, load_s=0.0025, offload_s=0.0035, resident_bytes=3 << 19,
        peak_bytes=4 << 20, offloaded_bytes=1 << 19, micro_batch=6, payload_bytes=11, weights_bytes=13, drift_step=9,
        drift_factor=3.0,
    )  # fmt: skip


def test_drift_begins_at_its_step():
    figures = Figures.of(SERIAL, role="rollout", drift={"step": 60, "factor": 1.5})
    assert figures.item_s("k", step=59) == 0.004
    assert figures.item_s("k", step=60) == pytest.approx(0.006)


def test_an_option_has_its_own_memory_and_speed():
    config = {
        **SERIAL,
        "memory": {"resident": 10, "peak": 30},
        "options": [{"peak": 70, "perItemMs": 1.0}],
        "option": 0,
    }
    figures = Figures.of(config, role="train")
    assert (figures.peak_bytes >> 20, figures.resident_bytes >> 20) == (70, 10)
    assert figures.item_s("k", step=1) == 0.001


def test_jitter_has_its_mean_and_is_cut():
    jitter = Jitter(jitter=0.05, seed="a")
    drawn = [jitter(1.0) for _ in range(5000)]
    assert statistics.fmean(drawn) == pytest.approx(1.0, abs=0.005)
    assert statistics.stdev(drawn) == pytest.approx(0.05, rel=0.1)
    wild = Jitter(jitter=3.0, seed="a")
    assert {min(wild(1.0) for _ in range(500)), max(wild(1.0) for _ in range(500))} == {0.5, 2.0}
    assert [Jitter(jitter=0.05, seed="a")(1.0)] == drawn[:1]


class LateClock:
    """Each sleep wakes `late` too late."""

    def __init__(self, late):
        self.now, self.late, self.sleeps = 0.0, late, 0

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        assert seconds > 0
        self.sleeps += 1
        self.now += seconds + self.late


@pytest.mark.parametrize("piece", [0.00006, 0.001, 0.02])
async def test_late_wake_ups_are_made_up_for(piece):
    clock = LateClock(0.0009)
    pacer = Pacer(clock=clock, sleep=clock.sleep)
    count = int(2.0 / piece)
    for _ in range(count // 10):
        await pacer.spend(*[piece] * 10)
    assert clock.now == pytest.approx(count // 10 * 10 * piece, abs=0.001)


async def test_pieces_end_one_after_the_other():
    clock, ends = LateClock(0.0), list[float]()
    await Pacer(clock=clock, sleep=clock.sleep).spend(0.1, 0.2, after=lambda number: ends.append(clock.now))
    assert ends == pytest.approx([0.1, 0.3])


async def test_a_process_that_was_frozen_does_not_work_for_nothing_afterwards():
    clock = LateClock(10.0)
    pacer = Pacer(clock=clock, sleep=clock.sleep)
    await pacer.spend(0.1)
    clock.late = 0.0
    assert await pacer.spend(1.0) == pytest.approx(1.0 - MAX_DEBT_S)


async def test_within_a_long_piece_the_runtime_is_told_that_work_moves():
    """A unit of the long tail had been killed as hung after 20 s, and begun anew with the same size, for ever."""
    clock, told = LateClock(0.0), list[float]()
    await Pacer(lambda: told.append(clock.now), clock=clock, sleep=clock.sleep).spend(4.0, 33.0, after=lambda _: None)
    assert clock.now == pytest.approx(37.0)
    gaps = [after - before for before, after in itertools.pairwise([4.0, *told, 37.0])]
    assert max(gaps) <= 5.0 < Settings().step_deadline_min_s
    clock.late = 1.0
    pacer = Pacer(clock=clock, sleep=clock.sleep)
    assert await pacer.spend(12.0) == pytest.approx(12.0), "a late wake-up within it is made up for by the next"
