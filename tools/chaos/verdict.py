"""What must hold after chaos. Pure: of what a round has left.

* the job ends Complete, with exit code 0 and no process left;
* no step commits twice on a branch, and the surviving history (of the lines in their order, those that no later branch
  has made again) has the units of an undisturbed run, step by step;
* no version of the weights was seen with two checksums, by any worker of any life;
* the learning result is not more than 2 standard deviations below the mean of undisturbed seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final

from tools.chaos.rounds import Round

LAST_STEPS: Final = 10  # whose mean return is the result: of one step alone it jumps by 20
DEVIATIONS: Final = 2.0
LEAST_SPREAD: Final = 5.0
"""Returns of 500 at most: where undisturbed seeds all reach the top their spread is next to nothing, and a difference
of half an episode in a window of 100 would be found guilty."""

Line = dict[str, Any]


def history(lines: Iterable[Line]) -> list[Line]:
    """
    >>> history([{"branch": 0, "step": 1}, {"branch": 0, "step": 2}, {"branch": 1, "step": 2}])
    [{'branch': 0, 'step': 1}, {'branch': 1, 'step': 2}]
    """
    survived: list[Line] = []
    for line in lines:
        while survived and survived[-1]["branch"] < line["branch"] and survived[-1]["step"] >= line["step"]:
            survived.pop()
        survived.append(line)
    return survived


def units(lines: Iterable[Line]) -> list[tuple[int, int, str]]:
    """(step, how many, digest of their keys) of the surviving history."""
    return [(line["step"], line["units"], line["digest"]) for line in history(lines)]


def result(found: Round) -> float:
    """Mean return of the last steps of the surviving history."""
    returns = [line["return_mean"] for line in history(found.metrics) if "return_mean" in line]
    return statistics.fmean(returns[-LAST_STEPS:]) if returns else float("nan")


def problems(found: Round, *, calm: Round) -> list[str]:
    """Sentences; none: all is well. `calm` is an undisturbed run of the same job."""
    said = []
    if found.exit_code != 0 or found.answer.get("condition") != "Complete":
        tail = found.said.strip()[-1500:]
        said.append(f"the job ended with exit code {found.exit_code} and {found.answer.get('condition')!r}: {tail}")
    if found.left:
        said.append(f"processes {found.left} are left")
    steps = [(line["branch"], line["step"]) for line in found.lineage]
    if twice := sorted({step for step in steps if steps.count(step) > 1}):
        said.append(f"steps committed twice, as (branch, step): {twice[:5]}")
    mine, wanted = units(found.lineage), units(calm.lineage)
    if mine != wanted:
        differ = [f"step {a[0]}: {a[1:]}, wanted {b[1:]}" for a, b in zip(mine, wanted, strict=False) if a != b]
        text = "; ".join(differ[:3]) or f"it has {len(mine)} steps, wanted {len(wanted)}"
        said.append(f"the surviving history differs from an undisturbed run's: {text}")
    if both := [key for key, seen in found.checksums.items() if len(seen) > 1]:
        said.append(f"weights seen with two checksums: {sorted(both)[:5]}")
    if not found.checksums:
        said.append("no worker has logged a checksum of its weights")
    return said


def learning(disturbed: Sequence[float], calm: Sequence[float]) -> str:
    """Empty where the mean of the disturbed results is not too far below the undisturbed ones."""
    if len(calm) < 2 or not disturbed:
        return ""
    mean, spread = statistics.fmean(calm), max(statistics.stdev(calm), LEAST_SPREAD)
    got = statistics.fmean(disturbed)
    if got >= mean - DEVIATIONS * spread:
        return ""
    return (
        f"the jobs under chaos reached a mean return of {got:.1f}; undisturbed seeds reach {mean:.1f} with a standard "
        f"deviation of {spread:.1f}, so at least {mean - DEVIATIONS * spread:.1f} is wanted"
    )
