"""The resync: every job is passed over again once in a while."""

import asyncio
from dataclasses import replace

import pytest

from rlinf_operator.manifests.metadata import JobKey
from rlinf_operator.reconcile import loop
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


async def test_of_finished_jobs_a_resync_looks_at_one_a_second_those_first_that_waited_longest(monkeypatch):
    """Ten thousand that are kept would be 33 GETs a second."""
    store = Store()
    reconciler = Reconciler(
        store=store, scheduler=Planning(store), drivers=lambda _: FakeDrivers(), authority=AUTHORITY, clock=lambda: NOW,
        settings=replace(QUICK, resync_s=300.0), follows=(),
    )  # fmt: skip
    wishes: dict[str, float] = {}
    monkeypatch.setattr(reconciler, "enqueue", lambda key, *, after_s=0.0: wishes.update({key.name: after_s}))
    for number in range(1000):
        key = JobKey(namespace="team", name=f"old-{number}")
        reconciler._memory[key] = loop._Pace(finished=True, passed_at=float(-number))
    for number in range(10):
        reconciler._memory[JobKey(namespace="team", name=f"new-{number}")] = loop._Pace()

    async def once(seconds):
        assert seconds == 300.0
        if wishes:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", once)
    with pytest.raises(asyncio.CancelledError):
        await reconciler._resync()
    finished = {name for name in wishes if name.startswith("old")}
    assert finished == {f"old-{number}" for number in range(700, 1000)}
    assert len(wishes) - len(finished) == 10, "each that is not finished"
    assert max(wishes.values()) < 300.0
    assert sorted(wishes.values())[155] == 150.0, "evenly"


async def test_a_job_that_a_pass_finds_gone_is_told_of_and_one_of_another_controller_is_not():
    store = Store()
    gone: list[JobKey] = []
    reconciler = Reconciler(
        store=store, scheduler=Planning(store), drivers=lambda _: FakeDrivers(), authority=AUTHORITY, clock=lambda: NOW,
        settings=QUICK, follows=(), on_gone=gone.append,
    )  # fmt: skip
    made = ppo_job(namespace="default").build()
    await store.create(made | {"spec": {**made["spec"], "managedBy": "kueue.x-k8s.io/multikueue"}})
    there, away = (JobKey(namespace="default", name=name) for name in ("math", "other"))
    for key in (there, away):
        await reconciler.pass_over(key)
    assert gone == [away]


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
