"""The life of one container: start, watch, read the last words.

For: `pod_life.py`, a task per container. Not for: their order (pod_life.py), or holding a process (processes.py).

| concurrent part | consumes | waits for | unblocked by |
|---|---|---|---|
| ContainerLife.run | - | its sources; the exit | a retry, the shim, or request_stop |
| readiness probe | - | its period; an answer, timeoutSeconds | cancelled when the container ends |
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf_api import times
from rlinf_api.names import ENV_POD_UID, MAX_TERMINATION_BYTES
from rlinf_api.store import AlreadyExists, NotFound
from rljob.local import environment
from rljob.local.environment import Paths, PodFacts
from rljob.local.objects import Manifest, meta
from rljob.local.processes import ContainerProcess, Exit, Launch, StartFailed
from rljob.local.status import ContainerRecord, NotYet, running, terminated, waiting
from rljob.local.store import MemoryStore
from rljob.local.volumes import PodVolumes

RETRY_S = 0.5  # pause before a missing Secret, ConfigMap or address is looked for again
EXIT_START_ERROR = 128  # containerd's, with reason StartError
FALLBACK_LINES, FALLBACK_BYTES = 80, 2048


async def watch_readiness(
    container: Manifest,
    *,
    address: str,
    process: ContainerProcess,
    argv: list[str],
    report: Callable[[bool], None],
) -> None:
    """A readiness probe (exec, httpGet, tcpSocket), with a kubelet's counting; podspec.py refuses liveness and start-up
    probes. Calls report(ready) on each change; `argv` is the exec probe's command with its paths translated."""
    probe = container["readinessProbe"]
    period_s, timeout_s = float(probe.get("periodSeconds", 10)), float(probe.get("timeoutSeconds", 1))
    needed = {True: int(probe.get("successThreshold", 1)), False: int(probe.get("failureThreshold", 3))}
    ready, streak, last = False, 0, False
    await asyncio.sleep(float(probe.get("initialDelaySeconds", 0)))
    while True:
        ok = await _answers(container, address=address, process=process, argv=argv, timeout_s=timeout_s)
        streak = streak + 1 if ok == last else 1
        last = ok
        if ok != ready and streak >= needed[ok]:
            ready = ok
            report(ready)
        await asyncio.sleep(period_s)


async def _answers(
    container: Manifest, *, address: str, process: ContainerProcess, argv: list[str], timeout_s: float
) -> bool:
    """True: it answered as it should."""
    probe = container["readinessProbe"]
    if "exec" in probe:
        return await process.run_in(argv, timeout_s=timeout_s) == 0
    try:
        async with asyncio.timeout(timeout_s):
            if "tcpSocket" in probe:
                tcp = probe["tcpSocket"]
                _, writer = await asyncio.open_connection(tcp.get("host", address), _port(tcp["port"], container))
                writer.close()
                return True
            return await _http(probe["httpGet"], container=container, address=address)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


