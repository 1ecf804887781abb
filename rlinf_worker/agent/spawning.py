"""How a worker's process begins: its folder, its environment, its log, in a session of its own.

For: supervisor.py, which decides when.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

import rlinf_worker
from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_worker import devices, proctree
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.lifecycle import Start
from rlinf_worker.agent.process import Process, mark_of
from rlinf_worker.agent.worker_log import Prefixed, WorkerLog
from rlinf_worker.bounded_file import BoundedFile
from rlinf_worker.settings import Settings
from rlinf_worker.weights import copying

FLOW_FILE: Final = "flow.json"
LOOKED_AT: Final = (rlinf_worker, grpc)  # our own installation, and a library of the image's
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
        config = write_config(folder, start)
        pid, out, err = _begin(self.command, self.environ_of(start, config))
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

    def environ_of(self, start: Start, config: Path) -> dict[str, str]:
        """The agent's own environment, and what rlinf_api.names.ENVIRONMENT says an agent adds."""
        return {
            **DEFAULTS,
            **self.environ,
            **bytecode_environment(self.environ),
            names.ENV_WORKER_ID: start.worker,
            names.ENV_WORKER_ROLE: start.role,
            names.ENV_WORKER_KIND: start.kind,
            names.ENV_WORKER_RANK: str(start.rank),
            names.ENV_WORKER_WORLD: str(start.world),
            names.ENV_WORKER_ATTEMPT: str(start.attempt),
            names.ENV_WORKER_SLOTS: ",".join(map(str, start.slots)),
            names.ENV_WORKER_CONFIG: str(config),
            names.ENV_WORKER_SPARE: str(config.with_name(FLOW_FILE)) if start.spare else "",
            **devices.environ_of(devices.of(self.environ), start.slots),
            names.ENV_SLOTS_SOCKET: self.identity.socket_path,
            names.ENV_TERMINATION_LOG: str(config.with_name("last_words.json")),
            names.ENV_AGENT_PID: str(os.getpid()),
            names.ENV_AGENT_MARK: self.mark,
        }

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


def bytecode_environment(agents: Mapping[str, str]) -> dict[str, str]:
    """Where a worker keeps compiled bytecode: beside the sources where it is or can be, else in the pod's cache folder,
    which is bounded by what is installed. Without bytecode the imports of a light worker take 0.6 s of CPU instead of
    0.15 s, and torch's 12 s. PYTHONPYCACHEPREFIX alone is no answer, as Python then ignores what lies beside the
    sources. Writing is allowed again where it was forbidden: a setting for people's checkouts."""
    found = {"PYTHONDONTWRITEBYTECODE": ""}  # as if it were not set
    cache = agents.get(names.ENV_CACHE_DIR, "")
    if cache and "PYTHONPYCACHEPREFIX" not in agents and not all(map(_has_place, map(_source, LOOKED_AT))):
        found["PYTHONPYCACHEPREFIX"] = f"{cache}/bytecode"
    return found


def _source(module: object) -> Path:
    return Path(str(getattr(module, "__file__", "")))


def _has_place(source: Path) -> bool:
    """Its bytecode lies beside it, or may be written there."""
    compiled = Path(importlib.util.cache_from_source(str(source)))
    folder = compiled.parent if compiled.parent.is_dir() else source.parent
    return compiled.exists() or os.access(folder, os.W_OK)
