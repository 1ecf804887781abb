"""One pass over one job: what every step of it needs, the driver that counts, the status that it writes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from rlinf_api import names, times
from rlinf_api.report import DriverReport
from rlinf_operator.policies.pod_view import PodView
from rlinf_operator.reconcile import status
from rlinf_operator.reconcile.draft import Draft
from rlinf_operator.reconcile.state import Decision, Observed
from rlinf_operator.settings import OperatorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass: what every step of it needs."""

    observed: Observed
    now: datetime
    settings: OperatorSettings

    def draft(self) -> Draft:
        return Draft(self.observed.status, generation=self.observed.generation, now=self.now)


def driver_of(observed: Observed, *, life: int) -> tuple[PodView | None, DriverReport | None]:
    """The newest driver pod of this life, and what that very attempt reported; a report of another one is stale."""
    own = [p for p in observed.pods if p.component == names.COMPONENT_DRIVER and p.life == life]
    driver = max(own, key=lambda p: p.attempt, default=None)
    link = observed.driver
    if driver is None or link is None or link.report is None:
        return driver, None
    report = link.report
    fitting = report.job_uid == observed.job.uid and report.driver_attempt == driver.attempt
    return driver, report if fitting else None


def written(this: Pass, draft: Draft, decision: Decision) -> Decision:
    """The decision with its status; progress alone waits for its interval.

    The highest attempt ever seen is written on every path: where the first statuses could not be written, a job may be
    finished or suspended before any pass of a running one was recorded, and an attempt is never given out twice.
    """
    seen = max((p.attempt for p in this.observed.pods), default=0)
    draft.fields["attempt"] = max(draft.fields.get("attempt", 0), this.observed.status.attempt, seen)
    after, before = draft.build(), this.observed.status
    if not this.observed.progress_due and status.without_progress(after) == status.without_progress(before):
        if after != before:
            later_s = times.soonest(decision.requeue_after_s, this.settings.progress_interval_s)
            decision = replace(decision, requeue_after_s=later_s)
        after = before
    return replace(decision, status=after)
