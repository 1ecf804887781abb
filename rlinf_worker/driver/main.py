"""The driver's process: environment in, exit code out. Called by `python -m rlinf_worker driver`.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| run() | - | driver.ended, SIGTERM | the core, the kubelet |
| flow task | steps | see flow.py | see flow.py; cancelled and run anew after a restore |
| tick task | the clock | 0.2 s | - |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from rlinf_api import __version__, conditions, names, rpc, unknown
from rlinf_api.errors import InvalidManifest, InvariantBroken, RetryableError, UserError
from rlinf_api.job import RLJobSpec
from rlinf_api.report import DriverState, Failure
from rlinf_worker import last_words, settings
from rlinf_worker.clock import Clock
from rlinf_worker.driver import status
from rlinf_worker.driver.core import Driver
from rlinf_worker.driver.flow import FlowRun
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.metrics import DriverMetrics
from rlinf_worker.driver.output import Output
from rlinf_worker.driver.reporting import Reporter
from rlinf_worker.driver.server import JobServicer, serve
from rlinf_worker.driver.settings import DriverSettings
from rlinf_worker.flows import registry
from rlinf_worker.metrics_server import MetricsServer
from rlinf_worker.roles.loading import LoadFailed
from rlinf_worker.roles.protocol import FlowSettings

logger = logging.getLogger(__name__)
MAX_URI: Final = 1024  # in the termination message, which has 4096 bytes for everything
MAX_FIELDS: Final = 8  # named in one sentence
TICK_S: Final = 0.2  # the shortest time that any watchdog of the core counts in is 0.2 s


def read_job(path: str, *, attempt: int) -> tuple[RLJobSpec, tuple[str, ...]]:
    """(the spec, the fields that go unheeded). An operator that is newer than this image asks for fields that it has no
    name for: a job that has begun goes on without them, one that begins here does not."""
    try:
        raw = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"job file {path} cannot be read", got=str(error), next="look at the driver's ConfigMap"
        ) from error
    known, fields = unknown.pruned(raw, RLJobSpec, "spec") if isinstance(raw, dict) else (raw, ())
    if fields and attempt == 1:
        raise UserError(
            "the job asks for what this driver's image has no field for", got=", ".join(fields[:MAX_FIELDS]),
            wanted=f"fields of {__version__}",
            next="set jobImages.driver, or for a flow of your own the image of its pool, to the operator's version",
        )  # fmt: skip
    try:
        return RLJobSpec.model_validate_json(json.dumps(known)), fields
    except ValidationError as error:
        raise UserError(f"job file {path} is not an RLJob spec", got=str(error)[:500]) from error


def flow_settings(spec: RLJobSpec, *, attempt: int = 1) -> FlowSettings:
    try:
        problems = list(registry.check_job(spec))
    except LoadFailed as error:
        if attempt == 1:
            raise
        next = "a driver before this one has loaded it, so it is tried again; its stack is in the log"
        raise RetryableError(error.what, got=error.got, next=next) from error.__cause__
    if problems:
        raise InvalidManifest("; ".join(map(str, problems)))
    config = registry.check_config(spec.flow.name, spec.flow.config)
    return FlowSettings(
        name=spec.flow.name,
        steps=spec.flow.steps,
        seed=spec.seed,
        max_staleness=spec.flow.max_staleness,
        order="lineage" if config.get("order") == "lineage" else "arrival",
        config=config,
        model=spec.model.path if spec.model is not None else "",
        train_data=spec.data.train if spec.data is not None else "",
        eval_data=spec.data.eval if spec.data is not None else "",
    )


class FlowTask:
    """The flow function as a task; run anew from its first line when the job goes back to a checkpoint."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        driver, job = self._driver, self._driver.job
        roles = {r.name: len(job.members.of_role(r.name)) for r in job.spec.roles}
        try:
            function = registry.load(job.flow_settings.name)
            await function(FlowRun(driver, roles=roles, on_declared=driver.declare))
            if not job.ending and not job.ledger.finished:
                raise UserError(
                    f"flow {job.flow_settings.name!r} returned before its end",
                    got=f"step {job.ledger.committed} of {job.ledger.steps}",
                    next="let `async for step in flow.steps()` run to its end",
                )
        except UserError as error:
            self._fail(conditions.Reason.USER_ERROR, str(error), because=error.reason)
        except InvariantBroken as error:
            logger.exception("invariant broken")
            self._fail(conditions.Reason.INTERNAL_ERROR, str(error), because=error.reason)
        except Exception as error:  # top of a task: the user's own flow may raise anything
            logger.exception("the flow raised")
            text = f"flow {job.flow_settings.name!r} raised {type(error).__name__}: {error}"
            self._fail(conditions.Reason.USER_ERROR, text, because=type(error).__name__)

    def _fail(self, reason: conditions.Reason, text: str, *, because: str) -> None:
        self._driver.fail(reason, text, Failure(role="driver", reason=because, message=text))


