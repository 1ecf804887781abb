"""Which roles share slots: nested cuts of the graph, each a set of regions.

(("roll",), ("train",))        side by side
(("roll", "train"),)           in turns, in this order
(("env", "roll"), ("env", "train"))   env in turns with others that are side by side
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from rlinf_api.job import PlacementMode
from rlinf_scheduler.planner.candidate import Candidate, Region
from rlinf_scheduler.planner.estimate import pipeline
from rlinf_scheduler.planner.problem import PlanProblem

Layout = tuple[tuple[str, ...], ...]
"""The roles of each region, in the order of their turns."""

FEW_SLOTS: Final = 4
"""Up to so many slots nearly all candidates can be looked at, and a wrong one costs most."""
EVERY_ROLES: Final = 3
"""Up to so many roles, and FEW_SLOTS slots, any slot may have any set of roles."""
ALL_LAYOUTS_ROLES: Final = 5
"""Roles up to which every nested cut is drawn: 5 have 300; of more, only neighbours in the graph share slots."""


def layouts(problem: PlanProblem) -> list[Layout]:
    """Nested cuts. A role above a spatial cut has workers in each of its regions; a gang's ranks stay together.

    >>> from rlinf_scheduler.planner.problem import InRounds, Option, QueueEdge, RoleCosts, ZERO
    >>> def role(name, **more): return RoleCosts(name=name, options=(Option(per_item_ms=ZERO),), **more)
    >>> roles = (role("roll"), role("train", service=InRounds()))
    >>> problem = PlanProblem(roles=roles, edges=(QueueEdge("roll", "train"),), pools=(), items=1)
    >>> layouts(problem)
    [(('roll',), ('train',)), (('roll', 'train'),)]
    """
    order = pipeline(problem)
    if problem.mode is PlacementMode.DISAGGREGATED:
        return [tuple((name,) for name in order)]
    if problem.mode is PlacementMode.COLLOCATED:
        return [_collocated(problem, order)]
    if len(order) > ALL_LAYOUTS_ROLES:
        cuts = range(1, len(order))
        chosen = (c for n in range(len(order)) for c in itertools.combinations(cuts, n))
        ends = ((0, *cut, len(order)) for cut in itertools.islice(chosen, 1 << 9))
        return [tuple(tuple(order[a:b]) for a, b in itertools.pairwise(end)) for end in ends]
    gangs = frozenset(role.name for role in problem.roles if role.is_gang)
    found = list(_all_nested(tuple(order), gangs))
    slots = sum(pool.slots for pool in problem.pools)
    if len(order) <= EVERY_ROLES and slots <= FEW_SLOTS:
        found += _families(tuple(order), gangs, slots)
    return list(dict.fromkeys(found))


def with_kept(found: Sequence[Layout], keep: Sequence[Region]) -> Iterator[Layout]:
    """Those that have such regions, with the turns in their order."""
    kept = {frozenset(names): names for names in (tuple(turn.role for turn in region.turns) for region in keep)}
    for layout in found:
        if kept.keys() <= {frozenset(names) for names in layout}:
            yield tuple(kept.get(frozenset(names), names) for names in layout) if kept else layout


@lru_cache(maxsize=16)
def _families(order: tuple[str, ...], gangs: frozenset[str], slots: int) -> tuple[Layout, ...]:
    """All ways to give slots any sets of roles, those that no nested cut gives among them."""
    sets = [names for n in range(1, len(order) + 1) for names in itertools.combinations(order, n)]
    found = []
    for count in range(1, slots + 1):
        for chosen in itertools.combinations(sets, count):
            names = list(itertools.chain.from_iterable(chosen))
            if set(names) == set(order) and all(names.count(gang) == 1 for gang in gangs):
                found.append(tuple(sorted(chosen, key=lambda region: [order.index(n) for n in region])))
    return tuple(found)


def _collocated(problem: PlanProblem, order: Sequence[str]) -> Layout:
    """Roles that have a pool in common, by way of others too, share one region."""
    groups: list[set[str]] = []
    for name in order:
        beside = {name}.union(*(pool.roles for pool in problem.pools if name in pool.roles))
        joined = [group for group in groups if group & beside]
        groups = [group for group in groups if group not in joined] + [beside.union(*joined)]
    return tuple(tuple(name for name in order if name in group) for group in groups)


@lru_cache(maxsize=16)  # graphs: the same jobs are planned again and again
def _all_nested(order: tuple[str, ...], gangs: frozenset[str]) -> tuple[Layout, ...]:
    return tuple(dict.fromkeys(_nested(order, order, gangs)))


def _nested(roles: tuple[str, ...], order: Sequence[str], gangs: frozenset[str]) -> Iterator[Layout]:
    for parts in _partitions(roles):
        blocks = [list(_blocks(part, order, gangs)) for part in parts]
        for chosen in itertools.product(*blocks):
            yield tuple(sorted(itertools.chain.from_iterable(chosen), key=lambda r: [order.index(n) for n in r]))


def _blocks(block: tuple[str, ...], order: Sequence[str], gangs: frozenset[str]) -> Iterator[Layout]:
    """One region in turns, or some roles in turn with others that are side by side."""
    yield (block,)
    free = [name for name in block if name not in gangs]
    for count in range(1, len(block) - 1):
        for above in itertools.combinations(free, count):
            below = tuple(name for name in block if name not in above)
            for layout in _nested(below, order, gangs):
                if len(layout) > 1:
                    yield tuple(tuple(sorted((*above, *region), key=order.index)) for region in layout)


def _partitions(roles: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Finest first."""
    if not roles:
        yield ()
        return
    first, rest = roles[0], roles[1:]
    for count in range(len(rest) + 1):
        for others in itertools.combinations(rest, count):
            left = tuple(name for name in rest if name not in others)
            for parts in _partitions(left):
                yield ((first, *others), *parts)


def fits_mode(problem: PlanProblem, layout: Layout) -> bool:
    if problem.mode is PlacementMode.DISAGGREGATED:
        return all(len(names) == 1 for names in layout)
    if problem.mode is PlacementMode.COLLOCATED:
        wanted = _collocated(problem, pipeline(problem))
        return {frozenset(names) for names in layout} == {frozenset(names) for names in wanted}
    return True


def layout_of(candidate: Candidate) -> Layout:
    return tuple(tuple(turn.role for turn in region.turns) for region in candidate.regions)
