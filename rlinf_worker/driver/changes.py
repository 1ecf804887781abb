"""What another plan changes for the workers of a running job. Pure: two placements in, sets of workers out.

| worker | what becomes of it |
|---|---|
| kept | goes on in its process: sizes, routes, its share of the work and turns on its slots change in place |
| beside | is new, on slots that nobody holds: started while the old plan works on |
| after | is new, or starts again, on slots that somebody holds until the commit: started by it |
| gone | is ended by the commit: its id is not in the new plan, or starts again elsewhere |

Ranks of a gang are all kept or all start again: one of another world, or in other slots, is formed anew. Gangs that end
steps are so together, and begin on the checkpoint of the step before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from rlinf_api.errors import RLinfError
from rlinf_api.names import WorkerId
from rlinf_api.placement import Placement
from rlinf_api.plan import RLPlanSpec
from rlinf_worker.driver.members import PodKey
from rlinf_worker.driver.topology import Topology

NOTHING: Final[frozenset[WorkerId]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    kept: frozenset[WorkerId] = NOTHING
    beside: frozenset[WorkerId] = NOTHING
    after: frozenset[WorkerId] = NOTHING
    gone: frozenset[WorkerId] = NOTHING
    gang: bool = False
    """Those that end steps are formed anew."""
    new_pods: frozenset[PodKey] = frozenset()
    resized_roles: frozenset[str] = frozenset()
    """Roles with another number of workers: the flow is run anew, as it may have asked for it."""

    def __str__(self) -> str:
        """For people."""
        counted = (
            (self.beside, "workers start beside"),
            (self.after, "start with the commit"),
            (self.gone - self.after, "end with it"),
        )
        return ", ".join(f"{len(workers)} {what}" for workers, what in counted if workers) or "all in place"


def check(
    plan: RLPlanSpec, found: Changes, *, topology: Topology, cycles: Iterable[frozenset[str]], checkpoint_uri: str
) -> None:
    """Whether the plan fits the flow that runs; RLinfError with what to correct. What holds of a plan without a running
    job is rlinf_api.plan_rules. `cycles`: of the plan in force, which a user's flow may have named without declaring
    one."""
    known = topology.names()
    if unknown := sorted({c.name for c in plan.channels} - known):
        raise RLinfError(
            f"the flow has no channel {', '.join(unknown)}", wanted=f"among {', '.join(sorted(known))}",
            next="correct spec.channels of the plan",
        )  # fmt: skip
    pairs = {cycle.roles for cycle in topology.cycles} | set(cycles)
    if strange := [cycle.roles for cycle in plan.cycles if frozenset(cycle.roles) not in pairs]:
        raise RLinfError(
            f"the flow has no cycle of {' and '.join(strange[0])}: its stages would be of no effect",
            wanted=f"among {', '.join(sorted(' and '.join(sorted(pair)) for pair in pairs)) or 'none'}",
            next="correct spec.cycles of the plan",
        )  # fmt: skip
    if found.gang and not checkpoint_uri:
        raise RLinfError(
            f"another gang of role {' and '.join(map(repr, topology.gang_roles))} would lose all that was learnt",
            got="no spec.checkpoint.uri", next="set one when the job is made, or keep the gang's workers and slots",
        )  # fmt: skip


def between(old: Placement, new: Placement, *, gang_roles: Collection[str], gangs: Iterable[str] = ()) -> Changes:
    """`gang_roles`: those that end steps. `gangs`: roles that are known to be gangs besides."""
    before, wanted = {w.id: w for w in old.workers}, {w.id: w for w in new.workers}
    same = {wid for wid, w in wanted.items() if wid in before and before[wid].slots == w.slots}
    whole = {*gang_roles, *gangs}
    anew = {r for r in whole if [w.slots for w in old.of_role(r)] != [w.slots for w in new.of_role(r)]}
    if is_anew := not anew.isdisjoint(gang_roles):
        anew |= set(gang_roles)  # all stand on the same step
    same -= {w.id for w in new.workers if w.role in anew}
    held = {slot for worker in old.workers for slot in worker.slots}
    fresh = set(wanted) - same
    beside = {
        wid for wid in fresh
        if wid not in before and held.isdisjoint(wanted[wid].slots) and wanted[wid].role not in whole
    }  # fmt: skip
    counts = {role: len(old.of_role(role)) for role in {w.role for w in old.workers}}
    return Changes(
        kept=frozenset(same),
        beside=frozenset(beside),
        after=frozenset(fresh - beside),
        gone=frozenset(set(before) - same),
        gang=is_anew,
        new_pods=frozenset(new.places() - old.places()),
        resized_roles=frozenset(role for role, n in counts.items() if len(new.of_role(role)) != n),
    )
