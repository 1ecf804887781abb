"""An operator of the namespaces that have certain labels: which jobs it looks after, as labels come and go."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from rlinf_api.errors import DeadlineExceeded
from rlinf_operator import leading
from rlinf_operator.clients import reflector
from rlinf_operator.clients.cache import CachedStore
from rlinf_operator.handlers import rljobs
from rlinf_operator.handlers.known import KnownJobs, Sight
from rlinf_operator.handlers.probes import Probes
from rlinf_operator.manifests.metadata import JobKey
from rlinf_operator.metrics import Metrics
from rlinf_operator.process import ProcessSettings
from rlinf_operator.reconcile.apply import Applied
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_scheduler.service import Planning
from tests.builders import NOW, ppo_job
from tests.fakes.api_server import FakeApiServer
from tests.fakes.cluster import AUTHORITY, QUICK, Store
from tests.fakes.drivers import FakeDrivers

OURS, THEIRS = "team-a", "team-b"
TIMEOUT_S = 15.0


@pytest.fixture
async def server(monkeypatch):
    monkeypatch.setattr(rljobs, "BACKOFFS_S", (0.01, 0.05))
    monkeypatch.setattr(reflector, "RETRY_MAX_S", 0.2)
    async with FakeApiServer(discovery=True) as made:
        label(made, OURS, rlinf="yes")
        label(made, THEIRS)
        for namespace in (OURS, THEIRS):
            made.put(ppo_job(namespace=namespace).build())
        yield made


def label(server, name, **labels):
    server.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "namespace": "", "labels": labels}})


def written(server, namespace):
    return server.count("PUT", f"/namespaces/{namespace}/rljobs/math/status")


async def until(holds, what):
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():
            await asyncio.sleep(0.01)
    assert holds(), what


@asynccontextmanager
async def leader(server, monkeypatch, folder, **process):
    """All of it together: lists, Kopf, known jobs, passes."""

    async def nothing():
        """The certificates are there."""

    certificates = SimpleNamespace(authority=AUTHORITY, begin=nothing, run=asyncio.Event().wait)
    monkeypatch.setattr(leading, "Certificates", lambda *_, **__: certificates)
    AUTHORITY.write_folder(folder, "operator")
    probes = Probes(server.metrics)
    made = leading.Leader(
        server.connection, standing=server.connection, probes=probes, folder=folder, metrics=server.metrics,
        process=ProcessSettings(watch_stale_s=100, **process),
        operator=replace(QUICK, scheduler_address="127.0.0.1:1"),
    )  # fmt: skip
    task = asyncio.create_task(made.run())
    try:
        yield probes
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_jobs_are_run_where_the_labels_are_and_from_when_they_are(server, monkeypatch, tmp_path):
    jobs = "rlinf_operator_jobs"
    async with leader(server, monkeypatch, tmp_path, watch_namespace_selector="rlinf=yes") as probes:
        await until(lambda: written(server, OURS), "a pass in the namespace with the label")
        assert written(server, THEIRS) == 0
        assert "watch of Namespace" in probes.checks
        probes.before_scrape()
        assert server.metrics.registry.get_sample_value(jobs, {"state": "Pending"}) == 1
        label(server, THEIRS, rlinf="yes", more="x")
        await until(lambda: written(server, THEIRS), "a pass in the namespace that got the label")
        probes.before_scrape()
        assert server.metrics.registry.get_sample_value(jobs, {"state": "Pending"}) == 2


async def test_jobs_of_a_namespace_that_loses_the_label_are_let_alone_as_they_are(server):
    told: list[str] = []
    store = CachedStore(
        server.client(), metrics=server.metrics, on_change=lambda obj: None, inactivity_s=30,
        namespace_selector="rlinf=yes", on_namespace=told.append,
    )  # fmt: skip
    async with asyncio.timeout(TIMEOUT_S):
        tasks = [asyncio.create_task(one.run()) for one in store.reflectors]
        await store.wait_listed(timeout_s=TIMEOUT_S)
    try:
        assert (store.runs_jobs_of(OURS), store.runs_jobs_of(THEIRS)) == (True, False)
        assert store.counts()["Namespace"] == 1
        label(server, OURS, rlinf="no")
        await until(lambda: not store.runs_jobs_of(OURS), "the label to be missed")
        label(server, OURS, rlinf="yes")
        await until(lambda: store.runs_jobs_of(OURS), "the label to be seen again")
        server.remove("Namespace", OURS, namespace="")
        await until(lambda: not store.runs_jobs_of(OURS), "the namespace to be missed")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert told == [OURS] * 4


async def test_a_pass_over_a_job_that_is_none_of_ours_any_more_reads_nothing_and_forgets_it():
    drivers, store = FakeDrivers(), Store()
    made = await store.create(ppo_job().build())
    key = JobKey(namespace=made["metadata"]["namespace"], name="math")
    served = {key.namespace}
    loop = Reconciler(
        store=store, scheduler=Planning(store), drivers=lambda _: drivers, authority=AUTHORITY, settings=QUICK,
        clock=lambda: NOW, runs_jobs_of=lambda namespace: namespace in served,
    )  # fmt: skip
    assert (await loop.pass_over(key)).progressed
    assert key in loop._memory
    served.clear()
    before = await store.get("RLJob", "math", namespace=key.namespace)
    assert await loop.pass_over(key) == Applied()
    assert await store.get("RLJob", "math", namespace=key.namespace) == before
    assert key not in loop._memory, "neither a resync nor its driver wakes it"


async def test_where_the_namespaces_cannot_be_listed_the_operator_says_so(server):
    server.fault(status=403, times=10**6, path="/api/v1/namespaces")
    store = CachedStore(
        server.client(), metrics=server.metrics, on_change=lambda obj: None, inactivity_s=30,
        namespace_selector="rlinf=yes",
    )  # fmt: skip
    tasks = [asyncio.create_task(one.run()) for one in store.reflectors]
    try:
        with pytest.raises(DeadlineExceeded, match=r"Namespace"):
            await store.wait_listed(timeout_s=0.5)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_known_jobs_of_a_namespace_are_looked_at_and_counted_where_they_are_run():
    woken, served = [], {OURS}
    known = KnownJobs(
        enqueue=lambda key, *, after_s=0.0: woken.append(key), metrics=Metrics(), look=Mock(), look_every_s=90,
        runs_jobs_of=lambda namespace: namespace in served,
    )  # fmt: skip
    keys = [JobKey(namespace=namespace, name="math") for namespace in (OURS, THEIRS)]
    for key in keys:
        known.seen(Sight(key=key, version=1, state="Pending"))
    woken.clear()
    assert known.counts()["Pending"] == 1
    served.add(THEIRS)
    known.look_at(THEIRS)
    assert (woken, known.counts()["Pending"]) == ([keys[1]], 2)
