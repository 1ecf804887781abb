"""What `make bench-runtime` measures: links, channels, weights, turns, starts, changes of plan, recovery, a driver with
many agents, and what recording takes, on this machine.

Each part is a file of runtime_parts with its own rows; a row by name: `make bench-runtime ROWS="queue_1kb_units"`.
What needs an accelerator is in tests/gpu, which `make test-gpu` runs.
"""

from __future__ import annotations

from tools.bench.harness import Row
from tools.bench.runtime_parts import (
    channels,
    hops,
    joined,
    links,
    recovery,
    scale,
    spans,
    start,
    switch,
    thousands,
    turns,
    weights,
)

PARTS = (links, channels, hops, joined, weights, turns, start, switch, recovery, scale, thousands, spans)


def rows() -> list[Row]:
    return [row for part in PARTS for row in part.rows()]


def small_rows() -> list[Row]:
    """One of each kind that takes seconds."""
    return [*start.small_rows(), *hops.small_rows(), turns.rows()[0]]
