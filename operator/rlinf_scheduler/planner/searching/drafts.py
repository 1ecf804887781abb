"""Candidates of a layout and its slots: how many workers each role has there, which option, who stays resident; and
whether slots hold that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from rlinf_scheduler.planner import candidate as candidates
from rlinf_scheduler.planner.candidate import Candidate, Choice, PlannedTurn, Region, TooMuch
from rlinf_scheduler.planner.problem import PlanProblem, RoleCosts
from rlinf_scheduler.planner.searching import sizes
from rlinf_scheduler.planner.searching.layouts import Layout

WORLDS: Final = 4
"""Largest allowed sizes of a gang on given slots that are looked at: a smaller one rarely makes up for idle slots."""
WAYS: Final = 64
"""Combinations of options and of what stays resident that a draft is tried with; further ones are sought one change at
a time."""
TOLD: Final = 1000
"""How many entries are kept of what no slot holds: reasons name a few."""


class Drafts:
    def __init__(self, problem: PlanProblem, *, keep: Sequence[Region], grain: int, is_thorough: bool) -> None:
        self._problem, self._keep, self._grain, self._is_thorough = problem, keep, grain, is_thorough
        self.refused: list[TooMuch] = []
        self.short: set[str] = set()
        """Roles that some layout had no slots for."""

    def keeps(self, regions: Sequence[Region]) -> bool:
        return not self._keep or {*map(candidates.shape, self._keep)} <= {*map(candidates.shape, regions)}

    def fits(self, regions: Sequence[Region], choices: Mapping[str, Choice]) -> bool:
        return not any(too for region in regions for too in candidates.too_much(self._problem, region, choices))

    def of(
        self, layout: Layout, slots: Sequence[tuple[int, ...]], *, worlds: int = WORLDS, most_ways: int = WAYS
    ) -> Iterator[Candidate]:
        """All that these regions may be, as a rule for every role, memory aside."""
        turns = [
            [_turns(self._problem, name, of_region, worlds, self._grain) for name in names]
            for names, of_region in zip(layout, slots, strict=True)
        ]
        for chosen in itertools.product(*(itertools.product(*region) for region in turns)):
            regions = tuple(Region(of_region, part) for of_region, part in zip(slots, chosen, strict=True))
            regions = _capped(self._problem, regions)
            draft = Candidate(regions=regions, choices={})
            counts = dict.fromkeys(self._problem.index, 0)
            for region in regions:
                for turn in region.turns:
                    counts[turn.role] += sum(turn.workers)
            short = [r.name for r in self._problem.roles if not r.allows(counts[r.name])]
            self.short.update(short)
            if (
                not short
                and self.keeps(regions)
                and all(sum(turn.workers) for region in regions for turn in region.turns)
            ):
                yield from self._choices(draft, most_ways)

    def _choices(self, draft: Candidate, most: int) -> Iterator[Candidate]:
        """What fits into memory, with the largest micro-batches; the others come once it is its turn."""
        shared = {turn.role for region in draft.regions if len(region.turns) > 1 for turn in region.turns}
        may_stay = [role for role in self._problem.roles if role.may_stay and role.name in shared]
        ways = []
        for role in self._problem.roles:
            stays = (False, True) if role in may_stay and self._is_thorough else (False,)
            ways.append([(option, stay) for option in range(len(role.options)) for stay in stays])
        tried = list(itertools.islice(itertools.product(*ways), most))
        smallest = tuple((role.smallest, False) for role in self._problem.roles)
        for chosen in tried if smallest in tried else (*tried, smallest):
            choices = {
                role.name: sizes.choice(self._problem, draft, role, option=option, stays=stay)
                for role, (option, stay) in zip(self._problem.roles, chosen, strict=True)
            }
            found = [too for region in draft.regions for too in candidates.too_much(self._problem, region, choices)]
            self.refused += found if len(self.refused) < TOLD else ()
            if found:
                continue
            yield replace(draft, choices=choices)
            if may_stay and not self._is_thorough:
                yield replace(draft, choices=self._staying(draft, choices, may_stay))

    def _staying(
        self, draft: Candidate, choices: Mapping[str, Choice], roles: Sequence[RoleCosts]
    ) -> dict[str, Choice]:
        """As many stay resident as have room, who takes longest to move first."""
        found = dict(choices)
        for role in sorted(roles, key=lambda r: -(r.load_ms.value + r.offload_ms.value)):
            more = {**found, role.name: replace(found[role.name], stays=True)}
            if self.fits(draft.regions, more):
                found = more
        return found


def _turns(problem: PlanProblem, name: str, slots: Sequence[int], most: int, step: int) -> list[PlannedTurn]:
    """As many workers as fit and the role may have; a gang in each of its largest world sizes, in the fastest pools."""
    role = problem.role(name)
    fit = [
        n // role.slots_per_worker if name in pool.roles else 0 for pool, n in zip(problem.pools, slots, strict=True)
    ]
    if not role.is_gang:
        return [PlannedTurn(name, tuple(fit))]
    worlds = role.worlds(sum(fit), most, step)
    return [PlannedTurn(name, _fill(problem, fit, world)) for world in worlds] or [PlannedTurn(name, (0,) * len(fit))]


def _fill(problem: PlanProblem, fit: Sequence[int], workers: int) -> tuple[int, ...]:
    """So many of those that fit, in the fastest pools."""
    left, counts = workers, [0] * len(fit)
    for p in sorted(range(len(fit)), key=lambda p: -problem.pools[p].speed):
        counts[p] = min(left, fit[p])
        left -= counts[p]
    return tuple(counts)


def _capped(problem: PlanProblem, regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """Where a role has more workers than it may: the fewer in the regions where it has most, one in each at least."""
    room = sum(pool.slots for pool in problem.pools)
    for role in problem.roles:
        if role.most >= room:
            continue
        turns = {
            (i, j): sum(turn.workers)
            for i, region in enumerate(regions)
            for j, turn in enumerate(region.turns)
            if turn.role == role.name
        }
        over = sum(turns.values()) - role.most
        while over > 0:
            at = max(turns, key=lambda place: turns[place])
            second = max((n for place, n in turns.items() if place != at), default=0)
            fewer = min(over, max(1, turns[at] - max(1, second)))
            if turns[at] - fewer < 1:
                break
            turns[at] -= fewer
            over -= fewer
        changed = list(regions)
        for (i, j), count in turns.items():
            turn = changed[i].turns[j]
            if sum(turn.workers) != count:
                less = replace(turn, workers=_fill(problem, turn.workers, count))
                changed[i] = replace(changed[i], turns=(*changed[i].turns[:j], less, *changed[i].turns[j + 1 :]))
        regions = tuple(changed)
    return regions
