"""What a candidate takes at least, in microseconds of thinking: never more than the simulator says, so that leaving out
what cannot win loses nothing. Pure. For: search.

    a role      its work over the speed of its workers, whole units where all are of one size
    a region    its roles one after the other, with what a change of turn cannot hide
    a step      the way of the first unit to a role, the role's work, the way of its last unit to the end
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from rlinf_scheduler.planner.candidate import Candidate, PlannedTurn, Region
from rlinf_scheduler.planner.problem import InLanes, InRounds, PlanProblem, RoleCosts

SLACK: Final = 1 - 1e-9
"""Sums in another order come out a rounding error apart."""
OF_MEANS: Final = 0.98
"""With staleness a period may be the mean of steps that do not repeat, and by chance of short ones."""


@dataclass(frozen=True, eq=False)
class Bounds:
    problem: PlanProblem

    @cached_property
    def _trips(self) -> dict[str, int]:
        return {name: cycle.round_trips for name, cycle in self.problem.cycle_of.items()}

    @cached_property
    def _totals(self) -> dict[str, float]:
        """The sizes of a step's units added up, by role, for the mean step."""
        found = {}
        for role in self.problem.roles:
            found[role.name] = 0.0
            for sizes in role.all_sizes:
                whole, rest = divmod(self.problem.units[role.name], len(sizes))
                found[role.name] += (whole * sum(sizes) + sum(sizes[:rest])) / len(role.all_sizes)
        return found

    @cached_property
    def _even(self) -> dict[str, bool]:
        return {role.name: all(set(sizes) == {1.0} for sizes in role.all_sizes) for role in self.problem.roles}

    @cached_property
    def _works(self) -> dict[tuple[str, tuple[int, ...], float], float]:
        return {}

    @cached_property
    def _turn_times(self) -> dict[tuple[object, ...], float]:
        return {}

    def trips(self, name: str) -> int:
        return self._trips.get(name, 1)

    def total(self, name: str) -> float:
        return self._totals[name]

    @cached_property
    def _is_even_speed(self) -> bool:
        return len({pool.speed for pool in self.problem.pools}) == 1

    def fastest(self, name: str) -> float:
        return self._fastest[name]

    @cached_property
    def _fastest(self) -> dict[str, float]:
        """The factor on a role's times in the fastest pool that may run it."""
        found = {}
        for role in self.problem.roles:
            speeds = [pool.speed for pool in self.problem.pools if role.name in pool.roles]
            found[role.name] = 1.0 / (max(speeds, default=1.0) * role.slots_per_worker**role.scaling)
        return found

    def work_ms(self, role: RoleCosts, workers: Sequence[int], *, per_item_ms: float) -> float:
        """All of a step's units by these workers, per pool, with nothing to wait for."""
        key = (role.name, tuple(workers), per_item_ms)
        if key not in self._works:
            self._works[key] = self._work_ms(role, workers, per_item_ms=per_item_ms)
        return self._works[key]

    def _work_ms(self, role: RoleCosts, workers: Sequence[int], *, per_item_ms: float) -> float:
        scale = float(role.slots_per_worker**role.scaling)
        speeds = [(p.speed * scale, n) for p, n in zip(self.problem.pools, workers, strict=True) if n]
        count = sum(n for _, n in speeds)
        if not count:
            return float("inf")
        fast, slow = max(s for s, _ in speeds), min(s for s, _ in speeds)
        items, trips = self.problem.units[role.name], self._trips.get(role.name, 1)
        per_batch, even = role.per_batch_ms.value, self._even[role.name]
        if isinstance(role.service, InRounds):
            sync = role.service.sync_ms.value * (count - 1) / count
            part = max(-(-items // count) / fast, (items // count) / slow) if even else 0.0
            return per_item_ms * max(part, self._totals[role.name] / count / fast) + (per_batch + sync) / slow
        together = sum(s * n for s, n in speeds)
        if self.problem.staleness:
            # Steps overlap: a long unit of one runs beside the next one's, and a worker may have no unit of a step.
            once = 0.0 if isinstance(role.service, InLanes) else per_batch
            return trips * (per_item_ms * self._totals[role.name] + once) / together
        units = -(-items // count) / fast if even and not isinstance(role.service, InLanes) else 0.0
        own = max(self._totals[role.name] / together, units)
        if isinstance(role.service, InLanes):
            largest = sum(max(sizes[:items]) for sizes in role.all_sizes) / len(role.all_sizes)
            own = max(own, role.service.lanes * largest / fast)
        busy = items >= count  # else some worker may have nothing
        return trips * (per_item_ms * own + (per_batch / fast if busy else 0.0))

    def turn_ms(
        self, region: Region, turn: PlannedTurn, *, per_item_ms: float, stays: bool, leaves: bool = True
    ) -> float:
        """A role's share of a region that it has with others: its work, and that it leaves, where another one has to
        come, as it is nowhere else."""
        key = (turn.role, turn.workers, len(region.turns) > 1, per_item_ms, stays, leaves)
        if key not in self._turn_times:
            self._turn_times[key] = self._turn_ms(region, turn, per_item_ms=per_item_ms, stays=stays, leaves=leaves)
        return self._turn_times[key]

    def _turn_ms(self, region: Region, turn: PlannedTurn, *, per_item_ms: float, stays: bool, leaves: bool) -> float:
        role, problem = self.problem.role(turn.role), self.problem
        found = self.work_ms(role, turn.workers, per_item_ms=per_item_ms)
        if leaves and len(region.turns) > 1:
            speed = max((p.speed for p, n in zip(problem.pools, turn.workers, strict=True) if n), default=1.0)
            leaving = 0.0 if stays else role.offload_ms.value / speed
            found += (leaving + problem.turn_ms.value) / (problem.staleness + 1)
        if problem.weights and problem.weights.producer == role.name:
            found += problem.weights.sync_ms.value * (len(region.turns) > 1)
        return found

    def period_ms(self, candidate: Candidate) -> float:
        problem = self.problem
        alone: dict[int, float] = {}
        spread: dict[str, list[tuple[int, PlannedTurn]]] = {}
        works: dict[str, float] = {}
        for at, region in enumerate(candidate.regions):
            for turn in region.turns:
                spread.setdefault(turn.role, []).append((at, turn))
        for name, places in spread.items():
            choice, role = candidate.choices[name], problem.role(name)
            per_item = role.options[choice.option].per_item_ms.value
            total = places[0][1].workers
            if len(places) > 1:
                total = tuple(map(sum, zip(*(turn.workers for _, turn in places), strict=True)))
            works[name] = self.work_ms(role, total, per_item_ms=per_item)
            if len(places) == 1:
                at, turn = places[0]
                leaves = any(len(spread[other.role]) == 1 for other in candidate.regions[at].turns if other is not turn)
                ms = self.turn_ms(candidate.regions[at], turn, per_item_ms=per_item, stays=choice.stays, leaves=leaves)
                alone[at] = alone.get(at, 0.0) + ms
        period = max([*alone.values(), *works.values()], default=0.0)
        for name, places in spread.items():
            if len(places) > 1 and self._is_even_speed:  # what it has there, it has beside the others' time
                counts = [sum(turn.workers) for _, turn in places]
                held = sum(alone.get(at, 0.0) * n for (at, _), n in zip(places, counts, strict=True))
                role = problem.role(name)
                share = role.options[candidate.choices[name].option].per_item_ms.value * self._totals[name]
                share *= self._trips.get(name, 1) * self._fastest[name]
                period = max(period, (held + share) / sum(counts))
        slack = OF_MEANS if problem.staleness else SLACK
        return max(period, self._latency_ms(works) / (problem.staleness + 1)) * slack

    def _latency_ms(self, works: dict[str, float]) -> float:
        lag = self.problem.weights.lag_ms.value if self.problem.weights else 0.0
        first = self.problem.weights and self.problem.weights.consumer in self.problem.first
        return max(self._heads[n] + ms + self._tails[n] for n, ms in works.items()) + (lag if first else 0.0)

    def _one_ms(self, role: RoleCosts) -> float:
        """One unit's way through a role."""
        each = min(option.per_item_ms.value for option in role.options) * min(map(min, role.all_sizes))
        lanes = role.service.lanes if isinstance(role.service, InLanes) else 1
        batch = 0.0 if isinstance(role.service, InLanes) else role.per_batch_ms.value
        return (each * lanes + batch) * self._fastest[role.name] * self._trips.get(role.name, 1)

    @cached_property
    def _heads(self) -> dict[str, float]:
        """When a role can have its first unit."""
        found: dict[str, float] = {}

        def head(name: str) -> float:
            if name not in found:
                found[name] = 0.0
                for producer in self.problem.inputs(name):
                    came, ms = head(producer), self._one_ms(self.problem.role(producer))
                    if cycle := self.problem.cycle_of.get(producer):
                        other = cycle.back if producer == cycle.front else cycle.front
                        ms += self._one_ms(self.problem.role(other))
                        ms += (2 * cycle.round_trips - (producer == cycle.back)) * cycle.hop_ms.value
                        came = head(cycle.front)
                    found[name] = max(found[name], came + ms)
            return found[name]

        for role in self.problem.roles:
            head(role.name)
        return found

    @cached_property
    def _tails(self) -> dict[str, float]:
        """From the end of a role's work to the end of the step."""
        found: dict[str, float] = {}

        def tail(name: str) -> float:
            if name not in found:
                outputs = self.problem.outputs(name)
                ways = (self._one_ms(self.problem.role(o)) + tail(o) for o in outputs)
                found[name] = max(ways, default=0.0)
            return found[name]

        for role in self.problem.roles:
            tail(role.name)
        return found
