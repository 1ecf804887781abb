"""What spec.failurePolicy.rules say of a pod that ended, or that has not begun for too long. Pure.

The rules themselves, and which one a failure meets: rlinf_api/failure_rules.py. What a pod's end is where none is met:
failure.py. What follows is done by places.py (pods) and decide.py (the whole job).

| action | cause in status.restarts | counts against |
|---|---|---|
| RestartWorker, RestartPod | as without the rule (User: Program) | the rule's maxRestarts, else as without it |
| Ignore | Infrastructure | the operator's own bound: nothing is tried again for ever |
| RestartJob, Suspend, FailJob | Ruled | nothing; a restart of the job has an entry of its own |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rlinf_api import failure_rules, times
from rlinf_api.failure_rules import WAITS, Met
from rlinf_api.job import FailureAction, FailureKind, FailureRule
from rlinf_api.report import Failure, Ruling
from rlinf_operator.policies.failure import Cause, Verdict
from rlinf_operator.policies.pod_view import PodView

_OF_THE_JOB: Final = (FailureAction.RESTART_JOB, FailureAction.SUSPEND, FailureAction.FAIL_JOB)
AGENT_SILENT: Final = "AgentSilent"
NO_RULE: Final = ""
"""Key of what follows where no rule is met."""
_FAILURES: Final = (Cause.PROGRAM, Cause.INFRASTRUCTURE, Cause.USER)
"""Others are consequences: a newer attempt is there, or no driver is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruled:
    """A pod, the rule that it met, and what is said of it."""

    pod: PodView
    met: Met
    cause: Cause
    failure: Failure

    @property
    def message(self) -> str:
        who, code = self.failure, f", exit code {self.failure.exit_code}" if self.failure.exit_code > 0 else ""
        pod = who.pod or self.pod.name
        whose = f"worker {who.role}/{who.worker} of pod {pod}" if who.worker >= 0 else f"pod {pod}"
        node = f" on node {self.pod.node}" if self.pod.node else ""
        words = f": {who.message}" if who.message else ""
        told = f"{self.met.told}: " if self.met.key != NO_RULE else ""
        return f"{told}{whose}{node} ({who.reason}{code}){words}"


def cause_of(met: Met, cause: Cause) -> Cause:
    if met.action in _OF_THE_JOB:
        return Cause.RULED
    if met.action is FailureAction.IGNORE:
        return Cause.INFRASTRUCTURE
    return Cause.PROGRAM if cause is Cause.USER else cause


def of_pod(
    pod: PodView, verdict: Verdict, *, rules: Sequence[FailureRule], roles: Sequence[str], now: datetime
) -> Ruled | None:
    """None: no rule is met, or it says to go on waiting. `roles`: of its pool."""
    if not rules:
        return None
    cause, failure, waited_s = verdict.cause, verdict.failure, 0.0
    if verdict.alive:
        kind, words = waits_for(pod)
        if kind is None:
            return None
        cause, waited_s = Cause.INFRASTRUCTURE, _waited_s(pod, now=now)
        failure = Failure(pod=pod.name, node=pod.node, exit_code=-1, reason=str(kind), message=words)
    if failure is None or cause not in _FAILURES:
        return None
    met = failure_rules.met(
        rules, roles=[failure.role] if failure.role else roles, pool=pod.pool, exit_code=failure.exit_code,
        reason=failure.reason, waited_s=waited_s,
    )  # fmt: skip
    if met is None or (verdict.alive and met.action is FailureAction.IGNORE):
        return None
    return Ruled(pod=pod, met=met, cause=cause_of(met, cause), failure=failure)


def of_worker(ruling: Ruling, pod: PodView, *, rules: Sequence[FailureRule]) -> Ruled | None:
    """What the driver says of a worker in a pod. It goes by the rules that it has read, which may have been edited."""
    if ruling.action not in set(FailureAction):
        return None  # a newer driver's
    action = FailureAction(ruling.action)
    rule = failure_rules.by_key(rules).get(ruling.rule)
    if rule is None or rule.action is not action:
        rule = FailureRule(action=action)
    met = Met(rule=rule, key=ruling.rule, called=failure_rules.called(rules, ruling.rule))
    return Ruled(pod=pod, met=met, cause=cause_of(met, Cause.PROGRAM), failure=ruling.failure)


def of_silent_agent(
    pod: PodView, *, rules: Sequence[FailureRule], roles: Sequence[str], now: datetime, deadline_s: float
) -> tuple[Ruled | None, float | None]:
    """What becomes of a pod whose agent its driver does not hear: replaced, where no rule says otherwise, once it has
    run for `deadline_s`. None, and in how many seconds it has; nothing, where it does not run."""
    if not pod.at_work or pod.started_at is None:
        return None, None
    left_s = deadline_s - (now - pod.started_at).total_seconds()
    if left_s > 0:
        return None, left_s
    words = "its driver hears nothing of its agent, which is frozen or cut off"
    failure = Failure(pod=pod.name, node=pod.node, exit_code=-1, reason=AGENT_SILENT, message=words)
    met = failure_rules.met(rules, roles=roles, pool=pod.pool, exit_code=-1, reason=AGENT_SILENT)
    met = met or Met(rule=FailureRule(action=FailureAction.RESTART_POD), key=NO_RULE, called=NO_RULE)
    return Ruled(pod=pod, met=met, cause=cause_of(met, Cause.PROGRAM), failure=failure), None


def waits_for(pod: PodView) -> tuple[FailureKind | None, str]:
    """What a pod that has not begun lacks, in whose words; None: it does not wait for these."""
    if pod.unschedulable:
        return FailureKind.UNSCHEDULABLE, pod.unschedulable
    if pod.waits_for_its_image:
        return FailureKind.IMAGE_PULL, f"{pod.waiting_reason} {pod.waiting_message}".strip()
    return None, ""


def look_again_s(pod: PodView, verdict: Verdict, *, rules: Sequence[FailureRule], now: datetime) -> float | None:
    """When a rule that it does not meet yet may be met by time alone."""
    if not verdict.alive or waits_for(pod)[0] is None:
        return None
    waited_s = _waited_s(pod, now=now)
    left = (rule.after_seconds - waited_s for rule in rules if set(rule.reasons) & set(WAITS))
    return times.soonest(*(seconds for seconds in left if seconds > 0))


def _waited_s(pod: PodView, *, now: datetime) -> float:
    """For a node since it was made; for its image since it has a node, as nobody pulls it before."""
    return (now - (pod.scheduled_at or pod.created_at)).total_seconds()
