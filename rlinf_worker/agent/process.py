"""One life of a worker as the operating system has it: the process, its pipes, its folder.

For: supervisor.py, which decides when a process begins (spawning.py) and ends. Not for: what its end means (exits.py).

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
from rlinf_worker import last_words
from rlinf_worker.agent import leash, proctree
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
