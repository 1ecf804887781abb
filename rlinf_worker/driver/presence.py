"""Who is there: when the job may begin, and whose units go to others of its role because it does not come back.

    READY ──not ready for rehome_after_s, in a job that has begun──> away ──READY──> its units are its own again

Called by core.py, with every tick and every settling. What moves is the exchange's; who is started again and when, the
workforce's; what people are told of it, notices.py's. A rank of a gang is never away: without it there is no gang.
"""

from __future__ import annotations

from typing import Final

from rlinf_api.names import WorkerId
from rlinf_worker.driver.commits import Commits
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.gang import Gangs
from rlinf_worker.driver.job import Dirty, Job
from rlinf_worker.driver.members import WorkerState
from rlinf_worker.driver.workforce import Workforce

GO_ON: Final = "steps go on without"


class Presence:
    def __init__(self, job: Job, exchange: Exchange, workforce: Workforce, commits: Commits, gangs: Gangs) -> None:
        self._job, self._exchange, self._workforce = job, exchange, workforce
        self._commits, self._gangs = commits, gangs
        self._after_s = job.settings.limits.rehome_after_s
        self._since: dict[WorkerId, float] = {}  # of workers that are not ready
        self.changes = 0
        """How often somebody has gone away or come back."""

    # --- who is away --------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        job = self._job
        now, workers = job.clock(), job.members.workers
        absent = [wid for wid, record in workers.items() if record.state is not WorkerState.READY]
        self._since = {worker: self._since.get(worker, now) for worker in absent}
        job.began = job.began or job.ledger.committed > 0
        late = {worker for worker, since in self._since.items() if now - since >= self._after_s}
        away = frozenset(worker for worker in late if job.began and self._has_others(worker, late))
        if away != job.members.away:
            self._change(away)
        if away:
            self._workforce.recoveries.rehomed(away)

    def _has_others(self, worker: WorkerId, late: set[WorkerId]) -> bool:
        """Whether somebody can stand in for it."""
        members = self._job.members
        role = members.workers[worker].placed.role
        return not self._gangs.is_gang(role) and any(w.placed.id not in late for w in members.of_role(role))

    def _change(self, away: frozenset[WorkerId]) -> None:
        job = self._job
        gone, back = sorted(away - job.members.away), sorted(job.members.away - away)
        job.members.away = away
        self.changes += 1
        moved = self._exchange.stand_in(away)
        for worker in gone:
            text = f"worker {worker} has been away for {self._after_s:g} s: others of its role take over its work"
            job.event("rehomed", text, worker=worker, units=moved)
        for worker in back:
            job.event("rehomed", f"worker {worker} is not away any more: its work is its own again", worker=worker)
        job.mark(Dirty.MEMBERS | Dirty.SHOWN)

    @property
    def words(self) -> str:
        """That steps go on without those that are away."""
        who = ", ".join(f"worker {worker}" for worker in sorted(self._job.members.away))
        return f"{GO_ON} {who}, whose work others of the role take over until it is back"

    @property
    def goes_on(self) -> str:
        """The same; empty: nobody is away, or others are waited for, too."""
        job, away = self._job, self._job.members.away
        return self.words if away and job.begun and job.all_here else ""

    # --- begin --------------------------------------------------------------------------------------------------------
    def settle(self) -> None:
        """All workers are ready, but for those that are away: the job goes on."""
        job, away = self._job, self._job.members.away
        if job.ending or (job.begun and (job.is_running or away)) or not job.all_here:
            return
        count = len(job.members.workers)
        job.event("running", f"all {count} workers are ready" if not away else self.words)
        job.begin(without=self.words if away else "")
        self._workforce.recoveries.driver_back()
        ledger = job.ledger
        if ledger.finished and not self._commits.told_last:
            # An edit has put the end behind where the gang is, and no driver could say so in time: one step more.
            ledger.steps = ledger.committed + 1
        elif self._commits.told_last:
            # The driver before this one committed the last step.
            if not ledger.finished:  # but of a drain
                ledger.end()
            job.ending_at = job.clock() + job.settings.save_timeout_s
