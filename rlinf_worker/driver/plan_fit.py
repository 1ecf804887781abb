"""Whether another plan fits the flow that runs: its channels, its cycles, and what a change of its gang needs.

Called by switch.py when a plan is to be prepared. Pure; raises RLinfError with what to correct. What holds of a plan
without a running job (bounds, slots, declared memory) is rlinf_api.plan_rules.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlinf_api.errors import RLinfError
from rlinf_api.plan import RLPlanSpec
from rlinf_worker.driver.changes import Changes
from rlinf_worker.driver.topology import Topology


def check(
    plan: RLPlanSpec,
    found: Changes,
    *,
    topology: Topology,
    cycles: Iterable[frozenset[str]],
    gang_role: str,
    checkpoint_uri: str,
) -> None:
    """`cycles`: of the plan in force, which a user's flow may have named without declaring one."""
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
            f"another gang of role {gang_role!r} would lose all that was learnt",
            got="no spec.checkpoint.uri", next="set one when the job is made, or keep the gang's workers and slots",
        )  # fmt: skip
