"""A change of turn without anything to load, as docs/turns.md defines it, and beside it what a role sees of it.

Two synthetic roles on the same slots, whose loads cost nothing. A step is a turn of each; what is timed is the change
from the one that makes the units to the one that takes them in two rounds. The way back, with the commit of the step
and its weights, is left out. Both are read off the spans of the workers, who share one clock:

    the change     from the begin of the wait in which the holder stopped, or from the moment on at which every rank of
                   the next could use its turn, if that is later, until the last of its ranks may work
    with hand-over from the end of the holder's work to the begin of the next one's: the units' way over the channel, by
                   the driver, lies in between
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
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


Span = dict[str, Any]


def changes(spans: Sequence[Span]) -> list[float]:
    """Seconds, one per turn of the train role: of its ranks those spans belong together that end closest."""
    by = partial(_of, spans)
    first, *others = [by(worker, "wait_turn") for worker in _workers(spans, "train")]
    leaving = [(by(worker, "offload"), by(worker, "wait_data")) for worker in _workers(spans, "rollout")]
    found = []
    for mine in first[WARM:]:
        ranks = [mine, *(min(spans, key=lambda span: abs(span["t1"] - mine["t1"])) for spans in others)]
        stopped = [_stopped(offloads, waits, before=mine["t1"]) for offloads, waits in leaving]
        if None not in stopped:
            allowed, wanted = max(span["t1"] for span in ranks), max(span["t0"] for span in ranks)
            found.append(allowed - max(wanted, *(at for at in stopped if at is not None)))
    return found


def _of(spans: Sequence[Span], worker: str, kind: str) -> list[Span]:
    return sorted((s for s in spans if (s["worker"], s["kind"]) == (worker, kind)), key=lambda span: float(span["t0"]))


def _workers(spans: Sequence[Span], role: str) -> list[str]:
    return sorted({span["worker"] for span in spans if span["role"] == role})


def _stopped(offloads: Sequence[Span], waits: Sequence[Span], *, before: float) -> float | None:
    """Begin of the wait in which a holder left its slots the last time."""
    left = max((span["t0"] for span in offloads if span["t0"] < before), default=None)
    if left is None:
        return None
    return max((span["t0"] for span in waits if span["t0"] <= left <= span["t1"]), default=None)


def with_hand_over(spans: Sequence[Span]) -> list[float]:
    """Seconds, one per step."""
    ends: dict[int, float] = {}
    begins: dict[int, float] = {}
    for span in spans:
        if span["kind"] != "compute":
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
            lines = [line for file in (run.folder / "spans").glob("*.jsonl") for line in file.read_text().splitlines()]
    spans = [span for span in map(json.loads, lines) if "kind" in span]
    name = "turn_change_one_pod" if pods == 1 else "turn_change_two_pods"
    return {**_figures(name, changes(spans)), **_figures(f"{name}_with_hand_over", with_hand_over(spans))}


def _figures(name: str, found: Sequence[float]) -> Mapping[str, float]:
    if len(found) < STEPS // 2:
        raise BenchError(f"{name}: {len(found)} changes of turn found in the spans of {STEPS} steps")
    ms = sorted(1e3 * seconds for seconds in found)
    return {name: statistics.median(ms), f"{name}_p90": statistics.quantiles(ms, n=10)[8]}


def one_pod() -> Mapping[str, float]:
    return measure(pods=1)


def two_pods() -> Mapping[str, float]:
    return measure(pods=2)


def rows() -> list[Row]:
    return [
        Row(name="turn_change_one_pod", unit="ms", better="lower", bar=2.0, subject=one_pod),
        Row(name="turn_change_one_pod_p90", unit="ms", better="lower", subject=one_pod),
        Row(name="turn_change_one_pod_with_hand_over", unit="ms", better="lower", subject=one_pod),
        Row(name="turn_change_two_pods", unit="ms", better="lower", bar=15.0, subject=two_pods),
        Row(name="turn_change_two_pods_p90", unit="ms", better="lower", subject=two_pods),
        Row(name="turn_change_two_pods_with_hand_over", unit="ms", better="lower", subject=two_pods),
    ]
