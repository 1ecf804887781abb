"""The driver's gRPC face: three servicers that turn streams into calls of the core and outboxes into streams.

| stream | consumes | waits for | unblocked by |
|---|---|---|---|
| Agents.Attach, Channels.Connect: reader task | messages of the peer | the peer | end of stream, cancel |
| the same: writer (the handler itself) | the session's outbox | outbox.put, outbox.close | the core |
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
from rlinf_api.errors import InvalidManifest, InvariantBroken, RLinfError
from rlinf_api.plan import RLPlanSpec, resolve
from rlinf_api.report import REPEATED_S, DriverReport, DriverState
from rlinf_worker.driver import status
from rlinf_worker.driver.core import Driver
from rlinf_worker.driver.flow import would_run
from rlinf_worker.driver.outbox import Outbox
from rlinf_worker.driver.sessions import Refuse
from rlinf_worker.flows import registry

logger = logging.getLogger(__name__)

ALLOWED: Final[rpc.Allowed] = {
    "/rlinf.agents.v1alpha1.Agents/Attach": frozenset({"pool"}),
    "/rlinf.channels.v1alpha1.Channels/Connect": frozenset({"pool"}),
    **{
        f"/rlinf.job.v1alpha1.Job/{method}": frozenset({"operator"})
        for method in ("GetStatus", "Watch", "PreparePlan", "CommitPlan", "AbortPlan", "Drain", "Describe")
    },
}
HELLO_TIMEOUT_S: Final = 10.0  # a caller that says nothing after connecting is not one of ours
WATCH_INTERVAL_S: Final = 1.0  # at most one message a second to the operator (API.md)
WATCH_REPEAT_S: Final = REPEATED_S  # an unchanged status is repeated, so that a watcher knows this loop is alive

Context = grpc.aio.ServicerContext[Any, Any]


async def _first(requests: AsyncIterator[Any], field: str) -> Any | None:
    """The hello; None where the stream ends or something else comes first."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            async for message in requests:
                return message if message.WhichOneof("kind") == field else None
    except TimeoutError:
        return None
    return None


async def _until_done(outbox: Outbox, reader: asyncio.Task[None]) -> AsyncIterator[list[Any]]:
    """Batches of the outbox until it is closed and empty or the peer's side has ended."""
    reader.add_done_callback(lambda _: outbox.close("the peer ended its stream"))
    while batch := await outbox.drain():
        yield batch


class AgentsServicer(agents_pb2_grpc.AgentsServicer):
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        hello_message = await _first(request_iterator, "hello")
        if hello_message is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of Attach must be a hello")
        hello, identity, outbox = hello_message.hello, rpc.peer_identity(context), Outbox()
        try:
            if identity.part != f"pool:{hello.pool}":
                raise Refuse(
                    f"certificate of {identity.part!r} may not speak for pool {hello.pool!r}",
                    exit_code=names.EXIT_USER_ERROR,
                    why="certificate",
                )
            await self._driver.plan_in_force()
            key = self._driver.on_agent_hello(hello, outbox)
        except RLinfError as error:
            code = self._driver.sessions.refuse(error)
            logger.warning("agent refused", extra={"pod": hello.pod, "error": str(error)})
            yield agents_pb2.DriverMessage(refusal=agents_pb2.Refusal(message=str(error), exit_code=code))
            return

        async def read() -> None:
            async for message in request_iterator:
                if outbox.closed is not None:  # given up, or connected anew: what it still says counts no more
                    return
                with _bugs_end_the_job(self._driver, hello.pod):
                    self._driver.on_agent_message(key, message)

        reader = asyncio.ensure_future(read())
        try:
            yield agents_pb2.DriverMessage(
                welcome=agents_pb2.Welcome(
                    driver_attempt=self._driver.attempt,
                    protocol=names.PROTOCOL,
                    heartbeat_interval_s=self._driver.settings.heartbeat_interval_s,
                )
            )
            async for batch in _until_done(outbox, reader):
                for message in batch:
                    yield message
        finally:
            reader.cancel()
            self._driver.on_agent_gone(key, outbox)


