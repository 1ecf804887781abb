"""The kubelet of local mode: watches the store's pods and gives each one a PodLife; keeps names and Secrets current.

For: the runner (`async with LocalKubelet(...)`) and tests. Not for: deciding which pods there should be (the operator),
nor restarting what failed (the operator again: its pods have restartPolicy Never).

| concurrent part | consumes | waits for | unblocked by |
|---|---|---|---|
| _follow (a task per kind) | a watch of the store | the next change; Expired: lists again | the store |
| PodLife tasks | - | see pod_life.py | |
| _end (a task per deleted pod) | - | PodLife.stop with the pod's grace | its containers |
| _keep_names | the dirty flag of names | a pod's or Service's change | _follow |
| __aexit__ | - | all PodLifes, stop_timeout_s each, at once | their ends |

If this process dies, by whatever signal, its shims see the end of their sockets and take the pods down (shim.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlinf_api.errors import Conflict, InvariantBroken
from rlinf_api.names import ENV_HOSTS_FILE, ENV_OUTPUT_DIR, ENV_WORKER_LOG_DIR
from rlinf_api.store import Change, Expired, NotFound
from rljob.local import environment, hosts, room
from rljob.local.addresses import Addresses
from rljob.local.containers import RETRY_S
from rljob.local.dump import write_atomically
from rljob.local.objects import Manifest, meta
from rljob.local.pod_life import PodLife
from rljob.local.store import MemoryStore
from rljob.local.volumes import PodVolumes, Scratch

logger = logging.getLogger(__name__)
NAMES = ("names",)
STOP_TIMEOUT_S = 15.0  # at the end of the backend a pod gets its own grace period, but no more than this


class LocalKubelet:
    def __init__(self, store: MemoryStore, work_dir: Path) -> None:
        """`work_dir`: logs/<pod>/<container>.log and claims/<claim>/ lie there."""
        self._store, self._work_dir = store, work_dir
        self._addresses = Addresses()
        self._lives: dict[str, PodLife] = {}  # by uid: a name may already be the next pod's
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._names_changed = asyncio.Event()
        self._namespaces: set[str] = set()  # that ever had a pod: the file of an empty one must say so
        self._scratch: Scratch | None = None
        self._held_up: dict[tuple[str, ...], str] = {}
        self.failure: BaseException | None = None
        """The bug that ended a task of `spawn`, the first: who waits for what it did waits in vain."""
        self.stop_timeout_s = STOP_TIMEOUT_S  # less for a run that somebody wants to be over

    async def __aenter__(self) -> Self:
        self._scratch = Scratch.make()
        for kind, handle in (("Pod", self._pod_seen), ("Service", self._service_seen), ("Secret", self._source_seen),
                             ("ConfigMap", self._source_seen)):  # fmt: skip
            self.spawn(self._follow(kind, handle), name=f"watch of {kind}", lasting=True)
        self.spawn(self._keep_names(), name="hosts file", lasting=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._stop_all(most_s=self.stop_timeout_s)
        except asyncio.CancelledError:  # a second Ctrl-C: no grace any more, but still nothing left running
            await asyncio.shield(self._stop_all(most_s=0.0))
            raise
        finally:
            if self._scratch is not None:
                self._scratch.remove()

    @property
    def memory(self) -> Path:
        """A folder of this run that never reaches a disk, and that a later run clears if this one is killed."""
        assert self._scratch is not None, "memory before __aenter__"
        return self._scratch.memory

    @property
    def held_up(self) -> str:
        """Why this machine cannot run a pod that it is to run, the oldest reason; empty while all run."""
        return next(iter(self._held_up.values()), "")

    def _hear(self, place: tuple[str, ...], why: str) -> None:
        if why:
            self._held_up[place] = why
        else:
            self._held_up.pop(place, None)

    def hosts_file(self, namespace: str) -> Path:
        assert self._scratch is not None, "hosts_file before __aenter__"
        return self._scratch.disk / f"hosts-{namespace}"

    # --- pods ---------------------------------------------------------------------------------------------------------

    async def _pod_seen(self, event: Change) -> None:
        pod = event.object
        self._names_changed.set()
        life = self._lives.get(meta(pod)["uid"])
        if event.type == "DELETED":
            if life is not None:
                self.spawn(self._end(life, grace_s=0.0), name=f"kill of {meta(pod)['name']}")
        elif life is None:
            if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                self._adopt(pod)
        elif "deletionTimestamp" in meta(pod):
            grace_s = float(meta(pod)["deletionGracePeriodSeconds"])
            self.spawn(self._end(life, grace_s=grace_s), name=f"end of {meta(pod)['name']}")
        elif any(meta(pod).get(field) != meta(life.pod).get(field) for field in ("labels", "annotations")):
            await life.refresh(pod)

    def _adopt(self, pod: Manifest) -> None:
        assert self._scratch is not None
        namespace, name = meta(pod)["namespace"], meta(pod)["name"]
        self._namespaces.add(namespace)
        own = {
            ENV_HOSTS_FILE: str(self.hosts_file(namespace)),
            ENV_WORKER_LOG_DIR: str(self._work_dir / "logs" / name),
            ENV_OUTPUT_DIR: str(self._work_dir),
            "HOSTNAME": pod["spec"].get("hostname", name),
        }
        claims = self._work_dir / "claims"
        life = PodLife(
            pod,
            store=self._store,
            work_dir=self._work_dir,
            addresses=self._addresses,
            volumes=PodVolumes(pod, scratch=self._scratch, number=next(self._numbers), claims=claims),
            env=own,
            named=lambda: self._write_names(namespace),
            held_up=partial(self._hear, _place(pod)),
        )
        self._lives[life.uid] = life

    async def _end(self, life: PodLife, *, grace_s: float) -> None:
        """Also for a second deletion with a shorter grace: both tasks wait for the same end, the shorter one kills."""
        await life.stop(grace_s)
        if self._lives.pop(life.uid, None) is None:
            return
        place = _place(life.pod)
        if not any(_place(other.pod) == place for other in self._lives.values()):
            self._held_up.pop(place, None)  # nobody wants it any more
        namespace, name = life.key
        try:
            await self._store.delete("Pod", name, namespace=namespace, grace_period_s=0, uid=life.uid)
        except (NotFound, Conflict) as err:
            logger.debug("pod was gone before its end", extra={"pod": name, "why": str(err)})

    async def _stop_all(self, *, most_s: float) -> None:
        """Each with its own grace period, and no more than `most_s`."""
        lives = list(self._lives.values())
        graces_s = [float(life.pod["spec"].get("terminationGracePeriodSeconds", 30)) for life in lives]
        stops = (life.stop(min(grace_s, most_s)) for life, grace_s in zip(lives, graces_s, strict=True))
        for life, end in zip(lives, await asyncio.gather(*stops, return_exceptions=True), strict=True):
            if isinstance(end, Exception):
                logger.error("pod was not stopped in order", extra={"pod": life.key[1]}, exc_info=end)

    # --- names and sources --------------------------------------------------------------------------------------------

    async def _service_seen(self, event: Change) -> None:
        self._names_changed.set()

    async def _source_seen(self, event: Change) -> None:
        source = (event.object["kind"], meta(event.object)["name"])
        for life in list(self._lives.values()):
            if life.key[0] == meta(event.object)["namespace"] and source in environment.sources_named(life.pod):
                await life.refresh(life.pod)

    async def _keep_names(self) -> None:
        while True:
            await self._names_changed.wait()  # no deadline: names of a quiet job do not change
            self._names_changed.clear()
            try:
                for namespace in sorted(self._namespaces):
                    await self._write_names(namespace)
            except OSError as err:
                path = self.hosts_file(namespace)
                self._hear(NAMES, f"the names of pods cannot be written: {room.told(err, path)}; make room there")
                self._names_changed.set()
                await asyncio.sleep(RETRY_S)
            else:
                self._hear(NAMES, "")

    async def _write_names(self, namespace: str) -> None:
        pods = (await self._store.list("Pod", namespace=namespace)).items
        services = (await self._store.list("Service", namespace=namespace)).items
        text, path = hosts.text(pods, services, namespace=namespace), self.hosts_file(namespace)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)

    # --- tasks --------------------------------------------------------------------------------------------------------

    async def _follow(self, kind: str, handle: Callable[[Change], Awaitable[None]]) -> None:
        while True:
            try:
                async for event in self._store.watch(kind):
                    await handle(event)
            except Expired as err:
                logger.info("watch fell behind, listing again", extra={"kind": kind, "why": str(err)})
                if kind == "Pod":
                    await self._forget_missing()

    async def _forget_missing(self) -> None:
        """A pod that went while the watch was blind has no DELETED event any more."""
        present = {meta(pod)["uid"] for pod in (await self._store.list("Pod")).items}
        for uid, life in list(self._lives.items()):
            if uid not in present:
                self.spawn(self._end(life, grace_s=0.0), name=f"kill of {life.key[1]}")

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str, lasting: bool = False) -> None:
        """A task of this run, for as long as the kubelet is there; one that is lasting must not end by itself."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, lasting=lasting))

    def _done(self, task: asyncio.Task[None], *, lasting: bool) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        failure = task.exception() or (InvariantBroken(f"{task.get_name()} ended by itself") if lasting else None)
        if failure is not None:
            logger.error("%s ended", task.get_name(), exc_info=failure)
            self.failure = self.failure or failure


def _place(pod: Manifest) -> tuple[str, ...]:
    """What all attempts of a pod share: its name on the network."""
    spec, metadata = pod["spec"], meta(pod)
    return (metadata["namespace"], spec.get("subdomain", ""), spec.get("hostname", metadata["name"]))
