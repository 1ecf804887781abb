"""What `make bench-runtime` measures of channels: a queue of 1 KB units between three pods.

For: tools/bench/runtime.py, which puts these rows beside the others. One run is a job of five steps.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Final

from tools.bench.foundation_parts import runs
from tools.bench.harness import BenchError, Row
from tools.bench.runtime_parts import fan

FAN: Final = Path(__file__).parent / "fan.yaml"
UNITS: Final = 10_000  # of a step, as fan.yaml says


def queue(*settings: str) -> float:
    """Units a second, of both consumers in one window."""
    with runs.run(FAN, *settings) as run:
        steps = [line["previous"] for line in run.metrics[2:]]  # of the steps behind the first, which warms up
    taken = [sum(step[f"taken_{rank}"] for rank in range(fan.CONSUMERS)) for step in steps]
    if any(count != UNITS for count in taken):
        raise BenchError(f"units were lost or came twice: {taken} of {UNITS}")
    return statistics.median(fan.rate(step) for step in steps)


def rows() -> list[Row]:
    return [Row(name="queue_1kb_units", unit="units/s", better="higher", bar=5_000, subject=queue)]


if __name__ == "__main__":
    print(f"queue, 1 KB units, 2 producers, 2 consumers, 3 pods: {queue():,.0f} units/s")
