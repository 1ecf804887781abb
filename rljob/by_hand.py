"""A plan that a person wrote for a run of this machine: what need not be written is filled in, what is wrong is told.

For plan_verbs.py, which is given one for a job that runs, and rljob/run.py, which is given the first one of a job. Not
for: what a running job says to it (the driver's, docs/plans.md).
"""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic import ValidationError

from rlinf_api import plan_rules, sentences
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import RLJobSpec
from rlinf_api.plan import PlanReason, RLPlanSpec

OBJECT: Final = frozenset({"apiVersion", "kind", "metadata", "spec", "status"})


def filled_in(given: Any, *, job: str, uid: str, revision: int) -> RLPlanSpec:
    """The plan of an RLPlan, or of its spec alone. What a person would have to look up need not stand there: the job,
    the `revision`, where the plan comes from. InvalidManifest with a sentence per problem."""
    raw = _spec_of(given)
    reason = {"code": str(PlanReason.PINNED), "message": "set by hand"}
    filled = {"reason": reason, **raw, "source": "User"}
    filled["job"] = {"name": job, "uid": uid} | dict(raw.get("job") or {})
    filled.setdefault("revision", revision)
    try:
        plan = RLPlanSpec.model_validate_json(json.dumps(filled), strict=True)
    except ValidationError as error:
        problems = sentences.problems(error, RLPlanSpec, value=filled, prefix="spec")
        raise InvalidManifest("; ".join(map(str, problems))) from error
    if (plan.job.name, plan.job.uid) != (job, uid):
        raise InvalidManifest(
            "the plan is of another job", got=f"{plan.job.name}, uid {plan.job.uid}",
            wanted=f"{job}, uid {uid}", next="remove spec.job: it is filled in",
        )  # fmt: skip
    return plan


def first(given: Any, *, job: str, spec: RLJobSpec) -> dict[str, Any]:
    """The first plan of a job that has no uid yet, for `filled_in` once it has one: looked at with all that is known
    before anything starts. InvalidManifest with a sentence per problem."""
    raw = _spec_of(given)
    said = raw.pop("job", None) or {}
    if not isinstance(said, dict) or said.get("name", job) != job:
        got = said.get("name") if isinstance(said, dict) else said
        raise InvalidManifest(
            "the plan is of another job", got=sentences.shown(got), wanted=job, next="remove spec.job: it is filled in"
        )
    plan_rules.check(filled_in(raw, job=job, uid="", revision=1), spec)
    return raw


def _spec_of(given: Any) -> dict[str, Any]:
    is_object = isinstance(given, dict) and "spec" in given
    raw = given["spec"] if is_object else given
    if not isinstance(raw, dict):
        raise InvalidManifest("the plan is no mapping", got=sentences.shown(raw), next="write the spec of an RLPlan")
    if is_object and (strange := sorted(set(map(str, given)) - OBJECT)):
        raise InvalidManifest(
            f"the plan has {strange[0]!r} beside spec", wanted=f"among {', '.join(sorted(OBJECT))}",
            next="remove it, or move it into spec",
        )  # fmt: skip
    if is_object and given.get("kind", "RLPlan") != "RLPlan":
        raise InvalidManifest("the file holds no plan", got=f"kind {sentences.shown(given['kind'])}", wanted="RLPlan")
    return dict(raw)
