"""RequestPlan over gRPC, many at once: one that fails is that one's failure, and holds up no other job."""

import asyncio
import contextlib
import datetime as dt

import grpc
import pytest

from rlinf_api import rpc
from rlinf_api.errors import ClusterBusy, WorkerUnreachable
from rlinf_operator.clients.scheduler import AT_ONCE, AWAY_S, GrpcScheduler
from rlinf_operator.manifests import certificates
from rlinf_operator.manifests.metadata import JobKey
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
        client = GrpcScheduler(address, tls=folder("operator"), timeout_s=30)
        yield store, planning, client
        await client.close()


@contextlib.asynccontextmanager
async def passing(reconciler):
    running = asyncio.create_task(reconciler.run())
    try:
        yield
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def until(what, timeout_s=60.0):
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
    with pytest.raises(WorkerUnreachable, match=r"namespace team is terminating.*look at its pod's log"):
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


async def test_a_pass_that_is_cancelled_while_it_asks_is_cancelled_and_not_told_that_nobody_answers(world):
    store, planning, client = world
    job = (await made(store, 1))[0]
    planning.answers["job-0"] = asyncio.Event()
    call = asyncio.create_task(client.request_plan(job, reason="Initial", highest_revision=0))
    await until(lambda: planning.asked)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_thirty_jobs_get_their_plans_although_the_scheduler_fails_some_and_no_worker_is_lost(world):
    store, planning, client = world
    reconciler = Reconciler(
        store=store, scheduler=client, drivers=FakeDrivers, authority=AUTHORITY, settings=QUICK, clock=lambda: NOW
    )
    planning.answers = {f"job-{number}": ClusterBusy("429 from the API server") for number in range(0, JOBS, 3)}
    async with passing(reconciler):
        await made(store, JOBS)
        async with asyncio.timeout(60):
            while len((await store.list("RLPlan")).items) < JOBS:
                await asyncio.sleep(0.01)
        workers = [task for task in asyncio.all_tasks() if task.get_name().startswith("operator: worker")]
        assert len(workers) == WORKERS


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
    async with passing(reconciler):
        await made(store, JOBS)
        async with asyncio.timeout(60):
            while len((await store.list("RLPlan")).items) < JOBS:
                await asyncio.sleep(0.01)
    assert results.count("broke") == 2 * WORKERS


async def asks(client, jobs):
    calls = [asyncio.create_task(client.request_plan(job, reason="Initial", highest_revision=0)) for job in jobs]
    await asyncio.sleep(0)
    return calls


async def test_a_scheduler_that_hangs_is_asked_by_a_few_and_then_by_one_at_a_time(world):
    store, planning, _ = world
    now = [0.0]
    client = world[2]
    client._timeout_s, client._clock = 1.0, lambda: now[0]
    jobs = await made(store, 20)
    never = asyncio.Event()
    planning.answers = {job["metadata"]["name"]: never for job in jobs}
    calls = await asks(client, jobs)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(result) for result in results} == {WorkerUnreachable}
    assert len(planning.asked) == AT_ONCE, "who waited for a place was told, and did not ask"

    planning.asked.clear()
    with pytest.raises(WorkerUnreachable, match="DEADLINE_EXCEEDED"):
        await client.request_plan(jobs[0], reason="Initial", highest_revision=0)
    assert planning.asked == [], "it was away a moment ago"

    now[0] += AWAY_S
    client._timeout_s = 20.0  # from here on every answer comes, on a busy machine later than within 1 s
    planning.answers = {job["metadata"]["name"]: never for job in jobs}
    probe, *others = await asks(client, jobs)
    told = await asyncio.gather(*others, return_exceptions=True)
    assert {type(result) for result in told} == {WorkerUnreachable}
    await until(lambda: planning.asked)
    assert len(planning.asked) == 1
    never.set()
    assert (await probe).plan == "job-0-p1"
    planning.answers.clear()
    plans = await asyncio.gather(*(await asks(client, jobs)))
    assert [plan.plan for plan in plans] == [f"job-{number}-p1" for number in range(20)]


async def test_many_wait_for_a_place_as_long_as_answers_come(world):
    store, planning, client = world
    jobs = await made(store, 20)
    plans = await asyncio.gather(*(await asks(client, jobs)))
    assert len({plan.plan for plan in plans}) == 20
    assert len(planning.asked) == 20


async def test_jobs_that_need_no_plan_do_not_wait_for_a_scheduler_that_hangs(world):
    store, planning, client = world
    client._timeout_s = 60.0
    planned = (await store.create(ppo_job(name="planned").build()))["metadata"]
    await Planning(store).request_plan(
        await store.get("RLJob", "planned", namespace="team"), reason="Initial", highest_revision=0
    )
    never = asyncio.Event()
    planning.answers = {f"job-{number}": never for number in range(JOBS)}
    done = []
    reconciler = Reconciler(
        store=store, scheduler=client, drivers=FakeDrivers, authority=AUTHORITY, settings=QUICK, clock=lambda: NOW,
        follows=(), on_pass=lambda seconds, result: done.append(result),
    )  # fmt: skip
    for number in range(JOBS):
        await store.create(ppo_job(name=f"job-{number}").build())
        reconciler.enqueue(JobKey(namespace="team", name=f"job-{number}"))
    async with passing(reconciler):
        await until(lambda: planning.asked)
        reconciler.enqueue(JobKey(namespace="team", name=planned["name"]))
        async with asyncio.timeout(40):  # sooner than the 60 s of the calls
            while "planned-driver-a1" not in [p["metadata"]["name"] for p in (await store.list("Pod")).items]:
                await asyncio.sleep(0.01)
        never.set()
