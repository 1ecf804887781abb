"""Proofs `steady`, `shift` and `loop`: the decisions of a whole job, in the world of known costs (world.py).

steady   steps that vary by 5%, one in fifty twice as long, 1,000 of them: no plan is changed once it was judged
shift    from step 60 on a role takes 30% more or less. Where that makes another plan at least 10% better, one is
         written within 10 steps
loop     every workload, 120 steps: what the job took against the better of side by side and all in turns
"""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean
from typing import Any, Final

from rlinf_scheduler.planner import search
from rlinf_scheduler.planner import spec as plans
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.initial import initial
from rlinf_scheduler.planner.simulate import simulate
from rlinf_scheduler.replan.decide import NextPlan
from tools.prove.world import World
from tools.workloads import entries

ENTRIES: Final = {name: entry for name, entry in entries().items() if "drift" not in entry}
JUDGED: Final = 100  # steps by which a job has been profiled, placed anew and judged, whatever the probes
SHIFTED: Final = 60
WITHIN: Final = 10
WORTH: Final = 0.10


def steady(seed: int) -> dict[str, Any]:
    name = sorted(ENTRIES)[seed % len(ENTRIES)]
    world = World.of_entry(ENTRIES[name], steps=1000, seed=seed, noise=0.05, tail=0.02)
    if isinstance(_begun(world), Infeasible):
        return {"seed": seed, "name": name, "ok": True, "fits": False, "late": []}
    world.run()
    late = [(step, d.plan.reason.message) for step, d in world.decisions if isinstance(d, NextPlan) and step > JUDGED]
    return {"seed": seed, "name": name, "ok": not late, "fits": True, "late": late, "plans": world.codes}


def shift(seed: int) -> dict[str, Any]:
    rng = random.Random(f"shift {seed}")
    name = sorted(ENTRIES)[seed % len(ENTRIES)]
    entry = ENTRIES[name]
    role, factor = rng.choice([r["name"] for r in entry["roles"]]), rng.choice([0.7, 1.3])
    world = World.of_entry(entry, steps=400, seed=seed, shift=(SHIFTED, role, factor))
    line = {"seed": seed, "name": name, "role": role, "factor": factor, "ok": True}
    if isinstance(_begun(world), Infeasible):
        return {**line, "fits": False}
    world.run(SHIFTED - 1)
    truth, current = world.truth_at(SHIFTED), world.plans[-1]
    truth = replace(
        truth, roles=tuple(replace(r, options=r.options[:1]) for r in truth.roles)
    )  # no plan chooses another
    now = simulate(truth, plans.read(truth, current, world.job)).period_ms
    best = search.plan(truth, start=[plans.read(truth, current, world.job)])
    assert not isinstance(best, Infeasible)
    gain = 1 - best.best.prediction.period_ms / now
    world.run(2 * WITHIN)
    written = [step for step, d in world.decisions if isinstance(d, NextPlan) and step >= SHIFTED]
    line |= {"fits": True, "gain": round(gain, 4), "written": [step - SHIFTED for step in written]}
    return {**line, "ok": gain < WORTH or any(step - SHIFTED < WITHIN for step in written)}


def loop(seed: int) -> dict[str, Any]:
    name = sorted(ENTRIES)[seed]
    took = {}
    world = World.of_entry(ENTRIES[name], steps=120)
    if isinstance(_begun(world), Infeasible):
        return {"seed": seed, "name": name, "ok": True, "fits": False}
    world.run()
    took["loop"], took["last"] = sum(world.seconds), fmean(world.seconds[-40:])
    for mode in ("Disaggregated", "Collocated"):
        fixed = World.of_entry(ENTRIES[name], steps=120, mode=mode)
        if not isinstance(_begun(fixed), Infeasible):
            fixed.job = fixed.job.model_copy(
                update={"placement": fixed.job.placement.model_copy(update={"profile_steps": 0})}
            )
            fixed.run()
            took[mode] = sum(fixed.seconds)
    better = min(took[mode] for mode in ("Disaggregated", "Collocated") if mode in took)
    line = {
        "seed": seed,
        "name": name,
        "fits": True,
        "plans": world.codes,
        "took": {k: round(v, 3) for k, v in took.items()},
    }
    ratio, late = took["loop"] / better, took["last"] * 120 / better
    return {**line, "ratio": round(ratio, 4), "last": round(late, 4), "ok": ratio <= 1.10 and late <= 1.03}


def _begun(world: World) -> object:
    found = initial(world.job, job=world.ref)
    if not isinstance(found, Infeasible):
        world.plans.append(found)
    return found


def summary(found: list[dict[str, Any]]) -> str:
    fit = [line for line in found if line["fits"]]
    wrong = [line["seed"] for line in fit if not line["ok"]]
    said = f"{len(fit) - len(wrong)} of {len(fit)} hold (not: {wrong}); {len(found) - len(fit)} do not fit their slots"
    if gains := [line for line in fit if line.get("gain", 0.0) >= WORTH]:
        waits = sorted(min(line["written"], default=2 * WITHIN) for line in gains)
        said += f"; {len(gains)} were worth another plan, which came {waits[0]} to {waits[-1]} steps behind the shift"
    if ratios := sorted(line["ratio"] for line in fit if "ratio" in line):
        last = sorted(line["last"] for line in fit)
        said += (
            f"; time against the better fixed one: median {ratios[len(ratios) // 2]:.2f}, most {ratios[-1]:.2f}; of "
            f"the last 40 steps: median {last[len(last) // 2]:.2f}, most {last[-1]:.2f}"
        )
    return said
