"""`plan(problem)`: the best placement that cuts of the graph give, or why there is none. Pure: no clock, the same
answer for the same problem.

    layouts      nested cuts as sets of regions: side by side, in turns, in turns with roles that are side by side
    drafts       a layout with slots: all divisions where they are few, else the balanced one
    bounds.py    what a candidate takes at least: nothing is tried that cannot win
    estimate.py  what it takes, about: the most promising first
    simulate.py  decides: every candidate that is compared was run. Many slots are run as classes of workers that do
                 alike, and the finalists in full
    climb        from the best ones one change at a time, as far as the effort goes; of few slots also by giving a part
                 of a region other roles than the rest of it, which no nested cut gives

Where the effort suffices for all candidates (a few slots and roles) the answer is the best of all nested cuts. Not for:
writing an RLPlan (spec.py), the first plan of a job of which nothing is known (initial.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import comb, inf, lcm, prod
from typing import Final

from rlinf_api.job import PlacementMode
from rlinf_scheduler.planner import candidate as candidates
from rlinf_scheduler.planner import words
from rlinf_scheduler.planner.bounds import Bounds
from rlinf_scheduler.planner.candidate import MAX_STAGES, Candidate, Choice, PlannedTurn, Region, TooMuch
from rlinf_scheduler.planner.estimate import Estimate, pipeline
from rlinf_scheduler.planner.infeasible import Infeasible, Objection
from rlinf_scheduler.planner.problem import CycleEdge, InLanes, InRounds, PlanProblem, RoleCosts
from rlinf_scheduler.planner.simulate import Aborted, Prediction, alike, simulate
from rlinf_scheduler.planner.words import LostBecause, lost_because

Layout = tuple[tuple[str, ...], ...]
"""The roles of each region, in the order of their turns."""

EFFORT: Final = 28_000
"""Simulated moves of units and turns for one plan, about 60 ms of CPU on a slow core: a job wants a few plans."""
EFFORT_PER_SLOT: Final = 250
"""Beside it, for each slot up to STAND_INS: a run of more workers is longer."""
FEWEST_RUNS: Final = 16
"""A plan is worth at least so many simulations, also where a run is long: a step of many units that go round and round
takes more moves than EFFORT by itself."""
MOST_EFFORT: Final = 600_000  # about 1.5 s, however long a run is
SET_UP: Final = 60
"""Moves that it takes as long to begin a run as, and to look at it."""
FEW_SLOTS: Final = 4
"""Up to so many slots MORE_EFFORT is spent, with staleness twice as much, as a run has more steps: nearly all
candidates can be looked at, and a wrong one costs most."""
MORE_EFFORT: Final = 300_000
ALL_DIVISIONS: Final = 6_000
"""Ways to divide slots, over all layouts, that are all looked at; more are sought from the balanced one of each."""
FEW_LAYOUTS: Final = 80
"""Up to so many layouts all divisions of each may be looked at; of more, the balanced one alone."""
STAND_INS: Final = 64
"""Half of the slots up to which each worker is simulated by itself while plans are sought. Of more, one stands for as
many as make about so many, and slots change hands by that number."""
FINALISTS: Final = 3
"""Best candidates of many slots that are simulated once more, worker by worker up to ALL_WORKERS slots."""
ALL_WORKERS: Final = 512
EVERY_ROLES: Final = 3
"""Up to so many roles, and FEW_SLOTS slots, any slot may have any set of roles."""
WORLDS: Final = 4
"""Largest allowed sizes of a gang on given slots that are looked at: a smaller one rarely makes up for idle slots."""
ALL_LAYOUTS_ROLES: Final = 5
"""Roles up to which every nested cut is drawn: 5 have 300; of more, only neighbours in the graph share slots."""
WAYS: Final = 64
"""Combinations of options and of what stays resident that a draft is tried with; further ones are sought one change at
a time."""
KEPT: Final = 16
"""Best layouts that are told of; an RLPlan has room for as many alternatives."""
CLIMBED: Final = 3
"""Of these, from how many better ones are sought step by step."""
SMALL_SHARE: Final = 16
"""Units of a worker up to which, of few slots, small micro-batches of any size may matter; else halves, quarters and
eighths do."""
PROMISING: Final = 8
"""Of a layout, candidates of the least bounds among which the estimate chooses."""
BOTH: Final = 3
"""Layouts of which whole micro-batches and small ones are run; of further ones those which the estimate prefers."""
WORSE: Final = 1.5
"""Times the best one's period that a run of another layout may last, to be told of as a runner-up."""
LATER: Final = 1.02
"""On the estimate of what rarely brings anything: another order, a turn that ends early."""
SLACK: Final = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class Scored:
    candidate: Candidate
    prediction: Prediction
    score: float
    paid: int
    """Slots of the pods that it needs, and of those that are there anyway."""
    pods: tuple[int, ...]
    """That it needs, of each pool of the problem."""

    @property
    def key(self) -> tuple[float, int, int, int]:
        """The better score; of two the fewer slots, then the fewer turns."""
        turns = sum(len(region.turns) for region in self.candidate.regions)
        return self.score, self.paid, self.candidate.slots, turns


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    candidate: Candidate
    prediction: Prediction
    pods: tuple[int, ...]
    """Of each pool of the problem."""
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
    """Of others, in their order: what an RLPlan tells of them."""


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
    cuts = list(_with_kept(layouts(problem), keep))
    search.divisions = ALL_DIVISIONS // len(cuts) if 0 < len(cuts) <= FEW_LAYOUTS else 1
    for layout in cuts:
        search.add(layout)
    for candidate in start:
        search.begin_with(candidate)
    if not search.queue and not search.scored:
        return Infeasible(reasons=tuple(search.reasons()))
    search.look_around()
    search.climb()
    search.best_first()
    search.run_finalists()
    ranked = search.ranked()
    return Found(
        best=ranked[0],
        others=tuple(ranked[1:]),
        runners_up=tuple(_runner_up(ranked[0], other) for other in ranked[1:]),
        explanation=words.explain(problem, ranked[0].candidate, ranked[0].prediction),
        is_best=search.is_complete,
        runs=search.runs,
        effort=search.spent,
    )


