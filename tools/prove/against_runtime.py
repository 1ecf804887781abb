"""Predicted and measured steps of workload entries under their first plans, on this machine.

Local mode, synthetic roles. The prediction is of the entry's own numbers, which the runtime is tested to keep within 2%
(tests/integration/test_synthetic.py), and of the constants in problems.py for what moving units and turns costs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rlinf_api.job import RLJobSpec
from rlinf_api.plan import JobRef, RLPlanSpec
from rlinf_scheduler.planner import spec
from rlinf_scheduler.planner.initial import initial
from rlinf_scheduler.planner.simulate import simulate
from tools import workloads
from tools.prove import problems

STEPS, WARM = 8, 3


def compare(name: str, *, mode: str, time_scale: float, items: int | None) -> str:
    entry = workloads.entries()[name]
    manifest = workloads.job(entry, mode=mode, steps=STEPS, items=items, time_scale=time_scale)
    job = RLJobSpec.model_validate(manifest["spec"])
    plan = initial(job, job=JobRef(name=name, uid="u"))
    if not isinstance(plan, RLPlanSpec):
        return f"| {name} | {mode} | refused: {plan} |"
    problem = problems.of_entry(
        entry, items=items, time_scale=time_scale, lag_ms=0.0, hand_over_ms=problems.HAND_OVER_MS,
        turn_ms=problems.TURN_MS, steps=range(WARM + 1, STEPS + 1),
    )  # fmt: skip
    predicted = simulate(problem, spec.read(problem, plan, job), steps=STEPS - WARM).period_ms
    with tempfile.TemporaryDirectory(prefix="predict-") as folder:
        answer = workloads.run(manifest, Path(folder))
        lines = (Path(folder) / "work" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    commits = [1e3 * json.loads(line)["time"] for line in lines][WARM - 1 :]
    steps = [b - a for a, b in pairwise(commits)]
    measured = statistics.fmean(steps)
    off = predicted / measured - 1
    return (
        f"| {name} | {mode} | {predicted:.0f} | {measured:.0f} ({min(steps):.0f} to {max(steps):.0f}) | {off:+.1%} | "
        f"{answer['condition']} |"
    )


def show(names: Sequence[str], *, modes: Sequence[str], time_scale: float, items: int | None = None) -> None:
    print("| entry | mode | predicted ms | measured ms | off | ended |")
    print("|---|---|---|---|---|---|")
    for name in names:
        for mode in modes:
            print(compare(name, mode=mode, time_scale=time_scale, items=items), flush=True)
