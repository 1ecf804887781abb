"""Waits until the machine does nothing else, as a run beside a build measures the build. Not for ever: a machine that
is shared may never be quiet, and a result that says how busy it was is better than none.
"""

import time
from collections.abc import Callable

import psutil

IDLE_SHARE = 0.93
"""The share of all CPUs together that has to be idle. A quiet machine with a desktop or a kubelet on it sits at 0.95 to
0.99."""
WINDOW_S = 1.0
QUIET_WINDOWS = 2
PATIENCE_S = 60.0
"""How long one benchmark waits, over all its runs. A build's end is waited for, a neighbour that computes all day is
not."""


def measured_idle_share() -> float:
    return 1.0 - psutil.cpu_percent(interval=WINDOW_S) / 100.0


class Patience:
    """`wait()` before each run: the idle share of the CPUs that it begins with, the smallest of the windows looked at.

    Once `total_s` of waiting are spent, one window is measured and the run begins whatever it says.
    """

    def __init__(
        self,
        *,
        total_s: float = PATIENCE_S,
        idle_share: Callable[[], float] = measured_idle_share,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = print,
    ) -> None:
        self._left_s, self._idle_share, self._clock, self._say = total_s, idle_share, clock, say
        self._told = False

    def wait(self) -> float:
        started = self._clock()
        quiet: list[float] = []
        while True:
            share = self._idle_share()
            quiet = [*quiet, share] if share >= IDLE_SHARE else []
            if len(quiet) >= QUIET_WINDOWS:
                self._left_s -= self._clock() - started
                return min(quiet)
            if self._clock() - started >= self._left_s:
                self._left_s = 0.0
                if not quiet and not self._told:
                    self._told = True
                    self._say(
                        f"the machine does not become idle: {share:.0%} of its CPUs are, {IDLE_SHARE:.0%} wanted"
                        f"{_busiest()}; idle_before says with each row how it was"
                    )
                return share


def _busiest() -> str:
    processes = list(psutil.process_iter(["pid", "name"]))
    for process in processes:
        _cpu_percent(process)
    time.sleep(0.2)
    busiest = sorted(((_cpu_percent(p), p) for p in processes), key=lambda pair: -pair[0])[:3]
    return "; busiest: " + ", ".join(f"{p.info['name']} ({p.info['pid']}) {percent:.0f}%" for percent, p in busiest)


def _cpu_percent(process: psutil.Process) -> float:
    try:
        return process.cpu_percent()
    except psutil.Error:
        return 0.0
