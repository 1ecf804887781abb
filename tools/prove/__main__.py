"""Proofs of the planner. Each problem's result is a line of build/prove/PART.jsonl; what is there is not made again.

python -m tools.prove exact [--count 200] [--slots 4] [--kind like-ppo] [--minutes 60]
python -m tools.prove two-stages [--count 600]
python -m tools.prove steady | shift | loop [--count N]
python -m tools.prove paper                           the RLinf paper's cases beside its figures
python -m tools.prove table                           writes the table of predictions; only where a rule has changed
python -m tools.prove predict drawn-00 drawn-13       real runs of these entries; docs/planner.md has a table
python -m tools.prove schedules [--count 200]         real jobs that are re-planned under faults; half a minute each
python -m tools.prove placements                      real runs: predictions by a profile, and regret; 2 hours
python -m tools.prove jobs [--at-once 2]              real runs of whole jobs, against fixed placements; 2 hours
python -m tools.prove cartpole                        real runs of a PPO job in turns and side by side
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from tools.prove import (
    against_runtime,
    cartpole,
    exact,
    loop,
    paper,
    placements,
    schedules,
    table,
    two_stages,
    whole_jobs,
)
from tools.resumable import Line, results

BUILD: Final = Path(__file__).resolve().parents[2] / "build" / "prove"
LOOPS: Final = {"steady": 20, "shift": 60, "loop": len(loop.ENTRIES)}
REAL: Final = ("schedules", "placements", "jobs", "predict", "cartpole")
"""Parts that run jobs."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.prove", description=__doc__)
    parser.add_argument("part", choices=("exact", "two-stages", "paper", *LOOPS, *REAL, "table"))
    parser.add_argument("names", nargs="*", help="workload entries, for predict")
    parser.add_argument("--count", type=int)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--kind", choices=tuple(exact.KINDS), default="tiny", help="exact: which problems")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so long; go on by the same command")
    parser.add_argument("--at-once", type=int, default=1, help="jobs, placements, schedules: real runs side by side")
    parser.add_argument("--modes", nargs="+", default=["Disaggregated", "Collocated"])
    parser.add_argument("--time-scale", type=float, default=1.0)
    args = parser.parse_args(arguments)
    if args.part == "table":
        table.write()
        return 0
    if args.part == "cartpole":
        return 0 if cartpole.show() else 1
    if args.part == "predict":
        against_runtime.show(args.names, modes=args.modes, time_scale=args.time_scale)
        return 0
    one: Callable[[int], Line]
    if args.part == "exact":
        one = partial(exact.one, slots=args.slots, kind=args.kind)
        summary, count = exact.summary, args.count or 200
    elif args.part == "paper":
        one, summary, count = paper.one, paper.summary, len(paper.CASES)
    elif args.part in LOOPS:
        one, summary, count = getattr(loop, args.part), loop.summary, args.count or LOOPS[args.part]
    elif args.part == "placements":
        one = partial(placements.one, time_scale=args.time_scale)
        summary, count = placements.summary, args.count or len(placements.ENTRIES)
    elif args.part == "jobs":
        one = partial(whole_jobs.one, time_scale=args.time_scale)
        summary, count = whole_jobs.summary, args.count or len(whole_jobs.ENTRIES)
    elif args.part == "schedules":
        one, summary, count = schedules.one, schedules.summary, args.count or 200
    else:
        one, summary, count = two_stages.one, two_stages.summary, args.count or 600
    name = f"exact-{args.kind}-{args.slots}" if args.part == "exact" else args.part
    found = results(
        BUILD / f"{name}.jsonl", one, count=count, until=time.monotonic() + 60 * args.minutes,
        at_once=args.at_once if args.part in REAL else 1, again=lambda line: line.get("void", 0) > 0,
    )  # fmt: skip
    print(summary(found))
    return 0 if len(found) == count and all(line["ok"] for line in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
