"""Schedules of faults over jobs of other shapes than the examples': each a job of its own, struck one to three times,
and what must hold of it.

    make chaos ARGS="--schedules 200"        what was run is a line of build/chaos/schedules.jsonl and is not run again

A strike is a kill (SIGKILL) or a freeze (SIGSTOP, and SIGCONT FREEZE_S later) of any process, worker, agent or driver,
or the word to end (SIGTERM) to an agent, as a node that shuts down says it: it hands its work over. Half of the strikes
hit two at once, each its own way. What must hold:

* the job ends Complete; each step is in its surviving history once, with all of its units; what a job learns by numbers
  alone it has learnt; no process is left;
* it goes on within GOES_ON_S, and what its workers take longer to start: from the last strike to the commit that ends
  its wait, a freeze's 40 s included;
* who is waited for is told: in a wait of more than NAMED_S one that was struck is named, by condition Degraded=True or
  by Running=False.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
import yaml

from rlinf_api import conditions
from tools.chaos import shapes
from tools.chaos.shapes import Shape
from tools.running_job import ROOT, Part, RunningJob, send, surviving

FREEZE_S: Final = 40.0
"""Longer than any worker's or agent's deadline here, shorter than the minute after which a driver is taken for lost."""
GOES_ON_S: Final = 45.0
NAMED_S: Final = 10.0
TOLD_S: Final = 5.0
"""Beyond NAMED_S, until a condition that was written is seen here: 1 s of looking, and what a busy machine takes."""
STRIKES: Final = (1, 3)
LATEST: Final = shapes.STEPS - 15  # so that steps follow the last strike
WITHIN_S: Final = 8.0  # of the strike before, where it does not wait for a step
END_S: Final = 300.0
LOOK_S: Final = 0.05
SIGNALS: Final = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "end": signal.SIGTERM}
KEPT: Final = ROOT / "build" / "chaos"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    how: str
    """One of SIGNALS; end: of agents alone, as whoever tells a worker or a driver to end is one of ours."""
    whom: str
    """A role, agent or driver."""
    which: float
    """Which of those that live, as a share of their sorted names: 0 is the first, 1 the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    blows: tuple[Blow, ...]
    at: int
    """The step that has committed before it; 0: it follows the one before."""
    after_s: float

    def __str__(self) -> str:
        where = f"step {self.at} + {self.after_s:.2f} s" if self.at else f"{self.after_s:.1f} s later"
        return " and ".join(f"{blow.how} {blow.whom}" for blow in self.blows) + f" at {where}"


def strikes(rng: random.Random, roles: tuple[str, ...]) -> Iterator[Strike]:
    """The first at a step, each later one at a later step or soon after the one before."""
    steps = sorted(rng.randint(3, LATEST) for _ in range(rng.randint(*STRIKES)))
    for number, step in enumerate(steps):
        follows = number > 0 and rng.random() < 0.5
        yield Strike(
            blows=tuple(_blow(rng, roles) for _ in range(rng.choice((1, 2)))), at=0 if follows else step,
            after_s=round(rng.uniform(0, WITHIN_S if follows else shapes.STEP_S), 2),
        )  # fmt: skip


def _blow(rng: random.Random, roles: tuple[str, ...]) -> Blow:
    whom = rng.choice((*roles, *roles, "agent", "driver"))
    ways = ("kill", "freeze", "end") if whom == "agent" else ("kill", "freeze")
    return Blow(how=rng.choice(ways), whom=whom, which=round(rng.random(), 3))


@dataclass(slots=True)
class Watch:
    """What is seen of a job while it is struck."""

    run: RunningJob
    struck: list[str] = field(default_factory=list)
    """Words that name them: rollout/1; driver; a pod as p0-0, for an agent."""
    last_strike: float = 0.0
    committed: int = 0
    """Lines of the lineage."""
    committed_at: float = field(default_factory=time.monotonic)
    went_on_s: float = 0.0
    """The longest time from a strike to the commit that ended the wait that it lies in, or that follows it."""
    unnamed_s: float = 0.0
    """Longest time beyond NAMED_S for which nobody that was struck was named."""
    said: list[str] = field(default_factory=list)
    """What conditions said in waits."""
    _looked_at: float = 0.0
    _is_named: bool = False

    @property
    def step(self) -> int:
        return max((line["step"] for line in self.run.lines("lineage")), default=0)

    def look(self) -> None:
        now, count = time.monotonic(), len(self.run.lines("lineage"))
        if count > self.committed:
            self._came_on(now)
            self.committed, self.committed_at, self._is_named = count, now, False
        waited = now - max(self.committed_at, self.last_strike)
        if not self.last_strike or waited <= NAMED_S or now < self._looked_at + 1.0:
            return
        self._looked_at, jobs = now, self.run.objects("rljob")
        ends = (conditions.written(job, kind) for job in jobs for kind in ("Complete", "Failed"))
        if any(end.get("status") == "True" for end in ends):  # rljob ends the pods, a frozen one by force
            return
        for text in (text for job in jobs for text in told(job)):
            if text not in self.said:
                self.said.append(text)
            self._is_named = self._is_named or any(name in text for name in self.struck)
        if not self._is_named:
            self.unnamed_s = max(self.unnamed_s, waited - NAMED_S)

    def _came_on(self, now: float) -> None:
        if self.last_strike:
            self.went_on_s = max(self.went_on_s, now - max(self.committed_at, self.last_strike))


