"""The cluster's own scheduler as a provider (queues.py) of jobs of spec.allOrNothing: a PodGroup for each.

    groups = PodGroups(store, metrics=metrics)
    view = await groups.look(job)            # None: not asked for, a queue has the job, or no such kind here

A PodGroup (scheduling.k8s.io/v1alpha2, feature gates GenericWorkload and GangScheduling) says how many pods wait for
each other. The pods name it, and kube-scheduler gives each a node or none. It is fixed once it is made, so another
number of pods is another PodGroup. Kubernetes keeps a deleted one, by a finalizer of its own, while pods name it.

Where nobody schedules by it although the kind is served (a gate of kube-scheduler is off), pods are placed one by one,
and what policies/placing.py does about a job that is half placed holds here, too.
"""

from __future__ import annotations

from datetime import datetime

from rlinf_api import conditions, names
from rlinf_operator.clients import objects
from rlinf_operator.clients.cache import CachedStore
from rlinf_operator.manifests import asking
from rlinf_operator.manifests.asking import (
    PODGROUPS,
    OrderKind,
    PlaceInQueue,
    PodGang,
    QueueOrder,
    QueueStanding,
    QueueView,
)
from rlinf_operator.manifests.metadata import Manifest
from rlinf_operator.metrics import Metrics

KIND = "PodGroup"


class PodGroups:
    def __init__(self, store: CachedStore, *, metrics: Metrics) -> None:
        self._store, self._metrics = store, metrics

    @property
    def name(self) -> str:
        return PODGROUPS

    async def look(self, job: Manifest) -> QueueView | None:
        meta = job["metadata"]
        queued = bool((meta.get("labels") or {}).get(names.LABEL_QUEUE))
        ended = any(conditions.written(job, kind).get("status") == "True" for kind in ("Complete", "Failed"))
        wanted = bool((job.get("spec") or {}).get("allOrNothing") is not None) and not queued and not ended
        if not self._store.serves(KIND, meta["namespace"]):
            return None
        found = await self._find(job, live=wanted)
        if not wanted and (found is None or ended):  # its owner takes it along
            return None
        return QueueView(queue=PODGROUPS if wanted else "", provider=PODGROUPS, place=place_of(found))

    async def carry_out(self, order: QueueOrder, job: Manifest, *, now: datetime) -> None:
        if order.kind is OrderKind.ASK:
            await objects.create_owned(self._store, group(job, order), uid=job["metadata"]["uid"])
        elif (found := await self._find(job, live=True)) is not None:
            meta = found["metadata"]
            await objects.delete_if_there(self._store, KIND, meta["name"], namespace=meta["namespace"], uid=meta["uid"])
        self._metrics.queue_orders.labels(order=str(order.kind)).inc()

    async def _find(self, job: Manifest, *, live: bool) -> Manifest | None:
        meta = job["metadata"]
        name, where = names.workload_name(meta["name"]), meta["namespace"]
        return await objects.get_owned(self._store, KIND, name, namespace=where, uid=meta["uid"], live=live)


def group(job: Manifest, order: QueueOrder) -> Manifest:
    return {
        "kind": KIND,
        "metadata": asking.metadata_of(job, order.pod_sets),
        "spec": {"schedulingPolicy": {"gang": {"minCount": sum(one.count for one in order.pod_sets)}}},
    }


def place_of(found: Manifest | None) -> PlaceInQueue | None:
    if found is None:
        return None
    meta = found["metadata"]
    policy = (found.get("spec") or {}).get("schedulingPolicy") or {}
    return PlaceInQueue(
        name=meta["name"],
        uid=meta["uid"],
        queue=PODGROUPS,
        standing=QueueStanding.GOING if "deletionTimestamp" in meta else QueueStanding.GRANTED,
        asked=(meta.get("annotations") or {}).get(names.ANNOTATION_INPUTS, ""),
        ready=True,  # it waits for no word of ours
        gang=PodGang(name=meta["name"], size=int((policy.get("gang") or {}).get("minCount") or 0)),
    )
