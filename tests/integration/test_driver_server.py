"""The driver's three services over real gRPC and mTLS on loopback: who may call what, and what they are answered."""

import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import grpc.aio
import pytest

from rlinf_api import names, rpc, wire
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2, agents_pb2_grpc
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2_grpc
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2, job_pb2_grpc
from rlinf_api.conditions import Reason
from rlinf_api.errors import UserError
from rlinf_api.plan import RLPlanSpec
from rlinf_api.report import DriverReport
from rlinf_worker.driver import server as driver_server
from rlinf_worker.driver.main import FlowTask
from rlinf_worker.driver.metrics import DriverMetrics
from rlinf_worker.driver.server import JobServicer, serve
from rlinf_worker.driver.settings import DriverSettings
from tests.builders_driver import JOB_UID, make_job
from tests.fakes.certs import Authority

_HOSTS = itertools.count(1)
JOB = make_job(steps=3)


class Served:
    """A driver that listens, and callers with certificates of any part."""

    def __init__(self, folder: Path, authority: Authority, *, settings: DriverSettings) -> None:
        self.folder, self.authority = folder, authority
        self.driver = JOB.driver(time.monotonic, settings=settings)
        self.flow = FlowTask(self.driver)
        self.seen_end = asyncio.Event()
        self.channels: list[grpc.aio.Channel] = []
        self.tls = rpc.TlsFolder(authority.folder(folder / "driver", part="driver", job_uid=JOB_UID))

    async def start(self) -> None:
        job = JobServicer(self.driver, on_plan=self.flow.start, seen_end=self.seen_end.set)
        pid = os.getpid()  # another run of the tests may be on this machine
        self.host = f"127.{194 + pid % 60}.{pid // 60 % 250}.{next(_HOSTS)}"
        self.server = await serve(self.driver, job, address=f"{self.host}:7070", tls=self.tls)

    async def stop(self) -> None:
        for channel in self.channels:
            await channel.close()
        self.driver.job.stop("the test is over")
        await self.server.stop(0)
        if self.flow._task is not None:
            self.flow._task.cancel()
            await asyncio.wait([self.flow._task], timeout=20)

    async def dial(self, part: str, *, job_uid: str = JOB_UID) -> grpc.aio.Channel:
        folder = self.folder / f"{part.replace(':', '-')}-{job_uid}"
        tls = rpc.TlsFolder(self.authority.folder(folder, part=part, job_uid=job_uid))
        channel = await rpc.dial(f"{self.host}:7070", tls=tls, server=names.tls_name("driver", JOB_UID))
        self.channels.append(channel)
        return channel

    async def job(self) -> Any:
        return job_pb2_grpc.JobStub(await self.dial("operator", job_uid="*"))

    async def plan(self) -> None:
        stub = await self.job()
        request = plan_request()
        for call in (stub.PreparePlan, stub.CommitPlan):
            answer = await call(request, timeout=20)
            assert answer.ok, answer.message
        await until(lambda: self.driver.job.declared)

    async def attach(self, hello: agents_pb2.Hello) -> Any:
        call = agents_pb2_grpc.AgentsStub(await self.dial("pool:sim")).Attach(timeout=20)
        await call.write(agents_pb2.AgentMessage(hello=hello))
        return call

    async def connect(self, hello: pb.Hello, *, part: str = "pool:sim") -> Any:
        call = channels_pb2_grpc.ChannelsStub(await self.dial(part)).Connect(timeout=20)
        await call.write(pb.WorkerBatch(messages=[pb.WorkerMessage(hello=hello)]))
        return call


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
async def served(tmp_path: Path, authority: Authority) -> AsyncIterator[Served]:
    served = Served(tmp_path, authority, settings=DriverSettings(plan_timeout_s=0.3))
    await served.start()
    yield served
    await served.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def plan_request(plan: RLPlanSpec = JOB.plan, **fields: Any) -> job_pb2.PlanRequest:
    text = plan.model_dump_json(by_alias=True)
    return job_pb2.PlanRequest(**{"plan_json": text, "revision": plan.revision, **fields})


