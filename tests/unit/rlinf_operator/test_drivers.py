"""The operator's side of Job.Watch: one stream per driver attempt, silence that is noticed, plans, drains."""

import asyncio
import contextlib
import datetime as dt
import json
import time
from typing import Any

import grpc
import pytest

from rlinf_api import names, rpc, unknown, wire
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2
from rlinf_api.errors import WorkerUnreachable
from rlinf_api.report import DriverReport, DriverState, Goal
from rlinf_operator.clients.driver import WATCHING, GrpcDrivers
from rlinf_operator.manifests import certificates
from rlinf_operator.manifests.metadata import JobKey, Target
from tests.builders import UID, plan_of, ppo_job

KEY = JobKey(namespace="team", name="math")
LIFE = dt.timedelta(days=1)


class Driver:
    """A driver's Job service, by hand."""

    def __init__(self):
        self.reports: asyncio.Queue[DriverReport] = asyncio.Queue()
        self.requests: list[tuple[object, object]] = []
        self.refusal = ""
        self.release, self.asked, self.answer = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.answer.set()
        self.last = False
        self.callers: set[str] = set()

    def say(self, attempt=1, **fields):
        fields = {"state": DriverState.RUNNING, **fields}
        self.reports.put_nowait(DriverReport(job_uid=UID, driver_attempt=attempt, **fields))

    async def watch(self, request, context):
        self.callers.add(context.peer())
        while True:
            yield wire.report_to_pb(await self.reports.get())
            if self.last:
                return

    async def plan(self, request, context):
        self.callers.add(context.peer())
        self.asked.set()
        await self.answer.wait()
        self.requests.append((request.revision, request.driver_attempt))
        return job_pb2.PlanResponse(ok=not self.refusal, message=self.refusal)

    async def adjust(self, request, context):
        self.callers.add(context.peer())
        self.requests.append((wire.goal_from_pb(request.goal), request.driver_attempt))
        return job_pb2.AdjustResponse(ok=not self.refusal, message=self.refusal)

    async def drain(self, request, context):
        self.requests.append(("drain", request.deadline_s))
        await self.release.wait()
        return job_pb2.DrainResponse(drained=True)

    def handlers(self):
        unary, pb = grpc.unary_unary_rpc_method_handler, job_pb2
        planned = (pb.PlanRequest.FromString, pb.PlanResponse.SerializeToString)
        drained = (pb.DrainRequest.FromString, pb.DrainResponse.SerializeToString)
        adjusted = (pb.AdjustRequest.FromString, pb.AdjustResponse.SerializeToString)
        watched = (pb.WatchRequest.FromString, pb.JobStatus.SerializeToString)
        return grpc.method_handlers_generic_handler(
            "rlinf.job.v1alpha1.Job",
            {
                "Watch": grpc.unary_stream_rpc_method_handler(self.watch, *watched),
                "PreparePlan": unary(self.plan, *planned),
                "CommitPlan": unary(self.plan, *planned),
                "Adjust": unary(self.adjust, *adjusted),
                "Drain": unary(self.drain, *drained),
            },
        )


@pytest.fixture
def folder(tmp_path):
    now = dt.datetime.now(dt.UTC)
    authority = certificates.make_authority(now=now, life=LIFE)

    def make(part, **who):
        path = tmp_path / part
        path.mkdir()
        for name, content in certificates.issue(authority, part=part, now=now, life=LIFE, **who).files().items():
            (path / name).write_bytes(content)
        return rpc.TlsFolder(path)

    return make


@contextlib.asynccontextmanager
async def serving(driver, tls, port=0):
    server = grpc.aio.server(options=list(rpc.SERVER_OPTIONS))
    server.add_generic_rpc_handlers((driver.handlers(),))
    bound = server.add_secure_port(f"127.0.0.1:{port}", tls.server_credentials())
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(0)


@pytest.fixture
async def drivers(folder):
    """(the client, what changed: the key, or "progress" where nothing else did)."""
    changed: list[JobKey | str] = []

    def on_change(key, *, progress=False):
        changed.append("progress" if progress else key)

    made = GrpcDrivers(tls=folder("operator"), on_change=on_change, timeout_s=20, late_s=10)
    yield made, changed
    await made.close()


