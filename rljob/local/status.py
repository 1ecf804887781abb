"""A pod's `status` as a kubelet writes it, computed from what its containers do. Pure.

For: `pod_life.py`, which writes it. Not for: decisions.
Checked against a real kubelet by the conformance suite: order and reasons of conditions matter, as the operator
reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rlinf_api import times
from rlinf_api.errors import RetryableError
from rljob.local.objects import Manifest, clone

NODE_NAME, HOST_IP = "local", "127.0.0.1"
CONTAINER_CREATING = "ContainerCreating"
CREATE_CONTAINER_CONFIG_ERROR = "CreateContainerConfigError"
POD_INITIALIZING = "PodInitializing"
OURS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")


class NotYet(RetryableError):
    """Why a container cannot start yet: tried again until it can, never fatal, never a traceback.

    `waiting_reason` goes to containerStatuses[].state.waiting.reason, `event_reason` to an Event of the pod.

    `is_of_machine`: no object is missing that somebody may still make; this machine refuses something.
    """

    def __init__(
        self, what: str, *, waiting_reason: str, event_reason: str, next: str = "", is_of_machine: bool = False
    ) -> None:
        super().__init__(what, next=next)
        self.waiting_reason, self.event_reason = waiting_reason, event_reason
        self.is_of_machine = is_of_machine


def waiting(reason: str, message: str = "") -> Manifest:
    """A container's state, as the others here: what stands in its status.

    >>> waiting("ContainerCreating")
    {'waiting': {'reason': 'ContainerCreating'}}
    """
    return {"waiting": {"reason": reason} | ({"message": message} if message else {})}


def running(started_at: datetime) -> Manifest:
    return {"running": {"startedAt": times.text(started_at)}}


def terminated(exit_code: int, reason: str, message: str, *, started_at: datetime, finished_at: datetime) -> Manifest:
    ended: Manifest = {
        "exitCode": exit_code,
        "reason": reason,
        "startedAt": times.text(started_at),
        "finishedAt": times.text(finished_at),
    }
    return {"terminated": ended | ({"message": message} if message else {})}


@dataclass(slots=True)
class ContainerRecord:
    """What is known of one container; its ContainerLife writes it, pod_status reads it."""

    name: str
    image: str = ""
    state: Manifest = field(default_factory=lambda: waiting(CONTAINER_CREATING))
    ready: bool = False
    process_id: int = 0

    @property
    def over(self) -> bool:
        return "terminated" in self.state


@dataclass(slots=True)
class RanPod:
    """`failure` (reason, message): the pod failed as a whole, before or beside its containers."""

    init: list[ContainerRecord]
    main: list[ContainerRecord]
    pod_ip: str = ""
    "Empty: no place is found yet."
    started_at: datetime | None = None
    unschedulable: str = ""
    volumes_ready: bool = False
    failure: tuple[str, str] | None = None


def pod_status(record: RanPod, *, previous: Manifest, generation: int, now: datetime) -> Manifest:
    """`previous` is the status to be replaced: transition times and others' conditions are taken over from it."""
    phase = _phase(record)
    status: Manifest = {
        "phase": phase,
        "observedGeneration": generation,
        "conditions": _conditions(record, phase=phase, previous=previous.get("conditions") or [], now=now),
        "containerStatuses": [_container_status(container) for container in record.main],
    }
    if record.init:
        status["initContainerStatuses"] = [_container_status(container) for container in record.init]
    if record.pod_ip:
        status |= {"podIP": record.pod_ip, "podIPs": [{"ip": record.pod_ip}]}
        status |= {"hostIP": HOST_IP, "hostIPs": [{"ip": HOST_IP}]}
    if record.started_at:
        status["startTime"] = times.text(record.started_at)
    if record.failure:
        status |= {"reason": record.failure[0], "message": record.failure[1]}
    return status


def _phase(record: RanPod) -> str:
    if record.failure:
        return "Failed"
    if any(c.over and not succeeded(c) for c in record.init):
        return "Failed"
    if not all(map(succeeded, record.init)):
        return "Pending"
    if all(c.over for c in record.main):
        return "Succeeded" if all(map(succeeded, record.main)) else "Failed"
    return "Pending" if any("waiting" in c.state for c in record.main) else "Running"


def succeeded(container: ContainerRecord) -> bool:
    return container.over and container.state["terminated"]["exitCode"] == 0


def _conditions(record: RanPod, *, phase: str, previous: Sequence[Manifest], now: datetime) -> list[Manifest]:
    if not record.pod_ip:
        wanted = (
            [_condition("PodScheduled", False, "Unschedulable", record.unschedulable)] if record.unschedulable else []
        )
    else:
        unready = [c.name for c in record.main if not c.ready]
        message = f"containers with unready status: [{' '.join(unready)}]"
        if phase in ("Succeeded", "Failed"):
            ready, reason, message = False, "PodCompleted" if phase == "Succeeded" else "PodFailed", ""
        else:
            ready, reason, message = (not unready, "", "") if not unready else (False, "ContainersNotReady", message)
        initialized = _condition("Initialized", True, "PodCompleted" if phase == "Succeeded" else "")
        if incomplete := [c.name for c in record.init if not succeeded(c)]:
            why = f"containers with incomplete status: [{' '.join(incomplete)}]"
            initialized = _condition("Initialized", False, "ContainersNotInitialized", why)
        wanted = [
            _condition("PodReadyToStartContainers", record.volumes_ready and phase in ("Pending", "Running")),
            initialized,
            _condition("Ready", ready, reason, message),
            _condition("ContainersReady", ready, reason, message),
            _condition("PodScheduled", True),
        ]
    before = {condition["type"]: condition for condition in previous}
    for condition in wanted:
        old = before.get(condition["type"])
        same = old is not None and old["status"] == condition["status"]
        condition["lastTransitionTime"] = old["lastTransitionTime"] if old and same else times.text(now)
    return wanted + [dict(condition) for condition in previous if condition["type"] not in OURS]


def _condition(kind: str, holds: bool, reason: str = "", message: str = "") -> dict[str, Any]:
    condition = {"type": kind, "status": "True" if holds else "False", "lastProbeTime": None}
    return condition | ({"reason": reason} if reason else {}) | ({"message": message} if message else {})


def _container_status(container: ContainerRecord) -> Manifest:
    status: Manifest = {
        "name": container.name,
        "image": container.image,
        "ready": container.ready,
        "started": "running" in container.state,
        "restartCount": 0,
        "state": clone(container.state),
    }
    if "waiting" not in container.state:
        status["containerID"] = f"process://{container.process_id}"
    if container.over:
        status["state"]["terminated"]["containerID"] = status["containerID"]
    return status


def fresh_record(pod: Manifest) -> RanPod:
    def records(containers: Iterable[Manifest], reason: str) -> list[ContainerRecord]:
        return [ContainerRecord(c["name"], image=c.get("image", ""), state=waiting(reason)) for c in containers]

    spec = pod["spec"]
    init = records(spec.get("initContainers") or [], POD_INITIALIZING)
    return RanPod(
        init=init, main=records(spec.get("containers") or [], POD_INITIALIZING if init else CONTAINER_CREATING)
    )
