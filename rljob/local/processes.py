"""The backend's end of a container life: starts `shim.py`, sends it commands, and turns what it says into values.

For: `containers.py`. Not for: what a container is to run (environment.py).

| concurrent part | consumes | waits for | unblocked by |
|---|---|---|---|
| _listen (a task per life) | messages of the shim | the next one | a message, or end of file: the shim is dead |
| start | - | started or failed, START_TIMEOUT_S | _listen |
| wait_exit | - | the exit; no deadline, a container may run for weeks | _listen |
| run_in | - | the end of the command, the caller's timeout_s | _listen |

A shim that dies without a last word (kill -9) is a lost container: exit 255, as a cluster reports one that a node took
with it, after a sweep of everything that carries the pod's uid in its environment.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlinf_api.errors import DeadlineExceeded, RLinfError
from rlinf_api.names import ENV_POD_UID
from rljob.local import shim

START_TIMEOUT_S = 20.0  # a guess with a wide margin: 25 ms on an idle machine
SWEEP_TIMEOUT_S = 5.0
LOG_LIMIT_BYTES = 64 << 20  # per container, both halves: a pod that prints in a loop must not fill the disk
EXIT_LATE, EXIT_KILLED = 124, 137
EXIT_LOST = 255  # what the kubelet gives a container whose end nobody saw; its reason is "Unknown"


class StartFailed(RLinfError):
    """The command could not be executed: no such file, not executable, no such working directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All that a shim is asked for; `folders` are removed by it when the backend dies."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    log: str
    folders: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """`left`: pids that even SIGKILL did not end within the shim's deadline (uninterruptible sleep)."""

    code: int
    log_tail: bytes = b""
    left: tuple[int, ...] = ()
    lost: bool = False


class ContainerProcess:
    """One life of one container. `start` -> `wait_exit`; `signal_main` and `kill` at any time, also when it is over."""

    def __init__(self, process: subprocess.Popen[bytes], *, writer: asyncio.StreamWriter, pod_uid: str) -> None:
        self._process, self._writer, self._pod_uid = process, writer, pod_uid
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[int] = loop.create_future()
        self._exit: asyncio.Future[Exit] = loop.create_future()
        self._commands: dict[int, asyncio.Future[int]] = {}
        self._next_command = 0
        self._listener: asyncio.Task[None] | None = None
        self.pid = 0

    @classmethod
    async def start(cls, launch: Launch, *, pod_uid: str) -> ContainerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            process = _spawn_shim(theirs)
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            process.wait(shim.KILL_TIMEOUT_S)  # at once: it has nothing to stop yet
            raise
        container = cls(process, writer=writer, pod_uid=pod_uid)
        container._listener = asyncio.create_task(container._listen(reader), name=f"shim {process.pid}")
        container._send(asdict(launch) | {"log_limit": LOG_LIMIT_BYTES})
        try:
            container.pid = await asyncio.wait_for(asyncio.shield(container._started), START_TIMEOUT_S)
        except TimeoutError:
            await container.close()
            raise DeadlineExceeded(
                f"start of {launch.argv[0]}", timeout_s=START_TIMEOUT_S, missing="an answer of its shim"
            ) from None
        except BaseException:
            await asyncio.shield(container.close())
            raise
        return container

    async def wait_exit(self) -> Exit:
        result = await asyncio.shield(self._exit)
        await self.close()
        return result

    def signal_main(self, number: int) -> None:
        """To the main process alone, as the kubelet does: it is PID 1 and forwards what it wants to."""
        self._send({"op": "signal", "signal": int(number)})

    def kill(self) -> None:
        """SIGKILL to the main process, then to everything below the shim."""
        self._send({"op": "kill"})

    async def run_in(self, argv: list[str], *, timeout_s: float) -> int:
        """Exit code of a command beside the main process; 124 when it ran past its time."""
        self._next_command += 1
        number = self._next_command
        done = self._commands[number] = asyncio.get_running_loop().create_future()
        self._send({"op": "exec", "id": number, "argv": argv})
        try:
            return await asyncio.wait_for(done, timeout_s)
        except TimeoutError:
            self._send({"op": "exec-kill", "id": number})
            return EXIT_LATE
        finally:
            self._commands.pop(number, None)

    async def close(self) -> None:
        """Idempotent. Closing the socket of a living shim ends it, with everything below."""
        self._writer.close()
        if self._listener is not None:
            await asyncio.wait([self._listener], timeout=shim.KILL_TIMEOUT_S + 1)
        await asyncio.to_thread(self._process.wait, shim.KILL_TIMEOUT_S + 1)

    def _send(self, message: dict[str, Any]) -> None:
        if not self._writer.is_closing():
            data = marshal.dumps(message)
            self._writer.write(len(data).to_bytes(4, "big") + data)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                self._heard(marshal.loads(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._lost()

    def _heard(self, message: dict[str, Any]) -> None:
        match message["event"]:
            case "started":
                self._started.set_result(message["pid"])
            case "failed":
                self._started.set_exception(StartFailed(message["message"]))
                self._exit.set_result(Exit(code=128))
            case "exited":
                self._exit.set_result(Exit(code=message["code"], log_tail=message["tail"], left=tuple(message["left"])))
            case "exec":
                done = self._commands.get(message["id"])
                if done is not None and not done.done():
                    done.set_result(message["code"])

    async def _lost(self) -> None:
        if not self._exit.done():
            left = await asyncio.to_thread(sweep, self._pod_uid)
            self._exit.set_result(Exit(code=EXIT_LOST, left=tuple(left), lost=True))
        if not self._started.done():
            self._started.set_exception(StartFailed("the container's shim died before it started the command"))
        for done in self._commands.values():
            if not done.done():
                done.set_result(EXIT_KILLED)


def _spawn_shim(theirs: socket.socket) -> subprocess.Popen[bytes]:
    # By path, against the rule for files in packages: -I keeps the folder off sys.path, and -m would need it there.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", shim.__file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if os.environ.get(name)},  # python may need it
        start_new_session=True,  # a Ctrl-C in the terminal is for the backend, which then stops pods in order
    )


def marked(pod_uid: str) -> list[tuple[int, str]]:
    """(pid, start time) of every process whose environment names this pod, wherever it hangs in the tree."""
    mark = f"{ENV_POD_UID}={pod_uid}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone, or another user's and so not ours
        fields = shim.stat_fields(int(name)) if mark in environment.split(b"\0") else []
        if fields and fields[0] != "Z":
            found.append((int(name), fields[19]))
    return found


def sweep(pod_uid: str) -> list[int]:
    """Kills what `marked` finds until there is nothing; returns what outlived the deadline. Blocks: use a thread."""
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    while left := marked(pod_uid):
        for pid, start_time in left:
            shim.kill_exactly(pid, start_time, signal.SIGKILL)
        if time.monotonic() > deadline:
            return [pid for pid, _ in left]
        time.sleep(0.005)
    return []
