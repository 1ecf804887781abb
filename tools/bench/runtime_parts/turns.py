"""A change of turn without anything to load: from the end of one role's work to the begin of the other's.

Two synthetic roles on the same slots, whose loads cost nothing. A step is a turn of each; what is timed is the change
from the one that makes the units to the one that takes them in two rounds, and so has work before the other is through.
The way back, with the commit of the step and its weights, is left out.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tools.bench.foundation_parts import runs
from tools.bench.harness import BenchError, Row

STEPS: Final = 100
WARM: Final = 5
UNITS: Final = 8


def job(*, pods: int) -> dict[str, Any]:
    config = {"time": {"perItemMs": 0.2, "perBatchMs": 0.2}, "memory": {"resident": 1, "peak": 2}}
    edges = [{"from": "rollout", "to": "train"}, {"from": "train", "to": "rollout", "weights": True}]
    rollout = {"name": "rollout", "kind": "synthetic", "workers": pods, "config": config}
    train = {"name": "train", "kind": "synthetic", "workers": pods, "config": {**config, "gang": True, "ranks": [pods]}}
    channels = {
        "tickets": {"microBatch": 1, "depth": UNITS},  # all at once: the role is not idle before it is through
        "rollout-train": {"microBatch": UNITS // 2 // pods, "depth": 2},
    }
    return {
        "apiVersion": "rlinf.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "turns"},
        "spec": {
            "flow": {
                "name": "synthetic",
                "steps": STEPS,
                "config": {"items": UNITS, "edges": edges, "channels": channels},
            },
            "roles": [rollout, train],
            "pools": [
                {"name": "cpu", "roles": ["rollout", "train"], "pods": pods, "slots": {"perPod": 1, "cpu": "100m"}}
            ],
            "placement": {"mode": "Collocated"},
        },
    }


def changes(spans: Iterator[dict[str, Any]]) -> list[float]:
    """Seconds, one per step."""
    ends: dict[int, float] = {}
    begins: dict[int, float] = {}
    for span in spans:
        if span.get("kind") != "compute":
            continue
        step = int(span["step"])
        if span["role"] == "rollout":
            ends[step] = max(ends.get(step, 0.0), float(span["t1"]))
        else:
            begins[step] = min(begins.get(step, float("inf")), float(span["t0"]))
    return [begins[step] - ends[step] for step in sorted(ends.keys() & begins.keys()) if step > WARM]


def measure(*, pods: int) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory(prefix="rlinf-turns-") as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(yaml.safe_dump(job(pods=pods)), encoding="utf-8")
        with runs.run(path) as run:
            lines = (line for file in (run.folder / "spans").glob("*.jsonl") for line in file.read_text().splitlines())
            found = changes(json.loads(line) for line in lines)
    if len(found) < STEPS // 2:
        raise BenchError(f"{len(found)} changes of turn found in the spans of {STEPS} steps")
    ms = sorted(1e3 * seconds for seconds in found)
    name = "turn_change_one_pod" if pods == 1 else "turn_change_two_pods"
    return {name: statistics.median(ms), f"{name}_p90": statistics.quantiles(ms, n=10)[8]}


def one_pod() -> Mapping[str, float]:
    return measure(pods=1)


def two_pods() -> Mapping[str, float]:
    return measure(pods=2)


def rows() -> list[Row]:
    return [
        Row(name="turn_change_one_pod", unit="ms", better="lower", bar=2.0, subject=one_pod),
        Row(name="turn_change_one_pod_p90", unit="ms", better="lower", subject=one_pod),
        Row(name="turn_change_two_pods", unit="ms", better="lower", bar=15.0, subject=two_pods),
        Row(name="turn_change_two_pods_p90", unit="ms", better="lower", subject=two_pods),
    ]
