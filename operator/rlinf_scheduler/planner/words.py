"""What the planner says: where everybody is, what binds, why another candidate lost, why there is none. Pure. Its
sentences go verbatim into RLPlans and conditions. For: search, what_if.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlinf_api.job import Objective, PlacementMode
from rlinf_scheduler.planner import candidate as candidates
from rlinf_scheduler.planner.candidate import Candidate, TooMuch
from rlinf_scheduler.planner.infeasible import Objection
from rlinf_scheduler.planner.problem import PlanProblem, Provenance, RoleCosts
from rlinf_scheduler.planner.simulate import Prediction


def reasons(problem: PlanProblem, refused: Sequence[TooMuch], short: set[str]) -> Iterator[Objection]:
    """Roles that no slot of theirs could hold; else roles without slots; else too few slots side by side, where nobody
    may take turns; else the turns that lacked least."""
    alone = False
    for role in problem.roles:
        homes = [pool for pool in problem.pools if role.name in pool.roles]
        peak = min(max(option.peak_mib, role.resident_mib) for option in role.options)
        if homes and all(pool.memory_mib and peak > pool.memory_mib for pool in homes):
            alone = True
            largest = max(homes, key=lambda pool: pool.memory_mib)
            lower = "its memory.kv in the plan" if role.kv_mib else "the role's peak"
            yield Objection(
                f"role {role.name!r} peaks at {_gib(peak)}{_cache(role)} on a slot of {_gib(largest.memory_mib)} in "
                f"pool {largest.name}, alone; raise spec.pools[{largest.name}].slots.memory or lower {lower}",
                role.name,
            )
    if alone:
        return
    for role in problem.roles:
        room = sum(p.slots // role.slots_per_worker for p in problem.pools if role.name in p.roles)
        if not any(role.allows(n) for n in range(1, room + 1)):
            yield Objection(
                f"role {role.name!r} has room for {room} workers of {role.slots_per_worker} slots, and may not have so "
                f"few; raise its pools' pods or lower spec.roles[{role.name}].workers",
                role.name,
            )
    if problem.mode is PlacementMode.DISAGGREGATED and (sum_up := _too_few_side_by_side(problem)):
        yield sum_up
        return
    if refused:
        least = min(refused, key=lambda too: too.need_mib - too.room_mib)
        kept = " and ".join(f"{name} keeps {_gib(mib)}" for name, mib in least.kept if mib)
        slots = next(pool.slots for pool in problem.pools if pool.name == least.pool)
        lacks = _gib(least.need_mib - least.room_mib)
        yield Objection(
            f"{least.role} peaks at {_gib(least.peak_mib)}{_cache(problem.role(least.role))} and "
            f"{kept or 'nobody keeps anything'} on a slot of "
            f"{_gib(least.room_mib)} in pool {least.pool}, which lacks {lacks}; give it {slots + 1} slots",
            least.role,
        )
    elif short and not alone:
        yield Objection(f"no division of the slots has room for {', '.join(sorted(short))}; raise spec.pools[*].pods")


def _cache(role: RoleCosts) -> str:
    return f", {_gib(role.kv_mib)} of it for keys and values," if role.kv_mib else ""


def _gib(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB"


def describe(problem: PlanProblem, candidate: Candidate) -> str:
    """Where everybody is.

    `rollout on 5 of gpu; reward | train in turns on 3 of gpu`
    """
    parts = []
    for region in candidate.regions:
        where = " and ".join(f"{n} of {p.name}" for p, n in zip(problem.pools, region.slots, strict=True) if n)
        turns = " | ".join(turn.role for turn in region.turns)
        parts.append(f"{turns} {'in turns ' if len(region.turns) > 1 else ''}on {where}")
    return "; ".join(parts)


def _too_few_side_by_side(problem: PlanProblem) -> Objection | None:
    """The fewest slots of all roles beside each other, which add up to more than there are."""
    names = set(problem.index)
    if any(names - set(pool.roles) for pool in problem.pools):
        return None  # which role lacks them is a matter of which pools are whose
    needs = [(role.name, role.least * role.slots_per_worker) for role in problem.roles]
    total, there = sum(n for _, n in needs), sum(pool.slots for pool in problem.pools)
    if total <= there:
        return None
    listed = " + ".join(f"{n} ({name})" for name, n in needs)
    pools = ", ".join(pool.name for pool in problem.pools)
    return Objection(
        f"side by side the roles need {listed} = {total} slots, pools {pools} have {there}; raise spec.pools[*].pods "
        "or write spec.placement.mode: Auto, so that roles may take turns"
    )


def explain(problem: PlanProblem, candidate: Candidate, prediction: Prediction) -> str:
    """What binds, and what is only assumed."""
    role, kind, ms = max(prediction.critical, key=lambda part: part[2], default=("nobody", "wait", 0.0))
    assumed = [r.name for r in problem.roles if r.options[0].per_item_ms.by is Provenance.ASSUMED]
    said = (
        f"{describe(problem, candidate)}: {prediction.period_ms:.1f} ms a step, of which {kind} of {role} is "
        f"{ms:.1f} ms on the critical path{''.join(f', {part}' for part in _binds(problem, candidate, role, kind))}; "
        f"slots idle {prediction.idle_share:.0%}"
    )
    if problem.objective is Objective.COST_PER_STEP:
        paid = candidates.paid(problem, candidate)
        said += f"; {paid} slots paid, {paid * prediction.period_ms / 1e3:.2f} slot seconds a step"
    return said + (f". Assumed, not measured: the times of {', '.join(assumed)}" if assumed else "")


def _binds(problem: PlanProblem, candidate: Candidate, name: str, kind: str) -> Iterator[str]:
    """Where in the graph that is: a cycle, or an edge on which units become others; and what its time goes by."""
    if cycle := problem.cycle_of.get(name):
        stages, what = candidate.choices[cycle.front].stages, "unit" if cycle.is_single else "sub-batch"
        yield (
            f"in the cycle of {cycle.front} and {cycle.back}: {_some(cycle.round_trips, 'trip')} a unit, "
            f"{_some(stages, what)} of each {cycle.front} at once"
        )
    for edge in problem.edges:
        made, taken = problem.units[edge.producer], problem.units[edge.consumer]
        if name in (edge.producer, edge.consumer) and made != taken:
            yield f"where {made} of {edge.producer} become {taken} of {edge.consumer} ({edge.channel})"
    if name in problem.index and problem.role(name).tokens and kind == "compute":
        yield f"by {problem.role(name).tokens:.4g} tokens a unit"


def _some(count: int, what: str) -> str:
    """
    >>> _some(1, "trip"), _some(2, "sub-batch")
    ('1 trip', '2 sub-batches')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what.endswith('ch') else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostBecause:
    """What a runner-up has more of on its critical path than the best one; `str` says it.

    >>> print(LostBecause(slower=0.1, more_ms=7.0, kind="load", role="train"))
    10.0% slower: 7.0 ms more load of train on its critical path
    """

    slower: float
    """Share of the best one's period."""
    more_ms: float
    kind: str
    role: str
    more_slots: int = 0
    """That are paid for it; a plan that is faster may lose by what it costs."""

    def __str__(self) -> str:
        if self.slower <= 0:
            pace = f"{-self.slower:.1%} faster" if self.slower < -5e-4 else "as fast"
            return f"{pace}, on {self.more_slots} slots more" if self.more_slots > 0 else f"{pace}, with more turns"
        return f"{self.slower:.1%} slower: {self.more_ms:.1f} ms more {self.kind} of {self.role} on its critical path"


def lost_because(best: Prediction, other: Prediction, *, more_slots: int = 0) -> LostBecause:
    def parts(prediction: Prediction) -> Mapping[tuple[str, str], float]:
        found: dict[tuple[str, str], float] = {}
        for role, kind, ms in prediction.critical:
            found[role, kind] = found.get((role, kind), 0.0) + ms
        return found

    mine, its = parts(best), parts(other)
    worst = max(its, key=lambda name: its[name] - mine.get(name, 0.0), default=("", ""))
    slower = other.period_ms / best.period_ms - 1 if best.period_ms else 0.0
    more = its.get(worst, 0.0) - mine.get(worst, 0.0)
    return LostBecause(slower=slower, more_ms=more, kind=worst[1], role=worst[0], more_slots=more_slots)
