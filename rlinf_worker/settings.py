"""Deadlines, intervals and bounds of the worker side: driver, agents and workers read the same ones.

For: everything that waits, ages or fills up in `rlinf_worker`; what only the driver counts in is in `driver.settings`.
Not for: what a user chooses (that is the RLJob) or where things are (the pod contract in `rlinf_api.names`).

RLINF_SETTINGS, a JSON object, overrides them for one process: in a pool's template for its agents and workers, in
`operator.driverTemplate` for drivers, in the environment of `rljob run` for all of its pods whose template is silent.

>>> load({"RLINF_SETTINGS": '{"stop_grace_s": 0.5}'}).stop_grace_s
0.5
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rlinf_api import names
from rlinf_api.errors import UserError

BEATS_MISSED: Final = 3.0
"""Heartbeats, at least, that may be late before an agent is called dead: one or two are late on any busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Seconds end in `_s`, sizes in `_bytes`; the reason of each default stands under it."""

    heartbeat_interval_s: float = 1.0
    """Agent to driver, who names it in its Welcome. Workers mark their progress for their agent once a second, so more
    beats would tell the driver nothing. Four fit into `agent_dead_after_s`, which alone says when a silent agent is
    dead: a late one or two never cost a pod. 1,024 agents make as many messages a second, each of 0.1 ms of CPU."""

    agent_dead_after_s: float = 4.0
    """Silence after which the driver calls an agent dead, as far as the driver's own RLINF_SETTINGS says; an agent that
    cannot get a word to its driver for so long, by its pod's, dials again. A lost pod is to be noticed within 6 s; the
    rest is for the decision. A broken stream is noticed at once and does not wait for this."""

    agent_replaced_after_s: float = 60.0
    """How long an agent may be away from a driver that is up, until the operator is told to replace its pod: it is
    frozen, or cut off, and without it no worker of its pod is started again. As long as a silent driver is given. The
    loss of a node is known sooner (40 s, and 5 s of toleration), and has rules of its own."""

    connect_timeout_s: float = 5.0
    """Agent, worker: dialling the driver until it has taken the hello. Name, TLS and hello take 20 ms; a driver that
    starts needs longer, and the next try comes anyway."""

    welcome_timeout_s: float = 30.0
    """Agent, worker: from the hello to the Welcome. A driver answers when a plan is in force, which takes seconds; one
    that is frozen breaks the connection within 4 s and is not waited for. A worker whose driver does not take one frame
    within this time dials again, too: sooner, a busy driver would hear a thousand hellos instead."""

    reconnect_backoff_s: float = 0.1
    """First pause between two tries to reach the driver; doubles. Small, because a restarted driver waits for us."""

    reconnect_backoff_max_s: float = 2.0
    """Longest pause, before jitter of up to a half: the driver of 1,000 agents sees at most 1,000 dials per second, and
    as many of 1,000 workers."""

    driver_absence_timeout_s: float = 300.0
    """After so long without a driver a worker ends, and an agent ends its workers and exits. A driver pod that moves to
    another node takes a minute or two (image pull); slots that nobody drives must not stay taken much longer."""

    start_deadline_s: float = 60.0
    """Phase `start`: from the start of a worker's process until its role is made: interpreter, imports, the links to
    agent and driver. Torch takes 4 s alone and half a minute beside other imports on a cold disk. The agent kills at
    it and tells its driver of it, which gives the worker as long."""

    load_deadline_s: float = 300.0
    """Phase `load`: weights from a network disk at 300 MB/s make 90 GB in that time."""

    compile_deadline_s: float = 600.0
    """Phase `compile`: torch.compile and graph capture of large models are known to take minutes."""

    idle_deadline_s: float = 20.0
    """Phases `ready` and `idle`, where a worker's event loop marks by itself each second or so."""

    first_step_deadline_s: float = 300.0
    """Phase `step`, the first piece of work of a worker's life: it allocates, loads kernels and compiles, and nothing
    says for how long. As long as `load`."""

    step_deadline_min_s: float = 20.0
    """Phase `step`, between pieces of work and for short steps: a garbage collection, a page-in or a busy machine
    must not look like a hang."""

    step_deadline_factor: float = 10.0
    """Phase `step`: times the median step so far. Long answers make steps of three to five times the median."""

    probe_interval_s: float = 2.0
    """Between two questions to a role's engine whether it is well. A dead one is noticed within it; an answer costs
    an engine less than a step."""

    probe_deadline_s: float = 10.0
    """For the answer: ten engine steps of a second, or one beside a long prefill, and a machine that swaps. Half of the
    shortest deadline of a step, so that the engine is named and not the role."""

    stop_grace_s: float = 10.0
    """From the stop order until SIGKILL when the agent itself ends: less than the 30 s that a pod is given. A Stop of
    the driver names its own grace, where 0 means at once."""

    leave_reserve_s: float = 3.0
    """The part of the grace of a pod that is to end, beside `stop_grace_s`, that is not used to hand its work over.
    Processes that are killed have `reap_timeout_s`, the last words `final_flush_s`. 30 s of grace leave 17 s to work
    on."""

    hurry_after_s: float = 1.0
    """A second SIGTERM this long after the first ends the grace. One that comes sooner is the same word twice: a
    process group and its leader are often told both."""

    reap_timeout_s: float = 2.0
    """From SIGKILL until a process tree must be gone. A process in an uninterruptible wait may need longer; it is then
    reported with its name and nothing waits for it."""

    stacks_timeout_s: float = 1.0
    """How long a hung worker may take to write its stacks after SIGUSR1. faulthandler needs milliseconds."""

    rehome_after_s: float = 30.0
    """Driver: how long the units that belong to one worker, as an environment's segments do, wait for it once it is
    lost; then others of its role make them. A worker is back within seconds and a lost pod within 15 s where its node
    is there; sooner, environments would be made anew at two places for nothing. One step is that much longer, once."""

    absent_pod_s: float = 120.0
    """Driver: how long a pod may be without its agent until a plan that waits for the end of a step which needs it has
    the step given up. One that has a node is there within 10 s, or two minutes where the image has to come first."""

    peer_wait_s: float = 1800.0
    """How long a worker waits for a peer that is being replaced, or for room that it makes: a node that is bought, an
    image of 20 GB and a model's load are half an hour. Whoever blocks is named and replaced long before."""

    meet_wait_s: float = 600.0
    """How long a rank waits for the others of its gang where they meet: one may wait as long for the payload of its
    units, or for its volume. Whoever does not come is named."""

    watch_interval_s: float = 0.1
    """How often an agent compares marks with deadlines. Deaths do not wait for it: they come as signals."""

    oversleep_s: float = 1.0
    """When an agent or a driver has not looked at its clock for so long, it or its machine stood still: the clock
    leaves that time out (rlinf_worker/clock.py). Ticks are 0.1 s and 0.2 s apart; a busy loop is late by tenths."""

    final_flush_s: float = 0.5
    """How long an agent that exits tries to tell its driver the last exits."""

    turn_release_s: float = 120.0
    """From the end of a turn until the slots must be free; then the process trees that still hold them are killed. An
    optimizer or engine step that is under way may take a minute, and 80 GB take 10 s to host memory."""

    turn_most_s: float = 3600.0
    """How long a role may work on in its turn while another that could have the slots waits for them. An update of a
    large model or a batch of long answers takes minutes; a turn of an hour is a plan with too many units, or a mistake.
    Then it is told that its turn is over, and has `turn_release_s` to come to a safe point."""

    turn_patience_s: float = 0.05
    """How long a role that was idle waits for a quarter of its channel while nobody uses the slots. A change of turns
    costs milliseconds to seconds; much less would change turns for single items."""

    turn_idle_s: float = 0.0005
    """How long a worker must have had nothing to do until it counts as idle: an answer that is on its way over shared
    memory takes 0.15 ms."""

    worker_log_bytes: int = 16 << 20
    """A worker's log file; at this size it becomes NAME.1 and a new one begins, so that a job of 1,000 workers keeps
    32 GB at most."""

    last_words_bytes: int = 2048
    """The end of a worker's stderr that is kept for its failure. A termination message has 4096 bytes in all."""

    stacks_bytes: int = 16 << 10
    """The most of a hung worker's stacks, as agents.proto says."""

    outbox_messages: int = 1024
    """Agent: hangs and results that wait for a driver, and exits that are said again to each. More than a pod's workers
    can make between two drivers."""

    results_kept: int = 1024
    """Results of instructions that an agent can repeat. A driver has far fewer under way to one pod."""

    spans_file_bytes: int = 64 << 20
    """A pod's span file; at this size it becomes NAME.1 and a new one begins. 500,000 spans."""

    metric_series: int = 6144
    """Time series of one agent. 64 workers with 96 each, as an env of CartPole has 70; more is dropped, counted."""

    def phase_deadline_s(self, phase: str, *, median_step_s: float = 0.0) -> float:
        """Default deadline of a phase of roles.protocol.Phase. `median_step_s`: 0 while nothing was measured."""
        of_phase = {
            "start": self.start_deadline_s,
            "load": self.load_deadline_s,
            "compile": self.compile_deadline_s,
            "step": max(self.step_deadline_min_s, self.step_deadline_factor * median_step_s),
            "stop": self.stop_grace_s,
        }
        return of_phase.get(phase, self.idle_deadline_s)


