"""Kueue as a provider of queues (queues.py): the job's place is an object `Workload`, which we own.

    queues = Kueue(store, api, metrics=metrics)
    view = await queues.look(job)            # None: the job has no label, and never had one
    await queues.carry_out(QueueOrder(kind=OrderKind.ASK, ...), job, now=now)

There is no integration of ours in Kueue itself; this does what those that it has do:

| we write | Kueue writes |
|---|---|
| spec when the job waits; again where what it asks for changes | Admitted, the admission with flavors and counts |
| QuotaReserved=False and no admission, when evicted pods are gone | Evicted |
| PodsReady when all are, and when one is lost that finds no node; Finished | |

A Workload has no finalizer of ours: deleting an RLJob leaves nothing. So quota is free at once where somebody deletes
one by hand, while the job's pods are still drained.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from rlinf_api import names, times
from rlinf_api.errors import RLinfError
from rlinf_api.store import NotFound
from rlinf_operator.clients import objects
from rlinf_operator.clients.cache import CachedStore
from rlinf_operator.clients.kube import KubeApi
from rlinf_operator.manifests import asking
from rlinf_operator.manifests.asking import OrderKind, PlaceInQueue, PodSet, QueueOrder, QueueStanding, QueueView, Share
from rlinf_operator.manifests.metadata import Manifest
from rlinf_operator.metrics import Metrics

KUEUE: Final = "kueue"
FLAVOR_S: Final = 60.0
"""How old a ResourceFlavor may be. 60 s: Kueue lets nobody delete one in use, and an edit is for later pods."""
FLAVORS_KEPT: Final = 256  # a cluster has one for each kind of node
GATE_OF_TOPOLOGY: Final = "kueue.x-k8s.io/topology"
MESSAGE_CHARS: Final = 1000
OWN_CLASS: Final = "WorkloadPriorityClass"
NO_PRIORITY: Final[Manifest] = {"priority": None, "priorityClassRef": None}
"""What a Workload has that was made without a class."""
WAITS_FOR_RECOVERY: Final = "WaitForRecovery"
"""Reason of PodsReady=False from which recoveryTimeout of Kueue's waitForPodsReady counts."""
_AGAIN_AT_ONCE: Final = ("Preempted", "NodeFailures")
"""Evictions after which Kueue's own integrations queue a job again at once; of others Kueue says when."""


