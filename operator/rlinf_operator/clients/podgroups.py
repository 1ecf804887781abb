"""The scheduler of gangs as a provider (queues.py) of jobs of spec.allOrNothing: a PodGroup for each.

    groups = PodGroups(store, gangs.SCHEDULERS["kubernetes"], metrics=metrics)
    view = await groups.look(job)            # None: not asked for, a queue has the job, or no such kind here

A PodGroup says how many pods wait for each other. The pods name it, and their scheduler gives each a node or none;
gangs.py has which one that is, and its words. Another number of pods is another PodGroup, as Kubernetes' own
cannot change. That one is kept when it is deleted, by a finalizer of Kubernetes', while pods name it.

Where nobody schedules by it although the kind is served (a gate or a plugin is off), pods are placed one by one, and
what policies/placing.py does about a job that is half placed holds here, too.
"""

from __future__ import annotations

from datetime import datetime

from rlinf_api import conditions, names
from rlinf_operator.clients import objects
from rlinf_operator.clients.cache import CachedStore
from rlinf_operator.gangs import GangScheduler, priority_of
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
    def __init__(self, store: CachedStore, scheduler: GangScheduler, *, metrics: Metrics) -> None:
        self._store, self._scheduler, self._metrics = store, scheduler, metrics

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
        queue = self._scheduler.queue(meta.get("labels") or {}) or PODGROUPS
        return QueueView(
            queue=queue if wanted else "", provider=PODGROUPS, place=place_of(found, scheduler=self._scheduler)
        )

    async def carry_out(self, order: QueueOrder, job: Manifest, *, now: datetime) -> None:
        if order.kind is OrderKind.ASK:
            await objects.create_owned(self._store, self._group(job, order), uid=job["metadata"]["uid"])
        elif (found := await self._find(job, live=True)) is not None:
            meta = found["metadata"]
            await objects.delete_if_there(self._store, KIND, meta["name"], namespace=meta["namespace"], uid=meta["uid"])
        self._metrics.queue_orders.labels(order=str(order.kind)).inc()

    async def _find(self, job: Manifest, *, live: bool) -> Manifest | None:
        meta = job["metadata"]
        name, where = names.workload_name(meta["name"]), meta["namespace"]
        return await objects.get_owned(self._store, KIND, name, namespace=where, uid=meta["uid"], live=live)

    def _group(self, job: Manifest, order: QueueOrder) -> Manifest:
        return {
            "kind": KIND,
            "metadata": asking.metadata_of(job, order.pod_sets),
            "spec": self._scheduler.spec(
                size=sum(one.count for one in order.pod_sets),
                queue=self._scheduler.queue(job["metadata"].get("labels") or {}),
                priority=priority_of([one.template for one in order.pod_sets]),
            ),
        }


def place_of(found: Manifest | None, *, scheduler: GangScheduler) -> PlaceInQueue | None:
    if found is None:
        return None
    meta, spec = found["metadata"], found.get("spec") or {}
    return PlaceInQueue(
        name=meta["name"],
        uid=meta["uid"],
        queue=(spec.get("queue") or scheduler.default_queue) if scheduler.queue_label else PODGROUPS,
        standing=QueueStanding.GOING if "deletionTimestamp" in meta else QueueStanding.GRANTED,
        asked=(meta.get("annotations") or {}).get(names.ANNOTATION_INPUTS, ""),
        ready=True,  # it waits for no word of ours
        gang=PodGang(name=meta["name"], size=scheduler.size(spec), membership=scheduler.membership(meta["name"])),
    )
