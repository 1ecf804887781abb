"""How fast workers are there: one of a light role and one with torch until they are ready, and 64 at once.

    .venv/bin/python -m tools.bench runtime --row worker_start_synthetic --busy

Times are read from the agent's log (a worker's process was started) and the driver's events (all workers are ready);
what comes before, driver and pods, is not a worker's. The 64 are timed from the start of `rljob run` until the first
step has committed, with one unit per worker and almost no work in it.
"""

from __future__ import annotations

import datetime
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from tools.bench.foundation_parts import runs
from tools.bench.harness import BenchError, Row

SLOTS: Final = 64
TINY: Final = {"time": {"perItemMs": 1}, "memory": {"resident": 1, "peak": 2}}


def job(slots: int) -> dict[str, Any]:
    """A chain of two roles that shares its slots out evenly."""
    half = max(1, slots // 2)
    edges = [{"from": "rollout", "to": "train"}, {"from": "train", "to": "rollout", "weights": True}]
    return {
        "apiVersion": "rlinf.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "start"},
        "spec": {
            "flow": {"name": "synthetic", "steps": 1, "config": {"items": slots, "edges": edges}},
            "roles": [
                {"name": name, "kind": "synthetic", "workers": half, "config": TINY} for name in ("rollout", "train")
            ],
            "pools": [
                {"name": "cpu", "roles": ["rollout", "train"], "slots": {"perPod": 2 * half, "cpu": "10m"}},
            ],
        },
    }


@contextmanager
def _run(slots: int) -> Iterator[runs.Run]:
    with tempfile.TemporaryDirectory(prefix="rlinf-start-") as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(yaml.safe_dump(job(slots)), encoding="utf-8")
        with runs.run(path) as run:
            yield run


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def ready_s(run: runs.Run) -> float:
    """From the start of the first worker's process until all are ready."""
    begun = [
        datetime.datetime.fromisoformat(line["time"]).timestamp()
        for log in (run.folder / "logs").glob("*/agent.log")
        for line in _lines(log)
        if line["message"] == "worker started"
    ]
    ready = [line["time"] for line in _lines(run.folder / "events.jsonl") if line["event"] == "running"]
    if not begun or not ready:
        raise BenchError(f"{run.folder} does not say when workers were started and ready")
    return float(ready[0]) - min(begun)


def light() -> float:
    with _run(2) as run:
        return ready_s(run)


def with_torch() -> float:
    with runs.run(runs.CARTPOLE, "--set", "spec.flow.steps=1") as run:
        return ready_s(run)


def many() -> Mapping[str, float]:
    with _run(SLOTS) as run:
        return {"workers_64_ready": ready_s(run), "workers_64_first_step": run.metrics[0]["time"] - run.started_at}


def rows() -> list[Row]:
    return [
        Row(name="worker_start_synthetic", unit="s", better="lower", bar=0.6, subject=light),
        Row(name="worker_start_torch", unit="s", better="lower", bar=4, subject=with_torch),
        Row(name="workers_64_ready", unit="s", better="lower", subject=many),
        Row(name="workers_64_first_step", unit="s", better="lower", bar=30, subject=many),
    ]


def small_rows() -> list[Row]:
    return [Row(name="worker_start_synthetic", unit="s", better="lower", bar=0.6, subject=light, runs=1)]
