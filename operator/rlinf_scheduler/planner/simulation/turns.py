"""Who works on which slots: a worker that may have something to do is begun where the slots are its own, or it is its
turn; else the turn changes hands. The rules are rlinf_worker/turns/rule.py's: idle or due, ripe, preload, order.

Everybody calls `kick` behind a change that may be news for a worker, and `occupy` and `leave` around its work. What a
worker then does is its `start`.
"""

from __future__ import annotations

from typing import Final

from rlinf_scheduler.planner.simulation.clock import SimClock
from rlinf_scheduler.planner.simulation.parts import SimRegion, SimRole, SimTurn, SimWorker

PATIENCE_MS: Final = 50.0  # turn_patience_s of the worker's settings


class SimSlots:
    def __init__(self, clock: SimClock, *, turn_ms: float) -> None:
        """`turn_ms`: a change of turn, beside loads and offloads."""
        self._clock, self._turn_ms = clock, turn_ms

    # --- work on them -------------------------------------------------------------------------------------------------
    def occupy(self, worker: SimWorker) -> None:
        if not worker.busy:
            worker.since = self._clock.now
            worker.region.busy += 1
        worker.busy += 1

    def leave(self, worker: SimWorker) -> None:
        worker.busy -= 1
        if not worker.busy:
            worker.region.busy -= 1
            worker.role.used_ms += (self._clock.now - worker.since) * worker.slots

    def used_ms(self, role: SimRole) -> float:
        """The slots' milliseconds that the role has used until now."""
        now = self._clock.now
        for worker in role.workers:
            if worker.busy:
                role.used_ms += (now - worker.since) * worker.slots
                worker.since = now
        return role.used_ms

    def kick(self, worker: SimWorker) -> None:
        region = worker.region
        if not region.shared:
            if not worker.busy or worker.role.lanes:
                worker.start(worker)
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
        is_at_work = bool(worker.busy and worker.role.lanes)  # an engine asks with nothing under way
        if worker.is_due() and not is_at_work and region.is_wanted(turn):
            self._settle(region)
            return
        worker.start(worker)
        if not worker.busy:
            self._settle(region)

    # --- turns --------------------------------------------------------------------------------------------------------
    def _settle(self, region: SimRegion) -> None:
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
                worker_due = worker.is_due()
                if not worker_due and worker.has_work():
                    if holder.beside:
                        self._preload(region, holder)
                    return
                due = due or worker_due
        order = turns if at < 0 else region.behind[at]
        rivals = [turn for turn in order if turn.wants()]
        for turn in rivals:
            if region.impatient or turn.is_ripe():
                self._switch(region, holder, turn, due=due)
                return
        if rivals:
            clock = self._clock
            region.patience += 1
            clock.at(clock.now + PATIENCE_MS, self._impatient, region, region.patience, clock.piece)
        elif due and holder is not None and holder.wants():
            for worker in holder.workers:
                worker.begin_turn()
            for worker in holder.workers:
                if worker.has_work():
                    self.kick(worker)

    def _impatient(self, region: SimRegion, number: int) -> None:
        if number == region.patience and not region.switching:
            region.impatient = True
            self._settle(region)
            region.impatient = False

    def _preload(self, region: SimRegion, holder: SimTurn) -> None:
        for rival in region.behind[region.at]:
            if rival.wants():
                if rival.role.index in holder.beside:
                    region.preloaded = rival.role.index
                    region.ready_at = self._clock.now + rival.role.load_ms * rival.load_factor
                return

    def _switch(self, region: SimRegion, holder: SimTurn | None, turn: SimTurn, *, due: bool) -> None:
        region.switching, region.patience = True, region.patience + 1
        now, piece = self._clock.now, self._clock.piece
        at = now + self._turn_ms
        if at > now:
            piece = (piece, turn.role.index, "turn", now, at)
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
        self._clock.at(at, self._granted, region, region.turns.index(turn), piece)

    def _granted(self, region: SimRegion, at: int) -> None:
        region.switching, region.at = False, at
        turn = region.turns[at]
        for worker in turn.workers:
            worker.begin_turn()
        for worker in turn.workers:
            self.kick(worker)
