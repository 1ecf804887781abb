"""What `make bench-planner` measures: how long a plan takes, five roles with a cycle, finalists simulated.

make bench-planner
make bench-planner ARGS=--small       # 8 and 64 slots
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Final

from rlinf_scheduler.planner.problem import (
    Cost,
    CycleEdge,
    InBatches,
    InRounds,
    Option,
    PlanProblem,
    Pool,
    QueueEdge,
    RoleCosts,
    WeightsEdge,
)
from rlinf_scheduler.planner.search import Found, plan
from tools.bench.harness import BenchError, Row

BARS: Final = {8: 0.1, 64: 0.2, 512: 0.6, 1024: 1.0, 10_000: 5.0}
SMALL: Final = (8, 64)


def problem(slots: int) -> PlanProblem:
    """A step of 64 units, and of as many as there are slots where there are more."""
    costs = {"env": 0.5, "policy": 0.4, "reward": 3.0, "critic": 2.0, "train": 12.0}
    roles = tuple(
        RoleCosts(
            name=name, options=(Option(per_item_ms=Cost(ms), peak_mib=30_000),), per_batch_ms=Cost(0.3),
            resident_mib=10_000, offloaded_mib=500, load_ms=Cost(4), offload_ms=Cost(3),
            service=InRounds(sync_ms=Cost(2)) if name == "train" else InBatches(),
        )
        for name, ms in costs.items()
    )  # fmt: skip
    edges = (
        QueueEdge("policy", "reward"),
        QueueEdge("policy", "critic"),
        QueueEdge("reward", "train"),
        QueueEdge("critic", "train"),
    )
    return PlanProblem(
        roles=roles, edges=edges, cycles=(CycleEdge("env", "policy", 8, Cost(0.2)),), items=max(64, slots),
        pools=(Pool(name="gpu", slots=slots, memory_mib=80_000, roles=tuple(costs), slots_per_pod=8),),
        weights=WeightsEdge("train", "policy", Cost(5), Cost(5)),
    )  # fmt: skip


def _plan(slots: int) -> float:
    asked = problem(slots)
    begun = time.perf_counter()
    if not isinstance(plan(asked), Found):
        raise BenchError(f"no plan for {slots} slots")
    return time.perf_counter() - begun


def rows() -> list[Row]:
    return _rows(BARS)


def small_rows() -> list[Row]:
    return _rows(SMALL)


def _rows(sizes: Iterable[int]) -> list[Row]:
    return [
        Row(name=f"plan_{slots}_slots", unit="s", better="lower", bar=bar, subject=partial(_plan, slots))
        for slots, bar in ((slots, BARS[slots]) for slots in sizes)
    ]
