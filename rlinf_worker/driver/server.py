"""The driver's gRPC face: three servicers that turn streams into calls of the core and outboxes into streams.

| stream | consumes | waits for | unblocked by |
|---|---|---|---|
| Agents.Attach, Channels.Connect | as `uplink.serving` says | | |
| Job.Watch | core.changed | a change, at most 1/s | the core; 10 s without change sends again |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import grpc
import grpc.aio
from pydantic import ValidationError

from rlinf_api import names, plan_rules, rpc, sentences, wire
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2, agents_pb2_grpc
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2_grpc
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2, job_pb2_grpc
from rlinf_api.conditions import Reason
from rlinf_api.errors import InvalidManifest, InvariantBroken, RLinfError
from rlinf_api.plan import RLPlanSpec
from rlinf_api.report import REPEATED_S, DriverReport, DriverState
from rlinf_worker.driver import status
from rlinf_worker.driver.core import Driver
from rlinf_worker.driver.flow import would_run
from rlinf_worker.driver.members import PodKey
from rlinf_worker.driver.sessions import Refuse, check_protocol
from rlinf_worker.flows import registry
from rlinf_worker.uplink import serving as uplink
from rlinf_worker.uplink.outbox import Outbox, in_frames

logger = logging.getLogger(__name__)

ALLOWED: Final[rpc.Allowed] = {
    "/rlinf.agents.v1alpha1.Agents/Attach": frozenset({"pool"}),
    "/rlinf.channels.v1alpha1.Channels/Connect": frozenset({"pool"}),
    **{
        f"/rlinf.job.v1alpha1.Job/{method}": frozenset({"operator"})
        for method in ("GetStatus", "Watch", "PreparePlan", "CommitPlan", "AbortPlan", "Adjust", "Drain")
    },
}
HELLO_TIMEOUT_S: Final = 10.0  # a caller that says nothing after connecting is not one of ours
WATCH_INTERVAL_S: Final = 1.0  # at most one message a second to the operator (API.md)
WATCH_REPEAT_S: Final = REPEATED_S  # an unchanged status is repeated, so that a watcher knows this loop is alive

ATTACH: Final = uplink.Frames(method="Attach", unpack=lambda frame: [frame], pack=lambda batch: batch)
CONNECT: Final = uplink.Frames(
    method="Connect",
    unpack=lambda frame: frame.messages,
    pack=lambda batch: (pb.DriverBatch(messages=part) for part in in_frames(batch)),
)

Context = grpc.aio.ServicerContext[Any, Any]


def _stream(frames: uplink.Frames) -> Any:
    """The method of a servicer that is its own reception. gRPC calls in a thread what is no async generator itself."""

    async def serve(self: uplink.Reception[Any], requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        answers = uplink.serve(requests, context, frames=frames, reception=self, hello_timeout_s=HELLO_TIMEOUT_S)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                yield answer

    return serve


class AgentsServicer(agents_pb2_grpc.AgentsServicer, uplink.Reception[PodKey]):
    """One agent per pod of the plan."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    Attach = _stream(ATTACH)

    def key(self, hello: agents_pb2.Hello) -> PodKey:
        return hello.pool, hello.ordinal

    async def admit(self, hello: agents_pb2.Hello, part: str, outbox: Outbox[Any]) -> None:
        if part != f"pool:{hello.pool}":
            raise Refuse(
                f"certificate of {part!r} may not speak for pool {hello.pool!r}",
                exit_code=names.EXIT_USER_ERROR,
                why="certificate",
            )
        await _plan_in_force(self._driver)
        welcome = agents_pb2.Welcome(
            driver_attempt=self._driver.job.attempt,
            protocol=names.PROTOCOL,
            heartbeat_interval_s=self._driver.job.settings.limits.heartbeat_interval_s,
        )
        outbox.put(agents_pb2.DriverMessage(welcome=welcome))  # before what the hello gives rise to
        self._driver.on_agent_hello(hello, outbox)

    def refused(self, hello: agents_pb2.Hello, error: RLinfError) -> agents_pb2.DriverMessage:
        code = _refused(self._driver, f"agent of pod {hello.pod}", error)
        return agents_pb2.DriverMessage(refusal=agents_pb2.Refusal(message=str(error), exit_code=code))

    def heard(self, key: PodKey, message: agents_pb2.AgentMessage, *, more: bool) -> None:
        with _bugs_end_the_job(self._driver, f"pod {key[0]}-{key[1]}"):
            self._driver.on_agent_message(key, message)

    def gone(self, key: PodKey, outbox: Outbox[Any]) -> None:
        self._driver.on_agent_gone(key, outbox)