def heard(client):
    found = client.heard(KEY)
    assert found is not None
    return found


async def until(what, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not what():
            await asyncio.sleep(0.01)


def target(port, attempt=1):
    return Target(job_uid=UID, attempt=attempt, address=f"127.0.0.1:{port}")


async def test_reports_arrive_and_each_change_wakes_the_loop_a_step_less_urgently(drivers, folder):
    client, changed = drivers
    driver = Driver()
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        client.follow(KEY, target(port))
        attempt, report, silent_s = heard(client)
        assert (attempt, report) == (1, None)
        assert silent_s > 0
        driver.say(step=1)
        await until(lambda: heard(client)[1] is not None)
        assert heard(client)[2] == 0.0
        driver.say(step=1)
        driver.say(step=2)
        await until(lambda: heard(client)[1].step == 2)
        driver.say(step=2, missing=("env/0",))
        await until(lambda: heard(client)[1].missing == ("env/0",))
        # The first report, a step, something that a condition names; a report that says nothing new wakes nobody.
        assert changed == [KEY, "progress", KEY]


async def test_a_watch_pings_less_often_than_others_and_keeps_little_per_connection(drivers, folder, monkeypatch):
    """There are a thousand of them."""
    client, _ = drivers
    dialled: list[dict[str, object]] = []
    secure_channel = grpc.aio.secure_channel

    def noted(address, credentials, *, options):
        dialled.append(dict(options))
        return secure_channel(address, credentials, options=options)

    monkeypatch.setattr(grpc.aio, "secure_channel", noted)
    driver = Driver()
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        client.follow(KEY, target(port))
        driver.say(step=1)
        await until(lambda: heard(client)[1])
    own = {
        "grpc.keepalive_time_ms": 8_000,
        "grpc.tsi.max_frame_size": 2_048,
        "grpc.enable_retries": 0,
        "grpc.enable_channelz": 0,
    }
    others = dict(rpc.OPTIONS) | {"grpc.ssl_target_name_override": names.tls_name("driver", UID)}
    assert dialled[0] == others | own


async def test_words_about_a_job_that_steps_are_progress_and_those_about_one_that_does_not_are_not(drivers, folder):
    """`step 5 has run for 31 s` is another text each second, for as long as a volume hangs."""
    client, changed = drivers
    driver = Driver()
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        client.follow(KEY, target(port))
        said: list[dict[str, Any]] = [
            {"message": "step 5 has run for 31 s"},
            {"message": "step 5 has run for 32 s"},
            {"message": "turns bring no items", "reason": "TurnsWithoutItems"},
            {"message": "worker env/0 is started again", "state": DriverState.RECOVERING},
            {"message": "worker env/1 is started again", "state": DriverState.RECOVERING},
        ]
        for words in said:
            driver.say(**words)
            await until(lambda words=words: heard(client)[1] and heard(client)[1].message == words["message"])
        assert changed == [KEY, "progress", KEY, KEY, KEY]


async def test_a_broken_stream_is_silence_that_wakes_the_loop_and_ends_when_it_is_back(drivers, folder):
    client, changed = drivers
    driver, tls = Driver(), folder("driver", namespace="team", job_uid=UID)
    async with serving(driver, tls) as port:
        client.follow(KEY, target(port))
        driver.say(step=1)
        await until(lambda: heard(client)[1] is not None)
        changed.clear()
    await until(lambda: heard(client)[2] > 0)
    assert changed == [KEY]
    assert heard(client)[1].step == 1
    async with serving(driver, tls, port=port):
        driver.say(step=2)
        await until(lambda: heard(client)[1].step == 2)
        assert heard(client)[2] == 0.0


async def test_a_driver_that_answers_no_ping_has_been_silent_since_the_pings_began(folder, monkeypatch):
    """It is frozen, or its node is: what it sends does not arrive, and nobody closes its connection."""
    monkeypatch.setitem(WATCHING, "grpc.keepalive_time_ms", 1_000)  # what counts is 8 s, and this test waits for less
    monkeypatch.setattr("rlinf_operator.clients.driver.LOOK_S", 60.0)  # it would take this clock's leap for a sleep
    now, relays, open_ends = [100.0], list[asyncio.Task[None]](), list[asyncio.StreamWriter]()
    made = GrpcDrivers(
        tls=folder("operator"),
        on_change=lambda key, progress=False: None,
        timeout_s=20,
        late_s=1e3,
        clock=lambda: now[0],
    )

    async def relay(reader, writer):
        source, sink = await asyncio.open_connection("127.0.0.1", port)

        async def pipe(a, b):
            while data := await a.read(1 << 16):
                b.write(data)

        open_ends.extend((writer, sink))
        relays.extend(asyncio.create_task(pipe(*ends)) for ends in ((reader, sink), (source, writer)))

    driver = Driver()
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        front = await asyncio.start_server(relay, "127.0.0.1", 0)
        made.follow(KEY, target(front.sockets[0].getsockname()[1]))
        driver.say(step=1)
        await until(lambda: heard(made)[1] is not None)
        now[0] = 120.0
        for task in relays:
            task.cancel()
        await until(lambda: heard(made)[2] > 0)
        assert heard(made)[2] == 8.0
        await made.close()
        front.close()
        for end in open_ends:
            end.close()
            with contextlib.suppress(ConnectionError):
                await end.wait_closed()


async def test_a_stream_that_stands_and_says_nothing_is_silence_from_when_a_report_was_due(folder):
    """As of a driver whose own loop hangs in somebody's flow: gRPC answers pings for it."""
    changed: list[JobKey] = []
    made = GrpcDrivers(
        tls=folder("operator"), on_change=lambda key, progress=False: changed.append(key), timeout_s=20,
        repeat_s=0.5, late_s=0.3,
    )  # fmt: skip
    driver = Driver()
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        made.follow(KEY, target(port))
        driver.say(step=1)
        await until(lambda: heard(made)[1] is not None)
        changed.clear()
        await until(lambda: heard(made)[2] > 0)
        assert (changed, made.silent(for_s=0.3)) == ([KEY], (1, 1)), "at once as long as a driver may be late"
        async with asyncio.timeout(20):
            while heard(made)[2] > 0:  # more than once, as the stream that was given up may take one along
                driver.say(step=1)  # nothing but a sign of life
                await asyncio.sleep(0.05)
        assert changed == [KEY, KEY], "or the job would stay Degraded until something else happens"
        assert len(driver.callers) >= 2
    await made.close()


async def test_a_driver_that_repeats_its_report_is_not_dialled_anew_as_one_is_that_does_not(folder):
    changed: list[JobKey] = []
    made = GrpcDrivers(
        tls=folder("operator"), on_change=lambda key, progress=False: changed.append(key), timeout_s=20,
        repeat_s=0.2, late_s=5,
    )  # fmt: skip
    repeats, quiet, other = Driver(), Driver(), JobKey(namespace="team", name="quiet")
    tls = folder("driver", namespace="team", job_uid=UID)
    async with serving(repeats, tls) as port, serving(quiet, tls) as other_port:
        made.follow(KEY, target(port))
        repeats.say(step=1)
        await until(lambda: heard(made)[1] is not None)
        made.follow(other, target(other_port))
        quiet.say(step=1)
        async with asyncio.timeout(40):
            while len(quiet.callers) < 2:
                repeats.say(step=1)
                await asyncio.sleep(0.2)
        assert (changed.count(KEY), len(repeats.callers)) == (1, 1), "though it was followed for longer"
    await made.close()


async def test_a_driver_that_has_said_its_last_word_owes_no_further_one(folder):
    made = GrpcDrivers(tls=folder("operator"), on_change=lambda *_, **__: None, timeout_s=20, repeat_s=0.2, late_s=0.1)
    ended, quiet, other = Driver(), Driver(), JobKey(namespace="team", name="quiet")
    tls = folder("driver", namespace="team", job_uid=UID)
    async with serving(ended, tls) as port, serving(quiet, tls) as other_port:
        made.follow(KEY, target(port))
        ended.say(state=DriverState.COMPLETE)
        await until(lambda: heard(made)[1] is not None)
        made.follow(other, target(other_port))
        quiet.say(step=1)
        await until(lambda: len(quiet.callers) > 1)
        assert (heard(made)[2], len(ended.callers)) == (0.0, 1), "though it has been quiet for longer"
    await made.close()


async def test_what_the_operator_slept_itself_is_no_silence_of_its_drivers(folder):
    slept_s = [0.0]
    made = GrpcDrivers(
        tls=folder("operator"), on_change=lambda key, progress=False: None, timeout_s=20, repeat_s=1, late_s=1,
        clock=lambda: time.monotonic() + slept_s[0],
    )  # fmt: skip
    driver = Driver()
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        made.follow(KEY, target(port))
        driver.say(step=1)
        await until(lambda: heard(made)[1] is not None)
        slept_s[0] = 300.0
        await asyncio.sleep(0.6)
        assert heard(made)[2] == 0.0
        await until(lambda: heard(made)[2] > 0)
        assert heard(made)[2] < 10, "its own silence counts, without these 300 s"
    await made.close()


async def test_a_driver_that_said_its_last_word_and_ended_is_neither_news_nor_dialled_in_a_loop(drivers, folder):
    client, changed = drivers
    driver = Driver()
    driver.last = True
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        client.follow(KEY, target(port))
        driver.reports.put_nowait(DriverReport(job_uid=UID, driver_attempt=1, state=DriverState.COMPLETE))
        await until(lambda: heard(client)[1] is not None)
        await until(lambda: heard(client)[2] > 0)
        await asyncio.sleep(0.5)
        assert changed == [KEY]
        assert len(driver.callers) == 1


async def test_a_newer_attempt_replaces_the_watch_of_the_older(drivers, folder):
    client, _ = drivers
    driver = Driver()
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        client.follow(KEY, target(port))
        driver.say(step=1)
        await until(lambda: heard(client)[1] is not None)
        client.follow(KEY, target(port, attempt=2))
        attempt, report, _ = heard(client)
        assert (attempt, report) == (2, None)
        client.forget(KEY)
        assert client.heard(KEY) is None


async def test_plans_are_prepared_and_committed_and_a_refusal_is_quoted(drivers, folder):
    client, _ = drivers
    driver, plan = Driver(), plan_of(ppo_job())
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        client.follow(KEY, target(port, attempt=3))
        driver.say(attempt=3)
        await until(lambda: heard(client)[1] is not None)
        assert await client.apply_plan(target(port, attempt=3), plan, step="Prepare") == ""
        driver.refusal = "no such role"
        assert await client.apply_plan(target(port, attempt=3), plan, step="Commit") == "no such role"
        assert driver.requests == [(1, 3), (1, 3)]


async def test_another_goal_goes_over_the_connection_of_the_watch_and_is_known_at_once(drivers, folder):
    client, _ = drivers
    driver, goal = Driver(), Goal(steps=60, every_steps=5, keep=2)
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        client.follow(KEY, target(port, attempt=3))
        driver.say(attempt=3, step=4, goal=Goal(steps=40, every_steps=5, keep=2))
        await until(lambda: heard(client)[1] is not None)
        driver.refusal = "not now"
        assert await client.adjust(target(port, attempt=3), goal) == "not now"
        assert heard(client)[1].goal.steps == 40
        driver.refusal = ""
        assert await client.adjust(target(port, attempt=3), goal) == ""
        assert (heard(client)[1].goal, heard(client)[1].step) == (goal, 4)
        assert driver.requests == [(goal, 3), (goal, 3)]
        assert len(driver.callers) == 1
        with pytest.raises(WorkerUnreachable, match=r"goal .* did not reach driver attempt 9"):
            await client.adjust(target(port, attempt=9), goal)


async def test_plans_go_over_the_connection_of_the_watch(drivers, folder):
    client, _ = drivers
    driver, plan = Driver(), plan_of(ppo_job())
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        client.follow(KEY, target(port))
        driver.say(step=1)
        await until(lambda: heard(client)[1] is not None)
        await client.apply_plan(target(port), plan, step="Prepare")
        await client.apply_plan(target(port), plan, step="Commit")
        assert len(driver.callers) == 1


async def test_a_plan_under_way_when_the_watch_ends_is_unreachable_not_cancelled(drivers, folder):
    """gRPC cancels it with the channel; a cancelled pass would end the worker that runs it."""
    client, _ = drivers
    driver = Driver()
    driver.answer.clear()
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        client.follow(KEY, target(port))
        driver.say(step=1)
        await until(lambda: heard(client)[1] is not None)
        call = asyncio.create_task(client.apply_plan(target(port), plan_of(ppo_job()), step="Prepare"))
        await driver.asked.wait()
        client.forget(KEY)
        with pytest.raises(WorkerUnreachable, match="the connection was closed"):
            await call
        driver.answer.set()


async def test_a_driver_that_never_answers_ends_the_call_at_the_deadline(folder):
    """It pings and reports, so that nothing else would: the pass of the job would wait for as long as it lives."""
    made = GrpcDrivers(tls=folder("operator"), on_change=lambda *_, **__: None, timeout_s=0.1, late_s=10)
    driver = Driver()
    driver.answer.clear()
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        made.follow(KEY, target(port))
        driver.say(step=1)
        await until(lambda: heard(made)[1] is not None)
        async with asyncio.timeout(5):
            with pytest.raises(WorkerUnreachable, match="DEADLINE_EXCEEDED"):
                await made.apply_plan(target(port), plan_of(ppo_job()), step="Prepare")
        driver.answer.set()
    await made.close()


async def test_a_drain_is_started_once_and_waited_for_by_nobody(drivers, folder):
    client, changed = drivers
    driver = Driver()
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        for _ in range(3):
            client.drain(KEY, target(port), deadline_s=5)
            await asyncio.sleep(0.02)
        await until(lambda: driver.requests == [("drain", 5.0)])
        driver.release.set()
        await until(lambda: changed == [KEY])


async def test_a_driver_that_is_away_is_named(drivers):
    client, _ = drivers
    with pytest.raises(
        WorkerUnreachable, match=r"Prepare of plan revision 1 did not reach driver attempt 1 at 127.0.0.1:1"
    ):
        await client.apply_plan(target(1), plan_of(ppo_job()), step="Prepare")


async def test_a_driver_of_another_job_is_not_talked_to(drivers, folder):
    client, changed = drivers
    driver = Driver()
    async with serving(driver, folder("driver", namespace="team", job_uid="another")) as port:
        client.follow(KEY, target(port))
        client.drain(KEY, target(port), deadline_s=5)
        await until(lambda: changed == [KEY])  # the drain is over
        with pytest.raises(WorkerUnreachable):
            await client.apply_plan(target(port), plan_of(ppo_job()), step="Prepare")
        assert (driver.requests, driver.callers, heard(client)[1]) == ([], set(), None)
    assert names.tls_name("driver", UID) != names.tls_name("driver", "another")


async def test_what_a_driver_is_asked_about_plans_and_drains_is_this(drivers, folder, monkeypatch):
    driver, plan = Driver(), plan_of(ppo_job(), revision=6)
    asked = []

    async def noted(request, context):
        asked.append(request)
        return job_pb2.PlanResponse(ok=True)

    async def drained(request, context):
        asked.append(request)
        return job_pb2.DrainResponse(drained=True)

    # Before the service is made of them.
    monkeypatch.setattr(driver, "plan", noted)
    monkeypatch.setattr(driver, "drain", drained)
    async with serving(driver, folder("driver", namespace="team", job_uid=UID)) as port:
        client, changed = drivers
        client.follow(KEY, target(port, attempt=3))
        driver.say(attempt=3)
        await until(lambda: heard(client)[1])
        for step in ("Prepare", "Commit"):
            assert await client.apply_plan(target(port, attempt=3), plan, step=step, switches=4, uid="a5") == ""
        text = json.dumps(unknown.compact(plan))
        common: dict[str, Any] = {"plan_json": text, "revision": 6, "driver_attempt": 3, "reason": "Initial"}
        assert asked == [job_pb2.PlanRequest(**common, plan_switches=4, plan_uid="a5")] * 2
        asked.clear()
        changed.clear()
        client.drain(KEY, target(port, attempt=3), deadline_s=7.0)
        await until(lambda: changed)
        assert asked == [job_pb2.DrainRequest(deadline_s=7.0)]
        assert changed == [KEY]
