"""Proof `two-stages`: 600 problems of two roles, drawn as the check of the public planner draws its own (2 to 64 slots,
batches of 32 to 512, costs of 1 to 300 s). Compared with every plan that planner may return: collocated, or one of all
splits, here with each of four micro-batches, all scored by the simulator.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from rlinf_scheduler.planner.candidate import Candidate, Choice, PlannedTurn, Region
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.problem import Cost, InBatches, InRounds, Option, PlanProblem, Pool, QueueEdge, RoleCosts
from rlinf_scheduler.planner.search import plan
from rlinf_scheduler.planner.simulate import simulate

EQUAL: Final = 1e-9


def problem(seed: int) -> PlanProblem:
    rng = random.Random(f"two stages {seed}")
    slots, items = rng.choice([2, 4, 8, 16, 32, 64]), rng.choice([32, 128, 512])
    roles = tuple(
        RoleCosts(
            name=name,
            service=InRounds() if name == "actor" else InBatches(),
            options=(Option(per_item_ms=Cost(1e3 * rng.uniform(1, 300) * slots / items)),),
        )
        for name in ("rollout", "actor")
    )
    pool = Pool(name="gpu", slots=slots, roles=("rollout", "actor"))
    return PlanProblem(roles=roles, edges=(QueueEdge("rollout", "actor"),), pools=(pool,), items=items)


def best_of_all(problem: PlanProblem) -> float:
    return min(simulate(problem, candidate).period_ms for candidate in _all(problem))


def _all(problem: PlanProblem) -> Iterator[Candidate]:
    slots = problem.pools[0].slots
    layouts: list[tuple[Region, ...]] = [
        (Region((slots,), (PlannedTurn("rollout", (slots,)), PlannedTurn("actor", (slots,)))),)
    ]
    layouts += [
        (Region((n,), (PlannedTurn("rollout", (n,)),)), Region((slots - n,), (PlannedTurn("actor", (slots - n,)),)))
        for n in range(1, slots)
    ]
    for regions in layouts:
        candidate = Candidate(regions=regions, choices={})
        share = {name: -(-problem.items // candidate.workers(name)) for name in ("rollout", "actor")}
        for part in (1, 2, 4, 8):
            rollout = Choice(micro_batch=share["rollout"])
            yield replace(
                candidate, choices={"rollout": rollout, "actor": Choice(micro_batch=-(-share["actor"] // part))}
            )


def one(seed: int) -> dict[str, Any]:
    drawn = problem(seed)
    truth, found = best_of_all(drawn), plan(drawn)
    assert not isinstance(found, Infeasible)
    ms = found.best.prediction.period_ms
    return {"seed": seed, "found": ms, "best": truth, "ok": ms <= truth * (1 + EQUAL), "slots": drawn.pools[0].slots}


def summary(found: list[dict[str, Any]]) -> str:
    wrong = [line["seed"] for line in found if not line["ok"]]
    excess = max((line["found"] / line["best"] - 1 for line in found), default=0.0)
    return f"wrong plans: {len(wrong)} of {len(found)} ({wrong}); largest excess {max(0.0, excess):.2%}"
