"""`plan(problem)`: the best placement that nested cuts of the graph give, or why there is none. Pure: no clock, the
same answer for the same problem.

    layouts     nested cuts as sets of regions: side by side, in turns, in turns with roles that are side by side
    drafts      a layout with slots: all divisions where they are few, else the balanced one
    candidates  a draft with micro-batches, stages, options and orders of turns
    bounds.py   what each takes at least: the best first, and nothing that cannot win
    simulate.py decides: every candidate that is compared was run
    climb       from the best ones slot by slot and number by number, as far as the effort goes

Where the effort suffices for all candidates (a few slots and roles) the answer is the best there is. Not for: writing
an RLPlan (spec.py), the first plan of a job of which nothing is known (initial.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb, prod
from typing import Final

from rlinf_scheduler.planner import candidate as candidates
from rlinf_scheduler.planner.bounds import Bounds
from rlinf_scheduler.planner.candidate import Candidate, Choice, PlannedTurn, Region, TooMuch
from rlinf_scheduler.planner.infeasible import Infeasible, Objection
from rlinf_scheduler.planner.problem import InLanes, PlanProblem, Provenance, RoleCosts
from rlinf_scheduler.planner.simulate import Prediction, simulate

Layout = tuple[tuple[str, ...], ...]
"""The roles of each region, in the order of their turns."""

EFFORT: Final = 150_000
"""Simulated moves of units for one plan, beside 40 per slot: half a second of CPU, which a plan that is kept for
hours may take."""
EFFORT_PER_SLOT: Final = 40
ALL_DIVISIONS: Final = 3_000
"""Ways to divide slots, over all layouts, that are all looked at; more are sought from the balanced one of each."""
WORLDS: Final = 4
"""Largest allowed sizes of a gang on given slots that are looked at: a smaller one rarely makes up for idle slots."""
ALL_LAYOUTS_ROLES: Final = 5
"""Roles up to which every nested cut is drawn: 5 have 300; of more, only neighbours in the graph share slots."""
KEPT: Final = 16
"""Best layouts that are told of; an RLPlan has room for as many alternatives."""
CLIMBED: Final = 3
"""Of these, from how many better ones are sought step by step."""
SMALL_SHARE: Final = 16
"""Units of a worker up to which every size of micro-batch may matter; of more, halves, quarters and eighths do."""


@dataclass(frozen=True, slots=True)
class Scored:
    candidate: Candidate
    prediction: Prediction

    @property
    def key(self) -> tuple[float, int, int]:
        """The shorter period; of two the fewer slots, then the fewer turns."""
        turns = sum(len(region.turns) for region in self.candidate.regions)
        return self.prediction.period_ms, self.candidate.slots, turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`others`: the best candidates of other layouts, the best first. `is_best`: all candidates were looked at."""

    best: Scored
    others: tuple[Scored, ...]
    explanation: str
    is_best: bool
    runs: int
    """Simulations that it took."""


