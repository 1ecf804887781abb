"""Problems for the planner, of workload entries and drawn. The planner itself never reads a workload: here an entry's
own numbers stand in for what a profile would measure.

For: tests/unit/rlinf_scheduler, tools/prove, tools/bench/planner.py.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rlinf_scheduler.planner.problem import (
    Cost,
    CycleEdge,
    InBatches,
    InLanes,
    InRounds,
    Option,
    PlanProblem,
    Pool,
    Provenance,
    QueueEdge,
    RoleCosts,
    Service,
    WeightsEdge,
)
from rlinf_worker.channels import lineage
from rlinf_worker.roles.synthetic.figures import Figures
from tools.workloads import MAX_PER_POD

HAND_OVER_MS: Final = 2.0
"""A unit's way from one role to the next: through the driver, on a machine with work of its own."""
TURN_MS: Final = 1.7
"""docs/turns.md: a change of turn in one pod."""


def _number(value: float) -> Cost:
    return Cost(float(value), by=Provenance.MEASURED)


def of_entry(
    entry: Mapping[str, Any],
    *,
    items: int | None = None,
    time_scale: float = 1.0,
    hand_over_ms: float = 0.0,
    turn_ms: float = 0.0,
    lag_ms: float | None = None,
    steps: Sequence[int] = (1,),
) -> PlanProblem:
    """As tools.workloads.job makes a job of it. `lag_ms`: when receivers have the weights; None: as the entry is
    defined, when their sync is over. `steps`: those whose units' sizes are taken."""
    count = min(items or entry["items"], entry["items"])
    drawn = [[lineage.sample(entry["name"], step, index=i, sample=0) for i in range(count)] for step in steps]
    weights = next((e for e in entry["edges"] if e.get("weights")), None)
    sync = float(weights["syncMs"]) * time_scale if weights else 0.0
    cycle = entry.get("cycle")
    return PlanProblem(
        roles=tuple(_role(role, entry, drawn, time_scale) for role in entry["roles"]),
        edges=tuple(QueueEdge(e["from"], e["to"]) for e in entry["edges"] if not e.get("weights")),
        weights=WeightsEdge(weights["from"], weights["to"], _number(sync), _number(sync if lag_ms is None else lag_ms))
        if weights
        else None,
        cycles=(_cycle(cycle, time_scale),) if cycle else (),
        pools=tuple(
            Pool(
                name=p["name"], slots=p["slots"], memory_mib=p["memory"], roles=tuple(p["roles"]),
                speed=p.get("speed", 1.0), slots_per_pod=min(p["slots"], MAX_PER_POD),
            )
            for p in entry["pools"]
        ),
        items=count,
        staleness=entry.get("staleness", 0),
        hand_over_ms=_number(hand_over_ms),
        turn_ms=_number(turn_ms),
    )  # fmt: skip


def _cycle(cycle: Mapping[str, Any], scale: float) -> CycleEdge:
    front, back = cycle["roles"]
    return CycleEdge(front, back, cycle["roundTrips"], _number(cycle["hopMs"] * scale))


