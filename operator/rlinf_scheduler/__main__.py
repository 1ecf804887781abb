"""`python -m rlinf_scheduler`: the scheduler as a process. It holds nothing that must not be lost: plans are objects,
so is what was measured, and further profiles come with the next steps. While it is away, jobs run on, and new ones say
SchedulerUnavailable.

    environment   RLINF_SCHEDULER_{ADDRESS,TLS_DIR,HTTP_HOST,HTTP_PORT,KUBECONFIG,LOG_LEVEL}, see `SchedulerSettings`
    ports         address: gRPC with mTLS, grpc.health.v1 too (any certificate of the CA may ask)
                  http_port: /healthz, /readyz, /metrics (rlinf_scheduler_*); kubelets have no certificate
    files         tls_dir: ca.crt, tls.crt, tls.key of Secret rlinf-scheduler-tls, which the operator writes; waited
                  for, and read anew when they change
    rights        create, get, list and annotate RLPlans; keep RLProfiles; get RLJobs
    exit status   0 after SIGTERM, within 5 s; 1 when it cannot go on; 2 for settings that cannot be used

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| main | - | the certificate's files; SIGTERM | the operator; signals |
| gRPC's and HTTP's own | requests | | stop() |
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rlinf_api import logs, rpc, variables
from rlinf_api.errors import RLinfError, UserError
from rlinf_api.plan import Planned
from rlinf_scheduler.jobs import BROKE as DECISION_BROKE
from rlinf_scheduler.jobs import UNREAD
from rlinf_scheduler.kept import PlanStore
from rlinf_scheduler.plan_writer import ApiPlanWriter, connect
from rlinf_scheduler.replan.decide import CODES, WRITTEN
from rlinf_scheduler.service import ALLOWED, Planning, serve_on

logger = logging.getLogger(__name__)
PREFIX: Final = "RLINF_SCHEDULER_"
SERVICE: Final = "rlinf.scheduler.v1alpha1.Scheduler"
API_TIMEOUT_S: Final = 8.0  # below the operator's 10 s for RequestPlan
STOP_GRACE_S: Final = 2.0
FILES_POLL_S: Final = 0.5
FILES: Final = ("ca.crt", "tls.crt", "tls.key")
BROKE: Final = "broke"
ANSWERS: Final = ("planned", "infeasible", "ClusterBusy", "NotFound", "RLinfError", BROKE)
"""To RequestPlan. The reasons of errors that a PlanWriter raises are there from the start, as a series that begins at 1
has not risen, and no alert on its increase would come."""
REPORTS: Final = ("accepted", "refused", "unanswered")
"""To ReportProfile; unanswered: the API server did not say whether its plan is there, and the driver tries again."""


DECISIONS: Final = (*CODES, *(str(reason) for reason in WRITTEN), UNREAD, DECISION_BROKE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    address: str = "0.0.0.0:7080"
    """Where gRPC listens. The Service and RLINF_OPERATOR_SCHEDULER_ADDRESS name the same port."""
    tls_dir: str = "/etc/rlinf/tls"
    """The mounted Secret; it may be empty until the operator has written it."""
    http_host: str = "0.0.0.0"
    """/healthz, /readyz, /metrics."""
    http_port: int = 8080
    """Port of these."""
    kubeconfig: str = ""
    """A file, outside a cluster. Empty: the pod's service account."""
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""


def read_settings(environ: Mapping[str, str]) -> SchedulerSettings:
    known = {f"{PREFIX}{field.name.upper()}": field for field in fields(SchedulerSettings)}
    variables.check(environ, prefix=PREFIX, known=known)
    values: dict[str, Any] = {}
    for variable, field in known.items():
        if variable in environ:
            kind: type[Any] = type(field.default)
            try:
                values[field.name] = kind(environ[variable])
            except ValueError as error:
                raise UserError(f"{variable} is no number", got=repr(environ[variable])) from error
    return SchedulerSettings(**values)