class Kueue:
    def __init__(
        self, store: CachedStore, api: KubeApi, *, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._api, self._metrics, self._clock = store, api, metrics, clock
        self._flavors: OrderedDict[str, tuple[float, Manifest]] = OrderedDict()

    @property
    def name(self) -> str:
        return KUEUE

    async def look(self, job: Manifest) -> QueueView | None:
        meta = job["metadata"]
        labels = meta.get("labels") or {}
        queue, priority = (str(labels.get(name) or "") for name in (names.LABEL_QUEUE, names.LABEL_QUEUE_PRIORITY))
        if not self._store.serves("Workload", meta["namespace"]):
            return QueueView(queue=queue, provider="") if queue else None
        found = await self._find(job, live=bool(queue))
        if not queue and found is None:
            return None
        place = place_of(found, shares=await self._shares(found)) if found is not None else None
        return QueueView(queue=queue, provider=KUEUE, priority=priority, place=place)

    async def carry_out(self, order: QueueOrder, job: Manifest, *, now: datetime) -> None:
        namespace, name = job["metadata"]["namespace"], names.workload_name(job["metadata"]["name"])
        if order.kind is OrderKind.ASK:
            await self._ask(order, job)
        else:
            found = await self._find(job, live=True)
            if found is None:
                return
            if order.kind is OrderKind.LEAVE:
                await self._leave(found)
            elif order.kind is OrderKind.CHANGE:
                made = workload(job, order)
                meta: Manifest = {"resourceVersion": found["metadata"]["resourceVersion"]}
                patch: Manifest = {"metadata": meta, "spec": {"queueName": order.queue}}
                if order.pod_sets:
                    meta["annotations"] = made["metadata"]["annotations"]
                    patch["spec"]["podSets"] = made["spec"]["podSets"]
                priority = await self._priority(job, order.pod_sets)
                if priority or order.pod_sets:
                    patch["spec"] |= priority or NO_PRIORITY
                await self._store.patch("Workload", name, namespace=namespace, patch=patch)
            else:
                change = _CHANGES[order.kind](found, order, now=now)
                version = {"resourceVersion": found["metadata"]["resourceVersion"]}
                patch = {"metadata": version, "status": change}
                await self._store.patch("Workload", name, namespace=namespace, patch=patch, subresource="status")
        self._metrics.queue_orders.labels(order=str(order.kind)).inc()

    async def _find(self, job: Manifest, *, live: bool) -> Manifest | None:
        meta = job["metadata"]
        name, where = names.workload_name(meta["name"]), meta["namespace"]
        return await objects.get_owned(self._store, "Workload", name, namespace=where, uid=meta["uid"], live=live)

    async def _leave(self, found: Manifest) -> None:
        meta = found["metadata"]
        await objects.delete_if_there(
            self._store, "Workload", meta["name"], namespace=meta["namespace"], uid=meta["uid"]
        )

    async def _ask(self, order: QueueOrder, job: Manifest) -> None:
        meta = job["metadata"]
        wanted = workload(job, order)
        wanted["spec"] |= await self._priority(job, order.pod_sets)
        await objects.create_owned(self._store, wanted, uid=meta["uid"])

    async def _priority(self, job: Manifest, pod_sets: tuple[PodSet, ...]) -> Manifest:
        """Kueue wants the number beside the class's name. A class of its own, by label, over that of the pods."""
        label = (job["metadata"].get("labels") or {}).get(names.LABEL_QUEUE_PRIORITY)
        of_pods = next((n for s in pod_sets if (n := s.template["spec"].get("priorityClassName"))), "")
        name, kind, group = str(label or of_pods), "PriorityClass", "scheduling.k8s.io"
        if label:
            kind, group = OWN_CLASS, "kueue.x-k8s.io"
        if not name:
            return {}
        try:
            found = await self._api.get(kind, name)
        except NotFound as error:
            where = f"label {names.LABEL_QUEUE_PRIORITY}" if label else "the templates' priorityClassName"
            raise RLinfError(
                f"{kind} {name!r} is not there", got=f"{where}: {name}", wanted=f"an existing {kind}",
                next="make it, or name another",
            ) from error  # fmt: skip
        return {
            "priority": int(found.get("value") or 0),
            "priorityClassRef": {"group": group, "kind": kind, "name": name},
        }

    async def _shares(self, found: Manifest) -> dict[str, Share]:
        """Flavors' labels and tolerations, and what admission checks add (a node pool that was made for the job)."""
        status = found.get("status") or {}
        shares = {}
        for assigned in (status.get("admission") or {}).get("podSetAssignments") or []:
            parts = []
            for flavor in sorted(set((assigned.get("flavors") or {}).values())):
                spec = (await self._flavor(flavor)).get("spec") or {}
                parts.append({"nodeSelector": spec.get("nodeLabels"), "tolerations": spec.get("tolerations")})
            for check in status.get("admissionChecks") or []:
                parts += [u for u in check.get("podSetUpdates") or [] if u.get("name") == assigned["name"]]
            on_nodes = assigned.get("topologyAssignment") is not None
            if on_nodes:
                parts.append(_of_topology(found, assigned["name"]))
            gates = (GATE_OF_TOPOLOGY,) if on_nodes else ()
            shares[assigned["name"]] = replace(_share(int(assigned.get("count") or 0), parts), gates=gates)
        return shares

    async def _flavor(self, name: str) -> Manifest:
        known = self._flavors.get(name)
        if known is not None and self._clock() - known[0] < FLAVOR_S:
            return known[1]
        found = await self._api.get("ResourceFlavor", name)
        self._flavors[name] = (self._clock(), found)
        self._flavors.move_to_end(name)
        if len(self._flavors) > FLAVORS_KEPT:
            self._flavors.popitem(last=False)
        return found


def workload(job: Manifest, order: QueueOrder) -> Manifest:
    """Without its priority."""
    sets: list[Manifest] = []
    for one in order.pod_sets:
        least = {"minCount": one.least} if one.least is not None else {}
        near = {"topologyRequest": dict(one.topology)} if one.topology else {}
        sets.append({"name": one.name, "count": one.count, "template": one.template, **least, **near})
    return {
        "kind": "Workload",
        "metadata": asking.metadata_of(job, order.pod_sets),
        "spec": {"active": True, "queueName": order.queue, "podSets": sets},
    }


def place_of(found: Manifest, *, shares: Mapping[str, Share]) -> PlaceInQueue:
    spec, listed = found.get("spec") or {}, _conditions(found)

    def is_true(kind: str) -> bool:
        return listed.get(kind, {}).get("status") == "True"

    holds, evicted = is_true("QuotaReserved"), listed.get("Evicted", {})
    if "deletionTimestamp" in found["metadata"]:
        standing, words = QueueStanding.GOING, {}
    elif spec.get("active") is False:
        standing, words = QueueStanding.STOPPED, evicted if is_true("Evicted") else {}
    elif is_true("Evicted") and holds:
        standing, words = QueueStanding.WITHDRAWN, evicted
    elif is_true("Admitted") and holds:
        standing, words = QueueStanding.GRANTED, {}
    else:
        standing, words = QueueStanding.WAITS, listed.get("Admitted" if holds else "QuotaReserved", {})
    annotations, ref = found["metadata"].get("annotations") or {}, spec.get("priorityClassRef") or {}
    reason, said = str(words.get("reason") or ""), str(words.get("message") or "")
    queue = ((found.get("status") or {}).get("admission") or {}).get("clusterQueue")
    if standing is QueueStanding.GRANTED:
        message = ", ".join([f"ClusterQueue {queue}", *_fewer(found)])
    else:
        message = f"{said} ({reason})" if said else reason
    return PlaceInQueue(
        name=found["metadata"]["name"],
        uid=found["metadata"]["uid"],
        queue=str(spec.get("queueName") or ""),
        standing=standing,
        holds=holds,
        asked=annotations.get(names.ANNOTATION_INPUTS, ""),
        priority=str(ref.get("name") or "") if ref.get("kind") == OWN_CLASS else "",
        ready=is_true("PodsReady"),
        finished=is_true("Finished"),
        message=message[:MESSAGE_CHARS],
        shares=shares if standing is QueueStanding.GRANTED else {},
    )


def _fewer(found: Manifest) -> Iterator[str]:
    """How many pods each pod set that was admitted in part was given, in words."""
    assigned = ((found.get("status") or {}).get("admission") or {}).get("podSetAssignments") or []
    counts = {one["name"]: int(one.get("count") or 0) for one in assigned}
    for asked in (found.get("spec") or {}).get("podSets") or []:
        name, count = asked["name"], int(asked.get("count") or 0)
        if counts.get(name, count) < count:
            yield f"{counts[name]} of the {count} pods that pool {name} asked for"


def _of_topology(found: Manifest, pod_set: str) -> Manifest:
    """By these Kueue knows the pods that it chose nodes for, counts them no second time, and opens their gates one by
    one, each with the nodes' labels in its node selector. Kueue exchanges a node that fails."""
    asked = {one["name"]: one for one in (found.get("spec") or {}).get("podSets") or []}
    request = asked.get(pod_set, {}).get("topologyRequest") or {}
    kind = next((kind for kind in ("required", "preferred") if request.get(kind)), "unconstrained")
    annotations = {
        "kueue.x-k8s.io/workload": found["metadata"]["name"],
        f"kueue.x-k8s.io/podset-{kind}-topology": request.get(kind) or "true",
    }
    return {"annotations": annotations, "labels": {"kueue.x-k8s.io/podset": pod_set}}


def _share(count: int, parts: list[Manifest]) -> Share:
    def merged(key: str) -> dict[str, str]:
        return {name: str(value) for part in parts for name, value in (part.get(key) or {}).items()}

    tolerations: list[Mapping[str, Any]] = []
    for part in parts:
        tolerations += [t for t in part.get("tolerations") or [] if t not in tolerations]
    return Share(
        count=count, labels=merged("labels"), annotations=merged("annotations"), node_selector=merged("nodeSelector"),
        tolerations=tuple(tolerations),
    )  # fmt: skip


def _given_back(found: Manifest, order: QueueOrder, *, now: datetime) -> Manifest:
    """As Kueue's own integrations do it once a job's pods are gone: only then others may have the quota."""
    evicted = _conditions(found).get("Evicted", {})
    reason, said = str(evicted.get("reason") or "Pending"), str(evicted.get("message") or "")
    again = "True" if reason in _AGAIN_AT_ONCE else "False"
    changed = [
        {"type": "Requeued", "status": again, "reason": reason, "message": said},
        {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": said},
        {
            "type": "Admitted",
            "status": "False",
            "reason": "NoReservation",
            "message": "The workload has no reservation",
        },
    ]
    if "PodsReady" in _conditions(found):  # of the pods that are gone
        changed.append(
            {"type": "PodsReady", "status": "False", "reason": "WaitForStart", "message": "Not all pods are ready"}
        )
    return {"admission": None, "conditions": _with(found, changed, now=now)}


def _ready(found: Manifest, order: QueueOrder, *, now: datetime) -> Manifest:
    before = _conditions(found).get("PodsReady", {}).get("reason")
    reason = "Recovered" if before == WAITS_FOR_RECOVERY else "Started"
    ready = {"type": "PodsReady", "status": "True", "reason": reason, "message": "All pods are ready"}
    return {"conditions": _with(found, [ready], now=now)}


def _lacks(found: Manifest, order: QueueOrder, *, now: datetime) -> Manifest:
    said = order.message[:MESSAGE_CHARS]
    lacks = {"type": "PodsReady", "status": "False", "reason": WAITS_FOR_RECOVERY, "message": said}
    return {"conditions": _with(found, [lacks], now=now)}


def _finished(found: Manifest, order: QueueOrder, *, now: datetime) -> Manifest:
    reason = "Succeeded" if order.succeeded else "Failed"
    finished = {"type": "Finished", "status": "True", "reason": reason, "message": order.message[:MESSAGE_CHARS]}
    return {"conditions": _with(found, [finished], now=now)}


_CHANGES: Final = {
    OrderKind.GIVE_BACK: _given_back,
    OrderKind.READY: _ready,
    OrderKind.LACKS: _lacks,
    OrderKind.FINISH: _finished,
}  # fmt: skip


def _conditions(found: Manifest) -> dict[str, Manifest]:
    return {c["type"]: c for c in (found.get("status") or {}).get("conditions") or []}


def _with(found: Manifest, changed: list[Manifest], *, now: datetime) -> list[Manifest]:
    """A merge patch replaces the whole list; it goes with the version that was read."""
    listed = _conditions(found)
    generation = int(found["metadata"].get("generation") or 0)
    for new in changed:
        old = listed.get(new["type"], {})
        kept = old.get("status") == new["status"] and old.get("lastTransitionTime")
        listed[new["type"]] = {
            **new, "observedGeneration": generation, "lastTransitionTime": kept or times.text(now),
        }  # fmt: skip
    return list(listed.values())
