"""The scheduler as a process: settings, the wait for its certificate, plans as objects, mTLS, health, metrics."""

import asyncio
import json
import logging
import os
import signal
import socket
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from rlinf_api import logs, names, rpc
from rlinf_api._pb.rlinf.scheduler.v1alpha1 import scheduler_pb2, scheduler_pb2_grpc
from rlinf_api.errors import ClusterBusy, RLinfError, UserError
from rlinf_scheduler import __main__ as process
from rlinf_scheduler.plan_writer import ApiPlanWriter
from rljob.local.store import MemoryStore
from tests.builders import UID, ppo_job
from tests.fakes.api_server import FakeApiServer
from tests.fakes.certs import Authority

SERVER = names.tls_name("scheduler", "*")


@pytest.fixture
async def server():
    async with FakeApiServer() as made:
        yield made


def test_settings_come_from_the_environment_and_strangers_are_refused():
    # What Kubernetes adds for a Service called rlinf-scheduler is no setting.
    environ = {
        "RLINF_SCHEDULER_HTTP_PORT": "9",
        "RLINF_SCHEDULER_SERVICE_HOST": "10.0.0.1",
        "RLINF_SCHEDULER_PORT": "tcp://10.0.0.1:7080",
    }
    assert process.read_settings(environ) == process.SchedulerSettings(http_port=9)
    with pytest.raises(UserError, match="RLINF_SCHEDULER_ADRESS sets nothing"):
        process.read_settings({"RLINF_SCHEDULER_ADRESS": "x"})
    with pytest.raises(UserError, match="RLINF_SCHEDULER_HTTP_PORT is no number"):
        process.read_settings({"RLINF_SCHEDULER_HTTP_PORT": "x"})


async def test_plans_are_written_and_errors_told_apart(server):
    writer = ApiPlanWriter(server.connection, timeout_s=2)
    plan = {"kind": "RLPlan", "metadata": {"name": "math-p1", "namespace": "team"}, "spec": {"revision": 1}}
    assert (await writer.create(plan))["metadata"]["uid"]
    for call, reason in (
        (writer.create(plan), "AlreadyExists"),
        (writer.get("RLPlan", "x", namespace="team"), "NotFound"),
    ):
        with pytest.raises(RLinfError) as caught:
            await call
        assert caught.value.reason == reason
    server.fault(status=429, times=9)
    with pytest.raises(ClusterBusy):
        await writer.get("RLPlan", "math-p1", namespace="team")


async def test_an_api_server_that_hangs_is_left_at_the_deadline(server):
    server.fault(status=500, delay_s=30)
    started = time.monotonic()
    with pytest.raises(ClusterBusy, match="no answer"):
        await ApiPlanWriter(server.connection, timeout_s=0.3).get("RLPlan", "a", namespace="team")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (0, 0, None),
        (UserError("cannot listen"), 2, "cannot start"),
        (ClusterBusy("it is away"), 1, "stopped"),
    ],
)
def test_the_exit_status_says_whether_it_was_stopped_or_broke_or_cannot_start(
    monkeypatch, caplog, answer, status, said
):
    configured, ran = [], []

    async def run(settings):
        ran.append(settings)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setattr(logs, "configure", lambda who, **more: configured.append((who, more)))
    monkeypatch.setattr(os, "environ", {"HOSTNAME": "s-0", "RLINF_SCHEDULER_LOG_LEVEL": "DEBUG"})
    assert process.main() == status
    who = {"part": "scheduler", "replica": "s-0"}
    quiet = {"aiohttp": logging.WARNING}
    assert configured == [(who, {"level": "INFO"}), (who, {"level": "DEBUG", "noisy": quiet})]
    assert ran == [process.SchedulerSettings(log_level="DEBUG")]
    assert caplog.messages == ([said] if said else [])


def test_the_settings_are_these():
    assert process.SchedulerSettings() == process.SchedulerSettings(
        address="0.0.0.0:7080", tls_dir="/etc/rlinf/tls", http_host="0.0.0.0", http_port=8080, kubeconfig="",
        log_level="INFO",
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_while_it_still_waits_for_its_certificate(monkeypatch, tmp_path, caplog, number):
    caplog.set_level(logging.INFO)
    signals = {}
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "add_signal_handler", lambda number, call: signals.update({number: call}))
    settings = process.SchedulerSettings(tls_dir=str(tmp_path), http_host="127.0.0.1", http_port=0)
    task = asyncio.create_task(process.run(settings))
    async with asyncio.timeout(30):
        while "waiting for the certificate" not in caplog.messages:
            await asyncio.sleep(0.01)
        signals[number]()
        assert await task == 0


