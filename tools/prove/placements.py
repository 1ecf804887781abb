"""Proofs `predict` and `regret`: what the planner says of placements other than those that it has measured, and whether
the one that it chooses is the best of them. Real runs of workload entries, with times that are scaled.

python -m tools.prove placements [--count 30] [--time-scale 1]

Each entry is run as a user would, for PROFILED steps, so that it is profiled, probed and placed anew. By what was
measured then the search says its best five, and two more are drawn; each is run under `--plan`, STEPS steps, and so is
the plan that was in force last: how far the simulator is off for it is how far it is taken to be off for all, as by a
decision, but of the same steps, as a unit has one size in every placement. A run while the machine was more than 70%
busy is void, and counts as not made.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any, Final

from rlinf_api import plan_rules
from rlinf_api.job import RLJobSpec
from rlinf_api.plan import JobRef, PlanReason, PlanReasonModel, RLPlanSpec
from rlinf_scheduler.planner import search, spec, words
from rlinf_scheduler.planner.candidate import Candidate
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.initial import initial
from rlinf_scheduler.planner.problem import PlanProblem
from rlinf_scheduler.planner.simulate import simulate
from rlinf_scheduler.replan.fit import Fit, fit
from tools.prove import runs, table
from tools.prove.world import World
from tools.workloads import entries, job

ENTRIES: Final = tuple(name for name, entry in sorted(entries().items()) if "drift" not in entry)
ITEMS: Final = 16
STEP_S: Final = 1.0  # of the first plan, by the entry's own numbers; a unit costs the runtime 1 ms of CPU a hop
PROFILED, STEPS, WARM = 60, 16, 3
BEST, DRAWN = 5, 2
ALIKE: Final = 0.03  # placements that the simulator says take as long are one
RUN_S: Final = 240.0
MEDIAN, P95, REGRET = 0.03, 0.08, 0.05
"""Bars: of |predicted - measured| / measured; of regret, its 95th percentile."""


def one(seed: int, *, time_scale: float) -> dict[str, Any]:
    name = ENTRIES[seed]
    manifest = job(entries()[name], steps=PROFILED, items=ITEMS, time_scale=time_scale * scale(name))
    asked = RLJobSpec.model_validate(manifest["spec"])
    line: dict[str, Any] = {"seed": seed, "name": name, "ok": True, "fits": True, "rows": [], "void": 0}
    if isinstance(initial(asked, job=JobRef(name=name, uid="u")), Infeasible):
        return {**line, "fits": False}
    own = runs.run(manifest, timeout_s=RUN_S)
    profiles = own.profiles[:-1]  # the last one is of the job's end, where who works ahead has nothing left to do
    revision = profiles[-1].revision
    in_force = next(plan for plan in own.plans if plan.revision == revision)
    fitted = fit(asked, profiles, plan=in_force)
    if not isinstance(fitted, Fit):
        return {**line, "ok": False, "why": str(fitted)}
    manifest["spec"]["flow"]["steps"] = STEPS
    current, off = spec.read(fitted.problem, in_force, asked), 0.0
    for rank, (plan, candidate) in enumerate(((in_force, current), *_placements(fitted.problem, asked, seed))):
        predicted = simulate(fitted.problem, candidate).period_ms
        try:
            went = runs.run(manifest, plan=runs.written(plan), timeout_s=RUN_S)
        except runs.RunFailed as error:
            return {**line, "ok": False, "why": f"{words.describe(fitted.problem, candidate)}: {error}"}
        if went.is_void:
            line["void"] += 1
            if not rank:
                return line  # nothing to hold the others against
            continue
        took = 1e3 * steady(went.seconds, staleness=fitted.problem.staleness)
        if not rank:
            off = took / predicted
            line |= {"in_force": words.describe(fitted.problem, current), "off": round(off, 3)}
            continue
        line["rows"].append(
            {"rank": rank, "plan": words.describe(fitted.problem, candidate), "predicted": round(predicted * off, 1),
             "measured": round(took, 1), "busy": round(went.busy, 2), "seconds": [round(s, 3) for s in went.seconds]}
        )  # fmt: skip
    return line


def steady(seconds: Sequence[float], *, staleness: int) -> float:
    """The mean step between the first ones, which warm up, and the last ones, in which who works ahead has nothing left
    to do. With staleness long and short steps follow each other: whole patterns of them.

    >>> steady([9.0, 9.0, 9.0, 8.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 0.5, 0.5, 0.5], staleness=2)
    2.0
    """
    at_once = staleness + 1
    between = seconds[WARM : len(seconds) - at_once]
    return fmean(between[len(between) % at_once :])


def scale(name: str) -> float:
    """That makes a step of the first plan STEP_S, by the entry's own numbers."""
    whole = RLJobSpec.model_validate(job(entries()[name], items=ITEMS)["spec"])
    plan = initial(whole, job=JobRef(name=name, uid="u"))
    if isinstance(plan, Infeasible):
        return 1.0
    world = World.of_entry(entries()[name], steps=3, items=ITEMS)
    return 1e3 * STEP_S / simulate(world.truth, spec.read(world.truth, plan, whole)).period_ms


