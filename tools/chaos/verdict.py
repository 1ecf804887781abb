"""What must hold after chaos. Pure: of what a round has left.

* the job ends Complete, with exit code 0 and no process left, an undisturbed one too;
* each change of plan was in force, or refused with a reason, or overtaken by another; and of all of them some were in
  force;
* no step commits twice on a branch, and the surviving history (of the lines in their order, those that no later branch
  has made again) has the units of an undisturbed run, step by step;
* no version of the weights was seen with two checksums, by any worker of any life;
* the learning result is not more than 2 standard deviations below the mean of undisturbed seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tools.chaos import faults
from tools.chaos.rounds import Round
from tools.running_job import surviving

LAST_STEPS: Final = 10  # whose mean return is the result: of one step alone it jumps by 20
DEVIATIONS: Final = 2.0
LEAST_SPREAD: Final = 5.0
"""Returns of 500 at most: where undisturbed seeds all reach the top their spread is next to nothing, and a difference
of half an episode in a window of 100 would be found guilty."""

ENDED: Final = ("ended", "no rljob runs")  # what a change is told that comes too late for its job

Line = dict[str, Any]


def units(lines: Iterable[Line]) -> list[tuple[int, int, str]]:
    """(step, how many, digest of their keys) of the surviving history."""
    return [(line["step"], line["units"], line["digest"]) for line in surviving(list(lines))[0]]


def result(found: Round) -> float:
    """Mean return of the last steps of the surviving history."""
    returns = [line["return_mean"] for line in surviving(found.metrics)[0] if "return_mean" in line]
    return statistics.fmean(returns[-LAST_STEPS:]) if returns else float("nan")


def problems(found: Round, *, calm: Round) -> list[str]:
    """Sentences; none: all is well. `calm` is an undisturbed run of the same job."""
    said = []
    if found.exit_code != 0 or found.answer.get("condition") != "Complete":
        tail = found.said.strip()[-1500:]
        said.append(f"the job ended with exit code {found.exit_code} and {found.answer.get('condition')!r}: {tail}")
    if found.left:
        said.append(f"processes {found.left} are left")
    said += found.unanswered
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


def changes(found: Sequence[Round]) -> str:
    """Empty where changes of plan came into force, or none was asked for that was not overtaken."""
    asks = [ask for one in found for entry in one.done for ask in entry.asks if ask.in_force or not ask.overtaken]
    asks = [ask for ask in asks if ask.in_force or not any(words in ask.says for words in ENDED)]
    if not asks or any(ask.in_force for ask in asks):
        return ""
    return f"of {len(asks)} changes of plan none came into force; the last: {asks[-1].says}"


def scope(found: Sequence[Round], lacks: Mapping[str, str]) -> list[str]:
    """What the verdict does not speak of: kinds of faults that this machine does not allow, or that did not come up."""
    said = [f"no fault of kind {kind!r}, as this machine does not allow it: {why}" for kind, why in lacks.items()]
    done = {entry.fault.kind for one in found for entry in one.done}
    if missed := [kind for kind in faults.KINDS if kind not in done and kind not in lacks]:
        said.append(f"no fault of kind {', '.join(map(repr, missed))}, as none came up; more --seconds have them all")
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
