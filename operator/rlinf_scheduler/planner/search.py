"""`plan(problem)`: the best placement that cuts of the graph give, or why there is none. Pure: no clock, the same
answer for the same problem. What it is made of, in searching/:

    layouts.py     nested cuts as sets of regions: side by side, in turns, in turns with roles that are side by side
    divisions.py   a layout's slots: all divisions where they are few, else the balanced one
    drafts.py      candidates of both, and whether slots hold them
    sizes.py       their micro-batches and stages
    neighbours.py  one change at a time
    runs.py        every candidate that is compared was run

Before a run bounds.py says what a candidate takes at least, so that nothing is tried that cannot win, and estimate.py
what it takes, about: the most promising first. Where the effort suffices for all candidates (a few slots and roles) the
answer is the best of all nested cuts. Not for: writing an RLPlan (spec.py), the first plan of a job of which nothing is
known (initial.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from rlinf_scheduler.planner import words
from rlinf_scheduler.planner.bounds import Bounds
from rlinf_scheduler.planner.candidate import Candidate, Region
from rlinf_scheduler.planner.estimate import Estimate
from rlinf_scheduler.planner.infeasible import Infeasible, Objection
from rlinf_scheduler.planner.problem import PlanProblem
from rlinf_scheduler.planner.searching import sizes
from rlinf_scheduler.planner.searching.divisions import STAND_INS, Divisions
from rlinf_scheduler.planner.searching.drafts import WORLDS, Drafts
from rlinf_scheduler.planner.searching.layouts import FEW_SLOTS, Layout, fits_mode, layout_of, layouts, with_kept
from rlinf_scheduler.planner.searching.neighbours import Neighbours
from rlinf_scheduler.planner.searching.runs import Runs, Scored, candidate_key
from rlinf_scheduler.planner.simulate import Prediction
from rlinf_scheduler.planner.words import LostBecause, lost_because

EFFORT: Final = 28_000
"""Simulated moves of units and turns for one plan, about 60 ms of CPU on a slow core: a job wants a few plans."""
EFFORT_PER_SLOT: Final = 250
"""Beside it, for each slot up to STAND_INS: a run of more workers is longer."""
FEWEST_RUNS: Final = 16
"""A plan is worth at least so many simulations, also where a run is long: a step of many units that go round and round
takes more moves than EFFORT by itself."""
MORE_EFFORT: Final = 300_000
"""The same up to FEW_SLOTS slots; with staleness twice as much, as a run has more steps."""
ALL_DIVISIONS: Final = 6_000
"""Ways to divide slots, over all layouts, that are all looked at; more are sought from the balanced one of each."""
FEW_LAYOUTS: Final = 80
"""Up to so many layouts all divisions of each may be looked at; of more, the balanced one alone."""
CLIMBED: Final = 3
"""The number of the best layouts from which better ones are sought step by step."""
PROMISING: Final = 8
"""Candidates of one layout, those of the least bounds, among which the estimate chooses."""
BOTH: Final = 3
"""Layouts of which whole micro-batches and small ones are run; of further ones those which the estimate prefers."""
WORSE: Final = 1.5
"""Times the best one's period that a run of another layout may last, to be told of as a runner-up."""
LATER: Final = 1.02
"""A factor on the estimate of what rarely brings anything: another order, a turn that ends early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    candidate: Candidate
    prediction: Prediction
    pods: tuple[int, ...]
    """How many there are in each pool of the problem."""
    lost_because: LostBecause


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`others`: the best candidates of other layouts, the best first. `is_best`: all nested cuts were looked at."""

    best: Scored
    others: tuple[Scored, ...]
    explanation: str
    is_best: bool
    runs: int
    """Simulations that it took."""
    effort: int = 0
    """Moves of units and turns in them."""
    runners_up: tuple[RunnerUp, ...] = ()
    """What an RLPlan tells of `others`, in their order."""


