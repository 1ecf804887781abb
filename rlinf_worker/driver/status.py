"""What others see of a driver: the report that the operator follows, a description for people. Reads only."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from rlinf_api.conditions import Reason
from rlinf_api.report import DriverReport, MemberReport
from rlinf_worker.driver import turns

if TYPE_CHECKING:
    from rlinf_worker.driver.core import Driver
    from rlinf_worker.driver.members import WorkerRecord


def report(driver: Driver) -> DriverReport:
    """One message of Job.Watch."""
    return DriverReport(
        job_uid=driver.job_uid,
        driver_attempt=driver.attempt,
        state=driver.state,
        reason=driver.reason,
        message=driver.message,
        step=driver.ledger.committed,
        steps=driver.ledger.steps,
        branch=driver.ledger.version.branch,
        plan_revision=driver.revision,
        plan_preparing=driver.switch.preparing,
        plan_prepared=driver.switch.prepared,
        plan_failed=driver.switch.failed[0],
        plan_message=driver.switch.message,
        plan_pause_s=driver.switch.pause_s,
        plan_switches=driver.switch.number,
        members=tuple(_member(driver, r) for r in driver.members.workers.values()),
        missing=() if driver.ended.is_set() else tuple(driver.members.missing()),
        first_failure=driver.first_failure,
        restarts=driver.workforce.restarts,
        metrics=dict(driver.commits.metrics),
        checkpoint_uri=driver.saved[1] if driver.saved else "",
        checkpoint_step=driver.saved[0].number if driver.saved else 0,
        step_seconds=statistics.median(driver.commits.step_seconds) if driver.commits.step_seconds else 0.0,
        sequence=driver.sequence,
    )


def _member(driver: Driver, record: WorkerRecord) -> MemberReport:
    pod = driver.members.pods[record.placed.pod]
    return MemberReport(
        worker=record.placed.id,
        pod=pod.pod,
        node=pod.node,
        attempt=record.attempt,
        phase=record.progress or record.state.value,
        restarts=record.restarts,
    )


def unusual(driver: Driver, now: float) -> tuple[Reason, str]:
    """Of a running job: its reason, and what is unusually slow, for people; empty where all is well."""
    phrases, settings = [*driver.workforce.quiet(), *driver.turns.stalls], driver.settings
    phrases.extend(driver.losses.words(now)[:3])
    if driver.placement is not None and driver.placement.lease_sets and (exchange := driver.exchange) is not None:
        small = turns.too_small(driver.placement, exchange.topology, exchange.measured())
        phrases.extend([small] if small else [])
    seconds = driver.commits.step_seconds
    usual = statistics.median(seconds) if seconds else 0.0
    limit = max(settings.step_notice_min_s, settings.step_notice_factor * usual)
    for step in driver.ledger.open_steps[:1]:
        if now - step.opened_at > limit and driver.exchange is not None:
            waiting = driver.exchange.waiting_for(step.number)
            phrase = f"step {step.number} has run for {now - step.opened_at:.0f} s (usual {usual:.1f} s)"
            phrases.append(phrase + (f", waiting for units {', '.join(waiting[:5])}" if waiting else ""))
            phrases.extend(driver.exchange.full()[:3])
    return Reason.TURNS_WITHOUT_ITEMS if driver.turns.stalls else Reason.STEPPING, "; ".join(phrases)


def describe(driver: Driver) -> dict[str, Any]:
    """For people and diagnosis bundles."""
    exchange, ledger = driver.exchange, driver.ledger
    steps = [{"step": s.number, "units": len(s.keys), "ranksDone": sorted(s.done)} for s in ledger.open_steps]
    queues = {name: {"depth": depth, **counts} for name, counts, depth in exchange.counts()} if exchange else {}
    return {
        "driverAttempt": driver.attempt,
        "state": str(driver.state),
        "planRevision": driver.revision,
        "planSwitch": {
            "number": driver.switch.number,
            "phase": driver.switch.phase.value,
            "says": driver.switch.message,
        },
        "turns": driver.turns.words(),
        "roster": driver.gangs.roster,
        "committed": str(ledger.version),
        "openSteps": steps,
        "routes": [list(route) for route in exchange.routes] if exchange else [],
        "queues": queues,
        "spares": [{"role": r, "state": s, "count": n} for (r, s), n in driver.workforce.spares.counts().items()],
        "workers": {
            wid: {"attempt": r.attempt, "state": r.state.value, "restarts": r.restarts}
            for wid, r in driver.members.workers.items()
        },
    }
