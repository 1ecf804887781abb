"""One pod from its first sight to its last status: address, volumes, init containers, containers, end.

For: `kubelet.py`, one PodLife per pod uid. Not for: watching (kubelet.py), or one container's life (containers.py).

| concurrent part | consumes | waits for | unblocked by |
|---|---|---|---|
| _run (task) | - | an address, sources, its containers | retries, ContainerLife tasks, stop |
| _write (task) | the dirty flag | a change of any record | changed() |
| stop | - | run, for the grace period; then for KILL_TIMEOUT_S | the containers' ends |
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from rlinf_api import times
from rlinf_api.errors import Conflict
from rlinf_api.store import NotFound
from rljob.local import environment, podspec, room, shim, status
from rljob.local.addresses import Addresses, NoAddress
from rljob.local.containers import RETRY_S, ContainerLife, PodContext, set_within, warn_of
from rljob.local.environment import PodFacts
from rljob.local.objects import Manifest, meta, ref
from rljob.local.status import NotYet
from rljob.local.store import MemoryStore
from rljob.local.volumes import PodVolumes

logger = logging.getLogger(__name__)
KILL_TIMEOUT_S = shim.KILL_TIMEOUT_S + 5.0
NOT_SUPPORTED, LOCAL_MACHINE = "NotSupportedYet", "LocalMachine"


class PodLife:
    """A task from the start; `stop` at any time; afterwards no process, folder or address of the pod is left."""

    def __init__(
        self,
        pod: Manifest,
        *,
        store: MemoryStore,
        work_dir: Path,
        addresses: Addresses,
        volumes: PodVolumes,
        env: Mapping[str, str],
        named: Callable[[], Awaitable[None]],
        held_up: Callable[[str], None],
    ) -> None:
        """`held_up` hears why this machine cannot run the pod, and an empty text once it runs."""
        self.pod = pod
        self._store, self._work_dir, self._addresses, self._volumes = store, work_dir, addresses, volumes
        self._env, self._named, self._held_up = env, named, held_up
        self._record = status.fresh_record(pod)
        self._facts = PodFacts(pod=pod, pod_ip="")
        self._lives: list[ContainerLife] = []
        self._holder: socket.socket | None = None  # of its address
        self._stopping = asyncio.Event()
        self._dirty = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"pod {self.key[1]}")

    @property
    def key(self) -> tuple[str, str]:
        return (meta(self.pod)["namespace"], meta(self.pod)["name"])

    @property
    def uid(self) -> str:
        return str(meta(self.pod)["uid"])

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, the grace period, SIGKILL. Returns when all of the pod is gone and its last status written."""
        self._stopping.set()
        for life in self._lives:
            life.request_stop()
        if grace_s > 0:
            await asyncio.wait([self._task], timeout=grace_s)
        self.kill()
        await asyncio.wait([self._task], timeout=KILL_TIMEOUT_S)
        if not self._task.done():
            logger.error("pod did not end within its deadline", extra={"pod": self.key[1], "timeout_s": KILL_TIMEOUT_S})

    def kill(self) -> None:
        self._stopping.set()
        for life in self._lives:
            life.kill()

    async def refresh(self, pod: Manifest) -> None:
        """New labels or annotations, or a Secret or ConfigMap that changed: projected files follow."""
        self.pod = pod
        if self._record.volumes_ready and not self._stopping.is_set():
            self._facts = PodFacts(pod=pod, pod_ip=self._facts.pod_ip)
            self._volumes.refresh(facts=self._facts, sources=await environment.read_sources(self._store, pod))

    async def _run(self) -> None:
        writer = asyncio.create_task(self._write(), name=f"status of {self.key[1]}")
        try:
            await self._live()
        except OSError as err:  # a log folder or a termination file that cannot be made
            why = room.told(err, self._work_dir)
            self._fail(LOCAL_MACHINE, f"{why}; make room, or choose another --work-dir")
        except Exception as err:  # the top of a task: a bug must end this pod, visibly, and no other
            logger.exception("pod ended by a bug of the local backend", extra={"pod": self.key[1]})
            self._fail("InvariantBroken", f"local backend: {type(err).__name__}: {err}; its stack is in logs/rljob.log")
        finally:
            writer.cancel()
            self._volumes.remove()
            if self._holder is not None:
                self._holder.close()
            await asyncio.shield(self._write_once())

    def _fail(self, reason: str, message: str) -> None:
        self._record.failure = (reason, message)
        self._held_up(f"{self.key[1]}: {message}")

    async def _live(self) -> None:
        if sentences := podspec.refusals(self.pod):
            self._fail(NOT_SUPPORTED, "; ".join(sentences))
            return
        if not await self._scheduled() or not await self._mounted():
            return
        await self._named()
        spec = self.pod["spec"]
        (self._work_dir / "logs" / self.key[1]).mkdir(parents=True, exist_ok=True)
        context = PodContext(
            store=self._store,
            work_dir=self._work_dir,
            facts=self._facts,
            volumes=self._volumes,
            env=self._env,
            changed=self._dirty.set,
            stopping=self._stopping,
        )
        for container, record in zip(spec.get("initContainers") or [], self._record.init, strict=True):
            if self._stopping.is_set():
                return
            life = ContainerLife(container, record=record, context=context)
            self._lives = [life]
            await life.run()
            if not status.succeeded(record):
                return
        if self._stopping.is_set():
            return
        pairs = zip(spec["containers"], self._record.main, strict=True)
        self._lives = [ContainerLife(container, record=record, context=context) for container, record in pairs]
        async with asyncio.TaskGroup() as group:
            for life in self._lives:
                group.create_task(life.run())

    async def _scheduled(self) -> bool:
        """An address with the pod's ports free, then the binding. A taken port reads as on a node without it."""
        containers = self.pod["spec"]["containers"]
        ports = [(p["containerPort"], p.get("protocol", "TCP")) for c in containers for p in c.get("ports") or []]
        record = self._record
        while self._holder is None:
            try:
                record.pod_ip, self._holder = self._addresses.claim(ports)
            except NoAddress as err:
                record.unschedulable = str(err)
                self._dirty.set()
                if await set_within(self._stopping, RETRY_S):
                    return False
        record.unschedulable, record.started_at = "", times.utc_now()
        self._facts = PodFacts(pod=self.pod, pod_ip=record.pod_ip)
        await self._write_once()
        return True

    async def _mounted(self) -> bool:
        while True:
            sources = await environment.read_sources(self._store, self.pod)
            try:
                self._volumes.prepare(facts=self._facts, sources=sources)
            except NotYet as err:
                if err.is_of_machine:
                    self._held_up(f"{self.key[1]}: {err}")
                waiting = status.waiting(err.waiting_reason, str(err))
                first = (self._record.init or self._record.main)[0]
                if first.state != waiting:
                    first.state = waiting
                    self._dirty.set()
                    await warn_of(self._store, self.pod, reason=err.event_reason, message=str(err))
                if await set_within(self._stopping, RETRY_S):
                    return False
            else:
                self._record.volumes_ready = True
                return True

    async def _write(self) -> None:
        while True:
            await self._dirty.wait()  # no deadline: a healthy pod may have nothing to say for weeks
            self._dirty.clear()
            await self._write_once()

    async def _write_once(self) -> None:
        if self._record.failure is None and not any("waiting" in c.state for c in self._record.main):
            self._held_up("")
        namespace, name = self.key
        try:
            current = await self._store.get("Pod", name, namespace=namespace)
            generation = meta(current).get("generation", 1)
            new = status.pod_status(
                self._record, previous=current.get("status") or {}, generation=generation, now=times.utc_now()
            )
            patch = {"metadata": {"uid": self.uid}, "status": new}
            if self._record.pod_ip and not current["spec"].get("nodeName"):
                binding = {"metadata": {"uid": self.uid}, "spec": {"nodeName": status.NODE_NAME}}
                await self._store.patch("Pod", name, patch=binding, namespace=namespace, subresource="binding")
            await self._store.patch("Pod", name, patch=patch, namespace=namespace, subresource="status")
        except (NotFound, Conflict) as err:
            # Deleted by force, or another pod of that name by now: nobody is left to read about this one.
            logger.debug("status not written", extra={"pod": ref(self.pod), "why": str(err)})
