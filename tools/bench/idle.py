"""Waits until the machine does nothing else, as a run beside a build measures the build."""

import time
from collections.abc import Callable

import psutil

from tools.bench.harness import BenchError

IDLE_SHARE = 0.93
"""Of all CPUs together. A quiet machine with a desktop or a kubelet on it sits at 0.95 to 0.99."""
WINDOW_S = 1.0
QUIET_WINDOWS = 2
TIMEOUT_S = 900.0


def measured_idle_share() -> float:
    return 1.0 - psutil.cpu_percent(interval=WINDOW_S) / 100.0


def wait(
    *,
    idle_share: Callable[[], float] = measured_idle_share,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = print,
    timeout_s: float = TIMEOUT_S,
) -> float:
    """The smallest share of the windows that were quiet enough."""
    started = clock()
    quiet: list[float] = []
    told = False
    while len(quiet) < QUIET_WINDOWS:
        share = idle_share()
        quiet = [*quiet, share] if share >= IDLE_SHARE else []
        if quiet:
            continue
        if not told:
            say(f"waiting for an idle machine: {share:.0%} of the CPUs are idle, {IDLE_SHARE:.0%} wanted{_busiest()}")
            told = True
        if clock() - started > timeout_s:
            raise BenchError(
                f"the machine was not idle within {timeout_s:.0f} s: {share:.0%} of its CPUs are idle, "
                f"{IDLE_SHARE:.0%} wanted{_busiest()}; stop what runs, or give --busy "
                "(the results then say how busy it was)"
            )
    return min(quiet)


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
