"""A round: one job from its start to its end, with faults all the while; each with the time and what it took.

A fault is *recovered* from with the second commit after it: after the victims of one that replaces them have other
processes, after the end of one that lasts, after the first plan is in force again, has failed or was overtaken. Half of
the faults are waited for, so that the job comes on; the others are followed by the next one at once.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rlinf_api import names
from tools.chaos import faults
from tools.chaos.faults import Fault
from tools.chaos.job import Job, JobError
from tools.chaos.plans import Ask
from tools.running_job import Part

LOOK_S: Final = 0.1
PAUSE_S: Final = (0.3, 3.0)  # between two faults
PATIENCE_S: Final = 90.0  # for one fault's recovery: the longest way back is a hung actor's, 8 s until it is seen
END_S: Final = 300.0  # from the last fault to the end of the job
FIRST_STEP: Final = 6  # there is a checkpoint behind it
COMMITS: Final = 2  # the first may have been on its way
OPTIONAL: Final = "env/1"  # a worker that not every plan has


@dataclass(slots=True)
class Done:
    """One fault, as it went."""

    fault: Fault
    at_s: float
    """Since the round began."""
    struck: list[Part]
    began: float
    until: float
    asks: Sequence[Ask] = ()
    """The changes of plan that were asked for: the last of them decides."""
    commits_before: int | None = None
    recovered_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.fault.kind,
            "target": self.fault.target,
            "at_s": round(self.at_s, 2),
            "lasts_s": self.fault.lasts_s,
            "pids": [part.process.pid for part in self.struck],
            "plans": [ask.as_json() for ask in self.asks],
            "recovered_s": None if self.recovered_s is None else round(self.recovered_s, 2),
        }


@dataclass(slots=True)
class Round:
    seed: int
    exit_code: int
    seconds: float
    answer: dict[str, Any]
    lineage: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    checksums: dict[tuple[str, str], set[str]]
    left: list[int]
    said: str
    spares: bool = False
    done: list[Done] = field(default_factory=list)
    unanswered: Sequence[str] = ()
    """Changes of plan of which nothing came, not even a refusal."""


def undisturbed(folder: Path, *, seed: int, steps: int, sets: Mapping[str, Any]) -> Round:
    return _run(folder, seed=seed, steps=steps, spares=False, sets=sets, disturb=lambda job, done: None)


def disturbed(
    folder: Path,
    *,
    seed: int,
    steps: int,
    sets: Mapping[str, Any],
    chance: random.Random,
    until: float,
    say: Callable[[str], None],
    plan: Iterable[Fault] | None = None,
    spares: bool = False,
) -> Round:
    """Faults until the clock says `until` or the job ends; `plan`: these, in turn, instead of drawn ones, each taken
    when the job has recovered from the one before. With spares it begins when the first is warm: some are lost before
    theirs is."""

    def disturb(job: Job, done: list[Done]) -> None:
        started, planned = time.monotonic(), iter(() if plan is None else plan)
        _await_step(job, FIRST_STEP)
        _await_spare(job)
        if job.is_running:
            job.plans.read()
        while job.is_running and time.monotonic() < until:
            fault = next(planned, None)
            if fault is None:
                if plan is not None:
                    break
                fault = faults.draw(chance, lacks=job.lacks, spares=job.has_spares)
            _strike(job, fault, done, started=started, say=say)
            if plan is not None or chance.random() < 0.5:
                _until(job, lambda: _settled(job, done), timeout_s=PATIENCE_S, what=f"recovery from {fault}")
            if plan is None:
                _rest(job, chance.uniform(*PAUSE_S), done)
        deadline = time.monotonic() + END_S
        while job.is_running and time.monotonic() < deadline:
            _settled(job, done)
            time.sleep(LOOK_S)

    return _run(folder, seed=seed, steps=steps, spares=spares, sets=sets, disturb=disturb)


def _run(
    folder: Path,
    *,
    seed: int,
    steps: int,
    spares: bool,
    sets: Mapping[str, Any],
    disturb: Callable[[Job, list[Done]], None],
) -> Round:
    started = time.monotonic()
    with Job(folder, seed=seed, steps=steps, spares=spares, sets=sets) as job:
        done: list[Done] = []
        disturb(job, done)
        code = job.end(timeout_s=END_S)
        job.plans.close()
        checksums: dict[tuple[str, str], set[str]] = {}
        for version, view, checksum in job.checksums():
            checksums.setdefault((version, view), set()).add(checksum)
        found = Round(
            seed=seed, exit_code=code, seconds=time.monotonic() - started, answer=job.answer,
            lineage=list(job.lines("lineage")), metrics=list(job.lines("metrics")), events=list(job.lines("events")),
            checksums=checksums, left=job.left(), said=job.said,
            spares=spares, done=done, unanswered=job.plans.problems(),
        )  # fmt: skip
    return found


def _strike(job: Job, fault: Fault, done: list[Done], *, started: float, say: Callable[[str], None]) -> None:
    struck = faults.victims(job, fault)
    if not struck and fault.kind not in faults.WITHOUT_VICTIMS:
        return  # it is on its way back
    began = time.monotonic()
    entry = Done(fault=fault, at_s=began - started, struck=struck, began=began, until=math.inf)
    asked = len(job.plans.asked)
    say(f"{entry.at_s:7.1f} s  {fault}")
    with faults.done(job, fault, struck):
        done.append(entry)
        _rest(job, fault.lasts_s, done)
    entry.until, entry.asks = time.monotonic() if fault.lasts_s else began, job.plans.asked[asked:]


def _rest(job: Job, seconds: float, done: list[Done]) -> None:
    until = time.monotonic() + seconds
    while job.is_running and (left := until - time.monotonic()) > 0:
        _settled(job, done)
        time.sleep(min(LOOK_S, left))


def _settled(job: Job, done: list[Done]) -> bool:
    """Looks at every fault that is not recovered from; True where there is none."""
    now, commits = time.monotonic(), len(job.lines("lineage"))
    waiting = [entry for entry in done if entry.recovered_s is None]
    for entry in waiting:
        if entry.commits_before is None:
            if now < entry.until or (entry.fault.replaces and not _replaced(job, entry.struck)):
                continue
            if entry.asks and not entry.asks[-1].is_over:
                continue
            entry.commits_before = commits
        elif commits >= entry.commits_before + COMMITS:
            entry.recovered_s = now - entry.began
    return not any(entry.recovered_s is None for entry in waiting) or not job.is_running


def _replaced(job: Job, struck: list[Part]) -> bool:
    parts = job.parts()
    """A plan may have done without one meanwhile; a spare is made anew when there is time."""
    mine = [part for part in struck if not names.is_spare(part.name) and part.name != OPTIONAL]
    return all(part.name in parts and parts[part.name].process != part.process for part in mine)


def _await_spare(job: Job) -> None:
    def warm() -> bool:
        is_there = any(event["event"] == "spare-warm" for event in job.lines("events"))
        return not job.is_running or not job.has_spares or is_there

    _until(job, warm, timeout_s=PATIENCE_S, what="a warm spare")


def _await_step(job: Job, step: int) -> None:
    def reached() -> bool:
        return not job.is_running or any(line["step"] >= step for line in job.lines("lineage"))

    _until(job, reached, timeout_s=120.0, what=f"step {step}")


def _until(job: Job, holds: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            tail = ""
            with contextlib.suppress(OSError):
                tail = job.said[-3000:]
            raise JobError(f"not within {timeout_s:.0f} s: {what}\n{tail}")
        time.sleep(LOOK_S)
