"""A plan on its way into force: how far it is, what its boundary waits for, and who knows of it. switch.py moves it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from rlinf_api import unknown
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.placement import Placement
from rlinf_api.plan import RLPlanSpec
from rlinf_worker.channels import messages
from rlinf_worker.driver import routes as routing
from rlinf_worker.driver.changes import Changes
from rlinf_worker.driver.channel_specs import channel_specs
from rlinf_worker.driver.commits import Commits
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.members import PodKey, WorkerRecord

logger = logging.getLogger(__name__)


class Phase(Enum):
    IDLE = "idle"
    PREPARING = "preparing"
    PREPARED = "prepared"
    WAITING = "waiting for the end of the step"
    TELLING = "telling the agents"
    HANDING_OVER = "handing over"


HOLDING: Final = frozenset({Phase.TELLING, Phase.HANDING_OVER})
"""No step opens meanwhile."""


@dataclass(slots=True, kw_only=True)
class Pending:
    plan: RLPlanSpec
    placement: Placement
    changes: Changes
    number: int
    deadline: float
    uid: str = ""  # of its object, where the operator named it
    finishing: bool = False  # an agent has seen its commit, by a driver before: it cannot be aborted
    boundary_at: float = 0.0  # since when it waits for the end of the step, or when that was
    is_urgent: bool = False  # the steps that it waited for could not end, and were given up
    phase: Phase = Phase.IDLE

    def __post_init__(self) -> None:
        self.move(Phase.PREPARING)

    def move(self, phase: Phase) -> None:
        """Each phase is in the log, so that it can be seen what a change of plan waits for, and for how long."""
        logger.info("switch of plans", extra={"phase": phase.value, "before": self.phase.value})
        self.phase = phase

    def is_of(self, revision: int, *, uid: str) -> bool:
        """Whether this object is meant: another may have been written under its revision."""
        return self.plan.revision == revision and (uid == self.uid or not uid or not self.uid)

    @property
    def is_kept(self) -> bool:
        """Nothing else may take its place."""
        return self.finishing or self.phase in HOLDING

    @property
    def awaits_gang(self) -> bool:
        """The gang that commits is formed anew, and begins on the checkpoint of the step before."""
        return self.phase is Phase.WAITING and self.changes.gang

    def needs_a_step(self, job: Job, commits: Commits) -> bool:
        """There is no checkpoint of what was learnt last: one more step writes it."""
        if not self.awaits_gang or self.is_urgent or job.ledger.open_steps or job.ledger.draining:
            return False
        return job.ledger.version.number > 0 and not commits.is_saving and not job.is_saved

    def is_at_boundary(self, job: Job, commits: Commits, *, switches: int) -> bool:
        """`switches`: that this driver has made."""
        if job.ledger.open_steps or self.needs_a_step(job, commits) or job.ending:
            return False
        if self.is_urgent:
            return True
        if not job.begun and job.attempt > 1 and switches == 0:
            return False  # a new driver knows that no step is open once all workers have been ready
        return not self.changes.gang or job.ledger.version.number == 0 or job.is_saved  # else it is being written

    def given_up(self, job: Job, commits: Commits) -> str:
        """Why the boundary is not waited for any more. A step may take hours; a disk on which no checkpoint can be
        written does not hold a job for ever."""
        since, limit = commits.failing_since, job.settings.gang_checkpoint_timeout_s
        is_late = since is not None and job.clock() - max(since, self.boundary_at) > limit
        if not (is_late and self.changes.gang) or self.finishing:
            return ""
        return f"its gang begins on a checkpoint, none could be written for {limit:g} s: {commits.problem}"


class AgentPlans:
    """What each agent was told (prepare, then commit), what it has confirmed, who still owes an answer. Plans go by the
    numbers of their switches. An agent whose stream broke shows in its next hello what it has committed, and is told
    the rest again."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._prepared: dict[PodKey, int] = {}  # the highest that it was told to prepare
        self._committed: dict[PodKey, int] = {}  # the highest that it has confirmed to be committed
        self._owed: dict[PodKey, int] = {}  # the instruction that it has not answered
        self._commits: dict[PodKey, tuple[int, int]] = {}  # the last instruction to commit, and which

    def attached(self, key: PodKey, committed: int) -> None:
        self._committed[key] = self._prepared[key] = committed

    def begin(self) -> None:
        """Another plan is prepared: what was owed to the one before is not waited for."""
        self._owed.clear()

    def greet(self, keys: Iterable[PodKey], plan: RLPlanSpec | None, *, number: int, pending: Pending | None) -> None:
        """The plan in force, which switch `number` has brought, and the one that is prepared, to agents that may not
        know of them."""
        is_told = pending is not None and pending.phase is Phase.TELLING  # it is about to be another
        for key in list(keys):
            if plan is not None and self._committed.get(key, 0) < number and not is_told:
                self._prepare(key, plan, number)
                self._job.instruct(key, plan_revision=plan.revision, commit=agents_pb2.Commit(switch_number=number))
                self._committed[key] = number
            if pending is not None:
                self.prepare(key, pending)

    def prepare(self, key: PodKey, pending: Pending) -> None:
        if max(self._prepared.get(key, 0), self._committed.get(key, 0)) < pending.number:
            self._prepared[key] = pending.number
            self._owed[key] = self._prepare(key, pending.plan, pending.number)

    def _prepare(self, key: PodKey, plan: RLPlanSpec, number: int) -> int:
        text = json.dumps(unknown.compact(plan))
        prepare = agents_pb2.Prepare(plan_json=text, switch_number=number)
        return self._job.instruct(key, plan_revision=plan.revision, prepare=prepare)

    def commit(self, keys: Iterable[PodKey], pending: Pending) -> None:
        for key in list(keys):
            self.prepare(key, pending)  # one that came a moment ago has not heard of it
            commit = agents_pb2.Commit(switch_number=pending.number)
            told = self._job.instruct(key, plan_revision=pending.plan.revision, commit=commit)
            self._owed[key], self._commits[key] = told, (told, pending.number)

    def abort(self, pending: Pending, why: str) -> None:
        for key in self._job.sessions.agents:
            abort = agents_pb2.Abort(reason=why[:1000], switch_number=pending.number)
            self._job.instruct(key, plan_revision=pending.plan.revision, abort=abort)
        self._prepared.clear()  # the next preparation bears the same number: nobody has heard of that one

    def answered(self, key: PodKey, instruction: int, *, ok: bool) -> bool:
        """Whether it is what was owed."""
        if self._owed.get(key) != instruction:
            return False
        del self._owed[key]
        told, number = self._commits.get(key, (0, 0))
        if ok and told == instruction:
            self._committed[key] = number
        return True

    @property
    def all_have_answered(self) -> bool:
        """Whether those that are there have answered."""
        return not any(key in self._job.sessions.agents for key in self._owed)


