"""Proof `cartpole`: what the planner says of placements of a PPO job that was profiled under one of them, and what they
take here.

python -m tools.prove cartpole

Two slots, one thread per worker, 1 and 2 simulators, roles in turns and side by side. Each placement is run by
`rljob run --plan` for STEPS steps; what the first one measured predicts the others. The search is asked as well: its
choice is to be within 5% of the best that was measured.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import yaml

from rlinf_api.job import RLJobSpec
from rlinf_api.plan import JobRef, PlanReason, PlanReasonModel, RLPlanSpec
from rlinf_api.profile import Profile
from rlinf_scheduler.planner import search, spec, words
from rlinf_scheduler.planner.problem import PlanProblem
from rlinf_scheduler.planner.simulate import simulate
from rlinf_scheduler.replan.fit import Fit, fit, warmed_up
from tools.prove import runs
from tools.workloads import ROOT

STEPS, WARM = 60, 10
RUN_TIMEOUT_S: Final = 300.0
SLOTS: Final = "cpu/0/[0-1]"
OFF, CHOSEN = 0.15, 0.05
"""Bars: a step against its prediction; the chosen placement against the best one."""


def manifest() -> dict[str, Any]:
    """The example with as much work in each step: no schedule, no end."""
    job = yaml.safe_load((ROOT / "examples" / "cartpole" / "rljob.yaml").read_text(encoding="utf-8"))
    job["spec"]["flow"]["steps"] = STEPS
    config = job["spec"]["flow"]["config"]
    config |= {"schedule": "constant", "finalEpochs": config["epochs"], "order": "arrival"}
    for role in job["spec"]["roles"]:
        role["workers"] = {"min": 1, "max": 2}
    job["spec"]["pools"][0]["slots"]["perPod"] = 2
    return dict(job)


def placements() -> Iterator[tuple[str, dict[str, Any]]]:
    """Plans by hand. Who is named together takes turns on one slot; `x2` has a worker on each."""
    yield "env | rollout + actor", _plan({"env": "cpu/0/0", "rollout": "cpu/0/1", "actor": "cpu/0/1"})
    yield "rollout | env + actor", _plan({"rollout": "cpu/0/0", "env": "cpu/0/1", "actor": "cpu/0/1"})
    yield "actor | env + rollout", _plan({"actor": "cpu/0/0", "env": "cpu/0/1", "rollout": "cpu/0/1"})
    yield "env + rollout + actor on one slot", _plan(dict.fromkeys(("env", "rollout", "actor"), "cpu/0/0"))
    yield "env x2 + rollout x2 + actor x2", _plan(dict.fromkeys(("env", "rollout", "actor"), SLOTS))


def _plan(slots: Mapping[str, str]) -> dict[str, Any]:
    counts = {role: 2 if at == SLOTS else 1 for role, at in slots.items()}
    shared = [at for at in dict.fromkeys(slots.values()) if list(slots.values()).count(at) > 1]
    return {
        "pools": [{"name": "cpu", "pods": 1}],
        "workers": [{"role": role, "count": counts[role], "slots": at} for role, at in slots.items()],
        "leaseSets": [
            {"name": f"turns-{n}", "slots": at, "turns": [{"role": role} for role in slots if slots[role] == at]}
            for n, at in enumerate(shared)
        ],
        "cycles": [{"roles": ["env", "rollout"], "stages": 2 // counts["env"]}],
    }


def measured(plan: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[Profile, ...], RLPlanSpec]:
    """Seconds of the steps behind the first ones, what was profiled, and the plan as it was in force."""
    went = runs.run(manifest(), plan=plan, timeout_s=RUN_TIMEOUT_S)
    return went.seconds[WARM:], went.profiles, went.plans[-1]


def show() -> bool:
    """Whether all bars hold."""
    job = RLJobSpec.model_validate(manifest()["spec"])
    problem: PlanProblem | None = None
    rows: dict[str, tuple[float, float]] = {}
    print("| placement | predicted ms | measured ms (middle half) | off |")
    print("|---|---|---|---|")
    for name, plan in placements():
        seconds, profiles, in_force = measured(plan)
        if problem is None:
            problem = _problem(job, profiles, in_force)
        candidate = spec.read(problem, in_force, job)
        predicted, took = simulate(problem, candidate).period_ms, 1e3 * statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4)
        rows[name] = predicted, took
        said = f"{took:.0f} ({1e3 * low:.0f} to {1e3 * high:.0f}) | {predicted / took - 1:+.1%}"
        print(f"| {name} | {predicted:.0f} | {said} |", flush=True)
    assert problem is not None
    chosen, took = _chosen(problem, job)
    best = min(took, *(ms for _, ms in rows.values()))
    print(f"\nchosen: {chosen}: {took:.0f} ms, {took / best - 1:+.1%} of the best")
    first, *others = rows.values()
    worst = max(abs(predicted / ms - 1) for predicted, ms in others)
    own = first[0] / first[1] - 1
    print(f"predicted by what `{next(iter(rows))}` measured: at most {worst:.1%} off, itself {own:+.1%}")
    return worst <= OFF and took <= (1 + CHOSEN) * best


def _problem(job: RLJobSpec, profiles: tuple[Profile, ...], plan: RLPlanSpec) -> PlanProblem:
    found = fit(job, warmed_up(profiles), plan=plan)
    if not isinstance(found, Fit):
        raise RuntimeError(f"the profile makes no problem: {found}")
    # Roles do not say what they take of a slot, so the planner would have nobody share one: processes this small do.
    small = [replace(role, options=tuple(replace(o, peak_mib=1.0) for o in role.options), offloaded_mib=1.0)
             for role in found.problem.roles]  # fmt: skip
    return replace(found.problem, roles=tuple(small))


def _chosen(problem: PlanProblem, job: RLJobSpec) -> tuple[str, float]:
    """What the search would have, and what that takes."""
    found = search.plan(problem)
    if not isinstance(found, search.Found):
        raise RuntimeError(f"the search has no plan: {found}")
    for scored in itertools.chain((found.best,), found.others):
        written = spec.write(
            problem, scored.candidate, scored.prediction, job=JobRef(name="cartpole", uid="u"), revision=1,
            reason=PlanReasonModel(code=PlanReason.PROFILED),
        )  # fmt: skip
        if written is None:
            continue
        seconds, _, _ = measured(runs.written(written))
        said = f"{words.describe(problem, scored.candidate)}, predicted {scored.prediction.period_ms:.0f} ms"
        return said, 1e3 * statistics.median(seconds)
    raise RuntimeError("none of the search's plans can be written down")