# --- layouts ----------------------------------------------------------------------------------------------------------
def layouts(problem: PlanProblem) -> list[Layout]:
    """Nested cuts. A role above a spatial cut has workers in each of its regions; a gang's ranks stay together.

    >>> from rlinf_scheduler.planner.problem import InRounds, Option, ZERO, QueueEdge
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


def _with_kept(found: Sequence[Layout], keep: Sequence[Region]) -> Iterator[Layout]:
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


# --- slots ------------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Search:
    problem: PlanProblem
    effort: int
    keep: tuple[Region, ...] = ()
    bounds: Bounds = field(init=False)
    estimate: Estimate = field(init=False)
    queue: list[tuple[float, int, Candidate]] = field(default_factory=list)
    seen: set[object] = field(default_factory=set)
    ran: set[object] = field(default_factory=set)
    scored: list[Scored] = field(default_factory=list)
    refused: list[TooMuch] = field(default_factory=list)
    short: set[str] = field(default_factory=set)  # roles that some layout had no slots for
    is_complete: bool = True
    divisions: int = 0  # of one layout that are all looked at
    is_thorough: bool = False  # few slots: effort for all that may be best
    runs: int = 0
    spent: int = 0
    fewest_runs: int = 0  # that effort is added for, once it is known how long one is
    grain: int = 1  # slots that change hands together, and workers that one stands for
    best: Scored | None = None
    loads: dict[str, float] = field(default_factory=dict)
    times: dict[tuple[str, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bounds = Bounds(self.problem)
        self.estimate = Estimate(self.problem, self.bounds)
        self.grain = _grain(self.problem)
        for role in self.problem.roles:
            each = min(option.per_item_ms.value for option in role.options)
            trips = self.bounds.trips(role.name)
            pace = role.slots_per_worker**role.scaling / role.slots_per_worker  # of a slot
            self.loads[role.name] = (each * self.bounds.total(role.name) + role.per_batch_ms.value) * trips / pace

    def add(self, layout: Layout) -> None:
        if _count(self.problem, layout) <= self.divisions:
            kept = self._kept(layout)
            for slots in _divisions(self.problem, layout):
                if all(slots[at] == region.slots for at, region in kept.items()):
                    for draft in self._drafts(layout, slots):
                        self._offer(draft)
            return
        self.is_complete = False
        for capacity in self._capacities():
            for draft in self._drafts(layout, self._divided(layout, capacity), worlds=1 if not self.keep else WORLDS):
                self._offer(draft)

    def begin_with(self, candidate: Candidate) -> None:
        """A plan that exists, where the problem still has room for it."""
        problem = self.problem
        if set(candidate.choices) != set(problem.index) or any(
            len(r.slots) != len(problem.pools) for r in candidate.regions
        ):
            return
        used = [sum(region.slots[at] for region in candidate.regions) for at in range(len(problem.pools))]
        if (
            all(n <= pool.slots for n, pool in zip(used, problem.pools, strict=True))
            and all(role.allows(candidate.workers(role.name)) for role in problem.roles)
            and self._keeps(candidate.regions)
            and self._fits_mode(_layout(candidate))
            and self._fits(candidate.regions, candidate.choices)
        ):
            self._run(candidate)

    def _keeps(self, regions: Sequence[Region]) -> bool:
        return not self.keep or {*map(candidates.shape, self.keep)} <= {*map(candidates.shape, regions)}

    def _kept(self, layout: Layout) -> dict[int, Region]:
        """By its place in the layout."""
        return {layout.index(tuple(turn.role for turn in region.turns)): region for region in self.keep}

    def _capacities(self) -> Iterator[list[int]]:
        """Slots of all pods; where slots have their price, also of fewer pods, down to those that are there anyway."""
        pools = self.problem.pools
        yield [pool.slots for pool in pools]
        if not self.problem.has_price:
            return
        told = {tuple(pool.slots for pool in pools)}
        for halvings in range(1, 20):
            pods = [max(pool.least_pods, 1, pool.most_pods >> halvings) for pool in pools]
            slots = [min(p.slots, n * p.slots_per_pod) for p, n in zip(pools, pods, strict=True)]
            if tuple(slots) not in told:
                told.add(tuple(slots))
                yield slots

    def _drafts(
        self, layout: Layout, slots: Sequence[tuple[int, ...]], *, worlds: int = WORLDS, most_ways: int = WAYS
    ) -> Iterator[Candidate]:
        """All that these regions may be, as a rule for every role, memory aside."""
        turns = [
            [_turns(self.problem, name, of_region, worlds, self.grain) for name in names]
            for names, of_region in zip(layout, slots, strict=True)
        ]
        for chosen in itertools.product(*(itertools.product(*region) for region in turns)):
            regions = tuple(Region(of_region, part) for of_region, part in zip(slots, chosen, strict=True))
            regions = _capped(self.problem, regions)
            draft = Candidate(regions=regions, choices={})
            counts = dict.fromkeys(self.problem.index, 0)
            for region in regions:
                for turn in region.turns:
                    counts[turn.role] += sum(turn.workers)
            short = [r.name for r in self.problem.roles if not r.allows(counts[r.name])]
            self.short.update(short)
            if (
                not short
                and self._keeps(regions)
                and all(sum(turn.workers) for region in regions for turn in region.turns)
            ):
                yield from self._choices(draft, most_ways)

    def _fits_mode(self, layout: Layout) -> bool:
        if self.problem.mode is PlacementMode.DISAGGREGATED:
            return all(len(names) == 1 for names in layout)
        if self.problem.mode is PlacementMode.COLLOCATED:
            wanted = _collocated(self.problem, pipeline(self.problem))
            return {frozenset(names) for names in layout} == {frozenset(names) for names in wanted}
        return True

    def _fits(self, regions: Sequence[Region], choices: Mapping[str, Choice]) -> bool:
        return not any(too for region in regions for too in candidates.too_much(self.problem, region, choices))

    def _choices(self, draft: Candidate, most: int) -> Iterator[Candidate]:
        """What fits into memory, with the largest micro-batches; the others come once it is its turn."""
        shared = {turn.role for region in draft.regions if len(region.turns) > 1 for turn in region.turns}
        may_stay = [role for role in self.problem.roles if role.may_stay and role.name in shared]
        ways = []
        for role in self.problem.roles:
            stays = (False, True) if role in may_stay and self.is_thorough else (False,)
            ways.append([(option, stay) for option in range(len(role.options)) for stay in stays])
        tried = list(itertools.islice(itertools.product(*ways), most))
        smallest = tuple((role.smallest, False) for role in self.problem.roles)
        for chosen in tried if smallest in tried else (*tried, smallest):
            choices = {
                role.name: _choice(self.problem, draft, role, option=option, stays=stay)
                for role, (option, stay) in zip(self.problem.roles, chosen, strict=True)
            }
            found = [too for region in draft.regions for too in candidates.too_much(self.problem, region, choices)]
            self.refused += found if len(self.refused) < 1000 else ()
            if found:
                continue
            yield replace(draft, choices=choices)
            if may_stay and not self.is_thorough:
                yield replace(draft, choices=self._staying(draft, choices, may_stay))

    def _staying(
        self, draft: Candidate, choices: Mapping[str, Choice], roles: Sequence[RoleCosts]
    ) -> dict[str, Choice]:
        """As many stay resident as have room, who takes longest to move first."""
        found = dict(choices)
        for role in sorted(roles, key=lambda r: -(r.load_ms.value + r.offload_ms.value)):
            more = {**found, role.name: replace(found[role.name], stays=True)}
            if self._fits(draft.regions, more):
                found = more
        return found

    def _offer(self, candidate: Candidate) -> bool:
        key = _key(candidate)
        if key in self.seen or not self._keeps(candidate.regions):
            return False
        self.seen.add(key)
        heapq.heappush(self.queue, (self._least(candidate), len(self.seen), candidate))
        return True

    def _least(self, candidate: Candidate) -> float:
        """The least score that it may have."""
        return self._score(candidate, self.bounds.period_ms(candidate))

    def _about(self, candidate: Candidate, least: float) -> float:
        return max(least, self._score(candidate, self.estimate.period_ms(candidate)))

    def _score(self, candidate: Candidate, period_ms: float) -> float:
        if not self.problem.has_price:
            return period_ms
        return self.problem.score(period_ms, candidates.paid(self.problem, candidate))

    def _divided(self, layout: Layout, capacity: Sequence[int]) -> list[tuple[int, ...]]:
        """What is kept as it is, the rest balanced; nothing where that leaves nothing."""
        if not self.keep:
            return self._balanced(layout, capacity)
        kept = self._kept(layout)
        left = [n - sum(region.slots[p] for region in kept.values()) for p, n in enumerate(capacity)]
        rest = [at for at in range(len(layout)) if at not in kept]
        if min(left, default=0) < 0:
            return [(0,) * len(left)] * len(layout)
        found = dict(zip(rest, self._balanced(tuple(layout[at] for at in rest), left) if rest else (), strict=True))
        return [kept[at].slots if at in kept else found[at] for at in range(len(layout))]

    def _balanced(self, layout: Layout, capacity: Sequence[int]) -> list[tuple[int, ...]]:
        """Slots where they bring most, region by region; of one pool, in proportion to their roles' work."""
        if len(capacity) == 1:
            return self._proportional(layout, capacity[0])
        problem, free = self.problem, list(capacity)
        slots = [[0] * len(free) for _ in layout]
        chunk = self.grain
        loads = [sum(self.loads[name] for name in names) for names in layout]
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

    def _proportional(self, layout: Layout, slots: int) -> list[tuple[int, ...]]:
        grain = self.grain if slots >= self.grain * len(layout) else 1
        loads = [sum(self.loads[name] for name in names) + 1e-9 for names in layout]
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
        """Of roles in turns on so many slots of the only pool."""
        found = 0.0
        for name in names:
            key = (name, slots)
            if key not in self.times:
                role = self.problem.role(name)
                workers = slots // role.slots_per_worker if name in self.problem.pools[0].roles else 0
                each = min(option.per_item_ms.value for option in role.options)
                self.times[key] = self.bounds.work_ms(role, (workers,), per_item_ms=each)
            found += self.times[key]
        return found

    def _fewest(self, name: str) -> int:
        """Slots of the fewest workers, of a role that is not in several regions."""
        role = self.problem.role(name)
        return role.slots_per_worker * (role.fewest if role.is_gang else 1)

    # --- choosing -----------------------------------------------------------------------------------------------------
    def look_around(self) -> None:
        """Each layout once, with whole micro-batches and with small ones, which stream; the most promising first."""
        first: dict[Layout, tuple[float, float, int, Candidate]] = {}
        of_layout: dict[Layout, list[tuple[float, int, Candidate]]] = {}
        for entry in self.queue:
            of_layout.setdefault(_layout(entry[2]), []).append(entry)
        for layout, entries in of_layout.items():
            least = heapq.nsmallest(PROMISING, entries)
            estimates = [self._about(entry[2], entry[0]) for entry in least]
            at = min(range(len(least)), key=estimates.__getitem__)
            first[layout] = (estimates[at], *least[at])
        # All in turns and all side by side come first and cost nothing of the effort: a plan is never worse than what a
        # person would have written.
        other = [len(layout) > 1 and any(len(names) > 1 for names in layout) for layout in first]
        for is_other, (about, least_score, _, candidate) in sorted(zip(other, first.values(), strict=True)):
            is_longer = self.best is not None and self._within(candidate, about) > self._longest(candidate)
            if self.effort <= self.spent or (is_longer and is_other):
                break
            before = self.effort
            if self.best is None or least_score <= self.best.score:
                streamed = _streamed(self.problem, candidate)
                if not is_other or self.is_thorough or self.runs < 2 * BOTH:
                    self._try(candidate, worse=WORSE)
                elif self._about(streamed, least_score) > about:
                    streamed = candidate
                self._try(streamed, worse=WORSE)
            if not is_other:
                self.effort = max(self.effort, before)

    def _longest(self, candidate: Candidate) -> float:
        return self._within(candidate, self.best.score) * WORSE if self.best else inf

    def climb(self) -> None:
        """One change at a time, from the best ones, while it gets better."""
        for number, start in enumerate(self.ranked()[:CLIMBED]):
            at, steps = start, self._steps()
            reserve = self.effort * (CLIMBED - number - 1) // (CLIMBED - number + 1)
            while self.effort > reserve and steps:
                better = next(self._better(at, steps[0], reserve), None)
                if better is not None:
                    at = better
                else:
                    steps.pop(0)

    def _steps(self) -> list[int]:
        """Slots to move at once: many first."""
        slots = sum(pool.slots for pool in self.problem.pools)
        found, step = {self.grain}, slots // 8
        while step > self.grain:
            found.add(step // self.grain * self.grain)
            step //= 4
        found |= {pool.slots_per_pod for pool in self.problem.pools if self.grain < pool.slots_per_pod <= slots // 2}
        return sorted(found, reverse=True)

    def best_first(self) -> None:
        """What is left and can win, the most promising first, until none can."""
        assert self.best is not None
        queue: list[tuple[float, int, float, Candidate]] = []

        def take_over() -> None:
            for least, number, candidate in self.queue:
                if self.best and least <= self.best.score:
                    heapq.heappush(queue, (self._about(candidate, least), number, least, candidate))
            self.queue.clear()

        if self.effort > 0:
            take_over()
        while queue and self.effort > 0:
            _, _, least, candidate = heapq.heappop(queue)
            if least > self.best.score:
                continue
            self._try(candidate)
            for other in (*self._variants(candidate), *self._orders(candidate)):
                self._offer(other)
            take_over()
        self.is_complete = self.is_complete and not self.queue and not queue

    def run_finalists(self) -> None:
        """Many slots were simulated as classes: the best once more, each worker by itself as far as there are no more
        than ALL_WORKERS."""
        if self.grain == 1:
            return
        ranked = sorted(self.scored, key=lambda s: s.key)
        finalists = ranked[:FINALISTS]
        again = [self._scored(s.candidate, simulate(self.problem, s.candidate, classes=self._fine(s.candidate)))
                 for s in finalists]  # fmt: skip
        self.runs += len(again)
        again.sort(key=lambda s: s.key)
        # Those behind stay behind: a run of classes says a little less, or more, than one of all.
        self.scored = again + [s for s in ranked[FINALISTS:] if s.key >= again[0].key]

    def _fine(self, candidate: Candidate) -> int:
        """The fewest that one may stand for, so that no more than ALL_WORKERS are simulated."""
        most = self._classes(candidate)
        return next((n for n in range(1, most) if most % n == 0 and candidate.slots <= n * ALL_WORKERS), most)

    def _classes(self, candidate: Candidate) -> int:
        return alike(self.problem, candidate, at_least=self.grain, at_most=self.grain) if self.grain > 1 else 1

    def _better(self, at: Scored, step: int, reserve: int) -> Iterator[Scored]:
        """The most promising neighbour first."""
        new: dict[object, tuple[float, int, Candidate]] = {}
        now = self._about(at.candidate, 0.0)
        last = itertools.chain(self._orders(at.candidate), self._untils(at.candidate))
        for floor, near in (
            (0.0, self._moves(at.candidate, step)),
            (now, self._variants(at.candidate)),
            (now * LATER, last),
        ):
            for candidate in near:
                key = _key(candidate)
                if key in self.ran or key in new or not self._keeps(candidate.regions):
                    continue
                if (least := self._least(candidate)) <= at.score:
                    # The estimate knows little of micro-batches: slots come first that should bring something.
                    about = self._about(candidate, least) if self.is_thorough or not floor else least
                    new[key] = (max(about, floor), len(new), candidate)
        for _, _, candidate in sorted(new.values()):
            if self.effort <= reserve:
                return
            scored = self._try(candidate, than=at)
            if scored is not None and scored.key < at.key:
                yield scored

    def _try(self, candidate: Candidate, *, worse: float = 1.0, than: Scored | None = None) -> Scored | None:
        """Run it, unless it was, until it is so much worse than the best one."""
        return None if _key(candidate) in self.ran else self._run(candidate, worse=worse, than=than)

    def _moves(self, at: Candidate, step: int) -> Iterator[Candidate]:
        """Slots from one region to another, to those that nobody has, or from there; and a part of a region that gets a
        role more than the rest of it, or has one less."""
        problem, regions = self.problem, at.regions
        unused = [pool.slots - sum(r.slots[p] for r in regions) for p, pool in enumerate(problem.pools)]
        layout = _layout(at)
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
        if self.is_thorough and problem.mode not in (PlacementMode.COLLOCATED, PlacementMode.DISAGGREGATED):
            for new_layout, new_slots in self._splits(layout, regions, unused, step):
                yield from self._changed(at, new_layout, new_slots)

    def _splits(
        self, layout: Layout, regions: Sequence[Region], unused: Sequence[int], step: int
    ) -> Iterator[tuple[Layout, list[list[int]]]]:
        gangs = {role.name for role in self.problem.roles if role.is_gang}
        names = list(self.problem.index)
        for source in range(-1, len(layout)):
            of_source = layout[source] if source >= 0 else ()
            for pool, spec in enumerate(self.problem.pools):
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
            slots.append([count if p == pool else 0 for p in range(len(self.problem.pools))])
        left = [i for i, of_region in enumerate(slots) if any(of_region)]
        chosen = tuple(found[i] for i in left)
        if any(sum(gang in names for names in chosen) != 1 for gang in gangs):
            return
        if {name for names in chosen for name in names} == set(self.problem.index):
            yield chosen, [slots[i] for i in left]

    def _changed(self, at: Candidate, layout: Layout, slots: Sequence[Sequence[int]]) -> Iterator[Candidate]:
        if all(map(any, slots)):
            worlds = WORLDS if self.is_thorough else 1  # else as many moves go to idle slots as to better ones
            for draft in self._drafts(layout, [tuple(s) for s in slots], worlds=worlds, most_ways=1):
                found = replace(draft, choices=self._as_fine(at, draft))
                yield found if self._fits(found.regions, found.choices) else draft

    def _as_fine(self, at: Candidate, draft: Candidate) -> dict[str, Choice]:
        """Options as they were, and micro-batches that cut a worker's share into as many pieces as they did."""
        found = dict(draft.choices)
        for role in self.problem.roles:
            old, new = at.choices[role.name], found[role.name]
            size = new.micro_batch
            if size > 1:
                pieces = -(-_share(self.problem, at, role) // old.micro_batch)
                size = -(-_share(self.problem, draft, role) // pieces)
            found[role.name] = replace(new, micro_batch=size, option=old.option, stays=old.stays, stages=old.stages)
        return found

    def _variants(self, at: Candidate) -> Iterator[Candidate]:
        """The same slots with one number changed."""
        if not self.is_thorough:
            yield _streamed(self.problem, at)
        in_turns = {turn.role for region in at.regions if len(region.turns) > 1 for turn in region.turns}
        for role in self.problem.roles:
            choice = at.choices[role.name]
            sizes = _ladder(self.problem, at, role, every=self.is_thorough)
            others = [replace(choice, micro_batch=size) for size in sizes]
            others += [replace(choice, option=option) for option in range(len(role.options))]
            others += [replace(choice, stays=not choice.stays)] if role.may_stay and role.name in in_turns else []
            for other in others:
                changed = {**at.choices, role.name: other}
                if other != choice and self._fits(at.regions, changed):
                    yield replace(at, choices=changed)
        for cycle in self.problem.cycles:
            most, choice = _most_stages(self.problem, cycle, at), at.choices[cycle.front]
            for stages in sorted({1, 2, 4, most if cycle.is_single else 1} & set(range(1, most + 1))):
                if stages != choice.stages:
                    yield replace(at, choices={**at.choices, cycle.front: replace(choice, stages=stages)})

    def _orders(self, at: Candidate) -> Iterator[Candidate]:
        """Another order of turns, or of regions."""
        for number, (one, other) in enumerate(itertools.pairwise(at.regions)):
            if {turn.role for turn in one.turns} & {turn.role for turn in other.turns}:
                # Of workers with as much room the first gets the next unit, and these are of unequal size.
                yield replace(at, regions=(*at.regions[:number], other, one, *at.regions[number + 2 :]))
        for number, region in enumerate(at.regions):
            if len(region.turns) > 2:
                for i in range(1, len(region.turns) - 1):  # the order is a ring: the first may stay
                    turns = list(region.turns)
                    turns[i], turns[i + 1] = turns[i + 1], turns[i]
                    yield _with(at, number, tuple(turns))

    def _untils(self, at: Candidate) -> Iterator[Candidate]:
        """A turn that ends after a half or a quarter of what its role has to do there."""
        problem = self.problem
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

    def _run(self, candidate: Candidate, *, worse: float = 1.0, than: Scored | None = None) -> Scored | None:
        self.runs += 1
        self.ran.add(_key(candidate))
        limit = inf
        if (best := than or self.best) is not None:
            limit = self._within(candidate, best.score) * worse * SLACK
        try:
            prediction = simulate(self.problem, candidate, classes=self._classes(candidate), limit_ms=limit)
        except Aborted as left:
            self._took(SET_UP + left.moves)
            return None
        self._took(SET_UP + prediction.effort)
        scored = self._scored(candidate, prediction)
        self.scored.append(scored)
        if self.best is None or scored.key < self.best.key:
            self.best = scored
        return scored

    def _took(self, moves: int) -> None:
        self.effort -= moves
        self.spent += moves
        if self.fewest_runs:
            self.effort = max(self.effort, min(MOST_EFFORT, self.fewest_runs * moves) - moves)
            self.fewest_runs = 0

    def _scored(self, candidate: Candidate, prediction: Prediction) -> Scored:
        paid = candidates.paid(self.problem, candidate)
        score = self.problem.score(prediction.period_ms, paid)
        return Scored(candidate, prediction, score, paid, candidates.pods(self.problem, candidate))

    def _within(self, candidate: Candidate, score: float) -> float:
        if not self.problem.has_price:
            return score
        return self.problem.within(score, candidates.paid(self.problem, candidate))

    def ranked(self) -> list[Scored]:
        """The best of each layout."""
        found: dict[object, Scored] = {}
        for scored in sorted(self.scored, key=lambda s: s.key):
            found.setdefault(_layout(scored.candidate), scored)
        return list(found.values())[:KEPT]

    def reasons(self) -> Iterator[Objection]:
        yield from words.reasons(self.problem, self.refused, self.short)


def _runner_up(best: Scored, other: Scored) -> RunnerUp:
    why = lost_because(best.prediction, other.prediction, more_slots=other.paid - best.paid)
    return RunnerUp(candidate=other.candidate, prediction=other.prediction, pods=other.pods, lost_because=why)


def _with(at: Candidate, number: int, turns: tuple[PlannedTurn, ...]) -> Candidate:
    regions = [*at.regions]
    regions[number] = replace(regions[number], turns=turns)
    return replace(at, regions=tuple(regions))


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


def _key(candidate: Candidate) -> object:
    return candidate.regions, tuple(candidate.choices.values())


def _layout(candidate: Candidate) -> Layout:
    return tuple(tuple(turn.role for turn in region.turns) for region in candidate.regions)


def _count(problem: PlanProblem, layout: Layout) -> int:
    """Of _divisions, with those that leave a region without a slot."""
    regions = [sum(bool(set(names) & set(pool.roles)) for names in layout) for pool in problem.pools]
    return prod(comb(pool.slots + n, n) for pool, n in zip(problem.pools, regions, strict=True))


def _divisions(problem: PlanProblem, layout: Layout) -> Iterator[list[tuple[int, ...]]]:
    """Every way to divide all pools, with slots that nobody has among them."""
    of_pools = []
    for pool in problem.pools:
        may = [bool(set(names) & set(pool.roles)) for names in layout]
        of_pools.append([parts[1:] for parts in _compositions(pool.slots, [True, *may])])
    for chosen in itertools.product(*of_pools):
        slots = [tuple(parts[i] for parts in chosen) for i in range(len(layout))]
        if all(map(any, slots)):
            yield slots


def _compositions(count: int, may: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """Fewest unused first."""
    if len(may) == 1:
        if may[0] or not count:
            yield (count,)
        return
    for first in range(count + 1) if may[0] else (0,):
        for rest in _compositions(count - first, may[1:]):
            yield (first, *rest)


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


def _share(problem: PlanProblem, draft: Candidate, role: RoleCosts) -> int:
    return -(-problem.units[role.name] // max(1, draft.workers(role.name)))


def _most_stages(problem: PlanProblem, cycle: CycleEdge, draft: Candidate) -> int:
    """A front worker's share of a step, or of all that are open, where each unit travels by itself."""
    share = _share(problem, draft, problem.role(cycle.front))
    return min(MAX_STAGES, share * (problem.staleness + 1) if cycle.is_single else share)


def _choice(problem: PlanProblem, draft: Candidate, role: RoleCosts, *, option: int, stays: bool) -> Choice:
    """The largest micro-batch: fewest per-batch costs and changes of turn."""
    if role.name in problem.cycle_of:
        # A front takes its share of the step at once, and says itself what travels together.
        return Choice(micro_batch=1, depth=max(2, problem.units[role.name]), option=option, stays=stays)
    if isinstance(role.service, InLanes):
        return Choice(micro_batch=1, depth=max(2, role.service.lanes // 4), option=option, stays=stays)
    return Choice(micro_batch=_share(problem, draft, role), option=option, stays=stays)


def _streamed(problem: PlanProblem, candidate: Candidate) -> Candidate:
    """A quarter of their share at once, so that a role begins while the one before it works; two sub-batches."""
    choices = dict(candidate.choices)
    for role in problem.roles:
        if sizes := _ladder(problem, candidate, role):
            quarter = -(-_share(problem, candidate, role) // 4)
            choices[role.name] = replace(choices[role.name], micro_batch=min(sizes, key=lambda n: abs(n - quarter)))
    for cycle in problem.cycles:
        stages = _most_stages(problem, cycle, candidate) if cycle.is_single else 2
        choices[cycle.front] = replace(choices[cycle.front], stages=stages)
    return replace(candidate, choices=choices)


def _ladder(problem: PlanProblem, draft: Candidate, role: RoleCosts, *, every: bool = False) -> list[int]:
    service = role.service
    if isinstance(service, InLanes) or role.name in problem.cycle_of:
        return []
    if isinstance(service, InRounds) and service.at_once:
        return []  # its share, as any other size is as good
    share = _share(problem, draft, role)
    wanted = {share, -(-share // 2), -(-share // 4), -(-share // 8)}
    if every and share <= SMALL_SHARE:
        wanted |= {1, min(3, share)} | (set() if role.is_gang else {problem.units[role.name]})
    return sorted(wanted)
