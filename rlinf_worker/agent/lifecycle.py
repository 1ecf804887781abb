"""The life of one worker as a value: `event.apply(worker) -> (worker, instructions)`. No process, no clock, no socket.

Called by `supervisor.py`, which runs the instructions and feeds what came of them back as events. Not for: which worker
is to run (the driver's) or how a process tree is ended (`proctree.py`).

    ABSENT --StartAsked--> SPAWNING --Spawned--> RUNNING --StopAsked--> STOPPING --Ticked(grace over)--> KILLING
                                                    |--Ticked(no mark in time)--> DUMPING --StacksTaken--> KILLING
    any of these --Exited--> CLEARING --TreeGone--> ABSENT (or SPAWNING, where a later attempt was asked for)
    of a warm spare: RUNNING --Promoted--> ABSENT, as its process goes on as that of the worker that was SPAWNING

Exactly one `SayExited` ends each attempt (none that of a spare which became a worker), and only after its leader was
reaped and its process tree is gone: fencing is process death, so whoever hears of an exit may give the slots to
somebody else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Protocol

from rlinf_api.errors import InvariantBroken
from rlinf_api.report import Failure


class Stage(StrEnum):
    ABSENT = "absent"
    SPAWNING = "spawning"
    RUNNING = "running"
    STOPPING = "stopping"
    DUMPING = "dumping"
    KILLING = "killing"
    CLEARING = "clearing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the driver asks for. `slots` are indices in this pod.

    Start(worker="actor/1", role="actor", kind="fsdp", rank=1, world=2, slots=(2,), config_json='{"lr": 3e-4}')
    """

    worker: str
    role: str
    kind: str
    rank: int = 0
    world: int = 1
    attempt: int = 1
    slots: tuple[int, ...] = ()
    config_json: str = "{}"
    spare: bool = False  # it waits, warm, for a worker's place
    from_spare: str = ""  # which of them is to take this place, where it can
    flow_json: str = "{}"  # a spare's


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLife:
    """One worker, of whatever attempt. Times are of the agent's clock, which stands still while the agent does."""

    id: str
    stage: Stage = Stage.ABSENT
    start: Start | None = None  # the present attempt's, or the last one's
    next: Start | None = None  # takes over when the present attempt is gone
    pid: int = 0
    joined: bool = False
    phase: str = "start"
    deadline_s: float = 0.0  # the phase's, from its last mark; 0: none
    marked_at: float = 0.0  # from when its deadline runs: later than the mark where the agent itself slept
    moved_at: float = 0.0  # when its role's work moved last, be it that it waits since
    doing: str = ""  # at what it stands still
    asked: bool = False  # an instruction makes it exit
    kill_at: float = 0.0  # while STOPPING
    hung: str = ""  # what was missed, in words
    words: Failure | None = None
    exit_code: int | None = None
    survivors: tuple[str, ...] | None = None  # None: the tree is not known to be gone

    @property
    def attempt(self) -> int:
        return self.start.attempt if self.start else 0

    @property
    def alive(self) -> bool:
        return self.stage is not Stage.ABSENT

    @property
    def ending(self) -> bool:
        """It is on its way out, whatever it was told last."""
        return self.alive and (self.asked or self.stage in (Stage.STOPPING, Stage.KILLING, Stage.CLEARING))


# --- instructions -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Spawn:
    start: Start


@dataclass(frozen=True, slots=True)
class OrderStop:
    """Over Slots: the worker finishes at its next safe point."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM to the leader, which has not joined yet and hears no order."""


@dataclass(frozen=True, slots=True)
class TakeStacks:
    """Answered by StacksTaken within a bound."""


@dataclass(frozen=True, slots=True)
class KillTree:
    """Answered by TreeGone within a bound. Given once per attempt."""


@dataclass(frozen=True, slots=True)
class SayHung:
    attempt: int
    phase: str
    silent_s: float
    stacks: str


@dataclass(frozen=True, slots=True)
class SayExited:
    attempt: int
    exit_code: int
    asked: bool
    hung: str
    words: Failure | None
    survivors: tuple[str, ...]
    failed_to_start: str = ""


Instruction = Spawn | OrderStop | Terminate | TakeStacks | KillTree | SayHung | SayExited
Outcome = tuple[WorkerLife, tuple[Instruction, ...]]

