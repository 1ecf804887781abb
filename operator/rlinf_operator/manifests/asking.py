"""What a queue is asked for and what it grants, in words of no provider: sets of like pods and their nodes. Pure.

`decide` makes and reads these; clients/queues.py turns them into a provider's objects and back. Set `driver` is the
driver's pod, each other one bears a pool's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from rlinf_api import names
from rlinf_api.job import PoolSpec, RLJobSpec, as_range
from rlinf_operator.manifests import pods, topology
from rlinf_operator.manifests.metadata import JobMeta, Manifest, digest, labels, metadata
from rlinf_operator.settings import OperatorSettings

PODGROUPS: Final = "podgroups"
"""Provider of jobs that have no queue: a scheduler that places all pods of a group or none (gangs.py)."""
DRIVER_SET: Final = names.COMPONENT_DRIVER
_OF_THE_POD: Final = (
    "nodeSelector", "affinity", "tolerations", "overhead", "runtimeClassName", "priorityClassName", "resourceClaims",
    "topologySpreadConstraints",
)  # fmt: skip
_OF_A_CONTAINER: Final = ("name", "image", "resources", "restartPolicy")
"""What a queue counts, and chooses flavors by. A whole pod would be ten times as much in each copy of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSet:
    name: str
    count: int
    least: int | None = None
    """The job would also run with so few; None: with no fewer than `count`."""
    topology: Mapping[str, str] = field(default_factory=dict)
    """{"required": KEY} or {"preferred": KEY}: where its pods are, seen from each other, by a label of their nodes."""
    template: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGang:
    """A group of pods that their scheduler gives a node each, or none."""

    name: str
    size: int
    """Pods without a node wait until so many are there."""
    membership: Manifest = field(default_factory=dict)
    """What each of its pods has besides: {"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "rljob-math"}}}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one pod set was granted: how many pods may run, and what each must have for the nodes that were chosen."""

    count: int
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    gates: tuple[str, ...] = ()
    """Scheduling gates, which the provider takes away once it has written into a pod which node it was given."""


class QueueStanding(StrEnum):
    WAITS = "Waits"
    GRANTED = "Granted"
    WITHDRAWN = "Withdrawn"  # it was granted; the pods are to go, and it is given back
    STOPPED = "Stopped"  # somebody took it out of the queue, by hand or by a rule of the provider
    GOING = "Going"  # the object is being deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceInQueue:
    """What the job's place in its queue is, by the provider's object."""

    name: str
    uid: str
    queue: str
    standing: QueueStanding
    holds: bool = False
    """Quota counts for it, granted or not."""
    asked: str = ""
    """Hash of the pod sets that it was asked for."""
    priority: str = ""
    """Class of the queue's own that it waits with; empty: the pods' one, or none."""
    ready: bool = False
    """The provider was told that all pods of this admission are ready."""
    finished: bool = False
    message: str = ""
    """The provider's own words."""
    shares: Mapping[str, Share] = field(default_factory=dict)
    """What each pod set was granted, by its name; empty before."""
    gang: PodGang | None = None
    """None: the provider counts quota, and places no pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    queue: str
    """By the job's label; empty: it has none, but had one."""
    provider: str
    """Who serves queues here; empty: nobody does."""
    priority: str = ""
    """Class of the queue's own, by the job's label."""
    place: PlaceInQueue | None = None


class OrderKind(StrEnum):
    ASK = "ask"
    CHANGE = "change"  # what it waits for, or in which queue
    GIVE_BACK = "give_back"  # after a withdrawal, once the pods are gone: it waits again
    READY = "ready"
    LACKS = "lacks"  # pods that were ready, with no prospect of others
    LEAVE = "leave"
    FINISH = "finish"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOrder:
    """What the provider is told."""

    kind: OrderKind
    queue: str = ""
    pod_sets: tuple[PodSet, ...] = ()
    succeeded: bool = False
    message: str = ""


