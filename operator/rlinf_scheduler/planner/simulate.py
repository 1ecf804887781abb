"""What a candidate would take: a discrete-event run of a few steps by the runtime's rules. One code to choose plans, to
predict them, and to answer what-if. Deterministic; no clock.

What it knows of the runtime, and where that stands:

    units by credit, the most first, within microBatch * depth     rlinf_worker/queues/matching.py, given.py
    rounds of a gang, the last one shorter                         rlinf_worker/queues/steps.py
    serial and concurrent work, sub-batches of a cycle             rlinf_worker/roles/synthetic
    who answers whom in a cycle, by rank                           rlinf_worker/driver/routes.py
    turns: idle or due, ripe, preload, order                       rlinf_worker/turns/rule.py
    a step begins when the one staleness + 1 before it commits     rlinf_worker/driver/steps.py

Not here: jitter (every piece takes its mean), room of channels (a plan gives them room for all steps that are open),
times that agents and the driver need beyond `hand_over_ms` and `turn_ms`.

Each event carries the piece of work that brought it about, so the last commit leads back to what its time went to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, gcd, inf, lcm
from typing import Any, Final

from rlinf_api.errors import InvariantBroken
from rlinf_scheduler.planner.candidate import Candidate, Choice, PlannedTurn, Region
from rlinf_scheduler.planner.problem import CycleEdge, InLanes, InRounds, PlanProblem, RoleCosts

MOST_STEPS: Final = 24
"""With staleness, behind those that fill the pipeline; where they never repeat, the later half is the answer."""
CLEARLY: Final = 1.3
"""Times the limit that the mean of some steps with staleness lasts before a run is left."""
PATIENCE_MS: Final = 50.0  # turn_patience_s of the worker's settings

Piece = tuple[Any, int, str, float, float]
"""(what brought it about, role, kind, begin, end); kinds: compute, load, offload, weights, turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one step in steady state. `critical`: what its time went to, role by role, which adds up to the period; in it
    `wait` is the way between roles and time that nothing explains. `busy`: share of its slots' time that a role
    computes."""

    period_ms: float
    critical: tuple[tuple[str, str, float], ...]
    busy: dict[str, float]
    idle_share: float
    """Of the slots of all pools that the candidate uses."""
    effort: int = 0
    """Moves of units and turns that it took to say so; the same on any machine."""

    def part(self, kind: str) -> float:
        return sum(ms for _, of_kind, ms in self.critical if of_kind == kind)


class _Role:
    def __init__(
        self, index: int, spec: RoleCosts, choice: Choice, *, items: int, size: Sequence[float], bundle: int
    ) -> None:
        self.index, self.spec, self.items, self.bundle = index, spec, items, bundle
        self.per_item = spec.options[choice.option].per_item_ms.value
        self.peak = max(spec.options[choice.option].peak_mib, spec.resident_mib)
        self.per_batch = spec.per_batch_ms.value
        self.load_ms, self.offload_ms = spec.load_ms.value, spec.offload_ms.value
        self.stays = choice.stays
        self.micro_batch = choice.micro_batch
        self.window = choice.micro_batch * choice.depth * bundle  # of tickets; one that is begun does not wait
        self.lanes = spec.service.lanes if isinstance(spec.service, InLanes) else 0
        self.size = size  # of unit i: that of i modulo its length; empty: all are 1
        self.is_gang = spec.is_gang
        self.at_once = isinstance(spec.service, InRounds) and spec.service.at_once
        self.workers: list[_Worker] = []
        self.outputs: list[tuple[_Role, Sequence[range]]] = []  # and what each unit of a step becomes; empty: one
        self.needs: list[int] = []  # parts that each unit of a step has, over all inputs; empty: one
        self.cycle: CycleEdge | None = None
        self.is_front = False
        self.asker_feeds = False  # of a cycle's ends: who has gone through it leaves at the front
        self.stages = choice.stages
        self.waiting: deque[int] = deque()
        self.by_step: dict[int, deque[int]] = {}  # of a gang, which takes no round of two steps
        self.arrived: dict[int, int] = {}  # parts that have come, of units with several
        self.heap: list[tuple[int, int, int]] = []  # (units in its inbox, in its hands, worker): who gets the next
        self.done: dict[int, int] = {}  # units by step
        self.world = 0  # of a gang: its ranks, also where a few stand for all
        self.step, self.rounds_taken = 0, 0  # of a gang: its open step, units of it that went into rounds
        self.used_ms = 0.0


class _Worker:
    """One worker, or a gang, which acts as one. Of classes: one that stands for as many."""

    __slots__ = (
        "asked", "asks", "begun", "busy", "factor", "first", "free", "has", "in_hand", "inbox", "newest", "number",
        "ranks", "region", "role", "since", "slots", "step_ended", "taken", "to_ask", "turn", "working",
    )  # fmt: skip

    def __init__(self, role: _Role, turn: _Turn, region: _Region, *, factor: float, slots: float) -> None:
        self.role, self.turn, self.region, self.factor, self.slots = role, turn, region, factor, slots
        self.number = len(role.workers)
        self.ranks: list[float] = []  # of a gang: the factor of each
        self.inbox: deque[Any] = deque()
        self.in_hand = 0  # passages of a cycle on their way here
        self.working = 0  # units that it has taken and not finished
        self.busy = 0
        self.since = 0.0
        self.free = role.lanes
        self.begun = -1  # the step whose per-batch time an engine has spent
        self.asks: list[_Worker] = []  # of a cycle's front: who answers
        self.asked, self.to_ask = 0, deque[Any]()  # of one that asks for unit by unit: under way; wait for a stage
        self.has = 0  # of a front that another role feeds: units that go round
        # of the turn that is:
        self.taken, self.first, self.newest, self.step_ended = 0, -1, -1, False

    def begin_turn(self) -> None:
        self.taken, self.first, self.newest, self.step_ended = 0, -1, -1, False


class _Turn:
    __slots__ = ("beside", "fed_inside", "idle_left", "load_factor", "role", "share", "workers")

    def __init__(self, role: _Role) -> None:
        self.role = role
        self.workers: list[_Worker] = []
        self.share = 0  # units that end a worker's turn; 0: the end of the step
        self.fed_inside = False
        self.idle_left = False  # it gave its last turn back because it was idle
        self.load_factor = 1.0
        self.beside: set[int] = set()  # roles that may load beside its work


class _Region:
    __slots__ = (
        "at", "behind", "busy", "impatient", "patience", "preloaded", "ready_at", "shared", "switching", "turns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.turns: list[_Turn] = []
        self.behind: list[list[_Turn]] = []  # of each turn, in their order: the others
        self.shared = False
        self.at = -1
        self.busy = 0  # workers at work; all of one role
        self.switching = False
        self.preloaded = -1
        self.ready_at = 0.0
        self.patience, self.impatient = 0, False


class Aborted(Exception):
    """A run that lasts longer than `limit_ms`: whoever asked wants no such candidate. `moves`: what it took."""

    def __init__(self, moves: int) -> None:
        super().__init__(moves)
        self.moves = moves


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
    run = _Run(problem, candidate, classes)
    if steps is not None or not problem.staleness:
        return run.over(problem.staleness + 1 + in_turns, steps or problem.size_sets, limit_ms)
    # By the end of these who may run ahead has done so.
    sets = problem.size_sets
    most = 2 * sets * ceil(MOST_STEPS / 2 / sets)
    return run.repeating(warm=4 * (problem.staleness + 1), most=most, limit_ms=limit_ms)


def alike(problem: PlanProblem, candidate: Candidate, *, at_least: int, at_most: int) -> int:
    """How many workers one may stand for: a divisor of `at_most` and of every number of workers. Those below `at_least`
    are not asked: one worker then stands for these few, and is as much slower. A single one that stood for hundreds
    would be handed units as none of them is."""
    counts = (n for region in candidate.regions for turn in region.turns for n in turn.workers if n >= at_least)
    others = (n for n in problem.units.values() if n != problem.items)  # what is split comes out even
    return gcd(at_most, *counts, *others) if at_most <= problem.items else 1


def _becomes(made: int, taken: int) -> Sequence[range]:
    """What each unit of a step becomes in the next role's hands; empty: one each.

    >>> _becomes(2, 4), _becomes(4, 2), _becomes(3, 3)
    ([range(0, 2), range(2, 4)], [range(0, 1), range(0, 1), range(1, 2), range(1, 2)], [])
    """
    if made == taken:
        return []
    if made > taken:
        return [range(unit * taken // made, unit * taken // made + 1) for unit in range(made)]
    return [range(-(-unit * taken // made), -(-(unit + 1) * taken // made)) for unit in range(made)]


def _sizes(role: RoleCosts, items: int, classes: int) -> Sequence[float]:
    """Of the units of all sets of sizes, one set after the other; of classes: the mean of as many that are next to each
    other in size, so that their sum stays."""
    found: list[float] = []
    for sizes in role.all_sizes:
        of_step = (sizes * (-(-items // len(sizes))))[:items]
        if classes > 1:
            ranked = sorted(range(items), key=of_step.__getitem__)
            groups = sorted(ranked[at : at + classes] for at in range(0, items, classes))
            of_step = tuple(sum(of_step[i] for i in group) / len(group) for group in groups)
        found += of_step
    return () if set(found) == {1.0} else found


class _Run:
    def __init__(self, problem: PlanProblem, candidate: Candidate, classes: int = 1) -> None:
        self.problem, self.classes = problem, classes
        self.hand_over = problem.hand_over_ms.value
        self.now = 0.0
        self.piece: Any = None
        self.events: list[tuple[float, int, Callable[[Any, Any], None], Any, Any, Any]] = []
        self.count = 0
        self.roles = [
            _Role(
                i,
                role,
                candidate.choices[role.name],
                items=-(-problem.units[role.name] // classes),
                size=_sizes(role, problem.units[role.name], classes),
                bundle=role.bundle if classes == 1 else 1,
            )
            for i, role in enumerate(problem.roles)
        ]
        self.by_name = {role.spec.name: role for role in self.roles}
        for role in self.roles:
            for name in problem.outputs(role.spec.name):
                consumer = self.by_name[name]
                role.outputs.append((consumer, _becomes(role.items, consumer.items)))
            self._count_parts(role)
        self.terminal = [self.by_name[name] for name in problem.terminal]
        self.slots = candidate.slots / classes
        for region in candidate.regions:
            self._lay_out(region)
        for cycle in problem.cycles:
            self._pair(cycle)
        weights = problem.weights
        self.publisher = self.by_name[weights.producer] if weights else None
        self.receiver = self.by_name[weights.consumer] if weights else None
        self.sync = weights.sync_ms.value if weights else 0.0
        self.lag = weights.lag_ms.value if weights else 0.0
        self.weights_at: dict[int, float] = {}
        self.commits: list[tuple[float, Any]] = []
        self.snapshots: list[list[float]] = []

    def _count_parts(self, role: _Role) -> None:
        made = [self.by_name[name].items for name in self.problem.inputs(role.spec.name)]
        if len(made) > 1 or any(n > role.items for n in made):
            role.needs = [0] * role.items
            for n in made:
                for units in _becomes(n, role.items) or [range(i, i + 1) for i in range(n)]:
                    for unit in units:
                        role.needs[unit] += 1

    # --- layout -------------------------------------------------------------------------------------------------------
    def _lay_out(self, planned: Region) -> None:
        region = _Region()
        region.turns = [self._turn(turn, region) for turn in planned.turns]
        region.behind = [[*region.turns[at + 1 :], *region.turns[:at]] for at in range(len(region.turns))]
        region.shared = len(region.turns) > 1
        region.at = -1 if region.shared else 0
        names = {turn.role.spec.name for turn in region.turns}
        memory = [p.memory_mib for p, slots in zip(self.problem.pools, planned.slots, strict=True) if slots]
        room = min((mib or inf for mib in memory), default=inf)
        for turn in region.turns if region.shared else ():
            fed_by = self.problem.inputs(turn.role.spec.name)
            turn.fed_inside = bool(fed_by) and names.issuperset(fed_by)
            turn.beside = {other.role.index for other in region.turns if _fits(turn, other, region.turns, room)}

    def _turn(self, planned: PlannedTurn, region: _Region) -> _Turn:
        role = self.by_name[planned.role]
        spec, turn = role.spec, _Turn(role)
        scale = float(spec.slots_per_worker**spec.scaling)
        speeds = [(p.speed, n) for p, n in zip(self.problem.pools, planned.workers, strict=True) if n]
        turn.load_factor = 1.0 / min((speed for speed, _ in speeds), default=1.0)
        classes, factors = self.classes, []
        for speed, n in speeds:
            stand = max(1, n // classes)
            factors += [stand * classes / n / (speed * scale) if classes > 1 else 1.0 / (speed * scale)] * stand
        slots = sum(n for _, n in speeds) * spec.slots_per_worker / classes
        if spec.is_gang:
            role.world = sum(n for _, n in speeds)
            whole = _Worker(role, turn, region, factor=max(factors), slots=slots)
            whole.ranks = factors
            turn.workers.append(whole)
            role.workers.append(whole)
        else:
            for factor in factors:
                worker = _Worker(role, turn, region, factor=factor, slots=slots / len(factors))
                turn.workers.append(worker)
                role.workers.append(worker)
                role.heap.append((0, 0, worker.number))
        turn.share = ceil(planned.until / (1 if spec.is_gang else sum(n for _, n in speeds)))
        return turn

    def _pair(self, cycle: CycleEdge) -> None:
        front, back = self.by_name[cycle.front], self.by_name[cycle.back]
        for end in (front, back):
            end.cycle, end.asker_feeds = cycle, self.problem.asker_feeds(cycle)
        front.is_front = True
        askers, answerers = front.workers, back.workers
        if len(askers) >= len(answerers):
            for i, asker in enumerate(askers):
                asker.asks = [answerers[i % len(answerers)]]
        else:
            for i, answerer in enumerate(answerers):
                askers[i % len(askers)].asks.append(answerer)

    # --- the run ------------------------------------------------------------------------------------------------------
    def over(self, warm: int, steps: int, limit_ms: float) -> Prediction:
        self._begin()
        while len(self.commits) < warm + steps:
            measured = len(self.commits) >= warm
            self._next_commit(self.commits[warm - 1][0] + limit_ms * steps if measured else inf)
        return self._prediction(warm - 1)

    def repeating(self, *, warm: int, most: int, limit_ms: float) -> Prediction:
        """Until as many steps as may follow each other have lasted as long as those before them, one by one."""
        self._begin()
        lasted: list[float] = []
        while len(lasted) < most:
            self._next_commit(inf)
            self._leave_if_slow(limit_ms)
            if len(self.commits) <= warm:
                continue
            lasted.append(self.commits[-1][0] - self.commits[-2][0])
            open_at_once = lcm(self.problem.staleness + 1, self.problem.size_sets)  # which may commit in a burst
            for count in range(open_at_once, len(lasted) // 2 + 1, open_at_once):
                pairs = zip(lasted[-count:], lasted[-2 * count : -count], strict=True)
                if all(abs(a - b) <= 1e-6 * max(a, b) for a, b in pairs):
                    return self._prediction(len(self.commits) - 1 - count)
        return self._prediction(len(self.commits) - 1 - most // 2)

    def _leave_if_slow(self, limit_ms: float) -> None:
        """Long and short steps follow each other, so that it takes some, and a clear excess, to know."""
        filled = self.problem.staleness + 1
        count = len(self.commits) - 1 - filled
        if count >= 2 * filled and not count % filled:
            mean = (self.commits[-1][0] - self.commits[filled][0]) / count
            if mean > CLEARLY * limit_ms:
                raise Aborted(self.count)

    def _begin(self) -> None:
        self.commits.append((0.0, None))  # of the step before the first one
        self.snapshots.append([0.0] * len(self.roles))
        for step in range(self.problem.staleness + 1):
            self._open(step)

    def _next_commit(self, until: float) -> None:
        events, commits, before = self.events, self.commits, len(self.commits)
        while len(commits) == before:
            if not events:
                raise InvariantBroken(f"the simulated job stands still after {before - 1} steps")
            self.now, _, handler, a, b, self.piece = heappop(events)
            if self.now > until:
                raise Aborted(self.count)
            handler(a, b)

    def _at(self, time: float, handler: Callable[[Any, Any], None], a: Any, b: Any, piece: Any) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, handler, a, b, piece))

    def _prediction(self, warm: int) -> Prediction:
        (begun, _), (ended, piece) = self.commits[warm], self.commits[-1]
        count = len(self.commits) - 1 - warm
        span = ended - begun
        first, last = self.snapshots[warm], self.snapshots[-1]
        used = {role.spec.name: last[i] - first[i] for i, role in enumerate(self.roles)}
        slots = {role.spec.name: sum(w.slots for w in role.workers) for role in self.roles}
        return Prediction(
            period_ms=span / count,
            critical=self._critical(piece, begun, ended, count),
            busy={name: used[name] / (span * slots[name]) if span else 0.0 for name in used},
            idle_share=max(0.0, 1.0 - sum(used.values()) / (span * self.slots)) if span else 0.0,
            effort=self.count,
        )

    def _critical(self, piece: Any, begun: float, ended: float, count: int) -> tuple[tuple[str, str, float], ...]:
        found: dict[tuple[str, str], float] = {}
        until = ended
        while piece is not None and until > begun:
            parent, index, kind, t0, t1 = piece
            name, end, begin = self.roles[index].spec.name, min(t1, until), max(t0, begun)
            for key, ms in (((name, "wait"), until - max(end, begun)), ((name, kind), end - begin)):
                if ms > 0:
                    found[key] = found.get(key, 0.0) + ms
            until = min(until, begin)
            piece = parent
        return tuple((name, kind, ms / count) for (name, kind), ms in reversed(found.items()))

    # --- steps --------------------------------------------------------------------------------------------------------
    def _open(self, step: int) -> None:
        self.weights_at[step] = received = self.now + self.lag
        for name in self.problem.first:
            role = self.by_name[name]
            units = range(step * role.items, (step + 1) * role.items)
            if role.is_front:
                self._at(self.now + self.hand_over, self._deal, role, step, self.piece)
            else:
                at = received if role is self.receiver else self.now
                self._at(at + self.hand_over, self._arrive, role, units, self.piece)

    def _committed(self, step: int) -> None:
        """All units of all roles that end it are done."""
        if any(role.done.get(step, 0) < role.items for role in self.terminal):
            return
        self.commits.append((self.now, self.piece))
        self.snapshots.append([self._used(role) for role in self.roles])
        for role in self.terminal:
            for worker in role.workers:
                worker.step_ended = True
        if self.publisher is not None and self.sync:
            for worker in self.publisher.workers:
                self._busy(worker)
                piece = (self.piece, self.publisher.index, "weights", self.now, self.now + self.sync)
                self._at(self.now + self.sync, self._published, worker, None, piece)
        self._open(step + 1 + self.problem.staleness)

    def _published(self, worker: _Worker, _: None) -> None:
        self._free(worker)
        self._kick(worker)

    def _used(self, role: _Role) -> float:
        for worker in role.workers:
            if worker.busy:
                role.used_ms += (self.now - worker.since) * worker.slots
                worker.since = self.now
        return role.used_ms

    def _busy(self, worker: _Worker) -> None:
        if not worker.busy:
            worker.since = self.now
            worker.region.busy += 1
        worker.busy += 1

    def _free(self, worker: _Worker) -> None:
        worker.busy -= 1
        if not worker.busy:
            worker.region.busy -= 1
            worker.role.used_ms += (self.now - worker.since) * worker.slots

    # --- units --------------------------------------------------------------------------------------------------------
    def _arrive(self, role: _Role, units: Sequence[int]) -> None:
        if role.needs:
            ready = []
            for unit in units:
                role.arrived[unit] = role.arrived.get(unit, 0) + 1
                if role.arrived[unit] == role.needs[unit % role.items]:
                    del role.arrived[unit]
                    ready.append(unit)
            units = ready
        if role.is_gang:
            for unit in units:
                role.by_step.setdefault(unit // role.items, deque()).append(unit)
            self._kick(role.workers[0])
            return
        if role.is_front:
            self._share_out(role, units)
            return
        role.waiting.extend(units)
        for worker in self._hand_out(role):
            self._kick(worker)

    def _hand_out(self, role: _Role) -> Sequence[_Worker]:
        """To whoever has most room, of two the one that has less in hand."""
        waiting, heap, workers = role.waiting, role.heap, role.workers
        if not waiting:
            return ()
        if len(workers) == 1:
            inbox, room = workers[0].inbox, role.window - len(workers[0].inbox)
            for _ in range(min(room, len(waiting))):
                inbox.append(waiting.popleft())
            return workers if room > 0 else ()
        touched: dict[int, _Worker] = {}
        while waiting and heap:
            held, in_hand, number = heap[0]
            worker = workers[number]
            if held != len(worker.inbox) or in_hand != held + worker.working:
                heappop(heap)  # of the past: a newer entry is there
                continue
            if held >= role.window:
                break
            heappop(heap)
            bundle = min(role.bundle, len(waiting))
            for _ in range(bundle):
                worker.inbox.append(waiting.popleft())
            heappush(heap, (held + bundle, in_hand + bundle, number))
            touched[number] = worker
        return list(touched.values())

    def _changed(self, worker: _Worker) -> None:
        role = worker.role
        if len(role.workers) > 1:
            held = len(worker.inbox)
            heappush(role.heap, (held, held + worker.working, worker.number))

    def _emit(self, role: _Role, units: Sequence[int]) -> None:
        for consumer, becomes in role.outputs:
            sent = units
            if becomes:
                step, base = units[0] // role.items, units[0] // role.items * consumer.items
                sent = [base + part for unit in units for part in becomes[unit - step * role.items]]
            if self.hand_over:
                self._at(self.now + self.hand_over, self._arrive, consumer, sent, self.piece)
            else:
                self._arrive(consumer, sent)
        if not role.outputs:
            step = units[0] // role.items
            role.done[step] = role.done.get(step, 0) + len(units)
            if role.done[step] == role.items:
                self._committed(step)

    # --- work ---------------------------------------------------------------------------------------------------------
    def _has_work(self, worker: _Worker) -> bool:
        if worker.ranks:
            return len(worker.role.by_step.get(worker.role.step, ())) >= self._round(worker)
        return bool(worker.inbox) or worker.in_hand > 0  # as in _wants

    def _round(self, worker: _Worker) -> int:
        role = worker.role
        if role.at_once:
            return role.items
        return min(role.micro_batch * len(worker.ranks), role.items - role.rounds_taken)

    def _is_due(self, worker: _Worker) -> bool:
        if worker.turn.share:
            return worker.taken >= worker.turn.share
        return worker.step_ended or worker.newest > worker.first >= 0

    def _kick(self, worker: _Worker) -> None:
        region = worker.region
        if not region.shared:
            if not worker.busy or worker.role.lanes:
                self._start(worker)
            return
        if region.switching:
            return
        turn, at = worker.turn, region.at
        if at < 0 or region.turns[at] is not turn:
            if not region.busy or region.preloaded < 0:
                self._settle(region)
            return
        if worker.busy and not worker.role.lanes and not turn.beside:
            return
        if self._is_due(worker) and self._is_wanted(region, turn):
            self._settle(region)
            return
        self._start(worker)
        if not worker.busy:
            self._settle(region)

    def _is_wanted(self, region: _Region, turn: _Turn) -> bool:
        for other in region.turns:  # noqa: SIM110 - as in _wants
            if other is not turn and self._wants(other):
                return True
        return False

    def _note(self, worker: _Worker, step: int, taken: int) -> None:
        worker.taken += taken
        if worker.first < 0:
            worker.first = step
        if step > worker.newest:
            worker.newest = step

    def _start(self, worker: _Worker) -> None:
        role = worker.role
        if worker.ranks:
            if not worker.busy and self._has_work(worker):
                self._start_round(worker, self._round(worker))
        elif role.lanes:
            self._start_lanes(worker)
        elif not worker.busy and worker.inbox:
            if role.cycle is not None:
                self._start_passage(worker)
            else:
                self._start_batch(worker)

    def _start_batch(self, worker: _Worker) -> None:
        role, inbox, items = worker.role, worker.inbox, worker.role.items
        batch = [inbox.popleft()]
        step = batch[0] // items
        while inbox and len(batch) < role.micro_batch and inbox[0] // items == step:
            batch.append(inbox.popleft())
        worker.working = len(batch)
        self._busy(worker)
        self._note(worker, step, len(batch))
        at, each, sizes = self.now + role.per_batch * worker.factor, role.per_item * worker.factor, role.size
        for unit in batch:
            at += each * sizes[unit % len(sizes)] if sizes else each
            piece = (self.piece, role.index, "compute", self.now, at)
            self._at(at, self._over if unit == batch[-1] else self._passed, worker, unit, piece)
        self._changed(worker)
        for other in self._hand_out(role):
            if other is not worker and not other.busy:
                self._kick(other)

    def _passed(self, worker: _Worker, unit: int) -> None:
        worker.working -= 1
        self._changed(worker)
        self._emit(worker.role, (unit,))

    def _over(self, worker: _Worker, unit: int) -> None:
        self._free(worker)
        self._passed(worker, unit)
        self._kick(worker)

    def _start_lanes(self, worker: _Worker) -> None:
        """A step's per-batch time goes before its first unit."""
        role, items = worker.role, worker.role.items
        while worker.free and worker.inbox:
            step = worker.inbox[0] // items
            if step > worker.begun:
                worker.begun = step
                ms = role.per_batch * worker.factor
                if ms > 0:
                    self._note(worker, step, 0)
                    self._busy(worker)
                    piece = (self.piece, role.index, "compute", self.now, self.now + ms)
                    worker.free = -worker.free  # nothing is taken meanwhile
                    self._at(self.now + ms, self._begun, worker, None, piece)
                    return
            if worker.free < 0:
                return
            unit = worker.inbox.popleft()
            worker.free -= 1
            worker.working += 1
            self._busy(worker)
            self._note(worker, step, 1)
            size = role.size[unit % len(role.size)] if role.size else 1.0
            at = self.now + role.lanes * role.per_item * worker.factor * size
            self._at(at, self._lane_over, worker, unit, (self.piece, role.index, "compute", self.now, at))
            self._changed(worker)
            for other in self._hand_out(role):
                if other is not worker:
                    self._kick(other)

    def _begun(self, worker: _Worker, _: None) -> None:
        worker.free = -worker.free
        self._free(worker)
        self._kick(worker)

    def _lane_over(self, worker: _Worker, unit: int) -> None:
        worker.free += 1 if worker.free >= 0 else -1
        self._free(worker)
        self._passed(worker, unit)
        self._kick(worker)

    def _start_round(self, worker: _Worker, size: int) -> None:
        role, ranks, items = worker.role, worker.ranks, worker.role.items
        step = role.step
        units = [role.by_step[step].popleft() for _ in range(size)]
        role.rounds_taken += size
        if role.rounds_taken == items:
            del role.by_step[step]
            role.step, role.rounds_taken = step + 1, 0
        loads = [0.0] * len(ranks)
        for number, unit in enumerate(units):
            loads[number % len(ranks)] += role.size[unit % len(role.size)] if role.size else 1.0
        service = role.spec.service
        assert isinstance(service, InRounds)
        slowest = max(role.per_item * load * factor for load, factor in zip(loads, ranks, strict=True))
        sync = service.sync_ms.value * (role.world - 1) / role.world
        ms = slowest + (role.per_batch + sync) * worker.factor
        self._busy(worker)
        self._note(worker, step, 1)
        piece = (self.piece, role.index, "compute", self.now, self.now + ms)
        self._at(self.now + ms, self._round_over, worker, units, piece)

    def _round_over(self, worker: _Worker, units: list[int]) -> None:
        self._free(worker)
        self._emit(worker.role, units)
        self._kick(worker)

    # --- the cycle ----------------------------------------------------------------------------------------------------
    def _deal(self, front: _Role, step: int) -> None:
        """Tickets are pinned: every front worker's share, in as many sub-batches as there are stages, or by unit."""
        units, count = range(step * front.items, (step + 1) * front.items), len(front.workers)
        assert front.cycle is not None
        for number, worker in enumerate(front.workers):
            share = units[number::count]
            stages = len(share) if front.cycle.is_single else min(len(share), front.stages)
            worker.inbox.extend((step, share[at::stages], 0) for at in range(stages))
            self._kick(worker)

    def _share_out(self, front: _Role, units: Sequence[int]) -> None:
        """What another role makes goes to who has fewest that go round, one by one."""
        for unit in units:
            worker = min(front.workers, key=lambda w: (w.has, w.number))
            worker.has += 1
            worker.inbox.append((unit // front.items, (unit,), 0))
            self._kick(worker)

    def _start_passage(self, worker: _Worker) -> None:
        role = worker.role
        passage = worker.inbox.popleft()
        while not passage[1] or (role.asker_feeds and role.is_front and not passage[2]):
            self._note(worker, passage[0], 1)
            if passage[1]:  # its first question takes no work
                self._ask(worker, passage)
            else:
                worker.asked -= 1
                self._go_on_asking(worker)
            if not worker.inbox:
                return
            passage = worker.inbox.popleft()
        step, units, _ = passage
        self._busy(worker)
        self._note(worker, step, 1)
        sizes = role.size
        work = sum(sizes[unit % len(sizes)] for unit in units) if sizes else len(units)
        at = self.now + (role.per_batch + role.per_item * work) * worker.factor
        self._at(at, self._passage_over, worker, passage, (self.piece, role.index, "compute", self.now, at))

    def _passage_over(self, worker: _Worker, passage: tuple[Any, ...]) -> None:
        _, units, came_from = passage
        self._free(worker)
        role = worker.role
        cycle = role.cycle
        assert cycle is not None
        if role.is_front:
            worker.asked -= bool(came_from)
            if role.asker_feeds and came_from[1] == cycle.round_trips:
                worker.has -= 1
                self._emit(role, units)
                self._go_on_asking(worker)
            else:
                self._ask(worker, passage)
        elif role.asker_feeds or came_from[1] < cycle.round_trips:
            self._send(came_from[0], passage, at=self.now + cycle.hop_ms.value)
        else:
            self._emit(role, units)
            self._through(cycle, passage)
        self._kick(worker)

    def _through(self, cycle: CycleEdge, passage: tuple[Any, ...]) -> None:
        """A unit left at the back. Its last answer is no work for the front, who asks for another one then."""
        step, _, (asker, trips) = passage
        asker.has -= 1
        if cycle.is_single and asker.to_ask:
            self._send(asker, (step, (), (None, trips)), at=self.now + cycle.hop_ms.value)
        else:
            asker.asked -= 1

    def _ask(self, worker: _Worker, passage: tuple[Any, ...]) -> None:
        worker.to_ask.append(passage)
        self._go_on_asking(worker)

    def _go_on_asking(self, worker: _Worker) -> None:
        """Units that travel by themselves take turns question by question, as many at once as there are stages."""
        cycle, stages = worker.role.cycle, worker.role.stages
        assert cycle is not None
        while worker.to_ask and (worker.asked < stages or not cycle.is_single):
            step, units, came_from = worker.to_ask.popleft()
            worker.asked += 1
            _, trips = came_from or (None, 0)
            answerer = min(worker.asks, key=lambda w: (w.in_hand + len(w.inbox) + w.busy, w.number))
            ready = self.weights_at[step] if answerer.role is self.receiver else 0.0
            self._send(answerer, (step, units, (worker, trips + 1)), at=max(self.now + cycle.hop_ms.value, ready))

    def _send(self, to: _Worker, passage: tuple[Any, ...], *, at: float) -> None:
        to.in_hand += 1
        self._at(at, self._here, to, passage, self.piece)
        if to.region.shared:
            self._kick(to)

    def _here(self, worker: _Worker, passage: tuple[Any, ...]) -> None:
        worker.in_hand -= 1
        worker.inbox.append(passage)
        self._kick(worker)

    # --- turns --------------------------------------------------------------------------------------------------------
    def _wants(self, turn: _Turn) -> bool:
        if turn.role.is_gang:
            return self._has_work(turn.workers[0])
        for worker in turn.workers:  # noqa: SIM110 - asked a million times a plan, and a generator costs twice as much
            if worker.inbox or worker.in_hand:
                return True
        return False

    def _is_ripe(self, turn: _Turn) -> bool:
        """A role that gave its turn back because it was idle waits for a quarter of what may wait for it; asked while
        nobody of the region works."""
        if turn.fed_inside or not turn.idle_left or turn.role.is_gang:
            return True
        return any(w.in_hand or 4 * len(w.inbox) >= turn.role.window for w in turn.workers)

    def _settle(self, region: _Region) -> None:
        if region.switching:
            return
        turns, at = region.turns, region.at
        holder = turns[at] if at >= 0 else None
        if region.busy:
            if holder is not None and region.preloaded < 0 and holder.beside:
                self._preload(region, holder)
            return
        due = False
        # Who held last comes last, as the holder.
        if holder is not None:
            for worker in holder.workers:
                worker_due = self._is_due(worker)
                if not worker_due and self._has_work(worker):
                    if holder.beside:
                        self._preload(region, holder)
                    return
                due = due or worker_due
        order = turns if at < 0 else region.behind[at]
        rivals = [turn for turn in order if self._wants(turn)]
        for turn in rivals:
            if region.impatient or self._is_ripe(turn):
                self._switch(region, holder, turn, due=due)
                return
        if rivals:
            region.patience += 1
            self._at(self.now + PATIENCE_MS, self._impatient, region, region.patience, self.piece)
        elif due and holder is not None and self._wants(holder):
            for worker in holder.workers:
                worker.begin_turn()
            for worker in holder.workers:
                if self._has_work(worker):
                    self._kick(worker)

    def _impatient(self, region: _Region, number: int) -> None:
        if number == region.patience and not region.switching:
            region.impatient = True
            self._settle(region)
            region.impatient = False

    def _preload(self, region: _Region, holder: _Turn) -> None:
        for rival in region.behind[region.at]:
            if self._wants(rival):
                if rival.role.index in holder.beside:
                    region.preloaded = rival.role.index
                    region.ready_at = self.now + rival.role.load_ms * rival.load_factor
                return

    def _switch(self, region: _Region, holder: _Turn | None, turn: _Turn, *, due: bool) -> None:
        region.switching, region.patience = True, region.patience + 1
        at, piece = self.now + self.problem.turn_ms.value, self.piece
        if at > self.now:
            piece = (piece, turn.role.index, "turn", self.now, at)
        if holder is not None:
            holder.idle_left = not due
            if not holder.role.stays and holder.role.offload_ms:
                ms = holder.role.offload_ms * holder.load_factor
                piece, at = (piece, holder.role.index, "offload", at, at + ms), at + ms
        role, early = turn.role, region.ready_at if region.preloaded == turn.role.index else None
        if region.preloaded >= 0 and early is None:
            other = next(t for t in region.turns if t.role.index == region.preloaded)
            at = max(at, region.ready_at) + other.role.offload_ms * other.load_factor
        if not role.stays and role.load_ms:
            ready = early if early is not None else at + role.load_ms * turn.load_factor
            if ready > at:
                piece, at = (piece, role.index, "load", at, ready), ready
        region.preloaded = -1
        self._at(at, self._granted, region, region.turns.index(turn), piece)

    def _granted(self, region: _Region, at: int) -> None:
        region.switching, region.at = False, at
        turn = region.turns[at]
        for worker in turn.workers:
            worker.begin_turn()
        for worker in turn.workers:
            self._kick(worker)


def _fits(holder: _Turn, comes: _Turn, turns: Sequence[_Turn], room: float) -> bool:
    """Whether one may load while the other works: only where both declare their memory."""
    if holder is comes or comes.role.stays or not (holder.role.peak and comes.role.spec.resident_mib):
        return False
    others = [t.role for t in turns if t is not holder and t is not comes]
    kept = sum(r.spec.resident_mib if r.stays else r.spec.offloaded_mib for r in others)
    return holder.role.peak + comes.role.spec.resident_mib + kept <= room