def plan(
    problem: PlanProblem, *, effort: int | None = None, start: Sequence[Candidate] = (), keep: Sequence[Region] = ()
) -> Found | Infeasible:
    """`effort`: moves of units that may be simulated; None: by the size of the problem. `start`: candidates to begin
    with, such as the plan in force: the answer is no worse than any that fits. `keep`: regions that every candidate
    has, with whom they have now, such as those of gangs that have nothing to begin again on elsewhere."""
    problem = problem.unpinned
    slots = sum(pool.slots for pool in problem.pools)
    fewest_runs = 0
    if effort is None:
        few = MORE_EFFORT * (1 + (problem.staleness > 0))
        ways = 2 if any(role.may_stay for role in problem.roles) else 1  # of each draft in turns
        effort = few if slots <= FEW_SLOTS else ways * (EFFORT + EFFORT_PER_SLOT * min(slots, STAND_INS))
        fewest_runs = ways * FEWEST_RUNS
    search = _Search(problem, effort, keep=tuple(keep), is_thorough=slots <= FEW_SLOTS, fewest_runs=fewest_runs)
    search.draw_all()
    for candidate in start:
        search.begin_with(candidate)
    if search.is_empty:
        return Infeasible(reasons=tuple(search.reasons()))
    search.look_around()
    search.climb()
    search.best_first()
    search.runs.run_finalists()
    ranked = search.runs.ranked()
    return Found(
        best=ranked[0],
        others=tuple(ranked[1:]),
        runners_up=tuple(_runner_up(ranked[0], other) for other in ranked[1:]),
        explanation=words.explain(problem, ranked[0].candidate, ranked[0].prediction),
        is_best=search.is_complete,
        runs=search.runs.count,
        effort=search.runs.spent,
    )


