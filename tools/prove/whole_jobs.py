"""Proof `jobs`: whole jobs, profiled and placed anew, against the same job all side by side and all in turns that
nobody re-plans. Real runs of workload entries, with times that are scaled; pauses, probes and changes of plan included.

python -m tools.prove jobs [--count 33]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, Final

from rlinf_api.job import RLJobSpec
from rlinf_api.plan import JobRef, RLPlanSpec
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.initial import initial
from rlinf_scheduler.replan.fit import warmed_up
from tools.prove import placements, runs
from tools.workloads import entries, job

ENTRIES: Final = tuple(sorted(entries()))
STEPS, DRIFTING, LAST = 60, 120, 40
RUN_S: Final = 400.0
IN_ALL, AT_LAST = 1.10, 1.03
"""Bars: of the better fixed placement's seconds, over all steps, and over the last 40."""
FIXED: Final = ("Disaggregated", "Collocated")


def one(seed: int, *, time_scale: float) -> dict[str, Any]:
    name = ENTRIES[seed]
    entry = entries()[name]
    steps = DRIFTING if "drift" in entry else STEPS
    scale = time_scale * placements.scale(name)
    took: dict[str, tuple[float, float]] = {}
    line: dict[str, Any] = {"seed": seed, "name": name, "ok": True, "fits": True, "void": 0, "plans": []}
    for mode in ("Auto", *FIXED):
        manifest = job(entry, mode=mode, steps=steps, items=placements.ITEMS, time_scale=scale)
        asked = RLJobSpec.model_validate(manifest["spec"])
        if isinstance(initial(asked, job=JobRef(name=name, uid="u")), Infeasible):
            continue
        if mode != "Auto":
            manifest["spec"]["placement"]["profileSteps"] = 0
        try:
            went = runs.run(manifest, timeout_s=RUN_S)
        except runs.NotEnded:  # a fixed placement that takes so long is not the better one
            if mode == "Auto":
                return {**line, "ok": False, "why": f"{mode}: not ended within {RUN_S:.0f} s"}
            line["too_long"] = [*line.get("too_long", ()), mode]
            continue
        except runs.RunFailed as error:
            return {**line, "ok": False, "why": f"{mode}: {error}"}
        if went.is_void:
            line["void"] += 1
            continue
        took[mode] = went.whole_s, fmean(went.seconds[-LAST:])
        if mode == "Auto":
            line["plans"] = [_told(plan, went) for plan in went.plans]
    line["took"] = {mode: [round(value, 3) for value in seconds] for mode, seconds in took.items()}
    fixed = [took[mode] for mode in FIXED if mode in took]
    if "Auto" not in took or not fixed:
        return {**line, "fits": bool(took) or line["void"] > 0}
    line["in_all"] = round(took["Auto"][0] / min(whole for whole, _ in fixed), 4)
    line["at_last"] = round(took["Auto"][1] / min(last for _, last in fixed), 4)
    return {**line, "ok": line["in_all"] <= IN_ALL and line["at_last"] <= AT_LAST}


def _told(plan: RLPlanSpec, went: runs.Went) -> dict[str, Any]:
    """What it promised, and what its steps took by the driver's reports, the first of each plan left out."""
    own = warmed_up([profile for profile in went.profiles if profile.revision == plan.revision])
    steps = sum(profile.steps for profile in own)
    took = sum(profile.steps * profile.step_seconds.value for profile in own) / steps if steps else None
    promised = plan.predicted.period_seconds if plan.predicted is not None else None
    return {"code": str(plan.reason.code), "promised": promised, "took": took, "steps": steps}


def _words(plan: Mapping[str, Any]) -> str:
    """
    >>> _words({"code": "Profiled", "promised": 0.5435, "took": 0.5658, "steps": 24})
    'Profiled 0.54 0.57'
    """
    return " ".join([plan["code"], *(f"{plan[key]:.2f}" for key in ("promised", "took") if plan[key])])


def summary(found: Sequence[dict[str, Any]]) -> str:
    modes = ", ".join(("Auto", *FIXED))
    print(f"| entry | in all | of the last 40 | plans: promised, took | seconds a step at last: {modes} |")
    print("|---|---|---|---|---|")
    for line in found:
        if "in_all" in line:
            at_last = ", ".join(f"{line['took'][m][1]:.2f}" if m in line["took"] else "-" for m in ("Auto", *FIXED))
            plans = "; ".join(_words(plan) for plan in line["plans"])
            said = f"{line['in_all']:.3f} | {line['at_last']:.3f} | {plans} | {at_last}"
            print(f"| {line['name']} | {said} |")
    compared = [line for line in found if "in_all" in line]
    failed = [f"{line['name']}: {line['why']}" for line in found if "why" in line]
    said = f"{len(compared)} of {len(found)} compared, {sum(line['void'] for line in found)} runs void"
    said += f"; not run: {'; '.join(failed)}" if failed else ""
    if not compared:
        return said
    over = [line["name"] for line in compared if not line["ok"]]
    in_all, last = ([line[key] for line in compared] for key in ("in_all", "at_last"))
    return (
        f"{said}\nseconds of the better fixed placement: in all {median(in_all):.2f} in the median, {max(in_all):.2f} "
        f"at most (bar {IN_ALL}); of the last {LAST} steps {median(last):.2f}, {max(last):.2f} (bar {AT_LAST}); "
        f"above a bar: {', '.join(over) or 'none'}"
    )
