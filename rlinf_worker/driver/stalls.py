"""Nothing moves: who blocks the job, what people are told of it, and who is replaced.

Called by core.py with every tick, before notices.py looks. What each worker says of its role's work comes with its
agent's heartbeats (runtime/work.py): for how long it has not moved, at what, and whether it waits for others meanwhile.

* One worker is stuck, at a span or at something of its own: it is named after `stall_notice_s`, the job is Stalled
  after five usual steps of it, and its agent kills it at its phase's deadline.
* All wait, nobody moves, and a step is open: whoever holds what the step waits for is named after the same time, and
  replaced after `stall_deadline_s` or five usual steps.
* All wait for units of a ticket on which nobody works any more: where a worker that makes units died in this step they
  are made again; else the ticket is named, and then the job fails, as they can never come.
* All wait, and the flow has not said all of a step: it is named, with what it waits for, and left alone, as that may be
  the world. Where it waits for results, whoever holds their tickets is replaced as above.
* All wait though steps do not go on again, as one is not ready yet: whoever has stood still for longest is replaced
  after `stall_deadline_s`. Nobody is while a lost one is waited for, or one loads: these have deadlines of their own.

Where steps go on without some that are away, all of this is asked of the others.

A worker counts from its last work, also while no driver was there to ask for any: nobody has stood still for longer
than this driver has looked on.

Whoever is replaced counts as failed, and so a job that stands still again and again fails with the name of the last.
"""

from __future__ import annotations

import enum
import logging
import statistics
from typing import Final

from rlinf_api.conditions import Reason
from rlinf_api.errors import UserError
from rlinf_api.report import DriverState
from rlinf_worker.driver.commits import Commits
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.members import WorkerRecord, WorkerState
from rlinf_worker.driver.presence import Presence
from rlinf_worker.driver.workforce import Workforce

logger = logging.getLogger(__name__)

MAX_NAMED: Final = 3  # in one sentence
USUAL_STEPS: Final = 5.0
MADE_UP_S: Final = 2.0
"""All have waited so long: what was announced or acknowledged before a worker died has come by then, or never does."""
FRESH_S: Final = 5.0
"""A worker that is not stuck says so once a second; its word is under way for two beats, and a busy machine is late."""


class Looking(enum.Enum):
    NOTHING = enum.auto()
    STEPS = enum.auto()
    RECOVERY = enum.auto()


