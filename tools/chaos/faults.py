"""The kinds of faults, and how each is done and undone. Drawn by a seed: the same seed plans the same faults, though
what they meet differs from run to run.

| kind | does | until |
|---|---|---|
| kill | SIGKILL to a worker, an agent or the driver | at once |
| kill-pod | SIGKILL to an agent and all its workers together | at once |
| stop | SIGSTOP to a worker | for good: somebody has to end it |
| pause | SIGSTOP to a worker, an agent, a pod or the driver, then SIGCONT | 0.5 to 6 s |
| slow | a rate on every link of the job, its control plane included | 2 to 5 s |
| full | the checkpoints' file system has no byte left | 2 to 6 s |
| plan | another plan is pinned: trajectories in pairs, or a worker of environments less; then the first | 1 to 6 s |

In a job with warm spares these are killed too.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

import psutil

from rlinf_api import names
from tools.chaos import plans
from tools.chaos.job import Job
from tools.running_job import Part

Kind = Literal["kill", "kill-pod", "stop", "pause", "slow", "full", "plan"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
WORKERS: Final = ("env/0", "rollout/0", "actor/0")
SPARES: Final = tuple(f"spare.{worker}" for worker in WORKERS)
AGENTS: Final = ("agent:sim", "agent:learn")
CHOICES: Final[tuple[tuple[Kind, tuple[str, ...], int], ...]] = (
    ("kill", (*WORKERS, *WORKERS, *AGENTS, "driver"), 8),
    ("kill-pod", ("pod:sim", "pod:learn"), 2),
    ("stop", WORKERS, 1),
    ("pause", (*WORKERS, *AGENTS, "pod:sim", "pod:learn", "driver"), 4),
    ("slow", ("links",), 2),
    ("full", ("disk",), 2),
    ("plan", plans.CHANGES, 2),
)
OF_SPARES: Final[tuple[Kind, tuple[str, ...], int]] = ("kill", SPARES, 2)
WITHOUT_VICTIMS: Final = ("slow", "full", "plan")
RATES_KBIT: Final = (500, 1000, 4000)  # an env step of 16 environments is 500 bytes each way, weights are 70 KB
BALLAST: Final = "ballast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: Kind
    target: str
    lasts_s: float = 0.0
    rate_kbit: int = 0

    @property
    def replaces(self) -> bool:
        """Whether its target has to have another process afterwards."""
        return self.kind in ("kill", "kill-pod", "stop") and not names.is_spare(self.target)

    def __str__(self) -> str:
        more = f" at {self.rate_kbit} kbit/s" if self.rate_kbit else ""
        return f"{self.kind} {self.target}{more}" + (f" for {self.lasts_s:.1f} s" if self.lasts_s else "")


def draw(chance: random.Random, *, lacks: Collection[str] = (), spares: bool = False) -> Fault:
    """`lacks`: kinds that the machine does not allow."""
    choices = [choice for choice in (*CHOICES, *([OF_SPARES] if spares else [])) if choice[0] not in lacks]
    kind, targets, _ = chance.choices(choices, weights=[weight for _, _, weight in choices])[0]
    target = chance.choice(targets)
    if kind == "pause":
        return Fault(kind=kind, target=target, lasts_s=round(chance.uniform(0.5, 6.0), 1))
    if kind == "slow":
        lasts_s = round(chance.uniform(2.0, 5.0), 1)
        return Fault(kind=kind, target=target, lasts_s=lasts_s, rate_kbit=chance.choice(RATES_KBIT))
    if kind == "full":
        return Fault(kind=kind, target=target, lasts_s=round(chance.uniform(2.0, 6.0), 1))
    if kind == "plan":
        return Fault(kind=kind, target=target, lasts_s=round(chance.uniform(1.0, 6.0), 1))
    return Fault(kind=kind, target=target)


def victims(job: Job, fault: Fault) -> list[Part]:
    """The processes that it strikes; empty: there are none now."""
    if fault.kind in WITHOUT_VICTIMS:
        return []
    parts = job.parts()
    if not fault.target.startswith("pod:"):
        return [parts[fault.target]] if fault.target in parts else []
    pool = fault.target.removeprefix("pod:")
    pod = [part for part in parts.values() if part.pool == pool]
    return pod if f"agent:{pool}" in parts else []


@contextlib.contextmanager
def done(job: Job, fault: Fault, struck: list[Part]) -> Iterator[None]:
    """Does it; leaving the block undoes what can be undone. What a plan is asked for is in job.plans."""
    if fault.kind in ("kill", "kill-pod"):
        _signal(struck, signal.SIGKILL)
        yield
    elif fault.kind == "stop":
        _signal(struck, signal.SIGSTOP)
        yield
    elif fault.kind == "pause":
        _signal(struck, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(struck, signal.SIGCONT)
    elif fault.kind == "slow":
        rate = f"{fault.rate_kbit}kbit"  # a burst below loopback's 64 KB packets would let nothing pass
        job.tc("qdisc", "replace", "dev", "lo", "root", "tbf", "rate", rate, "burst", "128kb", "latency", "2s")
        try:
            yield
        finally:
            if job.is_running:
                job.tc("qdisc", "del", "dev", "lo", "root")
    elif fault.kind == "plan":
        [change] = [change for change in plans.CHANGES if change == fault.target]
        job.plans.change(change)
        try:
            yield
        finally:
            job.plans.back()
    else:
        ballast = job.disk_from_outside / BALLAST
        _fill(ballast)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the file system is gone with the job
                ballast.unlink()


def _fill(path: os.PathLike[str]) -> None:
    block = bytes(1 << 16)
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):  # full is what is wanted
        while True:
            file.write(block)


def _signal(parts: list[Part], number: int) -> None:
    for part in parts:
        with contextlib.suppress(psutil.NoSuchProcess):
            part.process.send_signal(number)
