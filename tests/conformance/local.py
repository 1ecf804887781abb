"""Worlds without a cluster: the control plane of `rljob run`, in this process, with processes for pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rlinf_api.errors import WorkerUnreachable
from rlinf_api.plan import Planned
from rlinf_api.store import Expired
from rlinf_operator.clients.scheduler import Scheduler
from rljob.local.runner import NAMESPACE, LocalControlPlane
from tests.conformance.world import CLAIM, ENVS_MOUNT, LIVES, SIDECAR, Manifest, World


class Switch:
    """A scheduler that can be away, as the operator's client tells it."""

    def __init__(self, planning: Scheduler) -> None:
        self._planning, self.away = planning, False

    async def request_plan(self, job: Manifest, *, reason: str, highest_revision: int) -> Planned:
        if self.away:
            raise WorkerUnreachable("the scheduler gave no plan", got="UNAVAILABLE", next="it is asked again")
        return await self._planning.request_plan(job, reason=reason, highest_revision=highest_revision)


class LocalWorld(World):
    def __init__(self, work_dir: Path) -> None:
        self.plane = LocalControlPlane(work_dir)
        self.plane.scheduler = self._switch = Switch(self.plane.scheduler)
        self.store, self.namespace = self.plane.store, NAMESPACE
        self.folder = work_dir / "claims" / CLAIM
        self.folder.mkdir(parents=True)

    async def inject(self) -> None:
        create = self.store.create

        async def admitted(obj: Manifest) -> Manifest:
            if obj["kind"] == "Pod":
                sidecar = {"name": SIDECAR, "command": LIVES}
                obj = obj | {"spec": obj["spec"] | {"containers": [sidecar, *obj["spec"]["containers"]]}}
            return await create(obj)

        self.store.create = admitted  # type: ignore[method-assign]  # as an API server's admission: for whoever calls

    async def changes(self, opened: asyncio.Event) -> AsyncIterator[tuple[str, Manifest]]:
        watch = self.plane.store.watch("RLJob", namespace=NAMESPACE)
        opened.set()
        try:
            async for event in watch:
                yield event.type, event.object
        except Expired as error:
            raise AssertionError("a watch that has a gap records no sequence") from error

    async def listed(self, kind: str) -> list[Manifest]:
        return (await self.plane.store.list(kind, namespace=NAMESPACE)).items

    def python_path(self) -> str:
        return ENVS_MOUNT  # what is installed here is found without

    async def scheduler_away(self) -> None:
        self._switch.away = True

    async def scheduler_back(self) -> None:
        self._switch.away = False


class LocalBackend:
    name, at_once = "local", 3

    @asynccontextmanager
    async def world(self, folder: Path) -> AsyncIterator[World]:
        made = LocalWorld(folder)
        async with made.plane:
            try:
                await made.prepare()
                yield made
            finally:
                made.plane.hurry()
