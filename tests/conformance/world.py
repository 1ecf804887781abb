"""What a scenario may do to a world in which RLJobs run, whatever the world is made of: `local.py` or `in_cluster.py`.

A world is one namespace with a control plane over it and a folder that its pods see as MOUNT. Its objects are read and
written by the verbs of an ObjectStore; processes are found on this machine, where those of a test cluster are too.
Every wait has a deadline and a name.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, Protocol

import psutil

from rlinf_api import names
from rlinf_api.errors import RLinfError
from rlinf_operator.clients.objects import get_or_none

Manifest = dict[str, Any]
MOUNT: Final = "/shared"
ENVS_MOUNT: Final = "/opt/conformance"
ENVS_FILE: Final = Path(__file__).with_name("conformance_envs.py")
ACTOR_FILE: Final = Path(__file__).parents[1] / "fakes" / "light_actor.py"
CODE: Final = {file.name: file.read_text(encoding="utf-8") for file in (ENVS_FILE, ACTOR_FILE)}
"""What pods import of the suite: the data of a ConfigMap."""
CLAIM: Final = "shared"
WAIT_S: Final = 120.0
"""Of every wait: the longest takes about 10 s on idle cores, which several worlds share, and at times other work."""
SIDECAR: Final = "istio-proxy"
LIVES: Final = ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done"]
"""Until it is told to stop, as a mesh's proxy and a log shipper do."""
CHILDREN: Final = ("RLPlan", "Pod", "Service", "Secret", "ConfigMap", "NetworkPolicy")


class Store(Protocol):
    """The verbs that both the local store and the operator's client have."""

    async def create(self, obj: Manifest) -> Manifest: ...
    async def get(self, kind: str, name: str, *, namespace: str = "default") -> Manifest: ...
    async def patch(self, kind: str, name: str, *, patch: Manifest, namespace: str = "default") -> Manifest: ...
    async def delete(self, kind: str, name: str, *, namespace: str = "default") -> Any: ...


class Backend(Protocol):
    """Makes worlds, several at once."""

    name: str
    at_once: int
    """Worlds that run beside each other: as many as keep this machine's cores busy."""

    def world(self, folder: Path) -> AbstractAsyncContextManager[World]: ...


