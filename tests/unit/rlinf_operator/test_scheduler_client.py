"""RequestPlan over gRPC, many at once: one that fails is that one's failure, and holds up no other job."""

import asyncio
import contextlib
import datetime as dt

import grpc
import pytest

from rlinf_api import rpc
from rlinf_api.errors import ClusterBusy, WorkerUnreachable
from rlinf_operator.clients.scheduler import GrpcScheduler
from rlinf_operator.manifests import certificates
from rlinf_operator.reconcile.loop import WORKERS, Reconciler
from rlinf_scheduler.service import ALLOWED, Planning, serve_on
from rljob.local.store import MemoryStore
from tests.builders import NOW, ppo_job
from tests.fakes.cluster import AUTHORITY, QUICK
from tests.fakes.drivers import FakeDrivers

JOBS = 30
LIFE = dt.timedelta(days=1)


class Moody(Planning):
    """`answers[name]`: what becomes of a job's next request. An event: it is answered once that is set."""

    def __init__(self, store):
        super().__init__(store)
        self.answers: dict[str, asyncio.Event | Exception] = {}
        self.asked: list[str] = []

    async def request_plan(self, job, *, reason, highest_revision):
        name = job["metadata"]["name"]
        self.asked.append(name)
        mood = self.answers.pop(name, None)
        if isinstance(mood, Exception):
            raise mood
        if mood is not None:
            await mood.wait()
        return await super().request_plan(job, reason=reason, highest_revision=highest_revision)


@pytest.fixture
def folder(tmp_path):
    now = dt.datetime.now(dt.UTC)
    authority = certificates.make_authority(now=now, life=LIFE)

    def make(part):
        path = tmp_path / part
        path.mkdir()
        for name, content in certificates.issue(authority, part=part, now=now, life=LIFE).files().items():
            (path / name).write_bytes(content)
        return rpc.TlsFolder(path)

    return make


@contextlib.asynccontextmanager
async def serving(planning, tls):
    server = grpc.aio.server(interceptors=[rpc.Gatekeeper(ALLOWED, job_uid="*")], options=list(rpc.SERVER_OPTIONS))
    serve_on(server, planning)
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@pytest.fixture
async def world(folder):
    """(the store, the scheduler behind gRPC, a client of it)."""
    store = MemoryStore()
    planning = Moody(store)
    async with serving(planning, folder("scheduler")) as address:
        client = GrpcScheduler(address, tls=folder("operator"), timeout_s=5)
        yield store, planning, client
        await client.close()


async def until(what, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not what():
            await asyncio.sleep(0.01)


async def made(store, count):
    return [await store.create(ppo_job(name=f"job-{number}").build()) for number in range(count)]


async def test_a_request_that_fails_leaves_those_beside_it_alone(world):
    store, planning, client = world
    jobs = await made(store, 6)
    answer = asyncio.Event()
    planning.answers = {job["metadata"]["name"]: answer for job in jobs}
    planning.answers["job-0"] = ClusterBusy("namespace team is terminating")
    calls = [asyncio.create_task(client.request_plan(job, reason="Initial", highest_revision=0)) for job in jobs]
    with pytest.raises(WorkerUnreachable, match="namespace team is terminating"):
        await calls[0]
    await until(lambda: len(planning.asked) == len(jobs))
    answer.set()
    assert [(await call).plan for call in calls[1:]] == [f"job-{number}-p1" for number in range(1, 6)]


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_a_proxy_for_the_world_outside_is_not_asked_for_our_own_parts(world, monkeypatch, variable):
    """Administrators set one for images and datasets; gRPC's core would take it for every address."""
    store, _, client = world
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    job = (await made(store, 1))[0]
    assert (await client.request_plan(job, reason="Initial", highest_revision=0)).plan == "job-0-p1"


async def test_calls_that_begin_at_once_share_one_connection(world, monkeypatch):
    store, _, client = world
    dialled = []
    dial = rpc.dial

    async def counted(*args, **kwargs):
        dialled.append(args)
        return await dial(*args, **kwargs)

    monkeypatch.setattr(rpc, "dial", counted)
    jobs = await made(store, 6)
    await asyncio.gather(*(client.request_plan(job, reason="Initial", highest_revision=0) for job in jobs))
    assert len(dialled) == 1


async def test_a_call_under_way_when_the_client_closes_is_unreachable_not_cancelled(world):
    store, planning, client = world
    job = (await made(store, 1))[0]
    planning.answers["job-0"] = asyncio.Event()
    call = asyncio.create_task(client.request_plan(job, reason="Initial", highest_revision=0))
    await until(lambda: planning.asked)
    await client.close()
    with pytest.raises(WorkerUnreachable, match="the connection was closed"):
        await call


async def test_thirty_jobs_get_their_plans_although_the_scheduler_fails_some_and_no_worker_is_lost(world):
    store, planning, client = world
    reconciler = Reconciler(
        store=store, scheduler=client, drivers=FakeDrivers, authority=AUTHORITY, settings=QUICK, clock=lambda: NOW
    )
    running = asyncio.create_task(reconciler.run())
    jobs = await made(store, JOBS)
    for number, job in enumerate(jobs):
        if number % 3 == 0:
            planning.answers[job["metadata"]["name"]] = ClusterBusy("429 from the API server")
    plans = [f"{job['metadata']['name']}-p1" for job in jobs]

    async def planned():
        return sorted(p["metadata"]["name"] for p in (await store.list("RLPlan")).items) == sorted(plans)

    async with asyncio.timeout(20):
        while not await planned():
            await asyncio.sleep(0.01)
    workers = [task for task in asyncio.all_tasks() if task.get_name().startswith("operator: worker")]
    assert len(workers) == WORKERS
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_pass_that_a_library_cancels_is_repeated_and_ends_no_worker():
    class Cancels:
        left = 2 * WORKERS

        async def request_plan(self, job, *, reason, highest_revision):
            self.left -= 1
            if self.left >= 0:
                raise asyncio.CancelledError
            return await Planning(store).request_plan(job, reason=reason, highest_revision=highest_revision)

    store = MemoryStore()
    results = []
    reconciler = Reconciler(
        store=store, scheduler=Cancels(), drivers=FakeDrivers, authority=AUTHORITY, settings=QUICK, clock=lambda: NOW,
        on_pass=lambda seconds, result: results.append(result),
    )  # fmt: skip
    running = asyncio.create_task(reconciler.run())
    await made(store, JOBS)

    async with asyncio.timeout(20):
        while len((await store.list("RLPlan")).items) < JOBS:
            await asyncio.sleep(0.01)
    assert results.count("broke") == 2 * WORKERS
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
