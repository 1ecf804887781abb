"""`make chaos`: ten minutes of random faults over jobs that learn CartPole, and a verdict.

    make chaos                                       600 s, a new seed (printed)
    make chaos ARGS="--seconds 60 --seed 7"
    make chaos ARGS="--schedules 200"                jobs of other shapes (schedules.py); goes on where it was stopped

First 5 undisturbed seeds, then jobs under faults, one after the other, until the time is up; the last one is let come
to its end. Every third job has warm spares. Exit code 1 where something does not hold; the JSON lies at
build/chaos/SEED.json, what failing jobs left beside it. The verdict says which faults it does not speak of, as the
machine does not allow them or as none came up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.chaos import plans, rounds, schedules, verdict
from tools.chaos.job import JobError, lacking
from tools.chaos.rounds import Round
from tools.resumable import results
from tools.running_job import ROOT

EVERY_WITH_SPARES = 3
STEPS = 97  # as examples/cartpole has: it learns to the top within them


def say(text: str) -> None:
    print(f"chaos: {text}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, metavar="N", help="of faults (default 600)")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="of the faults (default: a new one)")
    parser.add_argument("--baseline", type=int, default=5, metavar="N", help="undisturbed seeds (default 5)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of each job (default {STEPS})")
    parser.add_argument("--schedules", type=int, default=0, metavar="N", help="of jobs of other shapes, instead")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="begin no schedule after so long")
    parser.add_argument("--at-once", type=int, default=3, metavar="N", help="schedules (default 3: they wait a lot)")
    options = parser.parse_args()
    if options.seconds <= 0 or options.baseline < 1 or options.steps <= rounds.FIRST_STEP:
        parser.error(f"wanted --seconds above 0, --baseline of 1 or more, --steps above {rounds.FIRST_STEP}")
    return options


def main() -> int:
    options = parse()
    if options.schedules:
        return _schedules(options)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    folder = Path(tempfile.mkdtemp(prefix="rlinf-chaos-"))
    kept = ROOT / "build" / "chaos"
    say(f"seed {seed}, load {os.getloadavg()[0]:.1f}; again with: make chaos ARGS='--seed {seed}'")
    try:
        calm = _calm(folder, options)
        found, problems = _chaos(folder, options, seed=seed, calm=calm, kept=kept)
    except JobError as error:
        say(f"FAILED: {error}")
        sockets = shutil.ignore_patterns("*.sock")
        shutil.copytree(folder, kept / f"{seed}-failed", dirs_exist_ok=True, ignore=sockets)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if said := verdict.learning([verdict.result(r) for r in found], [verdict.result(r) for r in calm]):
        problems.append(said)
    if said := verdict.changes(found):
        problems.append(said)
    _tell(found, calm)
    _write(kept / f"{seed}.json", found, calm, seed=seed, problems=problems)
    for problem in problems:
        say(f"FAILED: {problem}")
    for text in verdict.scope(found, lacking()):
        say(f"not seen: {text}")
    say("all held" if not problems else f"{len(problems)} things did not hold")
    return 1 if problems else 0


def _schedules(options: argparse.Namespace) -> int:
    found = results(
        schedules.KEPT / "schedules.jsonl", schedules.one, count=options.schedules,
        until=time.monotonic() + 60 * options.minutes, at_once=options.at_once,
    )  # fmt: skip
    say(schedules.summary(found))
    return 0 if len(found) == options.schedules and all(line["ok"] for line in found) else 1


def _calm(folder: Path, options: argparse.Namespace) -> list[Round]:
    found = []
    for number in range(1, options.baseline + 1):
        one = rounds.undisturbed(folder / f"calm-{number}", seed=number, steps=options.steps, sets={})
        if problems := verdict.problems(one, calm=one):
            raise JobError(f"undisturbed seed {number}: {'; '.join(problems)}")
        say(f"undisturbed seed {number}: return {verdict.result(one):.1f} in {one.seconds:.1f} s")
        found.append(one)
    return found


def _chaos(
    folder: Path, options: argparse.Namespace, *, seed: int, calm: list[Round], kept: Path
) -> tuple[list[Round], list[str]]:
    until = time.monotonic() + options.seconds
    found: list[Round] = []
    problems: list[str] = []
    while not found or time.monotonic() < until:
        number = len(found) + 1
        one = rounds.disturbed(
            folder / f"chaos-{number}", seed=number, steps=options.steps, sets={}, until=until, say=say,
            chance=random.Random(f"{seed}/{number}"),  # what a job meets does not depend on how long others took
            spares=number % EVERY_WITH_SPARES == EVERY_WITH_SPARES - 1,
        )  # fmt: skip
        held = verdict.problems(one, calm=calm[0])  # keys of units do not depend on the job's seed
        problems += [f"job {number}: {text}" for text in held]
        if held:
            shutil.copytree(folder / f"chaos-{number}", kept / f"{seed}-job-{number}", dirs_exist_ok=True)
        branches = max((line["branch"] for line in one.lineage), default=0)
        ended, result = one.answer.get("condition", "nothing"), verdict.result(one)
        say(
            f"job {number}{' (with spares)' if one.spares else ''}: {ended} after {one.seconds:.0f} s and "
            f"{len(one.done)} faults, {branches} branches, return {result:.1f}"
        )
        found.append(one)
    return found, problems


def by_kind(found: list[Round]) -> dict[str, list[float]]:
    """Seconds until recovered, by what was done to whom."""
    kinds: dict[str, list[float]] = {}
    for entry in (entry for one in found for entry in one.done):
        key = f"{entry.fault.kind} {entry.fault.target.partition('/')[0]}"
        seconds = kinds.setdefault(key, [])
        if entry.recovered_s is not None:
            seconds.append(entry.recovered_s - entry.fault.lasts_s)
    return kinds


def _tell(found: list[Round], calm: list[Round]) -> None:
    say("from a fault (from its end, where it lasts) until two steps have committed:")
    print(f"{'fault':<22} {'times':>5} {'median s':>9} {'worst s':>8}")
    for kind, seconds in sorted(by_kind(found).items()):
        number = sum(f"{e.fault.kind} {e.fault.target.partition('/')[0]}" == kind for one in found for e in one.done)
        times = f"{statistics.median(seconds):>9.1f} {max(seconds):>8.1f}" if seconds else f"{'-':>9} {'-':>8}"
        print(f"{kind:<22} {number:>5} {times}")
    recovered = [event for one in found for event in one.events if event["event"] == "recovered"]
    if recovered:
        say("as the driver saw it (from the first sign until at work; what each other role waited for it, in all):")
        print(f"{'who':<22} {'times':>5} {'median s':>9} {'worst s':>8} {'beyond own start':>16}  others lost")
    for who in sorted({event["who"] for event in recovered}):
        events = [event for event in recovered if event["who"] == who]
        seconds = [event["seconds"] for event in events]
        roles = sorted({role for event in events for role in event["lost_s"]})
        lost = ", ".join(f"{role} {sum(e['lost_s'].get(role, 0.0) for e in events):.1f} s" for role in roles)
        beyond = statistics.median(event["seconds"] - event["start_s"] for event in events)
        shown = f"{statistics.median(seconds):>9.1f} {max(seconds):>8.1f} {beyond:>16.1f}"
        print(f"{who:<22} {len(events):>5} {shown}  {lost}")
    asked = plans.counts([ask.as_json() for one in found for entry in one.done for ask in entry.asks])
    pauses = [event["pause_s"] for one in found for event in one.events if event["event"] == "plan-switched"]
    said = ", ".join(f"{count} {outcome}" for outcome, count in asked.items())
    say(f"changes of plan: {said}" + (f"; longest pause {max(pauses):.2f} s" if pauses else ""))
    taken = sum(event["event"] == "spare-taken" for one in found for event in one.events)
    say(f"{sum(one.spares for one in found)} of {len(found)} jobs with warm spares, which took {taken} places")
    results = [verdict.result(one) for one in found]
    say(
        f"return under chaos {statistics.fmean(results):.1f} in {len(found)} jobs; undisturbed "
        + ", ".join(f"{verdict.result(one):.1f}" for one in calm)
    )
    versions = sum(len(one.checksums) for one in found)
    say(f"{versions} versions of weights (by view), each with one checksum in all logs" if versions else "no checksums")


def _write(path: Path, found: list[Round], calm: list[Round], *, seed: int, problems: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    jobs: list[dict[str, Any]] = [
        {
            "seed": one.seed,
            "seconds": round(one.seconds, 1),
            "condition": one.answer.get("condition"),
            "return": round(verdict.result(one), 2),
            "versions": len(one.checksums),
            "spares": one.spares,
            "faults": [entry.as_json() for entry in one.done],
            "recovered": [event for event in one.events if event["event"] == "recovered"],
        }
        for one in found
    ]
    text = {
        "seed": seed,
        "load": os.getloadavg(),
        "undisturbed": [round(verdict.result(one), 2) for one in calm],
        "jobs": jobs,
        "not_seen": verdict.scope(found, lacking()),
        "problems": problems,
    }
    path.write_text(json.dumps(text, indent=1), encoding="utf-8")
    say(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
