"""A listed namespace that is deleted takes the operator's Role there along: the others go on, and it may come back."""

import asyncio
import itertools
import logging
from dataclasses import replace
from types import SimpleNamespace

import kopf
import pytest

from rlinf_api import names
from rlinf_api.errors import RLinfError
from rlinf_operator import __main__ as main
from rlinf_operator import leading
from rlinf_operator.clients import reflector
from rlinf_operator.clients.cache import CACHED, OPTIONAL, CachedStore
from rlinf_operator.clients.refusals import NamespaceRefused, Refusals
from rlinf_operator.handlers import rljobs
from rlinf_operator.handlers.known import Sight
from rlinf_operator.handlers.probes import Probes
from rlinf_operator.manifests.metadata import JobKey
from rlinf_operator.process import ProcessSettings
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_scheduler.service import Planning
from tests.builders import NOW, ppo_job
from tests.fakes.api_server import FakeApiServer
from tests.fakes.cluster import AUTHORITY, QUICK, Store
from tests.fakes.drivers import FakeDrivers

A, B = "team-a", "team-b"
SELECTOR = f"{names.LABEL_JOB_UID}=u1"
OURS = [kind for kind in CACHED if kind not in OPTIONAL]
TIMEOUT_S = 15.0
FOREVER = 10**6


def pod(namespace, name="p"):
    labels = {names.LABEL_JOB: "math", names.LABEL_JOB_UID: "u1"}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {}, "status": {"phase": "Running"},
    }  # fmt: skip


def job(namespace, **spec):
    return {
        "apiVersion": names.API_VERSION, "kind": "RLJob", "metadata": {"name": "math", "namespace": namespace},
        "spec": spec,
    }  # fmt: skip


@pytest.fixture
async def server(monkeypatch):
    monkeypatch.setattr(reflector, "RETRY_MAX_S", 0.2)
    async with FakeApiServer(discovery=True) as made:
        for namespace in (A, B):
            made.put(pod(namespace))
            made.put(job(namespace))
        yield made


def refuse(server, namespace, **more):
    """What a deleted namespace looks like to somebody with Roles alone. Returns what ends it."""
    server.fault(status=403, times=FOREVER, path=f"/namespaces/{namespace}/", reason="Forbidden", **more)
    fault = server._faults[-1]

    def again():
        fault.times = 0

    server.break_watches()
    return again


class Operator:
    """The parts that ask in each namespace, as leading.py puts them together."""

    def __init__(self, server, *namespaces):
        self.changes: list[str] = []
        self.refusals = Refusals(metrics=server.metrics, on_change=self.changes.append)
        self.store = CachedStore(
            server.client(), metrics=server.metrics, on_change=lambda obj: None, inactivity_s=30,
            namespaces=namespaces, refusals=self.refusals,
        )  # fmt: skip

    async def __aenter__(self):
        self._tasks = [asyncio.create_task(r.run()) for r in self.store.reflectors]
        return self

    async def __aexit__(self, *_):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def pods(self, namespace):
        listing = await self.store.list("Pod", namespace=namespace, label_selector=SELECTOR)
        return {obj["metadata"]["name"] for obj in listing.items}


async def until(holds, what):
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():
            await asyncio.sleep(0.01)
    assert holds(), what


def refused(server, namespace, kind="Pod"):
    labels = {"namespace": namespace, "kind": kind}
    return server.metrics.registry.get_sample_value("rlinf_operator_namespace_refused", labels)


def said(caplog, sentence):
    return [r.__dict__["namespace"] for r in caplog.records if r.getMessage() == sentence]


async def test_a_leader_begins_without_a_namespace_that_is_refused_and_serves_it_once_it_is_back(server, caplog):
    again = refuse(server, B)
    async with Operator(server, A, B) as operator:
        await operator.store.wait_listed(timeout_s=TIMEOUT_S)
        assert await operator.pods(A) == {"p"}
        with pytest.raises(NamespaceRefused, match="take it out of watchNamespaces"):
            await operator.pods(B)
        await until(lambda: refused(server, B, "ConfigMap"), "all kinds to be refused")
        assert [refused(server, B, kind) for kind in OURS] == [1] * len(OURS)
        again()
        await until(lambda: refused(server, B) is None and len(operator.changes) == 2, "the namespace to be served")
        assert await operator.pods(B) == {"p"}
    assert operator.changes == [B, B]
    assert said(caplog, "namespace refused") == said(caplog, "namespace served again") == [B]
    assert said(caplog, "watch refused") == []


