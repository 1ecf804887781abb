"""A plan on its way into force: how far it is, and what it waits for. Values only; switch.py moves them."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from enum import Enum

from rlinf_api import unknown
from rlinf_api.names import WorkerId
from rlinf_api.placement import Placement
from rlinf_api.plan import RLPlanSpec
from rlinf_worker.driver.changes import Changes
from rlinf_worker.driver.members import PodKey

logger = logging.getLogger(__name__)


class Phase(Enum):
    IDLE = "idle"
    PREPARING = "preparing"
    PREPARED = "prepared"
    WAITING = "waiting for the end of the step"
    TELLING = "telling the agents"
    HANDING_OVER = "handing over"


ABORTABLE = frozenset({Phase.PREPARING, Phase.PREPARED, Phase.WAITING})
HOLDING = frozenset({Phase.TELLING, Phase.HANDING_OVER})
"""No step opens meanwhile."""


class Phased:
    """Says each phase in the log, so that it can be seen what a change of plan waits for, and for how long."""

    _phase = Phase.IDLE
    pending: Pending | None = None

    @property
    def finishes(self) -> bool:
        """An agent has seen the commit of what is pending, by a driver before: nothing else may take its place."""
        return self.pending is not None and self.pending.finishing

    @property
    def phase(self) -> Phase:
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if phase is not self._phase:
            logger.info("switch of plans", extra={"phase": phase.value, "before": self._phase.value})
        self._phase = phase


@dataclass(slots=True, kw_only=True)
class Pending:
    """The plan that is on its way."""

    plan: RLPlanSpec
    placement: Placement
    changes: Changes
    number: int
    deadline: float
    finishing: bool = False  # an agent has seen its commit: it cannot be aborted
    told: dict[PodKey, int] = field(default_factory=dict)  # instructions not yet answered, by pod
    commits: dict[PodKey, int] = field(default_factory=dict)  # the last commit told to each
    awaited: dict[WorkerId, int] = field(default_factory=dict)  # workers that have not answered Replan, with their life
    boundary_at: float = 0.0

    @property
    def text(self) -> str:
        return json_of(self.plan)


def say(found: Changes) -> str:
    parts = [
        f"{len(workers)} {what}"
        for workers, what in (
            (found.beside, "workers start beside"),
            (found.after, "start with the commit"),
            (found.gone - found.after, "end with it"),
        )
        if workers
    ]
    return ", ".join(parts) if parts else "all in place"


def json_of(plan: RLPlanSpec) -> str:
    return json.dumps(unknown.compact(plan))
