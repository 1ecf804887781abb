"""Silence of many drivers at once is the operator's own trouble, of network or certificate. None is replaced for it."""

import logging
from types import SimpleNamespace

import pytest

from rlinf_api import rpc
from rlinf_api.report import DriverReport, DriverState
from rlinf_operator.clients.driver import GrpcDrivers
from rlinf_operator.manifests.metadata import JobKey, Target
from rlinf_operator.reconcile import loop
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_scheduler.service import Planning
from tests.builders import NOW, ppo_job
from tests.fakes.cluster import AUTHORITY, QUICK, Cluster
from tests.fakes.drivers import FakeDrivers


class Silent(FakeDrivers):
    """`seconds[key]`: how long a driver has been silent."""

    def __init__(self):
        super().__init__()
        self.seconds: dict[JobKey, float] = {}

    def heard(self, key):
        found = super().heard(key)
        return found and (found[0], found[1], self.seconds.get(key, 0.0))

    def silent(self, *, for_s):
        return sum(1 for key in self.followed if self.seconds.get(key, 0.0) >= for_s), len(self.followed)


class Jobs(Cluster):
    async def running(self, count):
        self.drivers = Silent()
        self.keys = [JobKey(namespace="team", name=f"job-{number}") for number in range(count)]
        self.reconciler = Reconciler(
            store=self.store, scheduler=Planning(self.store), drivers=lambda _: self.drivers, authority=AUTHORITY,
            settings=QUICK, clock=lambda: NOW,
        )  # fmt: skip
        for key in self.keys:
            await self.store.create(ppo_job(name=key.name).build())
        await self.passes(8)
        assert {r.state for r in self.drivers.reports.values()} == {DriverState.RUNNING}
        return self

    async def passes(self, number=1):
        for _ in range(number):
            for key in self.keys:
                await self.reconciler.pass_over(key)
            await self.kubelet()

    async def replaced(self):
        return sorted(name for name in await self.names("Pod") if name.endswith("driver-a2"))

    async def degraded(self, key):
        status = (await self.store.get("RLJob", key.name, namespace="team"))["status"]
        return next(c["reason"] for c in status["conditions"] if c["type"] == "Degraded")


async def test_no_driver_is_replaced_while_more_than_a_third_are_silent(caplog):
    jobs = await Jobs().running(6)
    jobs.drivers.seconds = dict.fromkeys(jobs.keys[:3], 90.0)
    with caplog.at_level(logging.WARNING):
        await jobs.passes(3)
    assert await jobs.replaced() == []
    assert [await jobs.degraded(key) for key in jobs.keys] == ["DriverUnreachable"] * 3 + ["Healthy"] * 3
    assert [r.message for r in caplog.records] == ["too many drivers are silent at once: none is replaced"]
    jobs.drivers.seconds = {jobs.keys[0]: 200.0}
    await jobs.passes(2)
    assert await jobs.replaced() == ["job-0-driver-a2"], "the others answer again: this one is lost"


@pytest.mark.parametrize(("jobs", "silent"), [(2, 2), (9, 3)])
async def test_few_silent_drivers_are_lost(jobs, silent):
    cluster = await Jobs().running(jobs)
    cluster.drivers.seconds = dict.fromkeys(cluster.keys[:silent], 90.0)
    await cluster.passes(2)
    assert len(await cluster.replaced()) == silent


async def test_a_job_whose_driver_is_left_alone_is_looked_at_again_in_a_while_and_not_in_a_loop():
    jobs = await Jobs().running(3)
    jobs.drivers.seconds = dict.fromkeys(jobs.keys, 90.0)
    wishes = []
    jobs.reconciler.enqueue = lambda key, after_s=0.0: wishes.append(after_s)
    await jobs.passes(2)
    assert wishes[-1] == QUICK.driver_late_s
    assert 0.0 not in wishes[len(jobs.keys) :]


async def test_a_driver_that_was_not_heard_yet_is_silent_from_when_it_is_ready(monkeypatch):
    """Its pod runs, and is dialled, while it imports: 70 s on a busy node."""
    now = [1000.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    jobs = await Jobs().running(1)
    (key,) = jobs.keys
    del jobs.drivers.reports[key]
    jobs.drivers.seconds = {key: 70.0}
    await jobs.passes(2)
    assert (await jobs.degraded(key), await jobs.replaced()) == ("Healthy", [])
    now[0] += QUICK.driver_late_s
    await jobs.passes(1)
    assert (await jobs.degraded(key), await jobs.replaced()) == ("DriverUnreachable", [])
    now[0] += QUICK.driver_silent_deadline_s
    jobs.drivers.seconds = {key: 70.0 + QUICK.driver_silent_deadline_s}
    await jobs.passes(1)
    assert await jobs.replaced() == ["job-0-driver-a2"]


async def test_the_links_that_are_silent_are_counted_without_those_whose_driver_has_ended():
    now = [0.0]
    client = GrpcDrivers(
        tls=rpc.TlsFolder("no-certificates"), on_change=lambda key, progress=False: None, timeout_s=1,
        late_s=10, clock=lambda: now[0],
    )  # fmt: skip
    keys = [JobKey(namespace="team", name=f"job-{number}") for number in range(4)]
    for key in keys:
        client.follow(key, Target(job_uid=key.name, attempt=1, address="127.0.0.1:1"))
    now[0] = 11.0
    client._links[keys[0]]._silent_since = None  # it stands
    client._links[keys[1]].report = DriverReport(job_uid="job-1", driver_attempt=1, state=DriverState.COMPLETE)
    assert client.silent(for_s=10.0) == (2, 3)
    assert client.silent(for_s=12.0) == (0, 3)
    await client.close()