def _placements(problem: PlanProblem, asked: RLJobSpec, seed: int) -> Iterator[tuple[RLPlanSpec, Candidate]]:
    """The chosen one first, then the next best that differ, then drawn ones."""
    found = search.plan(problem)
    if isinstance(found, Infeasible):
        return
    rng = random.Random(f"placements {seed}")
    best = [scored.candidate for scored in (found.best, *found.others)]
    drawn = (table.draw(problem, rng) for _ in range(200))
    periods: list[float] = []
    for candidates, most in ((best, BEST), ((one for one in drawn if one is not None), BEST + DRAWN)):
        for candidate in candidates:
            if len(periods) >= most:
                break
            said = simulate(problem, candidate)
            if any(abs(said.period_ms / other - 1) <= ALIKE for other in periods):
                continue
            plan = spec.write(
                problem, candidate, said, job=JobRef(name="any", uid="u"), revision=1,
                reason=PlanReasonModel(code=PlanReason.PROFILED),
            )  # fmt: skip
            if plan is not None and plan_rules.allows(plan, asked):
                periods.append(said.period_ms)
                yield plan, candidate


def summary(found: Sequence[dict[str, Any]]) -> str:
    print("| entry | placement | predicted ms | measured ms | off | busy |\n|---|---|---|---|---|---|")
    errors, regrets = [], []
    for line in found:
        for row in line["rows"]:
            off = row["predicted"] / row["measured"] - 1
            errors.append(abs(off))
            said = f"{row['predicted']:.0f} | {row['measured']:.0f} | {off:+.1%} | {row['busy']:.0%}"
            print(f"| {line['name']} | {row['plan'].replace(' | ', ' + ')} | {said} |")
        if "off" in line:
            in_force = line["in_force"].replace(" | ", " + ")
            print(f"| {line['name']} | {in_force}, in force as it was measured | x {line['off']} | | | |")
        took = {row["rank"]: row["measured"] for row in line["rows"]}
        if 1 in took and len(took) > 1:
            regrets.append(took[1] / min(took.values()) - 1)
    failed = [f"{line['name']}: {line['why']}" for line in found if not line["ok"]]
    said = f"{len(found)} entries, {sum(not line['fits'] for line in found)} do not fit, "
    said += f"{sum(line['void'] for line in found)} runs void"
    said += f"; not run: {'; '.join(failed)}" if failed else ""
    if not errors or not regrets:
        return said
    return (
        f"{said}\npredict, {len(errors)} placements: off by {median(errors):.1%} in the median (bar {MEDIAN:.0%}), "
        f"p95 {_p95(errors):.1%} (bar {P95:.0%})\nregret, {len(regrets)} entries: median {median(regrets):.1%} "
        f"(bar 0), p95 {_p95(regrets):.1%} (bar {REGRET:.0%})"
    )


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
