"""How slots are divided over the regions of a layout: all ways where they are few, else balanced by work."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from math import comb, lcm, prod
from typing import Final

from rlinf_scheduler.planner.bounds import Bounds
from rlinf_scheduler.planner.candidate import Region
from rlinf_scheduler.planner.problem import InRounds, PlanProblem
from rlinf_scheduler.planner.searching.layouts import Layout

STAND_INS: Final = 64
"""Half of the slots up to which each worker is simulated by itself while plans are sought. Of more, one stands for as
many as make about so many, and slots change hands by that number."""

RegionSlots = tuple[int, ...]
"""The slots of a region in each pool of the problem."""


class Divisions:
    def __init__(self, problem: PlanProblem, bounds: Bounds, *, keep: Sequence[Region]) -> None:
        """`keep`: regions that every candidate has, with the slots that they have."""
        self._problem, self._bounds, self._keep = problem, bounds, keep
        self.grain = _grain(problem)
        """Slots that change hands together, and workers that one stands for."""
        self._loads = {role.name: self._load(role.name) for role in problem.roles}
        self._times: dict[tuple[str, int], float] = {}

    def _load(self, name: str) -> float:
        role = self._problem.role(name)
        each = min(option.per_item_ms.value for option in role.options)
        pace = float(role.slots_per_worker**role.scaling) / role.slots_per_worker  # of a slot
        return (each * self._bounds.total(name) + role.per_batch_ms.value) * self._bounds.trips(name) / pace

    # --- all of them --------------------------------------------------------------------------------------------------
    def count(self, layout: Layout) -> int:
        """How many ways `every` has, with those that leave a region without a slot."""
        problem = self._problem
        regions = [sum(bool(set(names) & set(pool.roles)) for names in layout) for pool in problem.pools]
        return prod(comb(pool.slots + n, n) for pool, n in zip(problem.pools, regions, strict=True))

    def every(self, layout: Layout) -> Iterator[list[RegionSlots]]:
        """Every way to divide all pools, with slots that nobody has among them."""
        of_pools, kept = [], self._kept(layout)
        for pool in self._problem.pools:
            may = [bool(set(names) & set(pool.roles)) for names in layout]
            of_pools.append([parts[1:] for parts in _compositions(pool.slots, [True, *may])])
        for chosen in itertools.product(*of_pools):
            slots = [tuple(parts[i] for parts in chosen) for i in range(len(layout))]
            if all(map(any, slots)) and all(slots[at] == region.slots for at, region in kept.items()):
                yield slots

    def _kept(self, layout: Layout) -> dict[int, Region]:
        """By its place in the layout."""
        return {layout.index(tuple(turn.role for turn in region.turns)): region for region in self._keep}

    # --- balanced ones ------------------------------------------------------------------------------------------------
    def balanced(self, layout: Layout) -> Iterator[list[RegionSlots]]:
        """One of all slots; where slots have their price, one of those of fewer pods too."""
        for capacity in self._capacities():
            yield self._divided(layout, capacity)

    def _capacities(self) -> Iterator[list[int]]:
        """Slots of all pods; where slots have their price, also of fewer pods, down to those that are there anyway."""
        pools = self._problem.pools
        yield [pool.slots for pool in pools]
        if not self._problem.has_price:
            return
        told = {tuple(pool.slots for pool in pools)}
        for halvings in range(1, 20):
            pods = [max(pool.least_pods, 1, pool.most_pods >> halvings) for pool in pools]
            slots = [min(p.slots, n * p.slots_per_pod) for p, n in zip(pools, pods, strict=True)]
            if tuple(slots) not in told:
                told.add(tuple(slots))
                yield slots

    def _divided(self, layout: Layout, capacity: Sequence[int]) -> list[RegionSlots]:
        """What is kept as it is, the rest balanced; nothing where that leaves nothing."""
        if not self._keep:
            return self._balanced(layout, capacity)
        kept = self._kept(layout)
        left = [n - sum(region.slots[p] for region in kept.values()) for p, n in enumerate(capacity)]
        rest = [at for at in range(len(layout)) if at not in kept]
        if min(left, default=0) < 0:
            return [(0,) * len(left)] * len(layout)
        found = dict(zip(rest, self._balanced(tuple(layout[at] for at in rest), left) if rest else (), strict=True))
        return [kept[at].slots if at in kept else found[at] for at in range(len(layout))]

    def _balanced(self, layout: Layout, capacity: Sequence[int]) -> list[RegionSlots]:
        """Slots where they bring most, region by region; of one pool, in proportion to their roles' work."""
        if len(capacity) == 1:
            return self._proportional(layout, capacity[0])
        problem, free = self._problem, list(capacity)
        slots = [[0] * len(free) for _ in layout]
        chunk = self.grain
        loads = [sum(self._loads[name] for name in names) for names in layout]
        pace = [0.0] * len(layout)
        wide = [max(problem.role(n).slots_per_worker for n in names) for names in layout]
        stuck: set[int] = set()
        while any(free) and len(stuck) < len(layout):
            at = max((i for i in range(len(layout)) if i not in stuck), key=lambda i: loads[i] / (pace[i] or 1e-9))
            pools = [p for p, pool in enumerate(problem.pools) if free[p] and set(layout[at]) & set(pool.roles)]
            if not pools:
                stuck.add(at)
                continue
            # A pool that serves the fewest other regions, then the fastest.
            others = [sum(bool(set(names) & set(problem.pools[p].roles)) for names in layout) for p in pools]
            _, _, best = min(zip(others, (-problem.pools[p].speed for p in pools), pools, strict=True))
            given = min(free[best], max(chunk, wide[at]))
            slots[at][best] += given
            pace[at] += given * problem.pools[best].speed
            free[best] -= given
        return [tuple(of_region) for of_region in slots]

    def _proportional(self, layout: Layout, slots: int) -> list[RegionSlots]:
        grain = self.grain if slots >= self.grain * len(layout) else 1
        loads = [sum(self._loads[name] for name in names) + 1e-9 for names in layout]
        least = [max(self._fewest(name) for name in names) for names in layout]
        least = [-(-n // grain) for n in least]
        units, total = slots // grain, sum(loads)
        given = [max(n, int(units * load / total)) for n, load in zip(least, loads, strict=True)]
        while sum(given) > units:
            able = [i for i in range(len(given)) if given[i] > least[i]]
            if not able:
                break
            given[min(able, key=lambda i: loads[i] / given[i])] -= 1
        while sum(given) < units:
            given[max(range(len(given)), key=lambda i: loads[i] / given[i])] += 1
        if sum(given) > units:
            return [(0,)] * len(layout)
        # A unit is whole: where one slot more saves the longest region a round, another gives it.
        times = [self._time(names, n * grain) for names, n in zip(layout, given, strict=True)]
        for _ in range(2 * len(given) if len(given) > 1 else 0):
            longest = max(range(len(given)), key=times.__getitem__)
            less = {
                i: self._time(layout[i], (given[i] - 1) * grain)
                for i in range(len(given))
                if i != longest and given[i] > least[i]
            }
            if not less or min(less.values()) >= times[longest]:
                break
            giver = min(less, key=less.__getitem__)
            given[giver], given[longest] = given[giver] - 1, given[longest] + 1
            times[giver], times[longest] = less[giver], self._time(layout[longest], given[longest] * grain)
        return [(n * grain,) for n in given]

    def _time(self, names: Iterable[str], slots: int) -> float:
        """The milliseconds that these roles take in turns on so many slots of the only pool."""
        found = 0.0
        for name in names:
            key = (name, slots)
            if key not in self._times:
                role = self._problem.role(name)
                workers = slots // role.slots_per_worker if name in self._problem.pools[0].roles else 0
                each = min(option.per_item_ms.value for option in role.options)
                self._times[key] = self._bounds.work_ms(role, (workers,), per_item_ms=each)
            found += self._times[key]
        return found

    def _fewest(self, name: str) -> int:
        """Slots of the fewest workers, of a role that is not in several regions."""
        role = self._problem.role(name)
        return role.slots_per_worker * (role.fewest if role.is_gang else 1)


def _grain(problem: PlanProblem) -> int:
    """Slots that are moved together, and workers that one stands for: about a STAND_INSth of all, a power of two where
    a gang has given sizes, else what divides pools and units."""
    slots = sum(pool.slots for pool in problem.pools)
    if slots <= 2 * STAND_INS:
        return 1
    wide = lcm(*(role.slots_per_worker for role in problem.roles))
    few, many = max(2, slots // (STAND_INS * 3 // 2)), max(2, slots // (STAND_INS * 3 // 4))
    if any(role.is_gang and isinstance(role.service, InRounds) and role.service.ranks for role in problem.roles):
        return int(1 << (slots // STAND_INS).bit_length() - 1)
    able = [n for n in range(few, many + 1) if n % wide == 0] or [slots // STAND_INS]

    def rest(grain: int) -> tuple[int, int]:
        counts = (problem.items, *(pool.slots for pool in problem.pools))
        return sum(bool(n % grain) for n in counts), -grain

    return min(able, key=rest)


def _compositions(count: int, may: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """Fewest unused first."""
    if len(may) == 1:
        if may[0] or not count:
            yield (count,)
        return
    for first in range(count + 1) if may[0] else (0,):
        for rest in _compositions(count - first, may[1:]):
            yield (first, *rest)
