"""A pod's manifest as the few facts that decisions rest on. Pure; the only reader of pods' status.

A pod is what its main container is, `driver` or `agent`: a pod with a sidecar (a log shipper, a mesh's proxy that a
webhook put there) is Running for as long as that lives, Pending while its image is pulled, and not ready whenever it is
not.

| main container | pod says | phase here |
|---|---|---|
| terminated, or restarted in place | anything | Succeeded or Failed, by its exit code |
| running | Pending | Running |
| anything else, or no word of it | phase | the same |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rlinf_api import names, times
from rlinf_operator.manifests.metadata import MAX_POD_MESSAGE, NOT_ALL_READY, Manifest, native_sidecars

EPOCH = datetime.fromtimestamp(0, UTC)
ENDED = ("Succeeded", "Failed")
IMAGE_REASONS = frozenset({
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError",
    "RegistryUnavailable",
})  # fmt: skip


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
    """The phase of the main container, by the table above."""
    lingers: bool = False
    """The main container has ended and the pod has not: another container keeps it."""
    ready: bool = False
    """Whether the main container is ready, on a node that is heard of."""
    node: str = ""
    ip: str = ""
    created_at: datetime
    started_at: datetime | None = None
    """When the main container began to run, as it does now."""
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
    scheduled_at: datetime | None = None
    """When it was given its node; only of one whose container waits there to begin."""
    pod_reason: str = ""
    """status.reason: Evicted, NodeShutdown, ..."""
    pod_message: str = ""
    """status.message of one that failed: what its kubelet says of the reason."""

    @property
    def has_ended(self) -> bool:
        return self.phase in ENDED

    @property
    def at_work(self) -> bool:
        """The main container runs, and nobody has told it to stop."""
        return self.phase == "Running" and self.deleted_at is None

    @property
    def waits_for_its_image(self) -> bool:
        return self.waiting_reason in IMAGE_REASONS

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
    state, phase = container.get("state") or {}, status.get("phase") or "Pending"
    ended, waiting = _end(container), state.get("waiting") or {}
    lingers, runs = bool(ended) and phase not in ENDED, "running" in state
    if ended:
        phase = "Succeeded" if ended.get("exitCode") == 0 else "Failed"
    elif runs and phase == "Pending":
        phase = "Running"
    failed_init = ""
    if not ended and not runs:
        failed_init, ended, waiting = _init(pod, waiting)
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
        phase=phase,
        lingers=lingers,
        ready=_is_ready(ready, container) and phase not in ENDED and "deletionTimestamp" not in meta,
        node=(pod.get("spec") or {}).get("nodeName") or "",
        ip=status.get("podIP") or "",
        created_at=times.parse(meta.get("creationTimestamp")) or EPOCH,
        started_at=times.parse((state.get("running") or {}).get("startedAt")),
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
        scheduled_at=_scheduled_at(scheduled) if waiting else None,
        pod_reason=status.get("reason") or "",
        pod_message=str(status.get("message") or "")[:MAX_POD_MESSAGE] if status.get("phase") == "Failed" else "",
    )


def _end(container: Mapping[str, Any]) -> Mapping[str, Any]:
    """How it ended; of one that its kubelet has started again (a template's containers[].restartPolicy), how it did
    first: its attempt is over, and who was told of it would take the second life for the first."""
    states = (container.get("lastState") or {}, container.get("state") or {})
    return next((state["terminated"] for state in states if state.get("terminated")), {})


def _is_ready(condition: Mapping[str, Any], container: Mapping[str, Any]) -> bool:
    """By the pod's word, or by its own where the kubelet says that only another container is not. A pod of a node that
    nobody hears of is not ready for no such reason."""
    others = condition.get("reason") == NOT_ALL_READY and container.get("ready") is True
    return condition.get("status") == "True" or others


def _init(pod: Manifest, waiting: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
    """A pod whose own container has not begun: which init container failed, how it ended, and what is waited for. A
    native sidecar that ends is started again."""
    sidecars = native_sidecars(pod)
    for init in (pod.get("status") or {}).get("initContainerStatuses") or []:
        name, state = init.get("name") or "", init.get("state") or {}
        ended, waits = state.get("terminated") or {}, state.get("waiting") or {}
        if ended.get("exitCode") and name not in sidecars:
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
    well = not pod.has_ended and pod.exit_code is None and pod.deleted_at is None
    return well and pod.component == names.COMPONENT_WORKER and not pod.disruption


def _unschedulable(condition: Mapping[str, Any]) -> str:
    if condition.get("status") != "False" or condition.get("reason") != "Unschedulable":
        return ""
    return str(condition.get("message") or "no node has room")


def _scheduled_at(condition: Mapping[str, Any]) -> datetime | None:
    return times.parse(condition.get("lastTransitionTime")) if condition.get("status") == "True" else None


def _number(text: object, default: int) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() else default
