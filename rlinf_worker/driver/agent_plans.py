"""Which plans the agents know of: what each was told, what it has confirmed, who still owes an answer.

    told Prepare ──► told Commit ──► confirmed

For: switch.py. An agent whose stream broke shows in its next hello what it has committed, and is told the rest again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from rlinf_api import unknown
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.plan import RLPlanSpec
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.members import PodKey
from rlinf_worker.driver.pending import Pending, Phase


class AgentPlans:
    """Plans go by the numbers of their switches."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._prepared: dict[PodKey, int] = {}  # the highest that it was told to prepare
        self._committed: dict[PodKey, int] = {}  # the highest that it has confirmed to be committed
        self._owed: dict[PodKey, int] = {}  # the instruction that it has not answered
        self._commits: dict[PodKey, tuple[int, int]] = {}  # the last instruction to commit, and which

    def attached(self, key: PodKey, committed: int) -> None:
        self._committed[key], self._prepared[key] = committed, 0

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
        """Of those that are there."""
        return not any(key in self._job.sessions.agents for key in self._owed)
