"""What the operator and the scheduler do with the API server: the table behind the chart's RBAC.

A test compares the chart's rendered Roles with it (no line more, no line less), and another one the verbs that the
operator was seen to use on a real API server. Not for: run time; nothing of the operator reads it.

Processes: `python -m rlinf_operator` and `python -m rlinf_scheduler` (their docstrings have flags, ports and files).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rlinf_api import names
from rlinf_operator import gangs

CA_SECRET: Final = "rlinf-operator-ca"
"""In the operator's namespace: the CA's key and certificates. Read by the operator alone, by name."""
SCHEDULER_SECRET: Final = "rlinf-scheduler-tls"
"""In the operator's namespace: the scheduler's certificate, written by the operator, mounted by the scheduler."""
LEASE: Final = "rlinf-operator"
"""In the operator's namespace: who leads."""

Scope = Literal["jobs", "cluster", "selected", "own"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRule:
    """`jobs`: in the namespaces that the operator serves (a ClusterRole where they are not listed); `cluster`: kinds
    without namespaces; `selected`: likewise, where it serves namespaces by their labels; `own`: its own."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    why: str
    scope: Scope = "jobs"
    names: tuple[str, ...] = ()
    gang_scheduler: str = ""
    """It holds where this is the operator's gang_scheduler (settings.py) alone; empty: always."""


OPERATOR: Final[tuple[AccessRule, ...]] = (
    AccessRule(
        group=names.GROUP, resource="rljobs", verbs=("delete", "get", "list", "watch"),
        why="what to run; delete after ttlSecondsAfterFinished",
    ),
    AccessRule(group=names.GROUP, resource="rljobs/status", verbs=("update",), why="one status write per pass"),
    AccessRule(
        group=names.GROUP, resource="rljobs/finalizers", verbs=("update",),
        why="owner references with blockOwnerDeletion, where OwnerReferencesPermissionEnforcement is on",
    ),
    AccessRule(
        group=names.GROUP, resource="rlplans", verbs=("delete", "get", "list", "watch"),
        why="the plans in force and pending; get: what became of a write whose answer was lost; delete: old ones",
    ),
    AccessRule(group=names.GROUP, resource="rlplans/status", verbs=("patch",), why="Prepared, Applied, Superseded"),
    AccessRule(
        group=names.GROUP, resource="rlruntimes", verbs=("get",), scope="cluster",
        why="what a job is made with that names one; neither listed nor watched",
    ),
    AccessRule(
        group="", resource="pods", verbs=("create", "delete", "get", "list", "watch"),
        why="drivers and workers; get: whose is the one that has the name",
    ),
    AccessRule(
        group="", resource="services", verbs=("create", "get", "list", "watch"),
        why="a headless Service per job; watched as metadata only",
    ),
    AccessRule(
        group="networking.k8s.io", resource="networkpolicies",
        verbs=("create", "delete", "get", "list", "patch", "watch"),
        why="one per job; patched and deleted where the operator's settings say so; watched as metadata only",
    ),
    AccessRule(
        group="policy", resource="poddisruptionbudgets", verbs=("create", "delete", "get", "list", "watch"),
        why="of drivers that are not to be evicted (spec.driver.evictable); deleted as their jobs end; watched as "
        "metadata only",
    ),
    AccessRule(
        group="", resource="configmaps", verbs=("create", "get", "list", "patch", "watch"),
        why="job.json per job; watched as metadata only, and only those labelled rlinf.io/job",
    ),
    AccessRule(
        group="", resource="secrets", verbs=("create", "patch"),
        why="certificates of jobs: written, never read, listed or watched; their owner takes them along",
    ),
    AccessRule(
        group="", resource="events", verbs=("create", "patch"),
        why="what happened, for people; patch: one that is told again counts up",
    ),
    AccessRule(
        group="kueue.x-k8s.io", resource="workloads", verbs=("create", "delete", "get", "list", "patch", "watch"),
        why="the place of a job in its queue; patch: while it waits; delete: of one that is suspended",
    ),
    AccessRule(
        group="kueue.x-k8s.io", resource="workloads/status", verbs=("patch",),
        why="quota given back after an eviction; Finished",
    ),
    *(
        AccessRule(
            group=scheduler.api_version.partition("/")[0], resource="podgroups", gang_scheduler=name,
            verbs=("create", "delete", "get", "list", "watch"),
            why="pods of a job of spec.allOrNothing, which are placed together; delete: before it tries again",
        )
        for name, scheduler in gangs.SCHEDULERS.items()
    ),
    AccessRule(
        group="kueue.x-k8s.io", resource="resourceflavors", verbs=("get",), scope="cluster",
        why="node labels and tolerations of the flavors that a job was admitted with",
    ),
    AccessRule(
        group="kueue.x-k8s.io", resource="workloadpriorityclasses", verbs=("get",), scope="cluster",
        why="the number behind the label kueue.x-k8s.io/priority-class",
    ),
    AccessRule(
        group="scheduling.k8s.io", resource="priorityclasses", verbs=("get",), scope="cluster",
        why="the number behind the templates' priorityClassName, for a job that has a queue",
    ),
    AccessRule(
        group="", resource="namespaces", verbs=("list", "watch"), scope="selected",
        why="which of them have the labels of watchNamespaceSelector; watched as metadata only",
    ),
    AccessRule(
        group="coordination.k8s.io", resource="leases", verbs=("create",), scope="own",
        why="the first replica makes the Lease (create cannot be limited to a name)",
    ),
    AccessRule(
        group="coordination.k8s.io", resource="leases", verbs=("get", "update"), scope="own", names=(LEASE,),
        why="leader election",
    ),
    AccessRule(
        group="", resource="secrets", verbs=("create",), scope="own",
        why="the first leader makes the CA and the scheduler's certificate",
    ),
    AccessRule(
        group="", resource="secrets", verbs=("get", "patch"), scope="own", names=(CA_SECRET,),
        why="read at start, patched when the CA rotates",
    ),
    AccessRule(
        group="", resource="secrets", verbs=("patch",), scope="own", names=(SCHEDULER_SECRET,),
        why="renewed when two thirds of its life are over",
    ),
)  # fmt: skip

SCHEDULER: Final[tuple[AccessRule, ...]] = (
    AccessRule(
        group=names.GROUP, resource="rlplans", verbs=("create", "get", "list", "patch"),
        why="it writes plans; get: whether the plan that has the name is the same one; list: which failed or were "
        "taken back; patch: why a plan stays, as an annotation, as the spec cannot change",
    ),
    AccessRule(
        group=names.GROUP, resource="rlprofiles", verbs=("create", "delete", "get", "list", "patch"),
        why="what was measured, beyond its own life and the job's; list and delete: of a namespace the oldest go first",
    ),
    AccessRule(
        group=names.GROUP, resource="rljobs", verbs=("get",),
        why="what a job wants, when its driver has reported how its steps go",
    ),
    AccessRule(
        group=names.GROUP, resource="rljobs/finalizers", verbs=("update",),
        why="owner references with blockOwnerDeletion, where OwnerReferencesPermissionEnforcement is on",
    ),
)  # fmt: skip
