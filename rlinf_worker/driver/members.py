"""Who is there: pods with their agents, workers with the life that counts. Pure records and rules; the driver's core
changes them and sends the messages.

    DOWN --start()--> STARTING --hello--> CONNECTED --Ready--> READY
      ^                  |                    |                  |
      +-- exited, or its pod lost; the attempt grows at the next start ----+

An attempt fences its sender: whatever comes from a lower one than `attempt` is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from rlinf_api.names import WorkerId
from rlinf_api.plan import PlacedWorker, Placement
from rlinf_worker.channels.protocol import PolicyVersion

PodKey = tuple[str, int]  # pool, ordinal


class WorkerState(Enum):
    DOWN = "down"
    STARTING = "starting"
    CONNECTED = "connected"
    READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a worker's links listen."""

    worker: str
    attempt: int
    pod_uid: str = ""
    unix_path: str = ""
    host: str = ""
    port: int = 0


@dataclass(slots=True)
class WorkerRecord:
    placed: PlacedWorker
    attempt: int = 0
    state: WorkerState = WorkerState.DOWN
    endpoint: Endpoint | None = None
    failures: int = 0  # in a row, without having been ready in between
    restarts: int = 0
    start_at: float = 0.0  # not before (back-off)
    started_at: float = 0.0
    progress: str = ""
    silent_s: float = 0.0
    joined_port: int | None = None  # asked for the roster, with this store port
    restored: PolicyVersion | None = None  # the checkpoint that it said it stands on
    begun: bool = False  # has been told Begin in this life, by this driver or one before

    @property
    def present(self) -> bool:
        return self.state in (WorkerState.CONNECTED, WorkerState.READY)


@dataclass(slots=True)
class PodRecord:
    key: PodKey
    attempt: int = 0
    pod: str = ""
    node: str = ""
    pod_uid: str = ""
    attached: bool = False
    last_heartbeat: float = 0.0
    lost_at: float | None = None  # the stream broke; declared lost after a grace


@dataclass(slots=True)
class Members:
    pods: dict[PodKey, PodRecord] = field(default_factory=dict)
    workers: dict[WorkerId, WorkerRecord] = field(default_factory=dict)

    def adopt(self, placement: Placement) -> None:
        """Take over a plan; records of workers that stay are kept."""
        wanted = {w.id: w for w in placement.workers}
        self.workers = {wid: self.workers.get(wid) or WorkerRecord(placed) for wid, placed in wanted.items()}
        for wid, placed in wanted.items():
            self.workers[wid].placed = placed
        # Also pods without a worker: their agents are members, and not strangers to be sent away.
        keys = {(pool, ordinal) for pool, count in placement.pods.items() for ordinal in range(count)}
        self.pods = {key: self.pods.get(key) or PodRecord(key) for key in sorted(keys)}

    def of_role(self, role: str) -> list[WorkerRecord]:
        """In rank order."""
        return sorted((w for w in self.workers.values() if w.placed.role == role), key=lambda w: w.placed.rank)

    def in_pod(self, key: PodKey) -> list[WorkerRecord]:
        return [w for w in self.workers.values() if w.placed.pod == key]

    def all_ready(self) -> bool:
        return bool(self.workers) and all(w.state is WorkerState.READY for w in self.workers.values())

    def missing(self) -> list[str]:
        """Who is awaited, by role, pod and node: one phrase each, pods first."""
        phrases = [f"agent of pod {key[0]}-{key[1]}" for key, pod in self.pods.items() if not pod.attached]
        for wid, record in self.workers.items():
            pod = self.pods.get(record.placed.pod)
            if record.state is not WorkerState.READY and pod is not None and pod.attached:
                where = f"pod {pod.pod}" + (f" on node {pod.node}" if pod.node else "")
                phrases.append(f"worker {wid} in {where}: {record.progress or record.state.value}")
        return phrases

    def next_start(self, now: float) -> Iterable[WorkerRecord]:
        """Workers that may be started now: down, back-off over, their agent attached."""
        for record in self.workers.values():
            pod = self.pods.get(record.placed.pod)
            if record.state is WorkerState.DOWN and record.start_at <= now and pod is not None and pod.attached:
                yield record
