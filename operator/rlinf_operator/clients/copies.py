"""What the cache keeps of an object: the fields that a pass reads, as text. Pure; for reflector.py and cache.py.

As JSON text a pod takes 0.7 KB, as dicts 8 KB and as the API server sends it, decoded, 40 KB; ten thousand of them are
7 MB. Reading one takes 4 us (pydantic's JSON, three times as quick as Python's), and whoever reads has a copy of his
own.

A field that a pass begins to read must be named here: tests/unit/rlinf_operator/test_copies.py compares what observe.py
makes of an object with what it makes of its copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pydantic_core

from rlinf_api import names
from rlinf_operator.manifests.metadata import MAX_POD_MESSAGE, NOT_ALL_READY, Manifest, native_sidecars

_META: Final = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
_OURS: Final = f"{names.GROUP}/"
_TOLD_WHEN: Final = {"Ready": "True", "PodScheduled": "False", "DisruptionTarget": "True"}
"""Conditions of a pod that say something, with the status in which they do."""
_CONDITION: Final = ("type", "status", "reason", "message")
_SCHEDULED: Final = ("type", "status", "lastTransitionTime")
_MAIN: Final = (names.CONTAINER_DRIVER, names.CONTAINER_AGENT)
_STATE: Final = {
    "running": ("startedAt",),
    "waiting": ("reason", "message"),
    "terminated": ("exitCode", "reason", "message", "finishedAt"),
}
_WORKLOAD_STATUS: Final = ("conditions", "admission", "admissionChecks")
_POD_STATUS: Final = ("phase", "podIP", "reason")


@dataclass(frozen=True, slots=True)
class Copy:
    uid: str
    version: int
    labels: tuple[str, ...]
    """Values of the labels that the reflector indexes, empty where there is none."""
    text: bytes

    def read(self) -> Manifest:
        found: Manifest = pydantic_core.from_json(self.text)
        return found


def of(kept: Manifest, *, indexed: tuple[str, ...]) -> Copy:
    """A copy of what `trimmed` left."""
    meta = kept["metadata"]
    return Copy(
        uid=meta["uid"],
        version=number(meta.get("resourceVersion")),
        labels=tuple(meta["labels"].get(name, "") for name in indexed),
        text=pydantic_core.to_json(kept),
    )


def trimmed(obj: Manifest, *, metadata_only: bool) -> Manifest:
    kept: Manifest = {"kind": obj["kind"], "metadata": _metadata(obj["metadata"])}
    if metadata_only:
        return kept
    if obj["kind"] == "Pod":
        return kept | {"spec": _some(obj.get("spec") or {}, ("nodeName",)), "status": _pod_status(obj)}
    if obj["kind"] == "Workload":
        return kept | _workload(obj)
    if obj["kind"] == "PodGroup":  # what becomes of it, its pods say
        return kept | _some(obj, ("spec",))
    return kept | {key: obj[key] for key in ("spec", "status") if key in obj}


def is_news(before: Copy, kept: Manifest) -> bool:
    """Whether a pass could decide otherwise. A pod that was given a node could not: its start is what matters."""
    return before.uid != kept["metadata"]["uid"] or _telling(before.read()) != _telling(kept)


def _telling(kept: Manifest) -> Manifest:
    meta = {key: value for key, value in kept["metadata"].items() if key != "resourceVersion"}
    return kept | {"metadata": meta, "spec": {} if kept["kind"] == "Pod" else kept.get("spec")}


def number(version: object) -> int:
    """resourceVersions of one kind are compared as numbers. Kubernetes promises so since 1.35; older ones, which
    the chart allows, hand out etcd's revisions, which are numbers that rise as well."""
    return int(version) if isinstance(version, str) and version.isdecimal() else 0


def _workload(obj: Manifest) -> Manifest:
    """Without the templates of its pods, and of the nodes that were chosen for them only by which labels: Kueue itself
    writes them into pods."""
    spec, status = obj.get("spec") or {}, _some(obj.get("status") or {}, _WORKLOAD_STATUS)
    sets = [_some(one, ("name", "count", "topologyRequest")) for one in spec.get("podSets") or []]
    if admission := status.get("admission"):
        assigned = [_assignment(one) for one in admission.get("podSetAssignments") or []]
        status["admission"] = {**admission, "podSetAssignments": assigned}
    return {"spec": {**_some(spec, ("queueName", "active", "priorityClassRef")), "podSets": sets}, "status": status}


def _assignment(one: Manifest) -> Manifest:
    chosen = one.get("topologyAssignment")
    return {**one, "topologyAssignment": _some(chosen, ("levels",))} if chosen is not None else one


def _metadata(meta: Mapping[str, Any]) -> Manifest:
    kept = _some(meta, _META)
    for field in ("labels", "annotations"):
        kept[field] = {key: value for key, value in (meta.get(field) or {}).items() if key.startswith(_OURS)}
    kept["ownerReferences"] = [{"uid": owner.get("uid")} for owner in meta.get("ownerReferences") or []]
    return kept


def _pod_status(pod: Manifest) -> Manifest:
    status = pod.get("status") or {}
    kept = _some(status, _POD_STATUS)
    if status.get("phase") == "Failed" and status.get("message"):
        kept["message"] = status["message"][:MAX_POD_MESSAGE]
    kept["conditions"] = [
        _some(condition, _CONDITION if _is_told(condition) else _CONDITION[:3])
        for condition in status.get("conditions") or []
        if _is_told(condition) or (condition.get("type") == "Ready" and condition.get("reason") == NOT_ALL_READY)
    ]
    main = (c for c in status.get("containerStatuses") or [] if c.get("name") in _MAIN)
    kept["containerStatuses"] = [_container(container) for container in main]
    sidecars = native_sidecars(pod)
    inits = status.get("initContainerStatuses") or []
    unwell = [_container(c) for c in inits if _is_unwell(c, restarts=c.get("name") in sidecars)]
    if unwell:
        kept["initContainerStatuses"] = unwell
    if any("waiting" in container["state"] for container in (*kept["containerStatuses"], *unwell)):
        # Not before: a pod that was given a node is no news.
        kept["conditions"] += [_some(c, _SCHEDULED) for c in status.get("conditions") or [] if _is_scheduled(c)]
    return kept


def _is_told(condition: Mapping[str, Any]) -> bool:
    return _TOLD_WHEN.get(str(condition.get("type"))) == condition.get("status")


def _is_scheduled(condition: Mapping[str, Any]) -> bool:
    return (condition.get("type"), condition.get("status")) == ("PodScheduled", "True")


def _container(container: Mapping[str, Any]) -> Manifest:
    kept = {"name": container.get("name"), "state": _state(container.get("state") or {})}
    if ended := (container.get("lastState") or {}).get("terminated"):
        kept["lastState"] = _state({"terminated": ended})
    return kept | ({"ready": True} if container.get("ready") else {})


def _state(states: Mapping[str, Any]) -> Manifest:
    return {kind: _some(state, _STATE[kind]) for kind, state in states.items() if kind in _STATE}


def _is_unwell(init: Mapping[str, Any], *, restarts: bool) -> bool:
    """Whether an init container failed, or cannot begin. Most pods have none. `restarts`: it is a native sidecar, whose
    end fails nothing."""
    state = init.get("state") or {}
    ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    failed = bool(ended.get("exitCode")) and not restarts
    return failed or waiting.get("reason", "PodInitializing") != "PodInitializing"


def _some(source: Mapping[str, Any], keys: tuple[str, ...]) -> Manifest:
    return {key: source[key] for key in keys if key in source}
