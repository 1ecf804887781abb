"""One pass: what it has seen, and the status that it writes: fields by name, conditions in place, then one RLJobStatus.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from rlinf_api import conditions, times
from rlinf_api.conditions import Condition, JobCondition, JobState, Reason, Status
from rlinf_api.job import CheckpointStatus, FirstFailure, PlanStatusRef, RLJobStatus
from rlinf_api.report import DriverReport, Failure
from rlinf_operator.policies.pod_view import PodView
from rlinf_operator.reconcile.state import Observed
from rlinf_operator.settings import DEFAULTS, OperatorSettings

MAX_MESSAGE = 4000  # a condition's: long enough for every sentence about a manifest, short enough for a terminal
_ORDER = {str(kind): position for position, kind in enumerate(JobCondition)}


class Draft:
    def __init__(self, observed: Observed, *, now: datetime, settings: OperatorSettings = DEFAULTS) -> None:
        self.observed, self.now, self.settings = observed, now, settings
        self.old = observed.status
        self.fields: dict[str, Any] = {"observed_generation": observed.generation}
        self.conditions: Sequence[Condition] = self.old.conditions

    def set(self, kind: JobCondition, status: Status, reason: Reason | str, message: str = "") -> None:
        new = Condition(
            type=kind,
            status=status,
            reason=reason,
            message=message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "...",
            last_transition_time=times.text(self.now),
            observed_generation=self.observed.generation,
        )
        self.conditions = conditions.set_condition(self.conditions, new)

    def knows(self, *, restarts: list[str]) -> None:
        """What this pass has entered into the status counts for the rest of it."""
        self.observed = replace(self.observed, status=self.observed.status.model_copy(update={"restarts": restarts}))
        self.fields["restarts"] = restarts

    def find(self, kind: JobCondition) -> Condition | None:
        return conditions.find(self.conditions, kind)

    def unheard_s(self, driver: PodView | None, report: DriverReport | None) -> float | None:
        """Seconds that a driver at work has left for the first word that this operator hears of it: a new one's first
        pass is before any report. None: there is no such driver, it was heard, or it is late."""
        if driver is None or not driver.at_work or report is not None:
            return None
        left_s = self.settings.driver_late_s - self.observed.silent_s(driver)
        return left_s if left_s > 0 else None

    def reached(self) -> tuple[int, CheckpointStatus | None]:
        """(the last step, the last checkpoint that is known): a driver that has just begun says step 0."""
        return self.fields.get("step") or self.old.step, self.fields.get("checkpoint", self.old.checkpoint)

    def first_failure(self, failure: Failure | None, *, final: bool = False) -> None:
        """Kept once set: what came later is mostly its consequence. `final`: what ended the job, known for certain."""
        known = self.old.first_failure is not None or "first_failure" in self.fields
        if failure is None or (known and not final):
            return
        self.fields["first_failure"] = FirstFailure(**asdict(replace(failure, message=failure.message[-2000:])))

    def finish(self, kind: JobCondition, reason: Reason | str, message: str) -> None:
        """Complete or Failed, once and for ever; whoever finds one of them True writes neither again. The other is not
        written, as `kubectl get` would show its reason."""
        if conditions.is_finished(self.conditions):
            return
        self.set(kind, Status.TRUE, reason, message)
        self.stop()
        self.fields["completion_time"] = times.text(self.now)
        self.fields["placement"] = None

    def stop(self) -> None:
        """Suspended or ended: nothing runs, and nothing is on its way. The plan that was executed last stays named."""
        self.set(JobCondition.RUNNING, Status.FALSE, Reason.STOPPED)
        self.set(JobCondition.PODS_READY, Status.FALSE, Reason.STOPPED)
        self.set(JobCondition.DEGRADED, Status.FALSE, Reason.STOPPED)
        self.fields["estimated_remaining_seconds"] = None
        plan: PlanStatusRef = self.fields.get("plan", self.old.plan)
        applied = self.find(JobCondition.PLAN_APPLIED)
        if applied is not None and applied.status is Status.UNKNOWN:
            was = {"was its plan": plan.current, "was on its way": plan.pending}
            message = "; ".join(f"{name} {what}" for what, name in was.items() if name)
            self.set(JobCondition.PLAN_APPLIED, Status.FALSE, Reason.STOPPED, message)
        self.fields["plan"] = plan.model_copy(update={"pending": ""})

    def build(self) -> RLJobStatus:
        ordered = sorted(self.conditions, key=lambda c: _ORDER.get(c.type, len(_ORDER)))
        life, worked = self.fields.get("life", self.old.life), self.old.worked_life
        if conditions.is_true(ordered, JobCondition.RUNNING):
            worked = life
        state = conditions.state_of(ordered)
        if state is JobState.STARTING and worked == life:  # another driver knows of no step, and waits for all
            state = JobState.RECOVERING
        said = {"conditions": ordered, "state": state, "worked_life": worked}
        return self.old.model_copy(update={**self.fields, **said})
