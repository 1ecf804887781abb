"""Who is there: pods with their agents, workers with the life that counts. Pure records and rules; the driver's core
changes them and sends the messages.

    DOWN --start()--> STARTING --hello--> CONNECTED --Ready--> READY
      ^                  |                    |                  |
      +-- exited, or its pod lost; the attempt grows at the next start ----+

An attempt fences its sender: whatever comes from a lower one than `attempt` is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from enum import Enum

from rlinf_api.job import FailurePolicySpec
from rlinf_api.names import WorkerId
from rlinf_api.placement import Placement
from rlinf_api.slots import PlacedWorker
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.links.endpoint import Endpoint

PodKey = tuple[str, int]  # pool, ordinal


class WorkerState(Enum):
    DOWN = "down"
    STARTING = "starting"
    CONNECTED = "connected"
    READY = "ready"


@dataclass(slots=True)
class WorkerRecord:
    placed: PlacedWorker
    attempt: int = 0
    state: WorkerState = WorkerState.DOWN
    endpoint: Endpoint | None = None
    failures: int = 0  # in a row, without having been ready in between
    restarts: int = 0
    losses: tuple[PolicyVersion, int] = (PolicyVersion(0, 0), 0)  # behind which step it ended, how often in a row there
    why: str = ""  # of its last end
    ended_at: float | None = None  # likewise, its first sign
    start_at: float = 0.0  # not before (back-off)
    started_at: float = 0.0
    start_deadline_s: float = 0.0  # of this life's phase `start`, as its agent says; 0: it has not yet
    progress: str = ""
    silent_s: float = 0.0  # since it last said that its role's work moves, or waits for others
    still_s: float = 0.0  # since its role's work moved
    doing: str = ""  # at what it stands still
    kept: str = ""  # what it keeps on slots that it has left, beyond its plan
    joined: bool = False  # has asked for its roster in this life
    restored: PolicyVersion | None = None  # the checkpoint that it said it stands on
    state_json: str = ""  # its driver.json
    from_spare: str = ""  # the warm spare that this life was before
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
    attached: bool = False
    last_heartbeat: float = 0.0
    lost_at: float | None = None  # the stream broke; declared lost after a grace
    absent_since: float | None = None  # no agent has been attached, as this driver knows
    has_left: bool = False  # this attempt was told that it may end, and does not come back
    wanted: bool = True  # by the plan in force; others are there for a plan that is being prepared, or was until now

    @property
    def is_given_up(self) -> bool:
        """No agent is there, and none is waited for whose stream broke a moment ago."""
        return not self.attached and self.lost_at is None


class Failures:
    """How many are too many (spec.failurePolicy): of the workers of a job, of the warm spares of a role."""

    def __init__(self, policy: FailurePolicySpec) -> None:
        self._policy = policy
        self._at: deque[float] = deque(maxlen=policy.max_restarts + 1)

    def add(self, now: float) -> bool:
        """Whether this one is too many."""
        self._at.append(now)
        return len(self._at) > self._policy.max_restarts and now <= self.forgotten_at

    @property
    def count(self) -> int:
        return len(self._at)

    @property
    def forgotten_at(self) -> float:
        """When the oldest of them counts no more."""
        return self._at[0] + self._policy.reset_after_seconds


@dataclass(slots=True)
class Members:
    pods: dict[PodKey, PodRecord] = field(default_factory=dict)
    workers: dict[WorkerId, WorkerRecord] = field(default_factory=dict)
    """Who the plan in force has."""
    prepared: dict[WorkerId, WorkerRecord] = field(default_factory=dict)
    """Who the plan that is being prepared adds. They load beside the others and get no work."""
    away: frozenset[WorkerId] = frozenset()
    """Workers whose work others do (presence.py)."""
    _awaited: WorkerId | None = None  # one that was not ready
    _by_role: dict[str, list[WorkerRecord]] = field(default_factory=dict)  # of `workers`, until they change
    _next_pods: frozenset[PodKey] = frozenset()
    _attempts: dict[WorkerId, int] = field(default_factory=dict)  # of those that have left: no number twice

    def adopt(self, placement: Placement) -> None:
        """Take over a plan; records of workers that stay, or were prepared for it, are kept."""
        wanted = {w.id: w for w in placement.workers}
        known = {**self.prepared, **self.workers}
        self.workers = {wid: known.get(wid) or self._new(placed) for wid, placed in wanted.items()}
        self._by_role.clear()
        self.prepared = {}
        for wid, placed in wanted.items():
            self.workers[wid].placed = placed
        # Also pods without a worker: their agents are members, and not strangers to be sent away.
        keys = placement.places()
        self._next_pods = frozenset()
        for key in keys:
            self.pods.setdefault(key, PodRecord(key))
        self.pods = {k: pod for k, pod in sorted(self.pods.items()) if k in keys or pod.attached}
        for key, pod in self.pods.items():
            pod.wanted = key in keys

    def _new(self, placed: PlacedWorker) -> WorkerRecord:
        return WorkerRecord(placed, attempt=self._attempts.get(placed.id, 0))

    def prepare(self, placed: Iterable[PlacedWorker], *, pods: Iterable[PodKey]) -> None:
        """Expect these beside what is there."""
        self.prepared = {worker.id: self._new(worker) for worker in placed}
        self._next_pods = frozenset(pods)
        for key in self._next_pods:
            self.pods.setdefault(key, PodRecord(key, wanted=False))

    def leave(self, worker: WorkerId) -> None:
        """It is in no plan any more, or begins a life elsewhere."""
        self._by_role.clear()
        record = self.workers.pop(worker, None) or self.prepared.pop(worker, None)
        if record is not None:
            self._attempts[worker] = max(record.attempt, self._attempts.get(worker, 0))

    def give_up_next(self) -> None:
        """The plan that was prepared does not come; its workers have been dismissed."""
        self._next_pods = frozenset()
        self.forget_pods()

    def forget_pods(self) -> None:
        """Pods that no plan wants and whose agent is not there."""
        self.pods = {k: pod for k, pod in self.pods.items() if pod.wanted or pod.attached or k in self._next_pods}

    def find(self, worker: WorkerId) -> WorkerRecord | None:
        return self.workers.get(worker) or self.prepared.get(worker)

    def everybody(self) -> list[WorkerRecord]:
        return [*self.workers.values(), *self.prepared.values()]

    def of_role(self, role: str) -> list[WorkerRecord]:
        """In rank order."""
        if not self._by_role:
            for record in sorted(self.workers.values(), key=lambda w: w.placed.rank):
                self._by_role.setdefault(record.placed.role, []).append(record)
        return list(self._by_role.get(role, ()))

    def in_pod(self, key: PodKey) -> list[WorkerRecord]:
        return [w for w in self.everybody() if w.placed.pod == key]

    def all_ready(self, *, besides: Container[WorkerId] = ()) -> bool:
        """`besides`: who is not waited for. Asked after each that is ready: the one found last is asked first."""
        last = self.workers.get(self._awaited) if self._awaited is not None else None
        if last is not None and last.state is not WorkerState.READY and last.placed.id not in besides:
            return False
        for worker in reversed(self.workers):
            if self.workers[worker].state is not WorkerState.READY and worker not in besides:
                self._awaited = worker
                return False
        return any(worker not in besides for worker in self.workers)

    def missing(self) -> list[str]:
        """Who is awaited, by role, pod and node: one phrase each, pods first."""
        wanted = [key for key, pod in self.pods.items() if pod.wanted and not pod.attached]
        return [*(f"agent of pod {key[0]}-{key[1]}" for key in wanted), *self._not_ready(self.workers)]

    def missing_for_next(self) -> list[str]:
        """Likewise, for the plan that is being prepared."""
        away = [key for key in sorted(self._next_pods) if not self.pods[key].attached]
        return [*(f"agent of pod {key[0]}-{key[1]}" for key in away), *self._not_ready(self.prepared)]

    def _not_ready(self, workers: dict[WorkerId, WorkerRecord]) -> list[str]:
        phrases = []
        for wid, record in workers.items():
            pod = self.pods.get(record.placed.pod)
            if record.state is not WorkerState.READY and pod is not None and pod.attached:
                where = f"pod {pod.pod}" + (f" on node {pod.node}" if pod.node else "")
                phrases.append(f"worker {wid} in {where}: {record.progress or record.state.value}")
        return phrases

    def next_start(self, now: float, among: Iterable[WorkerId] | None = None) -> Iterable[WorkerRecord]:
        """Workers that may be started now: down, back-off over, their agent attached. `among`: None: all."""
        of = self.everybody() if among is None else [found for wid in sorted(among) if (found := self.find(wid))]
        for record in of:
            pod = self.pods.get(record.placed.pod)
            if record.state is WorkerState.DOWN and record.start_at <= now and pod is not None and pod.attached:
                yield record
