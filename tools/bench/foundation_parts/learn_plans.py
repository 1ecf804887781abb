"""`make learn-plans`: does CartPole learn as well while its plan is changed by hand every 10 steps as when it is not?

    make learn-plans                              5 seeds undisturbed, 3 of them again with changes
    make learn-plans ARGS="--seeds 8 --changed 5"

What is compared is what `make learn` looks at: the environment steps after which the mean return of the last 100
episodes has reached 475. Met where the changed seeds' mean is at most two standard deviations above the undisturbed
ones'. Slices that move begin new episodes, so that the mean return while it rises is that of more short episodes.

Not for: speed, or the pause of a change (its events have it).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from rlinf_api.errors import UserError
from rljob import plan as plans
from tools.bench.foundation_parts.runs import CARTPOLE, NEVER, RLJOB, Run
from tools.bench.harness import ROOT, BenchError

EVERY_STEPS: Final = 10
SLICES: Final = 4
TIMEOUT_S: Final = 300.0
LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    returns: tuple[float, ...]  # mean of the last 100 episodes, by step
    solved_at: float  # environment steps
    pauses_s: tuple[float, ...]  # of each change


def manifest(folder: Path) -> Path:
    """The example with room for another worker and another pod."""
    job = yaml.safe_load(CARTPOLE.read_text(encoding="utf-8"))
    spec = job["spec"]
    spec["flow"]["config"]["slices"] = SLICES
    spec["roles"][0]["workers"] = {"min": 1, "max": 3}
    spec["pools"][0] |= {"pods": {"min": 1, "max": 2}, "slots": {"perPod": 4, "cpu": "500m", "memory": "1Gi"}}
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    return file


def plan(envs: str, *, pods: int = 1, micro_batch: int = 1, depth: int = 2, stages: int = 4) -> dict[str, Any]:
    return {
        "pools": [{"name": "cpu", "pods": pods}],
        "workers": [
            {"role": "env", "count": len(envs.split(",")), "slots": envs},
            {"role": "rollout", "count": 1, "slots": "cpu/0/1"},
            {"role": "actor", "count": 1, "slots": "cpu/0/2"},
        ],
        "channels": [{"name": "trajectories", "microBatch": micro_batch, "depth": depth}],
        "cycles": [{"roles": ["env", "rollout"], "stages": stages}],
    }


TWO: Final = "cpu/0/0,cpu/0/3"  # as the first plan has it
CHANGES: Final[Sequence[dict[str, Any]]] = (
    plan(TWO, micro_batch=2),
    plan(TWO, depth=4),
    plan(TWO, stages=1),
    plan(f"{TWO},cpu/1/0", pods=2),
    plan(TWO, micro_batch=4, depth=3),
)


def learn(*, seed: int, steps: int, changed: bool) -> Learned:
    with tempfile.TemporaryDirectory(prefix="rlinf-learn-") as folder:
        work = Path(folder) / "work"
        command = [str(RLJOB), "run", str(manifest(Path(folder))), "--work-dir", str(work), "--seed", str(seed)]
        command += ["--set", f"spec.flow.steps={steps}"]
        said = Path(folder) / "said"
        with said.open("wb") as out:
            child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            if changed:
                _change(child, work, Path(folder) / "plan.yaml")
            child.wait(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BenchError(f"seed {seed} took more than {TIMEOUT_S:.0f} s") from None
        finally:
            if child.poll() is None:
                child.terminate()  # rljob ends its pods; a kill would leave them running
                child.wait(timeout=TIMEOUT_S)
        if child.returncode != 0:
            raise BenchError(f"seed {seed} ended with {child.returncode}: {said.read_text()[-500:]}")
        run = Run(answer={}, metrics=_lines(work / "metrics.jsonl"), started_at=0.0, folder=work)
        events = _lines(work / "events.jsonl")
    pauses = tuple(float(e["pause_s"]) for e in events if e["event"] == "plan-switched")
    return Learned(
        returns=tuple(float(m.get("return_mean", 0.0)) for m in run.metrics), solved_at=run.solved_at, pauses_s=pauses
    )


def _change(child: subprocess.Popen[bytes], work: Path, file: Path) -> None:
    """Another plan whenever 10 more steps are done and the one before is in force, until the run ends."""
    deadline, due = time.monotonic() + TIMEOUT_S, EVERY_STEPS
    changes = itertools.cycle(CHANGES)
    while child.poll() is None and time.monotonic() < deadline:
        if len(_lines(work / "lineage.jsonl")) < due:
            time.sleep(LOOK_S)
            continue
        file.write_text(json.dumps({"spec": next(changes)}), encoding="utf-8")
        try:
            is_in_force, says = plans.put(work, file, timeout_s=60.0)
        except UserError:  # the run has ended
            break
        if not is_in_force:
            if "ended before it" in says:
                break
            raise BenchError(f"a plan was not put in force: {says}")
        due = max(due + EVERY_STEPS, len(_lines(work / "lineage.jsonl")))


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make learn-plans", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="undisturbed seeds, 1 to N (default 5)")
    parser.add_argument("--changed", type=int, default=3, metavar="N", help="seeds with changes, 1 to N (default 3)")
    parser.add_argument(
        "--steps", type=int, default=97, metavar="N", help="steps of each run (default 97, the example's)"
    )
    options = parser.parse_args()
    if options.seeds < 2 or options.changed < 1:
        parser.error("wanted 2 or more undisturbed seeds and 1 or more with changes")
    scores: dict[bool, list[float]] = {False: [], True: []}
    for changed, count in ((False, options.seeds), (True, options.changed)):
        for seed in range(1, count + 1):
            try:
                found = learn(seed=seed, steps=options.steps, changed=changed)
            except BenchError as error:
                print(f"learn-plans: {error}", file=sys.stderr)
                return 2
            scores[changed].append(found.solved_at)
            when = f"return 475 after {found.solved_at:.0f} env steps" if found.solved_at < NEVER else "never at 475"
            pauses = f", {len(found.pauses_s)} changes, longest pause {max(found.pauses_s):.3f} s" if changed else ""
            print(f"learn-plans: seed {seed}: {when}, {found.returns[-1]:.1f} at the end{pauses}", flush=True)
    mean, spread = statistics.fmean(scores[False]), statistics.stdev(scores[False])
    with_changes = statistics.fmean(scores[True])
    met = with_changes <= mean + 2 * spread
    verdict = "met" if met else "missed"
    print(f"learn-plans: {verdict}: {with_changes:.0f} env steps with changes, {mean:.0f} +- {spread:.0f} without")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
