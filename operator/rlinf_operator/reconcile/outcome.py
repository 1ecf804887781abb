"""What the writes of a pass answered, put into its status before that is written. Pure.

`decide` cannot know whether a plan is feasible or whether a quota refuses a pod; the answer must still reach the person
in the same pass, in the condition where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from rlinf_api.conditions import JobCondition, Reason, Status
from rlinf_api.job import RLJobStatus
from rlinf_operator.policies import restart
from rlinf_operator.policies.failure import Cause
from rlinf_operator.reconcile.draft import Draft
from rlinf_operator.reconcile.state import Observed


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    planned: str = ""
    """Name of a plan that was written in this pass."""
    infeasible: tuple[str, ...] = ()
    scheduler_away: str = ""
    driver_refused: str = ""
    queue_refused: str = ""
    not_adjusted: str = ""
    """Why the driver does not go by the spec's goal yet."""
    writes_refused: tuple[str, ...] = ()
    """A sentence for each child that could not be created."""
    late_refused: tuple[str, ...] = ()
    """The same of pods that only the plan on its way needs."""
    untried: int = 0
    """Pods that were not tried, as they would have been refused like those."""
    rest: int = 0
    """Pods that are left to the next pass."""
    over_quota: str = ""
    """What a full quota said, of any of them."""
    no_room: bool = False
    """It said so of pods that the job needs."""
    makes_room: tuple[str, ...] = ()
    """DeletePod.makes_room of live pods that go before their successors, which a quota refuses."""
    going: bool = False
    """One of them because its namespace is being deleted."""

    @property
    def held(self) -> bool:
        """Pods are still to be made."""
        return bool(self.writes_refused or self.late_refused or self.rest)


def status_after(answers: Answers, observed: Observed, *, decided: RLJobStatus, now: datetime) -> RLJobStatus:
    """The status to write."""
    if answers.held:
        decided = _held(decided, observed)
    if answers.makes_room:
        room = [str(restart.Restart(at=now, pod=place, cause=Cause.STALE)) for place in answers.makes_room]
        decided = decided.model_copy(update={"restarts": [*decided.restarts, *room][: restart.MAX_ENTRIES]})
    draft = Draft(replace(observed, status=decided), now=now)
    if answers.writes_refused:
        room_text = f"; {len(answers.makes_room)} pods that are replaced go first, to make room"
        message = _first(answers.writes_refused, untried=answers.untried) + (room_text if answers.makes_room else "")
        reason = Reason.QUOTA_EXCEEDED if answers.no_room else Reason.PODS_MISSING
        draft.set(JobCondition.PODS_READY, Status.FALSE, reason, message)
    elif answers.late_refused:
        plan = decided.plan
        said = _first(answers.late_refused, untried=answers.untried)
        message = f"{plan.pending} is on its way: {said}; {plan.current} stays in force meanwhile"
        draft.set(JobCondition.PLAN_APPLIED, Status.UNKNOWN, Reason.PLAN_PENDING, message)
    elif answers.rest:
        message = f"{answers.rest} pods are still to be made"
        draft.set(JobCondition.PODS_READY, Status.FALSE, Reason.PODS_STARTING, message)
    if answers.scheduler_away:  # it is asked again
        before = observed.status.plan.asked_within
        draft.fields["plan"] = decided.plan.model_copy(update={"asked_within": before})
    running = draft.find(JobCondition.RUNNING)
    waits = running is None or running.reason == Reason.WAITING_FOR_PLAN  # else the job goes on under an older plan
    if answers.infeasible and not asks_for_fewer(observed, decided):
        draft.set(JobCondition.VALID, Status.FALSE, Reason.INFEASIBLE, "; ".join(answers.infeasible))
        if waits:
            draft.set(JobCondition.RUNNING, Status.UNKNOWN, Reason.WAITING_FOR_PLAN, "no plan is feasible: see Valid")
    elif answers.scheduler_away:
        kinds = (JobCondition.PLAN_APPLIED, JobCondition.RUNNING) if waits else (JobCondition.PLAN_APPLIED,)
        for kind in kinds:
            draft.set(kind, Status.UNKNOWN, Reason.SCHEDULER_UNAVAILABLE, answers.scheduler_away)
    if answers.queue_refused:
        draft.set(JobCondition.ADMITTED, Status.FALSE, Reason.QUEUE_REFUSED, answers.queue_refused)
    if answers.driver_refused:
        draft.set(JobCondition.PLAN_APPLIED, Status.FALSE, Reason.PLAN_PENDING, answers.driver_refused)
    return _keep_transition_times(observed.status, draft.build())


def asks_for_fewer(observed: Observed, decided: RLJobStatus) -> bool:
    """Whether the pass asks for a plan for the pods that have nodes: where there is none, the spec is as valid as it
    was."""
    asked = decided.plan.asked_within
    return bool(asked) and asked != observed.status.plan.asked_within


def _held(decided: RLJobStatus, observed: Observed) -> RLJobStatus:
    """The decided status without what only children that are not there would have made true. The next pass goes on, and
    must find the life, the counts of pods, and for first pods the attempt, that this pass found; a pod that ended is
    counted, but not a place whose pod vanished: it would be counted with every try."""
    before, pods = observed.status, observed.pods
    fresh = observed.is_fresh(decided.life)
    seen = max((p.attempt for p in pods), default=0)
    here, known = {p.name for p in pods}, set(before.restarts)
    counted = {p.name: (p.desired, p.slots) for p in before.pools}
    pools = []
    for pool in decided.pools:
        desired, slots = counted.get(pool.name, (0, 0))
        pools.append(pool.model_copy(update={"desired": desired, "slots": slots}))
    listed = decided.conditions
    if decided.life != before.life:  # a resume is told by this condition, and is not done
        kept = [c for c in before.conditions if c.type == JobCondition.SUSPENDED]
        listed = [*(c for c in listed if c.type != JobCondition.SUSPENDED), *kept]
    return decided.model_copy(
        update={
            "attempt": before.attempt if fresh else max(before.attempt, seen),
            "life": before.life,
            "pools": pools,
            "plan": before.plan if fresh else decided.plan,  # none is in force that no pod was made for
            "restarts": [str(e) for e in restart.read(decided.restarts) if str(e) in known or e.pod in here or e.life],
            "conditions": listed,
        }
    )


def _first(refused: Sequence[str], *, untried: int) -> str:
    more = len(refused) + untried - 1
    return refused[0] + (f"; and {more} more" if more else "")


def _keep_transition_times(before: RLJobStatus, after: RLJobStatus) -> RLJobStatus:
    """A condition that this pass set twice and that ends as it stood before did not change: its time stays."""
    old = {c.type: c for c in before.conditions}
    kept = [
        c.model_copy(update={"last_transition_time": old[c.type].last_transition_time})
        if c.type in old and old[c.type].status == c.status
        else c
        for c in after.conditions
    ]
    return after.model_copy(update={"conditions": kept})
