"""What others see of a driver: the report that the operator follows. Reads only."""

from __future__ import annotations

import statistics

from rlinf_api.edits import goal_of
from rlinf_api.report import DriverReport
from rlinf_worker.driver.core import Driver


def report(driver: Driver) -> DriverReport:
    """One message of Job.Watch."""
    job, standing = driver.job, driver.job.standing
    measured = driver.profiles.measured
    return DriverReport(
        job_uid=job.uid,
        driver_attempt=job.attempt,
        state=standing.state,
        reason=standing.reason,
        message=standing.message,
        step=job.ledger.committed,
        steps=job.ledger.steps,
        branch=job.ledger.version.branch,
        plan_revision=job.revision,
        plan_uid=driver.switch.uid,
        plan_preparing=driver.switch.preparing,
        plan_prepared=driver.switch.prepared,
        plan_pending_uid=driver.switch.pending_uid,
        plan_failed=driver.switch.failed[0],
        plan_failed_uid=driver.switch.failed_uid,
        plan_message=driver.switch.message,
        plan_pause_s=driver.switch.pause.seconds,
        plan_switches=driver.switch.number,
        missing=() if job.ended.is_set() else tuple(job.members.missing()),
        first_failure=driver.first_failure,
        restarts=driver.workforce.restarts,
        metrics=dict(driver.commits.metrics),
        checkpoint_uri=job.saved[1] if job.saved else "",
        checkpoint_step=job.saved[0].number if job.saved else 0,
        step_seconds=statistics.median(driver.commits.step_seconds) if driver.commits.step_seconds else 0.0,
        plan_steps=measured.count,
        plan_step_s=measured.value,
        plan_step_spread_s=measured.spread,
        goal=goal_of(job.spec),
        scheduler_away=driver.profiles.scheduler_away,
        rulings=driver.workforce.toll.rules.standing,
        silent_agents=driver.agents.silent,
        sequence=job.sequence,
    )