class ChannelsServicer(channels_pb2_grpc.ChannelsServicer, uplink.Reception[names.WorkerId]):
    """One worker per place of the plan."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    Connect = _stream(CONNECT)

    def key(self, hello: pb.Hello) -> names.WorkerId:
        return names.WorkerId(hello.worker)

    async def admit(self, hello: pb.Hello, part: str, outbox: Outbox[Any]) -> None:
        """A pool's certificate may register only the roles that the pool lists: an env cannot pose as an actor."""
        role = hello.worker.rpartition("/")[0]
        pool = next((p for p in self._driver.job.spec.pools if part == f"pool:{p.name}"), None)
        if pool is None or role not in pool.roles:
            raise Refuse(
                f"certificate of {part!r} may not register a worker of role {role!r}",
                exit_code=names.EXIT_USER_ERROR,
                why="certificate",
            )
        await _plan_in_force(self._driver)
        self._driver.on_worker_hello(hello, outbox)

    def refused(self, hello: pb.Hello, error: RLinfError) -> pb.DriverMessage:
        code = _refused(self._driver, f"worker {hello.worker}", error)
        return pb.DriverMessage(refusal=pb.Refusal(message=str(error), exit_code=code))

    def heard(self, key: names.WorkerId, message: pb.WorkerMessage, *, more: bool) -> None:
        with _bugs_end_the_job(self._driver, key):
            self._driver.on_worker_message(key, message, more=more)

    def gone(self, key: names.WorkerId, outbox: Outbox[Any]) -> None:
        self._driver.on_worker_gone(key, outbox)


