"""Units on their way from role to role: put together of parts, handed out by credit, counted at the end of a step.

The rules are those of rlinf_worker/queues (matching.py, given.py): of those that have room, within microBatch * depth,
to who has least to do, what it works on included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from rlinf_scheduler.planner.simulation.clock import SimClock
from rlinf_scheduler.planner.simulation.parts import SimRole, SimWorker


class SimUnits:
    def __init__(
        self,
        clock: SimClock,
        *,
        hand_over_ms: float,
        kick: Callable[[SimWorker], None],
        to_front: Callable[[SimRole, Sequence[int]], None],
        made: Callable[[int], None],
    ) -> None:
        """`to_front` has what comes to the front of a cycle. `made` is told of a step of which a role that ends it has
        made all units."""
        self._clock, self._hand_over_ms = clock, hand_over_ms
        self._kick, self._to_front, self._made = kick, to_front, made

    def arrive(self, role: SimRole, units: Sequence[int]) -> None:
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
            self._to_front(role, units)
            return
        role.waiting.extend(units)
        for worker in self.hand_out(role):
            self._kick(worker)

    def hand_out(self, role: SimRole) -> Sequence[SimWorker]:
        """To who has least in hand of those that have room, of two the one with more. Returns who was given some."""
        waiting, heap, workers = role.waiting, role.heap, role.workers
        if not waiting:
            return ()
        if len(workers) == 1:
            inbox, room = workers[0].inbox, role.window - len(workers[0].inbox)
            for _ in range(min(room, len(waiting))):
                inbox.append(waiting.popleft())
            return workers if room > 0 else ()
        touched: dict[int, SimWorker] = {}
        while waiting and heap:
            in_hand, held, number = heappop(heap)
            worker = workers[number]
            is_of_the_past = held != len(worker.inbox) or in_hand != held + worker.working
            if is_of_the_past or held >= role.window:
                continue  # a newer entry is there, or comes with the next that it takes
            bundle = min(role.bundle, len(waiting))
            for _ in range(bundle):
                worker.inbox.append(waiting.popleft())
            heappush(heap, (in_hand + bundle, held + bundle, number))
            touched[number] = worker
        return list(touched.values())

    @staticmethod
    def changed(worker: SimWorker) -> None:
        """What it has in its inbox or in hand."""
        role = worker.role
        if len(role.workers) > 1:
            held = len(worker.inbox)
            heappush(role.heap, (held + worker.working, held, worker.number))

    def emit(self, role: SimRole, units: Sequence[int]) -> None:
        clock = self._clock
        for consumer, becomes in role.outputs:
            sent = units
            if becomes:
                step, base = units[0] // role.items, units[0] // role.items * consumer.items
                sent = [base + part for unit in units for part in becomes[unit - step * role.items]]
            if self._hand_over_ms:
                clock.at(clock.now + self._hand_over_ms, self.arrive, consumer, sent, clock.piece)
            else:
                self.arrive(consumer, sent)
        if not role.outputs:
            step = units[0] // role.items
            role.done[step] = role.done.get(step, 0) + len(units)
            if role.done[step] == role.items:
                self._made(step)
