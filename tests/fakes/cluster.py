"""Passes of the operator over the in-memory store, one by one, with a kubelet that starts every pod at once.

cluster = Cluster()
await cluster.apply(ppo_job())
await cluster.settle()                     # eight passes, each followed by the kubelet
cluster.store.refuse["create", "Pod"] = RLinfError("no")
cluster.store.crash_at = 3                 # the third write from here raises Crash
"""

from rlinf_api import times
from rlinf_operator.clients.authority import Authority
from rlinf_operator.manifests.metadata import JobKey
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_operator.settings import OperatorSettings
from rlinf_scheduler.service import Planning
from rljob.local.store import MemoryStore
from tests.builders import NOW, ppo_job
from tests.fakes.drivers import FakeDrivers

KEY = JobKey(namespace="team", name="math")
QUICK = OperatorSettings(coalesce_s=0.0, retry_min_s=0.01, resync_s=0.2, progress_interval_s=0.0)
AUTHORITY = Authority.new(clock=lambda: NOW)


class Crash(Exception):
    """No error of the system's: the process dies here."""


class Store(MemoryStore):
    """Counts writes; dies at the n-th of them, before or after it is done; refuses what it is told to."""

    def __init__(self):
        super().__init__(clock=lambda: NOW)
        self.writes = []
        self.crash_at = None
        self.crash_after = False
        self.refuse = {}

    async def _write(self, verb, kind, name, call):
        if (verb, kind) in self.refuse:
            raise self.refuse[verb, kind]
        self.writes.append((verb, kind, name))
        due = self.crash_at is not None and len(self.writes) == self.crash_at
        if due and not self.crash_after:
            raise Crash
        done = await call()
        if due:
            raise Crash
        return done

    async def create(self, obj):
        name = obj["metadata"].get("name", "?")
        create = super().create
        return await self._write("create", obj["kind"], name, lambda: create(obj))

    async def replace(self, obj, *, subresource=""):
        replace = super().replace
        call = lambda: replace(obj, subresource=subresource)  # noqa: E731
        return await self._write("replace", obj["kind"], obj["metadata"]["name"], call)

    async def patch(self, kind, name, **kwargs):
        patch = super().patch
        return await self._write("patch", kind, name, lambda: patch(kind, name, **kwargs))

    async def delete(self, kind, name, **kwargs):
        delete = super().delete
        return await self._write("delete", kind, name, lambda: delete(kind, name, **kwargs))


class Cluster:
    def __init__(self, store=None):
        self.store = store or Store()
        self.restart()

    def restart(self):
        """The operator's process is new; the cluster and the drivers stay."""
        self.drivers = getattr(self, "drivers", None) or FakeDrivers()
        self.reconciler = Reconciler(
            store=self.store, scheduler=Planning(self.store), drivers=lambda _: self.drivers, authority=AUTHORITY,
            settings=QUICK, clock=lambda: NOW,
        )  # fmt: skip

    async def apply(self, job=None):
        await self.store.create((job or ppo_job()).build())
        self.store.writes.clear()

    async def settle(self, passes=8):
        for _ in range(passes):
            await self.reconciler.pass_over(KEY)
            await self.kubelet()

    async def kubelet(self):
        for pod in (await self.store.list("Pod", namespace="team")).items:
            if pod["status"]["phase"] == "Pending" and "deletionTimestamp" not in pod["metadata"]:
                main = pod["spec"]["containers"][0]["name"]
                status = {
                    "phase": "Running",
                    "podIP": "10.0.0.9",
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "containerStatuses": [{"name": main, "state": {"running": {"startedAt": times.text(NOW)}}}],
                }
                await MemoryStore.patch(
                    self.store, "Pod", pod["metadata"]["name"], namespace="team", patch={"status": status},
                    subresource="status",
                )  # fmt: skip

    async def status(self):
        return (await self.store.get("RLJob", "math", namespace="team"))["status"]

    async def condition(self, kind):
        found = next(c for c in (await self.status())["conditions"] if c["type"] == kind)
        return found["status"], found["reason"], found["message"]

    async def names(self, kind):
        return [o["metadata"]["name"] for o in (await self.store.list(kind, namespace="team")).items]