async def _plan_in_force(driver: Driver) -> None:
    """For a hello that comes before the plan: waits a while, so that peers need not come again and again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(driver.job.settings.plan_timeout_s):
            await driver.job.until(lambda: driver.job.declared, what="a plan")


def _refused(driver: Driver, who: str, error: RLinfError) -> int:
    """The exit code that the Refusal names. A bug would be met by each hello to come: the job says so and ends."""
    if isinstance(error, InvariantBroken):
        driver.fail(Reason.INTERNAL_ERROR, f"hello of {who}: {error}")
    code = driver.job.sessions.refuse(error)
    logger.warning("refused", extra={"who": who, "error": str(error), "exit_code": code})
    return code


@contextlib.contextmanager
def _bugs_end_the_job(driver: Driver, peer: str) -> Iterator[None]:
    """A message that cannot be worked on would be sent again for ever; the job says so and ends."""
    try:
        yield
    except Exception as error:  # top of a task: without this it would die unseen
        logger.exception("a message cannot be worked on", extra={"peer": peer})
        driver.fail(Reason.INTERNAL_ERROR, f"message of {peer}: {type(error).__name__}: {error}")


class JobServicer(job_pb2_grpc.JobServicer):
    """`seen_end` is called once the operator has been told the end."""

    def __init__(self, driver: Driver, *, on_plan: Callable[[], None], seen_end: Callable[[], None]) -> None:
        self._driver, self._on_plan, self._seen_end = driver, on_plan, seen_end
        self._prepared: dict[int, RLPlanSpec] = {}

    async def GetStatus(self, request: Any, context: Context) -> Any:
        return wire.report_to_pb(status.report(self._driver))

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:
        job = self._driver.job
        try:
            check_protocol(request.protocol, next="run the operator and the pods of its jobs from one version")
        except Refuse as refused:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refused))
        while not context.cancelled():
            report = status.report(self._driver)
            last, is_end = report.sequence, job.ended.is_set()
            try:
                yield wire.report_to_pb(report)
            finally:  # who has read the end may hang up before this goes on
                if is_end:
                    self._seen_end()
            if is_end:
                return
            await self._rest(report)
            await self._change(last)

    async def _rest(self, told: DriverReport) -> None:
        """Between two messages; cut short by a plan that has got further, a few times per change of plan: what is
        waited for then is the operator's word, and each second here would be one of the change."""
        driver, job = self._driver, self._driver.job

        def plan_moved() -> bool:
            now = (job.revision, driver.switch.prepared, driver.switch.failed[0])
            return told.plan_revision > 0 and now != (told.plan_revision, told.plan_prepared, told.plan_failed)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_INTERVAL_S if not job.ending else 0.05):
                while not plan_moved():
                    job.changed.clear()
                    await job.changed.wait()

    async def _change(self, last: int) -> None:
        job = self._driver.job
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_REPEAT_S - WATCH_INTERVAL_S):  # that has passed already
                await job.until(lambda: job.sequence != last or job.ended.is_set(), what="a change")

    async def PreparePlan(self, request: Any, context: Context) -> Any:
        """Answered at once: the driver's reports say when the plan is prepared, or why it cannot be."""
        driver, job = self._driver, self._driver.job
        if stale := self._stale(request):
            return stale
        what = f"plan revision {request.revision}"
        if job.revision == request.revision:
            return job_pb2.PlanResponse(ok=True)
        try:
            plan = _read_plan(request.plan_json)
            placement = plan_rules.check(plan, job.spec, counts=False)
        except RLinfError as error:
            return self._refused(request, str(error))
        if plan.revision != request.revision:
            return self._no(f"{what}: its plan says revision {plan.revision}")
        if not job.revision:
            self._prepared = {request.revision: plan}
            return job_pb2.PlanResponse(ok=True)
        roles = {r.name: len(placement.of_role(r.name)) for r in job.spec.roles}
        function = registry.load(job.flow_settings.name)
        problem = await would_run(driver, function, roles=roles)
        if job.revision == request.revision:  # it has come into force meanwhile
            return job_pb2.PlanResponse(ok=True)
        if problem:
            return self._refused(request, problem)
        problem = driver.settled(driver.switch.prepare(plan, uid=request.plan_uid))
        return self._no(f"{what}: {problem}") if problem else job_pb2.PlanResponse(ok=True)

    def _refused(self, request: Any, why: str) -> Any:
        """Also in the reports, so that whoever asked last is told what became of it."""
        if self._driver.job.revision:
            self._driver.settled(self._driver.switch.refuse(request.revision, why, uid=request.plan_uid))
        return self._no(f"plan revision {request.revision}: {why}")

    def _no(self, message: str, *, why: str = "plan") -> Any:
        self._driver.job.sessions.refused[why] += 1
        return job_pb2.PlanResponse(ok=False, message=message)

    def _stale(self, request: Any) -> Any | None:
        """The refusal of a request that was meant for another driver."""
        if request.driver_attempt and request.driver_attempt != self._driver.job.attempt:
            return self._no(f"this is driver attempt {self._driver.job.attempt}", why="stale")
        return None

    async def CommitPlan(self, request: Any, context: Context) -> Any:
        """Answered at once: a change of plan comes into force at the end of the step."""
        driver, job = self._driver, self._driver.job
        if stale := self._stale(request):
            return stale
        if job.revision == request.revision:
            return job_pb2.PlanResponse(ok=True)
        if job.revision:
            problem = driver.settled(driver.switch.commit(request.revision, uid=request.plan_uid))
            return self._no(problem) if problem else job_pb2.PlanResponse(ok=True, message=driver.switch.message)
        plan = self._prepared.get(request.revision)
        if plan is None:
            return self._no(f"revision {request.revision} is not prepared")
        driver.switch.first(plan, switches=request.plan_switches, uid=request.plan_uid)
        driver.settle()
        self._on_plan()
        return job_pb2.PlanResponse(ok=True)

    async def AbortPlan(self, request: Any, context: Context) -> Any:
        """Aborts any plan that is on its way, where the request names none."""
        self._prepared.pop(request.revision, None)
        driver, why = self._driver, request.reason or "it is not wanted any more"
        driver.switch.abort(why, revision=request.revision)
        driver.settle()
        return job_pb2.PlanResponse(ok=True)

    async def Adjust(self, request: Any, context: Context) -> Any:
        job = self._driver.job
        if request.driver_attempt != job.attempt:
            return job_pb2.AdjustResponse(ok=False, message=f"this is driver attempt {job.attempt}")
        job.adjust(wire.goal_from_pb(request.goal))
        self._driver.settle()
        return job_pb2.AdjustResponse(ok=True)

    async def Drain(self, request: Any, context: Context) -> Any:
        job = self._driver.job
        self._driver.drain()
        try:
            async with asyncio.timeout(request.deadline_s or None):
                await job.ended.wait()
        except TimeoutError:
            return job_pb2.DrainResponse(drained=False, message=f"step {job.ledger.committed + 1} did not end in time")
        drained = job.standing.state is not DriverState.FAILED
        return job_pb2.DrainResponse(drained=drained, message=job.standing.message)


def _read_plan(text: str) -> RLPlanSpec:
    try:
        value = json.loads(text)
        return RLPlanSpec.model_validate(value)
    except ValidationError as error:
        problems = sentences.problems(error, RLPlanSpec, value=value, prefix="spec")
        raise InvalidManifest("; ".join(map(str, problems))) from error
    except ValueError as error:
        raise InvalidManifest("it is no JSON", got=str(error)) from error


async def serve(driver: Driver, job: JobServicer, *, address: str, tls: rpc.TlsFolder) -> grpc.aio.Server:
    """Listening on host:port. Raises UserError where the port is taken."""
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS, interceptors=[rpc.Gatekeeper(ALLOWED, job_uid=driver.job.uid)])
    agents_pb2_grpc.add_AgentsServicer_to_server(AgentsServicer(driver), server)
    channels_pb2_grpc.add_ChannelsServicer_to_server(ChannelsServicer(driver), server)
    job_pb2_grpc.add_JobServicer_to_server(job, server)
    rpc.bind(server, address, tls=tls)
    await server.start()
    return server
