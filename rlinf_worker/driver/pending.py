"""A plan on its way into force: how far it is, and what its step boundary waits for. switch.py moves it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import Final

from rlinf_api.placement import Placement
from rlinf_api.plan import RLPlanSpec
from rlinf_worker.driver.changes import Changes
from rlinf_worker.driver.commits import Commits
from rlinf_worker.driver.job import Job

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
    finishing: bool = False  # an agent has seen its commit, by a driver before: it cannot be aborted
    boundary_at: float = 0.0  # since when it waits for the end of the step, or when that was
    phase: Phase = Phase.IDLE

    def __post_init__(self) -> None:
        self.move(Phase.PREPARING)

    def move(self, phase: Phase) -> None:
        """Each phase is in the log, so that it can be seen what a change of plan waits for, and for how long."""
        logger.info("switch of plans", extra={"phase": phase.value, "before": self.phase.value})
        self.phase = phase

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
        if not self.awaits_gang or job.ledger.open_steps or job.ledger.draining:
            return False
        return job.ledger.version.number > 0 and not commits.is_saving and not job.is_saved

    def is_at_boundary(self, job: Job, commits: Commits) -> bool:
        if job.ledger.open_steps or self.needs_a_step(job, commits) or job.ending:
            return False
        return not self.changes.gang or job.ledger.version.number == 0 or job.is_saved  # else it is being written

    def given_up(self, job: Job, commits: Commits) -> str:
        """Why the boundary is not waited for any more. A step may take hours; a disk on which no checkpoint can be
        written does not hold a job for ever."""
        since, limit = commits.failing_since, job.settings.gang_checkpoint_timeout_s
        is_late = since is not None and job.clock() - max(since, self.boundary_at) > limit
        if not (is_late and self.changes.gang) or self.finishing:
            return ""
        return f"its gang begins on a checkpoint, none could be written for {limit:g} s: {commits.problem}"
