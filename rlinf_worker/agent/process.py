"""One life of a worker as the operating system has it: the process, its pipes, its folder.

For: supervisor.py, which decides when a process begins and ends. Not for: what its end means (lifecycle.py).

| what | consumes | waits for | unblocked by |
|---|---|---|---|
| `_readable` | pipes of the worker | nothing | the event loop |
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlinf_api import names
from rlinf_api.report import Failure
from rlinf_worker import last_words
from rlinf_worker.agent import bytecode, proctree
from rlinf_worker.agent.lifecycle import Start
from rlinf_worker.agent.worker_log import WorkerLog
from rlinf_worker.weights import copying

_READ_BYTES: Final = 64 << 10

FLOW_FILE: Final = "flow.json"

DEFAULTS: Final = {
    # torch asks the DNS for the name of every peer of a gang, to log it, and waits: with the C library's own 5 s one
    # lost answer made a gang of two start 5 s late (1 in 25 on a machine here).
    "RES_OPTIONS": "timeout:1 attempts:3",
    "GLIBC_TUNABLES": copying.TUNABLES,
}
"""What a worker has where its pod says nothing of it."""


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

    def listen(self) -> None:
        for fd in self.pipes:
            os.set_blocking(fd, False)
            asyncio.get_running_loop().add_reader(fd, self._readable, fd)

    def become(self, worker: str, log: WorkerLog) -> None:
        """The process of another worker from now on: what it starts is found by that one's mark."""
        self.pipes = {fd: log.out if take == self.log.out else log.err for fd, take in self.pipes.items()}
        self.log.close()
        self.log, self.mark = log, _mark(worker)

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


def _mark(worker: str) -> bytes:
    return f"{names.ENV_WORKER_ID}={worker}".encode()


def write_config(folder: Path, start: Start) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = folder / "config.json"
    config.write_text(start.config_json, encoding="utf-8")
    if start.spare:
        (folder / FLOW_FILE).write_text(start.flow_json, encoding="utf-8")
    return config


def environ_of(
    start: Start, agents: Mapping[str, str], *, config: Path, folder: Path, socket: str, mark: str
) -> dict[str, str]:
    """The agent's own environment, and what rlinf_api.names.ENVIRONMENT says an agent adds."""
    return {
        **DEFAULTS,
        **agents,
        **bytecode.environment(agents),
        names.ENV_WORKER_ID: start.worker,
        names.ENV_WORKER_ROLE: start.role,
        names.ENV_WORKER_KIND: start.kind,
        names.ENV_WORKER_RANK: str(start.rank),
        names.ENV_WORKER_WORLD: str(start.world),
        names.ENV_WORKER_ATTEMPT: str(start.attempt),
        names.ENV_WORKER_SLOTS: ",".join(map(str, start.slots)),
        names.ENV_WORKER_CONFIG: str(config),
        names.ENV_WORKER_SPARE: str(folder / FLOW_FILE) if start.spare else "",
        names.ENV_SLOTS_SOCKET: socket,
        names.ENV_TERMINATION_LOG: str(folder / "last_words.json"),
        names.ENV_AGENT_PID: str(os.getpid()),
        names.ENV_AGENT_MARK: mark,
    }


def spawn(
    start: Start,
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    folder: Path,
    open_log: Callable[[], WorkerLog],
) -> Process:
    """Its pipes are read from now on. Raises OSError, leaving nothing open."""
    pipes: list[int] = []
    try:
        pipes += os.pipe2(os.O_CLOEXEC)
        pipes += os.pipe2(os.O_CLOEXEC)
        out, out_write, err, err_write = pipes
        pid = os.posix_spawnp(
            command[0],
            tuple(command),
            environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, out_write, 1),
                (os.POSIX_SPAWN_DUP2, err_write, 2),
            ],
            setsid=True,  # its own group and session: what it starts is found by it
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1],
        )
    except OSError:
        for fd in pipes:
            os.close(fd)
        raise
    os.close(out_write)
    os.close(err_write)
    found = proctree.read(pid)  # cannot be reaped before the loop does it: at worst a zombie
    log = open_log()
    # The next spare has the name of this one, whose process may be a worker by then: the folder is of this life alone.
    own = f"{names.ENV_WORKER_CONFIG}={environ[names.ENV_WORKER_CONFIG]}".encode()
    process = Process(
        pid=pid,
        started=found.started if found else 0,
        mark=own if start.spare else _mark(start.worker),
        folder=folder,
        log=log,
        pipes={out: log.out, err: log.err},
        oom_kills=proctree.oom_kills(),
    )
    process.listen()
    return process


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
