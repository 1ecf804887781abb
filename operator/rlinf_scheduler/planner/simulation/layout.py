"""The roles, workers and regions of a candidate, as a run begins with them.

lay_out(problem, candidate, classes=1) -> SimLayout(roles=[...], slots=4.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from rlinf_scheduler.planner.candidate import Candidate, PlannedTurn, Region
from rlinf_scheduler.planner.problem import CycleEdge, PlanProblem, RoleCosts
from rlinf_scheduler.planner.simulation.parts import SimRegion, SimRole, SimTurn, SimWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class SimLayout:
    roles: list[SimRole]
    by_name: dict[str, SimRole]
    slots: float
    """The slots of the candidate; with classes, those of the workers that stand for all."""


def lay_out(problem: PlanProblem, candidate: Candidate, *, classes: int) -> SimLayout:
    """`classes`: one worker stands for so many, one unit for as many units."""
    roles = [
        SimRole(
            i,
            role,
            candidate.choices[role.name],
            items=-(-problem.units[role.name] // classes),
            size=_sizes(role, problem.units[role.name], classes),
            bundle=role.bundle if classes == 1 else 1,
        )
        for i, role in enumerate(problem.roles)
    ]
    by_name = {role.spec.name: role for role in roles}
    for role in roles:
        for name in problem.outputs(role.spec.name):
            role.outputs.append((by_name[name], _becomes(role.items, by_name[name].items)))
        _count_parts(role, [by_name[name].items for name in problem.inputs(role.spec.name)])
    for region in candidate.regions:
        _place(problem, region, by_name, classes)
    for cycle in problem.cycles:
        _pair(by_name[cycle.front], by_name[cycle.back], cycle, asker_feeds=problem.asker_feeds(cycle))
    return SimLayout(roles=roles, by_name=by_name, slots=candidate.slots / classes)


# --- units ------------------------------------------------------------------------------------------------------------
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


def _count_parts(role: SimRole, made: list[int]) -> None:
    """Counts the parts that each of its units is made of, where `made` are the units of its inputs."""
    if len(made) > 1 or any(n > role.items for n in made):
        role.needs = [0] * role.items
        for n in made:
            for units in _becomes(n, role.items) or [range(i, i + 1) for i in range(n)]:
                for unit in units:
                    role.needs[unit] += 1


def _sizes(role: RoleCosts, items: int, classes: int) -> Sequence[float]:
    """The sizes of the units of all sets, one set after the other; with classes, the mean of as many that are next to
    each other in size, so that their sum stays. Empty: all are 1."""
    found: list[float] = []
    for sizes in role.all_sizes:
        of_step = (sizes * (-(-items // len(sizes))))[:items]
        if classes > 1:
            ranked = sorted(range(items), key=of_step.__getitem__)
            groups = sorted(ranked[at : at + classes] for at in range(0, items, classes))
            of_step = tuple(sum(of_step[i] for i in group) / len(group) for group in groups)
        found += of_step
    return () if set(found) == {1.0} else found


# --- slots ------------------------------------------------------------------------------------------------------------
def _place(problem: PlanProblem, planned: Region, by_name: dict[str, SimRole], classes: int) -> None:
    region = SimRegion()
    region.turns = [_turn(problem, by_name[turn.role], turn, region, classes) for turn in planned.turns]
    region.behind = [[*region.turns[at + 1 :], *region.turns[:at]] for at in range(len(region.turns))]
    region.shared = len(region.turns) > 1
    region.at = -1 if region.shared else 0
    names = {turn.role.spec.name for turn in region.turns}
    memory = [p.memory_mib for p, slots in zip(problem.pools, planned.slots, strict=True) if slots]
    room = min((mib or inf for mib in memory), default=inf)
    for turn in region.turns if region.shared else ():
        fed_by = problem.inputs(turn.role.spec.name)
        turn.fed_inside = bool(fed_by) and names.issuperset(fed_by)
        turn.beside = {other.role.index for other in region.turns if _fits(turn, other, region.turns, room)}


def _turn(problem: PlanProblem, role: SimRole, planned: PlannedTurn, region: SimRegion, classes: int) -> SimTurn:
    spec, turn = role.spec, SimTurn(role)
    scale = float(spec.slots_per_worker**spec.scaling)
    speeds = [(p.speed, n) for p, n in zip(problem.pools, planned.workers, strict=True) if n]
    count = sum(n for _, n in speeds)
    turn.load_factor = 1.0 / min((speed for speed, _ in speeds), default=1.0)
    turn.share = ceil(planned.until / (1 if spec.is_gang else count))
    factors: list[float] = []
    for speed, n in speeds:
        stand = max(1, n // classes)
        factors += [stand * classes / n / (speed * scale) if classes > 1 else 1.0 / (speed * scale)] * stand
    slots = count * spec.slots_per_worker / classes
    if spec.is_gang:
        role.world = count
        whole = SimWorker(role, turn, region, factor=max(factors), slots=slots)
        whole.ranks = factors
        turn.workers.append(whole)
        role.workers.append(whole)
        return turn
    for factor in factors:
        worker = SimWorker(role, turn, region, factor=factor, slots=slots / len(factors))
        turn.workers.append(worker)
        role.workers.append(worker)
        role.heap.append((0, 0, worker.number))
    return turn


def _fits(holder: SimTurn, comes: SimTurn, turns: Sequence[SimTurn], room: float) -> bool:
    """Whether one may load while the other works: only where both declare their memory."""
    if holder is comes or comes.role.stays or not (holder.role.peak and comes.role.spec.resident_mib):
        return False
    others = [t.role for t in turns if t is not holder and t is not comes]
    kept = sum(r.spec.resident_mib if r.stays else r.spec.offloaded_mib for r in others)
    return holder.role.peak + comes.role.spec.resident_mib + kept <= room


def _pair(front: SimRole, back: SimRole, cycle: CycleEdge, *, asker_feeds: bool) -> None:
    """Who answers whom, by rank."""
    for end in (front, back):
        end.cycle, end.asker_feeds = cycle, asker_feeds
    front.is_front = True
    askers, answerers = front.workers, back.workers
    if len(askers) >= len(answerers):
        for i, asker in enumerate(askers):
            asker.asks = [answerers[i % len(answerers)]]
    else:
        for i, answerer in enumerate(answerers):
            askers[i % len(askers)].asks.append(answerer)
