"""All plans of a tiny problem, scored by the simulator: what the search is compared with. Shares no code with it.

    nested   the roles are cut, again and again, into parts that are side by side or in turns on the same slots; each
             part's roles use all slots that they can, or none of some of them
    any      each slot is given any set of roles; slots of the same set form a region. A role's workers may be fewer
             than its slots hold where it is a gang

Both with every order of turns, micro-batches {1, 3, all}, stages {1, 2}, options, and what stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlinf_scheduler.planner.candidate import Candidate, Choice, PlannedTurn, Region
from rlinf_scheduler.planner.problem import CycleEdge, InLanes, PlanProblem, RoleCosts
from rlinf_scheduler.planner.simulate import simulate

System = tuple[tuple[frozenset[str], tuple[int, ...]], ...]
"""Regions: their roles, and their slots of each pool."""


@dataclass(frozen=True)
class Best:
    nested_ms: float
    nested: Candidate | None
    any_ms: float
    any: Candidate | None
    tried: int


def best(problem: PlanProblem) -> Best:
    found: dict[bool, tuple[float, Candidate | None]] = {True: (float("inf"), None), False: (float("inf"), None)}
    tried = 0
    for system in _systems(problem):
        nested = _is_nested([roles for roles, _ in system], problem)
        for candidate in _plans(problem, system):
            tried += 1
            ms = simulate(problem, candidate).period_ms
            for kind in {False, nested}:
                if ms < found[kind][0]:
                    found[kind] = (ms, candidate)
    return Best(*found[True], *found[False], tried)


def _systems(problem: PlanProblem) -> Iterator[System]:
    """Each slot of each pool has a set of roles, or none; which slot of a pool it is makes no difference."""
    names = [role.name for role in problem.roles]
    gangs = {role.name for role in problem.roles if role.is_gang}
    sets = [frozenset(c) for n in range(len(names) + 1) for c in itertools.combinations(names, n)]
    per_pool = [
        list(itertools.combinations_with_replacement([s for s in sets if s <= set(pool.roles)], pool.slots))
        for pool in problem.pools
    ]
    for chosen in itertools.product(*per_pool):
        used = {roles for pool in chosen for roles in pool if roles}
        where = {name: [roles for roles in used if name in roles] for name in names}
        if all(where.values()) and all(len(where[name]) == 1 for name in gangs):
            regions = sorted(used, key=sorted)
            yield tuple((roles, tuple(pool.count(roles) for pool in chosen)) for roles in regions)


def _is_nested(regions: Sequence[frozenset[str]], problem: PlanProblem) -> bool:
    """Whether cuts lead there: a spatial one where regions fall apart into groups without a common role, a temporal one
    where some roles are in all of them."""
    names = frozenset().union(*regions)
    if len(regions) == 1:
        return True
    groups = _groups(regions)
    if len(groups) > 1:
        return all(_is_nested(group, problem) for group in groups)
    everywhere = names.intersection(*regions)
    rest = [region - everywhere for region in regions]
    return bool(everywhere) and all(rest) and _is_nested(rest, problem)


def _groups(regions: Sequence[frozenset[str]]) -> list[list[frozenset[str]]]:
    groups: list[list[frozenset[str]]] = []
    for region in regions:
        joined = [g for g in groups if any(region & other for other in g)]
        groups = [g for g in groups if g not in joined] + [[region, *(r for g in joined for r in g)]]
    return groups


def _plans(problem: PlanProblem, system: System) -> Iterator[Candidate]:
    gang_sizes = [_sizes(problem, role, system) for role in problem.roles]
    orders = [list(_rings(sorted(roles))) for roles, _ in system]
    choices = [list(_choices(problem, role)) for role in problem.roles]
    for sizes in itertools.product(*gang_sizes):
        size = {role.name: n for role, n in zip(problem.roles, sizes, strict=True)}
        for order in itertools.product(*orders):
            regions = tuple(
                Region(slots, tuple(PlannedTurn(name, _workers(problem, name, slots, size[name])) for name in names))
                for (_, slots), names in zip(system, order, strict=True)
            )
            if any(not sum(turn.workers) for region in regions for turn in region.turns):
                continue
            for chosen in itertools.product(*choices):
                named = {role.name: choice for role, choice in zip(problem.roles, chosen, strict=True)}
                if all(_holds(problem, region, named) for region in regions):
                    yield Candidate(regions=regions, choices=named)


def _rings(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Orders that differ: turns go round."""
    for rest in itertools.permutations(names[1:]):
        yield (names[0], *rest)


def _sizes(problem: PlanProblem, role: RoleCosts, system: System) -> list[int]:
    """How many workers: as many as fit, and every allowed number of a gang."""
    if not role.is_gang:
        return [0]
    fit = sum(n // role.slots_per_worker for roles, slots in system if role.name in roles for n in slots)
    return [n for n in range(1, fit + 1) if role.allows(n)]


def _workers(problem: PlanProblem, name: str, slots: Sequence[int], size: int) -> tuple[int, ...]:
    role = problem.role(name)
    counts = [n // role.slots_per_worker for n in slots]
    if size:
        left = size
        for p in sorted(range(len(counts)), key=lambda p: -problem.pools[p].speed):
            counts[p] = min(counts[p], left)
            left -= counts[p]
    return tuple(counts)


def _choices(problem: PlanProblem, role: RoleCosts) -> Iterator[Choice]:
    cycle, items = problem.cycle_of.get(role.name), problem.units[role.name]
    one = cycle is not None or isinstance(role.service, InLanes)
    for option in range(len(role.options)):
        for stays in (False, True) if role.may_stay else (False,):
            for size in (1,) if one else dict.fromkeys((1, min(3, items), items)):
                depth = items if cycle else 2
                for stages in _stages(problem, cycle) if cycle and cycle.front == role.name else (1,):
                    yield Choice(micro_batch=size, depth=depth, option=option, stays=stays, stages=stages)


def _stages(problem: PlanProblem, cycle: CycleEdge) -> Sequence[int]:
    """The stages to try: any number of units that travel by themselves, one or two sub-batches."""
    return range(1, problem.units[cycle.front] + 1) if cycle.is_single else (1, 2)


def _holds(problem: PlanProblem, region: Region, choices: dict[str, Choice]) -> bool:
    """Slot by slot: the one at work has its peak there, the others what they keep."""
    for p, pool in enumerate(problem.pools):
        for slot in range(region.slots[p] if pool.memory_mib else 0):
            there = []
            for turn in region.turns:
                role = problem.role(turn.role)
                if slot < turn.workers[p] * role.slots_per_worker:
                    there.append((role, choices[role.name]))
            kept = [role.resident_mib if choice.stays else role.offloaded_mib for role, choice in there]
            for i, (role, choice) in enumerate(there):
                peak = max(role.resident_mib, role.options[choice.option].peak_mib)
                if peak + sum(kept) - kept[i] > pool.memory_mib:
                    return False
    return True