async def test_nothing_is_read_of_a_namespace_that_is_refused_while_the_operator_runs(server):
    async with Operator(server, A, B) as operator:
        await operator.store.wait_listed(timeout_s=TIMEOUT_S)
        again = refuse(server, B)
        await until(lambda: refused(server, B), "the refusal")
        calls = server.count("GET", f"/namespaces/{B}/rljobs")
        plans = operator.store.list("RLPlan", namespace=B, label_selector=f"{names.LABEL_JOB}=math")
        for read in (operator.store.get("RLJob", "math", namespace=B), plans):
            with pytest.raises(NamespaceRefused):
                await read
        assert server.count("GET", f"/namespaces/{B}/rljobs") == calls
        assert (await operator.store.get("RLJob", "math", namespace=A))["metadata"]["namespace"] == A
        server.remove("Pod", "p", namespace=B)
        again()
        await until(lambda: not operator.refusals.refuses(B), "the namespace to be served")
        await until(lambda: operator.store.counts()["Pod"] == 1, "what went meanwhile to be gone")
        assert await operator.pods(B) == set()


async def test_a_refused_namespace_makes_nobody_unready(server):
    async with Operator(server, A, B) as operator:
        await operator.store.wait_listed(timeout_s=TIMEOUT_S)
        refuse(server, B)
        of_b = [r for r in operator.store.reflectors if r.namespace == B]
        await until(lambda: all(refused(server, B, kind) for kind in OURS), "the refusal")
        for entry in of_b:
            entry._heard_at -= 1000
        assert max(operator.store.age_s().values()) < 100


async def test_where_every_namespace_is_refused_the_kinds_that_miss_are_named(server):
    refuse(server, A)
    refuse(server, B)
    async with Operator(server, A, B) as operator:
        with pytest.raises(RLinfError, match="still missing: ConfigMap, NetworkPolicy, Pod"):
            await operator.store.wait_listed(timeout_s=1.0)


async def test_one_kind_that_is_refused_is_the_whole_namespace(server):
    """A Role that lacks a line: pods that cannot be listed would be taken for lost."""
    server.fault(status=403, times=FOREVER, path=f"/namespaces/{B}/pods", reason="Forbidden")
    async with Operator(server, A, B) as operator:
        await operator.store.wait_listed(timeout_s=TIMEOUT_S)
        with pytest.raises(NamespaceRefused):
            await operator.store.get("RLJob", "math", namespace=B)
        assert refused(server, B, "Service") is None


async def test_a_token_that_is_refused_is_nothing_of_the_namespace(server):
    server.fault(status=401, times=FOREVER, path=f"/namespaces/{B}/")
    async with Operator(server, A, B) as operator:
        with pytest.raises(RLinfError, match="still missing"):
            await operator.store.wait_listed(timeout_s=1.0)
        assert not operator.refusals.refuses(B)


async def test_kopf_watches_the_others_and_the_one_that_comes_back(server, monkeypatch, caplog):
    monkeypatch.setattr(rljobs, "BACKOFFS_S", (0.01, 0.02))
    again = refuse(server, B)
    seen: list[tuple[str, str]] = []

    class Ear:
        def seen(self, sight: Sight) -> None:
            seen.append((sight.key.namespace, str(sight.version)))

        def beat(self) -> None: ...

    login = kopf.ConnectionInfo(server=server.connection.configuration.host)
    watcher = rljobs.Watcher(Ear(), namespaces=(A, B), login=login)
    watcher.start()
    try:
        await until(lambda: server.count("GET", f"/namespaces/{B}/rljobs") > 6, "more tries than there are pauses")
        changed = server.put(job(A, suspend=True))
        await until(lambda: (A, changed["metadata"]["resourceVersion"]) in seen, "a change in the other namespace")
        assert not watcher.ended.is_set()
        again()
        await until(lambda: B in {namespace for namespace, _ in seen}, "the namespace that is back")
    finally:
        await watcher.stop()
    loud = [r for r in caplog.records if r.name.startswith("kopf.") and r.levelno >= logging.WARNING]
    assert [r for r in loud if r.levelno >= main.NOISY.get(r.name, logging.WARNING)] == []
    assert loud, "Kopf says nothing any more: the line in NOISY is not needed"


