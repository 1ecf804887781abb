"""Proof `exact`: the search against brute force.

python -m tools.prove exact [--slots 3] [--count 20] [--kind KIND]

    tiny        what plans had to know first: turns, memory, staleness, a cycle
    like-ppo    a cycle whose asker feeds the next role, as in flow ppo
    two-cycles  what leaves one cycle goes round another
    groups      units that are split and put together between roles
    tokens      units that are long for all roles, by their tokens
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any, Final, Protocol

from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.problem import PlanProblem
from rlinf_scheduler.planner.search import plan
from tools.prove import brute, problems

EQUAL: Final = 1e-9


class Kind(Protocol):
    def __call__(self, seed: int, *, slots: int) -> PlanProblem: ...


def one(seed: int, *, slots: int, kind: str = "tiny") -> dict[str, Any]:
    problem = KINDS[kind](seed, slots=slots)
    truth, found = brute.best(problem), plan(problem)
    if isinstance(found, Infeasible):
        agrees = truth.any is None
        return {"seed": seed, "found": None, "nested": None, "ok": agrees, "loss": 0.0, "tried": truth.tried}
    ms = found.best.prediction.period_ms
    ok = ms <= truth.nested_ms * (1 + EQUAL)
    loss = max(0.0, ms / truth.any_ms - 1) if truth.any_ms else 0.0
    return {
        "seed": seed, "found": ms, "nested": truth.nested_ms, "any": truth.any_ms, "ok": ok, "loss": loss,
        "tried": truth.tried, "runs": found.runs,
    }  # fmt: skip


def asking(seed: int, *, slots: int) -> PlanProblem:
    """A problem with a cycle. In every second one each unit travels by itself."""
    cyclic = (p for p in (problems.tiny(n, slots=slots) for n in itertools.count()) if p.cycles)
    return problems.like_ppo(next(itertools.islice(cyclic, seed, None)), is_single=seed % 2 == 0)


KINDS: Final[dict[str, Kind]] = {
    "tiny": problems.tiny,
    "like-ppo": asking,
    "two-cycles": problems.two_cycles,
    "groups": problems.groups,
    "tokens": problems.tokens,
}


def summary(found: list[dict[str, Any]]) -> str:
    losses = sorted(line["loss"] for line in found)
    missed = [line["seed"] for line in found if not line["ok"]]
    return (
        f"best nested plan found in {len(found) - len(missed)} of {len(found)} (not: {missed}); loss against the "
        f"best of all: median {statistics.median(losses):.2%}, most {losses[-1]:.2%}; "
        f"{sum(line['tried'] for line in found)} plans tried by brute force"
    )
