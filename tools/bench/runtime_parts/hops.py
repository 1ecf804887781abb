"""What a unit of 1 ms takes of the CPU in each of three synthetic roles that it goes through, in one pod.

    unit_hop_cpu          rollout -> reward -> train by queues, 8 units of a micro-batch and 16 on their way
    unit_hop_cpu_by_one   the same with the contract's sizes: units one by one, 2 on their way
    trip_hop_cpu          env <-> rollout, a cycle of 4 units of one question each, then a queue to train

All processes of the job but `rljob` itself are counted, user and system time, from the end of a step that warms up to
the end of the last but one; timers stand for work, so what is counted is the runtime's, the role's loop included. By
CPU time, so a busy machine shows little more than a quiet one; how much waits to go along does depend on it.

    .venv/bin/python -m tools.bench.runtime_parts.hops 3     # runs, without the harness
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from tools.bench.foundation_parts.runs import RLJOB
from tools.bench.harness import ROOT, BenchError, Row

ROLES: Final = ("rollout", "reward", "train")
UNITS: Final = 1000  # of a step
TRIPS: Final = 250  # of each of the units of a cycle, in a step
IN_CYCLE: Final = 4
STEPS: Final = 6
WARM: Final = 2  # the step that starts the roles, and one more
LOOK_S: Final = 0.02
LASTS_S: Final = 240.0  # 20 s on two busy cores
BAR_MS: Final = 0.3


def job(*, micro_batch: int, units: int = UNITS, trips: int = 0, steps: int = STEPS) -> dict[str, Any]:
    """`trips`: round trips of a cycle between the first two roles; 0: a queue."""
    front, back, last = ROLES
    edges: list[dict[str, Any]] = [{"from": back, "to": last}, {"from": last, "to": front, "weights": True}]
    flow: dict[str, Any] = {"items": units, "edges": edges}
    if trips:
        flow["cycles"] = [{"roles": [front, back], "roundTrips": trips, "stages": units}]
    else:
        edges.insert(0, {"from": front, "to": back})
    sizes = {"microBatch": micro_batch, "depth": 2}
    flow["channels"] = {name: dict(sizes) for name in ("tickets", f"{front}-{back}", f"{back}-{last}")}
    return {
        "apiVersion": "rlinf.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "hops"},
        "spec": {
            "flow": {"name": "synthetic", "steps": steps, "config": flow},
            "roles": [{"name": role, "kind": "synthetic", "config": {"time": {"perItemMs": 1}}} for role in ROLES],
            "pools": [{"name": "cpu", "roles": list(ROLES), "pods": 1, "slots": {"perPod": 3}}],
        },
    }


def hops(wanted: Mapping[str, Any]) -> int:
    """Roles that units go through in a step, as often as they do."""
    flow = wanted["spec"]["flow"]["config"]
    through = 2 * flow["cycles"][0]["roundTrips"] + 1 if "cycles" in flow else len(ROLES)
    return int(flow["items"]) * through


def milliseconds(wanted: Mapping[str, Any], *, lasts_s: float = LASTS_S) -> float:
    """Milliseconds of CPU for a hop. BenchError where the job does not get through its steps."""
    steps = wanted["spec"]["flow"]["steps"]
    with tempfile.TemporaryDirectory(prefix="rlinf-hops-") as folder:
        file, work_dir = Path(folder) / "job.yaml", Path(folder) / "work"
        file.write_text(yaml.safe_dump(dict(wanted)), encoding="utf-8")
        command = [str(RLJOB), "run", str(file), "--work-dir", str(work_dir), "--output", "json"]
        said = Path(folder) / "said"
        with said.open("wb") as out, subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        ) as child:  # fmt: skip
            try:
                metrics, until = work_dir / "metrics.jsonl", time.monotonic() + lasts_s
                began = _at_step(WARM, child, metrics, until=until)
                ended = _at_step(steps - 1, child, metrics, until=until)
                child.wait(timeout=max(1.0, until - time.monotonic()))
            except (BenchError, subprocess.TimeoutExpired) as error:
                child.terminate()  # rljob ends its pods; a kill would leave them running
                child.wait(timeout=60)
                raise BenchError(f"{error}; it said: {said.read_text(errors='replace')[-500:]}") from error
    if began.pids != ended.pids:
        raise BenchError("a process of the job was started anew meanwhile: its CPU is not of the hops alone")
    return 1e3 * (ended.cpu_s - began.cpu_s) / ((ended.steps - began.steps) * hops(wanted))


class _Look:
    def __init__(self, steps: int, processes: list[psutil.Process]) -> None:
        times = {process.pid: process.cpu_times() for process in processes}
        self.steps, self.pids = steps, set(times)
        self.cpu_s = sum(used.user + used.system for used in times.values())


def _at_step(step: int, child: subprocess.Popen[bytes], metrics: Path, *, until: float) -> _Look:
    """Once so many steps have ended: at most LOOK_S later."""
    while True:
        steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if steps >= step:
            return _Look(steps, psutil.Process(child.pid).children(recursive=True))
        if child.poll() is not None or time.monotonic() > until:
            raise BenchError(f"rljob run is at step {steps}, wanted {step} (exit code {child.poll()})")
        time.sleep(LOOK_S)


def batches() -> float:
    return milliseconds(job(micro_batch=8))


def by_one() -> float:
    return milliseconds(job(micro_batch=1))


def trips() -> float:
    return milliseconds(job(micro_batch=1, units=IN_CYCLE, trips=TRIPS))


def few() -> float:
    """Seconds, for a look at whether it runs."""
    return milliseconds(job(micro_batch=8, units=50, steps=4))


def rows() -> list[Row]:
    return [
        Row(name="unit_hop_cpu", unit="ms of CPU", better="lower", bar=BAR_MS, subject=batches),
        Row(name="unit_hop_cpu_by_one", unit="ms of CPU", better="lower", bar=BAR_MS, subject=by_one),
        Row(name="trip_hop_cpu", unit="ms of CPU", better="lower", bar=BAR_MS, subject=trips),
    ]


def small_rows() -> list[Row]:
    return [Row(name="unit_hop_cpu", unit="ms of CPU", better="lower", subject=few)]


if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        print(json.dumps({row.name: row.subject() for row in rows()}), flush=True)