def agent_hello(**fields: Any) -> agents_pb2.Hello:
    known = {"job_uid": JOB_UID, "pod": "j-sim-0-a1", "pool": "sim", "attempt": 1, "protocol": names.PROTOCOL}
    return agents_pb2.Hello(**{**known, **fields})


def worker_hello(worker: str = "env/0", **fields: Any) -> pb.Hello:
    return pb.Hello(**{"job_uid": JOB_UID, "worker": worker, "attempt": 1, "protocol": names.PROTOCOL, **fields})


async def refused(call: Any) -> Any:
    """The refusal with which a stream begins."""
    first = await call.read()
    message = first.messages[0] if isinstance(first, pb.DriverBatch) else first
    assert message.WhichOneof("kind") == "refusal", message
    assert await call.read() is grpc.aio.EOF
    return message.refusal


# --- who may call what ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("part", "job_uid"), [("pool:sim", JOB_UID), ("driver", JOB_UID), ("operator", "other")])
async def test_only_the_operator_may_call_the_job_service(served, part, job_uid):
    stub = job_pb2_grpc.JobStub(await served.dial(part, job_uid=job_uid))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetStatus(job_pb2.GetStatusRequest(), timeout=20)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Drain(job_pb2.DrainRequest(), timeout=20)
    assert not served.driver.job.ledger.draining


