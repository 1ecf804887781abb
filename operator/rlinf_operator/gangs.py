"""Who gives the pods of a job of spec.allOrNothing their nodes together, and how it is told. Pure.

| setting gang_scheduler | its PodGroup | how many pods, in its spec | what a pod of it says |
|---|---|---|---|
| kubernetes | scheduling.k8s.io/v1alpha2 | schedulingPolicy.gang.minCount | spec.schedulingGroup.podGroupName |
| coscheduling | scheduling.x-k8s.io/v1alpha1 | minMember | label scheduling.x-k8s.io/pod-group |
| volcano | scheduling.volcano.sh/v1beta1 | minMember | annotation scheduling.k8s.io/group-name |

Another one is a line more in SCHEDULERS. clients/podgroups.py makes the PodGroups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

Manifest = dict[str, Any]
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GangScheduler:
    api_version: str
    """That its PodGroups have."""
    size_at: Path
    """Where the spec of a PodGroup says how many pods have a node each, or none."""
    named_at: Path
    """Where a pod names its group."""
    pod_scheduler: str = ""
    """schedulerName of pods, as its installation has it by default; empty: the cluster's own scheduler."""
    queue_label: str = ""
    """Label by which a job names one of its queues; empty: it has none."""
    default_queue: str = ""

    def spec(self, *, size: int, queue: str = "", priority: str = "") -> Manifest:
        """The spec of a PodGroup.

        >>> SCHEDULERS["kubernetes"].spec(size=3)
        {'schedulingPolicy': {'gang': {'minCount': 3}}}
        >>> SCHEDULERS["volcano"].spec(size=3, queue="team", priority="high")
        {'minMember': 3, 'queue': 'team', 'priorityClassName': 'high'}
        """
        asked = _nested(self.size_at, size)
        if not self.queue_label:
            return asked
        return asked | {"queue": queue} | ({"priorityClassName": priority} if priority else {})

    def size(self, spec: Mapping[str, Any]) -> int:
        found = reduce(lambda inside, key: inside.get(key) or {}, self.size_at[:-1], spec).get(self.size_at[-1])
        return int(found or 0)

    def queue(self, labels: Mapping[str, str]) -> str:
        """By the job's labels; empty: it has no queues."""
        return (labels.get(self.queue_label) or self.default_queue) if self.queue_label else ""

    def membership(self, group: str) -> Manifest:
        """What a pod of the group has besides.

        >>> SCHEDULERS["coscheduling"].membership("rljob-math")
        {'metadata': {'labels': {'scheduling.x-k8s.io/pod-group': 'rljob-math'}}}
        """
        return _nested(self.named_at, group)


SCHEDULERS: Final[Mapping[str, GangScheduler]] = {
    "kubernetes": GangScheduler(
        api_version="scheduling.k8s.io/v1alpha2",
        size_at=("schedulingPolicy", "gang", "minCount"),
        named_at=("spec", "schedulingGroup", "podGroupName"),
    ),
    "coscheduling": GangScheduler(
        api_version="scheduling.x-k8s.io/v1alpha1",
        size_at=("minMember",),
        named_at=("metadata", "labels", "scheduling.x-k8s.io/pod-group"),
        pod_scheduler="scheduler-plugins-scheduler",
    ),
    "volcano": GangScheduler(
        api_version="scheduling.volcano.sh/v1beta1",
        size_at=("minMember",),
        named_at=("metadata", "annotations", "scheduling.k8s.io/group-name"),
        pod_scheduler="volcano",
        queue_label="volcano.sh/queue-name",
        default_queue="default",
    ),
}
"""By the operator's setting gang_scheduler."""


def priority_of(templates: Sequence[Manifest]) -> str:
    """The priority class of a group: of its first pods that have one."""
    return next((name for one in templates if (name := one["spec"].get("priorityClassName", ""))), "")


def _nested(path: Path, value: object) -> Manifest:
    *parents, last = path
    return reduce(lambda inside, key: {key: inside}, reversed(parents), {last: value})