class WorkerPlans:
    """What workers are told: whom they will speak with, before another plan is in force; its sizes, once it is. Their
    end is runtime/session.py."""

    def __init__(self, job: Job, exchange: Exchange) -> None:
        self._job, self._exchange = job, exchange
        self._number = 0  # of the switch whose sizes were told last
        self._owing: dict[WorkerId, int] = {}  # who has not answered, in which life

    def link_ahead(self, record: WorkerRecord, pending: Pending | None) -> None:
        """One that the next plan adds is ready: its links are made now, not in the pause."""
        job = self._job
        if pending is None:
            return
        workers = {wid: r for wid, r in job.members.workers.items() if wid in pending.changes.kept}
        workers |= {r.placed.id: r for r in job.members.prepared.values()}
        peers = routing.partners(job.topology, placement=pending.placement, of=record.placed.id)
        endpoints = [r.endpoint for wid in sorted(peers) if (r := workers.get(wid)) is not None and r.endpoint]
        job.sessions.tell(record.placed.id, links=pb.Links(peers=[messages.endpoint_to_pb(e) for e in endpoints]))

    def tell(self, number: int) -> None:
        """The sizes of the plan in force, to all that are there."""
        job, self._number = self._job, number
        specs = channel_specs(self._job)
        for wid, record in job.members.workers.items():
            if record.present and wid in job.sessions.workers:
                self._owing[wid] = record.attempt
                self._exchange.forget_credit(wid)
                world = len(job.members.of_role(record.placed.role))
                given = messages.allotment_to_pb(record.placed.allotment)
                replan = pb.Replan(
                    plan_revision=job.revision, channels=specs, world=world, switch_number=number, allotment=given
                )
                job.sessions.tell(wid, replan=replan)

    def answered(self, wid: WorkerId, number: int) -> None:
        """It has resized its channels as switch `number` says, and says its credit anew. Also called for a worker that
        connects anew, as its Welcome had the sizes."""
        if number == self._number and self._owing.pop(wid, None) is not None:
            self._exchange.forget_credit(wid)

    @property
    def all_have_answered(self) -> bool:
        """Whoever began another life, or has no stream, learns them from its next Welcome."""
        sessions = self._job.sessions.workers
        while self._owing:  # asked after each answer: one that owes it is enough
            worker, life = next(iter(self._owing.items()))
            if worker in sessions and sessions[worker].attempt == life:
                return False
            del self._owing[worker]
        return True

    def forget(self) -> None:
        """Nobody is waited for any more."""
        self._owing.clear()