@pytest.mark.parametrize(("part", "job_uid"), [("operator", "*"), ("pool:sim", "another-job")])
async def test_neither_the_operator_nor_a_foreign_jobs_pool_may_attach(served, part, job_uid):
    """Refused before a word of theirs is heard. None is said: on a busy machine the call has ended before a hello is
    written, and then the writing raises the refusal."""
    call = agents_pb2_grpc.AgentsStub(await served.dial(part, job_uid=job_uid)).Attach(timeout=20)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_certificate_of_another_authority_gets_no_connection(served, tmp_path):
    stranger = Authority().folder(tmp_path / "stranger", part="operator", job_uid="*")
    (stranger / "ca.crt").write_bytes((served.tls.folder / "ca.crt").read_bytes())
    channel = await rpc.dial(
        f"{served.host}:7070", tls=rpc.TlsFolder(stranger), server=names.tls_name("driver", JOB_UID)
    )
    served.channels.append(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await job_pb2_grpc.JobStub(channel).GetStatus(job_pb2.GetStatusRequest(), timeout=3)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_a_pool_may_not_speak_for_another_pool(served):
    await served.plan()
    refusal = await refused(await served.attach(agent_hello(pool="gpu")))
    assert refusal.exit_code == names.EXIT_USER_ERROR
    assert refusal.message == "certificate of 'pool:sim' may not speak for pool 'gpu'"


@pytest.mark.parametrize("worker", ["actor/0", "env", "no/such/role", ""])
async def test_a_pool_may_register_only_the_roles_that_it_lists(served, worker):
    await served.plan()
    refusal = await refused(await served.connect(worker_hello(worker)))
    assert refusal.exit_code == names.EXIT_USER_ERROR
    assert "may not register a worker of role" in refusal.message


# --- hellos -----------------------------------------------------------------------------------------------------------
async def test_a_hello_before_the_plan_is_told_to_come_again(served):
    for call in (await served.attach(agent_hello()), await served.connect(worker_hello())):
        refusal = await refused(call)
        assert refusal.exit_code == names.EXIT_RETRYABLE
        assert "no plan is in force yet" in refusal.message


async def test_a_hello_before_the_plan_is_welcomed_when_the_plan_comes(tmp_path, authority):
    served = Served(tmp_path, authority, settings=DriverSettings(plan_timeout_s=10))
    await served.start()
    call = await served.attach(agent_hello())
    await served.plan()
    assert (await call.read()).WhichOneof("kind") == "welcome"
    await served.stop()


@pytest.mark.parametrize(
    ("fields", "exit_code", "says", "why"),
    [
        ({"job_uid": "9999"}, names.EXIT_STALE, "this is job 5f2c, the caller is of job 9999", "job"),
        ({"protocol": names.PROTOCOL + 1}, names.EXIT_USER_ERROR, "run driver and worker pods from images", "protocol"),
        ({"highest_driver_attempt": 2}, names.EXIT_RETRYABLE, "driver attempt 1 has been replaced", "early"),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused_with_a_sentence_and_counted(served, fields, exit_code, says, why):
    await served.plan()
    refusal = await refused(await served.connect(worker_hello(**fields)))
    assert (refusal.exit_code, says in refusal.message) == (exit_code, True), refusal.message
    counted = {
        sample.labels["reason"]: sample.value
        for family in DriverMetrics(served.driver).collect()
        for sample in family.samples
        if sample.name == "rlinf_driver_refused_total"
    }
    assert counted == {why: 1.0}


async def test_a_replaced_attempt_is_refused_and_counted_and_the_one_that_replaced_it_goes_on(served):
    await served.plan()
    call = await served.attach(agent_hello(attempt=2))
    assert (await call.read()).WhichOneof("kind") == "welcome"
    refusal = await refused(await served.attach(agent_hello(attempt=1)))
    assert refusal.exit_code == names.EXIT_STALE
    assert "is attempt 1; attempt 2 has taken its place" in refusal.message
    assert served.driver.job.sessions.refused == {"stale": 1}
    (session,) = served.driver.job.sessions.agents.values()
    assert (session.attempt, session.outbox.closed) == (2, None)


async def test_a_caller_that_says_nothing_or_something_else_first_is_sent_away(served, monkeypatch):
    async def is_sent_away(call: Any, *, code: grpc.StatusCode, says: str) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match=says) as caught:
            await call.read()
        assert caught.value.code() is code

    monkeypatch.setattr(driver_server, "HELLO_TIMEOUT_S", 60.0)
    wrong = channels_pb2_grpc.ChannelsStub(await served.dial("pool:sim")).Connect(timeout=20)
    await wrong.write(pb.WorkerBatch(messages=[pb.WorkerMessage(ready=pb.Ready())]))
    await is_sent_away(
        wrong, code=grpc.StatusCode.INVALID_ARGUMENT, says="the first message of Connect must be a hello"
    )
    monkeypatch.setattr(driver_server, "HELLO_TIMEOUT_S", 0.2)
    silent = agents_pb2_grpc.AgentsStub(await served.dial("pool:sim")).Attach(timeout=20)
    await is_sent_away(silent, code=grpc.StatusCode.DEADLINE_EXCEEDED, says="Attach heard no hello for 0.2 s")


async def test_the_end_of_a_stream_leaves_no_session(served):
    await served.plan()
    agent = await served.attach(agent_hello())
    assert (await agent.read()).welcome.driver_attempt == 1
    told = [(await agent.read()).instruction for _ in range(4)]
    assert {i.start.worker for i in told if i.HasField("start")} == {"env/0", "env/1"}
    assert [(i.plan_revision, i.WhichOneof("kind")) for i in told if not i.HasField("start")] == [
        (1, "prepare"), (1, "commit"),
    ], "an agent knows the plan in force"  # fmt: skip
    worker = await served.connect(worker_hello())
    assert (await worker.read()).messages[0].WhichOneof("kind") == "welcome"
    assert ("sim", 0) in served.driver.job.sessions.agents
    worker.cancel()
    await agent.done_writing()
    await until(lambda: not served.driver.job.sessions.workers and not served.driver.job.sessions.agents)
    assert not served.driver.job.members.pods[("sim", 0)].attached


async def test_a_newer_connection_of_a_pod_ends_the_older(served):
    await served.plan()
    old = await served.attach(agent_hello())
    await old.read()
    new = await served.attach(agent_hello())
    assert (await new.read()).WhichOneof("kind") == "welcome"
    async with asyncio.timeout(20):
        while await old.read() is not grpc.aio.EOF:
            pass
    assert served.driver.job.members.pods[("sim", 0)].attached


async def test_a_message_that_cannot_be_worked_on_ends_the_job_with_a_sentence(served):
    await served.plan()
    await (await served.attach(agent_hello())).read()
    worker = await served.connect(worker_hello())
    await worker.read()
    report = pb.Report(metrics_json="{no json", step=1)
    await worker.write(pb.WorkerBatch(messages=[pb.WorkerMessage(report=report)]))
    await until(served.driver.job.ended.is_set)
    assert served.driver.job.standing.reason == "InternalError"
    assert served.driver.job.standing.message.startswith("message of env/0: JSONDecodeError")


# --- the job service --------------------------------------------------------------------------------------------------
async def test_watch_speaks_at_once_then_at_most_once_a_second_and_ends_with_the_end(served, monkeypatch):
    stub, told, to_pb = await served.job(), list[float](), wire.report_to_pb

    def noted(report: DriverReport) -> Any:
        told.append(time.monotonic())
        return to_pb(report)

    with monkeypatch.context() as slow:  # what would wait at all before it speaks would not speak in time
        for name in ("WATCH_INTERVAL_S", "WATCH_REPEAT_S"):
            slow.setattr(driver_server, name, 600.0)
        call = stub.Watch(job_pb2.WatchRequest(protocol=names.PROTOCOL), timeout=20)
        first = wire.report_from_pb(await call.read())
        assert (first.state, first.reason) == ("Waiting", "WaitingForPlan")
        call.cancel()
    monkeypatch.setattr(wire, "report_to_pb", noted)
    call = stub.Watch(job_pb2.WatchRequest(protocol=names.PROTOCOL), timeout=40)
    await call.read()
    await served.plan()
    for _ in range(50):
        served.driver.job.show()
    second = wire.report_from_pb(await call.read())
    assert told[1] - told[0] >= 0.99 * driver_server.WATCH_INTERVAL_S
    assert second.missing == ("agent of pod gpu-0", "agent of pod sim-0")
    served.driver.fail(Reason.USER_ERROR, "the simulator has no floor")
    last = wire.report_from_pb(await call.read())
    assert (last.state, last.message) == ("Failed", "the simulator has no floor")
    assert await call.read() is grpc.aio.EOF
    assert served.seen_end.is_set()


async def test_a_plan_is_prepared_and_committed_once_however_often_it_is_sent(served):
    stub = await served.job()
    for call in (stub.PreparePlan, stub.PreparePlan, stub.CommitPlan, stub.CommitPlan, stub.PreparePlan):
        answer = await call(plan_request(), timeout=20)
        assert (answer.ok, answer.message) == (True, "")
    assert served.driver.job.revision == 1


async def test_another_plan_is_prepared_then_committed_and_an_unprepared_one_is_not(served):
    stub = await served.job()
    await served.plan()
    await until(lambda: served.driver.job.declared)
    request = plan_request(make_job(revision=2, micro_batch=1).plan)
    early = await stub.CommitPlan(request, timeout=20)
    assert (early.ok, early.message) == (False, "revision 2 is not prepared")
    assert (await stub.PreparePlan(request, timeout=20)).ok
    report = wire.report_from_pb(await stub.GetStatus(job_pb2.GetStatusRequest(), timeout=20))
    assert (report.plan_revision, report.plan_prepared, report.plan_switches) == (1, 2, 1)
    assert (await stub.AbortPlan(request, timeout=20)).ok
    assert served.driver.switch.prepared == 0
    assert (await stub.PreparePlan(request, timeout=20)).ok
    assert (await stub.CommitPlan(request, timeout=20)).ok
    assert served.driver.job.revision == 2, "nothing had begun: no step has to end"
    assert (await stub.CommitPlan(request, timeout=20)).ok, "and again, without effect"
    assert served.driver.job.sessions.refused == {"plan": 1}
    elsewhere = plan_request(make_job(revision=3).plan, driver_attempt=7)
    assert not (await stub.PreparePlan(elsewhere, timeout=20)).ok
    assert served.driver.job.sessions.refused == {"plan": 1, "stale": 1}
    assert served.driver.job.revision == 2, "and the plan in force stays"


async def test_a_plan_that_the_flow_cannot_run_is_refused_with_the_flows_sentence(served):
    stub = await served.job()
    await served.plan()
    await until(lambda: served.driver.job.declared)
    value = make_job(revision=2).plan.model_dump(mode="json", by_alias=True)
    value["channels"] = [{"name": "trajectorys"}]
    answer = await stub.PreparePlan(plan_request(plan_json=json.dumps(value), revision=2), timeout=20)
    assert not answer.ok
    assert "the flow has no channel trajectorys" in answer.message
    report = wire.report_from_pb(await stub.GetStatus(job_pb2.GetStatusRequest(), timeout=20))
    assert (report.plan_revision, report.plan_failed) == (1, 2)
    assert "trajectorys" in report.plan_message


async def test_a_plan_that_cannot_be_executed_is_refused_with_one_sentence_each(served):
    stub = await served.job()
    value = JOB.plan.model_dump(mode="json", by_alias=True)
    value["workers"][0]["slots"] = "sim/0/7"
    value["workers"][0]["count"] = 1
    bad = {
        "it is no JSON": plan_request(plan_json="{"),
        "spec.revison": plan_request(plan_json=json.dumps({**value, "revison": 1})),
        "index below 2": plan_request(plan_json=json.dumps(value)),
        "its plan says revision 1": plan_request(revision=2),
        "this is driver attempt 1": plan_request(driver_attempt=7),
    }
    for says, request in bad.items():
        answer = await stub.PreparePlan(request, timeout=20)
        assert not answer.ok
        assert says in answer.message
        assert "\n" not in answer.message
    unprepared = await stub.CommitPlan(plan_request(), timeout=20)
    assert unprepared.message == "revision 1 is not prepared"
    await stub.PreparePlan(plan_request(), timeout=20)
    await stub.AbortPlan(plan_request(), timeout=20)
    assert not (await stub.CommitPlan(plan_request(), timeout=20)).ok
    assert not (await stub.CommitPlan(plan_request(driver_attempt=7), timeout=20)).ok


async def test_a_drain_answers_at_its_deadline_or_at_the_end(served, monkeypatch):
    await served.plan()
    stub = await served.job()
    late = await stub.Drain(job_pb2.DrainRequest(deadline_s=0.2), timeout=20)
    assert (late.drained, late.message) == (False, "step 1 did not end in time")
    asked = Mock(side_effect=served.driver.drain)
    monkeypatch.setattr(served.driver, "drain", asked)
    waiting = asyncio.ensure_future(stub.Drain(job_pb2.DrainRequest(deadline_s=60), timeout=60)._call_response)
    await until(lambda: asked.called)
    served.driver.tick()  # nothing is under way yet
    answer = await waiting
    assert (answer.drained, answer.message) == (True, "stopped after step 0 of 3")


async def test_a_drain_of_a_job_that_failed_says_so(served):
    served.driver.fail(Reason.USER_ERROR, "no such environment")
    answer = await (await served.job()).Drain(job_pb2.DrainRequest(deadline_s=20), timeout=20)
    assert (answer.drained, answer.message) == (False, "no such environment")


async def test_a_port_that_is_taken_is_said_in_a_sentence(served, tmp_path, authority):
    second = Served(tmp_path / "second", authority, settings=DriverSettings())
    job = JobServicer(second.driver, on_plan=lambda: None, seen_end=lambda: None)
    with pytest.raises(UserError, match=f"cannot listen on {served.host}:7070.*end the other process"):
        await serve(second.driver, job, address=f"{served.host}:7070", tls=second.tls)
