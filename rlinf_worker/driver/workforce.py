"""Worker processes: starts them, notices who is gone, starts them again.

What their end costs is toll.py's word, what pods and their agents do comes from agents.py. What a lost worker means for
units, steps and plans is not decided here: core.py takes who is gone and settles it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from rlinf_api import names, wire
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.job import FailureKind
from rlinf_api.names import WorkerId
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.members import WorkerRecord, WorkerState
from rlinf_worker.driver.recovery import Recoveries
from rlinf_worker.driver.sessions import Refuse
from rlinf_worker.driver.spares import Spares
from rlinf_worker.driver.toll import Loss, Toll
from rlinf_worker.uplink.outbox import Outbox

ATTEMPTS_PER_DRIVER: Final = 1000
"""Each driver numbers workers above those of the drivers before: one that was lost together with a pod has told nobody
how often its workers were started, and a number given twice would make a new life look like the old one. 1,000: more
starts of one worker than a job survives under one driver."""
USUAL: Final = Loss()  # counted, after a pause


class Workforce:
    def __init__(self, job: Job) -> None:
        self._job, self._spec, self._members, self._sessions = job, job.spec, job.members, job.sessions
        self._settings, self._clock = job.settings, job.clock
        self._streamless: dict[WorkerId, float] = {}  # workers whose stream broke, since when
        self._gone: list[WorkerRecord] = []  # bounded by the workers: it is taken with every message
        self.restarts = 0
        self.recoveries = Recoveries(job)
        self.toll = Toll(job)
        self.spares = Spares(job)
        self.on_killed: Callable[[str], None] = lambda role: None  # for memory, by the kernel

    def take_gone(self) -> list[WorkerRecord]:
        """Whose lives have ended since the last call, in that order: sessions are closed, records are DOWN. What that
        means for units, routes and plans is still to be settled."""
        gone, self._gone = self._gone, []
        return gone

    # --- workers ----------------------------------------------------------------------------------------------------
    def welcome(self, worker: WorkerId, attempt: int, outbox: Outbox[Any]) -> WorkerRecord:
        """A worker's stream; refused where its attempt has been given up."""
        record = self._members.find(worker)
        if record is None:
            raise Refuse(f"the plan has no worker {worker}", exit_code=names.EXIT_RETRYABLE)
        given_up = attempt == record.attempt and record.state is WorkerState.DOWN
        if attempt < record.attempt or given_up:
            raise Refuse(
                f"worker {worker} is attempt {attempt}, which was given up (now {record.attempt})",
                exit_code=names.EXIT_STALE,
            )
        self._streamless.pop(worker, None)
        record.attempt = attempt
        self._sessions.workers.enter(worker, outbox, attempt)
        return record

    def progressed(self, progress: agents_pb2.Progress) -> bool:
        """By its agent's heartbeat. True where it is in another phase."""
        record = self._members.find(WorkerId(progress.worker))
        if record is None:
            return False
        is_news = progress.phase != record.progress
        record.progress, record.silent_s = progress.phase, progress.age_s
        record.still_s, record.doing = progress.still_s, progress.doing
        if progress.phase == "start":
            self._spawned(record, progress)
        return is_news

    def _spawned(self, record: WorkerRecord, progress: agents_pb2.Progress) -> None:
        """Its time counts from here, and not from the word to start it: its slots may have had to be freed first."""
        if not record.start_deadline_s:
            record.started_at = max(record.started_at, self._clock() - progress.age_s)
        record.start_deadline_s = progress.deadline_s

    def stream_ended(self, worker: WorkerId, outbox: Outbox[Any]) -> None:
        """Its agent says whether it died; a live one comes back within broken_worker_s."""
        if self._sessions.workers.left(worker, outbox):
            self._streamless[worker] = self._clock()

    def start_workers(self, moved: Iterable[WorkerId] | None = None) -> None:
        """`moved`: of whom there is news, where the time is not; None: of anybody."""
        now, above = self._clock(), (self._job.attempt - 1) * ATTEMPTS_PER_DRIVER
        for record in list(self._members.next_start(now, moved)):
            placed = record.placed
            role = self._spec.role(placed.role)
            record.attempt, record.from_spare = max(record.attempt, above) + 1, self.spares.take(record)
            record.state, record.started_at, record.progress = WorkerState.STARTING, now, "start"
            record.start_deadline_s = 0.0
            self._job.instruct(
                placed.pod,
                start=agents_pb2.Start(
                    worker=placed.id,
                    role=placed.role,
                    kind=role.kind,
                    rank=placed.rank,
                    world=placed.world,
                    attempt=record.attempt,
                    slots=[s.index for s in placed.slots],
                    config_json=json.dumps(role.config),
                    from_spare=record.from_spare,
                ),
            )
        self.spares.advance(attempts_from=above)

    def exited(self, exited: agents_pb2.WorkerExited) -> None:
        record = self._members.find(WorkerId(exited.worker))
        if record is None or exited.attempt < record.attempt or record.state is WorkerState.DOWN:
            return
        if exited.asked and record.placed.id in self._members.workers:
            self._down(record, "it was stopped")
            return
        failure = wire.failure_from_pb(exited.failure)
        said = failure.message or failure.reason
        text = f"worker {exited.worker} exited with {exited.exit_code}: {said}"
        self._job.event("worker-exited", text, worker=exited.worker, exit_code=exited.exit_code)
        if record.placed.id in self._members.prepared:
            self.lose(record, said)
            return
        is_rank = record.joined and record.placed.world > 1
        if failure.reason == FailureKind.OOM_KILLED:
            self.on_killed(record.placed.role)
        loss = self.toll.of_exit(record, failure, exit_code=exited.exit_code)
        if loss is not None:
            self.lose(record, said, loss)
            if not loss.is_of_a_rule:
                self.toll.same_again(record, failure, is_rank=is_rank)

    def lose(self, record: WorkerRecord, why: str, loss: Loss = USUAL) -> None:
        """It failed: counted, and started again after a pause; too often fails the job. Being ready in between does
        not help: an environment that raises in its first step makes its worker ready each time."""
        if self._members.prepared.get(record.placed.id) is record:  # costs the plan that it was for, not the job
            self._down(record, why, delay_s=self._settings.restart_delay_s)
            return
        worker = record.placed.id
        self.recoveries.lost([worker], who=worker, role=record.placed.role, why=why, since=self._streamless.get(worker))
        record.failures += 1
        record.restarts += 1
        if loss.is_counted or loss.is_of_a_rule:  # else it went with its pod, or waited for one
            behind, (last, count) = self._job.ledger.version, record.losses
            record.losses = behind, count + 1 if behind == last else 1
        self.restarts += 1
        if loss.is_counted:
            self.toll.count(worker, why)
        delay = self._settings.restart_delay_s * 2 ** min(record.failures - 1, 16)
        usual_s = min(delay, self._settings.restart_delay_max_s)
        self._down(record, why, delay_s=usual_s if loss.pause_s is None else loss.pause_s)

    def _down(self, record: WorkerRecord, why: str, *, delay_s: float = 0.0) -> None:
        self._close(record, why, delay_s=delay_s)
        self._gone.append(record)

    def _close(self, record: WorkerRecord, why: str, *, delay_s: float) -> None:
        self._sessions.workers.close(record.placed.id, why)
        record.ended_at = self._streamless.pop(record.placed.id, self._clock())
        record.state, record.endpoint, record.joined, record.begun = WorkerState.DOWN, None, False, False
        record.progress, record.silent_s, record.start_at = "down", 0.0, self._clock() + delay_s
        record.still_s, record.doing = 0.0, ""
        record.why = why
        self._job.mark_member(record.placed.id)

    def is_of_before(self, record: WorkerRecord) -> bool:
        """A driver before this one has begun its present life, or the last one."""
        return record.attempt <= (self._job.attempt - 1) * ATTEMPTS_PER_DRIVER

    def restart_gangs(self, roles: tuple[str, ...], *, why: str, besides: WorkerRecord | None = None) -> None:
        """All ranks are ended, and start again to join the next roster. `besides`: one that is lost."""
        for record in (record for role in roles for record in self._members.of_role(role)):
            if record is not besides and record.state is not WorkerState.DOWN:
                self._stop(record, why)
                self._close(record, why, delay_s=self._settings.restart_delay_s)

    def dismiss(self, record: WorkerRecord, why: str) -> None:
        """No plan has it any more: it ends by its agent's word."""
        self._sessions.workers.dismiss(record.placed.id)
        self._streamless.pop(record.placed.id, None)
        if record.state is not WorkerState.DOWN:
            self._stop(record, why, grace_s=self._settings.dismiss_grace_s)
        self._members.leave(record.placed.id)
        self.recoveries.forget(record.placed.id)

    def _stop(self, record: WorkerRecord, reason: str, *, grace_s: float = 0.0) -> None:
        stop = agents_pb2.Stop(worker=record.placed.id, reason=reason, grace_s=grace_s)
        self._job.instruct(record.placed.pod, stop=stop)

    # --- time -------------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        now, settings = self._clock(), self._settings
        for worker, since in list(self._streamless.items()):
            if now - since > settings.broken_worker_s and (known := self._members.find(worker)) is not None:
                self.give_up(known, "its connection to the driver broke")
        for record in self._members.everybody():
            # Its agent, who has its stacks, is the one that kills it: it has told its deadline, and has longer.
            given = record.start_deadline_s and record.start_deadline_s + settings.limits.agent_dead_after_s
            limit = max(settings.limits.start_deadline_s, given)
            if record.state is WorkerState.STARTING and now - record.started_at > limit:
                self.give_up(record, f"it did not connect within {limit:g} s of its start")

    def give_up(self, record: WorkerRecord, why: str) -> None:
        if record.state is not WorkerState.DOWN:
            self._stop(record, why)
            is_prepared = self._members.prepared.get(record.placed.id) is record
            self.lose(record, why, USUAL if is_prepared else self.toll.of_one_given_up(record, why))
        self._streamless.pop(record.placed.id, None)
