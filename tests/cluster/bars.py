"""How long something may take on a machine that has other work, too: bars are for an idle one.

began = bars.look()
...                                               # what is timed
assert took_s <= bars.by_load(BAR_S, since=began)
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import pytest

MOST: Final = 20.0
"""No bar is stretched further: a machine that is even slower fails, instead of letting everything pass."""
SPIN_S: Final = 0.05
"""CPU time, and a few of a scheduler's slices."""
CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Look:
    """Seconds of all cores since the machine started."""

    stolen_s: float
    all_s: float


def look() -> Look:
    times = psutil.cpu_times()
    steal = float(getattr(times, "steal", 0.0))  # of Linux alone
    return Look(stolen_s=steal, all_s=times.user + times.nice + times.system + times.idle + _others(times) + steal)


def _others(times: object) -> float:
    return sum(float(getattr(times, name, 0.0)) for name in ("iowait", "irq", "softirq"))


_AT_IMPORT: Final = look()


def by_load(bar_s: float, *, since: Look = _AT_IMPORT) -> float:
    """The bar, stretched by how much slower than an idle machine this one is now and has been."""
    return bar_s * stretch(load=os.getloadavg()[0], cores=cores(), spin=spin(), stolen=stolen(since, look()))


def near(wanted: float, *, rel: float = 0.0, abs: float = 0.0, since: Look = _AT_IMPORT) -> object:
    """What may differ so much from `wanted` on an idle machine, and on a busy one by_load, but by no more than a half.

    assert took_s == bars.near(0.1, rel=0.02, since=began)
    """
    wide = by_load(1.0, since=since)
    return pytest.approx(wanted, rel=min(0.5, wide * rel), abs=min(0.5, wide * abs))


def stretch(*, load: float, cores: float, spin: float, stolen: float) -> float:
    """`load`: processes that wanted a core or a disk in the last minute. `spin`: seconds that one second of CPU takes
    just now, which counts the same neighbours and a quota that is used up: the larger of both. `stolen`: the share of
    time in which the cores were another machine's, which neither of them sees.

    >>> stretch(load=0.5, cores=2, spin=1.0, stolen=0.0)
    1.0
    >>> stretch(load=6.0, cores=2, spin=1.5, stolen=0.5)
    6.0
    """
    return min(MOST, max(1.0, load / cores, spin) / max(1.0 - stolen, 1.0 / MOST))


def stolen(since: Look, now: Look) -> float:
    """The share of time between two looks; of less than a second nothing is known, as it is counted in 10 ms."""
    passed_s = now.all_s - since.all_s
    return max(0.0, (now.stolen_s - since.stolen_s) / passed_s) if passed_s >= 1.0 else 0.0


def spin() -> float:
    started, used = time.perf_counter(), time.thread_time()
    while (cpu_s := time.thread_time() - used) < SPIN_S:
        pass
    return (time.perf_counter() - started) / cpu_s


def cores(cpu_max: Path = CPU_MAX) -> float:
    """Those this process may use, or what its quota comes to where that is less."""
    allowed = float(len(os.sched_getaffinity(0)))
    quota, _, period = cpu_max.read_text().partition(" ") if cpu_max.exists() else ("max", "", "")
    return allowed if quota == "max" else min(allowed, int(quota) / int(period))
