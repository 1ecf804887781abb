"""What a candidate would take: a discrete-event run of a few steps by the runtime's rules. One code to choose plans, to
predict them, and to answer what-if. Deterministic; no clock of the machine's.

What it knows of the runtime, in simulation/, and where that stands:

    units.py    by credit, the most first, within microBatch * depth     rlinf_worker/queues/matching.py, given.py
    work.py     serial and concurrent work                               rlinf_worker/roles/synthetic
                rounds of a gang, the last one shorter                   rlinf_worker/queues/steps.py
    trips.py    sub-batches of a cycle, who answers whom, by rank        rlinf_worker/driver/routes.py
    turns.py    turns: idle or due, ripe, preload, order                 rlinf_worker/turns/rule.py
    steps.py    a step begins when the one staleness + 1 before commits  rlinf_worker/driver/steps.py

Not here: jitter (every piece takes its mean), room of channels (a plan gives them room for all steps that are open),
times that agents and the driver need beyond `hand_over_ms` and `turn_ms`.

Each event carries the piece of work that brought it about, so the last commit leads back to what its time went to.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd, inf, lcm
from typing import Any, Final

from rlinf_scheduler.planner.candidate import Candidate
from rlinf_scheduler.planner.problem import PlanProblem
from rlinf_scheduler.planner.simulation.clock import Aborted
from rlinf_scheduler.planner.simulation.steps import SimJob

MOST_STEPS: Final = 24
"""How many steps are simulated with staleness, behind those that fill the pipeline; where they never repeat, the later
half is the answer."""
CLEARLY: Final = 1.3
"""Times the limit that the mean of some steps with staleness lasts before a run is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is predicted of one step in steady state. `critical`: what its time went to, role by role, which adds up to
    the period; in it `wait` is the way between roles and time that nothing explains. `busy`: share of its slots' time
    that a role computes."""

    period_ms: float
    critical: tuple[tuple[str, str, float], ...]
    busy: dict[str, float]
    idle_share: float
    """The share of their time in which the candidate's slots are idle, over all pools."""
    effort: int = 0
    """Moves of units and turns that it took to say so; the same on any machine."""

    def part(self, kind: str) -> float:
        return sum(ms for _, of_kind, ms in self.critical if of_kind == kind)


def simulate(
    problem: PlanProblem,
    candidate: Candidate,
    *,
    steps: int | None = None,
    classes: int = 1,
    limit_ms: float = inf,
) -> Prediction:
    """`steps`: how many are averaged, behind those that fill the pipeline. None: as many as it takes until they repeat.
    Without staleness that is one, as a step begins then as the one before it did, or as many as there are sets of
    sizes; where nobody takes turns it also begins as the first one. With it a few steps long and short follow each
    other, and MOST_STEPS are enough.

    `classes`: one worker stands for so many that do alike, one unit for as many units, so that thousands of slots take
    no longer than dozens; see `alike`. `limit_ms`: raises Aborted as soon as the period is known to be above it."""
    in_turns = any(len(region.turns) > 1 for region in candidate.regions)
    job = SimJob(problem, candidate, classes=classes)
    job.begin()
    if steps is not None or not problem.staleness:
        return _over(job, warm=problem.staleness + 1 + in_turns, steps=steps or problem.size_sets, limit_ms=limit_ms)
    # By the end of these who may run ahead has done so.
    sets = problem.size_sets
    most = 2 * sets * ceil(MOST_STEPS / 2 / sets)
    at_once = problem.staleness + 1
    return _repeating(job, warm=4 * at_once, most=most, filled=at_once, period=lcm(at_once, sets), limit_ms=limit_ms)


def alike(problem: PlanProblem, candidate: Candidate, *, at_least: int, at_most: int) -> int:
    """How many workers one may stand for: a divisor of `at_most` and of every number of workers. Those below `at_least`
    are not asked: one worker then stands for these few, and is as much slower. A single one that stood for hundreds
    would be handed units as none of them is."""
    counts = (n for region in candidate.regions for turn in region.turns for n in turn.workers if n >= at_least)
    others = (n for n in problem.units.values() if n != problem.items)  # what is split comes out even
    return gcd(at_most, *counts, *others) if at_most <= problem.items else 1


def _over(job: SimJob, *, warm: int, steps: int, limit_ms: float) -> Prediction:
    while len(job.commits) < warm + steps:
        is_measured = len(job.commits) >= warm
        job.next_commit(until=job.commits[warm - 1][0] + limit_ms * steps if is_measured else inf)
    return _prediction(job, warm - 1)


def _repeating(job: SimJob, *, warm: int, most: int, filled: int, period: int, limit_ms: float) -> Prediction:
    """Until as many steps as may follow each other have lasted as long as those before them, one by one. `filled`:
    steps that fill the pipeline; `period`: so many may commit in a burst."""
    lasted: list[float] = []
    while len(lasted) < most:
        job.next_commit(until=inf)
        _leave_if_slow(job, filled, limit_ms)
        if len(job.commits) <= warm:
            continue
        lasted.append(job.commits[-1][0] - job.commits[-2][0])
        for count in range(period, len(lasted) // 2 + 1, period):
            pairs = zip(lasted[-count:], lasted[-2 * count : -count], strict=True)
            if all(abs(a - b) <= 1e-6 * max(a, b) for a, b in pairs):
                return _prediction(job, len(job.commits) - 1 - count)
    return _prediction(job, len(job.commits) - 1 - most // 2)


def _leave_if_slow(job: SimJob, filled: int, limit_ms: float) -> None:
    """Long and short steps follow each other, so that it takes some, and a clear excess, to know."""
    commits = job.commits
    count = len(commits) - 1 - filled
    if count >= 2 * filled and not count % filled:
        mean = (commits[-1][0] - commits[filled][0]) / count
        if mean > CLEARLY * limit_ms:
            raise Aborted(job.clock.count)


# --- what is said of it -----------------------------------------------------------------------------------------------
def _prediction(job: SimJob, warm: int) -> Prediction:
    """What the steps behind commit `warm` say."""
    (begun, _), (ended, piece) = job.commits[warm], job.commits[-1]
    count = len(job.commits) - 1 - warm
    span = ended - begun
    first, last, roles = job.used_ms[warm], job.used_ms[-1], job.layout.roles
    used = {role.spec.name: last[i] - first[i] for i, role in enumerate(roles)}
    slots = {role.spec.name: sum(w.slots for w in role.workers) for role in roles}
    return Prediction(
        period_ms=span / count,
        critical=_critical([role.spec.name for role in roles], piece, begun, ended, count),
        busy={name: used[name] / (span * slots[name]) if span else 0.0 for name in used},
        idle_share=max(0.0, 1.0 - sum(used.values()) / (span * job.layout.slots)) if span else 0.0,
        effort=job.clock.count,
    )


def _critical(
    names: list[str], piece: Any, begun: float, ended: float, count: int
) -> tuple[tuple[str, str, float], ...]:
    found: dict[tuple[str, str], float] = {}
    until = ended
    while piece is not None and until > begun:
        parent, index, kind, t0, t1 = piece
        name, end, begin = names[index], min(t1, until), max(t0, begun)
        for key, ms in (((name, "wait"), until - max(end, begun)), ((name, kind), end - begin)):
            if ms > 0:
                found[key] = found.get(key, 0.0) + ms
        until = min(until, begin)
        piece = parent
    return tuple((name, kind, ms / count) for (name, kind), ms in reversed(found.items()))
