"""A plan, expanded: which worker has which slots. `resolve` turns ranges into the frozen `Placement` that operator,
driver and agents work with, and is where an inconsistent plan is refused.

Rules that need more than slots and names are in `plan_rules`, which calls this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rlinf_api import declared, lease_sets
from rlinf_api import slots as slot_ranges
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import RLJobSpec
from rlinf_api.names import worker_id
from rlinf_api.plan import ChannelPlan, RLPlanSpec
from rlinf_api.slots import PlacedWorker, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A plan, expanded and checked against the job.

    Placement(revision=1, pods={"gpu": 1}, channels={}, stages={frozenset({"env", "rollout"}): 2},
              workers=(PlacedWorker(id="rollout/0", role="rollout", rank=0, world=1, slots=(Slot("gpu", 0, 0),)),))
    """

    revision: int
    workers: tuple[PlacedWorker, ...]
    pods: dict[str, int]
    channels: dict[str, ChannelPlan]
    stages: dict[frozenset[str], int]
    lease_sets: tuple[lease_sets.PlacedSet, ...] = ()

    def places(self) -> set[tuple[str, int]]:
        """Every pod, with or without a worker: (pool, ordinal)."""
        return {(pool, ordinal) for pool, count in self.pods.items() for ordinal in range(count)}

    def of_role(self, role: str) -> tuple[PlacedWorker, ...]:
        return tuple(w for w in self.workers if w.role == role)

    def in_pod(self, pool: str, ordinal: int) -> tuple[PlacedWorker, ...]:
        return tuple(w for w in self.workers if w.pod == (pool, ordinal))

    def channel(self, name: str) -> ChannelPlan:
        return self.channels.get(name) or ChannelPlan(name=name)


NO_PLAN: Final = Placement(revision=0, workers=(), pods={}, channels={}, stages={})
"""What is in force before the first plan: nobody is placed anywhere."""


def resolve(plan: RLPlanSpec, job: RLJobSpec) -> Placement:
    """Expand the ranges and refuse what cannot be executed, naming the entry."""
    _names_once(plan)
    pods = {p.name: p.pods for p in plan.pools}
    known_roles = {r.name: r for r in job.roles}
    worlds = _counts(plan)
    workers: list[PlacedWorker] = []
    ranks: Counter[str] = Counter()
    slots = _Slots(plan, job, pods=pods)
    for entry in plan.workers:
        what = f"plan revision {plan.revision}: workers of role {entry.role!r}"
        role = known_roles.get(entry.role)
        if role is None:
            raise InvalidManifest(what, got="a role the job does not have", wanted=f"one of {', '.join(known_roles)}")
        allotment = declared.allotment(entry)  # once: a pass of the operator looks at thousands of workers
        for group in slot_ranges.for_workers(
            entry.slots, entry.count, slots_per_worker=role.slots_per_worker, what=what
        ):
            for slot in group:
                slots.take(slot, entry.role, what=what)
            rank, world = ranks[entry.role], worlds[entry.role]
            wid = worker_id(entry.role, rank)
            workers.append(
                PlacedWorker(id=wid, role=entry.role, rank=rank, world=world, slots=group, allotment=allotment)
            )
            ranks[entry.role] += 1
    sets = lease_sets.resolve(plan, job, workers=workers)
    for name in known_roles:
        if not ranks[name]:
            raise InvalidManifest(f"plan revision {plan.revision} has no worker of role {name!r}", next="add one")
    return Placement(
        revision=plan.revision,
        workers=tuple(workers),
        pods=pods,
        channels={c.name: c for c in plan.channels},
        stages={frozenset(c.roles): c.stages for c in plan.cycles},
        lease_sets=sets,
    )


def _counts(plan: RLPlanSpec) -> Counter[str]:
    """Workers of each role, over all of its entries."""
    found: Counter[str] = Counter()
    for entry in plan.workers:
        found[entry.role] += entry.count
    return found


def _names_once(plan: RLPlanSpec) -> None:
    """As the API server has it for lists keyed by name. Without one (local mode) the last would silently win."""
    cycles = [" and ".join(sorted(set(cycle.roles))) for cycle in plan.cycles]
    named: dict[str, Sequence[str]] = {
        "pools": [p.name for p in plan.pools],
        "leaseSets": [s.name for s in plan.lease_sets],
        "channels": [c.name for c in plan.channels],
        "cycles": cycles,
    }
    for where, found in named.items():
        if twice := [name for name, count in Counter(found).items() if count > 1]:
            raise InvalidManifest(
                f"plan revision {plan.revision}: {where}", got=f"{twice[0]!r} twice", wanted="each name once",
                next="remove one of the entries",
            )  # fmt: skip


class _Slots:
    """Who holds which slot: one worker, or, within a lease set, one of each role."""

    def __init__(self, plan: RLPlanSpec, job: RLJobSpec, *, pods: dict[str, int]) -> None:
        self._pods, self._pools = pods, {p.name: p for p in job.pools}
        self._shared = {s for lease in plan.lease_sets for s in slot_ranges.expand(lease.slots)}
        self._taken: dict[Slot, set[str]] = {}

    def take(self, slot: Slot, role: str, *, what: str) -> None:
        pool, pods = self._pools.get(slot.pool), self._pods.get(slot.pool, 0)
        if pool is None or role not in pool.roles:
            raise InvalidManifest(what, got=f"slot {slot}", wanted="a slot of a pool that may run the role")
        if slot.ordinal >= pods or slot.index >= pool.slots.per_pod:
            raise InvalidManifest(
                what, got=f"slot {slot}", wanted=f"ordinal below {pods} and index below {pool.slots.per_pod}",
                next="raise the plan's pods of the pool or choose another slot",
            )  # fmt: skip
        holders = self._taken.setdefault(slot, set())
        if role in holders:
            raise InvalidManifest(
                what, got=f"slot {slot}, which another worker of the role holds", wanted="a slot of its own",
                next="take it out of one of the role's entries",
            )  # fmt: skip
        if holders and slot not in self._shared:
            raise InvalidManifest(
                what, got=f"slot {slot}, held by role {min(holders)!r} too", wanted="one role, or a lease set",
                next="move one of them or list the slot in leaseSets",
            )  # fmt: skip
        holders.add(role)
