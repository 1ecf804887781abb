"""The resync: every job is passed over again once in a while."""

import asyncio
from dataclasses import replace

from rlinf_operator.manifests.metadata import JobKey
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_scheduler.service import Planning
from tests.builders import NOW, ppo_job
from tests.fakes.cluster import AUTHORITY, QUICK, Store
from tests.fakes.drivers import FakeDrivers


async def test_each_job_is_passed_over_again_though_nobody_says_anything_of_it():
    store = Store()
    drivers = FakeDrivers()
    reconciler = Reconciler(
        store=store, scheduler=Planning(store), drivers=lambda _: drivers, authority=AUTHORITY, clock=lambda: NOW,
        settings=replace(QUICK, resync_s=0.05), follows=(),
    )  # fmt: skip
    task = asyncio.create_task(reconciler.run())
    try:
        keys = [JobKey(namespace=namespace, name="math") for namespace in ("team-a", "team-b")]
        for key in keys:
            await store.create(ppo_job(namespace=key.namespace).build())
            reconciler.enqueue(key)
        for key in keys:
            await until_passed(store, key)
        for key in keys:  # as if its news had been lost
            job = await store.get("RLJob", key.name, namespace=key.namespace)
            await store.replace({**job, "spec": {**job["spec"], "suspend": True}})
            await until_passed(store, key, generation=2)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_passed(store, key, generation=1):
    """A pass leaves a status."""
    async with asyncio.timeout(10):
        while True:
            job = await store.get("RLJob", key.name, namespace=key.namespace)
            if job["status"].get("observedGeneration") == generation:
                return
            await asyncio.sleep(0.01)


async def test_a_job_that_is_enqueued_is_due_at_once_and_one_with_a_pause_is_not():
    store = Store()
    reconciler = Reconciler(
        store=store, scheduler=Planning(store), drivers=lambda _: FakeDrivers(), authority=AUTHORITY, clock=lambda: NOW,
        settings=QUICK, follows=(),
    )  # fmt: skip
    reconciler.enqueue(JobKey(namespace="team", name="later"), after_s=60.0)
    assert reconciler.overdue() == (0, 0.0)
    reconciler.enqueue(JobKey(namespace="team", name="now"))
    assert reconciler.overdue()[0] == 1
