"""What the operator's benchmark makes of its samples."""

import os
import time

import pytest

from tools.bench.operator_parts.field import cpu_clock
from tools.bench.operator_parts.queued import LATE_S, overtaken
from tools.bench.operator_parts.scale import Curve


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        ([(0, 0), (1, 0), (2, 100), (3, 200), (4, 950), (5, 1000)], 425),
        ([(0, 0), (1, 5), (2, 5), (3, 10)], 10 / 3),
        ([(0, 0), (2, 10)], 5),
        ([(0, 900), (1, 900), (2, 1000), (3, 1100), (4, 1850), (5, 1900)], 425),
    ],
    ids=["between the first and the last tenth", "few pods, between two looks", "all at once", "others' pods before"],
)
def test_pods_a_second_are_never_none_where_there_were_pods(points, rate):
    assert Curve(points).rate() == pytest.approx(rate)


def test_cpu_of_a_process_is_finer_than_a_tick():
    clock = cpu_clock(os.getpid())
    before = time.clock_gettime(clock)
    while (used := time.clock_gettime(clock) - before) == 0:  # each turn takes some
        pass
    assert 0 < used < 0.01  # s, a tick of the kernel


@pytest.mark.parametrize(
    ("times", "count"),
    [
        ([], 0),
        ([(0.0, 1.0), (10.0, 11.0), (20.0, 30.0)], 0),
        ([(0.0, 1.0), (10.0, 30.0), (20.0, 22.0), (21.0, 23.0)], 2),
        ([(0.0, 30.0), (LATE_S, 20.0)], 0),
        ([(0.0, 20.0 + LATE_S), (10.0, 20.0)], 0),
    ],
    ids=["none", "in order", "two before the second", "made at about the same time", "admitted at about the same time"],
)
def test_a_job_that_is_admitted_before_one_that_has_waited_longer_is_counted(times, count):
    assert overtaken(times) == count
