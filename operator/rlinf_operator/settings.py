"""The operator's settings: each with its unit, its default and the reason for it. Read by every layer, set
by `__main__` (the chart's values) or by the local runner. Nothing of a job stands here: that is its spec.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from rlinf_api import __version__
from rlinf_api.job_rules import check_template

_PEER_FIELDS: Final = {"ipBlock", "namespaceSelector", "podSelector"}


@dataclass(frozen=True, slots=True)
class Peers:
    """Peers of a NetworkPolicy as JSON, as they stand under `from`. ValueError says what is wrong with them.

    >>> Peers('[{"ipBlock": {"cidr": "10.0.0.0/8"}}]').listed()
    [{'ipBlock': {'cidr': '10.0.0.0/8'}}]
    >>> Peers().listed()
    []
    """

    text: str = ""

    def __post_init__(self) -> None:
        self.listed()

    def listed(self) -> list[dict[str, Any]]:
        found: Any = json.loads(self.text) if self.text.strip() else []
        if not isinstance(found, list) or not all(
            isinstance(p, dict) and p and not p.keys() - _PEER_FIELDS for p in found
        ):
            raise ValueError(f"wanted a JSON list of objects with {', '.join(sorted(_PEER_FIELDS))}")
        return found


@dataclass(frozen=True, slots=True)
class DriverTemplate:
    """A pod template as JSON, of the form that pools have. ValueError says what is wrong with it.

    >>> DriverTemplate('{"spec": {"priorityClassName": "high"}}').parsed()
    {'spec': {'priorityClassName': 'high'}}
    """

    text: str = ""

    def __post_init__(self) -> None:
        found = self.parsed()
        for problem in check_template("driver_template", found):
            raise ValueError(f"{problem.field} {problem.message}")
        if (found.get("spec") or {}).get("hostNetwork"):
            raise ValueError("driver_template.spec.hostNetwork would take every driver out of its job's NetworkPolicy")

    def parsed(self) -> dict[str, Any]:
        found: Any = json.loads(self.text) if self.text.strip() else {}
        if not isinstance(found, dict):
            raise ValueError("wanted a JSON object with metadata, spec or both")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    worker_image: str = f"rlinf-worker-actor-fsdp:{__version__}"
    """Image of agents whose pool names none. It runs every registered kind: a first job, and any with all roles in one
    pool, needs none of its own. 5 GB; a pool of simulators alone names rlinf-worker-env-sim."""
    driver_image: str = f"rlinf-worker:{__version__}"
    """Image of drivers. A flow of the user's own (module:function) runs in its first pool's image instead."""
    driver_template: DriverTemplate = DriverTemplate()
    """What drivers have besides: a pod template as JSON, merged as a pool's is, so what the operator owns wins and is
    told of in event TemplateOverridden. `resources` of its container `driver` replace driver_cpu and driver_memory as
    a whole. It holds for pods made from now on. Empty: nothing, as the operator knows no cluster."""
    image_pull_policy: str = "IfNotPresent"
    """Tags are versions and never move, so what a node has is right."""
    scheduler_address: str = ""
    """host:port of the scheduler, which the operator asks for plans. Drivers find it in their environment for their
    profiles. Empty: the operator's process does not start, and drivers send none."""
    default_checkpoint_uri: str = ""
    """For jobs without checkpoint.uri; {namespace}, {job} and {uid} are filled in. Empty: no checkpoints."""

    network_policy: bool = True
    """A NetworkPolicy per job, so that a neighbour reaches neither its driver nor its workers. False: where templates
    need more than their users' own policies can add, or something else isolates jobs; a job that has one loses it."""
    network_policy_callers: Peers = Peers()
    """Who else may reach drivers: the operator's pods; the chart names them. Empty: anybody, as an operator outside the
    cluster has an address that only its administrator knows; who calls still needs a certificate."""
    network_policy_scrapers: Peers = Peers()
    """Who may scrape pods of jobs; the chart names pods called prometheus, or whom it is given. Empty: anybody."""
    pod_fixed_ids: bool = True
    """Pods of jobs run as user, group and fsGroup 65532, so a volume can be made for them beforehand. False: without
    these numbers, where the cluster gives each namespace its own and refuses others (OpenShift); templates may name
    some. It holds for pods made from then on."""
    gang_scheduler: str = "kubernetes"
    """Whose PodGroups jobs of spec.allOrNothing have: kubernetes, coscheduling or volcano. Kubernetes' own: it needs
    nothing else, and where it does not serve them the job's deadline does the same by itself."""
    gang_scheduler_pods: str = ""
    """schedulerName of the pods of such a job whose templates name none: `default-scheduler` where the cluster's own
    has the plugin. Empty: what their charts call them, scheduler-plugins-scheduler or volcano; kubernetes: none."""

    driver_grace_s: int = 30
    """terminationGracePeriodSeconds of drivers whose template has none: Kubernetes' default; a driver only has to say
    goodbye."""
    worker_grace_s: int = 30
    """terminationGracePeriodSeconds of worker pods whose template has none: an actor finishes its optimizer step or
    checkpoint."""
    node_lost_toleration_s: int = 5
    """How long pods stay bound to a node that is lost. Kubernetes' 300 s would be 5 minutes without them; 0 s would
    move everything at each hiccup of a kubelet, whose silence of 10-40 s was waited for already."""
    driver_cpu: str = "500m"
    """CPU request of a driver: it matches headers, it carries no payload."""
    driver_memory: str = "1Gi"
    """Memory request and limit of a driver: the flow's code and its libraries, no weights."""
    run_dir_size: str = "64Mi"
    """Sockets and last words: kilobytes. 64 MiB: what writes there by mistake meets ENOSPC, not an eviction."""
    accelerator_shm: str = "8Gi"
    """/dev/shm of a pod with accelerators and no hostMemory: NCCL's and the rings' buffers for 8 GPUs. A guess until
    measured."""
    shm_share: float = 0.25
    """/dev/shm of any other pod, as a share of the memory that it asks for (tmpfs counts as the container's memory)."""

    pods_ready_deadline_s: float = 300.0
    """After this, pods that are not ready are named in PodsReady. 5 min: pulling a large image takes minutes."""
    homeless_s: float = 60.0
    """A pod of the plan in force that finds no node for so long is done without, where its pool may have fewer: another
    plan is asked for. 60 s: what frees a node at once, as a pod that ends, has had its time; a node that is still to be
    made takes minutes, and steps that cannot end wait for it."""
    driver_silent_deadline_s: float = 60.0
    """A running driver that says nothing for so long is replaced. Ten times the 6 s in which a lost peer is noticed."""
    driver_late_s: float = 10.0
    """A running driver whose stream broke so long ago is called unreachable in Degraded; so is one that has answered no
    ping for so long, and, on a stream that stands, one whose report, which it repeats each 10 s, is so long overdue."""
    agent_silent_deadline_s: float = 60.0
    """A pod has run for so long before it is replaced by its driver's word that its agent is silent: an agent that
    starts imports for seconds, and a mesh's proxy lets it out when it is up itself."""
    drain_deadline_s: float = 120.0
    """Suspend waits this long for a step boundary and a checkpoint, then deletes the pods and says so."""
    finish_grace_s: float = 30.0
    """A finished job's driver may take so long to exit by itself; then its pod is deleted."""
    exit_zero_grace_s: float = 10.0
    """A worker pod that exits 0 ends before its driver's last report comes. 10 s later it counts as lost."""

    infrastructure_restarts: int = 100
    """Pods replaced because of nodes, evictions or deletion, within failurePolicy.resetAfterSeconds, before the job
    fails. 100: a drain of a large cluster passes, a pod that something deletes in a loop does not run for ever."""
    infrastructure_restarts_per_pod: int = 3
    """The same for a job of more than 33 pods, by its pods. 3: each is lost with its zone, again as its nodes are
    upgraded one by one, and once more within the window. At most 999 are counted, so a job of 1,000 pods or more fails
    when it loses that many."""
    restart_delay_max_s: float = 60.0
    """Longest pause before a pod that keeps failing is replaced again; the first replacement is immediate."""

    progress_interval_s: float = 30.0
    """Shortest time between two status writes that only move step, progress, metrics, or who is still missing."""
    coalesce_s: float = 0.1
    """Pause between two passes over one job: ten pods that become ready at once are one status write, not ten."""
    resync_s: float = 300.0
    """A job that had a pass has another so often, whatever the watches said; finished ones one a second, in all."""
    call_timeout_s: float = 10.0
    """Deadline of one call to the scheduler or a driver."""
    retry_min_s: float = 0.5
    """First pause after a pass that failed; doubles with each further failure."""
    retry_max_s: float = 60.0
    """Longest pause after passes that failed."""
    certificate_life_s: float = 30 * 86400.0
    """Life of a job's certificates; renewed when two thirds are over. 30 days: longer than an operator is away."""


DEFAULTS = OperatorSettings()
