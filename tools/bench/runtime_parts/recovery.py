"""How long after a loss its part is back at work, beyond what its own start takes; each part once, in one job.

env, rollout, actor, agent and pod by the driver's event `recovered`: from the first sign of the loss until Begin, less
the start of the last worker. The driver: from its kill until all workers are with the next one, less the time from that
process' begin until it listens; what the others lost meanwhile its successor tells, in the same event.

With warm spares, in a job of their own, each role once: from the kill until a step with it has committed.

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
SPARE_BAR_S: Final = 5.0
WITHIN_S: Final = 120.0
SPARED: Final = ("env", "rollout", "actor")
PARTS: Final = {
    "env": Fault(kind="kill", target="env/0"),
    "rollout": Fault(kind="kill", target="rollout/0"),
    "actor": Fault(kind="kill", target="actor/0"),
    "agent": Fault(kind="kill", target="agent:sim"),
    "pod": Fault(kind="kill-pod", target="pod:learn"),
    "driver": Fault(kind="kill", target="driver"),
}


def recover() -> Mapping[str, float]:
    """recover_PART: seconds beyond its own start. recover_PART_in: seconds in all. recover_driver_lost: what the other
    roles waited for a driver, all workers together."""
    found = _recover()
    lost = {"recover_driver_lost": float(sum(found["lost_driver"].values()))}
    return lost | {name: value for name, value in found.items() if isinstance(value, float)}


def recover_spare() -> Mapping[str, float]:
    """recover_spare: seconds, of the role that took longest; recover_spare_ROLE: of each."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="rlinf-recover-") as folder:
        try:
            with Job(Path(folder) / "job", seed=1, steps=STEPS, spares=True, sets=SMALL) as job:
                _steps(job, SOME_STEPS)
                for role in SPARED:
                    found[f"recover_spare_{role}"] = _lose_with_spare(job, role)
        except JobError as error:
            raise BenchError(str(error)) from error
    return found | {"recover_spare": max(found.values())}


def _lose_with_spare(job: Job, role: str) -> float:
    """Killed when a spare is warm and all is well; it must come back from that one. Its recovery is told when a step in
    which it worked again has committed."""
    _until(job, lambda: any(e["role"] == role for e in _events(job, "spare-warm")), what=f"a warm spare of {role}")
    _steps(job, SOME_STEPS)
    at, fault = time.time(), Fault(kind="kill", target=f"{role}/0")
    event = _strike(job, fault)
    if (event["who"], event["spares"]) != (fault.target, 1):
        raise BenchError(f"{fault.target} was to come back from a warm spare: {event['message']}")
    return float(event["time"]) - at


def _events(job: Job, kind: str, *, since: int = 0) -> list[dict[str, Any]]:
    return [event for event in job.lines("events")[since:] if event["event"] == kind]


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
    event = _strike(job, fault)
    if fault.target != "driver":
        return event["seconds"], event["start_s"], event["lost_s"]
    part = job.part("driver")
    listens, runs = (_events(job, kind, since=before)[0]["time"] for kind in ("driver", "running"))
    start_s = listens - part.process.create_time() if part is not None else 0.0
    return runs - at, start_s, event["lost_s"]


def _strike(job: Job, fault: Fault) -> dict[str, Any]:
    """The event by which the driver tells that all are back at work."""
    before, struck = len(job.lines("events")), faults.victims(job, fault)
    if not struck:
        raise BenchError(f"there is no process of {fault.target}")
    with faults.done(job, fault, struck):
        _until(job, lambda: bool(_events(job, "recovered", since=before)), what=f"recovery of {fault.target}")
    [event] = _events(job, "recovered", since=before)
    return event


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
    ] + [
        Row(name="recover_driver_lost", unit="s of the others", better="lower", subject=recover),
        Row(name="recover_spare", unit="s", better="lower", bar=SPARE_BAR_S, subject=recover_spare),
    ]


if __name__ == "__main__":
    measured = _recover()
    print(f"{'part':<10} {'s':>7} {'beyond own start':>17}  others lost    (load {os.getloadavg()[0]:.1f})")
    for part in PARTS:
        seconds, beyond = measured[f"recover_{part}_in"], measured[f"recover_{part}"]
        print(f"{part:<10} {seconds:>7.2f} {beyond:>17.2f}  {json.dumps(measured[f'lost_{part}'])}")
    print("from a warm spare, until the next step: " + json.dumps({k: round(v, 2) for k, v in recover_spare().items()}))