class World(ABC):
    store: Store
    namespace: str
    folder: Path
    """Here what pods see as MOUNT."""

    @abstractmethod
    def changes(self, opened: asyncio.Event) -> AsyncIterator[tuple[str, Manifest]]:
        """(ADDED | MODIFIED | DELETED, RLJob) of this namespace: every resourceVersion after `opened` was set."""

    @abstractmethod
    async def listed(self, kind: str) -> list[Manifest]:
        """All of this namespace, as of now."""

    @abstractmethod
    def python_path(self) -> str:
        """PYTHONPATH of worker pods, in which ENVS_MOUNT is."""

    @abstractmethod
    async def inject(self) -> None:
        """From now on each pod that is made has the container SIDECAR besides, before its own: what a mesh's webhook
        does."""

    @abstractmethod
    async def scheduler_away(self) -> None: ...

    @abstractmethod
    async def scheduler_back(self) -> None: ...

    async def prepare(self) -> None:
        """What the pods mount."""
        await self.store.create(
            {"kind": "ConfigMap", "metadata": {"name": "envs", "namespace": self.namespace}, "data": CODE}
        )

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def apply(self, manifest: Manifest) -> None:
        made = json.loads(json.dumps(manifest))
        made["metadata"]["namespace"] = self.namespace
        of_all = made["spec"].get("template", {}).get("spec", {})
        of_all |= {"containers": [self.container(**c) for c in of_all["containers"]]} if "containers" in of_all else {}
        for pool in made["spec"]["pools"]:
            beside = (pool.get("template") or {}).get("spec", {}).get("containers", [])
            pool["template"] = self.template()
            pool["template"]["spec"]["containers"] += [self.container(**container) for container in beside]
        await self.store.create(made)

    def container(self, **own: Any) -> Manifest:
        """One beside the agent, as the namespace admits it."""
        return own

    def template(self) -> Manifest:
        agent: Manifest = {
            "name": names.CONTAINER_AGENT,
            "env": [
                {"name": "PYTHONPATH", "value": self.python_path()},
                {"name": "CONFORMANCE_DIR", "value": MOUNT},
            ],
            "volumeMounts": [
                {"name": "envs", "mountPath": ENVS_MOUNT, "readOnly": True},
                {"name": "shared", "mountPath": MOUNT},
            ],
        }
        volumes: list[Manifest] = [
            {"name": "envs", "configMap": {"name": "envs"}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": CLAIM}},
        ]
        return {"spec": {"containers": [agent], "volumes": volumes}}

    async def edit(self, job: str, spec: Manifest) -> None:
        await self.store.patch("RLJob", job, patch={"spec": spec}, namespace=self.namespace)

    async def refused(self, job: str, spec: Manifest) -> str:
        """The sentence with which an edit is refused; empty: it was not."""
        try:
            await self.edit(job, spec)
        except RLinfError as error:
            return str(error)
        return ""

    async def delete(self, job: str) -> None:
        await self.store.delete("RLJob", job, namespace=self.namespace)

    async def job(self, name: str) -> Manifest | None:
        return await get_or_none(self.store, "RLJob", name, namespace=self.namespace)  # type: ignore[arg-type]

    async def children(self, job: str) -> list[Manifest]:
        """Objects that carry the job's label, each with its kind."""
        found = []
        for kind in CHILDREN:
            listed = await self.listed(kind)
            found += [o for o in listed if (o["metadata"].get("labels") or {}).get(names.LABEL_JOB) == job]
        return found

    async def is_gone(self, job: str) -> bool:
        return await self.job(job) is None and not await self.children(job)

    async def pod(self, job: str, component: str, *, pool: str = "", ordinal: int = 0) -> Manifest:
        """The newest of a place."""
        stem = f"{job}-{component}-a" if not pool else f"{job}-{pool}-{ordinal}-a"
        pods = [o for o in await self.children(job) if o["kind"] == "Pod" and o["metadata"]["name"].startswith(stem)]
        assert pods, f"job {job} has no pod {stem}*"
        return max(pods, key=lambda p: int(p["metadata"]["name"].rpartition("-a")[2]))

    async def delete_pod(self, job: str, component: str, *, pool: str = "", ordinal: int = 0) -> None:
        pod = await self.pod(job, component, pool=pool, ordinal=ordinal)
        await self.store.delete("Pod", pod["metadata"]["name"], namespace=self.namespace)

    # --- processes ----------------------------------------------------------------------------------------------------

    async def kill(self, job: str, part: str, *, pool: str = "cpu") -> None:
        """SIGKILL to `driver`, `agent`, or a worker such as `env/0`."""
        component = "driver" if part == "driver" else "worker"
        pod = await self.pod(job, component, pool="" if component == "driver" else pool)
        await self.until(lambda: _kill(pod["metadata"]["uid"], part), what=f"a process of {part} to kill")

    # --- the folder ---------------------------------------------------------------------------------------------------

    def touch(self, name: str) -> None:
        (self.folder / name).write_text("")

    def untouch(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def until(self, holds: Callable[[], Any], *, what: str, timeout_s: float = WAIT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            found = holds()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
            await asyncio.sleep(0.05)


def _kill(pod_uid: str, part: str) -> bool:
    """False where there is none, or it ended by itself a moment ago."""
    process = _process(pod_uid, part)
    if process is None:
        return False
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def _process(pod_uid: str, part: str) -> psutil.Process | None:
    """Of all processes of this machine: a pod's have its uid in their environment, in a container too. The oldest: a
    child that has just been forked still has its parent's command."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if "rlinf_worker" not in command or process.environ().get(names.ENV_POD_UID) != pod_uid:
                continue
            is_worker = command[-1] == "worker" and process.environ().get(names.ENV_WORKER_ID) == part
            if is_worker or (part in ("driver", "agent") and command[-1] == part):
                found.append((process.create_time(), process.pid, process))
        except psutil.Error:
            continue
    return min(found)[2] if found else None
