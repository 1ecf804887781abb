"""spec.failurePolicy.rules of workers that ended in a pod which lives: which rule is met, how often it may restart, and
what is left to the operator, as only it replaces pods and jobs.

For: workforce.py, which starts the worker again in each case. Not for: pods (rlinf_operator/policies/rules.py). A new
driver counts from zero, as it does with maxRestarts.
"""

from __future__ import annotations

from typing import Final

from rlinf_api import failure_rules
from rlinf_api.failure_rules import Met
from rlinf_api.job import FailureAction
from rlinf_api.report import Failure, Ruling
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.members import Failures, WorkerRecord

MOST_IGNORED: Final = 999
"""Failures of action Ignore within resetAfterSeconds: nothing is tried again for ever, and this is one each 4 s for an
hour, what the operator allows of lost pods at most."""
_LEFT: Final = (FailureAction.RESTART_POD, FailureAction.RESTART_JOB, FailureAction.SUSPEND)


class Rules:
    def __init__(self, job: Job) -> None:
        self._job, self._policy = job, job.spec.failure_policy
        self._failures: dict[str, Failures] = {}  # by rule, of those that count by themselves
        self._standing: dict[tuple[str, str], Ruling] = {}  # by (action, pod); bounded by the job's pods
        self.count = dict.fromkeys(map(str, FailureAction), 0)

    def met(self, record: WorkerRecord, failure: Failure) -> Met | None:
        placed = record.placed
        return failure_rules.met(
            self._policy.rules, roles=[placed.role], pool=placed.pod[0], exit_code=failure.exit_code,
            reason=failure.reason,
        )  # fmt: skip

    def obey(self, met: Met, failure: Failure) -> str:
        """Counts it, and leaves to the operator what is its own. Why the job is to fail for it; empty: it is not."""
        self.count[str(met.action)] += 1
        if met.action in _LEFT:
            pod = failure.pod if met.action is FailureAction.RESTART_POD else ""
            ruling = Ruling(action=str(met.action), rule=met.key, failure=failure)
            self._standing.setdefault((str(met.action), pod), ruling)
            return ""
        most = MOST_IGNORED if met.action is FailureAction.IGNORE else met.rule.max_restarts
        if most is None:
            return ""
        own = self._policy.model_copy(update={"max_restarts": most})
        counted = self._failures.setdefault(met.key, Failures(own))
        if not counted.add(self._job.clock()):
            return ""
        within = f"{counted.count} failures of workers met {met.told} within {self._policy.reset_after_seconds} s"
        return f"{within}, more than its {'bound' if met.rule.max_restarts is None else 'maxRestarts'} of {most}"

    def replaced(self, pod: str) -> None:
        """Another attempt has taken its place."""
        self._standing.pop((str(FailureAction.RESTART_POD), pod), None)

    @property
    def standing(self) -> tuple[Ruling, ...]:
        return tuple(self._standing.values())