SILENT_S: Final = 2.5
"""Two marks that have not come. Looking into a file of each worker at every tick would cost what it is spared for."""
_AT_WORK = frozenset({Stage.RUNNING, Stage.STOPPING})
_KILLABLE = _AT_WORK | {Stage.DUMPING}


# --- events -----------------------------------------------------------------------------------------------------------
class LifeEvent(Protocol):
    def apply(self, worker: WorkerLife) -> Outcome:
        """Total: an event that means nothing in a stage (a mark of a dead worker, a second exit) changes nothing."""
        ...


@dataclass(frozen=True, slots=True)
class StartAsked:
    start: Start

    def apply(self, worker: WorkerLife) -> Outcome:
        start = self.start
        if refusal(worker, start) or (worker.start and start.attempt == worker.attempt):
            return worker, ()
        if worker.stage is Stage.ABSENT:
            return WorkerLife(id=worker.id, stage=Stage.SPAWNING, start=start), (Spawn(start),)
        # A later attempt while an earlier one lives: the driver has given that up, so it ends without grace.
        worker = replace(worker, next=start, asked=worker.asked or worker.stage is not Stage.CLEARING)
        return _kill(worker) if worker.stage in _KILLABLE else (worker, ())


@dataclass(frozen=True, slots=True)
class Spawned:
    pid: int
    at: float
    deadline_s: float  # until it must have joined

    def apply(self, worker: WorkerLife) -> Outcome:
        if worker.stage is not Stage.SPAWNING:
            raise InvariantBroken(f"worker {worker.id} has a process that nobody asked for", got=f"pid {self.pid}")
        worker = replace(
            worker, stage=Stage.RUNNING, pid=self.pid, deadline_s=self.deadline_s, marked_at=self.at, moved_at=self.at
        )
        return _kill(worker) if worker.asked else (worker, ())


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    message: str

    def apply(self, worker: WorkerLife) -> Outcome:
        if worker.stage is not Stage.SPAWNING:
            return worker, ()
        return _gone(worker, SayExited(worker.attempt, 0, worker.asked, "", None, (), failed_to_start=self.message))


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    at: float

    def apply(self, worker: WorkerLife) -> Outcome:
        if worker.stage not in _AT_WORK:
            return worker, ()
        worker = replace(worker, joined=True, marked_at=self.at)
        if worker.stage is Stage.STOPPING:  # asked before it could hear; it may still end well
            return worker, (OrderStop("stop", max(0.0, worker.kill_at - self.at)),)
        return worker, ()


@dataclass(frozen=True, slots=True)
class Marked:
    """`at`: until when all was well, which is earlier than the word of it where the role is stuck since."""

    phase: str
    deadline_s: float
    at: float
    moved_at: float
    doing: str = ""

    def apply(self, worker: WorkerLife) -> Outcome:
        if worker.stage not in _AT_WORK:
            return worker, ()
        worker = replace(
            worker, phase=self.phase, deadline_s=self.deadline_s, marked_at=self.at, moved_at=self.moved_at,
            doing=self.doing,
        )  # fmt: skip
        return worker, ()


@dataclass(frozen=True, slots=True)
class Spoke:
    words: Failure

    def apply(self, worker: WorkerLife) -> Outcome:
        return (replace(worker, words=self.words) if worker.alive else worker), ()


@dataclass(frozen=True, slots=True)
class StopAsked:
    reason: str
    grace_s: float
    at: float

    def apply(self, worker: WorkerLife) -> Outcome:
        worker, kill_at = replace(worker, next=None), self.at + self.grace_s
        match worker.stage:
            case Stage.RUNNING:
                worker = replace(worker, asked=True)
                if self.grace_s <= 0:
                    return _kill(worker)
                worker = replace(worker, stage=Stage.STOPPING, kill_at=kill_at)
                return worker, (OrderStop(self.reason, self.grace_s) if worker.joined else Terminate(),)
            case Stage.STOPPING:
                return replace(worker, kill_at=min(worker.kill_at, kill_at)), ()
            case Stage.SPAWNING | Stage.DUMPING:
                return replace(worker, asked=True), ()
            case _:
                return worker, ()


@dataclass(frozen=True, slots=True)
class Promoted:
    """Its process is another worker's from now on."""

    def apply(self, worker: WorkerLife) -> Outcome:
        return (WorkerLife(id=worker.id, start=worker.start), ()) if worker.stage is Stage.RUNNING else (worker, ())


