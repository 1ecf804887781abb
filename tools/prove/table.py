"""A table of predictions, saved: what the simulator said of plans of many kinds before somebody made it faster.

python -m tools.prove table            writes tests/unit/rlinf_scheduler/predictions.json; only where a rule has changed

The plans are drawn without any code of the search, so that they are the same ones whatever the search becomes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rlinf_scheduler.planner.candidate import Candidate, Choice, PlannedTurn, Region
from rlinf_scheduler.planner.problem import InLanes, PlanProblem, RoleCosts
from rlinf_scheduler.planner.simulate import simulate
from tools import workloads
from tools.bench import planner as bench
from tools.prove import problems

FILE: Final = Path(__file__).resolve().parents[2] / "tests" / "unit" / "rlinf_scheduler" / "predictions.json"
TINY: Final = 30
ENTRIES: Final = ("drawn-04", "drawn-08", "drawn-09", "drawn-13", "drawn-14", "drawn-28")
EACH: Final = 4
DIGITS: Final = 9


def rows() -> Iterator[tuple[str, PlanProblem, Candidate]]:
    asked = [(f"tiny-{slots}-{seed}", problems.tiny(seed, slots=slots)) for slots in (3, 4) for seed in range(TINY)]
    entries = workloads.entries()
    asked += [(name, problems.of_entry(entries[name], items=16, hand_over_ms=2.0, turn_ms=1.7)) for name in ENTRIES]
    asked += [(f"bench-{slots}", bench.problem(slots)) for slots in (8, 64)]
    for name, problem in asked:
        rng = random.Random(f"table {name}")
        for number in range(EACH):
            candidate = draw(problem, rng)
            if candidate is not None:
                yield f"{name}/{number}", problem, candidate


def draw(problem: PlanProblem, rng: random.Random) -> Candidate | None:
    """Any placement: roles thrown together into regions, slots thrown at them. None: somebody found no place."""
    for _ in range(200):
        names = [role.name for role in problem.roles]
        rng.shuffle(names)
        cuts = sorted(rng.sample(range(1, len(names)), rng.randint(0, len(names) - 1)))
        groups = [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]
        if len(groups) > 1 and rng.random() < 0.3:  # one that is in two regions
            name = rng.choice([n for n in names if not problem.role(n).is_gang])
            next(g for g in groups if name not in g).append(name)
        slots = [[0] * len(problem.pools) for _ in groups]
        for at, pool in enumerate(problem.pools):
            able = [i for i, group in enumerate(groups) if set(group) & set(pool.roles)]
            for _ in range(pool.slots if able else 0):
                slots[rng.choice(able)][at] += 1
        regions = [_region(problem, group, tuple(s), rng) for group, s in zip(groups, slots, strict=True)]
        choices = {role.name: _choice(problem, role, rng) for role in problem.roles}
        for cycle in problem.cycles:
            choices[cycle.front] = replace(choices[cycle.front], stages=rng.choice([1, 2]))
        found = Candidate(regions=tuple(regions), choices=choices)
        if all(sum(turn.workers) for region in regions for turn in region.turns):
            return found
    return None


def _region(problem: PlanProblem, group: list[str], slots: tuple[int, ...], rng: random.Random) -> Region:
    turns = []
    for name in group:
        role = problem.role(name)
        counts = [n // role.slots_per_worker * (name in p.roles) for n, p in zip(slots, problem.pools, strict=True)]
        until = 0
        if len(group) > 1 and not role.is_gang and rng.random() < 0.1:
            until = max(1, problem.units[name] // 2)
        turns.append(PlannedTurn(name, tuple(counts), until))
    return Region(slots, tuple(turns))


def _choice(problem: PlanProblem, role: RoleCosts, rng: random.Random) -> Choice:
    items = problem.units[role.name]
    option = rng.randrange(len(role.options))
    stays = role.may_stay and rng.random() < 0.5
    if role.name in problem.cycle_of:
        return Choice(depth=problem.units[role.name], option=option, stays=stays)
    size = 1 if isinstance(role.service, InLanes) else rng.choice([1, min(3, items), items])
    return Choice(micro_batch=size, depth=rng.choice([1, 2, 2, 4]), option=option, stays=stays)


def predicted(problem: PlanProblem, candidate: Candidate) -> dict[str, Any]:
    said = simulate(problem, candidate)
    return {
        "period": round(said.period_ms, DIGITS),
        "idle": round(said.idle_share, DIGITS),
        "critical": [[role, kind, round(ms, DIGITS)] for role, kind, ms in said.critical],
    }


def write() -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(predicted(problem, found))}" for name, problem, found in rows()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
