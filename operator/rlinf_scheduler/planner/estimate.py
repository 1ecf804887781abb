"""What a candidate will take, about, in some tens of microseconds: which ones are worth a simulation. Pure. For:
search, which decides nothing by it. It may be off either way, and bounds.py never is.

Units flow: each role has them from when its first input does to when its last one does, and works them off at the
pace of the workers that are there by then. On shared slots a role begins when the one before it in the pipeline ends,
and comes and leaves once.
The two ends of each cycle are one stretch: its trips one after the other, or the work of the busier end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from rlinf_scheduler.planner.bounds import Bounds
from rlinf_scheduler.planner.candidate import Candidate, PlannedTurn
from rlinf_scheduler.planner.problem import CycleEdge, InLanes, InRounds, PlanProblem

OFTEN: Final = 2
"""Round trips in which an end of a cycle loses its slots once, where it shares them with a role that it feeds: between
one and all of them, by how the simulator ranks them."""


@dataclass(frozen=True, eq=False)
class Estimate:
    problem: PlanProblem
    bounds: Bounds

    @cached_property
    def _order(self) -> list[str]:
        return pipeline(self.problem)

    def period_ms(self, candidate: Candidate) -> float:
        problem = self.problem
        places: dict[str, list[tuple[int, PlannedTurn]]] = {}
        for at, region in enumerate(candidate.regions):
            for turn in region.turns:
                places.setdefault(turn.role, []).append((at, turn))
        free = [0.0] * len(candidate.regions)
        shared = [len(region.turns) > 1 for region in candidate.regions]
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        begin = problem.weights.lag_ms.value if problem.weights and problem.weights.consumer in problem.first else 0.0
        hand_over = problem.hand_over_ms.value
        for name in self._order:
            inputs, cycle = problem.inputs(name), problem.cycle_of.get(name)
            came = max((self._first_of(name, i, first[i], last[i]) + hand_over for i in inputs), default=begin)
            all_came = max((last[i] + hand_over for i in inputs), default=begin)
            if cycle and name == cycle.back:
                continue
            if cycle:
                begun, over = self._cycle_ms(cycle, candidate, places, free, came=came, all_came=all_came)
                for end in (cycle.front, cycle.back):
                    first[end], last[end] = begun, over
                for at, _ in (*places[cycle.front], *places[cycle.back]):
                    free[at] = over
                continue
            role, choice = problem.role(name), candidate.choices[name]
            each = role.options[choice.option].per_item_ms.value
            workers = candidate_workers(places[name])
            share = -(-problem.units[name] // max(1, workers))
            size = min(choice.micro_batch, share)
            per_batch = role.per_batch_ms.value
            lanes = role.service.lanes if isinstance(role.service, InLanes) else 0
            if isinstance(role.service, InRounds):
                per_batch += role.service.sync_ms.value * (workers - 1) / max(1, workers)
            unit = each + per_batch / (share if lanes else size)
            paces = []
            for at, turn in places[name]:
                switch = self._switch_ms(name, choice.stays) if shared[at] else 0.0
                paces.append((max(free[at] + switch, came), self._pace(name, turn)))
            one = self.bounds.fastest(name)
            over = _worked_off(paces, self.bounds.total(name) * unit)
            piece = lanes * each if lanes else size * each + per_batch if role.is_gang else each + per_batch
            over = max(over, all_came + piece * one, min(t for t, _ in paces) + share * unit * one)
            first[name], last[name] = min(t for t, _ in paces) + piece * one, over
            for at, _ in places[name]:
                free[at] = over
        ended = max((last[name] for name in problem.terminal), default=0.0)
        return ended / (problem.staleness + 1)

    def _first_of(self, name: str, producer: str, first: float, last: float) -> float:
        """When what the producer makes has become the first unit: of several they have to be there."""
        made, taken = self.problem.units[producer], self.problem.units[name]
        return first + max(0.0, last - first) * (made / taken - 1) / (made - 1) if made > taken else first

    @cached_property
    def _paces(self) -> dict[tuple[str, tuple[int, ...]], float]:
        return {}

    def _pace(self, name: str, turn: PlannedTurn) -> float:
        """Work of a worker of speed 1 that is done in a millisecond."""
        key = name, turn.workers
        if key not in self._paces:
            self._paces[key] = self._pace_of(name, turn)
        return self._paces[key]

    def _pace_of(self, name: str, turn: PlannedTurn) -> float:
        role = self.problem.role(name)
        scale = float(role.slots_per_worker**role.scaling)
        speeds = [(pool.speed * scale, n) for pool, n in zip(self.problem.pools, turn.workers, strict=True) if n]
        if role.is_gang:
            return min(speed for speed, _ in speeds) * sum(n for _, n in speeds)
        return sum(speed * n for speed, n in speeds)

    def _switch_ms(self, name: str, stays: bool) -> float:
        role = self.problem.role(name)
        return self.problem.turn_ms.value + (0.0 if stays else role.load_ms.value + role.offload_ms.value)

    def _cycle_ms(
        self,
        cycle: CycleEdge,
        candidate: Candidate,
        places: dict[str, list[tuple[int, PlannedTurn]]],
        free: Sequence[float],
        *,
        came: float,
        all_came: float,
    ) -> tuple[float, float]:
        """When its first units leave it, and its last. `came`, `all_came`: the first that it has, and the last."""
        ends, passage, regions = [], 0.0, []
        front = candidate_workers(places[cycle.front])
        back = candidate_workers(places[cycle.back])
        stages = min(candidate.choices[cycle.front].stages, -(-self.problem.units[cycle.front] // max(1, front)))
        sub_batch = self.problem.units[cycle.front] / max(1, front) / stages
        waves = 1.0  # of units that travel by themselves, and of which fewer do than there are
        if cycle.is_single:
            sub_batch, waves = 1.0, max(1.0, sub_batch)
        crowd = max(1.0, front / back) / stages if stages > 1 else max(1.0, front / back)
        for name in (cycle.front, cycle.back):
            role, choice = self.problem.role(name), candidate.choices[name]
            each, per_batch = role.options[choice.option].per_item_ms.value, role.per_batch_ms.value
            one = (sub_batch * each + per_batch) * self.bounds.fastest(name)
            passage += one * (crowd if name == cycle.back else 1.0) + cycle.hop_ms.value
            pace = sum(self._pace(name, turn) for _, turn in places[name])
            ends.append(cycle.round_trips * self.bounds.total(name) * (each + per_batch / sub_batch) / pace)
            regions.append({at for at, _ in places[name]})
        in_turns = len(regions[0] & regions[1]) / max(1, len(regions[0] | regions[1]))
        switch = sum(self._switch_ms(n, candidate.choices[n].stays) for n in (cycle.front, cycle.back))
        over = max(passage * cycle.round_trips * waves, max(ends) * (1 - in_turns) + sum(ends) * in_turns)
        if in_turns:
            over += cycle.round_trips * switch
        elif stages > 1:
            over += passage / 2
        for name, at in zip((cycle.front, cycle.back), regions, strict=True):
            if not in_turns and any(len(candidate.regions[i].turns) > 1 for i in at):
                # Its first units are through while it still works on others, and their next role takes the slots.
                over += cycle.round_trips * self._switch_ms(name, candidate.choices[name].stays) / OFTEN
        begun = max((free[at] for of_end in regions for at in of_end), default=0.0)
        begun = max(begun, came)
        last = max(begun + over, all_came + passage * cycle.round_trips)
        return begun + over * (1 - 0.5 * (stages > 1) / cycle.round_trips), last


def candidate_workers(places: Sequence[tuple[int, PlannedTurn]]) -> int:
    return sum(sum(turn.workers) for _, turn in places)


def _worked_off(paces: Sequence[tuple[float, float]], work: float) -> float:
    """When the workers that begin at these times, at these paces, are through."""
    at, pace, left = 0.0, 0.0, work
    for begin, more in sorted(paces):
        if pace and left <= pace * (begin - at):
            break
        left -= pace * (begin - at)
        at, pace = begin, pace + more
    return at + left / pace if pace else float("inf")


def pipeline(problem: PlanProblem) -> list[str]:
    """Roles in the order in which a unit meets them."""
    found: list[str] = []
    front_of = {cycle.back: cycle.front for cycle in problem.cycles}

    def visit(name: str) -> None:
        if name not in found:
            for before in (*problem.inputs(name), *((front_of[name],) if name in front_of else ())):
                visit(before)
            found.append(name)

    for role in problem.roles:
        visit(role.name)
    return found
