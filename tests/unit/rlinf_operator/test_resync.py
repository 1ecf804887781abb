"""The resync: every job is passed over again once in a while, in the namespaces that the operator may read."""

import asyncio
import contextlib
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlinf_api.errors import InvariantBroken, RLinfError
from rlinf_operator import leading
from rlinf_operator.handlers.probes import Probes
from rlinf_operator.manifests.metadata import JobKey
from rlinf_operator.process import ProcessSettings
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_scheduler.service import Planning
from tests.builders import NOW, ppo_job
from tests.fakes.api_server import FakeApiServer
from tests.fakes.cluster import AUTHORITY, QUICK, Store
from tests.fakes.drivers import FakeDrivers


class Roles(Store):
    """What an operator with Roles alone may list, and no ClusterRole."""

    def __init__(self, *namespaces):
        super().__init__()
        self.namespaces = namespaces

    async def list(self, kind, *, namespace=None, **more):
        if kind == "RLJob" and namespace not in self.namespaces:
            raise RLinfError(f"list of RLJob in {namespace or 'all namespaces'}: 403 Forbidden")
        return await super().list(kind, namespace=namespace, **more)


@contextlib.asynccontextmanager
async def resyncing(store, *namespaces):
    """A reconciler that nobody tells of any job; gives the keys of its passes."""
    drivers = FakeDrivers()
    reconciler = Reconciler(
        store=store, scheduler=Planning(store), drivers=lambda _: drivers, authority=AUTHORITY, clock=lambda: NOW,
        settings=replace(QUICK, resync_s=0.05), namespaces=namespaces, follows=(),
    )  # fmt: skip
    task = asyncio.create_task(reconciler.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_passed(store, *keys):
    """A pass leaves a status."""
    async with asyncio.timeout(10):
        for key in keys:
            while not (await store.get("RLJob", key.name, namespace=key.namespace))["status"].get("conditions"):
                await asyncio.sleep(0.01)


async def jobs_in(store, *namespaces):
    for namespace in namespaces:
        await store.create(ppo_job(namespace=namespace).build())
    return [JobKey(namespace=namespace, name="math") for namespace in namespaces]


async def test_an_operator_of_some_namespaces_resyncs_the_jobs_of_each():
    store = Roles("team-a", "team-b")
    one, two = await jobs_in(store, "team-a", "team-b")
    async with resyncing(store, "team-a", "team-b"):
        await until_passed(store, one, two)


async def test_a_namespace_that_refuses_costs_the_others_nothing(caplog):
    caplog.set_level(logging.WARNING)
    store = Roles("team-b")
    _, two = await jobs_in(store, "team-a", "team-b")
    async with resyncing(store, "team-a", "team-b"):
        await until_passed(store, two)
    (first, *_) = [r for r in caplog.records if r.getMessage() == "resync failed"]
    assert first.__dict__["namespace"] == "team-a"


async def test_an_operator_of_all_namespaces_asks_once():
    store = Roles(None)
    one, two = await jobs_in(store, "team-a", "team-b")
    async with resyncing(store):
        await until_passed(store, one, two)


async def test_the_leader_resyncs_the_namespaces_that_it_watches(monkeypatch, tmp_path):
    given = {}

    def reconciler(**options):
        given.update(options)
        raise InvariantBroken("the test has seen enough")

    async def certificates(leader):
        return SimpleNamespace(authority=AUTHORITY)

    monkeypatch.setattr(leading, "Reconciler", reconciler)
    monkeypatch.setattr(leading.Leader, "_certificates", certificates)
    process = ProcessSettings(watch_namespaces="team-a, team-b")
    async with FakeApiServer() as server:
        leader = leading.Leader(
            server.client(), standing=server.client(), process=process, operator=QUICK, metrics=server.metrics,
            probes=Probes(server.metrics), folder=tmp_path,
        )  # fmt: skip
        with pytest.raises(InvariantBroken, match="seen enough"):
            await leader.run()
    assert given["namespaces"] == ("team-a", "team-b")


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