class _Search:
    def __init__(
        self, problem: PlanProblem, effort: int, *, keep: tuple[Region, ...], is_thorough: bool, fewest_runs: int
    ) -> None:
        """`is_thorough`: few slots, and effort for all that may be best."""
        self._problem, self._keep, self._is_thorough = problem, keep, is_thorough
        self._bounds = Bounds(problem)
        self._estimate = Estimate(problem, self._bounds)
        self._divisions = Divisions(problem, self._bounds, keep=keep)
        self._drafts = Drafts(problem, keep=keep, grain=self._divisions.grain, is_thorough=is_thorough)
        self._near = Neighbours(problem, self._drafts, grain=self._divisions.grain, is_thorough=is_thorough)
        self.runs = Runs(problem, effort=effort, grain=self._divisions.grain, fewest=fewest_runs)
        self._queue: list[tuple[float, int, Candidate]] = []
        self._seen: set[object] = set()
        self.is_complete = True

    # --- what there is to try -----------------------------------------------------------------------------------------
    def draw_all(self) -> None:
        cuts = list(with_kept(layouts(self._problem), self._keep))
        most = ALL_DIVISIONS // len(cuts) if 0 < len(cuts) <= FEW_LAYOUTS else 1
        for layout in cuts:
            if self._divisions.count(layout) <= most:
                divided, worlds = self._divisions.every(layout), WORLDS
            else:
                divided, worlds = self._divisions.balanced(layout), WORLDS if self._keep else 1
                self.is_complete = False
            for slots in divided:
                for draft in self._drafts.of(layout, slots, worlds=worlds):
                    self._offer(draft)

    def begin_with(self, candidate: Candidate) -> None:
        """A plan that exists, where the problem still has room for it."""
        problem = self._problem
        if set(candidate.choices) != set(problem.index) or any(
            len(r.slots) != len(problem.pools) for r in candidate.regions
        ):
            return
        used = [sum(region.slots[at] for region in candidate.regions) for at in range(len(problem.pools))]
        if (
            all(n <= pool.slots for n, pool in zip(used, problem.pools, strict=True))
            and all(role.allows(candidate.workers(role.name)) for role in problem.roles)
            and self._drafts.keeps(candidate.regions)
            and fits_mode(problem, layout_of(candidate))
            and self._drafts.fits(candidate.regions, candidate.choices)
        ):
            self.runs.run(candidate)

    @property
    def is_empty(self) -> bool:
        """Nothing fits."""
        return not self._queue and self.runs.is_empty

    def reasons(self) -> Iterator[Objection]:
        yield from words.reasons(self._problem, self._drafts.refused, self._drafts.short)

    def _offer(self, candidate: Candidate) -> None:
        key = candidate_key(candidate)
        if key not in self._seen and self._drafts.keeps(candidate.regions):
            self._seen.add(key)
            heapq.heappush(self._queue, (self._least(candidate), len(self._seen), candidate))

    def _least(self, candidate: Candidate) -> float:
        """The least score that it may have."""
        return self.runs.score(candidate, self._bounds.period_ms(candidate))

    def _about(self, candidate: Candidate, least: float) -> float:
        return max(least, self.runs.score(candidate, self._estimate.period_ms(candidate)))

    # --- what is tried ------------------------------------------------------------------------------------------------
    def look_around(self) -> None:
        """Each layout once, with whole micro-batches and with small ones, which stream; the most promising first."""
        first, runs = self._most_promising(), self.runs
        # All in turns and all side by side come first and cost nothing of the effort: a plan is never worse than what a
        # person would have written.
        other = [len(layout) > 1 and any(len(names) > 1 for names in layout) for layout in first]
        for is_other, (about, least_score, _, candidate) in sorted(zip(other, first.values(), strict=True)):
            is_longer = runs.best is not None and runs.within(candidate, about) > self._longest(candidate)
            if runs.effort <= runs.spent or (is_longer and is_other):
                break
            before = runs.effort
            if runs.best is None or least_score <= runs.best.score:
                streamed = sizes.streamed(self._problem, candidate)
                if not is_other or self._is_thorough or runs.count < 2 * BOTH:
                    runs.run(candidate, worse=WORSE)
                elif self._about(streamed, least_score) > about:
                    streamed = candidate
                runs.run(streamed, worse=WORSE)
            if not is_other:
                runs.effort = max(runs.effort, before)

    def _most_promising(self) -> dict[Layout, tuple[float, float, int, Candidate]]:
        """The best candidate of each layout: the estimate, the least score, the number of the offer, the candidate."""
        found: dict[Layout, tuple[float, float, int, Candidate]] = {}
        of_layout: dict[Layout, list[tuple[float, int, Candidate]]] = {}
        for entry in self._queue:
            of_layout.setdefault(layout_of(entry[2]), []).append(entry)
        for layout, entries in of_layout.items():
            least = heapq.nsmallest(PROMISING, entries)
            estimates = [self._about(entry[2], entry[0]) for entry in least]
            at = min(range(len(least)), key=estimates.__getitem__)
            found[layout] = (estimates[at], *least[at])
        return found

    def _longest(self, candidate: Candidate) -> float:
        best = self.runs.best
        return self.runs.within(candidate, best.score) * WORSE if best else inf

    def climb(self) -> None:
        """One change at a time, from the best ones, while it gets better."""
        runs = self.runs
        for number, start in enumerate(runs.ranked()[:CLIMBED]):
            at, steps = start, self._near.steps()
            reserve = runs.effort * (CLIMBED - number - 1) // (CLIMBED - number + 1)
            while runs.effort > reserve and steps:
                better = self._better(at, steps[0], reserve)
                if better is not None:
                    at = better
                else:
                    steps.pop(0)

    def _better(self, at: Scored, step: int, reserve: int) -> Scored | None:
        """The first neighbour that is better, of those in the order of their promise."""
        new: dict[object, tuple[float, int, Candidate]] = {}
        now, near = self._about(at.candidate, 0.0), self._near
        last = itertools.chain(near.orders(at.candidate), near.untils(at.candidate))
        for floor, found in (
            (0.0, near.moves(at.candidate, step)),
            (now, near.variants(at.candidate)),
            (now * LATER, last),
        ):
            for candidate in found:
                key = candidate_key(candidate)
                if key in new or self.runs.has_run(candidate) or not self._drafts.keeps(candidate.regions):
                    continue
                if (least := self._least(candidate)) <= at.score:
                    # The estimate knows little of micro-batches: slots come first that should bring something.
                    about = self._about(candidate, least) if self._is_thorough or not floor else least
                    new[key] = (max(about, floor), len(new), candidate)
        for _, _, candidate in sorted(new.values()):
            if self.runs.effort <= reserve:
                return None
            scored = self.runs.run(candidate, than=at)
            if scored is not None and scored.key < at.key:
                return scored
        return None

    def best_first(self) -> None:
        """What is left and can win, the most promising first, until none can."""
        runs = self.runs
        assert runs.best is not None
        queue: list[tuple[float, int, float, Candidate]] = []

        def take_over() -> None:
            for least, number, candidate in self._queue:
                if runs.best and least <= runs.best.score:
                    heapq.heappush(queue, (self._about(candidate, least), number, least, candidate))
            self._queue.clear()

        if runs.effort > 0:
            take_over()
        while queue and runs.effort > 0:
            _, _, least, candidate = heapq.heappop(queue)
            if least > runs.best.score:
                continue
            runs.run(candidate)
            for other in (*self._near.variants(candidate), *self._near.orders(candidate)):
                self._offer(other)
            take_over()
        self.is_complete = self.is_complete and not self._queue and not queue


def _runner_up(best: Scored, other: Scored) -> RunnerUp:
    why = lost_because(best.prediction, other.prediction, more_slots=other.paid - best.paid)
    return RunnerUp(candidate=other.candidate, prediction=other.prediction, pods=other.pods, lost_because=why)
