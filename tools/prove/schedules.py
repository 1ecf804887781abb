"""Proof `schedules`: random schedules of drift, pins, approvals, and deaths of every process, over a job that the
scheduler profiles and places anew. Each ends with all steps, in one consistent plan.

python -m tools.prove schedules --count 200

A schedule is one job in local mode (`rljob run`), whose workload, drift, pins and faults are drawn by its seed.
Operator, scheduler and kubelet are one process there: they die and stand still together, and are started again in the
same work dir; apart from each other they die in tests/cluster. A fault strikes when a step commits, or in a phase of a
plan: as it is prepared, is ready, comes into force, has been changed to. What a failing one left lies in
build/prove/schedule-SEED.

| what | does |
|---|---|
| kill, pause | a worker, an agent, the driver: SIGKILL; or SIGSTOP, and SIGCONT 1 to 5 s later |
| kill-control, pause-control | `rljob run` itself; killed it is started again |
| pin-first, rollback, unpin, set | as a person would: `rljob plan` |
| approve | the newest plan that waits, in jobs with `apply: OnApproval` |

What must hold at the end is `problems()`.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from rlinf_api.errors import UserError
from rlinf_scheduler.planner import spec
from rlinf_scheduler.planner.simulate import simulate
from rljob import plan as verbs
from tools.prove.world import World
from tools.running_job import RunningJob, send, surviving
from tools.workloads import ROOT, entries, job

ENTRIES: Final = ("drawn-00", "drawn-03", "drawn-11", "drawn-14", "drawn-02", "drawn-21", "drawn-26", "drawn-29")
"""Jobs of two to four slots, with and without a cycle, staleness, two pools."""
ITEMS: Final = 16
STEP_S: Final = 0.6  # of a step, about: a fifth of it is what the runtime's own work takes, ten jobs a core at once
STEPS: Final = 40
FAULTS: Final = (3, 6)
PHASES: Final = ("plan-prepare", "plan-prepared", "plan", "plan-switched")
ACTS: Final = (
    ("kill", 6), ("pause", 4), ("kill-control", 2), ("pause-control", 2), ("pin-first", 2), ("rollback", 1),
    ("unpin", 3), ("set", 2),
)  # fmt: skip
END_S: Final = 240.0
"""How long the whole job may take: 24 s of steps, starts, and every fault's way back."""
ASK_S: Final = 2.0  # of a verb: what it asked for goes on without it
LOOK_S: Final = 0.05
KEPT: Final = ROOT / "build" / "prove"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """`at`: a step that has committed, or the n-th time that a phase is come to."""

    what: str
    target: str
    at: int
    phase: str = ""
    after_s: float = 0.0
    lasts_s: float = 0.0

    def __str__(self) -> str:
        where = f"{self.phase} {self.at}" if self.phase else f"step {self.at}"
        return f"{self.what} {self.target} at {where} + {self.after_s:.2f} s".replace("  ", " ")


@dataclass(slots=True)
class Schedule:
    seed: int
    strikes: list[Strike] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def drawn(cls, seed: int, folder: Path) -> Schedule:
        rng = random.Random(f"schedule {seed}")
        entry = entries()[rng.choice(ENTRIES)]
        roles = [role["name"] for role in entry["roles"]]
        if rng.random() < 0.5:
            factor = rng.choice([0.5, 1.5, 2.0])
            entry = {**entry, "drift": {"step": rng.randint(8, 25), "role": rng.choice(roles), "factor": factor}}
        truth = World.of_entry({**entry, "items": ITEMS}, steps=STEPS)
        alone = truth.begin()
        period_ms = simulate(truth.truth, spec.read(truth.truth, alone, truth.job)).period_ms
        made = job(entry, steps=STEPS, seed=seed + 1, items=ITEMS, time_scale=1e3 * STEP_S / period_ms)
        made["spec"]["checkpoint"] = {"uri": f"file://{folder}/checkpoints", "everySteps": 5}
        made["spec"]["failurePolicy"] = {"maxRestarts": 10_000}
        if rng.random() < 0.25:
            made["spec"]["placement"]["apply"] = "OnApproval"
        return cls(seed, sorted(_strikes(rng, roles, made), key=lambda s: (s.phase, s.at)), made)


def _strikes(rng: random.Random, roles: list[str], made: dict[str, Any]) -> Iterator[Strike]:
    what, weights = zip(*ACTS, strict=True)
    for _ in range(rng.randint(*FAULTS)):
        act = rng.choices(what, weights=weights)[0]
        target = rng.choice([*roles, *roles, "agent", "driver", "driver"]) if act in ("kill", "pause") else ""
        phase = rng.choice(PHASES) if rng.random() < 0.5 else ""
        at = rng.randint(1, 2) if phase else rng.randint(2, STEPS - 4)
        yield Strike(
            what=act, target=target, at=at, phase=phase, after_s=round(rng.uniform(0, 0.3), 2),
            lasts_s=round(rng.uniform(1, 5), 1) if act.startswith("pause") else 0.0,
        )  # fmt: skip
    if made["spec"]["placement"].get("apply") == "OnApproval":
        yield from (Strike(what="approve", target="", at=step) for step in (10, 22))


def one(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=f"schedule-{seed}-") as name:
        folder = Path(name)
        schedule = Schedule.drawn(seed, folder)
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(schedule.manifest), encoding="utf-8")
        run = RunningJob(file, folder)
        began, done = time.monotonic(), list[str]()
        try:
            _go_through(run, schedule, done)
            said = problems(run)
        finally:
            left = run.close()
        said += [f"left alive: {one}" for one in left] if not said else []
        plans = [p["spec"]["reason"]["code"] for p in sorted(run.objects("rlplan"), key=_revision)]
        line = {
            "seed": seed, "ok": not said, "name": run.name, "seconds": round(time.monotonic() - began, 1),
            "strikes": done, "plans": plans, "starts": run.starts, "problems": said,
        }  # fmt: skip
        if said:
            line["said"] = run.said[-3000:]
            run.keep(KEPT / f"schedule-{seed}")
        return line


