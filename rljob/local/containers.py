"""The life of one container: start, watch, read the last words.

For: `pod_life.py`, a task per container. Not for: the pod's order of things, or how a process is held (processes.py).

| concurrent part | consumes | waits for | unblocked by |
|---|---|---|---|
| ContainerLife.run | - | its sources; the exit | a retry, the shim, or request_stop |
| readiness probe | - | see probes.py | cancelled when the container ends |
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rlinf_api import times
from rlinf_api.names import ENV_POD_UID, MAX_TERMINATION_BYTES
from rljob.local import environment
from rljob.local.environment import Paths, PodFacts
from rljob.local.objects import Manifest, meta
from rljob.local.probes import watch_readiness
from rljob.local.processes import ContainerProcess, Exit, Launch, StartFailed
from rljob.local.settings import LocalSettings
from rljob.local.status import ContainerRecord, NotYet, Running, Terminated, Waiting
from rljob.local.store import MemoryStore
from rljob.local.volumes import PodVolumes

EXIT_START_ERROR = 128  # containerd's, with reason StartError
FALLBACK_LINES, FALLBACK_BYTES = 80, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class PodContext:
    """Shared by a pod's containers. `warn(reason, message)` makes an Event, `changed()` asks for a status write. Once
    `stopping` is set nothing starts any more."""

    store: MemoryStore
    settings: LocalSettings
    facts: PodFacts
    volumes: PodVolumes
    env: Mapping[str, str]
    logs: Path
    changed: Callable[[], None]
    warn: Callable[[str, str], Awaitable[None]]
    stopping: asyncio.Event
    stopped_within: Callable[[float], Awaitable[bool]]


class ContainerLife:
    def __init__(self, container: Manifest, *, record: ContainerRecord, context: PodContext) -> None:
        self._container, self._record, self._context = container, record, context
        self._process: ContainerProcess | None = None
        self._killed = False
        self.left: tuple[int, ...] = ()

    async def run(self) -> None:
        """Returns when the container is over, or was asked to stop before it ran."""
        state = await self._live_once()
        self._record.ready = False
        if state is not None:
            self._record.state, self._record.over = state, True
            self._context.changed()

    def request_stop(self) -> None:
        """SIGTERM to the main process. The caller keeps the grace period and calls kill."""
        if self._process is not None:
            self._process.signal_main(signal.SIGTERM)

    def kill(self) -> None:
        self._killed = True
        if self._process is not None:
            self._process.kill()

    async def _live_once(self) -> Terminated | None:
        """None: stopped before anything ran."""
        launch, paths, last_words = await self._prepared()
        if launch is None or self._context.stopping.is_set():
            return None
        started_at = times.utc_now()
        try:
            self._process = await ContainerProcess.start(launch, pod_uid=launch.env[ENV_POD_UID])
        except StartFailed as err:
            message = f"failed to start container {self._record.name!r}: {err}"
            await self._context.warn("Failed", f"Error: {message}")
            return Terminated(
                exit_code=EXIT_START_ERROR,
                reason="StartError",
                message=message,
                started_at=started_at,
                finished_at=times.utc_now(),
            )
        self._record.process_id = self._process.pid
        self._record.state = Running(started_at=started_at)
        self._record.ready = "readinessProbe" not in self._container
        self._context.changed()
        if self._killed:
            self._process.kill()
        elif self._context.stopping.is_set():
            self._process.signal_main(signal.SIGTERM)
        probe = self._probe(self._process, paths=paths, env=launch.env)
        try:
            end = await self._process.wait_exit()
        finally:
            if probe is not None:
                probe.cancel()
            process, self._process = self._process, None
            await asyncio.shield(process.close())  # ends whatever still runs, when it was we who were cancelled
        self.left = end.left
        return self._terminated(end, started_at=started_at, last_words=last_words)

    async def _prepared(self) -> tuple[Launch | None, Paths, Path]:
        context = self._context
        while True:
            paths, last_words = context.volumes.termination_file(self._container)
            try:
                sources = await environment.read_sources(context.store, context.facts.pod)
                env = environment.container_env(
                    self._container, facts=context.facts, sources=sources, paths=paths,
                    checkpoint_uri=context.settings.checkpoint_uri,
                )  # fmt: skip
                break
            except NotYet as err:
                if self._record.state != (state := Waiting(reason=err.waiting_reason, message=str(err))):
                    self._record.state = state
                    context.changed()
                    await context.warn(err.event_reason, f"Error: {err}")
                if await context.stopped_within(context.settings.retry_s):
                    return None, paths, last_words
        argv = environment.argv(self._container, env=env, paths=paths)
        cwd = self._container.get("workingDir")
        launch = Launch(
            argv=argv,
            env=environment.inherited() | dict(context.env) | env | {ENV_POD_UID: meta(context.facts.pod)["uid"]},
            cwd=environment.filled(cwd, paths=paths, env=env) if cwd else str(context.settings.working_dir),
            log=context.logs / f"{self._record.name}.log",
            log_limit_bytes=context.settings.log_limit_bytes,
            folders=context.volumes.folders,
        )
        return launch, paths, last_words

    def _probe(self, process: ContainerProcess, *, paths: Paths, env: Mapping[str, str]) -> asyncio.Task[None] | None:
        if "readinessProbe" not in self._container:
            return None
        command = (self._container["readinessProbe"].get("exec") or {}).get("command") or []
        argv = environment.argv({"command": command}, env=env, paths=paths) if command else []

        def report(ready: bool, _: str) -> None:
            self._record.ready = ready
            self._context.changed()

        return asyncio.create_task(
            watch_readiness(
                self._container, address=self._context.facts.pod_ip, process=process, argv=argv, report=report
            ),
            name=f"readiness of {self._record.name}",
        )

    def _terminated(self, end: Exit, *, started_at: datetime, last_words: Path) -> Terminated:
        reason = "Unknown" if end.lost else "Completed" if end.code == 0 else "Error"
        return Terminated(
            exit_code=end.code,
            reason=reason,
            message=self._message(end, last_words=last_words),
            started_at=started_at,
            finished_at=times.utc_now(),
        )

    def _message(self, end: Exit, *, last_words: Path) -> str:
        try:
            with last_words.open("rb") as file:
                message = file.read(MAX_TERMINATION_BYTES).decode(errors="replace")
        except FileNotFoundError:
            message = ""  # the container removed it
        if not message and end.code != 0 and self._container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            lines = end.log_tail.decode(errors="replace").splitlines(keepends=True)[-FALLBACK_LINES:]
            message = "".join(lines).encode()[-FALLBACK_BYTES:].decode(errors="ignore")
        return message