def _role(role: Mapping[str, Any], entry: Mapping[str, Any], keys: Sequence[Sequence[str]], scale: float) -> RoleCosts:
    time, memory, name = role["time"], role["memory"], role["name"]
    figures = Figures.of(role, role=name, workload=entry["name"])
    slots = sum(p["slots"] for p in entry["pools"] if name in p["roles"])
    per_worker = role.get("slotsPerWorker", 1)
    service: Service = InBatches()
    if role.get("gang"):
        ranks = tuple(r for r in role.get("ranks", ()) if r * per_worker <= slots)
        service = InRounds(sync_ms=_number(role.get("syncMs", 0.0) * scale), ranks=ranks)
    elif role["service"] == "concurrent":
        service = InLanes(lanes=role["lanes"])
    sizes = [tuple(map(figures.size, of_step)) for of_step in keys] if time["sigma"] else [(1.0,)]
    options = [{"peak": memory["peak"], "perItemMs": time["perItemMs"]}, *role.get("options", ())]
    return RoleCosts(
        name=name,
        service=service,
        options=tuple(Option(per_item_ms=_number(o["perItemMs"] * scale), peak_mib=float(o["peak"])) for o in options),
        per_batch_ms=_number(time["perBatchMs"] * scale),
        sizes=sizes[0],
        later_sizes=tuple(sizes[1:]),
        load_ms=_number(role["loadMs"] * scale),
        offload_ms=_number(role["offloadMs"] * scale),
        resident_mib=float(memory["resident"]),
        offloaded_mib=float(memory["offloaded"]),
        slots_per_worker=per_worker,
        scaling=role.get("scaling", 1.0),
        most=max(1, slots // per_worker),
    )


def like_ppo(problem: PlanProblem, *, is_single: bool = True) -> PlanProblem:
    """The same with the one who asks in its cycle feeding the next role, whose gang trains when all units are there."""
    if not problem.cycles:
        return problem
    (cycle,) = problem.cycles
    edges = tuple(replace(e, producer=cycle.front) if e.producer == cycle.back else e for e in problem.edges)
    roles = tuple(
        replace(role, service=replace(role.service, at_once=True)) if isinstance(role.service, InRounds) else role
        for role in problem.roles
    )
    return replace(problem, edges=edges, roles=roles, cycles=(replace(cycle, is_single=is_single),))


def tiny(seed: int, *, slots: int = 3) -> PlanProblem:
    """At most `slots` x 3 roles x 8 units: small enough to try every plan. Cycles, staleness and memory included."""
    rng = random.Random(f"tiny {slots} {seed}")
    cyclic = rng.random() < 0.35
    names = ["env", "roll", "train"] if cyclic else ["roll", "reward", "train"][rng.choice([0, 0, 1]) :]
    names = names if cyclic else ["roll", *names[1:]] if len(names) == 3 else ["roll", "train"]
    count, items = rng.randint(2, slots), rng.randint(2, 8)
    room = rng.choice([0.0, 100.0, 100.0])
    roles = []
    for name in names:
        load = rng.choice([0.0, 1.0, 8.0])
        service: Service = InBatches()
        if name == "train":
            service = InRounds(sync_ms=_number(rng.choice([0.0, 1.0])), ranks=rng.choice([(), (1, 2, 4)]))
        elif name == "roll" and not cyclic and rng.random() < 0.4:
            service = InLanes(lanes=rng.choice([2, 3]))
        peak = rng.choice([30.0, 60.0])
        options = [Option(per_item_ms=_number(rng.randint(1, 12)), peak_mib=peak)]
        if name == "train" and rng.random() < 0.3:
            options.append(Option(per_item_ms=_number(rng.randint(1, 12)), peak_mib=peak / 2))
        sizes = tuple(rng.choice([0.5, 1.0, 2.0]) for _ in range(items)) if rng.random() < 0.4 else (1.0,)
        roles.append(
            RoleCosts(
                name=name, service=service, options=tuple(options), per_batch_ms=_number(rng.choice([0, 1, 4])),
                sizes=sizes, load_ms=_number(load), offload_ms=_number(load * 0.8), resident_mib=peak / 3,
                offloaded_mib=rng.choice([0.0, 5.0]), may_stay=rng.random() < 0.3,
                slots_per_worker=2 if name == "roll" and count >= 3 and rng.random() < 0.2 else 1, scaling=0.8,
            )
        )  # fmt: skip
    edges = [QueueEdge(a, b) for a, b in zip(names[cyclic:], names[1 + cyclic :], strict=False)]
    sync = _number(rng.choice([0.0, 2.0]))
    pools: tuple[Pool, ...] = (Pool(name="gpu", slots=count, memory_mib=room, roles=tuple(names)),)
    if count > 2 and rng.random() < 0.2:
        slow = Pool(name="slow", slots=1, memory_mib=room, roles=tuple(names), speed=0.5)
        pools = (Pool(name="gpu", slots=count - 1, memory_mib=room, roles=tuple(names)), slow)
    return PlanProblem(
        roles=tuple(roles), edges=tuple(edges), pools=pools, items=items, staleness=rng.choice([0, 0, 1, 2]),
        weights=WeightsEdge("train", "roll", sync, sync), turn_ms=_number(rng.choice([0.0, 0.5])),
        cycles=(CycleEdge("env", "roll", rng.choice([1, 2, 4]), _number(rng.choice([0.0, 0.5]))),) if cyclic else (),
    )  # fmt: skip


def groups(seed: int, *, slots: int = 3) -> PlanProblem:
    """The same problems as `tiny` with units that are split and put together: of a few prompts several samples each, of
    these a group, and sometimes one sample less than that, as behind a filter."""
    rng, problem = random.Random(f"groups {slots} {seed}"), tiny(seed, slots=slots)
    few = rng.randint(1, 3)
    many = few * rng.choice([2, 3])
    counts = {r.name: rng.choice([few, few, many, many, many, max(few, many - 1)]) for r in problem.roles}
    counts |= {cycle.back: counts[cycle.front] for cycle in problem.cycles}
    last = problem.terminal[0]
    if len(set(counts.values())) == 1:
        counts[last] = few if counts[last] != few else many
    roles = tuple(replace(role, items=counts[role.name]) for role in problem.roles)
    return replace(problem, roles=roles, items=counts[last])


def tokens(seed: int, *, slots: int = 3) -> PlanProblem:
    """The same problems as `tiny` with units that are long for one role and so for all, other ones in every second
    step: as where work goes by a unit's tokens."""
    rng, problem = random.Random(f"tokens {slots} {seed}"), tiny(seed, slots=slots)
    steps = tuple(tuple(rng.choice([0.25, 0.5, 1.0, 3.0]) for _ in range(problem.items)) for _ in range(2))
    roles = tuple(replace(role, sizes=steps[0], later_sizes=steps[1:], tokens=512.0) for role in problem.roles)
    return replace(problem, roles=roles)


def two_cycles(seed: int, *, slots: int = 3) -> PlanProblem:
    """Four roles, each worker of one slot: what leaves the first cycle, at either end, goes round the second, whose
    back ends the step."""
    rng = random.Random(f"two cycles {slots} {seed}")
    items, names = rng.randint(2, 3), ("env", "roll", "agent", "judge")
    room = rng.choice([0.0, 100.0])
    roles = []
    for name in names:
        load, peak = rng.choice([0.0, 1.0, 8.0]), rng.choice([30.0, 60.0])
        roles.append(
            RoleCosts(
                name=name, options=(Option(per_item_ms=_number(rng.randint(1, 12)), peak_mib=peak),),
                per_batch_ms=_number(rng.choice([0, 1])), load_ms=_number(load), offload_ms=_number(load * 0.8),
                resident_mib=10.0, offloaded_mib=rng.choice([0.0, 5.0]),
                sizes=tuple(rng.choice([0.5, 1.0, 2.0]) for _ in range(items)) if rng.random() < 0.3 else (1.0,),
            )
        )  # fmt: skip
    leaves = "env" if rng.random() < 0.5 else "roll"
    cycles = (
        CycleEdge("env", "roll", rng.choice([1, 2]), _number(rng.choice([0.0, 0.5])), is_single=rng.random() < 0.5),
        CycleEdge("agent", "judge", rng.choice([1, 3]), _number(rng.choice([0.0, 0.5])), is_single=True),
    )
    return PlanProblem(
        roles=tuple(roles), edges=(QueueEdge(leaves, "agent"),), cycles=cycles, items=items,
        pools=(Pool(name="gpu", slots=slots, memory_mib=room, roles=names),), staleness=rng.choice([0, 0, 1]),
        turn_ms=_number(rng.choice([0.0, 0.5])),
    )  # fmt: skip
