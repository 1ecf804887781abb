"""One job without a cluster: an in-memory API server, the operator's own loop over it, the scheduler's planning in
process, and processes for pods. The same objects, the same decisions, the same manifests as on a cluster.

    async with LocalRun(manifest, spec, work_dir=...) as local:
        async for job in local.changes(): ...        # the RLJob as the API server holds it, after every change
        await local.suspend()                        # Ctrl-C: drain, checkpoint

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| Reconciler.run | changes of the store, drivers' reports | a due key | store, drivers |
| Jobs.run | drivers' profiles | see rlinf_scheduler/jobs.py | the scheduler's server |
| LocalKubelet's | pods of the store | see kubelet.py | store |
| _dump | the store | 0.5 s | time |
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import grpc.aio

from rlinf_api import names, rpc, times
from rlinf_api.errors import UserError
from rlinf_api.job import PlacementMode, RLJobSpec, dump
from rlinf_api.profile import Profile
from rlinf_api.store import Expired
from rlinf_operator.clients.authority import Authority
from rlinf_operator.clients.driver import GrpcDrivers
from rlinf_operator.clients.scheduler import Scheduler
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_operator.settings import OperatorSettings
from rlinf_scheduler.jobs import plan_manifest
from rlinf_scheduler.service import ALLOWED, Planning, serve_on
from rljob import by_hand
from rljob.local import room
from rljob.local.containers import checkpoint_uri
from rljob.local.control import Control
from rljob.local.dump import Dump, write_atomically
from rljob.local.kubelet import LocalKubelet
from rljob.local.store import MemoryStore

logger = logging.getLogger(__name__)
NAMESPACE: Final = "default"
DUMP_INTERVAL_S: Final = 0.5  # objects/ is for people: twice a second is as live as they can read
SCHEDULER_HOST: Final = "127.0.0.1"  # pods of this machine alone call it
IDENTITY_FILE: Final = "job.json"
TLS_BYTES: Final = 16_384  # three files of less than a page each, and their folder


class WorkDir:
    """A folder that belongs to one job; locked while a run is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: IO[str] | None = None

    @property
    def log(self) -> Path:
        """What rljob itself logs, operator and kubelet included."""
        return self.path / "logs" / "rljob.log"

    def claim(self, name: str, spec: RLJobSpec) -> None:
        """UserError where the folder is another job's, or in use."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise self._unusable(str(error)) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another rljob runs in {self.path}", next="wait for it or choose another --work-dir"
            ) from error
        except OSError as error:  # a network disk without a lock service, a file system of a virtual machine's host
            got = room.told(error, self.path / ".lock")
            raise self._unusable(got, wanted="a file system with file locks") from error
        mine = {"name": name, "flow": spec.flow.name, "seed": spec.seed, "roles": {r.name: r.kind for r in spec.roles}}
        identity = self.path / IDENTITY_FILE
        try:
            if not identity.exists():
                write_atomically(identity, json.dumps(mine, indent=1) + "\n")
                return
            known = json.loads(identity.read_text(encoding="utf-8"))
            if not isinstance(known, dict):
                raise ValueError(f"a {type(known).__name__}, not an object")
        except OSError as error:
            raise self._unusable(room.told(error, identity), next="make room, or choose another --work-dir") from error
        except ValueError as error:
            raise UserError(f"{identity} is not readable", got=str(error), next="choose another --work-dir") from error
        different = [key for key, value in mine.items() if known.get(key) != value]
        if different:
            raise UserError(
                f"work dir {self.path} is of another job",
                got=", ".join(f"{key} {mine[key]!r}" for key in different),
                wanted=", ".join(f"{key} {known.get(key)!r}" for key in different),
                next="choose another --work-dir, or go on with the job that it is of",
            )

    def _unusable(self, got: str, *, wanted: str = "", next: str = "choose another --work-dir") -> UserError:
        return UserError(f"work dir {self.path} cannot be used", got=got, wanted=wanted, next=next)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()


class LocalControlPlane:
    """What a cluster has, without its jobs: the store, the kubelet, the operator's loop, the scheduler. Jobs are
    objects of `store`, in NAMESPACE; `rljob run` makes one, the conformance suite several."""

    def __init__(self, work_dir: Path) -> None:
        self.work_dir = work_dir
        self.store = MemoryStore()
        self.kubelet = LocalKubelet(self.store, work_dir)
        self.planning = Planning(self.store)  # drivers report to it
        self.scheduler: Scheduler = self.planning  # the operator asks it
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._begin()
        except BaseException:
            await self._stack.aclose()  # nobody calls __aexit__ of what did not begin
            raise
        return self

    async def _begin(self) -> None:
        authority = Authority.new(clock=times.utc_now)
        await self._stack.enter_async_context(self.kubelet)
        tls = self._certificate(authority, "operator")
        settings = OperatorSettings(
            scheduler_address=await self._serve_scheduler(self._certificate(authority, "scheduler")),
            default_checkpoint_uri=checkpoint_uri(self.work_dir),
            progress_interval_s=0.5,
            coalesce_s=0.02,
            retry_min_s=0.1,
        )
        reconciler = Reconciler(
            store=self.store,
            scheduler=self.scheduler,
            drivers=lambda on_change: GrpcDrivers(
                tls=tls, on_change=on_change, timeout_s=settings.call_timeout_s, late_s=settings.driver_late_s
            ),
            authority=authority,
            settings=settings,
        )
        self.kubelet.spawn(reconciler.run(), name="operator", lasting=True)

    def _certificate(self, authority: Authority, part: str) -> rpc.TlsFolder:
        folder = self.kubelet.memory / f"{part}-tls"
        try:
            authority.write_folder(folder, part)
        except OSError as error:
            raise UserError(
                "the certificate of this run cannot be written", got=room.told(error, folder),
                wanted=f"{TLS_BYTES} bytes that never reach a disk",
                next=f"make room in {self.kubelet.memory.parent} (df -h, ls -l), or give it more",
            ) from error  # fmt: skip
        return rpc.TlsFolder(folder)

    async def _serve_scheduler(self, tls: rpc.TlsFolder) -> str:
        """For drivers, which report profiles; the operator calls it in this process. Its address."""
        self.kubelet.spawn(self.planning.jobs.run(), name="scheduler", lasting=True)
        server = grpc.aio.server(interceptors=[rpc.Gatekeeper(ALLOWED, job_uid="*")], options=rpc.SERVER_OPTIONS)
        serve_on(server, self.planning)
        port = rpc.bind(server, f"{SCHEDULER_HOST}:0", tls=tls)
        self._stack.push_async_callback(server.stop, None)
        await server.start()
        return f"{SCHEDULER_HOST}:{port}"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def hurry(self) -> None:
        """The end of this run gives pods no grace."""
        self.kubelet.stop_timeout_s = 0.0


class LocalRun(LocalControlPlane):
    """The control plane with the one job of `rljob run`, and a view of its objects for people."""

    def __init__(
        self,
        manifest: dict[str, Any],
        spec: RLJobSpec,
        *,
        work_dir: WorkDir,
        plan: dict[str, Any] | None = None,
        profiles: tuple[Profile, ...] = (),
    ) -> None:
        """`plan`: the first one, by hand (by_hand.first); None: the scheduler makes it, by `profiles` where given."""
        super().__init__(work_dir.path)
        if profiles:
            self.planning.jobs.remember(profiles)
        self._uid, self._told = "", 0
        self.name = str(manifest["metadata"]["name"])
        self._writer, self._stale = Dump(self.work_dir / "objects"), False
        self._spec = dump(spec)
        self._manifest = {
            "apiVersion": names.API_VERSION,
            "kind": "RLJob",
            "metadata": {**manifest["metadata"], "namespace": NAMESPACE},
            "spec": self._spec,
        }
        self._plan = plan

    async def _begin(self) -> None:
        self._stack.callback(self._write_objects)  # the last of all, with what became of the pods
        await super()._begin()
        self.kubelet.spawn(self._dump(), name="dump", lasting=True)
        door = Control(self.store, job=self.name, namespace=NAMESPACE, work_dir=self.work_dir)
        await self._stack.enter_async_context(door)
        await self._create()

    async def _create(self) -> None:
        """The job, and its first plan where a person wrote it: pinned, as on a cluster, so that none is asked for."""
        if self._plan is None:
            self._uid = (await self.store.create(self._manifest))["metadata"]["uid"]
            return
        revision = by_hand.filled_in(self._plan, job=self.name, uid="", revision=1).revision
        placement = {"mode": str(PlacementMode.PINNED), "pin": names.plan_name(self.name, revision)}
        pinned = {**self._manifest, "spec": {**self._spec, "placement": placement}}
        self._uid = (await self.store.create(pinned))["metadata"]["uid"]
        plan = by_hand.filled_in(self._plan, job=self.name, uid=self._uid, revision=revision)
        await self.store.create(plan_manifest(plan, namespace=NAMESPACE))

    async def changes(self) -> AsyncIterator[dict[str, Any]]:
        """The RLJob after every change; ends when it is deleted."""
        while True:
            try:
                async for event in self.store.watch("RLJob", namespace=NAMESPACE):
                    if event.type == "DELETED":
                        return
                    yield event.object
            except Expired:
                continue

    async def job(self) -> dict[str, Any]:
        """The RLJob as it is now."""
        return await self.store.get("RLJob", self.name, namespace=NAMESPACE)

    async def suspend(self) -> None:
        await self.store.patch("RLJob", self.name, patch={"spec": {"suspend": True}}, namespace=NAMESPACE)

    async def _dump(self) -> None:
        while True:
            await asyncio.sleep(DUMP_INTERVAL_S)
            self._write_objects()

    def _write_objects(self) -> None:
        """What finds no room is written with the first pass that finds some: a view costs no job."""
        try:
            self._writer.write(self.store.snapshot())
            self._write_profiles()
        except OSError as error:
            if not self._stale:
                logger.warning("objects/ is not written: %s; make room there", room.told(error, self._writer.folder))
            self._stale = True
        else:
            self._stale = False

    def _write_profiles(self) -> None:
        """What the scheduler knows, for `rljob plan what-if` and for a further run that begins with it."""
        reports = self.planning.jobs.of(self._uid)
        if not reports or reports[-1].last_step == self._told:
            return
        write_atomically(self.work_dir / names.PROFILES_FILE, "".join(f"{report.to_json()}\n" for report in reports))
        self._told = reports[-1].last_step


def default_work_dir(name: str) -> Path:
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
