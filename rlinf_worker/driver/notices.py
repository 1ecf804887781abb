"""What people are told of a job while it runs: what is unusually slow, who is waited for. Looks at every tick and
changes nothing but the job's words.

"step 12 has run for 45 s (usual 1.3 s), waiting for units env:3@12"
"worker rollout/1 is started again: exit code 137"
"""

from __future__ import annotations

import statistics
from typing import Final

from rlinf_api.conditions import Reason
from rlinf_api.report import DriverState
from rlinf_worker.driver import turns
from rlinf_worker.driver.losses import Losses
from rlinf_worker.driver.members import WorkerRecord, WorkerState
from rlinf_worker.driver.parts import Parts
from rlinf_worker.driver.presence import GO_ON, Presence

MAX_NAMED: Final = 8  # in one sentence


def lost(record: WorkerRecord) -> str:
    return f"worker {record.placed.id} is started again: {record.why}"


class Notices:
    def __init__(self, parts: Parts, losses: Losses, presence: Presence) -> None:
        self._job, self._parts, self._losses, self._presence = parts.job, parts, losses, presence

    def look(self, now: float) -> None:
        """While steps go on, the words are of what is unusually slow, and empty where all is well; else of who is
        waited for."""
        job = self._job
        if job.standing.state is DriverState.RECOVERING or self._presence.goes_on:
            job.say_recovering(self._recovering(now))
        elif job.is_running:
            job.say_running(*self._unusual(now))

    def _recovering(self, now: float) -> str:
        """That steps go on and what is slow in them, or who is waited for, and why. What was told stays as long as it
        is true, for of several losses any may be the one that takes long."""
        job, told = self._job, self._job.standing.message
        if without := self._presence.goes_on:
            return "; ".join(part for part in (without, self._unusual(now)[1]) if part)
        workers, away = job.members.workers.items(), job.members.away
        awaited = [w for wid, w in workers if w.state is not WorkerState.READY and wid not in away]
        if losses := [lost(w) for w in awaited if w.why]:
            return told if told in losses else losses[0]
        who = ", ".join(f"worker {w.placed.id}" for w in awaited[:MAX_NAMED])
        return f"waiting for {who}" if told.startswith(GO_ON) else told

    def _unusual(self, now: float) -> tuple[Reason, str]:
        job, exchange, stalls = self._job, self._parts.exchange, self._parts.turns.stalls
        phrases = [*self._parts.workforce.quiet(), *stalls]
        phrases.extend(self._losses.words(now)[:3])
        if job.placement.lease_sets:
            small = turns.too_small(job.placement, job.topology, exchange.measured())
            phrases.extend([small] if small else [])
        seconds = self._parts.commits.step_seconds
        usual = statistics.median(seconds) if seconds else 0.0
        limit = max(job.settings.step_notice_min_s, job.settings.step_notice_factor * usual)
        for step in job.ledger.open_steps[:1]:
            if now - step.opened_at > limit:
                waiting = exchange.committing.core.steps.waiting_for(step.number)
                phrase = f"step {step.number} has run for {now - step.opened_at:.0f} s (usual {usual:.1f} s)"
                phrases.append(phrase + (f", waiting for units {', '.join(waiting[:5])}" if waiting else ""))
                phrases.extend(exchange.full()[:3])
        return Reason.TURNS_WITHOUT_ITEMS if stalls else Reason.STEPPING, "; ".join(phrases)
