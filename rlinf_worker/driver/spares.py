"""Warm spares: processes beside a role's workers that have their imports done and take the place of one that is lost.

    AWAY --start--> STARTING --idle--> WARM --take--> AWAY: the process is a worker now, another is started in the calm
      ^                 |                 |
      +--- exited, not wanted any more, its pod lost

Each pod that runs workers of a role keeps `spec.roles[].spares` of them, at most one per worker of the role there:
slots are a pod's, and so is a place. One is started at a time in a pod, and only once all workers have been ready for a
while, as its imports take the CPU of those that work or come back. The agent holds the truth, as with workers: a new
driver learns from the hello which there are. A spare that dies costs nobody anything: it is started again after a pause
that doubles, at most maxRestarts times within resetAfterSeconds per role.

Called by workforce.py. Not for: deciding that a worker is lost or started.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Final

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.names import WorkerId
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.members import Failures, PodKey, WorkerRecord

WARM_PHASE: Final = "idle"  # what a spare says that waits for a place (runtime/spare.py)
STOP_GRACE_S: Final = 1.0  # it has nothing to put in order


class SpareState(Enum):
    AWAY = "away"
    STARTING = "starting"
    WARM = "warm"


@dataclass(slots=True)
class SpareRecord:
    id: WorkerId
    pod: PodKey
    attempt: int = 0
    state: SpareState = SpareState.AWAY
    failures: int = 0  # in a row, without having been warm in between
    start_at: float = 0.0
    started_at: float = 0.0

    @property
    def role(self) -> str:
        return _role(self.id)


def _role(spare: WorkerId) -> str:
    return names.split_worker_id(spare)[0].removeprefix(names.SPARE_MARK)


class Spares:
    def __init__(self, job: Job) -> None:
        self._job, self._members, self._settings = job, job.members, job.settings
        self._wished = {role.name: role.spares for role in job.spec.roles if role.spares}
        self._records: dict[tuple[PodKey, WorkerId], SpareRecord] = {}  # bounded: pods x roles x spares
        self._failures: dict[str, Failures] = {}  # by role
        self._calm_since: float | None = None
        self.taken: dict[str, int] = dict.fromkeys(self._wished, 0)

    # --- which there should be ----------------------------------------------------------------------------------------
    def _wanted(self) -> set[tuple[PodKey, WorkerId]]:
        here: dict[tuple[PodKey, str], int] = {}
        for record in self._members.workers.values():
            placed = record.placed
            if placed.role in self._wished:  # also where the agent is away for a moment: it comes back with them
                here[placed.pod, placed.role] = here.get((placed.pod, placed.role), 0) + 1
        return {
            (key, names.spare_id(role, number))
            for (key, role), workers in here.items()
            for number in range(min(workers, self._wished[role]))
        }

    def advance(self, *, attempts_from: int) -> None:
        """Stops those that no plan wants, starts those that are missing. `attempts_from`: numbers above it are this
        driver's."""
        if not self._wished:
            return
        wanted, now = self._wanted(), self._job.clock()
        for record in self._records.values():
            if (record.pod, record.id) not in wanted and record.state is not SpareState.AWAY:
                self._stop(record, "the plan has no such place")
            elif record.state is SpareState.STARTING and now - record.started_at > self._settings.spare_start_timeout_s:
                record.start_at = now + self._settings.spare_delay_max_s
                self._stop(record, f"it was not warm within {self._settings.spare_start_timeout_s:g} s of its start")
        if self._members.prepared or not self._members.all_ready(besides=self._members.away):
            self._calm_since = None
            return
        self._calm_since = now if self._calm_since is None else self._calm_since
        if now - self._calm_since < self._settings.spare_calm_s:
            return
        busy = {r.pod for r in self._records.values() if r.state is SpareState.STARTING}
        for key, wid in sorted(wanted):
            record = self._records.setdefault((key, wid), SpareRecord(wid, key))
            pod = self._members.pods.get(key)
            there = pod is not None and pod.attached
            if there and record.state is SpareState.AWAY and record.start_at <= now and key not in busy:
                busy.add(key)
                record.attempt = max(record.attempt, attempts_from) + 1
                record.state, record.started_at = SpareState.STARTING, now
                self._start(record)

    def _stop(self, record: SpareRecord, why: str) -> None:
        record.state = SpareState.AWAY
        self._job.instruct(record.pod, stop=agents_pb2.Stop(worker=record.id, grace_s=STOP_GRACE_S, reason=why))

    def _start(self, record: SpareRecord) -> None:
        role = self._job.spec.role(record.role)
        start = agents_pb2.Start(
            worker=record.id,
            role=record.role,
            kind=role.kind,
            rank=0,
            world=1,
            attempt=record.attempt,
            config_json=json.dumps(role.config),
            spare=True,
            flow_json=self._job.flow_settings.to_json(),
        )
        self._job.instruct(record.pod, start=start)

    # --- a place is free ----------------------------------------------------------------------------------------------
    def take(self, worker: WorkerRecord) -> str:
        """The warm spare that is to become this worker; empty: it starts from nothing. So does one whose last life
        failed before it was ready: what was prepared may be what is wrong with it."""
        placed = worker.placed
        if worker.failures > 1 or self._members.workers.get(placed.id) is not worker:
            return ""
        for record in self._records.values():
            if (record.pod, record.role, record.state) == (placed.pod, placed.role, SpareState.WARM):
                record.state, record.start_at = SpareState.AWAY, self._job.clock()
                self.taken[record.role] += 1
                text = f"worker {placed.id} starts from a warm spare"
                self._job.event("spare-taken", text, worker=placed.id, spare=record.id)
                return record.id
        return ""

    # --- what agents say ----------------------------------------------------------------------------------------------
    def heard(self, key: PodKey, progress: agents_pb2.Progress) -> None:
        record = self._records.get((key, WorkerId(progress.worker)))
        if record is not None:
            self._hear(record, progress.phase)

    def _hear(self, record: SpareRecord, phase: str) -> None:
        if record.state is SpareState.STARTING and phase == WARM_PHASE:
            record.state, record.failures = SpareState.WARM, 0
            pool, ordinal = record.pod
            text = f"spare {record.id} of pod {pool}-{ordinal} is warm"
            self._job.event("spare-warm", text, role=record.role, pool=pool, ordinal=ordinal)

    def exited(self, key: PodKey, exited: agents_pb2.WorkerExited) -> None:
        record = self._records.get((key, WorkerId(exited.worker)))
        if record is None or exited.attempt < record.attempt or record.state is SpareState.AWAY:
            return
        record.state, now, policy = SpareState.AWAY, self._job.clock(), self._job.spec.failure_policy
        if exited.asked:
            return
        record.failures += 1
        pause = self._settings.restart_delay_s * 2 ** min(record.failures - 1, 16)
        record.start_at = now + min(pause, self._settings.spare_delay_max_s)
        failures = self._failures.setdefault(record.role, Failures(policy))
        why = exited.failure.message or exited.failure.reason or f"exit code {exited.exit_code}"
        self._job.event("spare-lost", f"warm spare {exited.worker} ended: {why}", spare=record.id)
        if failures.add(now):
            record.start_at = failures.forgotten_at
            text = (
                f"warm spares of role {record.role} ended {failures.count} times within {policy.reset_after_seconds} "
            )
            text += f"s; the next is tried in {record.start_at - now:.0f} s, and the job goes on without"
            self._job.event("spare-given-up", text, spare=record.id)

    def adopt(self, key: PodKey, running: dict[WorkerId, agents_pb2.WorkerState]) -> None:
        """An agent attaches: takes out of `running` the spares that may stay; whoever is left there is stopped."""
        wanted = self._wanted()
        for record in self._records.values():
            if record.pod == key and record.id not in running:
                record.state = SpareState.AWAY
        for wid, state in list(running.items()):
            if (key, wid) not in wanted:
                continue
            record = self._records.setdefault((key, wid), SpareRecord(wid, key))
            taken = record.state is SpareState.AWAY and record.attempt > 0
            if state.attempt < record.attempt or (state.attempt == record.attempt and taken):
                continue
            del running[wid]
            record.attempt = state.attempt
            if record.state is SpareState.AWAY:
                record.state, record.started_at = SpareState.STARTING, self._job.clock()
            self._hear(record, state.progress.phase)

    def lost(self, key: PodKey) -> None:
        """The pod, with all that it ran."""
        for record in self._records.values():
            if record.pod == key:
                record.state, record.start_at = SpareState.AWAY, self._job.clock()

    # --- for people ---------------------------------------------------------------------------------------------------
    def counts(self) -> dict[tuple[str, str], int]:
        """By role and state; `away` are those that should be there."""
        found = {(role, state.value): 0 for role in self._wished for state in SpareState}
        for key, wid in self._wanted():
            record = self._records.get((key, wid))
            found[_role(wid), (record.state if record else SpareState.AWAY).value] += 1
        return found
