"""Runs the worker processes of a pod: starts, watches, stops, ends and reaps them, and says what became of them.

For: `main.py`, which wires it to the driver (`attach.py`) and to the workers (`slots.py`). Not for: deciding anything
about restarts (the driver's) or the rules of one life (`lifecycle.py`).

| what | consumes | waits for | unblocked by |
|---|---|---|---|
| `reap` | dead children, ours and adopted | nothing | SIGCHLD |
| `_readable` | pipes of workers | nothing | the event loop |
| `watch` | time | `watch_interval_s` | itself |
| `_end_tree` (task per dying worker) | /proc | processes to vanish | `reap`, at most `reap_timeout_s` |
| `_take_stacks` (task per hung worker) | stderr after SIGUSR1 | silence on it | at most `stacks_timeout_s` |
| `start`, `stop` (tasks of instructions) | answers | spawned; gone | `_feed`, at most grace + reap time |
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from rlinf_api import names
from rlinf_api.errors import DeadlineExceeded, InvariantBroken, RetryableError, Stale, UserError
from rlinf_api.report import Failure
from rlinf_worker import last_words
from rlinf_worker.agent import leash, lifecycle, proctree
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.lifecycle import SayExited, SayHung, Start, Worker
from rlinf_worker.agent.worker_log import BoundedFile, Prefixed, WorkerLog
from rlinf_worker.settings import Settings

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 64 << 10
_HISTORY: Final = 200  # events kept for a crash
_QUIET_S: Final = 0.05  # of stderr, after which a stack dump is complete

COMMAND: Final = (sys.executable, "-m", "rlinf_worker", "worker")


class Listener(Protocol):
    """Told by the supervisor, in its event loop; must not block."""

    def order_stop(self, worker: str, *, reason: str, grace_s: float) -> None: ...

    def started(self, worker: str, attempt: int) -> None: ...

    def hung(self, worker: str, said: SayHung) -> None: ...

    def exited(self, worker: str, said: SayExited, failure: Failure) -> None: ...


@dataclass(slots=True)
class _Process:
    """One life of a worker, as the operating system has it."""

    pid: int
    started: int
    mark: bytes
    folder: Path
    log: WorkerLog
    pipes: dict[int, Callable[[bytes], None]]
    oom_kills: int  # of the whole pod, when it started


@dataclass(slots=True)
class _Entry:
    worker: Worker
    process: _Process | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    last: SayExited | None = None


class Supervisor:
    """All calls from one event loop, of the main thread: a parent-death signal is tied to the thread that forked."""

    def __init__(
        self,
        identity: PodIdentity,
        settings: Settings,
        *,
        listener: Listener,
        environ: Mapping[str, str],
        mark: str,
        command: Sequence[str] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity, self._settings, self._listener = identity, settings, listener
        self._environ, self._mark, self._command, self._clock = dict(environ), mark, tuple(command), clock
        self._entries: dict[str, _Entry] = {}
        self._by_pid: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._history: deque[str] = deque(maxlen=_HISTORY)
        self.orphans_reaped = 0
        self.closed = ""  # why nothing may start any more
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # a bug of ours; ends the agent

    # --- what the driver's instructions call ------------------------------------------------------------------------
    async def start(self, start: Start) -> None:
        """Returns when the process runs; raises where it may not or cannot."""
        self._check(start)
        entry = self._entries.setdefault(start.worker, _Entry(Worker(id=start.worker)))
        if refused := lifecycle.refusal(entry.worker, start):
            raise Stale(refused)
        self._feed(start.worker, lifecycle.StartAsked(start))
        limit = self._settings.reap_timeout_s + 1.0  # an earlier attempt may have to go first
        await self._until(entry, lambda: entry.worker.next is None, f"end of the attempt before {start.attempt}", limit)
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
        await self._until(entry, lambda: not entry.worker.alive, f"end of worker {worker}", limit)

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

    def held(self) -> list[Worker]:
        return [entry.worker for entry in self._entries.values() if entry.worker.alive]

    def last_attempt(self, worker: str) -> int:
        """Of a worker that has no process; 0: never had one, or has one now."""
        entry = self._entries.get(worker)
        return entry.worker.attempt if entry and not entry.worker.alive else 0

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
        self._feed(worker, lifecycle.Joined(self._clock()))

    def mark(self, worker: str, *, attempt: int, phase: str, deadline_s: float) -> None:
        if self._is_present(worker, attempt):
            self._feed(worker, lifecycle.Marked(phase, deadline_s, self._clock()))

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
        before = self._clock()
        while True:
            await asyncio.sleep(self._settings.watch_interval_s)
            late = self._clock() - before - self._settings.watch_interval_s
            before = self._clock()
            if late > self._settings.oversleep_s:
                logger.warning("the agent did not run for a while", extra={"seconds": round(late, 2)})
                for worker in self.held():
                    self._feed(worker.id, lifecycle.Overslept(late))
            self.reap()
            for worker in self.held():
                self._feed(worker.id, lifecycle.Ticked(before))

    # --- the machine ------------------------------------------------------------------------------------------------
    def _feed(self, worker: str, event: lifecycle.Event) -> None:
        """One event and everything that follows from it at once. Not re-entrant by design: `_run` only queues."""
        entry = self._entries[worker]
        events = deque([event])
        while events:
            event = events.popleft()
            stage = entry.worker.stage
            entry.worker, instructions = lifecycle.step(entry.worker, event)
            if entry.worker.stage is not stage:
                name = type(event).__name__
                self._history.append(f"{self._clock():.3f} {worker} {name}: {stage} -> {entry.worker.stage}")
                fields = {"worker": worker, "event": name, "stage": entry.worker.stage.value}
                logger.debug("worker's stage", extra=fields)
            for instruction in instructions:
                if follow := self._run(entry, instruction):
                    events.append(follow)
        entry.changed.set()

    def history(self) -> list[str]:
        """The last events, for a crash dump."""
        return list(self._history)

    def _run(self, entry: _Entry, instruction: lifecycle.Instruction) -> lifecycle.Event | None:
        worker = entry.worker.id
        match instruction:
            case lifecycle.Spawn(start):
                return self._spawn(entry, start)
            case lifecycle.OrderStop(reason, grace_s):
                self._listener.order_stop(worker, reason=reason, grace_s=grace_s)
            case lifecycle.Terminate():
                if leader := self._leader(entry):
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
            logger.critical("a watching task failed", extra={"history": self.history()[-20:]})
            if not self.failed.done():
                self.failed.set_exception(error)

    # --- processes --------------------------------------------------------------------------------------------------
    def _check(self, start: Start) -> None:
        if self.closed:
            raise RetryableError(f"worker {start.worker} cannot start here", got=f"this pod ends: {self.closed}")
        if bad := [slot for slot in start.slots if not 0 <= slot < self._identity.slots]:
            raise UserError(
                f"worker {start.worker} is to use slots that pod {self._identity.pod} does not have",
                got=", ".join(map(str, bad)), wanted=f"0 to {self._identity.slots - 1}",
            )  # fmt: skip

    def _spawn(self, entry: _Entry, start: Start) -> lifecycle.Event:
        folder = Path(self._identity.run_dir) / f"{start.worker.replace('/', '-')}-a{start.attempt}"
        pipes: list[int] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            config = folder / "config.json"
            config.write_text(start.config_json, encoding="utf-8")
            pipes += os.pipe2(os.O_CLOEXEC)
            pipes += os.pipe2(os.O_CLOEXEC)
            out, out_write, err, err_write = pipes
            pid = os.posix_spawnp(
                self._command[0],
                self._command,
                self._worker_environ(start, config=config, folder=folder),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, out_write, 1),
                    (os.POSIX_SPAWN_DUP2, err_write, 2),
                ],
                setsid=True,  # its own group and session: what it starts is found by it
                setsigmask=[],
                setsigdef=[signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1],
            )
        except OSError as error:
            for fd in pipes:
                os.close(fd)
            return lifecycle.SpawnFailed(
                f"worker {start.worker} cannot be started in pod {self._identity.pod}: {error}; "
                "see its disk, memory and process limits"
            )
        os.close(out_write)
        os.close(err_write)
        self._by_pid[pid] = start.worker
        found = proctree.read(pid)  # cannot be reaped before we do it: at worst a zombie
        log = self._open_log(start)
        mark = f"{names.ENV_WORKER_ID}={start.worker}".encode()
        entry.process = _Process(
            pid=pid,
            started=found.started if found else 0,
            mark=mark,
            folder=folder,
            log=log,
            pipes={out: log.out, err: log.err},
            oom_kills=proctree.oom_kills(),
        )
        for fd in (out, err):
            os.set_blocking(fd, False)
            asyncio.get_running_loop().add_reader(fd, self._readable, entry.process, fd)
        logger.info("worker started", extra={"worker": start.worker, "worker_attempt": start.attempt, "pid": pid})
        self._listener.started(start.worker, start.attempt)
        return lifecycle.Spawned(pid, self._clock(), self._settings.start_deadline_s)

    def _worker_environ(self, start: Start, *, config: Path, folder: Path) -> dict[str, str]:
        """The agent's own environment, and what rlinf_api.names.ENVIRONMENT says an agent adds."""
        return {
            **self._environ,
            names.ENV_WORKER_ID: start.worker,
            names.ENV_WORKER_ROLE: start.role,
            names.ENV_WORKER_KIND: start.kind,
            names.ENV_WORKER_RANK: str(start.rank),
            names.ENV_WORKER_WORLD: str(start.world),
            names.ENV_WORKER_ATTEMPT: str(start.attempt),
            names.ENV_WORKER_SLOTS: ",".join(map(str, start.slots)),
            names.ENV_WORKER_CONFIG: str(config),
            names.ENV_SLOTS_SOCKET: self._identity.socket_path,
            names.ENV_TERMINATION_LOG: str(folder / "last_words.json"),
            names.ENV_AGENT_PID: str(os.getpid()),
            names.ENV_AGENT_MARK: self._mark,
        }

    def _open_log(self, start: Start) -> WorkerLog:
        keep = self._settings.last_words_bytes
        if not self._identity.worker_log_dir:
            return WorkerLog(Prefixed(start.worker), keep=keep)
        name = f"{start.worker.replace('/', '-')}.log"
        path = Path(self._identity.worker_log_dir) / name
        return WorkerLog(BoundedFile(path, limit=self._settings.worker_log_bytes), keep=keep)

    def _readable(self, process: _Process, fd: int) -> None:
        """One read per wake-up, so that a worker that shouts cannot starve the others."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            process.pipes[fd](data)
        else:
            asyncio.get_running_loop().remove_reader(fd)
            del process.pipes[fd]
            os.close(fd)

    def _drain(self, process: _Process) -> None:
        """What a dead worker left in its pipes; bounded by what a pipe holds."""
        for fd, take in list(process.pipes.items()):
            asyncio.get_running_loop().remove_reader(fd)
            for _ in range(32):
                try:
                    data = os.read(fd, _READ_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    break
                take(data)
            os.close(fd)
        process.pipes.clear()

    def _leader(self, entry: _Entry) -> proctree.Process | None:
        if entry.process is None:
            raise InvariantBroken(f"worker {entry.worker.id} has no process", got=f"stage {entry.worker.stage}")
        found = proctree.read(entry.process.pid)
        return found if found and found.started == entry.process.started and not found.dead else None

    async def _end_tree(self, entry: _Entry) -> None:
        """SIGKILL to all of it until none is left; a process that was being born is met in the next round."""
        process = entry.process
        assert process is not None
        deadline, pause = self._clock() + self._settings.reap_timeout_s, 0.002
        while True:
            left = proctree.tree(process.pid, started=process.started, mark=process.mark, reaper=os.getpid())
            if not left or self._clock() >= deadline:
                break
            for member in left:
                proctree.send(member, signal.SIGKILL)
            await asyncio.sleep(pause)
            pause = min(0.05, pause * 2)
        survivors = tuple(f"{member.name} (pid {member.pid}) is {member.doing()}" for member in left)
        if survivors:
            logger.error("processes do not die", extra={"worker": entry.worker.id, "processes": survivors})
        self._feed(entry.worker.id, lifecycle.TreeGone(survivors))

    async def _take_stacks(self, entry: _Entry) -> None:
        """faulthandler in the worker answers SIGUSR1 even inside a long C call; a stopped process answers nothing."""
        leader = self._leader(entry)
        process = entry.process
        assert process is not None
        if leader is None:
            text = "the process is gone"
        elif leader.stopped:
            text = f"process {leader.pid} is {leader.doing()}; it cannot say where it is"
        else:
            tap = process.log.tap()
            proctree.send(leader, leash.STACKS_SIGNAL)
            deadline, size = self._clock() + self._settings.stacks_timeout_s, -1
            while self._clock() < deadline and (not tap or len(tap) != size):
                size = len(tap)
                await asyncio.sleep(_QUIET_S)
            process.log.untap()
            text = tap.decode(errors="replace") or (
                f"no answer to {leash.STACKS_SIGNAL.name} within {self._settings.stacks_timeout_s:g} s; "
                f"process {leader.pid} is {leader.doing()}"
            )
        self._feed(entry.worker.id, lifecycle.StacksTaken(text[: self._settings.stacks_bytes]))

    # --- the end of a life ------------------------------------------------------------------------------------------
    def _say_exited(self, entry: _Entry, said: SayExited) -> None:
        entry.last = said
        process, entry.process = entry.process, None
        left: Failure | None = None
        tail, out_of_memory = "", False
        if process is not None:
            self._drain(process)
            process.log.close()
            tail = process.log.tail()
            left = self._left_behind(process.folder)
            out_of_memory = said.exit_code == 128 + signal.SIGKILL and proctree.oom_kills() > process.oom_kills
            shutil.rmtree(process.folder, ignore_errors=True)
        failure = self._failure(entry.worker.id, said, left=left, tail=tail)
        if out_of_memory and failure.reason == "Killed" and not said.asked:
            what = "by the kernel, most likely: the pod reached its memory limit; raise it, or make the role smaller"
            failure = replace(failure, reason="OOMKilled", message=f"{failure.message}; {what}")
        fields = {"worker": entry.worker.id, "worker_attempt": said.attempt, "exit_code": failure.exit_code}
        level = logging.INFO if said.asked else logging.WARNING
        logger.log(level, "worker exited", extra={**fields, "asked": said.asked, "reason": failure.reason})
        self._listener.exited(entry.worker.id, said, failure)

    @staticmethod
    def _left_behind(folder: Path) -> Failure | None:
        try:
            return last_words.decode((folder / "last_words.json").read_bytes())
        except OSError:
            return None

    def _failure(self, worker: str, said: SayExited, *, left: Failure | None, tail: str) -> Failure:
        """The best account there is: that it hung, its own words, the words in its file, the end of its stderr."""
        role, number = names.split_worker_id(worker)
        words = said.words or left
        exit_code = said.exit_code
        if said.failed_to_start:
            reason, message, exit_code = "SpawnFailed", said.failed_to_start, names.EXIT_RETRYABLE
        elif said.hung:
            reason, message = "Hung", f"worker {worker} hung and was killed: {said.hung}"
        elif words is not None:
            reason, message = words.reason, words.message
        elif said.exit_code == 0:
            reason, message = "Finished", ""
        else:
            reason, how = _how_it_ended(said.exit_code)
            message = f"worker {worker} {how}" + (f"; its last lines: {tail}" if tail and not said.asked else "")
        if said.survivors:
            message += f"; still there: {', '.join(said.survivors)}"
        return Failure(
            role=role,
            worker=number,
            pod=self._identity.pod,
            node=self._identity.node,
            exit_code=exit_code,
            reason=reason,
            message=last_words.shorten(message, self._settings.last_words_bytes),
        )

    async def _until(self, entry: _Entry, holds: Callable[[], bool], what: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    entry.changed.clear()
                    await entry.changed.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(what, timeout_s=timeout_s, missing=f"stage is {entry.worker.stage}") from error


def _how_it_ended(exit_code: int) -> tuple[str, str]:
    """
    >>> _how_it_ended(137)
    ('Killed', 'was killed by signal 9 (SIGKILL)')
    """
    number = exit_code - 128
    if 0 < number < signal.NSIG:
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "no name"
        return "Killed", f"was killed by signal {number} ({name})"
    return "ExitCode", f"exited with code {exit_code}"
