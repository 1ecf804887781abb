"""Runs the worker processes of a pod: starts, watches, stops, ends and reaps them, and says what became of them.

For: `main.py`, which wires it to the driver (`attach.py`) and to the workers (`slots.py`). Not for: deciding anything
about restarts (the driver's) or the rules of one life (`lifecycle.py`).

| what | consumes | waits for | unblocked by |
|---|---|---|---|
| `reap` | dead children, ours and adopted | nothing | SIGCHLD |
| `watch` | time | `watch_interval_s` | itself |
| `_end_tree`, `_take_stacks` (tasks per dying, per hung worker) | see process.py | | |
| `start`, `stop` (tasks of instructions) | answers | spawned; gone | `_feed`, at most grace + reap time |
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_api.errors import DeadlineExceeded, InvariantBroken, RetryableError, Stale
from rlinf_api.report import Failure
from rlinf_worker import phases, proctree
from rlinf_worker.agent import lifecycle
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.lifecycle import SayExited, SayHung, Start, WorkerLife
from rlinf_worker.agent.process import Process, account
from rlinf_worker.agent.spawning import Spawner
from rlinf_worker.clock import Clock
from rlinf_worker.settings import Settings

logger = logging.getLogger(__name__)

_HISTORY: Final = 200  # events kept for a crash

COMMAND: Final = (sys.executable, "-m", "rlinf_worker", "worker")


Order = Callable[[str, slots_pb2.AgentOrder], bool]
"""Over Slots, to a worker; False: it is not connected or does not listen."""


class SupervisorListener(Protocol):
    """Told by the supervisor, in its event loop; must not block."""

    def started(self, worker: str, attempt: int) -> None: ...

    def hung(self, worker: str, said: SayHung) -> None: ...

    def exited(self, worker: str, said: SayExited, failure: Failure) -> None: ...


@dataclass(slots=True)
class _WorkerEntry:
    worker: WorkerLife
    process: Process | None = None
    remains: list[proctree.ProcessEntry] = field(default_factory=list)  # what SIGKILL has not ended of an earlier life
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    last: SayExited | None = None

    @property
    def running(self) -> Process:
        if self.process is None:
            raise InvariantBroken(f"worker {self.worker.id} has no process", got=f"stage {self.worker.stage}")
        return self.process

    def declared(self, clock: Clock) -> lifecycle.Marked | None:
        """What its file says: a loop that blocked soon after a phase was declared has sent no message of it."""
        found = phases.read(self.process.folder) if self.process is not None else None
        if found is None or not lifecycle.is_news(self.worker, at := clock.at(found.at)):
            return None
        return lifecycle.Marked(found.phase, found.deadline_s, at, moved_at=at)

    async def until(self, holds: Callable[[], bool], what: str, *, timeout_s: float, clock: Clock) -> None:
        deadline = clock() + timeout_s
        look = clock.call_later(timeout_s, self.changed.set)
        try:
            while not holds():
                if clock() >= deadline:
                    raise DeadlineExceeded(what, timeout_s=timeout_s, missing=f"stage is {self.worker.stage}")
                self.changed.clear()
                await self.changed.wait()
        finally:
            look.cancel()


class Supervisor:
    """All calls from one event loop, of the main thread: a parent-death signal is tied to the thread that forked."""

    def __init__(
        self,
        identity: PodIdentity,
        settings: Settings,
        *,
        listener: SupervisorListener,
        order: Order,
        environ: Mapping[str, str],
        mark: str,
        command: Sequence[str] = COMMAND,
        clock: Clock,
    ) -> None:
        self._identity, self._settings, self._listener, self._order = identity, settings, listener, order
        self._spawner, self._clock = Spawner(identity, settings, dict(environ), mark, tuple(command)), clock
        self._entries: dict[str, _WorkerEntry] = {}
        self._by_pid: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._history: deque[str] = deque(maxlen=_HISTORY)
        self.orphans_reaped = 0
        self.closed = ""  # why nothing may start any more
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # a bug of ours; ends the agent

    # --- what the driver's instructions call ------------------------------------------------------------------------
    async def start(self, start: Start) -> None:
        """Returns when the process runs; raises where it may not or cannot."""
        if self.closed:
            raise RetryableError(f"worker {start.worker} cannot start here", got=f"this pod ends: {self.closed}")
        self._spawner.check(start)
        entry = self._entries.setdefault(start.worker, _WorkerEntry(WorkerLife(id=start.worker)))
        if refused := lifecycle.refusal(entry.worker, start):
            raise Stale(refused)
        self._feed(start.worker, lifecycle.StartAsked(start))
        limit = self._settings.reap_timeout_s + 1.0  # an earlier attempt may have to go first
        what = f"end of the attempt before {start.attempt}"
        await entry.until(lambda: entry.worker.next is None, what, timeout_s=limit, clock=self._clock)
        if entry.worker.attempt != start.attempt:
            raise Stale(f"attempt {start.attempt} of worker {start.worker} was given up before it began")
        if entry.last and entry.last.attempt == start.attempt and entry.last.failed_to_start:
            raise RetryableError(entry.last.failed_to_start)

    async def stop(self, worker: str, *, reason: str, grace_s: float) -> None:
        """Returns when it is gone. One that is not here is gone already."""
        entry = self._entries.get(worker)
        if entry is None or not entry.worker.alive:
            return
        self._feed(worker, lifecycle.StopAsked(reason, grace_s, self._clock()))
        limit = max(grace_s, self._settings.stacks_timeout_s) + 2 * self._settings.reap_timeout_s + 1.0
        what = f"end of worker {worker}"
        await entry.until(lambda: not entry.worker.alive, what, timeout_s=limit, clock=self._clock)

    async def stop_all(self, *, reason: str, grace_s: float) -> None:
        """Nothing starts after this. Returns when nothing is left; logs what cannot be ended."""
        self.closed = reason
        results = await asyncio.gather(
            *(self.stop(worker, reason=reason, grace_s=grace_s) for worker in list(self._entries)),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, DeadlineExceeded):
                logger.error("a worker could not be ended", extra={"error": str(result)})
            elif isinstance(result, BaseException):
                raise result

    def kill_all(self) -> None:
        """Without grace, for an agent that is in a hurry: `stop_all` still says when they are gone."""
        for worker in self.held():
            self._feed(worker.id, lifecycle.StopAsked("killed", 0.0, self._clock()))

    def condemn(self, worker: str, *, why: str) -> None:
        """It does not do what it must: killed at once, and its exit says that it hung."""
        if (entry := self._entries.get(worker)) is not None and entry.worker.alive:
            self._feed(worker, lifecycle.Condemned(why))

    def remains(self, worker: str) -> list[proctree.ProcessEntry]:
        """What SIGKILL has not ended yet of its last life."""
        entry = self._entries[worker]
        entry.remains = [p for p in entry.remains if (now := proctree.read(p.pid)) and now.started == p.started]
        return entry.remains

    def held(self) -> list[WorkerLife]:
        return [entry.worker for entry in self._entries.values() if entry.worker.alive]

    def life(self, worker: str) -> WorkerLife:
        """Its present life or the last one."""
        entry = self._entries.get(worker)
        return entry.worker if entry is not None else WorkerLife(id=worker)

    # --- what workers say, over Slots -------------------------------------------------------------------------------
    def join(self, worker: str, *, attempt: int, pid: int) -> None:
        """Raises Stale for a process that is not the present attempt of this worker."""
        entry = self._entries.get(worker)
        if entry is None or not entry.worker.alive or entry.worker.attempt != attempt:
            present = f"attempt {entry.worker.attempt}" if entry and entry.worker.alive else "no such worker"
            raise Stale(f"worker {worker} may not join", got=f"attempt {attempt}", wanted=present, next="exit")
        found = proctree.read(pid)
        if found is None or found.session != entry.worker.pid:
            raise Stale(f"worker {worker} may not join", got=f"pid {pid}", wanted=f"pid {entry.worker.pid}")
        self._feed(worker, lifecycle.WorkerJoined(self._clock()))

    def mark(self, worker: str, *, attempt: int, said: slots_pb2.Progress) -> None:
        if self._is_present(worker, attempt):
            now = self._clock()
            at, moved_at = now - said.stuck_s, now - said.still_s
            self._feed(worker, lifecycle.Marked(said.phase, said.deadline_s, at, moved_at, said.doing))

    def last_words(self, worker: str, *, attempt: int, words: Failure) -> None:
        if self._is_present(worker, attempt):
            self._feed(worker, lifecycle.Spoke(words))

    def _is_present(self, worker: str, attempt: int) -> bool:
        entry = self._entries.get(worker)
        return entry is not None and entry.worker.attempt == attempt

    # --- signals and time -------------------------------------------------------------------------------------------
    def reap(self) -> None:
        """On SIGCHLD: every dead child, whoever started it. Several deaths may come as one signal."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            worker = self._by_pid.pop(pid, "")
            if worker:
                self._feed(worker, lifecycle.Exited(code if code >= 0 else 128 - code))
            else:
                self.orphans_reaped += 1

    async def watch(self) -> None:
        """For ever: marks against deadlines. Also reaps, as SIGCHLD could come before its handler was set."""
        stood_still_s = 0.0
        while True:
            await asyncio.sleep(self._settings.watch_interval_s)
            now = self._clock()
            if (late := self._clock.stood_still_s - stood_still_s) > 0:
                stood_still_s = self._clock.stood_still_s
                logger.warning("the agent did not run for a while", extra={"seconds": round(late, 2)})
            self.reap()
            for worker in self.held():
                is_doubted = lifecycle.is_late(worker, now) or lifecycle.is_silent(worker, now)
                if is_doubted and (declared := self._entries[worker.id].declared(self._clock)):
                    self._feed(worker.id, declared)
                self._feed(worker.id, lifecycle.Ticked(now))

    # --- the machine ------------------------------------------------------------------------------------------------
    def _feed(self, worker: str, event: lifecycle.LifeEvent) -> None:
        """One event and everything that follows from it at once. Not re-entrant by design: `_run` only queues."""
        entry = self._entries[worker]
        events = deque([event])
        while events:
            event = events.popleft()
            stage = entry.worker.stage
            entry.worker, instructions = event.apply(entry.worker)
            if entry.worker.stage is not stage:
                name = type(event).__name__
                self._history.append(f"{self._clock():.3f} {worker} {name}: {stage} -> {entry.worker.stage}")
                fields = {"worker": worker, "event": name, "stage": entry.worker.stage.value}
                logger.debug("worker's stage", extra=fields)
            for instruction in instructions:
                if follow := self._run(entry, instruction):
                    events.append(follow)
        entry.changed.set()

    def _run(self, entry: _WorkerEntry, instruction: lifecycle.Instruction) -> lifecycle.LifeEvent | None:
        worker = entry.worker.id
        match instruction:
            case lifecycle.Spawn(start):
                return self._spawn(entry, start)
            case lifecycle.OrderStop(reason, grace_s):
                self._order(worker, slots_pb2.AgentOrder(stop=slots_pb2.Stop(reason=reason, grace_s=grace_s)))
            case lifecycle.Terminate():
                if leader := entry.running.leader():
                    proctree.send(leader, signal.SIGTERM)
            case lifecycle.TakeStacks():
                self._spawn_task(self._take_stacks(entry))
            case lifecycle.KillTree():
                self._spawn_task(self._end_tree(entry))
            case SayHung():
                fields = {"worker": worker, "worker_attempt": instruction.attempt, "phase": instruction.phase}
                logger.warning("worker hung", extra={**fields, "silent_s": round(instruction.silent_s, 2)})
                self._listener.hung(worker, instruction)
            case SayExited():
                self._say_exited(entry, instruction)
        return None

    def _spawn_task(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            # A tree that is not being ended would hold its slots for ever: the agent ends, and all with it.
            logger.critical("a watching task failed", extra={"history": list(self._history)[-20:]})
            if not self.failed.done():
                self.failed.set_exception(error)

    # --- processes --------------------------------------------------------------------------------------------------
    def _take_over(self, start: Start) -> Process | None:
        """The warm spare's process becomes this worker's; None where there is none that can."""
        spare = self._entries.get(start.from_spare)
        if spare is None or spare.process is None or not lifecycle.may_become(spare.worker, start):
            return None
        place = slots_pb2.Promote(
            worker=start.worker,
            attempt=start.attempt,
            rank=start.rank,
            world=start.world,
            slots=start.slots,
            config_json=start.config_json,
        )
        if spare.process.leader() is None or not self._order(start.from_spare, slots_pb2.AgentOrder(promote=place)):
            return None
        taken, spare.process = spare.process, None
        taken.become(start.worker, self._spawner.open_log(start))
        self._feed(start.from_spare, lifecycle.Promoted())
        return taken

    def _spawn(self, entry: _WorkerEntry, start: Start) -> lifecycle.LifeEvent:
        taken = self._take_over(start)
        try:
            entry.process = process = taken or self._spawner.spawn(start)
        except OSError as error:
            return lifecycle.SpawnFailed(
                f"worker {start.worker} cannot be started in pod {self._identity.pod}: {error}; "
                "see its disk, memory and process limits"
            )
        self._by_pid[process.pid] = start.worker
        fields = {"worker": start.worker, "worker_attempt": start.attempt, "pid": process.pid}
        logger.info("worker started from a warm spare" if taken else "worker started", extra=fields)
        self._listener.started(start.worker, start.attempt)
        return lifecycle.Spawned(process.pid, self._clock(), self._settings.start_deadline_s)

    async def _end_tree(self, entry: _WorkerEntry) -> None:
        left = await entry.running.kill(timeout_s=self._settings.reap_timeout_s, clock=self._clock)
        survivors = tuple(f"{member.name} (pid {member.pid}) is {member.doing()}" for member in left)
        entry.remains = left
        if survivors:
            logger.error("processes do not die", extra={"worker": entry.worker.id, "processes": survivors})
        self._feed(entry.worker.id, lifecycle.TreeGone(survivors))

    async def _take_stacks(self, entry: _WorkerEntry) -> None:
        text = await entry.running.stacks(timeout_s=self._settings.stacks_timeout_s, clock=self._clock)
        self._feed(entry.worker.id, lifecycle.StacksTaken(text[: self._settings.stacks_bytes]))

    # --- the end of a life ------------------------------------------------------------------------------------------
    def _say_exited(self, entry: _WorkerEntry, said: SayExited) -> None:
        entry.last = said
        ended, entry.process = entry.process, None
        limit = self._settings.last_words_bytes
        failure = account(entry.worker.id, said, ended, identity=self._identity, limit_bytes=limit)
        fields = {"worker": entry.worker.id, "worker_attempt": said.attempt, "exit_code": failure.exit_code}
        level = logging.INFO if said.asked else logging.WARNING
        logger.log(level, "worker exited", extra={**fields, "asked": said.asked, "reason": failure.reason})
        self._listener.exited(entry.worker.id, said, failure)
