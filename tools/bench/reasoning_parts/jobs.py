"""Jobs of flow grpo that are measured, and what their metrics, spans and memory say."""

from __future__ import annotations

import dataclasses
import json
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from examples.grpo import addition
from tools.bench.foundation_parts import runs
from tools.bench.harness import ROOT, BenchError
from tools.learn_reasoning.rows import Row, make_task, manifest, rows

FOLDER: Final = ROOT / "build" / "bench" / "reasoning"
WARM: Final = 2
"""First steps, which load and allocate."""
TIMEOUT_S: Final = 900.0
SAMPLE_S: Final = 0.5
Metrics = Sequence[Mapping[str, Any]]
Spans = Sequence[Mapping[str, Any]]


def task(name: str) -> Path:
    """The model and rows of a task of learn-reasoning, made once."""
    folder = FOLDER / name
    make_task(name, folder)
    return folder


def large_task() -> Path:
    """Rows of `sevens` for a model of 92 million parameters that knows nothing."""
    folder = FOLDER / "large"
    if not (folder / "train.jsonl").exists():
        small = task("sevens")
        addition.model(hidden=768, layers=17).save_pretrained(folder / "base")
        addition.tokenizer().save_pretrained(folder / "base")
        (folder / "train.jsonl").write_bytes((small / "train.jsonl").read_bytes())
    return folder


def row_of(name: str, *, steps: int) -> Row:
    return dataclasses.replace(next(row for row in rows() if row.name == name), steps=steps)


@contextmanager
def ran(row: Row, folder: Path, *, change: Mapping[str, Any] | None = None) -> Iterator[runs.Run]:
    job = manifest(row, folder)
    changed(job, change or {})
    file = FOLDER / f"{row.name}.yaml"
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    with runs.run(file, timeout_s=TIMEOUT_S) as run:
        yield run


def changed(job: dict[str, Any], change: Mapping[str, Any]) -> None:
    """Fields of its spec, by their path: {"roles.0.config.maxResponseTokens": 4}."""
    for path, value in change.items():
        *way, last = path.split(".")
        at = job["spec"]
        for part in way:
            at = at[int(part)] if isinstance(at, list) else at.setdefault(part, {})
        at[last] = value


def step_s(metrics: Metrics) -> float:
    """A step's median, behind the first ones."""
    return statistics.median(float(line["step_s"]) for line in metrics[WARM:])


def tokens_per_busy_s(metrics: Metrics, *, worker: str = "rollout/0") -> float:
    """Tokens of a step over the time in which its rollout worked on them: all that is neither waiting nor weights.

    A step's account comes with the line behind it:

    >>> account = {"rollout/0": {"compute": 0.75, "other": 0.25, "wait_data": 9.0, "weights": 5.0, "window_s": 15.0}}
    >>> line = {"tokens_count": 100, "previous": {"account": account}}
    >>> tokens_per_busy_s([line, line, line, line])
    100.0
    """
    rates: list[float] = []
    for line, behind in zip(metrics[WARM:], metrics[WARM + 1 :], strict=False):
        account = behind["previous"]["account"][worker]
        rates.append(line["tokens_count"] / (account["compute"] + account.get("other", 0.0)))
    return statistics.median(rates)


def not_computing(metrics: Metrics) -> float:
    """Share of a step, in which all roles take turns on one slot, in which none of them computes: changes of turns, off
    the slot and back, weights, and what else there is.

    >>> account = {"rollout/0": {"compute": 0.5}, "reward/0": {"compute": 0.1}, "actor/0": {"compute": 0.3}}
    >>> line = {"step_s": 1.0, "previous": {"account": account}}
    >>> round(not_computing([line, line, line, line]), 3)
    0.1
    """
    shares: list[float] = []
    for line, behind in zip(metrics[WARM:], metrics[WARM + 1 :], strict=False):
        computed = sum(each.get("compute", 0.0) for each in behind["previous"]["account"].values())
        shares.append(1.0 - computed / line["step_s"])
    return statistics.median(shares)


def spans_of(run: runs.Run) -> list[dict[str, Any]]:
    lines = (line for file in (run.folder / "spans").glob("*.jsonl") for line in file.read_text().splitlines())
    return [span for span in map(json.loads, lines) if "kind" in span]


def commit_to_loaded_s(metrics: Metrics, spans: Spans) -> float:
    """From a commit until the engine has that step's weights.

    >>> told = [{"step": n, "time": 10.0 * n} for n in range(1, 5)]
    >>> commit_to_loaded_s(told, [{"role": "rollout", "kind": "weights", "step": n, "t1": 10.0 * n + 0.2}
    ...                           for n in range(1, 5)])
    0.2
    """
    loaded = _loaded(spans)
    found = [loaded[line["step"]] - float(line["time"]) for line in metrics[WARM:] if line["step"] in loaded]
    if not found:
        raise BenchError(f"no step of {len(metrics)} has weights behind its commit in the run's spans")
    return round(statistics.median(found), 6)


def _loaded(spans: Spans) -> dict[int, float]:
    """By the step that made them: when the rollout had set them, for the first time."""
    own = [span for span in spans if span.get("role") == "rollout" and span["kind"] == "weights"]
    return {int(span["step"]): float(span["t1"]) for span in sorted(own, key=lambda span: -float(span["t1"]))}


def commit_to_token_s(metrics: Metrics, spans: Spans) -> float:
    """From a commit to the end of the first step of the engine with that step's weights: the first new token.

    >>> told = [{"step": n, "time": 10.0 * n} for n in range(1, 5)]
    >>> made = [{"role": "rollout", "kind": kind, "step": n, "t0": 10.0 * n + a, "t1": 10.0 * n + b}
    ...         for n in range(1, 5) for kind, a, b in (("weights", 0.1, 0.2), ("compute", 0.2, 0.5))]
    >>> commit_to_token_s(told, made)
    0.5
    """
    loaded = _loaded(spans)
    own = (span for span in spans if span.get("role") == "rollout" and span["kind"] == "compute")
    computed = sorted((float(span["t0"]), float(span["t1"])) for span in own)
    found: list[float] = []
    for line in metrics[WARM:]:
        ready = loaded.get(line["step"])
        token = next((end for begin, end in computed if ready is not None and begin >= ready - 1e-3), None)
        if token is not None:
            found.append(token - line["time"])
    if not found:
        raise BenchError(f"no step of {len(metrics)} has weights and tokens behind its commit in the run's spans")
    return statistics.median(found)


class Memory:
    """What all processes below this one have in memory, over a run."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory", daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _look(self) -> None:
        own = psutil.Process()
        while not self._over.wait(SAMPLE_S):
            total = 0
            for child in own.children(recursive=True):
                try:
                    total += child.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.samples.append((time.time(), total))


def growth(samples: Sequence[tuple[float, int]], metrics: Metrics, *, first: int, last: int, around: int) -> float:
    """Per cent from the steps around `first` to the last `around` before `last`, each the median of what was seen.

    >>> told = [{"step": n, "time": float(n)} for n in range(1, 101)]
    >>> growth([(n + 0.5, 1000 + n) for n in range(100)], told, first=10, last=100, around=10)
    8.416
    """
    at = {line["step"]: float(line["time"]) for line in metrics}

    def seen(begin: int, end: int) -> float:
        inside = [rss for when, rss in samples if at[begin] <= when <= at[end]]
        if not inside:
            raise BenchError(f"nothing was seen of memory between steps {begin} and {end}; more steps are needed")
        return float(statistics.median(inside))

    before, after = seen(first, first + around), seen(last - around, last)
    return round(100.0 * (after / before - 1.0), 3)
