"""What is known of one job: the value that all parts of the driver share. Parts change facts here and mark what has
changed; core.py settles it. How the job stands is computed from the facts, in one place.

| fact | whose |
|---|---|
| placement, members, sessions | switch.py and core.py; workforce.py; server.py |
| ledger, saved, stands_on | gang.py, commits.py |
| spec, flow_settings | the operator, of what may change in place (`adjust`) |
| begun, began | presence.py, gang.py |
| ending_at, the end | commits.py, core.py; whoever has a reason to fail |

    job.say_recovering("worker env/0 is started again: exit code 137")
    job.standing == Outlook(DriverState.RECOVERING, "Recovering", "worker env/0 is started again: exit code 137")
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Flag, auto
from typing import Any, Final

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.conditions import Reason
from rlinf_api.edits import goal_of, with_goal
from rlinf_api.job import RLJobSpec
from rlinf_api.names import WorkerId
from rlinf_api.placement import NO_PLAN, Placement
from rlinf_api.report import DriverState, Failure, Goal
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.members import Members, PodKey
from rlinf_worker.driver.output import Output
from rlinf_worker.driver.sessions import Sessions
from rlinf_worker.driver.settings import DriverSettings
from rlinf_worker.driver.steps import StepLedger
from rlinf_worker.driver.topology import Topology
from rlinf_worker.roles.protocol import FlowSettings

logger = logging.getLogger(__name__)


class Dirty(Flag):
    """What has changed since the driver settled last, by what has to be looked at again."""

    NOTHING = 0
    SHOWN = auto()  # what people see, and whoever waits with `until`
    TIME = auto()  # back-offs and deadlines
    UNITS = auto()  # queues: what can be matched
    MEMBERS = auto()  # who is there and what they hold: gangs, routes, whether the job may begin
    RERUN = auto()  # the flow function runs anew, from its first line


@dataclass(frozen=True, slots=True)
class Outlook:
    """How the job stands, as people are told."""

    state: DriverState
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class FlowWait:
    """What the flow waits for in a call of ours, for people, and the tickets that it waits for.

    FlowWait("results of 2 tickets of step 3", ("env:0@3", "env:1@3"))
    """

    what: str = ""
    tickets: Collection[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricBound:
    """A number of steps that people are told of while it is above `at_most`."""

    at_most: float
    reason: Reason
    words: str


NO_PLAN_YET: Final = Outlook(DriverState.WAITING, Reason.WAITING_FOR_PLAN, "the operator has not sent a plan yet")
STARTING: Final = Outlook(DriverState.STARTING, Reason.WAITING_FOR_WORKERS)
STEPPING: Final = Outlook(DriverState.RUNNING, Reason.STEPPING)


class Job:
    def __init__(
        self,
        spec: RLJobSpec,
        *,
        flow_settings: FlowSettings,
        uid: str,
        attempt: int,
        checkpoint_uri: str,
        output: Output,
        clock: Callable[[], float],
        settings: DriverSettings,
        first_of_life: bool = False,
        name: str = "",
    ) -> None:
        """`attempt`: of the driver."""
        self.name = name
        self.spec, self.flow_settings, self.uid, self.attempt = spec, flow_settings, uid, attempt
        self.is_first = attempt == 1 or first_of_life  # of the job, or since it was resumed: nobody knows more
        self.checkpoint_uri, self.output, self.clock, self.settings = checkpoint_uri, output, clock, settings
        self.members, self.sessions = Members(), Sessions()
        self.ledger = StepLedger(
            steps=spec.flow.steps,
            max_staleness=spec.flow.max_staleness,
            checkpoint_every=spec.checkpoint.every_steps,
        )
        self.placement: Placement = NO_PLAN
        self.topology = Topology()
        self.roster = 0  # the highest number given out
        self.begun = False  # all workers were ready once in this run of the flow
        self.began = False  # likewise, in any run under this driver
        self.saved: tuple[PolicyVersion, str] | None = None  # the newest checkpoint, and where it is
        self.stands_on: PolicyVersion | None = None  # the weights that a checkpoint was restored as
        self.ending_at: float | None = None  # the last step has committed; its checkpoint is waited for until then
        self.failure: Failure | None = None  # that ended the job
        self.ended = asyncio.Event()
        self.changed = asyncio.Event()
        self.sequence = 0  # of what people see
        self._instructions = 0
        self.watches: dict[str, MetricBound] = {}  # by metric; declared by the flow
        self.flow_waits = FlowWait()
        self.marks = Dirty.NOTHING
        self._moved: set[WorkerId] | None = set()  # whom the mark MEMBERS is of; None: of anybody
        self._ran = False
        self._lost: Outlook | None = None  # why steps do not go on as they should; None: they do
        self._news = STEPPING
        self._end: Outlook | None = None

    # --- facts that follow from others --------------------------------------------------------------------------------
    @property
    def revision(self) -> int:
        """The plan in force; 0: none is."""
        return self.placement.revision

    @property
    def declared(self) -> bool:
        """The flow has said which channels it has: workers may be started and welcomed."""
        return bool(self.topology.gangs)

    @property
    def has_begun(self) -> bool:
        """All workers were ready once. Of a driver before this one it is taken for granted: after a loss of everything
        nobody is left who could tell."""
        return self.began or self.attempt > 1

    @property
    def ending(self) -> bool:
        return self.ended.is_set() or self.ending_at is not None

    @property
    def all_here(self) -> bool:
        """All workers are ready, but for those whose work others do."""
        return self.members.all_ready(besides=self.members.away)

    @property
    def is_saved(self) -> bool:
        """Whether the committed weights are safe, as far as this job wants them to be: saved, or restored."""
        return not self.checkpoint_uri or self.ledger.version in (self.saved and self.saved[0], self.stands_on)

    # --- what has changed ---------------------------------------------------------------------------------------------
    def mark(self, marks: Dirty) -> None:
        self.marks |= marks
        if marks & Dirty.MEMBERS:
            self._moved = None

    def mark_member(self, worker: WorkerId) -> None:
        """This one alone has come, gone or begun: what follows is looked at of it, and not of thousands."""
        self.marks |= Dirty.MEMBERS | Dirty.SHOWN
        if self._moved is not None:
            self._moved.add(worker)

    def take_marks(self) -> Dirty:
        marks, self.marks = self.marks, Dirty.NOTHING
        return marks

    def take_moved(self) -> set[WorkerId] | None:
        moved, self._moved = self._moved, set()
        return moved

    def show(self) -> None:
        """People look again, and so does whoever waits with `until`."""
        self.sequence += 1
        self.changed.set()

    async def until(self, condition: Callable[[], bool], *, what: str) -> None:
        """Wait for a condition over the job's facts. Bounded by the job: the message says what a step lacks, a job's
        activeDeadlineSeconds ends it, and a driver that ends wakes every waiter."""
        while not condition() and not self.ended.is_set():
            self.changed.clear()
            await self.changed.wait()
        if not condition():
            raise asyncio.CancelledError(f"the driver ended while waiting for {what}")

    def instruct(self, pod: PodKey, *, plan_revision: int = 0, **kind: Any) -> int:
        """`instruct(key, stop=agents_pb2.Stop(...))`; the number that its result will bear. A plan's word names it."""
        self._instructions += 1
        instruction = agents_pb2.Instruction(
            id=self._instructions, driver_attempt=self.attempt, plan_revision=plan_revision, **kind
        )
        self.sessions.agents.tell(pod, agents_pb2.DriverMessage(instruction=instruction))
        return self._instructions

    def event(self, kind: str, message: str, **fields: Any) -> None:
        logger.info(message, extra={"event": kind, **fields})
        self.output.event(kind, message, **fields)

    def adjust(self, goal: Goal) -> None:
        """Told by the operator: the spec was edited. Workers are told with the next commit."""
        before = goal_of(self.spec)
        if goal == before:
            return
        self.spec = with_goal(self.spec, goal)
        self.ledger.aim(steps=goal.steps, checkpoint_every=goal.every_steps)
        self.flow_settings = replace(self.flow_settings, steps=self.ledger.steps)
        self.event("adjusted", goal.since(before))
        self.mark(Dirty.SHOWN)

    # --- how it stands ------------------------------------------------------------------------------------------------
    @property
    def standing(self) -> Outlook:
        if self._end is not None:
            return self._end
        if not self.revision:
            return NO_PLAN_YET
        if not self._ran:
            return STARTING
        return self._lost or self._news

    @property
    def is_running(self) -> bool:
        """Steps go on as they should."""
        return self.standing.state is DriverState.RUNNING

    def begin(self, *, without: str = "") -> None:
        """Everybody is ready, but for those that `without` names."""
        self.begun = self.began = self._ran = True
        self._lost, self._news = _recovering(without) if without else None, STEPPING
        self.mark(Dirty.SHOWN)

    def say_recovering(self, words: str, *, unless_said: bool = False, reason: Reason = Reason.RECOVERING) -> None:
        """Steps do not go on as they should. `unless_said`: the words of an earlier loss stay until somebody has looked
        which of them are true. Without effect before steps ever did, and at the job's end."""
        said = _recovering(words, reason)
        if self._ran and not self.ending and said != self._lost and not (unless_said and self._lost is not None):
            self._lost = said
            self.mark(Dirty.SHOWN)

    def say_running(self, reason: Reason, words: str) -> None:
        """While steps go on: what is unusual about them."""
        news = Outlook(DriverState.RUNNING, reason, words)
        if self._news != news:
            self._news = news
            self.mark(Dirty.SHOWN)

    # --- its end: the first one counts --------------------------------------------------------------------------------
    def finish(self, *, saved: bool, made_before: bool = False) -> None:
        note = "" if saved else "; its last checkpoint was not confirmed in time"
        if not self.ledger.finished:
            text = f"stopped after step {self.ledger.committed} of {self.ledger.steps}{note}"
            self._to_end("end", Outlook(DriverState.DRAINED, Reason.STOPPED, text))
            return
        text = f"{self.ledger.committed} steps are done{note}"
        if made_before:
            text = f"the job is complete already: its checkpoint is of step {self.ledger.committed} of "
            text += f"{self.ledger.steps}; raise spec.flow.steps to go on"
        self._to_end("end", Outlook(DriverState.COMPLETE, Reason.FLOW_FINISHED, text))

    def fail(self, reason: Reason, message: str, failure: Failure | None = None) -> None:
        if self._end is None:
            self.failure = failure
            self._to_end("failed", Outlook(DriverState.FAILED, reason, message))

    def stop(self, why: str, *, stale: bool = False) -> None:
        """This driver must not go on: a newer one exists."""
        self._to_end("stopped", Outlook(self.standing.state, "Stale" if stale else "Stopped", why))

    def _to_end(self, kind: str, end: Outlook) -> None:
        if self._end is not None:
            return
        self._end = end
        self.event(kind, end.message, reason=end.reason, state=str(end.state))
        self.output.flush()
        self.ended.set()
        self.mark(Dirty.SHOWN)


def _recovering(words: str, reason: Reason = Reason.RECOVERING) -> Outlook:
    return Outlook(DriverState.RECOVERING, reason, words)
