"""What the end of a worker costs the job: another start, one of the failures that it may have, what a rule of
failurePolicy says, or its life.

    loss = toll.of_exit(record, failure, exit_code=1)      Loss(is_counted=True, pause_s=None): it is started again

Called by workforce.py, which starts workers again, and by agents.py. Not for: what a lost worker means for units, steps
and plans (core.py).
"""

from __future__ import annotations

import builtins
import re
from dataclasses import dataclass
from typing import Final

from rlinf_api import conditions, failure_rules, names
from rlinf_api.errors import DeadlineExceeded
from rlinf_api.failure_rules import Met
from rlinf_api.job import FailureAction
from rlinf_api.report import Failure
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.members import Failures, WorkerRecord, WorkerState
from rlinf_worker.driver.rules import Rules
from rlinf_worker.roles.loading import LoadFailed

ROLES: Final = frozenset({"EnvironmentFailed", "RoleReturned"})
SAME_DEATHS: Final = 3
"""Deaths of a role, in the same words, each in a life that began after the one before, with no step between, until the
job fails with them: more tries cost minutes and tell nothing new."""


def _is_of_the_role(reason: str, *, is_rank: bool = False) -> bool:
    """What only its code can mend: not what machine, network or memory did to it. Between ranks a RuntimeError is also
    how torch says that another one is gone.

    >>> [_is_of_the_role(reason) for reason in ("KeyError", "FileNotFoundError", "MemoryError", "WorkerUnreachable")]
    [True, False, False, False]
    >>> [_is_of_the_role("RuntimeError", is_rank=is_rank) for is_rank in (False, True)]
    [True, False]
    """
    known = getattr(builtins, reason, None)
    if not isinstance(known, type) or not issubclass(known, Exception):
        return reason in ROLES
    return not issubclass(known, OSError | MemoryError) and not (is_rank and known is RuntimeError)


@dataclass(frozen=True, slots=True)
class _Deaths:
    """The deaths of one role in a row: in which words, how many, when the last was."""

    words: tuple[str, str, int]
    count: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """How a worker that ended is started again. `is_counted`: as one of the failures that the job may have. `pause_s`:
    in place of the usual one."""

    is_counted: bool = True
    pause_s: float | None = None
    is_of_a_rule: bool = False


class Toll:
    def __init__(self, job: Job) -> None:
        self._job, self._settings, self._clock = job, job.settings, job.clock
        self._failures = Failures(job.spec.failure_policy)
        self._deaths: dict[str, _Deaths] = {}  # by role
        self.rules = Rules(job)
        self.first_failure: Failure | None = None

    def of_exit(self, record: WorkerRecord, failure: Failure, *, exit_code: int) -> Loss | None:
        """What follows when a worker ends that nobody had asked to end. None: the job has failed by it."""
        said = failure.message or failure.reason
        self.first_failure = self.first_failure or failure
        if (met := self.rules.met(record, failure)) is not None:
            return self._obey(record, met, failure)
        if exit_code == names.EXIT_USER_ERROR and not self._may_pass(record, failure):
            self._job.fail(conditions.of_user(failure.reason), f"worker {record.placed.id}: {said}", failure)
            return None
        if exit_code == names.EXIT_BUG:
            self._job.fail(conditions.Reason.INTERNAL_ERROR, f"worker {record.placed.id}: {said}", failure)
            return None
        return Loss(is_counted=not self._waited_for_a_pod(failure))

    def _waited_for_a_pod(self, failure: Failure) -> bool:
        """All that wait for a pod which finds no node run out of patience, hundreds of ranks at once, and none of them
        is to blame. Of the pod itself people are told elsewhere."""
        absent = any(pod.wanted and not pod.attached for pod in self._job.members.pods.values())
        return absent and failure.reason == DeadlineExceeded.__name__

    def of_one_given_up(self, record: WorkerRecord, why: str) -> Loss:
        """It did not end by itself, and has no exit code."""
        pod, (role, _, number) = self._job.members.pods[record.placed.pod], record.placed.id.partition("/")
        failure = Failure(
            role=role, worker=int(number), pod=pod.pod, node=pod.node, exit_code=-1, reason="GivenUp", message=why
        )
        met = self.rules.met(record, failure)
        return self._obey(record, met, failure) if met is not None else Loss()

    def count(self, who: str, why: str) -> None:
        """A failure that counts: too many fail the job."""
        if self._failures.add(self._clock()):
            policy = self._job.spec.failure_policy
            text = f"workers failed {self._failures.count} times within {policy.reset_after_seconds} s, more than "
            text += f"spec.failurePolicy.maxRestarts={policy.max_restarts} allows; the last was {who}: "
            self._job.fail(conditions.Reason.TOO_MANY_RESTARTS, text + why, self.first_failure)

    def same_again(self, record: WorkerRecord, failure: Failure, *, is_rank: bool) -> None:
        """Three deaths of a role with the same words, numbers apart, and no step between: a bug, and no accident."""
        if not _is_of_the_role(failure.reason, is_rank=is_rank):
            return
        words = (failure.reason, re.sub(r"\d+", "#", failure.message), self._job.ledger.committed)
        last = self._deaths.get(record.placed.role)
        count = 1
        if last is not None and last.words == words:
            if record.started_at <= last.at:
                return  # it lived as that one did: one accident may have met both
            count += last.count
        self._deaths[record.placed.role] = _Deaths(words, count, self._clock())
        if count >= SAME_DEATHS:
            text = f"role {record.placed.role!r} died {count} times in the same way, and no step ended between: "
            self._job.fail(conditions.Reason.USER_ERROR, text + failure.message, failure)

    def _may_pass(self, record: WorkerRecord, failure: Failure) -> bool:
        """Whether exit code 64 may be tried again. In a job that has begun its role was made of the same code before:
        that it cannot be made now, or cannot load more, may be the machine's fault. What a worker says at work is
        final, and so is what it says of checkpoints."""
        is_of_the_start = record.state is not WorkerState.READY or failure.reason == LoadFailed.__name__
        is_of_checkpoints = conditions.of_user(failure.reason) is not conditions.Reason.USER_ERROR
        return self._job.has_begun and is_of_the_start and not is_of_checkpoints

    def _obey(self, record: WorkerRecord, met: Met, failure: Failure) -> Loss:
        """What a rule of failurePolicy says of a worker that ended: in each case it is started again meanwhile."""
        worker, said = record.placed.id, failure.message or failure.reason
        text = f"{met.told}: worker {worker} ended ({failure.reason}, exit code {failure.exit_code}): {said}"
        self._job.event("failure-rule", text, worker=worker, rule=met.called, action=str(met.action))
        if met.action is FailureAction.FAIL_JOB:
            self._job.fail(conditions.Reason.FAILURE_RULE, text, failure)
        problem = self.rules.obey(met, failure)
        if problem:
            self._job.fail(conditions.Reason.TOO_MANY_RESTARTS, f"{problem}; the last was {worker}: {said}", failure)
        counts = met.action is FailureAction.RESTART_WORKER and met.rule.max_restarts is None
        pause_s = failure_rules.pause_s(met.rule, record.failures) or None
        if met.action is FailureAction.RESTART_POD:  # where nobody replaces the pod, it is started where it was
            pause_s = max(pause_s or 0.0, self._settings.restart_delay_max_s)
        return Loss(is_counted=counts, pause_s=pause_s, is_of_a_rule=True)
