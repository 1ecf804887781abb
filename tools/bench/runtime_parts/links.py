"""Rows of `make bench-runtime` about links: one hop from worker to worker through Channel.put and take of a real job.

    stream_1kb_*        1 KB of plain bytes, one pod: latency of a receiver that sleeps, rate of a flood
    dict_64kb, dict_1mb a dict of 8 arrays, one pod
    dict_16mb           the same with 16 MB, against a memcpy of the same bytes in one process
    pods_64mb           one array of 64 MB between two pods, against raw gloo between two processes

References run with the C library set as a worker's (weights/copying.py): stores past the caches from 1 MiB on. With
its own setting the memcpy is a twelfth slower here, which would be a bar too low.

Each step of a job is a measurement and the first warms up; a run's value is the median of the others.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from rlinf_worker.weights import copying
from tools.bench.foundation_parts import runs
from tools.bench.harness import Reference, Row, command
from tools.bench.runtime_parts import raw_gloo

POD: Final = Path(__file__).parent.parent / "foundation_parts" / "hop.yaml"
PODS: Final = Path(__file__).parent / "hop_pods.yaml"
MIB: Final = 1 << 20


def _hop(manifest: Path, **config: int) -> Sequence[Mapping[str, float]]:
    chosen = [word for name, value in config.items() for word in ("--set", f"spec.flow.config.{name}={value}")]
    with runs.run(manifest, *chosen) as run:
        return run.metrics[1:]


def stream_1kb() -> Mapping[str, float]:
    steps = _hop(POD)
    names = {"stream_1kb_p50": "p50_us", "stream_1kb_p99": "p99_us", "stream_1kb_rate": "messages_per_s"}
    return {row: statistics.median(step[name] for step in steps) for row, name in names.items()}


def dicts_per_s(nbytes: int, flood: int) -> float:
    steps = _hop(POD, bytes=nbytes, tensors=8, paced=0, flood=flood)
    return statistics.median(step["messages_per_s"] for step in steps)


def dict_16mb() -> float:
    return dicts_per_s(16 * MIB, 100) * 16 * MIB / 1e9


def memcpy() -> float:
    """GB/s of copying 8 arrays of 2 MiB, warm."""
    here = [np.ones(2 * MIB, np.uint8) for _ in range(8)]
    there = [np.zeros(2 * MIB, np.uint8) for _ in range(8)]
    took = []
    for _ in range(40):
        began = time.perf_counter()
        for source, target in zip(here, there, strict=True):
            np.copyto(target, source)
        took.append(time.perf_counter() - began)
    return 16 * MIB / statistics.median(took) / 1e9


memcpy_16mb: Final = command(
    ["env", f"GLIBC_TUNABLES={copying.TUNABLES}", sys.executable, "-m", "tools.bench.runtime_parts.links"], value=float
)
"""In a process of its own: the C library reads its settings as it starts."""


def pods_64mb() -> float:
    return statistics.median(step["messages_per_s"] for step in _hop(PODS)) * 64 * MIB / 1e9


def gloo_64mb() -> float:
    return raw_gloo.send_rate(nbytes=64 * MIB, times=40) / 1e9


def rows() -> list[Row]:
    copy = Reference(name="numpy copyto in one process, GLIBC_TUNABLES as a worker's", measure=memcpy_16mb)
    gloo = Reference(name="torch 2.13 gloo send and recv, 2 processes", measure=gloo_64mb)
    small, large = partial(dicts_per_s, 64 << 10, 4000), partial(dicts_per_s, MIB, 1000)
    return [
        Row(name="stream_1kb_p50", unit="us", better="lower", bar=120, subject=stream_1kb),
        Row(name="stream_1kb_p99", unit="us", better="lower", bar=1000, subject=stream_1kb),
        Row(name="stream_1kb_rate", unit="msg/s", better="higher", bar=20_000, subject=stream_1kb),
        Row(name="dict_64kb", unit="msg/s", better="higher", bar=3000, subject=small),
        Row(name="dict_1mb", unit="msg/s", better="higher", bar=1500, subject=large),
        Row(name="dict_16mb", unit="GB/s", better="higher", bar_ratio=0.35, subject=dict_16mb, reference=copy),
        Row(name="pods_64mb", unit="GB/s", better="higher", bar_ratio=0.85, subject=pods_64mb, reference=gloo),
    ]


if __name__ == "__main__":
    print(memcpy())
