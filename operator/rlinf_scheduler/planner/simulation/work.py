"""Work on units, as synthetic roles do it (rlinf_worker/roles/synthetic): a serial worker's micro-batches, an engine's
lanes, a gang's rounds. Each of the three is a worker's `start`.
"""

from __future__ import annotations

from rlinf_scheduler.planner.problem import InRounds
from rlinf_scheduler.planner.simulation.clock import SimClock
from rlinf_scheduler.planner.simulation.parts import SimWorker
from rlinf_scheduler.planner.simulation.turns import SimSlots
from rlinf_scheduler.planner.simulation.units import SimUnits


class SimWork:
    def __init__(self, clock: SimClock, slots: SimSlots, units: SimUnits) -> None:
        self._clock, self._slots, self._units = clock, slots, units

    # --- one after the other ------------------------------------------------------------------------------------------
    def start_batch(self, worker: SimWorker) -> None:
        inbox = worker.inbox
        if worker.busy or not inbox:
            return
        role, items, clock = worker.role, worker.role.items, self._clock
        batch = [inbox.popleft()]
        step = batch[0] // items
        while inbox and len(batch) < role.micro_batch and inbox[0] // items == step:
            batch.append(inbox.popleft())
        worker.working = len(batch)
        self._slots.occupy(worker)
        worker.note(step, len(batch))
        now, cause, last = clock.now, clock.piece, batch[-1]
        at, each, sizes = now + role.per_batch * worker.factor, role.per_item * worker.factor, role.size
        for unit in batch:
            at += each * sizes[unit % len(sizes)] if sizes else each
            piece = (cause, role.index, "compute", now, at)
            clock.at(at, self._batch_over if unit == last else self._made, worker, unit, piece)
        self._units.changed(worker)
        for other in self._units.hand_out(role):
            if other is not worker and not other.busy:
                self._slots.kick(other)

    def _made(self, worker: SimWorker, unit: int) -> None:
        worker.working -= 1
        self._units.changed(worker)
        self._units.emit(worker.role, (unit,))

    def _batch_over(self, worker: SimWorker, unit: int) -> None:
        self._slots.leave(worker)
        self._made(worker, unit)
        self._slots.kick(worker)

    # --- in lanes -----------------------------------------------------------------------------------------------------
    def start_lanes(self, worker: SimWorker) -> None:
        """A step's per-batch time goes before its first unit."""
        role, items, clock = worker.role, worker.role.items, self._clock
        while worker.free and worker.inbox:
            step = worker.inbox[0] // items
            if step > worker.begun:
                worker.begun = step
                ms = role.per_batch * worker.factor
                if ms > 0:
                    worker.note(step, 0)
                    self._slots.occupy(worker)
                    piece = (clock.piece, role.index, "compute", clock.now, clock.now + ms)
                    worker.free = -worker.free  # nothing is taken meanwhile
                    clock.at(clock.now + ms, self._step_begun, worker, None, piece)
                    return
            if worker.free < 0:
                return
            unit = worker.inbox.popleft()
            worker.free -= 1
            worker.working += 1
            self._slots.occupy(worker)
            worker.note(step, 1)
            size = role.size[unit % len(role.size)] if role.size else 1.0
            at = clock.now + role.lanes * role.per_item * worker.factor * size
            clock.at(at, self._lane_over, worker, unit, (clock.piece, role.index, "compute", clock.now, at))
            self._units.changed(worker)
            for other in self._units.hand_out(role):
                if other is not worker:
                    self._slots.kick(other)

    def _step_begun(self, worker: SimWorker, _: None) -> None:
        worker.free = -worker.free
        self._slots.leave(worker)
        self._slots.kick(worker)

    def _lane_over(self, worker: SimWorker, unit: int) -> None:
        worker.free += 1 if worker.free >= 0 else -1
        self._slots.leave(worker)
        self._made(worker, unit)
        self._slots.kick(worker)

    # --- in rounds ----------------------------------------------------------------------------------------------------
    def start_round(self, worker: SimWorker) -> None:
        if worker.busy or not worker.has_work():
            return
        role, ranks, clock = worker.role, worker.ranks, self._clock
        step, size = role.step, worker.round()
        units = [role.by_step[step].popleft() for _ in range(size)]
        role.rounds_taken += size
        if role.rounds_taken == role.items:
            del role.by_step[step]
            role.step, role.rounds_taken = step + 1, 0
        loads = [0.0] * len(ranks)
        for number, unit in enumerate(units):
            loads[number % len(ranks)] += role.size[unit % len(role.size)] if role.size else 1.0
        service = role.spec.service
        assert isinstance(service, InRounds)
        slowest = max(role.per_item * load * factor for load, factor in zip(loads, ranks, strict=True))
        sync = service.sync_ms.value * (role.world - 1) / role.world
        over = clock.now + (slowest + (role.per_batch + sync) * worker.factor)
        self._slots.occupy(worker)
        worker.note(step, 1)
        clock.at(over, self._round_over, worker, units, (clock.piece, role.index, "compute", clock.now, over))

    def _round_over(self, worker: SimWorker, units: list[int]) -> None:
        self._slots.leave(worker)
        self._units.emit(worker.role, units)
        self._slots.kick(worker)