def _go_through(run: RunningJob, schedule: Schedule, done: list[str]) -> None:
    """Until the job ends; a strike that never came up (its phase was not come to) is not in `done`."""
    until = time.monotonic() + END_S
    waiting = list(schedule.strikes)
    due: list[tuple[float, Strike]] = []
    frozen: list[tuple[float, psutil.Process]] = []
    while run.process.poll() is None and time.monotonic() < until:
        now = time.monotonic()
        committed = max((line["step"] for line in run.lines("lineage")), default=0)
        events = [event["event"] for event in run.lines("events")]
        for strike in list(waiting):
            if (events.count(strike.phase) if strike.phase else committed) >= strike.at:
                waiting.remove(strike)
                due.append((now + strike.after_s, strike))
        for at, strike in list(due):
            if now >= at:
                due.remove((at, strike))
                done.append(str(strike))
                frozen += [(now + strike.lasts_s, process) for process in _strike(run, strike)]
        for at, process in list(frozen):
            if now >= at:
                frozen.remove((at, process))
                send(process, signal.SIGCONT)
        time.sleep(LOOK_S)
    for _, process in frozen:
        send(process, signal.SIGCONT)


def _strike(run: RunningJob, strike: Strike) -> list[psutil.Process]:
    """Who is frozen by it."""
    if strike.what == "kill-control":
        run.again()
        return []
    if strike.what == "pause-control":
        process = psutil.Process(run.process.pid)
        send(process, signal.SIGSTOP)
        return [process]
    if strike.what in ("kill", "pause"):
        struck = [part.process for part in run.of(strike.target)]
        for process in struck[:1]:
            send(process, signal.SIGKILL if strike.what == "kill" else signal.SIGSTOP)
        return struck[:1] if strike.what == "pause" else []
    with contextlib.suppress(UserError):  # the run starts again, has ended, or has no such plan: a person is told so
        _ask(run, strike.what)
    return []


def _ask(run: RunningJob, what: str) -> None:
    where = run.work_dir
    if what == "pin-first":
        verbs.pin(where, f"{run.name}-p1", timeout_s=ASK_S)
    elif what == "rollback":
        verbs.roll_back(where, timeout_s=ASK_S)
    elif what == "unpin":
        verbs.unpin(where, mode="Auto")
    elif what == "set":
        plan = yaml.safe_load(verbs.show(where, as_yaml=True))["spec"]
        for channel in plan.get("channels") or ():
            channel["microBatch"], channel["depth"] = 1, max(2, channel.get("depth", 2))
        file = run.folder / "plan.yaml"
        file.write_text(yaml.safe_dump({"spec": plan}), encoding="utf-8")
        verbs.put(where, file, timeout_s=ASK_S)
    else:
        newest = max(run.objects("rlplan"), key=_revision)
        verbs.approve(where, str(newest["metadata"]["name"]), by="prove")


def _revision(plan: dict[str, Any]) -> int:
    return int(plan["spec"]["revision"])


def problems(run: RunningJob) -> list[str]:
    """What is wrong with a job that was given its time. None where it is complete, each step has committed once with
    all of its units, and one plan is in force, the one that the job names and that the driver told last."""
    if run.process.poll() is None:
        last = run.lines("events")[-3:]
        return [f"the job has not ended within {END_S:.0f} s; it said last {json.dumps(last)[-900:]}"]
    if run.process.returncode != 0 or run.answer.get("condition") != "Complete":
        return [f"exit code {run.process.returncode}, {run.answer}"]
    said = []
    steps, anew = surviving(run.lines("lineage"))
    if anew >= run.starts:
        said.append(f"steps were made again on their branch {anew} times in {run.starts} starts")
    if [line["step"] for line in steps] != list(range(1, STEPS + 1)):
        said.append(f"the surviving history has steps {[line['step'] for line in steps]}")
    if odd := [(line["step"], line["units"]) for line in steps if line["units"] != ITEMS]:
        said.append(f"steps with other than {ITEMS} units: {odd}")
    [found] = run.objects("rljob")
    current = str((found["status"].get("plan") or {}).get("current"))
    applied = [str(plan["metadata"]["name"]) for plan in run.objects("rlplan") if _has(plan, "Applied")]
    if applied != [current]:
        said.append(f"plans {applied} are in force, and the job names {current}")
    told = [event.get("revision") for event in run.lines("events") if event["event"] == "plan"]
    if told and current != f"{run.name}-p{told[-1]}":
        said.append(f"the driver said last that revision {told[-1]} is in force, and the job names {current}")
    return said


def _has(plan: dict[str, Any], kind: str) -> bool:
    return any(c["type"] == kind and c["status"] == "True" for c in (plan.get("status") or {}).get("conditions") or ())


def summary(found: list[dict[str, Any]]) -> str:
    wrong = [line["seed"] for line in found if not line["ok"]]
    struck = sum(len(line["strikes"]) for line in found)
    changed = sum(len(line["plans"]) - 1 for line in found)
    return (
        f"{len(found) - len(wrong)} of {len(found)} schedules end in one plan with all steps (not: {wrong}); "
        f"{struck} strikes, {changed} further plans, {sum(line['starts'] - 1 for line in found)} starts anew"
    )
