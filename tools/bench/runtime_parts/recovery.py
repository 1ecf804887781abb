"""How long after a loss its part is back at work, beyond what its own start takes; each part once, in one job.

env, rollout, actor, agent and pod by the driver's event `recovered`: from the first sign of the loss until Begin, less
the start of the last worker. The driver, whom nobody tells about himself: from its kill until all workers are with the
next one, less the time from that process' begin until it listens.

    .venv/bin/python -m tools.bench.runtime_parts.recovery      # the table, without the harness
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tools.bench.harness import BenchError, Row
from tools.chaos import faults
from tools.chaos.faults import Fault
from tools.chaos.job import Job, JobError

SMALL: Final = {"numEnvs": 8, "slices": 2, "horizon": 16, "epochs": 1, "finalEpochs": 1}
STEPS: Final = 100_000  # more than there is time for: the job is killed at the end
SOME_STEPS: Final = 5  # between two losses: all is well again, and what is usual is known
BAR_S: Final = 3.0
WITHIN_S: Final = 120.0
PARTS: Final = {
    "env": Fault(kind="kill", target="env/0"),
    "rollout": Fault(kind="kill", target="rollout/0"),
    "actor": Fault(kind="kill", target="actor/0"),
    "agent": Fault(kind="kill", target="agent:sim"),
    "pod": Fault(kind="kill-pod", target="pod:learn"),
    "driver": Fault(kind="kill", target="driver"),
}


def recover() -> Mapping[str, float]:
    """recover_PART: seconds beyond its own start. recover_PART_in: seconds in all."""
    return {name: value for name, value in _recover().items() if isinstance(value, float)}


def _recover() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rlinf-recover-") as folder:
        try:
            with Job(Path(folder) / "job", seed=1, steps=STEPS, sets=SMALL) as job:
                _steps(job, SOME_STEPS)
                for name, fault in PARTS.items():
                    seconds, start_s, lost = _lose(job, fault)
                    found |= {f"recover_{name}": seconds - start_s, f"recover_{name}_in": seconds}
                    found[f"lost_{name}"] = lost
                    _steps(job, SOME_STEPS)
        except JobError as error:
            raise BenchError(str(error)) from error
    return found


def _lose(job: Job, fault: Fault) -> tuple[float, float, dict[str, float]]:
    """(seconds, of which its start, what the others lost by role)."""
    before, at = len(job.lines("events")), time.time()
    struck = faults.victims(job, fault)
    if not struck:
        raise BenchError(f"there is no process of {fault.target}")

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in job.lines("events")[before:] if event["event"] == kind]

    with faults.done(job, fault, struck):
        if fault.target == "driver":
            _until(job, lambda: bool(events("running")), what="all workers with the next driver")
            part = job.part("driver")
            listens = events("driver")[0]["time"]
            start_s = listens - part.process.create_time() if part is not None else 0.0
            return events("running")[0]["time"] - at, start_s, {}
        _until(job, lambda: bool(events("recovered")), what=f"recovery of {fault.target}")
    [event] = events("recovered")
    return event["seconds"], event["start_s"], event["lost_s"]


def _steps(job: Job, number: int) -> None:
    wanted = len(job.lines("lineage")) + number
    _until(job, lambda: len(job.lines("lineage")) >= wanted, what=f"{number} more steps")


def _until(job: Job, holds: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        if not job.is_running or time.monotonic() > deadline:
            raise BenchError(f"not within {WITHIN_S:.0f} s: {what}: {job.said[-1000:]}")
        job.parts()
        time.sleep(0.05)


def rows() -> list[Row]:
    return [
        Row(name=f"recover_{part}", unit="s beyond its start", better="lower", bar=BAR_S, subject=recover)
        for part in PARTS
    ]


if __name__ == "__main__":
    measured = _recover()
    print(f"{'part':<10} {'s':>7} {'beyond own start':>17}  others lost    (load {os.getloadavg()[0]:.1f})")
    for part in PARTS:
        seconds, beyond = measured[f"recover_{part}_in"], measured[f"recover_{part}"]
        print(f"{part:<10} {seconds:>7.2f} {beyond:>17.2f}  {json.dumps(measured[f'lost_{part}'])}")
