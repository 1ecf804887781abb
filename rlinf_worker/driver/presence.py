"""Who is there: when the job may begin, and whose units go to others of its role because it does not come back.

    READY ──not ready for rehome_after_s, in a job that has begun──> away ──READY──> its units are its own again

Called by core.py, with every tick and whenever somebody is ready. What moves is the exchange's; who is started again
and when, the workforce's. A rank of a gang is never away: without it there is no gang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from rlinf_worker.driver import status
from rlinf_worker.driver.members import WorkerRecord, WorkerState

if TYPE_CHECKING:
    from rlinf_worker.driver.core import Driver


GO_ON: Final = "steps go on without"
MAX_NAMED: Final = 8  # in one sentence


def lost(record: WorkerRecord) -> str:
    return f"worker {record.placed.id} is started again: {record.why}"


class Presence:
    def __init__(self, driver: Driver, *, rehome_after_s: float) -> None:
        self._driver, self._after_s = driver, rehome_after_s
        self._since: dict[WorkerId, float] = {}  # of workers that are not ready
        self._has_begun = False  # under this driver or one before, as far as it can tell

    @property
    def away(self) -> frozenset[WorkerId]:
        return self._driver.members.away

    @property
    def has_begun(self) -> bool:
        """All workers were ready once. Of a driver before this one it is taken for granted: after a loss of everything
        nobody is left who could tell."""
        return self._has_begun or self._driver.attempt > 1

    def overslept(self, seconds: float) -> None:
        self._since = {worker: since + seconds for worker, since in self._since.items()}

    # --- who is away --------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        driver = self._driver
        now, workers = driver.clock(), driver.members.workers
        absent = [wid for wid, record in workers.items() if record.state is not WorkerState.READY]
        self._since = {worker: self._since.get(worker, now) for worker in absent}
        self._has_begun = self._has_begun or driver.begun or driver.ledger.committed > 0
        late = {worker for worker, since in self._since.items() if now - since >= self._after_s}
        away = frozenset(worker for worker in late if self._has_begun and self._has_others(worker, late))
        if away != self.away:
            self._change(away)
        if away:
            driver.workforce.recoveries.rehomed(away)

    def _has_others(self, worker: WorkerId, late: set[WorkerId]) -> bool:
        """Whether somebody can stand in for it."""
        members, gangs = self._driver.members, self._driver.gangs
        role = members.workers[worker].placed.role
        is_gang = role == gangs.role or role in gangs.rosters
        return not is_gang and any(w.placed.id not in late for w in members.of_role(role))

    def _change(self, away: frozenset[WorkerId]) -> None:
        driver, gone, back = self._driver, sorted(away - self.away), sorted(self.away - away)
        driver.members.away = away
        moved = driver.exchange.stand_in(away, roster=driver.gangs.roster) if driver.exchange is not None else 0
        for worker in gone:
            text = f"worker {worker} has been away for {self._after_s:g} s: others of its role take over its work"
            driver.event("rehomed", text, worker=worker, units=moved)
        for worker in back:
            driver.event("rehomed", f"worker {worker} is not away any more: its work is its own again", worker=worker)
        if driver.begun and away and not driver.ending:
            driver.state, driver.reason = DriverState.RECOVERING, "Recovering"
            driver.message = self.message(driver.clock())
        self.maybe_begin()
        if driver.exchange is not None:
            driver.exchange.match()
        driver.pulse()

    @property
    def goes_on(self) -> str:
        """That steps go on without somebody, in words; empty: nobody is away, or others are waited for, too."""
        driver = self._driver
        return self._words() if self.away and driver.begun and driver.members.all_ready(besides=self.away) else ""

    def _words(self) -> str:
        who = ", ".join(f"worker {worker}" for worker in sorted(self.away))
        return f"{GO_ON} {who}, whose work others of the role take over until it is back"

    def message(self, now: float) -> str:
        """Of a recovery: that steps go on and what is slow in them, or who is waited for, and why. What was told stays
        as long as it is true, for of several losses any may be the one that takes long."""
        driver, told = self._driver, self._driver.message
        if without := self.goes_on:
            return "; ".join(part for part in (without, status.unusual(driver, now)[1]) if part)
        workers = driver.members.workers.items()
        awaited = [w for wid, w in workers if w.state is not WorkerState.READY and wid not in self.away]
        if losses := [lost(w) for w in awaited if w.why]:
            return told if told in losses else losses[0]
        who = ", ".join(f"worker {w.placed.id}" for w in awaited[:MAX_NAMED])
        return f"waiting for {who}" if told.startswith(GO_ON) else told

    # --- begin --------------------------------------------------------------------------------------------------------
    def maybe_begin(self) -> None:
        """All workers are ready, but for those that are away."""
        driver, away = self._driver, self.away
        is_running = driver.begun and (driver.state is DriverState.RUNNING or bool(away))
        if driver.ending or is_running or not driver.members.all_ready(besides=away):
            return
        count = len(driver.members.workers)
        driver.event("running", f"all {count} workers are ready" if not away else self._words())
        driver.state, driver.reason, driver.message = DriverState.RUNNING, "Stepping", ""
        if away:
            driver.state, driver.reason, driver.message = DriverState.RECOVERING, "Recovering", self._words()
        driver.begun = self._has_begun = True
        driver.workforce.recoveries.driver_back()
        ledger = driver.ledger
        if driver.ending_at is None and (ledger.finished or driver.commits.told_last):
            # The driver before this one committed the last step.
            if not ledger.finished:  # but of a drain
                ledger.end()
            driver.ending_at = driver.clock() + driver.settings.save_timeout_s
        driver.pulse()