@dataclass(frozen=True, slots=True)
class Condemned:
    """It does not do what it must, though it may look alive."""

    why: str

    def apply(self, worker: WorkerLife) -> Outcome:
        return _kill(replace(worker, hung=self.why)) if worker.stage in _AT_WORK else (worker, ())


@dataclass(frozen=True, slots=True)
class StacksTaken:
    stacks: str

    def apply(self, worker: WorkerLife) -> Outcome:
        if worker.stage is not Stage.DUMPING:
            return worker, ()
        said = SayHung(worker.attempt, worker.phase, worker.kill_at - worker.marked_at, self.stacks)
        worker, killed = _kill(worker)
        return worker, (said, *killed)


@dataclass(frozen=True, slots=True)
class Exited:
    exit_code: int

    def apply(self, worker: WorkerLife) -> Outcome:
        if worker.exit_code is not None or worker.stage in (Stage.ABSENT, Stage.SPAWNING):
            return worker, ()
        was_killed = worker.stage is Stage.KILLING
        worker = replace(worker, exit_code=self.exit_code, stage=Stage.CLEARING)
        return _cleared(worker) if was_killed else (worker, (KillTree(),))  # what it started ends with it


@dataclass(frozen=True, slots=True)
class TreeGone:
    survivors: tuple[str, ...] = ()

    def apply(self, worker: WorkerLife) -> Outcome:
        if worker.stage not in (Stage.KILLING, Stage.CLEARING):
            return worker, ()
        return _cleared(replace(worker, survivors=self.survivors))


@dataclass(frozen=True, slots=True)
class Ticked:
    at: float

    def apply(self, worker: WorkerLife) -> Outcome:
        if worker.stage is Stage.STOPPING and self.at >= worker.kill_at:
            return _kill(worker)
        if is_late(worker, self.at):
            hung = f"no progress mark for {self.at - worker.marked_at:.1f} s in phase {worker.phase!r}"
            hung += f" ({worker.doing})" if worker.doing else ""
            hung += f", whose deadline is {worker.deadline_s:g} s"
            return replace(worker, stage=Stage.DUMPING, hung=hung, kill_at=self.at), (TakeStacks(),)
        return worker, ()


# --- rules ------------------------------------------------------------------------------------------------------------
def refusal(worker: WorkerLife, start: Start) -> str:
    """Why this start may not be; empty: it may. The attempt that runs (or will run) may be asked for again."""
    newest = worker.next or worker.start
    if newest is None or start.attempt > newest.attempt:
        return ""
    if start.attempt == newest.attempt and (worker.next or worker.stage in (Stage.SPAWNING, Stage.RUNNING)):
        return ""
    return (
        f"worker {worker.id} cannot start: got attempt {start.attempt}, wanted more than {newest.attempt}, "
        f"which {'is ' + worker.stage if worker.alive else 'has been here'}; take the next number"
    )


def may_become(spare: WorkerLife, start: Start) -> bool:
    """One that still imports may: it is ahead of a process that would begin now."""
    made = spare.start
    if made is None or spare.stage is not Stage.RUNNING or not spare.joined:
        return False
    return made.spare and (made.role, made.kind) == (start.role, start.kind)


def is_late(worker: WorkerLife, at: float) -> bool:
    """Its phase's deadline has passed without a sign of it."""
    return worker.stage is Stage.RUNNING and 0 < worker.deadline_s < at - worker.marked_at


def is_silent(worker: WorkerLife, at: float) -> bool:
    """Marks that come each second have not: its file may tell of a phase whose word has not left."""
    return worker.stage is Stage.RUNNING and at - worker.marked_at > SILENT_S


def is_news(worker: WorkerLife, at: float) -> bool:
    """A mark of then, which came another way: not one that is known."""
    return at > worker.marked_at


def _kill(worker: WorkerLife) -> Outcome:
    return replace(worker, stage=Stage.KILLING), (KillTree(),)


def _cleared(worker: WorkerLife) -> Outcome:
    if worker.exit_code is None or worker.survivors is None:
        return worker, ()
    said = SayExited(worker.attempt, worker.exit_code, worker.asked, worker.hung, worker.words, worker.survivors)
    return _gone(worker, said)


def _gone(worker: WorkerLife, said: SayExited) -> Outcome:
    if worker.next is not None:
        return WorkerLife(id=worker.id, stage=Stage.SPAWNING, start=worker.next), (said, Spawn(worker.next))
    return WorkerLife(id=worker.id, start=worker.start), (said,)