def plan(problem: PlanProblem, *, effort: int | None = None) -> Found | Infeasible:
    """`effort`: moves of units that may be simulated; None: by the size of the problem."""
    if effort is None:
        effort = EFFORT + EFFORT_PER_SLOT * sum(pool.slots for pool in problem.pools)
    search = _Search(problem, effort)
    cuts = layouts(problem)
    search.divisions = ALL_DIVISIONS // len(cuts)
    for layout in cuts:
        search.add(layout)
    if not search.queue:
        return Infeasible(reasons=tuple(search.reasons()))
    search.look_around()
    search.climb()
    search.best_first()
    ranked = search.ranked()
    return Found(
        best=ranked[0],
        others=tuple(ranked[1:]),
        explanation=_explain(problem, ranked[0]),
        is_best=search.is_complete,
        runs=search.runs,
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
    order = _pipeline(problem)
    if len(order) > ALL_LAYOUTS_ROLES:
        cuts = range(1, len(order))
        chosen = (c for n in range(len(order)) for c in itertools.combinations(cuts, n))
        ends = ((0, *cut, len(order)) for cut in itertools.islice(chosen, 1 << 9))
        return [tuple(tuple(order[a:b]) for a, b in itertools.pairwise(end)) for end in ends]
    gangs = {role.name for role in problem.roles if role.is_gang}
    return list(dict.fromkeys(_nested(tuple(order), order, gangs)))


def _nested(roles: tuple[str, ...], order: Sequence[str], gangs: set[str]) -> Iterator[Layout]:
    for parts in _partitions(roles):
        blocks = [list(_blocks(part, order, gangs)) for part in parts]
        for chosen in itertools.product(*blocks):
            yield tuple(sorted(itertools.chain.from_iterable(chosen), key=lambda r: [order.index(n) for n in r]))


def _blocks(block: tuple[str, ...], order: Sequence[str], gangs: set[str]) -> Iterator[Layout]:
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


def _pipeline(problem: PlanProblem) -> list[str]:
    """Roles in the order in which a unit meets them."""
    found: list[str] = []
    front, back = (problem.cycle.front, problem.cycle.back) if problem.cycle else ("", "")

    def visit(name: str) -> None:
        if name not in found:
            for before in (*problem.inputs(name), *((front,) if name == back else ())):
                visit(before)
            found.append(name)

    for role in problem.roles:
        visit(role.name)
    return found


# --- slots ------------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Search:
    problem: PlanProblem
    effort: int
    bounds: Bounds = field(init=False)
    queue: list[tuple[float, int, Candidate]] = field(default_factory=list)
    seen: set[object] = field(default_factory=set)
    ran: set[object] = field(default_factory=set)
    scored: list[Scored] = field(default_factory=list)
    refused: list[TooMuch] = field(default_factory=list)
    short: set[str] = field(default_factory=set)  # roles that some layout had no slots for
    is_complete: bool = True
    divisions: int = 0  # of one layout that are all looked at
    runs: int = 0

    def __post_init__(self) -> None:
        self.bounds = Bounds(self.problem)

    def add(self, layout: Layout) -> None:
        if _count(self.problem, layout) <= self.divisions:
            divided = list(_divisions(self.problem, layout))
        else:
            self.is_complete = False
            divided = [self._balanced(layout)]
        for slots in divided:
            for draft in self._drafts(layout, slots):
                self._offer(draft)

    def _drafts(self, layout: Layout, slots: Sequence[tuple[int, ...]]) -> Iterator[Candidate]:
        """All that these regions may be, as a rule for every role, memory aside."""
        turns = [[_turns(self.problem, name, of_region) for name in names] for names, of_region in zip(layout, slots,
                 strict=True)]  # fmt: skip
        for chosen in itertools.product(*(itertools.product(*region) for region in turns)):
            regions = tuple(Region(of_region, part) for of_region, part in zip(slots, chosen, strict=True))
            draft = Candidate(regions=regions, choices={})
            short = [r.name for r in self.problem.roles if not self._suffices(draft, r)]
            self.short.update(short)
            if not short and all(sum(turn.workers) for region in regions for turn in region.turns):
                yield from self._choices(draft)

    def _suffices(self, draft: Candidate, role: RoleCosts) -> bool:
        return role.allows(draft.workers(role.name))

    def _choices(self, draft: Candidate) -> Iterator[Candidate]:
        """What fits into memory, with the largest micro-batches; the others come once it is its turn."""
        shared = {turn.role for region in draft.regions if len(region.turns) > 1 for turn in region.turns}
        ways = []
        for role in self.problem.roles:
            stays = (False, True) if role.may_stay and role.name in shared else (False,)
            ways.append([(option, stay) for option in range(len(role.options)) for stay in stays])
        for chosen in itertools.product(*ways):
            choices = {
                role.name: _choice(self.problem, draft, role, option=option, stays=stay)
                for role, (option, stay) in zip(self.problem.roles, chosen, strict=True)
            }
            found = [too for region in draft.regions for too in candidates.too_much(self.problem, region, choices)]
            self.refused += found if len(self.refused) < 1000 else ()
            if not found:
                yield replace(draft, choices=choices)

    def _offer(self, candidate: Candidate) -> bool:
        key = _key(candidate)
        if key in self.seen:
            return False
        self.seen.add(key)
        heapq.heappush(self.queue, (self.bounds.period_ms(candidate), len(self.seen), candidate))
        return True

    def _balanced(self, layout: Layout) -> list[tuple[int, ...]]:
        """Slots where they bring most, region by region; more at a time where there are many."""
        problem, free = self.problem, [pool.slots for pool in self.problem.pools]
        slots = [[0] * len(free) for _ in layout]
        chunk = max(1, sum(free) // 64)
        stuck: set[int] = set()
        while any(free) and len(stuck) < len(layout):
            at = max((i for i in range(len(layout)) if i not in stuck), key=lambda i: self._time(layout[i], slots[i]))
            pools = [p for p, pool in enumerate(problem.pools) if free[p] and set(layout[at]) & set(pool.roles)]
            if not pools:
                stuck.add(at)
                continue
            # A pool that serves the fewest other regions, then the fastest.
            others = [sum(bool(set(names) & set(problem.pools[p].roles)) for names in layout) for p in pools]
            _, _, best = min(zip(others, (-problem.pools[p].speed for p in pools), pools, strict=True))
            given = min(free[best], max(chunk, *(problem.role(n).slots_per_worker for n in layout[at])))
            if sum(slots[at]) < given:
                given = min(free[best], max(problem.role(n).slots_per_worker for n in layout[at]))
            slots[at][best] += given
            free[best] -= given
        return [tuple(of_region) for of_region in slots]

    def _time(self, names: Iterable[str], slots: Sequence[int]) -> float:
        total = 0.0
        for name in names:
            role = self.problem.role(name)
            turn = _turns(self.problem, name, slots)[0]
            per_item = min(option.per_item_ms.value for option in role.options)
            total += self.bounds.work_ms(role, turn.workers, per_item_ms=per_item)
        return total

    # --- choosing -----------------------------------------------------------------------------------------------------
    def look_around(self) -> None:
        """Each layout once, with whole micro-batches and with small ones, which stream; the most promising first."""
        reserve, seen, queue = self.effort // 2, set(), []
        for entry in sorted(self.queue):
            layout = _layout(entry[2])
            if layout in seen or self.effort <= reserve or (self.scored and entry[0] > self._best().key[0]):
                queue.append(entry)
                continue
            seen.add(layout)
            self._run(entry[2])
            self._try(_streamed(self.problem, entry[2]))
        self.queue = queue  # a sorted list is a heap

    def climb(self) -> None:
        """One change at a time, from the best ones, while it gets better."""
        for number, start in enumerate(self.ranked()[:CLIMBED]):
            at, step = start, max(1, sum(pool.slots for pool in self.problem.pools) // 8)
            reserve = self.effort * (CLIMBED - number - 1) // (CLIMBED - number + 1)
            while self.effort > reserve:
                better = next(self._better(at, step), None)
                if better is not None:
                    at = better
                elif step == 1:
                    break
                else:
                    step = max(1, step // 4)

    def best_first(self) -> None:
        """What is left, until none can win."""
        while self.queue and self.effort > 0:
            bound, _, candidate = heapq.heappop(self.queue)
            if bound > self._best().key[0]:
                self.queue.clear()
                break
            self._try(candidate)
            for other in self._variants(candidate):
                self._offer(other)
        self.is_complete = self.is_complete and not self.queue

    def _better(self, at: Scored, step: int) -> Iterator[Scored]:
        """The most promising neighbour first."""
        near = (*self._moves(at.candidate, step), *self._variants(at.candidate))
        bounds = [(self.bounds.period_ms(candidate), i) for i, candidate in enumerate(near)]
        for bound, i in sorted(bounds):
            if self.effort <= 0 or bound > at.key[0]:
                return
            scored = self._try(near[i])
            if scored is not None and scored.key < at.key:
                yield scored

    def _try(self, candidate: Candidate) -> Scored | None:
        """Run it, unless it was."""
        return None if _key(candidate) in self.ran else self._run(candidate)

    def _moves(self, at: Candidate, step: int) -> Iterator[Candidate]:
        """Slots from one region to another, to those that nobody has, or from there."""
        problem, regions = self.problem, at.regions
        unused = [pool.slots - sum(r.slots[p] for r in regions) for p, pool in enumerate(problem.pools)]
        layout = tuple(tuple(turn.role for turn in region.turns) for region in regions)
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
                if all(map(any, slots)):
                    for draft in self._drafts(layout, [tuple(s) for s in slots]):
                        yield replace(draft, choices=self._as_fine(at, draft), stages=at.stages)

    def _as_fine(self, at: Candidate, draft: Candidate) -> dict[str, Choice]:
        """Micro-batches that cut a worker's share into as many pieces as they did."""
        found = dict(draft.choices)
        for role in self.problem.roles:
            if found[role.name].micro_batch > 1:
                pieces = -(-_share(self.problem, at, role) // at.choices[role.name].micro_batch)
                size = -(-_share(self.problem, draft, role) // pieces)
                found[role.name] = replace(found[role.name], micro_batch=size)
        return found

    def _variants(self, at: Candidate) -> Iterator[Candidate]:
        """The same slots with one number changed, or another order of turns."""
        for role in self.problem.roles:
            choice = at.choices[role.name]
            others = [replace(choice, micro_batch=size) for size in _ladder(self.problem, at, role)]
            others += [replace(choice, option=option) for option in range(len(role.options))]
            others += [replace(choice, stays=not choice.stays)] if role.may_stay else []
            for other in others:
                changed = {**at.choices, role.name: other}
                if other != choice and not any(
                    too for region in at.regions for too in candidates.too_much(self.problem, region, changed)
                ):
                    yield replace(at, choices=changed)
        if self.problem.cycle is not None:
            share = -(-self.problem.items // max(1, at.workers(self.problem.cycle.front)))
            for stages in sorted({1, 2, 4} & set(range(1, share + 1))):
                if stages != at.stages:
                    yield replace(at, stages=stages)
        for number, region in enumerate(at.regions):
            if len(region.turns) > 2:
                for i in range(1, len(region.turns) - 1):  # the order is a ring: the first may stay
                    turns = list(region.turns)
                    turns[i], turns[i + 1] = turns[i + 1], turns[i]
                    changed_regions = [*at.regions]
                    changed_regions[number] = replace(region, turns=tuple(turns))
                    yield replace(at, regions=tuple(changed_regions))

    def _run(self, candidate: Candidate) -> Scored:
        self.runs += 1
        self.ran.add(_key(candidate))
        scored = Scored(candidate, simulate(self.problem, candidate))
        self.effort -= self._cost(candidate)
        self.scored.append(scored)
        self.scored.sort(key=lambda s: s.key)
        return scored

    def _cost(self, candidate: Candidate) -> int:
        problem = self.problem
        in_turns = any(len(region.turns) > 1 for region in candidate.regions)
        steps = 6 * (problem.staleness + 1) if problem.staleness else 1 + in_turns
        moves = problem.items * len(problem.roles)
        if problem.cycle is not None:
            moves += 4 * candidate.workers(problem.cycle.front) * candidate.stages * problem.cycle.round_trips
        return steps * (moves + sum(map(len, (r.turns for r in candidate.regions))))

    def _best(self) -> Scored:
        return self.scored[0]

    def ranked(self) -> list[Scored]:
        """The best of each layout."""
        found: dict[object, Scored] = {}
        for scored in self.scored:
            found.setdefault(_layout(scored.candidate), scored)
        return heapq.nsmallest(KEPT, found.values(), key=lambda s: s.key)

    def reasons(self) -> Iterator[Objection]:
        yield from _reasons(self.problem, self.refused, self.short)


def _key(candidate: Candidate) -> object:
    return candidate.regions, tuple(candidate.choices.values()), candidate.stages


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


def _turns(problem: PlanProblem, name: str, slots: Sequence[int]) -> list[PlannedTurn]:
    """As many workers as fit; a gang in each of its largest world sizes, in the fastest pools."""
    role = problem.role(name)
    fit = [
        n // role.slots_per_worker if name in pool.roles else 0 for pool, n in zip(problem.pools, slots, strict=True)
    ]
    if not role.is_gang:
        return [PlannedTurn(name, tuple(fit))]
    by_speed = sorted(range(len(fit)), key=lambda p: -problem.pools[p].speed)
    worlds = [n for n in range(sum(fit), 0, -1) if role.allows(n)][:WORLDS]
    found = []
    for world in worlds:
        left, counts = world, [0] * len(fit)
        for p in by_speed:
            counts[p] = min(left, fit[p])
            left -= counts[p]
        found.append(PlannedTurn(name, tuple(counts)))
    return found or [PlannedTurn(name, (0,) * len(fit))]


def _share(problem: PlanProblem, draft: Candidate, role: RoleCosts) -> int:
    return -(-problem.items // max(1, draft.workers(role.name)))


def _choice(problem: PlanProblem, draft: Candidate, role: RoleCosts, *, option: int, stays: bool) -> Choice:
    """The largest micro-batch: fewest per-batch costs and changes of turn."""
    cycle = problem.cycle
    if cycle is not None and role.name in (cycle.front, cycle.back):
        # A front gathers its share to sub-batches.
        return Choice(micro_batch=1, depth=max(2, problem.items), option=option, stays=stays)
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
    return replace(candidate, choices=choices, stages=2 if problem.cycle else 1)


def _ladder(problem: PlanProblem, draft: Candidate, role: RoleCosts) -> list[int]:
    cycle = problem.cycle
    if isinstance(role.service, InLanes) or (cycle and role.name in (cycle.front, cycle.back)):
        return []
    share = _share(problem, draft, role)
    wanted = {share, -(-share // 2), -(-share // 4), -(-share // 8)}
    if share <= SMALL_SHARE:
        wanted |= {1, min(3, share)} | (set() if role.is_gang else {problem.items})
    return sorted(wanted)


# --- words ------------------------------------------------------------------------------------------------------------
def _reasons(problem: PlanProblem, refused: Sequence[TooMuch], short: set[str]) -> Iterator[Objection]:
    """Roles that no slot of theirs could hold; else roles without slots; else the turns that lacked least."""
    alone = False
    for role in problem.roles:
        homes = [pool for pool in problem.pools if role.name in pool.roles]
        peak = min(max(option.peak_mib, role.resident_mib) for option in role.options)
        if homes and all(pool.memory_mib and peak > pool.memory_mib for pool in homes):
            alone = True
            largest = max(homes, key=lambda pool: pool.memory_mib)
            yield Objection(
                f"role {role.name!r} peaks at {_gib(peak)} on a slot of {_gib(largest.memory_mib)} in pool "
                f"{largest.name}, alone; raise spec.pools[{largest.name}].slots.memory or lower the role's peak",
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
    if refused:
        least = min(refused, key=lambda too: too.need_mib - too.room_mib)
        kept = " and ".join(f"{name} keeps {_gib(mib)}" for name, mib in least.kept if mib)
        slots = next(pool.slots for pool in problem.pools if pool.name == least.pool)
        lacks = _gib(least.need_mib - least.room_mib)
        yield Objection(
            f"{least.role} peaks at {_gib(least.peak_mib)} and {kept or 'nobody keeps anything'} on a slot of "
            f"{_gib(least.room_mib)} in pool {least.pool}, which lacks {lacks}; give it {slots + 1} slots",
            least.role,
        )
    elif short and not alone:
        yield Objection(f"no division of the slots has room for {', '.join(sorted(short))}; raise spec.pools[*].pods")


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


def _explain(problem: PlanProblem, best: Scored) -> str:
    """What binds, and what is only assumed."""
    prediction = best.prediction
    role, kind, ms = max(prediction.critical, key=lambda part: part[2])
    assumed = [r.name for r in problem.roles if r.options[0].per_item_ms.by is Provenance.ASSUMED]
    said = (
        f"{describe(problem, best.candidate)}: {prediction.period_ms:.1f} ms a step, of which {kind} of {role} is "
        f"{ms:.1f} ms on the critical path; slots idle {prediction.idle_share:.0%}"
    )
    return said + (f". Assumed, not measured: the times of {', '.join(assumed)}" if assumed else "")


def lost_because(best: Scored, other: Scored) -> str:
    """What a runner-up has more of on its critical path."""

    def parts(scored: Scored) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for role, kind, ms in scored.prediction.critical:
            found[f"{kind} of {role}"] = found.get(f"{kind} of {role}", 0.0) + ms
        return found

    mine, its = parts(best), parts(other)
    worst = max(its, key=lambda name: its[name] - mine.get(name, 0.0))
    slower = other.prediction.period_ms / best.prediction.period_ms - 1 if best.prediction.period_ms else 0.0
    return f"{slower:.1%} slower: {its[worst] - mine.get(worst, 0.0):.1f} ms more {worst} on its critical path"
