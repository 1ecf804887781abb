"""`make learn-plans`: does CartPole learn as well while its plan is changed by hand every 10 steps as when it is not?

    make learn-plans                              5 seeds, each undisturbed and with changes in turn
    make learn-plans ARGS="--seeds 8 --changed 8"

What is compared is what `make learn` looks at: the environment steps after which the mean return of the last 100
episodes has reached 475. Met where every changed seed gets there and their mean is at most two standard deviations
above the undisturbed ones'. An undisturbed seed that never gets there has no such number, and a mean and a spread that
left it out or made one up would allow anything: there is no reference then, and no verdict (exit code 2). The same
where a change is refused, fails or is not in force in time, and where fewer were in force than a change every 10 steps
makes: what was not changed shows nothing. Slices that move begin new episodes, so that the mean return while it rises
is that of more short episodes.

Not for: speed, or the pause of a change (its events have it).
"""

from __future__ import annotations

import argparse
import contextlib
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
from tools.bench.foundation_parts.runs import CARTPOLE, NEVER, RLJOB, SOLVED, Run
from tools.bench.harness import ROOT, BenchError

EVERY_STEPS: Final = 10
SLICES: Final = 4
DEVIATIONS: Final = 2.0
LEAST_CHANGES: Final = 0.75  # of one every 10 steps: steps that go by while a pod is prepared delay the next one
CHANGE_S: Final = 60.0  # until a plan is in force: a pod more takes 5 s on busy cores
END_S: Final = 30.0  # from the last step until the run is gone
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
                _change(child, work, Path(folder) / "plan.yaml", steps=steps)
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


def _change(child: subprocess.Popen[bytes], work: Path, file: Path, *, steps: int) -> None:
    """Another plan whenever 10 more steps are done and the one before is in force, until the run ends."""
    deadline, due = time.monotonic() + TIMEOUT_S, EVERY_STEPS
    changes = enumerate(itertools.cycle(CHANGES), start=1)
    while child.poll() is None and time.monotonic() < deadline:
        done = len(_lines(work / "lineage.jsonl"))
        if done < due:
            time.sleep(LOOK_S)
            continue
        number, change = next(changes)
        file.write_text(json.dumps({"spec": change}), encoding="utf-8")
        try:
            is_in_force, says = plans.put(work, file, timeout_s=CHANGE_S)
        except UserError as error:
            is_in_force, says = False, str(error)
        if not is_in_force:
            _await_end(child, work, steps=steps, why=f"change {number}, asked at step {done}, is not in force: {says}")
            break
        due = max(due + EVERY_STEPS, len(_lines(work / "lineage.jsonl")))


def _await_end(child: subprocess.Popen[bytes], work: Path, *, steps: int, why: str) -> None:
    """A change that the end of the run forestalled is none; any other that did not come into force is a failure."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if len(_lines(work / "lineage.jsonl")) >= steps:
            child.wait(timeout=END_S)
    if child.poll() != 0:
        raise BenchError(why)


def too_few(changes: int, *, steps: int) -> str:
    """Empty where about every 10 steps another plan came into force; none is due behind the last step.

    >>> too_few(7, steps=97)
    ''
    """
    due = (steps - 1) // EVERY_STEPS
    if due and changes >= LEAST_CHANGES * due:
        return ""
    return f"{changes} changes of plan came into force in {steps} steps, wanted about {due}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    code: int
    """0: met; 1: missed; 2: there is none."""
    says: str


def verdict(calm: Sequence[float], changed: Sequence[float]) -> Verdict:
    """What is said of the environment steps until the return of 475, by seed."""
    if never := [seed for seed, score in enumerate(calm, start=1) if score >= NEVER]:
        return Verdict(code=2, says=f"no verdict: undisturbed seeds {never} never reached {SOLVED:.0f}; try more steps")
    mean, spread = statistics.fmean(calm), statistics.stdev(calm)
    without = f"{mean:.0f} +- {spread:.0f} without in {len(calm)} seeds"
    if never := [seed for seed, score in enumerate(changed, start=1) if score >= NEVER]:
        return Verdict(code=1, says=f"missed: with changes seeds {never} never reached {SOLVED:.0f}; {without}")
    got, allowed = statistics.fmean(changed), mean + DEVIATIONS * spread
    said = f"{got:.0f} env steps with changes in {len(changed)} seeds, {without}: at most {allowed:.0f} wanted"
    return Verdict(code=int(got > allowed), says=f"{'missed' if got > allowed else 'met'}: {said}")


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make learn-plans", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="undisturbed seeds, 1 to N (default 5)")
    parser.add_argument("--changed", type=int, default=5, metavar="N", help="seeds with changes, 1 to N (default 5)")
    parser.add_argument(
        "--steps", type=int, default=97, metavar="N", help="steps of each run (default 97, the example's)"
    )
    options = parser.parse_args()
    if options.seeds < 2 or options.changed < 1 or options.steps <= EVERY_STEPS:
        parser.error(f"wanted 2 or more undisturbed seeds, 1 or more with changes, and more than {EVERY_STEPS} steps")
    return options


def main() -> int:
    options = parse()
    scores: dict[bool, list[float]] = {False: [], True: []}
    counts = {False: options.seeds, True: options.changed}
    turns = [(seed, changed) for seed in range(1, max(counts.values()) + 1) for changed in (False, True)]
    for seed, changed in turns:
        if seed > counts[changed]:
            continue
        try:
            found = learn(seed=seed, steps=options.steps, changed=changed)
            if changed and (few := too_few(len(found.pauses_s), steps=options.steps)):
                raise BenchError(few)
        except BenchError as error:
            print(f"learn-plans: no verdict: seed {seed}, {_how(changed)}: {error}", file=sys.stderr)
            return 2
        scores[changed].append(found.solved_at)
        when = f"return 475 after {found.solved_at:.0f} env steps" if found.solved_at < NEVER else "never at 475"
        pauses = f", {len(found.pauses_s)} changes, longest pause {max(found.pauses_s):.3f} s" if changed else ""
        last = f"{found.returns[-1]:.1f} at the end"
        print(f"learn-plans: seed {seed}, {_how(changed)}: {when}, {last}{pauses}", flush=True)
    said = verdict(scores[False], scores[True])
    print(f"learn-plans: {said.says}")
    return said.code


def _how(changed: bool) -> str:
    return "with changes" if changed else "undisturbed"


if __name__ == "__main__":
    sys.exit(main())