class Stalls:
    def __init__(
        self, job: Job, exchange: Exchange, workforce: Workforce, commits: Commits, presence: Presence
    ) -> None:
        self._job, self._exchange, self._workforce, self._commits = job, exchange, workforce, commits
        self._presence = presence
        self.words = ""
        """What stands still, for people; empty: all moves."""
        self.is_stalled = False
        """For longer than a step may take."""
        self.replaced = 0
        self.watched: tuple[Looking, float] = (Looking.NOTHING, job.clock())
        """What this driver looks at, and since when."""

    def tick(self) -> None:
        job = self._job
        workers = [w for wid, w in job.members.workers.items() if wid not in job.members.away]
        self.words, self.is_stalled = "", False
        self._make_up([w for w in workers if w.state is WorkerState.READY])
        watch = self._watch(workers)
        if watch is not self.watched[0]:
            self.watched = (watch, job.clock())
        if watch is Looking.RECOVERY:
            self._look_at_recovery(workers)
        elif watch is Looking.STEPS:
            self._look_at_steps(workers)

    def _watch(self, workers: list[WorkerRecord]) -> Looking:
        goes_on = self._job.is_running or self._presence.goes_on
        if goes_on and all(w.state is WorkerState.READY for w in workers):
            return Looking.STEPS
        is_recovering = self._job.standing.state is DriverState.RECOVERING
        return Looking.RECOVERY if is_recovering and all(w.present for w in workers) else Looking.NOTHING

    def _still_s(self, workers: list[WorkerRecord]) -> float:
        return min(self._job.clock() - self.watched[1], min((w.still_s for w in workers), default=0.0))

    def _look_at_steps(self, workers: list[WorkerRecord]) -> None:
        job = self._job
        limit, deadline = self._limits()
        if stuck := [w for w in workers if w.silent_s > job.settings.stall_notice_s]:
            self.words = "; ".join(_stuck(w) for w in stuck[:MAX_NAMED])
            self.is_stalled = any(w.silent_s > limit for w in stuck)
            return
        still_s = self._still_s(workers)
        if still_s <= limit or job.ledger.finished:
            return
        self.is_stalled = True
        step = next(iter(job.ledger.open_steps), None)
        asked = job.flow_waits
        if step is None or not (step.sealed or asked.tickets):
            what = f"all of step {step.number}" if step is not None else "another step"
            said = f"{what}, as it waits for {asked.what}" if asked.what else what
            self.words = f"all workers have waited for {still_s:.0f} s: the flow has not said {said}"
            return
        is_heard = all(w.silent_s < FRESH_S for w in workers)
        if step.sealed and (short := self._exchange.ends.short(step.number)):
            self.words = _never(step.number, *short[0])
            if still_s > deadline and is_heard:
                job.fail(Reason.USER_ERROR, self.words)
            return
        blocking = self._blocking(step.number, workers)
        self.words = f"step {step.number} has not moved for {still_s:.0f} s: {'; '.join(map(_waits, blocking))}"
        if still_s > deadline and is_heard:
            self._replace(blocking[0], still_s)

    def _make_up(self, at_work: list[WorkerRecord]) -> None:
        """Also while the one that died is away, or starts."""
        if min((w.still_s for w in at_work), default=0.0) <= MADE_UP_S:
            return
        for step in self._job.ledger.open_steps:
            if again := self._exchange.remaking.make_up(step.number):
                said = {"step": step.number, "tickets": again[:MAX_NAMED]}
                logger.warning("units that died with their maker are made again", extra=said)

    def _look_at_recovery(self, workers: list[WorkerRecord]) -> None:
        still_s = self._still_s(workers)
        if still_s > self._limits()[1] and all(w.silent_s < FRESH_S for w in workers):
            self._replace(max(workers, key=lambda w: w.still_s), still_s)

    def _limits(self) -> tuple[float, float]:
        """Until people are told, until somebody is replaced."""
        settings, seconds = self._job.settings, self._commits.step_seconds
        if not seconds:  # a first step compiles and allocates
            return settings.first_stall_notice_s, settings.stall_deadline_s
        usual = USUAL_STEPS * statistics.median(seconds)
        return max(settings.stall_notice_s, usual), max(settings.stall_deadline_s, usual)

    def _blocking(self, step: int, workers: list[WorkerRecord]) -> list[WorkerRecord]:
        """Who of them holds what the step waits for, else who has stood still for longest: at least one."""
        known, ends, asked = {w.placed.id: w for w in workers}, self._exchange.ends, self._job.flow_waits.tickets
        holders = [known[wid] for wid in (ends.holders_of(asked) if asked else ends.holders(step)) if wid in known]
        return (holders or sorted(workers, key=lambda w: -w.still_s))[:MAX_NAMED]

    def _replace(self, record: WorkerRecord, still_s: float) -> None:
        self.replaced += 1
        said = "; ".join(f"{w.placed.id} {w.doing}" for w in self._job.members.workers.values() if w.doing)
        text = f"nothing has moved for {still_s:.0f} s; {_waits(record)}, and is replaced"
        self._job.event("stalled", text, worker=record.placed.id, workers=said[:4096])
        self._workforce.give_up(
            record, f"nothing moved for {still_s:.0f} s, and it {record.doing or 'held the step up'}"
        )


def _never(step: int, ticket: str, came: int, units: int) -> str:
    return str(
        UserError(
            f"step {step} can never end: whoever took ticket {ticket!r} is through with what came of it",
            got=f"{came} of its units", wanted=f"{units}, as the flow says",
            next="put them all before ack, each with parents=[...]; or drop what is not to come; or Ticket(..., "
            "units=None) where nobody knows how many",
        )
    )  # fmt: skip


def _stuck(worker: WorkerRecord) -> str:
    at = f": {worker.doing}" if worker.doing else ""
    return f"worker {worker.placed.id} has not moved for {worker.silent_s:.0f} s in phase {worker.progress}{at}"


def _waits(worker: WorkerRecord) -> str:
    return f"worker {worker.placed.id} {worker.doing or f'has not moved for {worker.still_s:.0f} s'}"
