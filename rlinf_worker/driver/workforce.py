"""Pods and processes: attaches agents, starts workers, notices who is gone, starts them again within the job's bounds.

What a lost worker means for units, steps and plans is not decided here: core.py takes who is gone and settles it.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlinf_api import conditions, failure_rules, names, wire
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.failure_rules import Met
from rlinf_api.job import FailureAction, as_range
from rlinf_api.names import WorkerId
from rlinf_api.report import Failure, Ruling
from rlinf_worker.driver.job import Dirty, Job
from rlinf_worker.driver.members import Failures, PodKey, WorkerRecord, WorkerState
from rlinf_worker.driver.recovery import Recoveries
from rlinf_worker.driver.rules import Rules
from rlinf_worker.driver.sessions import Refuse
from rlinf_worker.driver.spares import Spares
from rlinf_worker.roles.loading import LoadFailed
from rlinf_worker.uplink.outbox import Outbox

ATTEMPTS_PER_DRIVER: Final = 1000
"""Each driver numbers workers above those of the drivers before: one that was lost together with a pod has told nobody
how often its workers were started, and a number given twice would make a new life look like the old one. 1,000: more
starts of one worker than a job survives under one driver."""

MOST_OF: Final = 3  # pods, from which on most of them say more than each

ROLES: Final = frozenset({"EnvironmentFailed", "RoleReturned"})
SAME_DEATHS: Final = 3
"""Of a role, in the same words, each in a life that began after the one before, with no step between, until the job
fails with them: more tries cost minutes and tell nothing new."""


def _is_of_the_role(reason: str, *, is_rank: bool = False) -> bool:
    """What only its code can mend: not what machine, network or memory did to it. Between ranks a RuntimeError is also
    how torch says that another one is gone.

    >>> [_is_of_the_role(reason) for reason in ("KeyError", "FileNotFoundError", "MemoryError", "WorkerUnreachable")]
    [True, False, False, False]
    >>> [_is_of_the_role("RuntimeError", is_rank=is_rank) for is_rank in (False, True)]
    [True, False]
    """
    known = getattr(builtins, reason, None)
    if not isinstance(known, type) or not issubclass(known, Exception):
        return reason in ROLES
    return not issubclass(known, OSError | MemoryError) and not (is_rank and known is RuntimeError)


@dataclass(frozen=True, slots=True)
class _Deaths:
    """Of one role in a row: in which words, how many, when the last was."""

    words: tuple[str, str, int]
    count: int
    at: float


class Workforce:
    def __init__(self, job: Job) -> None:
        self._job, self._spec, self._members, self._sessions = job, job.spec, job.members, job.sessions
        self._settings, self._clock = job.settings, job.clock
        self._streamless: dict[WorkerId, float] = {}  # workers whose stream broke, since when
        self._failures = Failures(job.spec.failure_policy)
        self._rules = Rules(job)
        self._gone: list[WorkerRecord] = []  # bounded by the workers: it is taken with every message
        self._deaths: dict[str, _Deaths] = {}  # by role
        self._lost_pods: set[PodKey] = set()  # whose agent was given up, and no other attempt has come since
        self._agentless: dict[PodKey, float] = {}  # pods of the plan without an agent, since when
        self.silent_agents: tuple[str, ...] = ()
        self.restarts = 0
        self.recoveries = Recoveries(job)
        self.first_failure: Failure | None = None
        self.spares = Spares(job)

    def take_gone(self) -> list[WorkerRecord]:
        """Whose lives have ended since the last call, in that order: sessions are closed, records are DOWN. What that
        means for units, routes and plans is still to be settled."""
        gone, self._gone = self._gone, []
        return gone

    # --- agents -----------------------------------------------------------------------------------------------------
    def attach(self, hello: agents_pb2.Hello, outbox: Outbox[Any]) -> PodKey:
        key = (hello.pool, hello.ordinal)
        pod = self._members.pods.get(key)
        if pod is None:
            # Pods of a plan that is still to be prepared may be up before it is; one that no plan may have is a bug.
            planned = bool(self._members.pods) and not self._may_come(key)
            raise Refuse(
                f"the plan has no pod {key[0]}-{key[1]}"
                if self._members.pods
                else "no plan is in force yet; come again",
                exit_code=names.EXIT_STALE if planned else names.EXIT_RETRYABLE,
            )
        if hello.attempt < pod.attempt:
            raise Refuse(
                f"pod {hello.pod} is attempt {hello.attempt}; attempt {pod.attempt} has taken its place",
                exit_code=names.EXIT_STALE,
            )
        if hello.attempt > pod.attempt and pod.attempt:
            self._lose_pod(key, f"pod {pod.pod} was replaced by {hello.pod}", since=pod.lost_at)
            self._rules.replaced(pod.pod)
        elif key in self._lost_pods:
            self._count(f"pod {hello.pod}", "its agent was given up, and came back")
        self._lost_pods.discard(key)
        pod.attempt, pod.pod, pod.node = hello.attempt, hello.pod, hello.node
        pod.attached, pod.last_heartbeat, pod.lost_at = True, self._clock(), None
        self._sessions.agents.enter(key, outbox, hello.attempt)
        self._compare(key, {WorkerId(w.worker): w for w in hello.workers})
        if 0 < hello.highest_driver_attempt < self._job.attempt and hello.driverless_s > 0:
            self.recoveries.driver_lost(self._clock() - hello.driverless_s)
        self._job.event("agent", f"agent of pod {hello.pod} attached", pod=hello.pod, attempt=hello.attempt)
        return key

    def _may_come(self, key: PodKey) -> bool:
        pool = next((p for p in self._spec.pools if p.name == key[0]), None)
        return pool is not None and key[1] < as_range(pool.pods).max

    def _compare(self, key: PodKey, running: dict[WorkerId, agents_pb2.WorkerState]) -> None:
        """What the agent holds against what is wanted: the agent holds the truth about processes."""
        for record in self._members.in_pod(key):
            state = running.pop(record.placed.id, None)
            given_up = state is not None and state.attempt == record.attempt and record.state is WorkerState.DOWN
            if state is not None and state.attempt >= record.attempt and not given_up:
                record.attempt = state.attempt
                if record.state is WorkerState.DOWN:
                    record.state, record.started_at = WorkerState.STARTING, self._clock()
            elif state is not None:
                why = "it was given up" if given_up else "an older attempt"
                self._job.instruct(key, stop=agents_pb2.Stop(worker=state.worker, reason=why))
            elif record.state is not WorkerState.DOWN:
                self.lose(record, f"the agent of pod {self._members.pods[key].pod} does not have it")
        self.spares.adopt(key, running)
        for worker in running:
            self._job.instruct(key, stop=agents_pb2.Stop(worker=worker, grace_s=1, reason="not in the plan"))

    def heard(self, key: PodKey, message: agents_pb2.AgentMessage) -> bool:
        """True where people should see a change. What an instruction's result means is told to whoever gave it."""
        pod, kind, changed = self._members.pods.get(key), message.WhichOneof("kind"), True
        if pod is None:
            return False
        pod.last_heartbeat = self._clock()
        if kind == "heartbeat":
            changed = False
            for progress in message.heartbeat.progress:
                record = self._members.find(WorkerId(progress.worker))
                if record is not None:
                    changed = changed or progress.phase != record.progress
                    record.progress, record.silent_s = progress.phase, progress.age_s
                    record.still_s, record.doing = progress.still_s, progress.doing
                    if progress.phase == "start":
                        self._spawned(record, progress)
                elif names.is_spare(progress.worker):
                    self.spares.heard(key, progress)
        elif kind == "exited" and names.is_spare(message.exited.worker):
            self.spares.exited(key, message.exited)
        elif kind == "exited":
            self._exited(message.exited)
        elif kind == "hung":
            hung = message.hung
            text = f"worker {hung.worker} showed no sign for {hung.silent_s:.1f} s in phase {hung.phase}; it is killed"
            self._job.event("hung", text, worker=hung.worker, stacks=hung.stacks[:4096])
        elif kind == "result" and not message.result.ok:
            self._job.event("instruction", f"an instruction failed in pod {pod.pod}: {message.result.error}")
        return changed

    def detached(self, key: PodKey, outbox: Outbox[Any]) -> None:
        """The agent's stream ended; it is lost if it does not come back within broken_agent_s."""
        if self._sessions.agents.left(key, outbox) and (pod := self._members.pods.get(key)) is not None:
            pod.attached, pod.lost_at = False, self._clock()

    def _lose_pod(self, key: PodKey, why: str, *, since: float | None) -> None:
        self._job.event("pod-lost", why, pool=key[0], ordinal=key[1])
        self.spares.lost(key)
        lost = [r for r in self._members.in_pod(key) if r.state is not WorkerState.DOWN]
        workers = [r.placed.id for r in lost if r.placed.id in self._members.workers]
        self.recoveries.lost(workers, who=f"pod {key[0]}-{key[1]}", role="", why=why, since=since)
        self._lost_pods.add(key)
        for record in lost:
            self.lose(record, why, counted=False)  # a pod that is replaced is the operator's count, and its rules'

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

    def _exited(self, exited: agents_pb2.WorkerExited) -> None:
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
        self.first_failure = self.first_failure or failure
        if (met := self._rules.met(record, failure)) is not None:
            self._obey(record, met, failure)
        elif exited.exit_code == names.EXIT_USER_ERROR and not self._may_pass(record, failure):
            self._job.fail(conditions.of_user(failure.reason), f"worker {exited.worker}: {said}", failure)
        elif exited.exit_code == names.EXIT_BUG:
            self._job.fail("InternalError", f"worker {exited.worker}: {said}", failure)
        else:
            is_rank = record.joined and record.placed.world > 1
            self.lose(record, said)
            self._same_again(record, failure, is_rank=is_rank)

    def _same_again(self, record: WorkerRecord, failure: Failure, *, is_rank: bool) -> None:
        """Three deaths of a role with the same words, numbers apart, and no step between: a bug, and no accident."""
        if not _is_of_the_role(failure.reason, is_rank=is_rank):
            return
        words = (failure.reason, re.sub(r"\d+", "#", failure.message), self._job.ledger.committed)
        last = self._deaths.get(record.placed.role)
        count = 1
        if last is not None and last.words == words:
            if record.started_at <= last.at:
                return  # it lived as that one did: one accident may have met both
            count += last.count
        self._deaths[record.placed.role] = _Deaths(words, count, self._clock())
        if count >= SAME_DEATHS:
            text = f"role {record.placed.role!r} died {count} times in the same way, and no step ended between: "
            self._job.fail(conditions.Reason.USER_ERROR, text + failure.message, failure)

    def _may_pass(self, record: WorkerRecord, failure: Failure) -> bool:
        """Whether exit code 64 may be tried again. In a job that has begun its role was made of the same code before:
        that it cannot be made now, or cannot load more, may be the machine's fault. What a worker says at work is
        final, and so is what it says of checkpoints."""
        is_of_the_start = record.state is not WorkerState.READY or failure.reason == LoadFailed.__name__
        is_of_checkpoints = conditions.of_user(failure.reason) is not conditions.Reason.USER_ERROR
        return self._job.has_begun and is_of_the_start and not is_of_checkpoints

    def _obey(self, record: WorkerRecord, met: Met, failure: Failure) -> None:
        """What a rule of failurePolicy says of a worker that ended: in each case it is started again meanwhile."""
        worker, said = record.placed.id, failure.message or failure.reason
        text = f"{met.told}: worker {worker} ended ({failure.reason}, exit code {failure.exit_code}): {said}"
        self._job.event("failure-rule", text, worker=worker, rule=met.key, action=str(met.action))
        if met.action is FailureAction.FAIL_JOB:
            self._job.fail(conditions.Reason.FAILURE_RULE, text, failure)
        problem = self._rules.obey(met, failure)
        if problem:
            self._job.fail(conditions.Reason.TOO_MANY_RESTARTS, f"{problem}; the last was {worker}: {said}", failure)
        counts = met.action is FailureAction.RESTART_WORKER and met.rule.max_restarts is None
        pause_s = failure_rules.pause_s(met.rule, record.failures) or None
        if met.action is FailureAction.RESTART_POD:  # where nobody replaces the pod, it is started where it was
            pause_s = max(pause_s or 0.0, self._settings.restart_delay_max_s)
        self.lose(record, said, counted=counts, pause_s=pause_s)

    def _count(self, who: str, why: str) -> None:
        if self._failures.add(self._clock()):
            policy = self._spec.failure_policy
            text = f"workers failed {self._failures.count} times within {policy.reset_after_seconds} s, more than "
            text += f"spec.failurePolicy.maxRestarts={policy.max_restarts} allows; the last was {who}: "
            self._job.fail("TooManyRestarts", text + why, self.first_failure)

    def lose(self, record: WorkerRecord, why: str, *, counted: bool = True, pause_s: float | None = None) -> None:
        """It failed: counted, and started again after a pause; too often fails the job. Being ready in between does
        not help: an environment that raises in its first step makes its worker ready each time. `pause_s`: in place of
        the usual one."""
        if self._members.prepared.get(record.placed.id) is record:  # costs the plan that it was for, not the job
            self._down(record, why, delay_s=self._settings.restart_delay_s)
            return
        worker = record.placed.id
        self.recoveries.lost([worker], who=worker, role=record.placed.role, why=why, since=self._streamless.get(worker))
        record.failures += 1
        record.restarts += 1
        self.restarts += 1
        if counted:
            self._count(worker, why)
        delay = self._settings.restart_delay_s * 2 ** min(record.failures - 1, 16)
        usual_s = min(delay, self._settings.restart_delay_max_s)
        self._down(record, why, delay_s=usual_s if pause_s is None else pause_s)

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

    def restart_gangs(self, roles: tuple[str, ...], *, besides: WorkerRecord) -> None:
        """A rank is lost: the others are ended too, and all start again to join the next roster."""
        why = f"gang {besides.placed.role!r} is formed anew"
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
        for key, pod in list(self._members.pods.items()):
            silent = pod.attached and now - pod.last_heartbeat > settings.limits.agent_dead_after_s
            broken = not pod.attached and pod.lost_at is not None and now - pod.lost_at > settings.broken_agent_s
            if silent or broken:
                since = pod.last_heartbeat if silent else pod.lost_at
                pod.attached, pod.lost_at = False, None
                self._sessions.agents.close(key, "silent")
                where = f"pod {pod.pod}" + (f" on node {pod.node}" if pod.node else "")
                self._lose_pod(key, f"the agent of {where} is " + ("silent" if silent else "gone"), since=since)
        self._members.forget_pods()
        self._note_silent_agents(now)
        for worker, since in list(self._streamless.items()):
            if now - since > settings.broken_worker_s and (known := self._members.find(worker)) is not None:
                self.give_up(known, "its connection to the driver broke")
        for record in self._members.everybody():
            # Its agent, who has its stacks, is the one that kills it: it has told its deadline, and has longer.
            given = record.start_deadline_s and record.start_deadline_s + settings.limits.agent_dead_after_s
            limit = max(settings.limits.start_deadline_s, given)
            if record.state is WorkerState.STARTING and now - record.started_at > limit:
                self.give_up(record, f"it did not connect within {limit:g} s of its start")

    def _note_silent_agents(self, now: float) -> None:
        """Pods that only another attempt helps. Where most of several are silent at once the trouble is taken for the
        driver's own, as of its network: none is named."""
        wanted = {key: pod for key, pod in self._members.pods.items() if pod.wanted}
        self._agentless = {key: self._agentless.get(key, now) for key, pod in wanted.items() if not pod.attached}
        late_s = self._settings.limits.agent_replaced_after_s
        late = [f"{pool}-{n}" for (pool, n), since in self._agentless.items() if now - since >= late_s]
        is_our_own = len(wanted) >= MOST_OF and 2 * len(self._agentless) > len(wanted)
        silent = () if is_our_own else tuple(late)
        if silent != self.silent_agents:
            self.silent_agents = silent
            self._job.mark(Dirty.SHOWN)

    def give_up(self, record: WorkerRecord, why: str) -> None:
        if record.state is not WorkerState.DOWN:
            self._stop(record, why)
            failure = self._given_up(record, why)
            is_prepared = self._members.prepared.get(record.placed.id) is record
            met = self._rules.met(record, failure) if not is_prepared else None
            if met is not None:
                self._obey(record, met, failure)
            else:
                self.lose(record, why)
        self._streamless.pop(record.placed.id, None)

    def _given_up(self, record: WorkerRecord, why: str) -> Failure:
        """Of one that did not end, and has no exit code."""
        pod, (role, _, number) = self._members.pods[record.placed.pod], record.placed.id.partition("/")
        return Failure(
            role=role, worker=int(number), pod=pod.pod, node=pod.node, exit_code=-1, reason="GivenUp", message=why
        )

    @property
    def rulings(self) -> tuple[Ruling, ...]:
        """What rules of failurePolicy leave to the operator."""
        return self._rules.standing

    @property
    def rules_met(self) -> Mapping[str, int]:
        """By action."""
        return self._rules.count
