"""A job that is deleted and made again at once, under its old name."""

import asyncio
from dataclasses import replace

from rlinf_operator.reconcile.loop import Reconciler
from rlinf_operator.reconcile.queue import WorkQueue
from rlinf_scheduler.service import Planning
from tests.builders import NOW, ppo_job
from tests.fakes.cluster import AUTHORITY, KEY, QUICK, Cluster, Store


async def test_a_wish_that_comes_while_its_key_is_in_work_outlives_its_being_forgotten():
    queue: WorkQueue[str] = WorkQueue(coalesce_s=60)
    queue.add("a")
    assert await queue.take() == "a"
    queue.add("a")
    queue.forget("a")
    queue.done("a")
    async with asyncio.timeout(5):
        assert await queue.take() == "a", "without a pause, as it was never seen before"


class Late(Store):
    """`made_again` happens between the read that finds no job and its answer."""

    def __init__(self):
        super().__init__()
        self.reading, self.go_on = asyncio.Event(), asyncio.Event()
        self.slow = False

    async def get(self, kind, name, *, namespace="default", live=True):
        try:
            return await super().get(kind, name, namespace=namespace, live=live)
        finally:
            if kind == "RLJob" and self.slow:
                self.reading.set()
                await self.go_on.wait()


async def test_a_job_made_again_while_its_deletion_is_looked_at_does_not_wait_for_the_resync():
    store = Late()
    cluster = Cluster(store)
    await cluster.apply()
    await cluster.settle()
    cluster.reconciler = Reconciler(
        store=cluster.store, scheduler=Planning(cluster.store), drivers=lambda _: cluster.drivers, authority=AUTHORITY,
        settings=replace(QUICK, resync_s=300.0), clock=lambda: NOW, follows=(),
    )  # fmt: skip
    running = asyncio.create_task(cluster.reconciler.run())
    await cluster.store.delete("RLJob", "math", namespace="team")
    store.slow = True
    cluster.reconciler.enqueue(KEY)
    async with asyncio.timeout(5):
        await store.reading.wait()
    store.slow = False
    await cluster.store.create(ppo_job().build())
    cluster.reconciler.enqueue(KEY)  # ADDED
    store.go_on.set()

    async def planned():
        return await cluster.names("RLPlan")

    async with asyncio.timeout(5):
        while not await planned():
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
