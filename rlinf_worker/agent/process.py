"""One life of a worker as the operating system has it: the process, its pipes, its folder.

For: supervisor.py, which decides when a process begins (spawning.py) and ends, and is given the best account there is
of its end.

| what | consumes | waits for | unblocked by |
|---|---|---|---|
| `_readable` | pipes of the worker | nothing | the event loop |
| `kill` | /proc | processes to vanish | whoever reaps; its deadline |
| `stacks` | stderr after SIGUSR1 | silence on it | its deadline |
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlinf_api import names
from rlinf_api.report import Failure
from rlinf_worker import last_words, proctree
from rlinf_worker.agent import leash
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.lifecycle import SayExited
from rlinf_worker.agent.worker_log import WorkerLog

_READ_BYTES: Final = 64 << 10
_QUIET_S: Final = 0.05  # silence of stderr after which a stack dump is complete


@dataclass(slots=True)
class Process:
    pid: int
    started: int
    mark: bytes
    folder: Path
    log: WorkerLog
    pipes: dict[int, Callable[[bytes], None]]
    oom_kills: int  # the whole pod's, when it started

    def leader(self) -> proctree.ProcessEntry | None:
        found = proctree.read(self.pid)
        return found if found and found.started == self.started and not found.dead else None

    def tree(self) -> list[proctree.ProcessEntry]:
        return proctree.tree(self.pid, started=self.started, mark=self.mark, reaper=os.getpid())

    async def kill(self, *, timeout_s: float, clock: Callable[[], float]) -> list[proctree.ProcessEntry]:
        """SIGKILL to all of it until none is left; a process that was being born is met in the next round. Those that
        are there after `timeout_s`."""
        deadline, pause = clock() + timeout_s, 0.002
        while (left := self.tree()) and clock() < deadline:
            for member in left:
                proctree.send(member, signal.SIGKILL)
            await asyncio.sleep(pause)
            pause = min(0.05, pause * 2)
        return left

    async def stacks(self, *, timeout_s: float, clock: Callable[[], float]) -> str:
        """faulthandler in the worker answers SIGUSR1 even inside a long C call; a stopped process answers nothing."""
        leader = self.leader()
        if leader is None:
            return "the process is gone"
        if leader.stopped:
            return f"process {leader.pid} is {leader.doing()}; it cannot say where it is"
        tap = self.log.tap()
        proctree.send(leader, leash.STACKS_SIGNAL)
        deadline, size = clock() + timeout_s, -1
        while clock() < deadline and (not tap or len(tap) != size):
            size = len(tap)
            await asyncio.sleep(_QUIET_S)
        self.log.untap()
        nothing = f"no answer to {leash.STACKS_SIGNAL.name} within {timeout_s:g} s; "
        return tap.decode(errors="replace") or nothing + f"process {leader.pid} is {leader.doing()}"

    def listen(self) -> None:
        for fd in self.pipes:
            os.set_blocking(fd, False)
            asyncio.get_running_loop().add_reader(fd, self._readable, fd)

    def become(self, worker: str, log: WorkerLog) -> None:
        """The process of another worker from now on: what it starts is found by that one's mark."""
        self.pipes = {fd: log.out if take == self.log.out else log.err for fd, take in self.pipes.items()}
        self.log.close()
        self.log, self.mark = log, mark_of(worker)

    def _readable(self, fd: int) -> None:
        """One read per wake-up, so that a worker that shouts cannot starve the others."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self.pipes[fd](data)
        else:
            asyncio.get_running_loop().remove_reader(fd)
            del self.pipes[fd]
            os.close(fd)

    def _drain(self) -> None:
        """What a dead worker left in its pipes; bounded by what a pipe holds."""
        for fd, take in list(self.pipes.items()):
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
        self.pipes.clear()

    def close(self) -> tuple[str, Failure | None]:
        """The end of its stderr and the words that it left in its file; nothing of it stays."""
        self._drain()
        self.log.close()
        try:
            left = last_words.decode((self.folder / "last_words.json").read_bytes())
        except OSError:
            left = None
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.log.tail(), left


def mark_of(worker: str) -> bytes:
    return f"{names.ENV_WORKER_ID}={worker}".encode()


def account(worker: str, said: SayExited, ended: Process | None, *, identity: PodIdentity, limit_bytes: int) -> Failure:
    """That it hung, its own words, the words in its file, the end of its stderr. Closes what ended."""
    role, number = names.split_worker_id(worker)
    tail, left = ended.close() if ended is not None else ("", None)
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
        reason, how = how_it_ended(said.exit_code)
        message = f"worker {worker} {how}" + (f"; its last lines: {tail}" if tail and not said.asked else "")
    if said.survivors:
        message += f"; still there: {', '.join(said.survivors)}"
    message = last_words.shorten(message, limit_bytes)
    if reason == "Killed" and not said.asked and _is_out_of_memory(said, ended):
        reason = "OOMKilled"
        message += "; by the kernel, most likely: the pod reached its memory limit; raise it, or make the role smaller"
    return Failure(
        role=role,
        worker=number,
        pod=identity.pod,
        node=identity.node,
        exit_code=exit_code,
        reason=reason,
        message=message,
    )


def _is_out_of_memory(said: SayExited, ended: Process | None) -> bool:
    is_killed = said.exit_code == 128 + signal.SIGKILL
    return is_killed and ended is not None and proctree.oom_kills() > ended.oom_kills


def how_it_ended(exit_code: int) -> tuple[str, str]:
    """
    >>> how_it_ended(137)
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
