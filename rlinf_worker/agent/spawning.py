"""How a worker's process begins: its folder, its environment, its log, in a session of its own.

For: supervisor.py, which decides when.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_worker.agent import bytecode, proctree
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.lifecycle import Start
from rlinf_worker.agent.process import Process, mark_of
from rlinf_worker.agent.worker_log import BoundedFile, Prefixed, WorkerLog
from rlinf_worker.settings import Settings
from rlinf_worker.weights import copying

FLOW_FILE: Final = "flow.json"

DEFAULTS: Final = {
    # torch asks the DNS for the name of every peer of a gang, to log it, and waits: with the C library's own 5 s one
    # lost answer made a gang of two start 5 s late (1 in 25 on a machine here).
    "RES_OPTIONS": "timeout:1 attempts:3",
    "GLIBC_TUNABLES": copying.TUNABLES,
}
"""What a worker has where its pod says nothing of it."""


@dataclass(frozen=True, slots=True)
class Spawner:
    """`mark`: this agent's, in the environment of all that it starts."""

    identity: PodIdentity
    settings: Settings
    environ: Mapping[str, str]
    mark: str
    command: Sequence[str]

    def check(self, start: Start) -> None:
        """Raises UserError where this pod has no such place."""
        if bad := [slot for slot in start.slots if not 0 <= slot < self.identity.slots]:
            raise UserError(
                f"worker {start.worker} is to use slots that pod {self.identity.pod} does not have",
                got=", ".join(map(str, bad)), wanted=f"0 to {self.identity.slots - 1}",
            )  # fmt: skip

    def spawn(self, start: Start) -> Process:
        """Its pipes are read from now on. Raises OSError, leaving nothing open."""
        folder = Path(self.identity.run_dir) / f"{start.worker.replace('/', '-')}-a{start.attempt}"
        config, socket = write_config(folder, start), self.identity.socket_path
        environ = environ_of(start, self.environ, config=config, folder=folder, socket=socket, mark=self.mark)
        pid, out, err = _begin(self.command, environ)
        found = proctree.read(pid)  # cannot be reaped before the loop does it: at worst a zombie
        log = self.open_log(start)
        # The next spare has the name of this one, whose process may be a worker by then: the folder is of this life.
        own = f"{names.ENV_WORKER_CONFIG}={config}".encode()
        process = Process(
            pid=pid,
            started=found.started if found else 0,
            mark=own if start.spare else mark_of(start.worker),
            folder=folder,
            log=log,
            pipes={out: log.out, err: log.err},
            oom_kills=proctree.oom_kills(),
        )
        process.listen()
        return process

    def open_log(self, start: Start) -> WorkerLog:
        keep = self.settings.last_words_bytes
        if not self.identity.worker_log_dir:
            return WorkerLog(Prefixed(start.worker), keep=keep)
        path = Path(self.identity.worker_log_dir) / f"{start.worker.replace('/', '-')}.log"
        return WorkerLog(BoundedFile(path, limit=self.settings.worker_log_bytes), keep=keep)


def _begin(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Its pid, and the ends of its stdout and stderr to read from."""
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
    return pid, out, err


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
