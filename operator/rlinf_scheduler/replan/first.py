"""The plan with which a job begins, or begins again with other pools, by what was measured before: of the job itself,
or of an earlier one with the same key (rlinf_api/profile.py). Pure. Not for: a job of which nothing was measured
(planner/initial.py), nor the next plan of one that runs (decide.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_api import plan_rules
from rlinf_api.job import PlacementMode, RLJobSpec
from rlinf_api.plan import BasedOn, JobRef, PlanReason, PlanReasonModel, RLPlanSpec, WorkerMemory, WorkerPlan
from rlinf_api.profile import Profile
from rlinf_scheduler.planner import search, words
from rlinf_scheduler.planner import spec as plans
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.initial import channels
from rlinf_scheduler.replan.fit import Unfit, fit


def by_profiles(
    spec: RLJobSpec,
    profiles: Sequence[Profile],
    *,
    job: JobRef,
    revision: int,
    reason: PlanReason,
    under: RLPlanSpec | None = None,
) -> RLPlanSpec | None:
    """`under`: the job's own plan that the newest is of, whose channels and workers go on as they are where no
    candidate says otherwise. None: these say too little, nothing was measured, or nobody wants them to count
    (profileSteps is 0, a pin)."""
    if not profiles or not spec.placement.profile_steps or spec.placement.mode is PlacementMode.PINNED:
        return None
    fitted = fit(spec, profiles, plan=under, is_in_force=False)
    if isinstance(fitted, Unfit):
        return None
    found = search.plan(fitted.problem)
    if isinstance(found, Infeasible):
        return None
    newest = profiles[-1]
    for scored in (found.best, *found.others):
        said = (
            f"by steps {newest.first_step} to {newest.last_step} of job {newest.job.name}, uid {newest.job.uid}: "
            f"{words.explain(fitted.problem, scored.candidate, scored.prediction)}"
        )
        said += f"; assumed, as nobody has measured it: {', '.join(fitted.assumed)}" if fitted.assumed else ""
        plan = plans.write(
            fitted.problem, scored.candidate, scored.prediction, job=job, revision=revision,
            reason=PlanReasonModel(code=reason, message=said), based_on=BasedOn(profile=newest.key),
            channels=under.channels if under else channels(spec), workers=under.workers if under else (),
        )  # fmt: skip
        if plan is not None and plan_rules.allows(plan, spec):
            return plan
    return None


def as_before(plan: RLPlanSpec, before: RLPlanSpec, *, job: RLJobSpec) -> RLPlanSpec:
    """A first plan of a job that is at work under `before`: what nobody measured is as it was, each role's option,
    tokens and cache, where the job allows that on the slots that the role has now."""
    like = {entry.role: entry for entry in reversed(before.workers)}
    for role in dict.fromkeys(entry.role for entry in plan.workers if entry.role in like):
        workers = [_alike(entry, like[role]) if entry.role == role else entry for entry in plan.workers]
        kept = plan.model_copy(update={"workers": workers})
        plan = kept if plan_rules.allows(kept, job) else plan
    return plan


def _alike(made: WorkerPlan, like: WorkerPlan) -> WorkerPlan:
    memory = made.memory
    if like.memory is not None:
        memory = (memory or WorkerMemory()).model_copy(update={"kv": like.memory.kv})
    return made.model_copy(update={"option": like.option, "tokens": like.tokens, "memory": memory})
