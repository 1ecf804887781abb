"""Times of the driver, in seconds, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    heartbeat_interval_s: float = 0.5
    """Agents beat twice a second: four beats fit into the 2 s in which a dead one must be noticed."""
    silent_agent_s: float = 4.0
    """A pod whose agent is silent this long is lost: under the 6 s in which that must be known."""
    broken_agent_s: float = 1.5
    """A broken stream may be a network blip; an agent reconnects within 0.1 s."""
    broken_worker_s: float = 1.5
    """Likewise for a worker's stream; its agent reports a death much sooner."""
    oversleep_s: float = 1.0
    """A tick that comes this much late: the driver itself stood still, and has not heard who spoke meanwhile. As agents
    have it for their workers."""
    restart_delay_s: float = 0.2
    """Before a worker is started again, doubled per failure in a row."""
    restart_delay_max_s: float = 10.0
    """A worker that cannot start must not burn a core, and not wait for minutes once it can."""
    spare_calm_s: float = 2.0
    """All workers must have been ready so long before a warm spare is started: its imports take seconds of CPU, and a
    worker that has just come back has a step to make up for."""
    spare_start_timeout_s: float = 420.0
    """From a spare's start until it is warm: the 60 s and 300 s that its agent gives its phases, and a minute."""
    spare_delay_max_s: float = 60.0
    """Longest pause before a spare that died is started again: nobody waits for it, so it may be rare."""
    start_timeout_s: float = 60.0
    """From Start to the worker's hello: imports on a busy node take seconds, never a minute."""
    quiet_worker_s: float = 10.0
    """Silence that is worth telling people: half of the shortest deadline that kills."""
    step_notice_factor: float = 10.0
    """A step that takes ten times the median is named with what it waits for."""
    step_notice_min_s: float = 30.0
    """But never sooner: first steps and checkpoints take seconds."""
    save_timeout_s: float = 120.0
    """For the last checkpoint to get its COMMIT."""
    prepare_timeout_s: float = 600.0
    """For the pods and workers of another plan to be ready beside the present one: pulling an image takes minutes. As
    long as spec.allOrNothing gives a job's first pods by default."""
    commit_timeout_s: float = 5.0
    """For agents and workers to answer at the step boundary, where each waits for nothing but its own loop; one that is
    dead is known within silent_agent_s, and what is only slow learns the plan from its next Welcome."""
    dismiss_grace_s: float = 2.0
    """For a worker that a plan no longer has, to end by itself: it has no work, only its last spans and log lines to
    tell. Whoever comes onto its slots waits for it, so it is not longer."""
    gang_checkpoint_timeout_s: float = 600.0
    """For a checkpoint on which a plan's other gang can begin, from the first that could not be written: somebody has
    to clear the disk, and a plan that waits longer than a preparation may take is one that people have forgotten."""
    linger_s: float = 30.0
    """A finished driver stays until the operator has read the end, at most so long."""
    plan_timeout_s: float = 60.0
    """An agent that is up before the plan waits so long for it; then it is told to come again."""