async def test_a_port_that_is_taken_is_a_setting_that_cannot_be_used(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = process.SchedulerSettings(tls_dir=str(tmp_path), http_host="127.0.0.1", http_port=port)
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: .*wanted a free port"):
            await process.serve(settings, asyncio.Event())


async def test_a_request_is_counted_and_its_seconds_measured():
    registry = CollectorRegistry()
    planning = process.MeasuredPlanning(MemoryStore(), registry=registry)
    job = ppo_job().build()
    assert (await planning.request_plan(job, reason="Initial", highest_revision=6)).plan == "math-p7"
    job["spec"]["pools"][1]["slots"]["perPod"] = 1
    assert (await planning.request_plan(job, reason="Initial", highest_revision=7)).infeasible
    value = registry.get_sample_value
    assert [value("rlinf_scheduler_plans_total", {"answer": a}) for a in ("planned", "infeasible")] == [1, 1]
    assert value("rlinf_scheduler_request_plan_seconds_count") == 2


@pytest.mark.parametrize(("error", "counted"), [(ClusterBusy("busy"), "ClusterBusy"), (KeyError("a bug"), "broke")])
async def test_a_request_that_fails_is_counted_by_its_reason_or_as_broken(error, counted):
    class Failing(MemoryStore):
        async def create(self, obj):
            raise error

    registry = CollectorRegistry()
    planning = process.MeasuredPlanning(Failing(), registry=registry)
    with pytest.raises(type(error)):
        await planning.request_plan(ppo_job().build(), reason="Initial", highest_revision=0)
    assert answers(registry) == {counted: 1}


async def test_a_request_whose_caller_has_gone_counts_as_no_answer_and_as_no_bug():
    class Hanging(MemoryStore):
        async def create(self, obj):
            began.set()
            await asyncio.Event().wait()

    began, registry = asyncio.Event(), CollectorRegistry()
    planning = process.MeasuredPlanning(Hanging(), registry=registry)
    asked = asyncio.create_task(planning.request_plan(ppo_job().build(), reason="Initial", highest_revision=0))
    async with asyncio.timeout(20):
        await began.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert answers(registry) == {}


def answers(registry: CollectorRegistry) -> dict[str, float]:
    """Those that were given, and how often."""
    [metric] = [metric for metric in registry.collect() if metric.name == "rlinf_scheduler_plans"]
    counts = {s.labels["answer"]: s.value for s in metric.samples if s.name == "rlinf_scheduler_plans_total"}
    assert set(counts) == set(process.ANSWERS)
    return {answer: count for answer, count in counts.items() if count}


class Running:
    """serve() as a task."""

    def __init__(self, tls: Path, connection, monkeypatch) -> None:
        self._monkeypatch = monkeypatch
        self.connected: list[dict[str, str]] = []

        async def connect(**given):
            self.connected.append(given)
            return connection

        monkeypatch.setattr(process, "connect", connect)
        # An address of this process alone: nobody else takes a port of it that was free.
        pid = os.getpid()
        self.host = f"127.{130 + pid % 64}.{pid // 64 % 250}.1"
        self.settings = process.SchedulerSettings(
            address=f"{self.host}:7080", tls_dir=str(tls), http_host=self.host, http_port=7081, kubeconfig="/k"
        )
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(process.serve(self.settings, self.stop))

    async def get(self, path: str) -> tuple[int, str]:
        def ask() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(
                    f"http://{self.host}:{self.settings.http_port}{path}", timeout=20
                ) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()
            except OSError:
                return 0, ""

        return await asyncio.to_thread(ask)

    async def until_ready(self) -> None:
        async with asyncio.timeout(30):
            while (await self.get("/readyz"))[0] != 200:
                assert not self.task.done(), self.task.exception()
                await asyncio.sleep(0.05)


async def test_it_waits_for_its_certificate_and_then_serves_the_operator_alone(server, tmp_path, monkeypatch):
    authority = Authority()
    running = Running(tmp_path / "tls", server.connection, monkeypatch)
    try:
        async with asyncio.timeout(30):
            while (await running.get("/healthz"))[0] != 200:
                await asyncio.sleep(0.05)
        assert await running.get("/readyz") == (503, "no certificate yet\n")
        authority.folder(tmp_path / "tls", part="scheduler", job_uid="*", namespace="*")
        await running.until_ready()

        job = ppo_job().build()
        request = scheduler_pb2.RequestPlanRequest(
            namespace="team", job="math", job_uid=UID, reason="Initial", job_json=json.dumps(job)
        )
        operator = authority.folder(tmp_path / "operator", part="operator", job_uid="*", namespace="*")
        channel = await rpc.dial(running.settings.address, tls=rpc.TlsFolder(operator), server=SERVER)
        try:
            answer = await scheduler_pb2_grpc.SchedulerStub(channel).RequestPlan(request, timeout=20)
            assert answer.plan == "math-p1"
            assert ("RLPlan", "team", "math-p1") in server.objects
            asked = health_pb2.HealthCheckRequest(service=process.SERVICE)
            found = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=20)
            assert found.status == health_pb2.HealthCheckResponse.SERVING
            assert running.connected == [{"kubeconfig": "/k"}]
        finally:
            await channel.close()
        assert 'rlinf_scheduler_plans_total{answer="planned"} 1.0' in (await running.get("/metrics"))[1]

        driver = authority.folder(tmp_path / "driver", part="driver", job_uid=UID)
        channel = await rpc.dial(running.settings.address, tls=rpc.TlsFolder(driver), server=SERVER)
        try:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await scheduler_pb2_grpc.SchedulerStub(channel).RequestPlan(request, timeout=20)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        finally:
            await channel.close()
    finally:
        running.stop.set()
        async with asyncio.timeout(30):
            assert await running.task == 0
