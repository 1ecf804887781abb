"""A pod's `status` as a kubelet writes it, computed from what its containers do. Pure.

For: `pod_life.py`, which writes it. Not for: decisions.
Checked against a real kubelet by the conformance suite: order and reasons of conditions matter, as the operator
reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

from rlinf_api import times
from rlinf_api.errors import RetryableError
from rljob.local.objects import Manifest

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    started_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminated:
    exit_code: int
    reason: str
    message: str
    started_at: datetime
    finished_at: datetime


State: TypeAlias = Waiting | Running | Terminated


@dataclass(slots=True)
class ContainerRecord:
    """What is known of one container; its ContainerLife writes it, pod_status reads it."""

    name: str
    image: str = ""
    state: State = field(default_factory=lambda: Waiting(reason=CONTAINER_CREATING))
    ready: bool = False
    process_id: int = 0
    over: bool = False


@dataclass(slots=True)
class RanPod:
    """`failure` (reason, message): the pod failed as a whole, before or beside its containers."""

    init: list[ContainerRecord]
    main: list[ContainerRecord]
    pod_ip: str = ""
    host_ip: str = ""
    started_at: datetime | None = None
    scheduled: bool = False
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
        "qosClass": previous.get("qosClass", "BestEffort"),
    }
    if record.init:
        status["initContainerStatuses"] = [_container_status(container) for container in record.init]
    if record.pod_ip:
        status |= {"podIP": record.pod_ip, "podIPs": [{"ip": record.pod_ip}]}
    if record.host_ip:
        status |= {"hostIP": record.host_ip, "hostIPs": [{"ip": record.host_ip}]}
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
    if not initialized(record):
        return "Pending"
    if all(c.over for c in record.main):
        return "Succeeded" if all(succeeded(c) for c in record.main) else "Failed"
    return "Pending" if any(isinstance(c.state, Waiting) for c in record.main) else "Running"


def initialized(record: RanPod) -> bool:
    return all(c.over and succeeded(c) for c in record.init)


def succeeded(container: ContainerRecord) -> bool:
    return isinstance(container.state, Terminated) and container.state.exit_code == 0


def _conditions(record: RanPod, *, phase: str, previous: Sequence[Manifest], now: datetime) -> list[Manifest]:
    if not record.scheduled:
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
        incomplete = [c.name for c in record.init if not (c.over and succeeded(c))]
        wanted = [
            _condition("PodReadyToStartContainers", record.volumes_ready and phase in ("Pending", "Running")),
            _condition("Initialized", True, "PodCompleted" if phase == "Succeeded" else "")
            if not incomplete
            else _condition(
                "Initialized",
                False,
                "ContainersNotInitialized",
                f"containers with incomplete status: [{' '.join(incomplete)}]",
            ),
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
    running = isinstance(container.state, Running)
    status: Manifest = {
        "name": container.name,
        "image": container.image,
        "imageID": "",
        "ready": container.ready,
        "started": running,
        "restartCount": 0,
        "state": _state(container.state, container.process_id),
        "lastState": {},
    }
    if not isinstance(container.state, Waiting):
        status["containerID"] = f"process://{container.process_id}"
    return status


def _state(state: State, process_id: int) -> Manifest:
    match state:
        case Waiting(reason=reason, message=message):
            return {"waiting": {"reason": reason} | ({"message": message} if message else {})}
        case Running(started_at=started_at):
            return {"running": {"startedAt": times.text(started_at)}}
        case Terminated():
            terminated: Manifest = {
                "exitCode": state.exit_code,
                "reason": state.reason,
                "startedAt": times.text(state.started_at),
                "finishedAt": times.text(state.finished_at),
                "containerID": f"process://{process_id}",
            }
            return {"terminated": terminated | ({"message": state.message} if state.message else {})}


def fresh_record(pod: Manifest) -> RanPod:
    def records(containers: Iterable[Manifest], reason: str) -> list[ContainerRecord]:
        return [ContainerRecord(c["name"], image=c.get("image", ""), state=Waiting(reason=reason)) for c in containers]

    spec = pod["spec"]
    init = records(spec.get("initContainers") or [], POD_INITIALIZING)
    return RanPod(
        init=init, main=records(spec.get("containers") or [], POD_INITIALIZING if init else CONTAINER_CREATING)
    )