class ChannelsServicer(channels_pb2_grpc.ChannelsServicer):
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def Connect(self, request_iterator: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        stream = _flatten(request_iterator)
        first = await _first(stream, "hello")
        if first is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of Connect must be a hello")
        hello, outbox = first.hello, Outbox()
        try:
            self._check_role(hello.worker, rpc.peer_identity(context).part)
            await self._driver.plan_in_force()
            wid = self._driver.on_worker_hello(hello, outbox)
        except RLinfError as error:
            self._driver.on_worker_gone(names.WorkerId(hello.worker), outbox)
            if isinstance(error, InvariantBroken):
                self._driver.fail("InternalError", f"hello of {hello.worker}: {error}")
            code = self._driver.sessions.refuse(error)
            refusal = pb.DriverMessage(refusal=pb.Refusal(message=str(error), exit_code=code))
            yield pb.DriverBatch(messages=[refusal])
            return

        async def read() -> None:
            async for message in stream:
                if outbox.closed is not None:  # as for agents
                    return
                if outbox.deaf:
                    continue
                with _bugs_end_the_job(self._driver, wid):
                    self._driver.on_worker_message(wid, message)

        reader = asyncio.ensure_future(read())
        try:
            async for batch in _until_done(outbox, reader):
                yield pb.DriverBatch(messages=batch)
        finally:
            reader.cancel()
            self._driver.on_worker_gone(wid, outbox)

    def _check_role(self, worker: str, part: str) -> None:
        """A pool's certificate may register only the roles that the pool lists: an env cannot pose as an actor."""
        role = worker.rpartition("/")[0]
        pool = next((p for p in self._driver.spec.pools if part == f"pool:{p.name}"), None)
        if pool is None or role not in pool.roles:
            raise Refuse(
                f"certificate of {part!r} may not register a worker of role {role!r}",
                exit_code=names.EXIT_USER_ERROR,
                why="certificate",
            )


@contextlib.contextmanager
def _bugs_end_the_job(driver: Driver, peer: str) -> Iterator[None]:
    """A message that cannot be worked on would be sent again for ever; the job says so and ends."""
    try:
        yield
    except Exception as error:  # top of a task: without this it would die unseen
        logger.exception("a message cannot be worked on", extra={"peer": peer})
        driver.fail("InternalError", f"message of {peer}: {type(error).__name__}: {error}")


async def _flatten(batches: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for batch in batches:
        for message in batch.messages:
            yield message


class JobServicer(job_pb2_grpc.JobServicer):
    """`seen_end` is called once the operator has been told the end."""

    def __init__(self, driver: Driver, *, on_plan: Callable[[], None], seen_end: Callable[[], None]) -> None:
        self._driver, self._on_plan, self._seen_end = driver, on_plan, seen_end
        self._prepared: dict[int, RLPlanSpec] = {}

    async def GetStatus(self, request: Any, context: Context) -> Any:
        return wire.report_to_pb(status.report(self._driver))

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:
        last = -1
        while not context.cancelled():
            report = status.report(self._driver)
            self._driver.changed.clear()
            last, is_end = report.sequence, self._driver.ended.is_set()
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
        driver = self._driver

        def plan_moved() -> bool:
            now = (driver.revision, driver.switch.prepared, driver.switch.failed[0])
            return told.plan_revision > 0 and now != (told.plan_revision, told.plan_prepared, told.plan_failed)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_INTERVAL_S if not driver.ending else 0.05):
                while not plan_moved():
                    driver.changed.clear()
                    await driver.changed.wait()

    async def _change(self, last: int) -> None:
        try:
            async with asyncio.timeout(WATCH_REPEAT_S - WATCH_INTERVAL_S):  # that has passed already
                while status.report(self._driver).sequence == last and not self._driver.ended.is_set():
                    self._driver.changed.clear()
                    await self._driver.changed.wait()
        except TimeoutError:
            return

    async def PreparePlan(self, request: Any, context: Context) -> Any:
        """Answered at once: the driver's reports say when the plan is prepared, or why it cannot be."""
        driver = self._driver
        if stale := self._stale(request):
            return stale
        what = f"plan revision {request.revision}"
        if driver.placement is not None and driver.placement.revision == request.revision:
            return job_pb2.PlanResponse(ok=True, pause_s=driver.switch.pause_s)
        try:
            plan = _read_plan(request.plan_json)
            placement = plan_rules.check(plan, driver.spec, counts=False)
        except RLinfError as error:
            return self._refused(request.revision, str(error))
        if plan.revision != request.revision:
            return self._no(f"{what}: its plan says revision {plan.revision}")
        if driver.placement is None:
            self._prepared = {request.revision: plan}
            return job_pb2.PlanResponse(ok=True)
        roles = {r.name: len(placement.of_role(r.name)) for r in driver.spec.roles}
        function = registry.load(driver.flow_settings.name)
        problem = await would_run(driver, function, roles=roles)
        if driver.revision == request.revision:  # it has come into force meanwhile
            return job_pb2.PlanResponse(ok=True, pause_s=driver.switch.pause_s)
        if problem:
            return self._refused(request.revision, problem)
        problem = driver.switch.prepare(plan)
        return self._no(f"{what}: {problem}") if problem else job_pb2.PlanResponse(ok=True)

    def _refused(self, revision: int, why: str) -> Any:
        """Also in the reports, so that whoever asked last is told what became of it."""
        if self._driver.placement is not None:
            self._driver.switch.refuse(revision, why)
        return self._no(f"plan revision {revision}: {why}")

    def _no(self, message: str, *, why: str = "plan") -> Any:
        self._driver.sessions.refused[why] += 1
        return job_pb2.PlanResponse(ok=False, message=message)

    def _stale(self, request: Any) -> Any | None:
        """The refusal of a request that was meant for another driver."""
        if request.driver_attempt and request.driver_attempt != self._driver.attempt:
            return self._no(f"this is driver attempt {self._driver.attempt}", why="stale")
        return None

    async def CommitPlan(self, request: Any, context: Context) -> Any:
        """Answered at once: a change of plan comes into force at the end of the step. `pause_s`: of one that has."""
        driver = self._driver
        if stale := self._stale(request):
            return stale
        if driver.placement is not None and driver.placement.revision == request.revision:
            return job_pb2.PlanResponse(ok=True, pause_s=driver.switch.pause_s)
        if driver.placement is not None:
            problem = driver.switch.commit(request.revision)
            return self._no(problem) if problem else job_pb2.PlanResponse(ok=True, message=driver.switch.message)
        plan = self._prepared.get(request.revision)
        if plan is None:
            return self._no(f"revision {request.revision} is not prepared")
        driver.adopt_plan(resolve(plan, driver.spec))
        driver.switch.first(plan, switches=request.plan_switches)
        self._on_plan()
        return job_pb2.PlanResponse(ok=True)

    async def AbortPlan(self, request: Any, context: Context) -> Any:
        """Of any that is on its way, where the request names none."""
        self._prepared.pop(request.revision, None)
        switch = self._driver.switch
        if switch.pending is not None and request.revision in (0, switch.pending.plan.revision):
            switch.abort(request.reason or "it is not wanted any more", failed=False)
        return job_pb2.PlanResponse(ok=True)

    async def Drain(self, request: Any, context: Context) -> Any:
        driver = self._driver
        driver.drain()
        try:
            async with asyncio.timeout(request.deadline_s or None):
                await driver.ended.wait()
        except TimeoutError:
            return job_pb2.DrainResponse(
                drained=False, message=f"step {driver.ledger.committed + 1} did not end in time"
            )
        return job_pb2.DrainResponse(
            drained=driver.state is not DriverState.FAILED,
            checkpoint_step=driver.saved[0].number if driver.saved else 0,
            message=driver.message,
        )

    async def Describe(self, request: Any, context: Context) -> Any:
        return job_pb2.DescribeResponse(json=json.dumps(status.describe(self._driver)))


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
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS, interceptors=[rpc.Gatekeeper(ALLOWED, job_uid=driver.job_uid)])
    agents_pb2_grpc.add_AgentsServicer_to_server(AgentsServicer(driver), server)
    channels_pb2_grpc.add_ChannelsServicer_to_server(ChannelsServicer(driver), server)
    job_pb2_grpc.add_JobServicer_to_server(job, server)
    rpc.bind(server, address, tls=tls)
    await server.start()
    return server