def told(job: Mapping[str, Any]) -> list[str]:
    """
    >>> told({"status": {"conditions": [{"type": "Degraded", "status": "True", "message": "env/1 is silent"}]}})
    ['env/1 is silent']
    """
    conditions = (job.get("status") or {}).get("conditions") or ()
    wrong = {"Degraded": ("True",), "Running": ("False", "Unknown")}
    return [c.get("message", "") for c in conditions if c["status"] in wrong.get(c["type"], ())]


def one(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=f"chaos-{seed}-") as name:
        folder = Path(name)
        rng = random.Random(f"chaos {seed}")
        shape = shapes.drawn(rng, folder)
        shape.prepare(folder)
        asked = list(strikes(rng, shape.roles))
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(shape.manifest), encoding="utf-8")
        began, done = time.monotonic(), list[str]()
        with RunningJob(file, folder) as run:
            watch = Watch(run)
            _go_through(watch, asked, done)
            said = problems(watch, shape)
            left = run.close()
        said += [f"left alive: {one}" for one in left] if not said else []
        workers = {role["name"]: role["workers"] for role in shape.manifest["spec"]["roles"]}
        line = {
            "seed": seed, "ok": not said, "name": shape.name, "workers": workers,
            "pods": len(shape.manifest["spec"]["pools"]), "seconds": round(time.monotonic() - began, 1),
            "strikes": done, "went_on_s": round(watch.went_on_s, 1), "unnamed_s": round(watch.unnamed_s, 1),
            "conditions": watch.said, "load": round(os.getloadavg()[0], 1), "problems": said,
        }  # fmt: skip
        if said:
            line["said"] = run.said[-3000:]
            run.keep(KEPT / f"schedule-{seed}")
        return line


def _go_through(watch: Watch, asked: list[Strike], done: list[str]) -> None:
    until, waiting = time.monotonic() + END_S, list(asked)
    frozen: list[tuple[float, psutil.Process]] = []
    due = 0.0
    try:
        while watch.run.is_running and time.monotonic() < until:
            now = time.monotonic()
            if waiting and not due and (not waiting[0].at or watch.step >= waiting[0].at):
                due = now + waiting[0].after_s
            if waiting and due and now >= due:
                strike, due = waiting.pop(0), 0.0
                if struck := _strike(watch, strike):
                    done.append(f"{strike}: {', '.join(f'{blow.how} {part.name}' for blow, part in struck)}")
                frozen += [(now + FREEZE_S, part.process) for blow, part in struck if blow.how == "freeze"]
            for at, process in [entry for entry in frozen if now >= entry[0]]:
                frozen.remove((at, process))
                send(process, signal.SIGCONT)
            watch.look()
            time.sleep(LOOK_S)
    finally:
        for _, process in frozen:
            send(process, signal.SIGCONT)


def _strike(watch: Watch, strike: Strike) -> list[tuple[Blow, Part]]:
    struck = list[tuple[Blow, Part]]()
    for blow in strike.blows:
        taken = [part.name for _, part in struck]
        of = [part for part in watch.run.of(blow.whom) if part.name not in taken]
        if not of:
            continue  # it is on its way back
        part = of[min(int(blow.which * len(of)), len(of) - 1)]
        send(part.process, SIGNALS[blow.how])
        struck.append((blow, part))
    if struck:
        watch.last_strike = time.monotonic()
        watch.struck += [of_pod(part.pod) if blow.whom == "agent" else part.name for blow, part in struck]
    return struck


def of_pod(pod: str) -> str:
    """How a pod is called within its job.

    >>> of_pod("critic-p0-0-a1")
    'p0-0'
    """
    return "-".join(pod.split("-")[-3:-1])


def problems(watch: Watch, shape: Shape) -> list[str]:
    run = watch.run
    if run.is_running:
        return [f"the job has not ended within {END_S:.0f} s; it was at step {watch.step}, and said {watch.said}"]
    if run.process.returncode != 0 or run.answer.get("condition") != "Complete":
        return [f"exit code {run.process.returncode}, {run.answer}"]
    said = []
    steps, anew = surviving(run.lines("lineage"))
    if anew:
        said.append(f"steps were committed twice on their branch {anew} times")
    if [line["step"] for line in steps] != list(range(1, shapes.STEPS + 1)):
        said.append(f"the surviving history has steps {[line['step'] for line in steps]}")
    if odd := [(line["step"], line["units"]) for line in steps if line["units"] != shape.units]:
        said.append(f"steps with other than {shape.units} units: {odd}")
    said += shape.problems(run)
    if watch.went_on_s > (limit_s := GOES_ON_S + shape.start_s):
        said.append(f"it went on {watch.went_on_s:.1f} s after a strike, wanted {limit_s:.0f}")
    if watch.unnamed_s > TOLD_S:
        said.append(
            f"nobody that was struck ({', '.join(watch.struck)}) was named for {watch.unnamed_s:.1f} s beyond "
            f"{NAMED_S:.0f} s of waiting; conditions said {watch.said}"
        )
    return said


def summary(found: list[dict[str, Any]]) -> str:
    wrong = [line["seed"] for line in found if not line["ok"]]
    waits = sorted(line["went_on_s"] for line in found)
    if not waits:
        return "no schedule was run"
    return (
        f"{len(found) - len(wrong)} of {len(found)} schedules end with all steps, in time and by name (not: {wrong}); "
        f"{sum(len(line['strikes']) for line in found)} strikes; from the last strike to the commit that ended its "
        f"wait {median(waits):.1f} s in the median, {waits[-1]:.1f} at most"
    )
