"""The leader's own certificate and the scheduler's, while a leader leads: renewed in time, under an exchanged CA at
once, again where a write failed. And the scheduler, which read its files at its start, serves with those of now."""

import asyncio
import base64
import contextlib
import logging
from datetime import UTC, datetime, timedelta

import grpc
import pytest

from rlinf_api import rpc
from rlinf_api.errors import RLinfError, WorkerUnreachable
from rlinf_operator import access
from rlinf_operator.clients.ca_store import Certificates
from rlinf_operator.clients.scheduler import GrpcScheduler
from rlinf_scheduler.service import ALLOWED, Planning, serve_on
from rljob.local.store import MemoryStore
from tests.builders import ppo_job

NAMESPACE = "rlinf-system"
LIFE = timedelta(hours=1)
CA_LIFE = timedelta(days=1)


class Clock:
    """Begins at the time of now, by which TLS judges certificates."""

    def __init__(self):
        self.now = datetime.now(UTC)

    def __call__(self):
        return self.now


class Kept:
    """What a leader has, and what the kubelet mounts for the scheduler."""

    def __init__(self, server, folder, *, life=LIFE):
        self.server, self.clock, self.life = server, Clock(), life
        self.own, self.mounted = folder / "operator", folder / "scheduler"

    async def begin(self):
        api = self.server.client()
        self.certificates = Certificates(
            api, namespace=NAMESPACE, folder=self.own, clock=self.clock, ca_life=CA_LIFE, leaf_life=self.life
        )
        await self.certificates.begin()
        return self

    def secret(self):
        return self.server.objects["Secret", NAMESPACE, access.SCHEDULER_SECRET]

    def files(self):
        return (self.own / "tls.crt").read_bytes(), self.secret()["data"]["tls.crt"]

    def ca_is_lost(self):
        self.server.remove("Secret", access.CA_SECRET, namespace=NAMESPACE)

    def mount(self):
        """As the kubelet does, which looks at the Secret once a minute."""
        self.mounted.mkdir(exist_ok=True)
        for name, content in self.secret()["data"].items():
            (self.mounted / name).write_bytes(base64.b64decode(content))


@pytest.fixture
async def kept(server, tmp_path):
    return await Kept(server, tmp_path).begin()


async def test_what_is_not_due_is_left_alone(kept):
    before = kept.files()
    kept.clock.now += LIFE * 0.6
    await kept.certificates.once()
    assert kept.files() == before


async def test_both_are_renewed_when_two_thirds_of_their_life_are_over(kept):
    before = kept.files()
    kept.clock.now += LIFE * 0.7
    await kept.certificates.once()
    assert all(new != old for new, old in zip(kept.files(), before, strict=True))
    after = kept.files()
    await kept.certificates.once()
    assert kept.files() == after, "and once"


async def test_both_are_renewed_under_an_exchanged_ca_at_once(kept):
    before, ca = kept.files(), kept.certificates.authority.ca
    kept.ca_is_lost()
    await kept.certificates.once()
    assert kept.certificates.authority.ca != ca
    assert all(new != old for new, old in zip(kept.files(), before, strict=True))


@pytest.mark.parametrize("why", ["age", "ca"])
async def test_a_renewal_of_which_a_write_failed_is_made_again(kept, why):
    before = kept.secret()["data"]["tls.crt"]
    if why == "ca":
        kept.ca_is_lost()
    else:
        kept.clock.now += LIFE * 0.7
    kept.server.fault(status=403, method="PATCH", path=f"/secrets/{access.SCHEDULER_SECRET}")
    with pytest.raises(RLinfError, match="403"):
        await kept.certificates.once()
    assert kept.secret()["data"]["tls.crt"] == before
    await kept.certificates.once()
    assert kept.secret()["data"]["tls.crt"] != before
    after = kept.files()
    await kept.certificates.once()
    assert kept.files() == after


async def test_the_task_goes_on_after_a_failure(server, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    kept = await Kept(server, tmp_path, life=timedelta(seconds=1)).begin()
    before = kept.files()
    server.fault(status=403, method="GET", path=f"/secrets/{access.CA_SECRET}")
    kept.clock.now += kept.life * 0.7
    task = asyncio.create_task(kept.certificates.run())
    try:
        async with asyncio.timeout(20):
            while kept.files()[1] == before[1]:
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [r.getMessage() for r in caplog.records] == ["certificates not renewed"]


@contextlib.asynccontextmanager
async def scheduler_of(kept):
    """One process, which has the folder from its start to its end."""
    store = MemoryStore()
    server = grpc.aio.server(interceptors=[rpc.Gatekeeper(ALLOWED, job_uid="*")], options=list(rpc.SERVER_OPTIONS))
    serve_on(server, Planning(store))
    port = rpc.bind(server, "127.0.0.1:0", tls=rpc.TlsFolder(kept.mounted))
    await server.start()
    try:
        yield store, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def plan_of(store, address, kept, name):
    """Asked by a connection of its own, as after each failure."""
    job = await store.create(ppo_job(name=name).build())
    client = GrpcScheduler(address, tls=rpc.TlsFolder(kept.own), timeout_s=20)
    try:
        return (await client.request_plan(job, reason="Initial", highest_revision=0)).plan
    finally:
        await client.close()


async def test_a_scheduler_that_runs_serves_with_the_files_that_its_mount_has_by_now(kept):
    kept.mount()
    async with scheduler_of(kept) as (store, address):
        assert await plan_of(store, address, kept, "first") == "first-p1"
        kept.ca_is_lost()
        await kept.certificates.once()
        with pytest.raises(WorkerUnreachable):
            await plan_of(store, address, kept, "strangers")
        kept.mount()
        assert await plan_of(store, address, kept, "last") == "last-p1"


async def test_a_scheduler_whose_mount_is_half_swapped_goes_on_with_what_it_has(kept, caplog):
    kept.mount()
    async with scheduler_of(kept) as (store, address):
        (kept.mounted / "tls.key").unlink()
        assert await plan_of(store, address, kept, "first") == "first-p1"
    assert "certificates not reloaded" in {r.getMessage() for r in caplog.records}
