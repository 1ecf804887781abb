"""Times of the driver, in seconds, each with its reason. What agents or workers count in as well is in `limits`, which
RLINF_SETTINGS of the driver's environment can set; the others nobody sets.

>>> DriverSettings(limits=Settings(load_deadline_s=500.0)).spare_start_timeout_s
620.0
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlinf_worker.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    limits: Settings = field(default_factory=Settings)
    broken_agent_s: float = 1.5
    """A broken stream may be a network blip; an agent reconnects within 0.1 s."""
    broken_worker_s: float = 1.5
    """Likewise for a worker's stream; its agent reports a death much sooner."""
    restart_delay_s: float = 0.2
    """Before a worker is started again, doubled per failure in a row."""
    restart_delay_max_s: float = 10.0
    """A worker that cannot start must not burn a core, and not wait for minutes once it can."""
    spare_calm_s: float = 2.0
    """All workers must have been ready so long before a warm spare is started: its imports take seconds of CPU, and a
    worker that has just come back has a step to make up for."""
    spare_delay_max_s: float = 60.0
    """Longest pause before a spare that died is started again: nobody waits for it, so it may be rare."""
    stall_notice_s: float = 10.0
    """Standing still that is worth telling people: half of the shortest deadline that kills."""
    first_stall_notice_s: float = 30.0
    """Before a step has been measured: first steps compile and allocate for as long."""
    stall_deadline_s: float = 60.0
    """From the last time that anything moved, where all wait for each other, until somebody is replaced. Nothing mends
    itself by then: a lost pod is known after 6 s, and whoever was away is back after 15 s or rehomed after 30 s."""
    step_notice_factor: float = 10.0
    """A step that takes ten times the median is named with what it waits for."""
    step_notice_min_s: float = 30.0
    """But never sooner: first steps and checkpoints take seconds."""
    save_timeout_s: float = 120.0
    """How long the last checkpoint may take to get its COMMIT."""
    prepare_timeout_s: float = 600.0
    """How long the pods and workers of another plan may take to be ready beside the present one: pulling an image takes
    minutes. As long as spec.allOrNothing gives a job's first pods by default."""
    commit_timeout_s: float = 5.0
    """How long agents and workers may take to answer at the step boundary, where each waits for nothing but its own
    loop; one that is dead is known within silent_agent_s, and what is only slow learns the plan from its next
    Welcome."""
    dismiss_grace_s: float = 2.0
    """How long a worker that a plan no longer has may take to end by itself: it has no work, only its last spans and
    log lines to tell. Whoever comes onto its slots waits for it, so it is not longer."""
    gang_checkpoint_timeout_s: float = 600.0
    """How long a plan waits for a checkpoint on which its other gang can begin, from the first that could not be
    written: somebody has to clear the disk, and a plan that waits longer than a preparation may take is one that people
    have forgotten."""
    linger_s: float = 20.0
    """A finished driver stays until the operator has read the end, at most so long; an operator that comes later finds
    it in the termination message. Less than the operator's `finish_grace_s` (30 s), after which it deletes a driver
    that has not ended, and with it what people would read."""
    profile_interval_s: float = 30.0
    """Between two profiles, once those of the first steps have gone out: a drift is to be met within 10 steps, which
    of most jobs last minutes, and 1,000 jobs make 33 reports per second at one scheduler."""
    report_timeout_s: float = 5.0
    """How long one report may take to the scheduler, which keeps it in memory."""
    report_tries: int = 5
    """How often one report is tried, with 1, 2, 4, 8 s in between: a scheduler that is replaced is back by then. The
    next one comes anyway, and says more."""
    plan_timeout_s: float = 60.0
    """An agent that is up before the plan waits so long for it; then it is told to come again."""

    @property
    def spare_start_timeout_s(self) -> float:
        """From a spare's start until it is warm: what its agent gives its phases, and a minute."""
        return self.limits.start_deadline_s + self.limits.load_deadline_s + 60.0