async def _http(get: Manifest, *, container: Manifest, address: str) -> bool:
    context = None
    if get.get("scheme", "HTTP") == "HTTPS":
        context = ssl.create_default_context()  # a kubelet does not verify either: it knows no name of a pod
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = get.get("host", address), _port(get["port"], container)
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        headers = {"Host": f"{host}:{port}", "User-Agent": "kube-probe/1.36", "Connection": "close"}
        headers |= {header["name"]: header["value"] for header in get.get("httpHeaders") or []}
        lines = [f"GET {get.get('path') or '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        words = (await reader.readline()).split()
    finally:
        writer.close()
    return len(words) > 1 and words[1].isdigit() and 200 <= int(words[1]) < 400


def _port(port: int | str, container: Manifest) -> int:
    if isinstance(port, int):
        return port
    return int(next(p["containerPort"] for p in container.get("ports") or [] if p.get("name") == port))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodContext:
    """Shared by a pod's containers. `changed()` asks for a status write; once `stopping` is set nothing starts."""

    store: MemoryStore
    work_dir: Path
    facts: PodFacts
    volumes: PodVolumes
    env: Mapping[str, str]
    changed: Callable[[], None]
    stopping: asyncio.Event


def checkpoint_uri(work_dir: Path) -> str:
    """Where checkpoints of a job go that names no place for them: the work dir's own, never a pod's. The path is
    quoted: its braces and dollars are none of what the operator and a kubelet fill in."""
    return (work_dir.absolute() / "checkpoints").as_uri()


class ContainerLife:
    def __init__(self, container: Manifest, *, record: ContainerRecord, context: PodContext) -> None:
        self._container, self._record, self._context = container, record, context
        self._process: ContainerProcess | None = None
        self._killed = False

    async def run(self) -> None:
        """Returns when the container is over, or was asked to stop before it ran."""
        state = await self._live_once()
        self._record.ready = False
        if state is not None:
            self._record.state = state
            self._context.changed()

    def request_stop(self) -> None:
        """SIGTERM to the main process. The caller keeps the grace period and calls kill."""
        if self._process is not None:
            self._process.signal_main(signal.SIGTERM)

    def kill(self) -> None:
        self._killed = True
        if self._process is not None:
            self._process.kill()

    async def _live_once(self) -> Manifest | None:
        """None: stopped before anything ran."""
        launch, paths, last_words = await self._prepared()
        if launch is None or self._context.stopping.is_set():
            return None
        started_at = times.utc_now()
        try:
            self._process = await ContainerProcess.start(launch, pod_uid=launch.env[ENV_POD_UID])
        except StartFailed as err:
            message = f"failed to start container {self._record.name!r}: {err}"
            await self._warn("Failed", f"Error: {message}")
            return terminated(
                EXIT_START_ERROR, "StartError", message, started_at=started_at, finished_at=times.utc_now()
            )
        self._record.process_id = self._process.pid
        self._record.state = running(started_at)
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
        if end.left:
            pids = ", ".join(map(str, end.left))
            await self._warn("FailedKillPod", f"processes of container {self._record.name!r} outlive SIGKILL: {pids}")
        reason = "Unknown" if end.lost else "Completed" if end.code == 0 else "Error"
        message = self._message(end, last_words=last_words)
        return terminated(end.code, reason, message, started_at=started_at, finished_at=times.utc_now())

    async def _warn(self, reason: str, message: str) -> None:
        await warn_of(self._context.store, self._context.facts.pod, reason=reason, message=message)

    async def _prepared(self) -> tuple[Launch | None, Paths, Path]:
        context = self._context
        while True:
            paths, last_words = context.volumes.termination_file(self._container)
            try:
                sources = await environment.read_sources(context.store, context.facts.pod)
                env = environment.container_env(
                    self._container, facts=context.facts, sources=sources, paths=paths,
                    checkpoint_uri=checkpoint_uri(context.work_dir),
                )  # fmt: skip
                break
            except NotYet as err:
                if self._record.state != (state := waiting(err.waiting_reason, str(err))):
                    self._record.state = state
                    context.changed()
                    await self._warn(err.event_reason, f"Error: {err}")
                if await set_within(context.stopping, RETRY_S):
                    return None, paths, last_words
        argv = environment.argv(self._container, env=env, paths=paths)
        cwd = self._container.get("workingDir")
        launch = Launch(
            argv=argv,
            env=environment.inherited() | dict(context.env) | env | {ENV_POD_UID: meta(context.facts.pod)["uid"]},
            cwd=environment.filled(cwd, paths=paths, env=env) if cwd else os.getcwd(),
            log=str(context.work_dir / "logs" / meta(context.facts.pod)["name"] / f"{self._record.name}.log"),
            folders=[str(folder) for folder in context.volumes.folders],
        )
        return launch, paths, last_words

    def _probe(self, process: ContainerProcess, *, paths: Paths, env: Mapping[str, str]) -> asyncio.Task[None] | None:
        if "readinessProbe" not in self._container:
            return None
        command = (self._container["readinessProbe"].get("exec") or {}).get("command") or []
        argv = environment.argv({"command": command}, env=env, paths=paths) if command else []

        def report(ready: bool) -> None:
            self._record.ready = ready
            self._context.changed()

        return asyncio.create_task(
            watch_readiness(
                self._container, address=self._context.facts.pod_ip, process=process, argv=argv, report=report
            ),
            name=f"readiness of {self._record.name}",
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


async def set_within(event: asyncio.Event, delay_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), delay_s)
    except TimeoutError:
        return False
    return True


async def warn_of(store: MemoryStore, pod: Manifest, *, reason: str, message: str) -> None:
    """An Event of the pod: why it does not start. One object for each pod and reason, which counts up and has the
    newest words: what is tried twice a second says other numbers and names of temporary files each time."""
    metadata = meta(pod)
    digest = hashlib.sha256(f"{metadata['uid']}{reason}".encode()).hexdigest()[:10]
    name, now = f"{metadata['name']}.{digest}", times.text(times.utc_now())
    about = {field: metadata[field] for field in ("name", "namespace", "uid")}
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", **about},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "source": {"component": "rljob"},
    }
    try:
        await store.create(event)
    except AlreadyExists:
        try:
            count = (await store.get("Event", name, namespace=metadata["namespace"]))["count"]
            patch = {"count": count + 1, "lastTimestamp": now, "message": message}
            await store.patch("Event", name, patch=patch, namespace=metadata["namespace"])
        except NotFound:
            return  # taken away between the two; the next repeat makes it anew