class MeasuredPlanning(Planning):
    """Planning, counted."""

    def __init__(self, store: PlanStore, *, registry: CollectorRegistry) -> None:
        super().__init__(store, on_decision=self._on_decision)
        self._decisions = Counter(
            "rlinf_scheduler_decisions_total",
            "Decisions on the next plan of a job: the reason of the one that was written, or why none was",
            ["code"],
            registry=registry,
        )
        for code in DECISIONS:
            self._decisions.labels(code=code)
        self._decision_seconds = Histogram(
            "rlinf_scheduler_decision_seconds", "Of one decision, reads and the search included", registry=registry
        )
        self._answers = Counter("rlinf_scheduler_plans_total", "Answers to RequestPlan", ["answer"], registry=registry)
        for answer in ANSWERS:
            self._answers.labels(answer=answer)
        self._seconds = Histogram(
            "rlinf_scheduler_request_plan_seconds", "RequestPlan, the write of the plan included", registry=registry
        )

        self._reports = Counter(
            "rlinf_scheduler_profiles_total", "Profiles that drivers reported", ["answer"], registry=registry
        )
        for answer in REPORTS:
            self._reports.labels(answer=answer)

    async def report_profile(self, text: str, *, namespace: str, job_uid: str) -> None:
        try:
            await super().report_profile(text, namespace=namespace, job_uid=job_uid)
        except RLinfError as error:
            self._reports.labels(answer="refused" if isinstance(error, UserError) else "unanswered").inc()
            raise
        self._reports.labels(answer="accepted").inc()

    async def request_plan(self, job: dict[str, Any], *, reason: str, highest_revision: int) -> Planned:
        try:
            with self._seconds.time():
                found = await super().request_plan(job, reason=reason, highest_revision=highest_revision)
        except RLinfError as error:
            self._count(error.reason)
            raise
        except Exception:  # not CancelledError: a caller that has gone is given no answer
            self._count(BROKE)
            raise
        self._count("planned" if found.plan else "infeasible")
        return found

    def _on_decision(self, code: str, seconds: float) -> None:
        self._decisions.labels(code=code).inc()
        self._decision_seconds.observe(seconds)

    def _count(self, answer: str) -> None:
        self._answers.labels(answer=answer).inc()


def pages(registry: CollectorRegistry, *, is_serving: asyncio.Event) -> web.AppRunner:
    """/healthz, as long as the event loop answers; /readyz, while gRPC serves; /metrics."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        return (
            web.Response(text="ok\n") if is_serving.is_set() else web.Response(text="no certificate yet\n", status=503)
        )

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    for page in (healthz, readyz, metrics):
        app.router.add_get(f"/{page.__name__}", page)
    return web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)


async def run(settings: SchedulerSettings) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return await serve(settings, stop)


async def serve(settings: SchedulerSettings, stop: asyncio.Event) -> int:
    registry = CollectorRegistry()
    is_serving = asyncio.Event()
    runner = pages(registry, is_serving=is_serving)
    await runner.setup()
    try:
        await _listen(runner, host=settings.http_host, port=settings.http_port)
        if not await _certificate_there(Path(settings.tls_dir), stop):
            return 0
        async with await connect(kubeconfig=settings.kubeconfig) as connection:
            writer = ApiPlanWriter(connection, timeout_s=API_TIMEOUT_S)
            options = [*({**dict(rpc.SERVER_OPTIONS), **rpc.RESTING}).items()]  # each driver keeps its connection
            server = grpc.aio.server(interceptors=[rpc.Gatekeeper(ALLOWED, job_uid="*")], options=options)
            planning = MeasuredPlanning(writer, registry=registry)
            serve_on(server, planning)
            checks = health.HealthServicer()
            health_pb2_grpc.add_HealthServicer_to_server(checks, server)
            port = rpc.bind(server, settings.address, tls=rpc.TlsFolder(settings.tls_dir))
            try:
                await server.start()
                deciding = asyncio.create_task(planning.jobs.run(), name="decisions on plans")
                await checks.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
                is_serving.set()
                logger.info("serving", extra={"port": port})
                await stop.wait()
                is_serving.clear()
                await checks.enter_graceful_shutdown()
                deciding.cancel()
                await asyncio.wait([deciding])
            finally:
                await server.stop(STOP_GRACE_S)
            return 0
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, *, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}", got=str(error), wanted="a free port") from error


async def _certificate_there(folder: Path, stop: asyncio.Event) -> bool:
    """Until the Secret's files are there: on a first install the operator is about to write them. False: stopped."""
    said = False
    while not all((folder / name).is_file() for name in FILES):
        if not said:
            logger.info("waiting for the certificate", extra={"folder": str(folder)})
            said = True
        try:
            async with asyncio.timeout(FILES_POLL_S):
                await stop.wait()
            return False
        except TimeoutError:
            continue
    return True


def main() -> int:
    who: dict[str, object] = {"part": "scheduler", "replica": os.environ.get("HOSTNAME", "")}
    logs.configure(who, level="INFO")
    try:
        settings = read_settings(os.environ)
        logs.configure(who, level=settings.log_level, noisy={"aiohttp": logging.WARNING})
        return asyncio.run(run(settings))
    except UserError as error:
        logger.error("cannot start", extra={"error": str(error)})
        return 2
    except RLinfError as error:
        logger.error("stopped", extra={"error": str(error)})
        return 1


if __name__ == "__main__":
    sys.exit(main())
