"""Trips of units round a cycle: who asks, by which of its answerers, and what becomes of the last answer. A passage is
(step, units, came from); no units: the last answer of one that left at the back.

The front asks in sub-batches, or unit by unit (`is_single`), as many at once as there are stages; who answers whom is
as in rlinf_worker/driver/routes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlinf_scheduler.planner.problem import CycleEdge
from rlinf_scheduler.planner.simulation.clock import SimClock
from rlinf_scheduler.planner.simulation.parts import SimRole, SimWorker
from rlinf_scheduler.planner.simulation.turns import SimSlots


class SimTrips:
    def __init__(
        self,
        clock: SimClock,
        slots: SimSlots,
        *,
        emit: Callable[[SimRole, Sequence[int]], None],
        receiver: SimRole | None,
        weights_at: Mapping[int, float],
    ) -> None:
        """`receiver`: the role that answers by the weights of a step, which it has at `weights_at`."""
        self._clock, self._slots, self._emit = clock, slots, emit
        self._receiver, self._weights_at = receiver, weights_at

    def deal(self, front: SimRole, step: int) -> None:
        """Tickets are pinned: every front worker's share, in as many sub-batches as there are stages, or by unit."""
        units, count = range(step * front.items, (step + 1) * front.items), len(front.workers)
        assert front.cycle is not None
        for number, worker in enumerate(front.workers):
            share = units[number::count]
            stages = len(share) if front.cycle.is_single else min(len(share), front.stages)
            worker.inbox.extend((step, share[at::stages], 0) for at in range(stages))
            self._slots.kick(worker)

    def share_out(self, front: SimRole, units: Sequence[int]) -> None:
        """What another role makes goes to who has fewest that go round, one by one."""
        for unit in units:
            worker = min(front.workers, key=lambda w: (w.has, w.number))
            worker.has += 1
            worker.inbox.append((unit // front.items, (unit,), 0))
            self._slots.kick(worker)

    # --- work at one end ----------------------------------------------------------------------------------------------
    def start_passage(self, worker: SimWorker) -> None:
        if not worker.busy and self._has_question(worker):
            self._begin(worker, worker.inbox.popleft())

    def start_in_lanes(self, worker: SimWorker) -> None:
        """An engine works on several at once: a unit holds a lane, and a passage as many as it has units."""
        lanes = worker.role.lanes
        while self._has_question(worker):
            wanted = min(lanes, len(worker.inbox[0][1]))
            if worker.free < wanted:
                return
            worker.free -= wanted
            self._begin(worker, worker.inbox.popleft())

    def _has_question(self, worker: SimWorker) -> bool:
        """Behind what takes no work: last answers, and first questions of a front that feeds another role."""
        role, inbox = worker.role, worker.inbox
        asks_first = role.asker_feeds and role.is_front
        while inbox:
            passage = inbox[0]
            if passage[1] and (passage[2] or not asks_first):
                return True
            inbox.popleft()
            worker.note(passage[0], 1)
            if passage[1]:
                self._ask(worker, passage)
            else:
                worker.asked -= 1
                self._go_on_asking(worker)
        return False

    def _begin(self, worker: SimWorker, passage: tuple[Any, ...]) -> None:
        role, clock, (step, units, _) = worker.role, self._clock, passage
        sizes, per_batch = role.size, role.per_batch
        work = sum(sizes[unit % len(sizes)] for unit in units) if sizes else len(units)
        if role.lanes:  # the last of them to end; what work on no unit takes is of a step's first passage
            longest = max(sizes[unit % len(sizes)] for unit in units) if sizes else 1.0
            work = max(work, role.lanes * longest)
            per_batch, worker.begun = per_batch if step > worker.begun else 0.0, max(step, worker.begun)
        self._slots.occupy(worker)
        worker.note(step, 1)
        at = clock.now + (per_batch + role.per_item * work) * worker.factor
        clock.at(at, self._passage_over, worker, passage, (clock.piece, role.index, "compute", clock.now, at))

    def _passage_over(self, worker: SimWorker, passage: tuple[Any, ...]) -> None:
        _, units, came_from = passage
        self._slots.leave(worker)
        role = worker.role
        if role.lanes:
            worker.free += min(role.lanes, len(units))
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
            self._send(came_from[0], passage, at=self._clock.now + cycle.hop_ms.value)
        else:
            self._emit(role, units)
            self._through(cycle, passage)
        self._slots.kick(worker)

    def _through(self, cycle: CycleEdge, passage: tuple[Any, ...]) -> None:
        """A unit left at the back. Its last answer is no work for the front, who asks for another one then."""
        step, _, (asker, trips) = passage
        asker.has -= 1
        if cycle.is_single and asker.to_ask:
            self._send(asker, (step, (), (None, trips)), at=self._clock.now + cycle.hop_ms.value)
        else:
            asker.asked -= 1

    def _ask(self, worker: SimWorker, passage: tuple[Any, ...]) -> None:
        worker.to_ask.append(passage)
        self._go_on_asking(worker)

    def _go_on_asking(self, worker: SimWorker) -> None:
        """Units that travel by themselves take turns question by question, as many at once as there are stages."""
        cycle, stages = worker.role.cycle, worker.role.stages
        assert cycle is not None
        while worker.to_ask and (worker.asked < stages or not cycle.is_single):
            step, units, came_from = worker.to_ask.popleft()
            worker.asked += 1
            _, trips = came_from or (None, 0)
            answerer = min(worker.asks, key=lambda w: (w.in_hand + len(w.inbox) + w.busy, w.number))
            ready = self._weights_at[step] if answerer.role is self._receiver else 0.0
            at = max(self._clock.now + cycle.hop_ms.value, ready)
            self._send(answerer, (step, units, (worker, trips + 1)), at=at)

    def _send(self, to: SimWorker, passage: tuple[Any, ...], *, at: float) -> None:
        to.in_hand += 1
        self._clock.at(at, self._here, to, passage, self._clock.piece)
        if to.region.shared:
            self._slots.kick(to)

    def _here(self, worker: SimWorker, passage: tuple[Any, ...]) -> None:
        worker.in_hand -= 1
        worker.inbox.append(passage)
        self._slots.kick(worker)
