"""Candidates that differ from another by one change: slots that move, a number of a role, the order of turns, where a
turn ends; of few slots also by giving a part of a region other roles than the rest of it, which no nested cut gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlinf_api.job import PlacementMode
from rlinf_scheduler.planner.candidate import Candidate, Choice, PlannedTurn, Region
from rlinf_scheduler.planner.problem import PlanProblem
from rlinf_scheduler.planner.searching import sizes
from rlinf_scheduler.planner.searching.drafts import WORLDS, Drafts
from rlinf_scheduler.planner.searching.layouts import Layout, layout_of


class Neighbours:
    def __init__(self, problem: PlanProblem, drafts: Drafts, *, grain: int, is_thorough: bool) -> None:
        self._problem, self._drafts, self._grain, self._is_thorough = problem, drafts, grain, is_thorough

    def steps(self) -> list[int]:
        """Slots to move at once: many first."""
        slots = sum(pool.slots for pool in self._problem.pools)
        found, step = {self._grain}, slots // 8
        while step > self._grain:
            found.add(step // self._grain * self._grain)
            step //= 4
        found |= {pool.slots_per_pod for pool in self._problem.pools if self._grain < pool.slots_per_pod <= slots // 2}
        return sorted(found, reverse=True)

    def moves(self, at: Candidate, step: int) -> Iterator[Candidate]:
        """Slots from one region to another, to those that nobody has, or from there; and a part of a region that gets a
        role more than the rest of it, or has one less."""
        problem, regions = self._problem, at.regions
        unused = [pool.slots - sum(r.slots[p] for r in regions) for p, pool in enumerate(problem.pools)]
        layout = layout_of(at)
        for pool in range(len(problem.pools)):
            for source, to in itertools.permutations(range(-1, len(regions)), 2):
                slots = [list(region.slots) for region in regions]
                available = unused[pool] if source < 0 else slots[source][pool]
                count = min(step, available)
                if not count or (to >= 0 and not set(layout[to]) & set(problem.pools[pool].roles)):
                    continue
                for place, change in ((source, -count), (to, count)):
                    if place >= 0:
                        slots[place][pool] += change
                yield from self._changed(at, layout, slots)
        if self._is_thorough and problem.mode not in (PlacementMode.COLLOCATED, PlacementMode.DISAGGREGATED):
            for new_layout, new_slots in self._splits(layout, regions, unused, step):
                yield from self._changed(at, new_layout, new_slots)

    def _splits(
        self, layout: Layout, regions: Sequence[Region], unused: Sequence[int], step: int
    ) -> Iterator[tuple[Layout, list[list[int]]]]:
        gangs = {role.name for role in self._problem.roles if role.is_gang}
        names = list(self._problem.index)
        for source in range(-1, len(layout)):
            of_source = layout[source] if source >= 0 else ()
            for pool, spec in enumerate(self._problem.pools):
                available = regions[source].slots[pool] if source >= 0 else unused[pool]
                count = min(step, available)
                if not count:
                    continue
                for name in names:
                    if name not in spec.roles:
                        continue
                    new = [n for n in of_source if n != name] if name in of_source else [*of_source, name]
                    for kept in {tuple(new), tuple(n for n in new if n not in gangs or n == name)}:
                        yield from self._split(layout, regions, source, pool, count, kept, gangs)

    def _split(
        self,
        layout: Layout,
        regions: Sequence[Region],
        source: int,
        pool: int,
        count: int,
        new: tuple[str, ...],
        gangs: set[str],
    ) -> Iterator[tuple[Layout, list[list[int]]]]:
        """So many slots of the pool leave the region for one of these roles."""
        slots = [list(region.slots) for region in regions]
        if source >= 0:
            slots[source][pool] -= count
        found = list(layout)
        same = next((i for i, names in enumerate(layout) if set(names) == set(new)), None)
        if not new:
            return
        if same is not None:
            slots[same][pool] += count
        else:
            found.append(new)
            slots.append([count if p == pool else 0 for p in range(len(self._problem.pools))])
        left = [i for i, of_region in enumerate(slots) if any(of_region)]
        chosen = tuple(found[i] for i in left)
        if any(sum(gang in names for names in chosen) != 1 for gang in gangs):
            return
        if {name for names in chosen for name in names} == set(self._problem.index):
            yield chosen, [slots[i] for i in left]

    def _changed(self, at: Candidate, layout: Layout, slots: Sequence[Sequence[int]]) -> Iterator[Candidate]:
        if all(map(any, slots)):
            worlds = WORLDS if self._is_thorough else 1  # else as many moves go to idle slots as to better ones
            for draft in self._drafts.of(layout, [tuple(s) for s in slots], worlds=worlds, most_ways=1):
                found = replace(draft, choices=self._as_fine(at, draft))
                yield found if self._drafts.fits(found.regions, found.choices) else draft

    def _as_fine(self, at: Candidate, draft: Candidate) -> dict[str, Choice]:
        """Options as they were, and micro-batches that cut a worker's share into as many pieces as they did."""
        found = dict(draft.choices)
        for role in self._problem.roles:
            old, new = at.choices[role.name], found[role.name]
            size = new.micro_batch
            if size > 1:
                pieces = -(-sizes.share(self._problem, at, role) // old.micro_batch)
                size = -(-sizes.share(self._problem, draft, role) // pieces)
            found[role.name] = replace(new, micro_batch=size, option=old.option, stays=old.stays, stages=old.stages)
        return found

    def variants(self, at: Candidate) -> Iterator[Candidate]:
        """The same slots with one number changed."""
        if not self._is_thorough:
            yield sizes.streamed(self._problem, at)
        in_turns = {turn.role for region in at.regions if len(region.turns) > 1 for turn in region.turns}
        for role in self._problem.roles:
            choice = at.choices[role.name]
            ladder = sizes.ladder(self._problem, at, role, every=self._is_thorough)
            others = [replace(choice, micro_batch=size) for size in ladder]
            others += [replace(choice, option=option) for option in range(len(role.options))]
            others += [replace(choice, stays=not choice.stays)] if role.may_stay and role.name in in_turns else []
            for other in others:
                changed = {**at.choices, role.name: other}
                if other != choice and self._drafts.fits(at.regions, changed):
                    yield replace(at, choices=changed)
        for cycle in self._problem.cycles:
            most, choice = sizes.most_stages(self._problem, cycle, at), at.choices[cycle.front]
            for stages in sorted({1, 2, 4, most if cycle.is_single else 1} & set(range(1, most + 1))):
                if stages != choice.stages:
                    yield replace(at, choices={**at.choices, cycle.front: replace(choice, stages=stages)})

    def orders(self, at: Candidate) -> Iterator[Candidate]:
        """Another order of turns, or of regions."""
        for number, (one, other) in enumerate(itertools.pairwise(at.regions)):
            if {turn.role for turn in one.turns} & {turn.role for turn in other.turns}:
                # The first of the workers with as much room gets the next unit, and these are of unequal size.
                yield replace(at, regions=(*at.regions[:number], other, one, *at.regions[number + 2 :]))
        for number, region in enumerate(at.regions):
            if len(region.turns) > 2:
                for i in range(1, len(region.turns) - 1):  # the order is a ring: the first may stay
                    turns = list(region.turns)
                    turns[i], turns[i + 1] = turns[i + 1], turns[i]
                    yield _with(at, number, tuple(turns))

    def untils(self, at: Candidate) -> Iterator[Candidate]:
        """A turn that ends after a half or a quarter of what its role has to do there."""
        problem = self._problem
        for number, region in enumerate(at.regions):
            for i, turn in enumerate(region.turns if len(region.turns) > 1 else ()):
                if turn.role in problem.cycle_of:
                    continue
                role, workers = problem.role(turn.role), sum(turn.workers)
                if role.is_gang:
                    work = -(-problem.units[turn.role] // (workers * at.choices[turn.role].micro_batch))
                else:
                    work = -(-problem.units[turn.role] * workers // max(1, at.workers(turn.role)))
                for until in sorted({0, work // 2, work // 4} - {turn.until}):
                    turns = (*region.turns[:i], replace(turn, until=until), *region.turns[i + 1 :])
                    yield _with(at, number, turns)


def _with(at: Candidate, number: int, turns: tuple[PlannedTurn, ...]) -> Candidate:
    regions = [*at.regions]
    regions[number] = replace(regions[number], turns=turns)
    return replace(at, regions=tuple(regions))
