"""What a simulated job consists of, and what can be said of it without time: roles, their workers, and the slots that
these have to themselves or in turns. layout.py makes them.

    SimRole     costs and counts of a role, and its units that no worker has yet
    SimWorker   one worker; a gang, which acts as one; or one that stands for as many
    SimTurn     the workers of a role that come onto a region's slots together
    SimRegion   slots that change hands together: who has them, who may come
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rlinf_scheduler.planner.candidate import Choice
from rlinf_scheduler.planner.problem import CycleEdge, InLanes, InRounds, RoleCosts


class SimRole:
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
        self.workers: list[SimWorker] = []
        self.outputs: list[tuple[SimRole, Sequence[range]]] = []  # and what each unit of a step becomes; empty: one
        self.needs: list[int] = []  # parts that each unit of a step has, over all inputs; empty: one
        self.cycle: CycleEdge | None = None
        self.is_front = False
        self.asker_feeds = False  # of a cycle's ends: who has gone through it leaves at the front
        self.stages = choice.stages
        self.waiting: deque[int] = deque()
        self.by_step: dict[int, deque[int]] = {}  # of a gang, which takes no round of two steps
        self.arrived: dict[int, int] = {}  # parts that have come, of units with several
        self.heap: list[tuple[int, int, int]] = []  # who gets the next: (units that it has, of these not begun, worker)
        self.done: dict[int, int] = {}  # units by step
        self.world = 0  # of a gang: its ranks, also where a few stand for all
        self.step, self.rounds_taken = 0, 0  # of a gang: its open step, units of it that went into rounds
        self.used_ms = 0.0


class SimWorker:
    __slots__ = (
        "asked", "asks", "begun", "busy", "factor", "first", "free", "has", "in_hand", "inbox", "newest", "number",
        "ranks", "region", "role", "since", "slots", "start", "step_ended", "taken", "to_ask", "turn", "working",
    )  # fmt: skip

    def __init__(self, role: SimRole, turn: SimTurn, region: SimRegion, *, factor: float, slots: float) -> None:
        self.role, self.turn, self.region, self.factor, self.slots = role, turn, region, factor, slots
        self.number = len(role.workers)
        self.start: Callable[[SimWorker], None]
        """Begins what there is for it to do, if it can; whoever runs the job says what that is (work.py, trips.py)."""
        self.ranks: list[float] = []  # of a gang: the factor of each
        self.inbox: deque[Any] = deque()
        self.in_hand = 0  # passages of a cycle on their way here
        self.working = 0  # units that it has taken and not finished
        self.busy = 0
        self.since = 0.0
        self.free = role.lanes
        self.begun = -1  # the step whose per-batch time an engine has spent
        self.asks: list[SimWorker] = []  # of a cycle's front: who answers
        self.asked, self.to_ask = 0, deque[Any]()  # of one that asks for unit by unit: under way; wait for a stage
        self.has = 0  # of a front that another role feeds: units that go round
        # of the turn that is:
        self.taken, self.first, self.newest, self.step_ended = 0, -1, -1, False

    def begin_turn(self) -> None:
        self.taken, self.first, self.newest, self.step_ended = 0, -1, -1, False

    def note(self, step: int, taken: int) -> None:
        """It has taken so many units in this turn."""
        self.taken += taken
        if self.first < 0:
            self.first = step
        if step > self.newest:
            self.newest = step

    def is_due(self) -> bool:
        """Its turn is over, as far as it goes by units or by steps."""
        if self.turn.share:
            return self.taken >= self.turn.share
        return self.step_ended or self.newest > self.first >= 0

    def has_work(self) -> bool:
        if self.ranks:
            return len(self.role.by_step.get(self.role.step, ())) >= self.round()
        return bool(self.inbox) or self.in_hand > 0  # as in SimTurn.wants

    def round(self) -> int:
        """Units of a gang's next round."""
        role = self.role
        if role.at_once:
            return role.items
        return min(role.micro_batch * len(self.ranks), role.items - role.rounds_taken)


class SimTurn:
    __slots__ = ("beside", "fed_inside", "idle_left", "load_factor", "role", "share", "workers")

    def __init__(self, role: SimRole) -> None:
        self.role = role
        self.workers: list[SimWorker] = []
        self.share = 0  # units that end a worker's turn; 0: the end of the step
        self.fed_inside = False
        self.idle_left = False  # it gave its last turn back because it was idle
        self.load_factor = 1.0
        self.beside: set[int] = set()  # roles that may load beside its work

    def wants(self) -> bool:
        if self.role.is_gang:
            return self.workers[0].has_work()
        for worker in self.workers:  # noqa: SIM110 - asked a million times a plan, and a generator costs twice as much
            if worker.inbox or worker.in_hand:
                return True
        return False

    def is_ripe(self) -> bool:
        """A role that gave its turn back because it was idle waits for a quarter of what may wait for it; asked while
        nobody of the region works."""
        if self.fed_inside or not self.idle_left or self.role.is_gang:
            return True
        return any(w.in_hand or 4 * len(w.inbox) >= self.role.window for w in self.workers)


class SimRegion:
    __slots__ = (
        "at", "behind", "busy", "impatient", "patience", "preloaded", "ready_at", "shared", "switching", "turns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.turns: list[SimTurn] = []
        self.behind: list[list[SimTurn]] = []  # of each turn, in their order: the others
        self.shared = False
        self.at = -1
        self.busy = 0  # workers at work; all of one role
        self.switching = False
        self.preloaded = -1
        self.ready_at = 0.0
        self.patience, self.impatient = 0, False

    def is_wanted(self, turn: SimTurn) -> bool:
        """By another than `turn`."""
        for other in self.turns:  # noqa: SIM110 - as in SimTurn.wants
            if other is not turn and other.wants():
                return True
        return False
