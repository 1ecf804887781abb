"""How long each loss kept somebody from work, and what it cost the others: the event `recovered`, and its counters.

    lost(workers) ──each back(worker)──> at work again ──accounts of the step in which that was──> event `recovered`

Told by workforce.py (lost), gang.py (back: Begin has been sent) and commits.py (accounts of steps). Not for: deciding
what a loss means. The others' cost is what they waited for data in the steps that the recovery touches, beyond the
median of steps that no recovery touched: a role that waits half of its time anyway has not lost that half.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final

from rlinf_api.names import WorkerId
from rlinf_worker.driver.job import Job

BETWEEN: Final = "between"
"""In an account: seconds that the worker waited for data before the step began and after the one before it had ended or
was given up. They are in no step's window."""
WAITING: Final = "wait_data"
USUAL_STEPS: Final = 20  # steps whose median is the usual wait: what a role waits changes as the policy learns
DRIVER: Final = WorkerId("driver")  # in the place of a worker: the driver that was before this one
MAX_UNDER_WAY: Final = 64  # losses at once; a job that has more is not recovering


@dataclass(slots=True)
class Recovery:
    who: str
    role: str
    """Empty: a pod. `driver`: a driver before this one."""
    why: str
    since: float
    workers: frozenset[WorkerId]
    awaited: set[WorkerId]
    back_at: float | None = None
    rehomed_at: float | None = None  # others do its work since then: no step waits for it any more
    start_s: float = 0.0
    """The part of it that the start of the last worker took, from the order to start it until Begin."""
    spares: int = 0  # of these workers came back from a warm spare
    lost_s: dict[str, float] = field(default_factory=dict)  # by role, summed over its workers

    def touches(self, begin: float, end: float) -> bool:
        over_at = self.back_at if self.rehomed_at is None else self.rehomed_at
        return self.since < end and (over_at is None or over_at >= begin)


class Recoveries:
    def __init__(self, job: Job) -> None:
        self._job, self._born_at = job, job.clock()
        self._driver_back_at: float | None = None
        self._driver_was_lost = False
        self.under_way: list[Recovery] = []
        self._usual: dict[str, deque[float]] = {}
        self._ended_at: float | None = None  # of the step whose accounts came last
        self.count: dict[str, int] = {}  # by role; "pod" for pods
        self.seconds: dict[str, float] = {}
        self.lost_s: dict[str, float] = {}  # by the role that waited

    def lost(self, workers: Iterable[WorkerId], *, who: str, role: str, why: str, since: float | None = None) -> None:
        """`since`: the first sign of it, where that was before now. Who is awaited already stays so."""
        awaited = {worker for worker in workers if not any(worker in known.awaited for known in self.under_way)}
        if awaited and len(self.under_way) < MAX_UNDER_WAY:
            since = self._job.clock() if since is None else since
            self.under_way.append(Recovery(who, role, why, since, frozenset(awaited), awaited))

    def driver_lost(self, since: float) -> None:
        """An agent has obeyed a driver before this one, and has been without since then. Its word, as the driver that
        died tells nothing; of several the earliest."""
        for known in self.under_way:
            if DRIVER in known.awaited:
                known.since = min(known.since, since)
                return
        if self._driver_was_lost:
            return
        self._driver_was_lost = True
        self.lost([DRIVER], who=DRIVER, role=DRIVER, why="another has taken over", since=since)
        if self._driver_back_at is not None:  # the workers were here before their agent was
            self.back(DRIVER, started_at=self._born_at, at=self._driver_back_at)

    def driver_back(self) -> None:
        """All workers are ready under this driver."""
        if self._driver_back_at is None:
            self._driver_back_at = self._job.clock()
        self.back(DRIVER, started_at=self._born_at)

    def back(self, worker: WorkerId, *, started_at: float, from_spare: bool = False, at: float | None = None) -> None:
        """`at`: now."""
        for known in self.under_way:
            if worker in known.awaited:
                known.awaited.discard(worker)
                known.spares += from_spare
                if not known.awaited:
                    known.back_at = self._job.clock() if at is None else at
                    known.start_s = known.back_at - max(started_at, known.since)

    def rehomed(self, away: AbstractSet[WorkerId]) -> None:
        """Others do the work of these until they are back, which may be days."""
        for known in self.under_way:
            if known.rehomed_at is None and known.awaited and known.awaited <= away:
                known.rehomed_at = self._job.clock()

    def forget(self, worker: WorkerId) -> None:
        """It is in no plan any more."""
        for known in self.under_way:
            known.awaited.discard(worker)
        self.under_way = [known for known in self.under_way if known.awaited or known.back_at is not None]

    def step(self, accounts: Mapping[str, Mapping[str, float]], *, ended_at: float) -> None:
        """The accounts of a step that ended then."""
        begin = self._ended_at if self._ended_at is not None else float("-inf")
        touching = [known for known in self.under_way if known.touches(begin, ended_at)]
        if touching:
            self._charge(touching, accounts)
        else:
            for role, waits in _waits(accounts).items():
                self._usual.setdefault(role, deque(maxlen=USUAL_STEPS)).append(sum(waits))
        self._ended_at = ended_at
        self.tell(until=ended_at)

    def _charge(self, touching: list[Recovery], accounts: Mapping[str, Mapping[str, float]]) -> None:
        """Charges the first of several: a second is lost once."""
        known = touching[0]
        victims: set[str] = {worker for other in touching for worker in other.workers}
        everybody = _waits(accounts)
        for role, waits in _waits({w: a for w, a in accounts.items() if w not in victims}).items():
            usual = statistics.median(self._usual[role]) if self._usual.get(role) else 0.0
            beyond = max(0.0, sum(waits) - usual * len(waits) / len(everybody[role]))
            known.lost_s[role] = known.lost_s.get(role, 0.0) + beyond
            self.lost_s[role] = self.lost_s.get(role, 0.0) + beyond

    def tell(self, *, until: float = float("inf")) -> None:
        """Says which are over; at the end of a job also those whose last step has no accounts yet."""
        over = [known for known in self.under_way if known.back_at is not None and known.back_at <= until]
        self.under_way = [known for known in self.under_way if known not in over]
        for known in over:
            assert known.back_at is not None
            kind, seconds = known.role or "pod", known.back_at - known.since
            self.count[kind] = self.count.get(kind, 0) + 1
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
            lost = {role: round(value, 3) for role, value in sorted(known.lost_s.items())}
            said = ", ".join(f"{role} {value:.1f} s" for role, value in lost.items() if value >= 0.05)
            start_s = round(known.start_s, 3)
            start = f"its start {start_s:.1f} s" + (" from a warm spare" if known.spares else "")
            text = f"{known.who} is back at work after {seconds:.1f} s, {start} ({known.why})"
            fields: dict[str, Any] = {"who": known.who, "seconds": round(seconds, 3), "start_s": start_s}
            fields["spares"] = known.spares
            self._job.event("recovered", text + (f"; the others lost {said}" if said else ""), lost_s=lost, **fields)


def _waits(accounts: Mapping[str, Mapping[str, float]]) -> dict[str, list[float]]:
    """The seconds that each worker has waited, by role."""
    found: dict[str, list[float]] = {}
    for worker, account in accounts.items():
        waited = account.get(WAITING, 0.0) + account.get(BETWEEN, 0.0)
        found.setdefault(worker.partition("/")[0], []).append(waited)
    return found