def make_driver(env: Mapping[str, str]) -> tuple[Driver, Clock, tuple[str, ...]]:
    """(it, its clock, the fields of its job that it does not know)"""
    attempt = int(env[names.ENV_ATTEMPT])
    spec, unheeded = read_job(env[names.ENV_JOB_FILE], attempt=attempt)
    limits = settings.load(env)
    clock = Clock(notice_s=limits.oversleep_s)
    job = Job(
        spec,
        flow_settings=flow_settings(spec, attempt=attempt),
        uid=env[names.ENV_JOB_UID],
        name=env.get(names.ENV_JOB_NAME, ""),
        attempt=attempt,
        checkpoint_uri=env.get(names.ENV_CHECKPOINT_URI, ""),
        output=Output(env.get(names.ENV_OUTPUT_DIR, "")),
        clock=clock,
        settings=DriverSettings(limits=limits),
        first_of_life=env.get(names.ENV_FIRST_OF_LIFE, "") == "1",
    )
    return Driver(job, timers=clock), clock, unheeded


async def run_driver() -> int:
    env = os.environ
    driver, clock, unheeded = make_driver(env)
    flow, seen_end = FlowTask(driver), asyncio.Event()
    driver.on_rerun, job = flow.start, driver.job
    servicer = JobServicer(driver, on_plan=flow.start, seen_end=seen_end.set)
    tls, host = rpc.TlsFolder(env[names.ENV_TLS_DIR]), env[names.ENV_POD_IP]
    server = await serve(driver, servicer, address=f"{host}:{names.PORT_DRIVER_GRPC}", tls=tls)
    metrics = DriverMetrics(driver)
    http = await MetricsServer(metrics.registry).start(host=host, port=names.PORT_METRICS)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    ticker = asyncio.ensure_future(_tick(driver, clock))
    reporter = Reporter(
        driver.profiles,
        address=env.get(names.ENV_SCHEDULER_ADDRESS, ""),
        tls=tls,
        namespace=env.get(names.ENV_NAMESPACE, ""),
        job_uid=job.uid,
        settings=job.settings,
    )
    job.event("driver", f"driver attempt {job.attempt} listens on {host}:{names.PORT_DRIVER_GRPC}")
    if unheeded:
        text = f"the job goes on without {', '.join(unheeded[:MAX_FIELDS])}, which this driver's image does not know"
        job.event("unheeded", text)
    try:
        async with reporter:
            await _first_of(job.ended, stopped)
            driver.profiles.end()
            if job.ended.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(job.settings.linger_s):
                        await _first_of(seen_end, stopped)
    finally:
        ticker.cancel()
        await server.stop(0.5)
        await http.stop()
        job.output.flush()
    return _exit_code(driver, terminated=stopped.is_set())


async def _first_of(*events: asyncio.Event) -> None:
    """Bounded by the events themselves: one is the job's end, the other the kubelet's SIGTERM."""
    tasks = [asyncio.ensure_future(e.wait()) for e in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _tick(driver: Driver, clock: Clock) -> None:
    stood_still_s = 0.0
    while True:
        try:
            driver.tick()
            if (late_s := clock.stood_still_s - stood_still_s) > 0:
                stood_still_s = clock.stood_still_s
                driver.job.event("overslept", f"this driver stood still for {late_s:.1f} s")
        except Exception as error:  # top of a task: without a clock nobody would be noticed missing
            logger.exception("tick failed")
            driver.fail(conditions.Reason.INTERNAL_ERROR, f"{type(error).__name__}: {error}")
        await asyncio.sleep(TICK_S)


def _exit_code(driver: Driver, *, terminated: bool) -> int:
    standing = driver.job.standing
    if standing.state in (DriverState.COMPLETE, DriverState.DRAINED):
        _last_words(driver, names.EXIT_OK)
        return names.EXIT_OK
    if standing.state is DriverState.FAILED:
        code = names.EXIT_USER_ERROR if standing.reason in conditions.USERS else 1
    elif standing.reason == "Stale":
        code = names.EXIT_STALE
    else:
        code = names.EXIT_TERMINATED if terminated else names.EXIT_RETRYABLE
    _last_words(driver, code)
    return code


def _last_words(driver: Driver, code: int) -> None:
    """The termination message: how the job ended and how far it came, for an operator that was away."""
    path = os.environ.get(names.ENV_TERMINATION_LOG, "")
    if not path:
        return
    standing = driver.job.standing
    failure = Failure(role="driver", reason=standing.reason, message=standing.message, exit_code=code)
    if (first := driver.first_failure) is not None:
        failure = replace(failure, role=first.role, worker=first.worker, pod=first.pod, node=first.node)
    said = status.report(driver)
    also: dict[str, str | int] = {
        "state": str(said.state),
        "step": said.step,
        "steps": said.steps,
        "branch": said.branch,
        "checkpointUri": said.checkpoint_uri if len(said.checkpoint_uri) <= MAX_URI else "",
        "checkpointStep": said.checkpoint_step,
    }
    try:
        # In place: the kubelet has bound a file of its own there, which nothing can be renamed over.
        Path(path).write_bytes(last_words.encode(failure, also=also))
    except OSError as error:
        logger.warning("termination message not written", extra={"error": str(error)})


def run() -> int:
    return asyncio.run(run_driver())