def pod_sets(
    job: JobMeta,
    spec: RLJobSpec,
    counts: Mapping[str, int],
    *,
    fewest: Mapping[str, int] | None = None,
    settings: OperatorSettings,
) -> tuple[PodSet, ...]:
    """The pod sets of the driver, and of each pool that has pods. One of them may shrink, as Kueue takes one at most:
    the one with the most pods to spare. `fewest`: pods of a pool below which there is no plan, beside what its bounds
    say."""

    def least_of(pool: PoolSpec) -> int:
        return max(1, as_range(pool.pods).min, (fewest or {}).get(pool.name, 0))

    spare = {p.name: counts[p.name] - least_of(p) for p in spec.pools if counts.get(p.name, 0) > 0}
    shrinks = max(spare, key=lambda name: (spare[name], name), default="")
    one = pods.driver(job, spec, attempt=1, life=1, settings=settings)
    found = [PodSet(name=DRIVER_SET, count=1, template=_template(one.manifest))]
    for pool in spec.pools:
        if pool.name in spare:
            one = pods.worker(job, spec, pool=pool.name, ordinal=0, attempt=1, life=1, settings=settings)
            least = least_of(pool) if pool.name == shrinks and spare[shrinks] > 0 else None
            count = counts[pool.name]
            near = topology.asked(spec, pool.name)
            found.append(
                PodSet(name=pool.name, count=count, least=least, topology=near, template=_template(one.manifest))
            )
    return tuple(found)


def inputs(asked: tuple[PodSet, ...]) -> str:
    """A hash of what a queue counts. Images are not: an operator's upgrade, which has others, is no other question."""

    def counted(pod: Manifest) -> Manifest:
        groups = {key: pod["spec"].get(key, []) for key in ("initContainers", "containers")}
        containers = {key: [{k: v for k, v in c.items() if k != "image"} for c in g] for key, g in groups.items()}
        return {**pod["spec"], **containers}

    def all_of(one: PodSet) -> list[Any]:
        said = [one.name, one.count, one.least, counted(one.template)]
        return [*said, dict(one.topology)] if one.topology else said

    return digest([all_of(one) for one in asked])


def metadata_of(job: Manifest, asked: tuple[PodSet, ...]) -> Manifest:
    """The metadata of the provider's object, by which the job asks for these."""
    meta = job["metadata"]
    owner = JobMeta(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"])
    return metadata(
        owner,
        names.workload_name(owner.name),
        label=labels(owner),
        annotations={names.ANNOTATION_INPUTS: inputs(asked)},
    )


def placed(pod: Manifest, share: Share) -> Manifest:
    """The pod as the grant wants it. What the grant says of nodes wins: another one is not counted by the queue."""
    meta, spec = pod["metadata"], pod["spec"]
    known, known_gates = list(spec.get("tolerations") or []), list(spec.get("schedulingGates") or [])
    selector = {**(spec.get("nodeSelector") or {}), **share.node_selector}
    more = [dict(toleration) for toleration in share.tolerations if toleration not in known]
    return {
        **pod,
        "metadata": {
            **meta,
            **({"labels": {**share.labels, **meta.get("labels", {})}} if share.labels else {}),
            **({"annotations": {**share.annotations, **meta.get("annotations", {})}} if share.annotations else {}),
        },
        "spec": {
            **spec,
            **({"tolerations": known + more} if more else {}),
            **({"nodeSelector": selector} if share.node_selector else {}),
            **({"schedulingGates": [*known_gates, *({"name": gate} for gate in share.gates)]} if share.gates else {}),
        },
    }  # fmt: skip


def _template(pod: Manifest) -> Manifest:
    spec = pod["spec"]
    kept: Manifest = {key: spec[key] for key in _OF_THE_POD if key in spec}
    for group in ("initContainers", "containers"):
        if listed := spec.get(group):
            kept[group] = [{key: c[key] for key in _OF_A_CONTAINER if key in c} for c in listed]
    return {"metadata": {}, "spec": kept}
