"""Measurements that drivers report, kept per job: the newest ones, bounded. For the planner proper, which fits its
curves to them; the rule for the first plan reads none.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

MAX_JOBS: Final = 1_000  # the oldest job's profile goes first: it has most likely ended
MAX_REPORTS: Final = 100  # one job's; a report per step, so the last 100 steps
MAX_MEASUREMENTS: Final = 10_000  # one report's; a job has tens


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    role: str
    quantity: str
    batch: float
    value: float
    spread: float
    provenance: str  # measured | fitted | assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEdge:
    producer: str
    consumer: str
    channel: str
    distance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReport:
    plan_revision: int
    measurements: tuple[Measurement, ...]
    edges: tuple[MeasuredEdge, ...] = ()


class Profiles:
    """At most MAX_JOBS x MAX_REPORTS reports: charged by add(), freed by the oldest falling out."""

    def __init__(self, *, max_jobs: int = MAX_JOBS, max_reports: int = MAX_REPORTS) -> None:
        self._max_jobs, self._max_reports = max_jobs, max_reports
        self._reports: OrderedDict[str, deque[ProfileReport]] = OrderedDict()

    def add(self, job_uid: str, report: ProfileReport) -> str:
        """Why the report is refused; empty where it was kept."""
        if len(report.measurements) > MAX_MEASUREMENTS:
            return f"got {len(report.measurements)} measurements at once, wanted at most {MAX_MEASUREMENTS}; split them"
        self._reports.setdefault(job_uid, deque(maxlen=self._max_reports)).append(report)
        self._reports.move_to_end(job_uid)
        while len(self._reports) > self._max_jobs:
            self._reports.popitem(last=False)
        return ""

    def of(self, job_uid: str) -> tuple[ProfileReport, ...]:
        return tuple(self._reports.get(job_uid, ()))