def load(environ: Mapping[str, str]) -> Settings:
    """The defaults, with what RLINF_SETTINGS overrides. Raises UserError for a field that does not exist."""
    text = environ.get(names.ENV_SETTINGS, "")
    if not text:
        return Settings()
    try:
        given = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"{names.ENV_SETTINGS} is not JSON", got=str(error), wanted='an object such as {"stop_grace_s": 1}'
        ) from error
    if not isinstance(given, dict):
        raise UserError(f"{names.ENV_SETTINGS} is not a JSON object", got=type(given).__name__)
    defaults = dataclasses.asdict(Settings())
    types = {name: type(value) for name, value in defaults.items()}
    for key, value in given.items():
        if key not in types:
            raise UserError(
                f"{names.ENV_SETTINGS} has a setting that does not exist", got=repr(key),
                wanted="one of " + ", ".join(sorted(types)),
            )  # fmt: skip
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0 or (types[key] is int and value != int(value)):
            raise UserError(
                f"setting {key} of {names.ENV_SETTINGS} cannot be used", got=repr(value),
                wanted="a whole number above 0" if types[key] is int else "a number above 0",
            )  # fmt: skip
    settings = Settings(**{key: types[key](value) for key, value in given.items()})
    if settings.agent_dead_after_s < BEATS_MISSED * settings.heartbeat_interval_s:
        raise UserError(
            f"settings of {names.ENV_SETTINGS} do not fit each other: agents that are well would be called dead",
            got=f"agent_dead_after_s {settings.agent_dead_after_s:g}, "
            f"heartbeat_interval_s {settings.heartbeat_interval_s:g}",
            wanted=f"agent_dead_after_s of at least {BEATS_MISSED:g} heartbeats",
            next="raise the one or lower the other",
        )  # fmt: skip
    return settings
