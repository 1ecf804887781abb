"""Runs the rows one after the other, each as a job and as the script, and says which bars are met. What was run is a
line of build/learn-reasoning/results.jsonl and is not run again; the command goes on where it was stopped.

python -m tools.learn_reasoning [--minutes 75] [--rows addition-grpo-1 stale-2] [--steps 3]
python -m tools.learn_reasoning --publish        writes docs/learning/reasoning.{json,md,svg} of what was run
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
import yaml

from tools.learn_reasoning import plain, report
from tools.learn_reasoning.kills import kill_every
from tools.learn_reasoning.rows import NEAR, REWARDS, SIZES, Row, make_task, manifest, rows

ROOT: Final = Path(__file__).resolve().parents[2]
BUILD: Final = ROOT / "build" / "learn-reasoning"
JOB_TIMEOUT_S: Final = 1800.0
"""The most seconds of one job: 12 times what 150 steps take on 2 cores. One whose rollout is killed ten times had done
85 of 100 steps after 900 s, at a load of 25."""
Line = dict[str, Any]


def main(arguments: Sequence[str], *, build: Path = BUILD) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.learn_reasoning", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=75.0, help="begin no row after so long; go on by the same command"
    )
    parser.add_argument("--rows", nargs="+", default=[])
    parser.add_argument("--steps", type=int, help="fewer than a row has; is no proof, and is not kept")
    parser.add_argument("--publish", action="store_true")
    args = parser.parse_args(arguments)
    wanted = [row for row in rows() if not args.rows or row.name in args.rows]
    if unknown := set(args.rows) - {row.name for row in wanted}:
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in rows())}")
    path = build / "results.jsonl"
    done = {line["row"]: line for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    if args.publish:
        report.publish(list(done.values()), at=ROOT / "docs" / "learning", order=[row.name for row in rows()])
        return 0
    until = time.monotonic() + 60 * args.minutes
    for row in wanted:
        if args.steps:
            found = one(dataclasses.replace(row, steps=args.steps), build=build)
            print(report.sentence(found), flush=True)
        elif row.name not in done and time.monotonic() < until:
            done[row.name] = one(row, build=build)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[row.name]) + "\n")
            print(report.sentence(done[row.name]), flush=True)
    if args.steps:
        return 0
    missing = [row.name for row in wanted if row.name not in done]
    print(
        f"{len(wanted) - len(missing)} of {len(wanted)} rows were run"
        + (f", not {', '.join(missing)}" if missing else "")
    )
    return 0 if not missing and all(done[row.name]["ok"] for row in wanted) else 1


def one(row: Row, *, build: Path) -> Line:
    torch.set_num_threads(1)  # more wait for each other at every operation, where cores are shared
    folder = build / row.task
    make_task(row.task, folder)
    began = time.monotonic()
    curve = job(row, folder=folder, work_dir=build / "runs" / f"{row.name}-{row.steps}-{os.getpid()}")
    job_s, began = time.monotonic() - began, time.monotonic()
    script: list[float] = []
    if row.has_script:
        _, most, least = SIZES[row.task]
        script = plain.learn(
            folder, reward=REWARDS[row.task], steps=row.steps, learning_rate=row.learning_rate, seed=row.seed,
            most=most, least=least, kind=row.kind, delay=row.staleness, clip=row.clip,
        )  # fmt: skip
    return judged(row, curve, script) | {"job_s": round(job_s, 1), "script_s": round(time.monotonic() - began, 1)}


def judged(row: Row, curve: Sequence[float], script: Sequence[float]) -> Line:
    """Whether the bars are met: the row's own, and what the script learns, less NEAR.

    >>> row = Row(name="a", task="addition", steps=3, learning_rate=1.0, seed=1, last=2, bar=0.5)
    >>> [judged(row, [0.1, 0.5, 0.6], s)["ok"] for s in ([], [0.1, 0.55, 0.55], [0.1, 0.7, 0.7])]
    [True, True, False]
    """
    last = fmean(curve[-row.last :])
    wanted = row.bar
    line: Line = {"row": row.name, "first": curve[0], "last": last, "curve": [round(value, 4) for value in curve]}
    if script:
        line |= {"script_last": fmean(script[-row.last :]), "script": [round(value, 4) for value in script]}
        wanted = max(wanted, line["script_last"] - NEAR)
    ok = last <= curve[0] if row.falls else last >= wanted
    return line | {"wanted": "at most the first" if row.falls else round(wanted, 4), "ok": ok}


def job(row: Row, *, folder: Path, work_dir: Path) -> list[float]:
    work_dir.parent.mkdir(parents=True, exist_ok=True)
    file = work_dir.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(manifest(row, folder)))
    command = [sys.executable, "-m", "rljob", "run", str(file), "--work-dir", str(work_dir), "--output", "json"]
    killed = 0
    with work_dir.with_suffix(".err").open("w+") as said, subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, text=True
    ) as child:  # fmt: skip
        try:
            if row.kills_every:
                metrics = work_dir / "metrics.jsonl"
                killed = kill_every(row.kills_every, child=child, metrics=metrics, timeout_s=JOB_TIMEOUT_S)
            child.wait(JOB_TIMEOUT_S)
        except BaseException:
            child.terminate()  # rljob ends its pods; a kill would leave them running
            raise
        if child.returncode:
            said.seek(0)
            raise RuntimeError(f"row {row.name} ended with {child.returncode}: {said.read()[-2000:]}")
    if row.kills_every and killed < (wanted := row.steps // row.kills_every - 1):
        raise RuntimeError(
            f"row {row.name} lost {killed} rollouts, wanted {wanted} at least: it shows nothing; run it again"
        )
    lines = [json.loads(line) for line in (work_dir / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line[row.metric] for line in lines}
    return [steps[number] for number in range(1, row.steps + 1)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
