"""The agents of the job's pods: who is attached, what each holds against what is wanted, who is silent.

Called by core.py with what agents say. What becomes of their workers is workforce.py's.
"""

from __future__ import annotations

from typing import Any, Final

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.job import as_range
from rlinf_api.names import WorkerId
from rlinf_worker.driver.job import Dirty, Job
from rlinf_worker.driver.members import PodKey, WorkerState
from rlinf_worker.driver.sessions import Refuse
from rlinf_worker.driver.toll import Loss
from rlinf_worker.driver.workforce import Workforce
from rlinf_worker.uplink.outbox import Outbox

MOST_OF: Final = 3  # pods, from which on most of them say more than each


class Agents:
    def __init__(self, job: Job, workforce: Workforce) -> None:
        self._job, self._members, self._sessions, self._workforce = job, job.members, job.sessions, workforce
        self._settings, self._clock = job.settings, job.clock
        self._lost: set[PodKey] = set()  # whose agent was given up, and no other attempt has come since
        self.silent: tuple[str, ...] = ()
        """Pods that only another attempt helps: p0-1."""

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
        if hello.attempt == pod.attempt and pod.has_left:
            raise Refuse(f"pod {hello.pod} has left; another takes its place", exit_code=names.EXIT_STALE)
        if hello.attempt > pod.attempt and pod.attempt:
            if key not in self._lost:
                self._lose_pod(key, f"pod {pod.pod} was replaced by {hello.pod}", since=pod.lost_at)
            self._workforce.toll.rules.replaced(pod.pod)
        elif key in self._lost:
            self._workforce.toll.count(f"pod {hello.pod}", "its agent was given up, and came back")
        self._lost.discard(key)
        pod.attempt, pod.pod, pod.node = hello.attempt, hello.pod, hello.node
        pod.attached, pod.last_heartbeat, pod.lost_at, pod.has_left = True, self._clock(), None, False
        self._sessions.agents.enter(key, outbox, hello.attempt)
        self._compare(key, {WorkerId(w.worker): w for w in hello.workers})
        if 0 < hello.highest_driver_attempt < self._job.attempt and hello.driverless_s > 0:
            self._workforce.recoveries.driver_lost(self._clock() - hello.driverless_s)
        self._job.event("agent", f"agent of pod {hello.pod} attached", pod=hello.pod, attempt=hello.attempt)
        return key

    def _may_come(self, key: PodKey) -> bool:
        pool = next((p for p in self._job.spec.pools if p.name == key[0]), None)
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
                self._workforce.lose(record, f"the agent of pod {self._members.pods[key].pod} does not have it")
        self._workforce.spares.adopt(key, running)
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
                if names.is_spare(progress.worker):
                    self._workforce.spares.heard(key, progress)
                else:
                    changed = self._workforce.progressed(progress) or changed
        elif kind == "exited" and names.is_spare(message.exited.worker):
            self._workforce.spares.exited(key, message.exited)
        elif kind == "exited":
            self._workforce.exited(message.exited)
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

    def let_go(self, key: PodKey, why: str) -> None:
        """It was told to end, and may: from now on its workers are another attempt's."""
        pod = self._members.pods[key]
        pod.attached, pod.lost_at, pod.has_left = False, None, True
        self._job.instruct(key, leave=agents_pb2.Leave())
        self._sessions.agents.close(key, "it leaves")  # when that has been written
        self._lose_pod(key, why, since=None)

    def _lose_pod(self, key: PodKey, why: str, *, since: float | None) -> None:
        self._job.event("pod-lost", why, pool=key[0], ordinal=key[1])
        self._workforce.spares.lost(key)
        lost = [r for r in self._members.in_pod(key) if r.state is not WorkerState.DOWN]
        workers = [r.placed.id for r in lost if r.placed.id in self._members.workers]
        self._workforce.recoveries.lost(workers, who=f"pod {key[0]}-{key[1]}", role="", why=why, since=since)
        self._lost.add(key)
        for record in lost:
            # A pod that is replaced is the operator's count, and its rules'.
            self._workforce.lose(record, why, Loss(is_counted=False))

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

    def _note_silent_agents(self, now: float) -> None:
        """Pods that only another attempt helps. Where most of several are silent at once the trouble is taken for the
        driver's own, as of its network: none is named."""
        wanted = [pod for pod in self._members.pods.values() if pod.wanted]
        for pod in wanted:
            since = now if pod.absent_since is None else pod.absent_since
            pod.absent_since = None if pod.attached else since
        absent = {pod.key: pod.absent_since for pod in wanted if pod.absent_since is not None}
        late_s = self._settings.limits.agent_replaced_after_s
        late = [f"{pool}-{n}" for (pool, n), since in absent.items() if now - since >= late_s]
        is_our_own = len(wanted) >= MOST_OF and 2 * len(absent) > len(wanted)
        silent = () if is_our_own else tuple(late)
        if silent != self.silent:
            self.silent = silent
            self._job.mark(Dirty.SHOWN)
