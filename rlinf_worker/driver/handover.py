"""Pods that were told to end while their job goes on: a drained node, a preemption, a deletion. Each has a grace.

    agent:  SIGTERM ──Leaving(within_s)──> works on ... ──────────────> Leave ──> stops its workers, exits
    driver:                 every commit is saved, where a gang's rank is there
    successor:                               its hello: "come again" ──> welcomed

A pod may go when its successor's agent is there, that is, keeps coming: one that is not heard any more has died before
its turn, and the next attempt is waited for. One with ranks of a gang that ends steps may go when, besides, a
checkpoint has been written since, and together with the others of that kind: so its gang is formed anew once, and makes
nothing again but what was done while the last file was closed. Where no successor comes in time the agent ends by
itself, behind the last of these checkpoints.

A stream that breaks ends no hand-over: the agent says again that it leaves, to a new driver too.

Nothing is waited for in a job that recovers, nor where the plan has no such pod any more. In one that ends they stay
until its last checkpoint is there.

Called by core.py. Not for: who may attach (agents.py), what a lost worker means (core.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.agents import Agents
from rlinf_worker.driver.commits import Commits
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.members import PodKey
from rlinf_worker.driver.sessions import Refuse


@dataclass(slots=True)
class _Leaver:
    attempt: int  # of the pod
    until: float  # by the job's clock: from then on its agent ends by itself
    successor: str = ""  # the pod that comes for its place
    successor_attempt: int = 0
    came_at: float = 0.0  # the last time
    saved: PolicyVersion | None = None  # the newest checkpoint by then


class HandOver:
    def __init__(self, job: Job, agents: Agents, commits: Commits) -> None:
        self._job, self._agents, self._commits = job, agents, commits
        self._leavers: dict[PodKey, _Leaver] = {}  # bounded by the job's pods
        self.outcomes: Counter[str] = Counter()
        """Pods by how they went: `HandedOver`, or `EndedBefore` where their grace ended, or their agent, or steps."""

    @property
    def wants_checkpoint(self) -> bool:
        """A rank of a gang that ends steps is about to go, and there is a place for what it has learnt."""
        has_place = bool(self._job.checkpoint_uri) and not self._commits.rests
        return has_place and any(map(self._holds_rank, self._leavers))

    def leaves(self, key: PodKey, *, within_s: float) -> None:
        """Its agent says so."""
        job, pod = self._job, self._job.members.pods.get(key)
        if pod is None or not pod.wanted or not job.is_running:
            job.instruct(key, leave=agents_pb2.Leave())
            return
        known = self._leavers.get(key)
        if known is not None and known.attempt == pod.attempt:  # its stream broke, and it says so again
            known.until = job.clock() + within_s
            return
        self._leavers[key] = _Leaver(pod.attempt, job.clock() + within_s)
        text = f"pod {pod.pod} is to end: it works on until its successor is there, for {within_s:.0f} s at most"
        job.event("leaving", text + ("; each step is saved" if self.wants_checkpoint else ""), pod=pod.pod)

    def hold_off(self, hello: agents_pb2.Hello) -> None:
        """Whoever comes for the place of a pod that cannot go yet comes again."""
        key = (hello.pool, hello.ordinal)
        leaver = self._leavers.get(key)
        if leaver is None or hello.attempt <= leaver.attempt:
            return
        if hello.attempt >= leaver.successor_attempt:
            if leaver.successor != hello.pod:
                leaver.successor, leaver.saved = hello.pod, self._newest
            leaver.successor_attempt, leaver.came_at = hello.attempt, self._job.clock()
        self.settle()
        if key in self._leavers:
            pod = self._job.members.pods[key].pod
            raise Refuse(f"pod {pod} hands its work over; come again", exit_code=names.EXIT_RETRYABLE)

    def settle(self) -> None:
        """Who may go, goes; who is gone, or is out of time, is left to what follows a loss."""
        now, pods = self._job.clock(), self._job.members.pods
        for key, leaver in list(self._leavers.items()):
            pod = pods.get(key)
            if pod is None or pod.is_given_up or pod.attempt != leaver.attempt or now > leaver.until:
                del self._leavers[key]
                self.outcomes["EndedBefore"] += 1
            elif leaver.successor and now - leaver.came_at > self._job.settings.limits.agent_dead_after_s:
                text = f"pod {leaver.successor}, which came for the place of {pod.pod}, is not heard any more"
                self._job.event("leaving", f"{text}; another is waited for", pod=pod.pod)
                leaver.successor = ""
        if self._job.ending:
            return  # its last checkpoint is written, by these among others
        ranks = [key for key in self._leavers if self._holds_rank(key)]
        together = all(self._leavers[key].successor for key in ranks) and self._is_saved(ranks)
        for key, leaver in list(self._leavers.items()):
            if not pods[key].attached:
                continue  # its stream broke a moment ago: it comes back, or is given up
            if together if key in ranks else leaver.successor:
                self._let_go(key, "HandedOver", f"has handed its work over to {leaver.successor}")
            elif not self._job.is_running:
                self._let_go(key, "EndedBefore", "is to end, and has nothing to do while the job recovers")

    def _let_go(self, key: PodKey, outcome: str, why: str) -> None:
        del self._leavers[key]
        self.outcomes[outcome] += 1
        self._agents.let_go(key, f"pod {self._job.members.pods[key].pod} {why}")

    def _is_saved(self, ranks: list[PodKey]) -> bool:
        """Nothing would be made again, or as little as ever: a step may end sooner than its checkpoint."""
        job = self._job
        if job.is_saved or self._commits.problem:
            return True
        return all(self._newest is not None and self._newest != self._leavers[key].saved for key in ranks)

    @property
    def _newest(self) -> PolicyVersion | None:
        return self._job.saved[0] if self._job.saved is not None else None

    def _holds_rank(self, key: PodKey) -> bool:
        gangs = self._job.topology.gang_roles
        return any(record.placed.role in gangs for record in self._job.members.in_pod(key))
