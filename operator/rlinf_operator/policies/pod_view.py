"""A pod's manifest as the few facts that decisions rest on. Pure; the only reader of pods' status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rlinf_api import names, times
from rlinf_operator.manifests.metadata import MAX_POD_MESSAGE, Manifest

EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """What matters of one pod of the job."""

    name: str
    uid: str
    component: str
    pool: str = ""
    ordinal: int = 0
    attempt: int = 1
    life: int = 1
    inputs: str = ""
    phase: str = "Pending"
    ready: bool = False
    node: str = ""
    ip: str = ""
    created_at: datetime
    deleted_at: datetime | None = None
    """deletionTimestamp: when it must be gone, its grace included."""
    disruption: str = ""
    """Reason of condition DisruptionTarget."""
    exit_code: int | None = None
    exit_reason: str = ""
    exit_message: str = ""
    failed_init: str = ""
    """Name of the init container of which exit code, reason and message are."""
    finished_at: datetime | None = None
    waiting_reason: str = ""
    waiting_message: str = ""
    unschedulable: str = ""
    pod_reason: str = ""
    """status.reason: Evicted, NodeShutdown, ..."""
    pod_message: str = ""
    """status.message of one that failed: what its kubelet says of the reason."""

    @property
    def place(self) -> PodPlace:
        return PodPlace(component=self.component, pool=self.pool, ordinal=self.ordinal)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PodPlace:
    """Where exactly one pod belongs: the driver's, or one ordinal of a pool."""

    component: str
    pool: str = ""
    ordinal: int = 0

    def __str__(self) -> str:
        return f"{self.pool}-{self.ordinal}" if self.pool else self.component


def view(pod: Manifest) -> PodView:
    meta, status = pod["metadata"], pod.get("status") or {}
    label, annotation = meta.get("labels") or {}, meta.get("annotations") or {}
    component = label.get(names.LABEL_COMPONENT, "")
    own = names.CONTAINER_DRIVER if component == names.COMPONENT_DRIVER else names.CONTAINER_AGENT
    container: Mapping[str, Any] = next((c for c in status.get("containerStatuses") or [] if c.get("name") == own), {})
    state = container.get("state") or {}
    ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    failed_init = ""
    if not ended and not state.get("running"):
        failed_init, ended, waiting = _init(status.get("initContainerStatuses") or [], waiting)
    conditions = {c.get("type"): c for c in status.get("conditions") or []}
    scheduled, ready = conditions.get("PodScheduled", {}), conditions.get("Ready", {})
    disruption = conditions.get("DisruptionTarget", {})
    return PodView(
        name=meta["name"],
        uid=meta["uid"],
        component=component,
        pool=label.get(names.LABEL_POOL, ""),
        ordinal=_number(label.get(names.LABEL_ORDINAL), 0),
        attempt=_number(label.get(names.LABEL_ATTEMPT), 1),
        life=_number(annotation.get(names.ANNOTATION_LIFE), 1),
        inputs=annotation.get(names.ANNOTATION_INPUTS, ""),
        phase=status.get("phase") or "Pending",
        ready=ready.get("status") == "True" and "deletionTimestamp" not in meta,
        node=(pod.get("spec") or {}).get("nodeName") or "",
        ip=status.get("podIP") or "",
        created_at=times.parse(meta.get("creationTimestamp")) or EPOCH,
        deleted_at=times.parse(meta.get("deletionTimestamp")),
        disruption=disruption.get("reason", "") if disruption.get("status") == "True" else "",
        exit_code=ended.get("exitCode"),
        exit_reason=ended.get("reason") or "",
        exit_message=ended.get("message") or "",
        failed_init=failed_init,
        finished_at=times.parse(ended.get("finishedAt")),
        waiting_reason=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        unschedulable=_unschedulable(scheduled),
        pod_reason=status.get("reason") or "",
        pod_message=str(status.get("message") or "")[:MAX_POD_MESSAGE] if status.get("phase") == "Failed" else "",
    )


def _init(
    statuses: Sequence[Mapping[str, Any]], waiting: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
    """A pod whose own container has not begun: which init container failed, how it ended, and what is waited for."""
    for init in statuses:
        name, state = init.get("name") or "", init.get("state") or {}
        ended, waits = state.get("terminated") or {}, state.get("waiting") or {}
        if ended.get("exitCode"):
            return name, ended, waiting
        if waits.get("reason", "PodInitializing") != "PodInitializing":
            words = f"init container {name}: {waits.get('message') or ''}"
            return "", {}, {"reason": waits["reason"], "message": words.removesuffix(": ")}
    return "", {}, waiting


def is_good_news(obj: Manifest) -> bool:
    """Whether a worker's pod is as it should be, on its way or ready: nobody waits for a decision about it."""
    if obj["kind"] != "Pod" or obj.get("gone"):
        return False
    pod = view(obj)
    well = pod.phase in ("Pending", "Running") and pod.exit_code is None and pod.deleted_at is None
    return well and pod.component == names.COMPONENT_WORKER and not pod.disruption


def _unschedulable(condition: Mapping[str, Any]) -> str:
    if condition.get("status") != "False" or condition.get("reason") != "Unschedulable":
        return ""
    return str(condition.get("message") or "no node has room")


def _number(text: object, default: int) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() else default
