"""What people are told of a job while it runs: what is unusually slow, who is waited for, who does not reach whom.
Looks at every tick and changes nothing but the job's words.

"step 12 has run for 45 s (usual 1.3 s), waiting for units env:3@12"
"worker rollout/1 is started again: exit code 137"
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.conditions import Reason
from rlinf_api.errors import InvalidManifest
from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from rlinf_worker.driver import turns
from rlinf_worker.driver.commits import Commits
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.members import WorkerRecord, WorkerState
from rlinf_worker.driver.presence import GO_ON, Presence
from rlinf_worker.driver.stalls import Stalls
from rlinf_worker.driver.turns import DriverTurns

MAX_NAMED: Final = 8  # in one sentence
SAY_AGAIN_S: Final = 30.0
LASTS_S: Final = 3.0
"""A worker tries about once a second; of a link that is made again, or a worker that ends, one hears for less long."""


@dataclass(slots=True)
class _Pair:
    since: float
    newest: float
    said_at: float
    reason: str


def lost(record: WorkerRecord) -> str:
    return f"worker {record.placed.id} is started again: {record.why}"


class Notices:
    def __init__(
        self, job: Job, exchange: Exchange, commits: Commits, turns: DriverTurns, presence: Presence, stalls: Stalls
    ) -> None:
        self._job, self._exchange, self._commits, self._turns, self._presence = job, exchange, commits, turns, presence
        self._stalls = stalls
        self._pairs: dict[tuple[WorkerId, str, bool], _Pair] = {}  # forgotten when nothing is heard of them any more

    def peer_lost(self, worker: WorkerId, lost: pb.PeerLost) -> None:
        """A worker does not reach another which lives: an event per pair and half a minute."""
        job, now, key = self._job, self._job.clock(), (worker, lost.worker, lost.missing)
        self._pairs = {known: pair for known, pair in self._pairs.items() if now - pair.newest < SAY_AGAIN_S}
        pair = self._pairs.setdefault(key, _Pair(now, now, now - SAY_AGAIN_S, lost.reason))
        if now - pair.newest > LASTS_S:
            pair.since = now
        pair.newest, pair.reason = now, lost.reason
        if now - pair.said_at >= SAY_AGAIN_S:
            pair.said_at = now
            job.event("peer-lost", f"{worker} lost {lost.worker} (attempt {lost.attempt}): {lost.reason}")

    def look(self, now: float) -> None:
        """While steps go on, the words are of what is unusually slow, and empty where all is well; else of who is
        waited for."""
        job = self._job
        if job.standing.state is DriverState.RECOVERING or self._presence.goes_on:
            # Nobody is stalled while others are waited for; while steps go on without some, whoever holds them up is.
            reason = Reason.STALLED if self._stalls.is_stalled else Reason.RECOVERING
            job.say_recovering(self._recovering(now), reason=reason)
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
        job, exchange, in_vain = self._job, self._exchange, self._turns.stalls
        kept = [record.kept for record in job.members.workers.values() if record.kept]
        phrases = [words for words in (self._stalls.words, *in_vain, *kept[:MAX_NAMED]) if words]
        parted = [
            f"{worker} has not reached {peer} for {pair.newest - pair.since:.0f} s: {pair.reason}"
            for (worker, peer, is_missing), pair in self._pairs.items()
            if not is_missing and pair.newest - pair.since >= LASTS_S and now - pair.newest <= LASTS_S
        ]
        phrases.extend(parted[:3])
        if job.placement.lease_sets:
            try:  # a channel may be too small for units that were not known when the plan came
                turns.check(job.placement, job.topology, exchange.measured())
            except InvalidManifest as error:
                phrases.append(str(error))
        seconds = self._commits.step_seconds
        usual = statistics.median(seconds) if seconds else 0.0
        limit = max(job.settings.step_notice_min_s, job.settings.step_notice_factor * usual)
        for step in job.ledger.open_steps[:1]:
            if now - step.opened_at > limit:
                waiting = exchange.ends.waiting_for(step.number)
                phrase = f"step {step.number} has run for {now - step.opened_at:.0f} s (usual {usual:.1f} s)"
                phrases.append(phrase + (f", waiting for units {', '.join(waiting[:5])}" if waiting else ""))
                phrases.extend(exchange.full()[:3])
        above = [
            (watch, f"{watch.words}: {metric} is {value:.3g} in step {job.ledger.committed}, above {watch.at_most:g}")
            for metric, watch in job.watches.items()
            if (value := self._commits.metrics.get(metric)) is not None and not value <= watch.at_most
        ]
        phrases.extend(words for _, words in above)
        reason = Reason.TURNS_WITHOUT_ITEMS if in_vain else Reason.MEMORY_KEPT if kept else Reason.STEPPING
        if above and reason is Reason.STEPPING:
            reason = above[0][0].reason
        return Reason.STALLED if self._stalls.is_stalled else reason, "; ".join(phrases)
