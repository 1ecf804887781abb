"""A namespace with a ResourceQuota of pods, and what a kubelet and a user do in it.

world = World()
await world.apply(ppo_job())
world.quota.most = 4
await world.passes(8)
"""

from rlinf_api import times
from rlinf_api.errors import RLinfError
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_scheduler.service import Planning
from rljob.local.store import MemoryStore
from tests.builders import NOW
from tests.fakes.cluster import AUTHORITY, KEY, QUICK, Cluster, Store


class Quota(Store):
    """`most` pods at once, as a ResourceQuota counts them: those that have not ended."""

    most = 1000
    binds = False
    """Pods have a node, so that one that is deleted stays until its kubelet has ended it."""

    @staticmethod
    def _refusal(old, new):
        """Its CRDs are from before pods' inputs were held: an edit of them reaches the operator."""
        return ""

    async def create(self, obj):
        if obj["kind"] == "Pod":
            obj = {**obj, "spec": {**obj["spec"], "nodeName": "n1"}} if self.binds else obj
            pods = (await self.list("Pod", namespace="team")).items
            if sum(1 for p in pods if p["status"]["phase"] not in ("Failed", "Succeeded")) >= self.most:
                raise RLinfError("pods are forbidden: exceeded quota")
        return await super().create(obj)


class World(Cluster):
    def __init__(self):
        self.quota, self.now = Quota(), NOW
        super().__init__(self.quota)

    def restart(self):
        super().restart()
        self.reconciler = Reconciler(
            store=self.store, scheduler=Planning(self.store), drivers=lambda _: self.drivers, authority=AUTHORITY,
            settings=QUICK, clock=lambda: self.now,
        )  # fmt: skip

    async def passes(self, number):
        applied = None
        for _ in range(number):
            applied = await self.reconciler.pass_over(KEY)
            await self.kubelet()
        assert applied is not None
        return applied

    async def exits(self, pod, code=1):
        ended = {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": times.text(self.now)}}
        status = {"phase": "Failed", "containerStatuses": [{"name": "agent", "state": ended}]}
        await MemoryStore.patch(
            self.store, "Pod", pod, namespace="team", patch={"status": status}, subresource="status"
        )

    async def end_deleted(self):
        """What a kubelet does with pods that are being deleted, seen by two passes."""
        going = [p for p in (await self.store.list("Pod")).items if "deletionTimestamp" in p["metadata"]]
        for pod in going:
            await self.exits(pod["metadata"]["name"], 143)
        await self.passes(1)
        for pod in going:
            await self.store.delete("Pod", pod["metadata"]["name"], namespace="team", grace_period_s=0)
        await self.passes(1)

    async def edit(self, **spec):
        await self.store.patch("RLJob", "math", namespace="team", patch={"spec": spec})

    def events(self, reason):
        return [e for (kind, _, _), e in self.store._objects.items() if kind == "Event" and e["reason"] == reason]
