"""What the writes of a pass answered, put into its status before that is written. Pure.

`decide` cannot know whether a plan is feasible or whether a quota refuses a pod; the answer must still reach the person
in the same pass, in the condition where it belongs.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from rlinf_api.conditions import JobCondition, Reason, Status
from rlinf_api.job import RLJobStatus
from rlinf_operator.reconcile.draft import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    planned: str = ""
    """Name of a plan that was written in this pass."""
    infeasible: tuple[str, ...] = ()
    scheduler_away: str = ""
    driver_refused: str = ""
    writes_refused: tuple[str, ...] = ()
    """A sentence for each child that could not be created."""
    going: bool = False
    """One of them because its namespace is being deleted."""


def status_after(
    answers: Answers, *, before: RLJobStatus, decided: RLJobStatus, generation: int, now: datetime
) -> RLJobStatus:
    """The status to write. Refused writes leave everything but their message as it was: the next pass tries again, and
    must find the attempts, restarts and lives that this pass found."""
    if answers.writes_refused:
        draft = Draft(before, generation=generation, now=now)
        more = f"; and {len(answers.writes_refused) - 1} more" if len(answers.writes_refused) > 1 else ""
        draft.set(JobCondition.PODS_READY, Status.FALSE, Reason.PODS_MISSING, answers.writes_refused[0] + more)
        return draft.build()
    draft = Draft(decided, generation=generation, now=now)
    running = draft.find(JobCondition.RUNNING)
    waits = running is None or running.reason == Reason.WAITING_FOR_PLAN  # else the job goes on under an older plan
    if answers.infeasible:
        draft.set(JobCondition.VALID, Status.FALSE, Reason.INFEASIBLE, "; ".join(answers.infeasible))
        if waits:
            draft.set(JobCondition.RUNNING, Status.UNKNOWN, Reason.WAITING_FOR_PLAN, "no plan is feasible: see Valid")
    elif answers.scheduler_away:
        kinds = (JobCondition.PLAN_APPLIED, JobCondition.RUNNING) if waits else (JobCondition.PLAN_APPLIED,)
        for kind in kinds:
            draft.set(kind, Status.UNKNOWN, Reason.SCHEDULER_UNAVAILABLE, answers.scheduler_away)
    if answers.driver_refused:
        draft.set(JobCondition.PLAN_APPLIED, Status.FALSE, Reason.PLAN_PENDING, answers.driver_refused)
    return keep_transition_times(before, draft.build())


def keep_transition_times(before: RLJobStatus, after: RLJobStatus) -> RLJobStatus:
    """A condition that this pass set twice and that ends as it stood before did not change: its time stays."""
    old = {c.type: c for c in before.conditions}
    kept = [
        c.model_copy(update={"last_transition_time": old[c.type].last_transition_time})
        if c.type in old and old[c.type].status == c.status
        else c
        for c in after.conditions
    ]
    return after.model_copy(update={"conditions": kept})
