"""Steps: one is open until all its units are made, its weights reach their receiver, and then the next one but
staleness opens (rlinf_worker/driver/steps.py).

    job = SimJob(problem, candidate, classes=1)
    job.next_commit(until=inf)
    job.commits[-1]          (when, the piece of work that ended it)
"""

from __future__ import annotations

from typing import Any

from rlinf_scheduler.planner.candidate import Candidate
from rlinf_scheduler.planner.problem import PlanProblem
from rlinf_scheduler.planner.simulation.clock import SimClock
from rlinf_scheduler.planner.simulation.layout import lay_out
from rlinf_scheduler.planner.simulation.parts import SimWorker
from rlinf_scheduler.planner.simulation.trips import SimTrips
from rlinf_scheduler.planner.simulation.turns import SimSlots
from rlinf_scheduler.planner.simulation.units import SimUnits
from rlinf_scheduler.planner.simulation.work import SimWork


class SimJob:
    def __init__(self, problem: PlanProblem, candidate: Candidate, *, classes: int) -> None:
        self._problem, self.clock = problem, SimClock()
        self.layout = lay_out(problem, candidate, classes=classes)
        self._hand_over_ms = problem.hand_over_ms.value
        by_name, weights = self.layout.by_name, problem.weights
        self._publisher = by_name[weights.producer] if weights else None
        self._receiver = by_name[weights.consumer] if weights else None
        self._sync_ms = weights.sync_ms.value if weights else 0.0
        self._lag_ms = weights.lag_ms.value if weights else 0.0
        self._weights_at: dict[int, float] = {}
        """When the receiver has the weights of a step."""
        self._terminal = [by_name[name] for name in problem.terminal]
        self.commits: list[tuple[float, Any]] = []
        self.used_ms: list[list[float]] = []
        """The slots' milliseconds that each role has used, as of each commit."""
        self._slots = slots = SimSlots(self.clock, turn_ms=problem.turn_ms.value)
        self._units = units = SimUnits(
            self.clock, hand_over_ms=self._hand_over_ms, kick=slots.kick, made=self._made,
            to_front=lambda role, units: self._trips.share_out(role, units),
        )  # fmt: skip
        self._trips = trips = SimTrips(
            self.clock, slots, emit=units.emit, receiver=self._receiver, weights_at=self._weights_at
        )
        work = SimWork(self.clock, slots, units)
        for role in self.layout.roles:
            for worker in role.workers:
                if worker.ranks:
                    worker.start = work.start_round
                elif role.cycle is not None:
                    worker.start = trips.start_in_lanes if role.lanes else trips.start_passage
                else:
                    worker.start = work.start_lanes if role.lanes else work.start_batch

    def begin(self) -> None:
        """Time 0 counts as the commit of the step before the first one."""
        self.commits.append((0.0, None))
        self.used_ms.append([0.0] * len(self.layout.roles))
        for step in range(self._problem.staleness + 1):
            self._open(step)

    def next_commit(self, *, until: float) -> None:
        """Raises Aborted where it comes later."""
        self.clock.run(self.commits, until=until)

    def _open(self, step: int) -> None:
        clock = self.clock
        self._weights_at[step] = received = clock.now + self._lag_ms
        for name in self._problem.first:
            role = self.layout.by_name[name]
            if role.is_front:
                clock.at(clock.now + self._hand_over_ms, self._trips.deal, role, step, clock.piece)
            else:
                at = received if role is self._receiver else clock.now
                units = range(step * role.items, (step + 1) * role.items)
                clock.at(at + self._hand_over_ms, self._units.arrive, role, units, clock.piece)

    def _made(self, step: int) -> None:
        """All units of one of the roles that end it."""
        if any(role.done.get(step, 0) < role.items for role in self._terminal):
            return
        clock = self.clock
        self.commits.append((clock.now, clock.piece))
        self.used_ms.append([self._slots.used_ms(role) for role in self.layout.roles])
        for role in self._terminal:
            for worker in role.workers:
                worker.step_ended = True
        if self._publisher is not None and self._sync_ms:
            over = clock.now + self._sync_ms
            for worker in self._publisher.workers:
                self._slots.occupy(worker)
                piece = (clock.piece, self._publisher.index, "weights", clock.now, over)
                clock.at(over, self._published, worker, None, piece)
        self._open(step + 1 + self._problem.staleness)

    def _published(self, worker: SimWorker, _: None) -> None:
        self._slots.leave(worker)
        self._slots.kick(worker)