def test_kopfs_pauses_end_at_half_a_minute_and_never():
    pauses = list(itertools.islice(rljobs.Unending(), 100))
    assert pauses[: len(rljobs.BACKOFFS_S)] == list(rljobs.BACKOFFS_S)
    assert set(pauses[len(rljobs.BACKOFFS_S) :]) == {30.0}


class Gate(Store):
    """Refuses what CachedStore would, once told to."""

    closed = False

    async def get(self, kind, name, **more):
        if self.closed:
            raise NamespaceRefused("namespace team refuses the operator")
        return await super().get(kind, name, **more)


async def test_a_job_in_a_refused_namespace_has_no_say_in_whether_drivers_are_silent(caplog, monkeypatch):
    """Else the dead drivers of a deleted namespace keep those of the others from being replaced."""
    caplog.set_level(logging.INFO)
    store, drivers = Gate(), FakeDrivers()
    made = await store.create(ppo_job().build())
    key = JobKey(namespace=made["metadata"]["namespace"], name="math")
    reconciler = Reconciler(
        store=store, scheduler=Planning(store), drivers=lambda _: drivers, authority=AUTHORITY, clock=lambda: NOW,
        settings=replace(QUICK, retry_min_s=30, retry_max_s=60), follows=(),
    )  # fmt: skip
    task = asyncio.create_task(reconciler.run())
    try:
        reconciler.enqueue(key)
        await until(lambda: key in reconciler._memory and not reconciler._queue._in_work, "the first pass")
        forgotten: list[JobKey] = []
        monkeypatch.setattr(drivers, "forget", forgotten.append)
        store.closed = True
        reconciler.look_at(key.namespace)
        await until(lambda: key in forgotten, "the driver to be let go")
        assert [r for r in caplog.records if r.levelno >= logging.WARNING and r.name.endswith("loop")] == []
        store.closed = False
        reconciler.look_at(key.namespace)  # and not in half a minute
        await until(lambda: reconciler._memory[key].failures == 0, "a pass that is done")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_leader_passes_over_the_jobs_of_the_others_and_of_the_one_that_comes_back(
    server, monkeypatch, tmp_path, caplog
):
    """All of it together: lists, Kopf, known jobs, passes."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(rljobs, "BACKOFFS_S", (0.01, 0.05))

    async def nothing():
        """The certificates are there."""

    certificates = SimpleNamespace(authority=AUTHORITY, begin=nothing, run=asyncio.Event().wait)

    def written(namespace):
        return lambda: server.count("PUT", f"/namespaces/{namespace}/rljobs/math/status")

    monkeypatch.setattr(leading, "Certificates", lambda *_, **__: certificates)
    AUTHORITY.write_folder(tmp_path, "operator")
    probes = Probes(server.metrics)
    for namespace in (A, B):
        server.put(ppo_job(namespace=namespace).build())
    again = refuse(server, B)
    leader = leading.Leader(
        server.connection, standing=server.connection, probes=probes, folder=tmp_path, metrics=server.metrics,
        process=ProcessSettings(watch_namespaces=f"{A},{B}", watch_stale_s=100),
        operator=replace(QUICK, scheduler_address="127.0.0.1:1"),
    )  # fmt: skip
    task = asyncio.create_task(leader.run())
    try:
        await until(written(A), "a pass in the other namespace")
        assert written(B)() == 0
        assert probes.failing() == []
        again()
        await until(written(B), "a pass in the namespace that is back")
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert said(caplog, "namespace refused") == said(caplog, "namespace served again") == [B]
