"""The operator's one question to the scheduler: RequestPlan. It writes the RLPlan, which is read like any object.

`Scheduler` is satisfied by this package's gRPC client and by the scheduler's own `Planning` in one process with it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Protocol

import grpc
import grpc.aio

from rlinf_api import names, rpc
from rlinf_api._pb.rlinf.scheduler.v1alpha1 import scheduler_pb2, scheduler_pb2_grpc
from rlinf_api.errors import WorkerUnreachable
from rlinf_api.plan import Planned
from rlinf_operator.manifests.metadata import Manifest


class Scheduler(Protocol):
    """Called by apply, once per pass at most. Raises WorkerUnreachable; the pass goes on without a plan then."""

    async def request_plan(self, job: Manifest, *, reason: str, highest_revision: int) -> Planned: ...


AT_ONCE: Final = 8  # a third of the passes: the others go on while a scheduler that hangs holds these
PATIENCE_S: Final = 2.0  # while no answer comes to anybody; one takes 20 ms, ten times that under load
AWAY_S: Final = 5.0  # so long nobody asks one that was away, and then one pass does


class GrpcScheduler:
    """One channel for all passes, made on first use. After a failure the next call makes another, as the scheduler's
    pod and the certificates may be new ones; the old channel is closed once the calls that are on it are over.

    A scheduler that takes calls and answers none holds no more than AT_ONCE passes, each once for its deadline; then
    all are told at once that it is away, but for one that tries after AWAY_S.
    """

    def __init__(
        self, address: str, *, tls: rpc.TlsFolder, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address, self._tls, self._timeout_s, self._clock = address, tls, timeout_s, clock
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._dialling = asyncio.Lock()
        self._places = asyncio.Semaphore(AT_ONCE)
        self._answered_at = -PATIENCE_S  # also a refusal is an answer
        self._away_until: float | None = None
        self._away_why = ""
        self._trying = False

    async def request_plan(self, job: Manifest, *, reason: str, highest_revision: int) -> Planned:
        meta = job["metadata"]
        request = scheduler_pb2.RequestPlanRequest(
            namespace=meta.get("namespace", "default"),
            job=meta["name"],
            job_uid=meta["uid"],
            reason=reason,
            job_json=json.dumps(job),
            highest_revision=highest_revision,
        )
        async with self._place():
            answer = await self._ask(request)
        return Planned(plan=answer.plan, revision=answer.revision, infeasible=tuple(answer.infeasible))

    async def close(self) -> None:
        self._retire(self._channel, grace_s=0)
        await asyncio.gather(*self._closing, return_exceptions=True)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of AT_ONCE; WorkerUnreachable while the scheduler is away."""
        self._refuse_while_away()
        while True:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._places.acquire()
                break
            except TimeoutError:
                self._refuse_while_away()
                if self._clock() - self._answered_at > PATIENCE_S:
                    raise self._unreachable(f"no answer to {AT_ONCE} requests for {PATIENCE_S:g} s") from None
        tries = False
        try:
            self._refuse_while_away()
            tries = self._trying = self._away_until is not None
            yield
        finally:
            if tries:
                self._trying = False
            self._places.release()

    def _refuse_while_away(self) -> None:
        if self._away_until is not None and (self._trying or self._clock() < self._away_until):
            raise self._unreachable(self._away_why)

    async def _ask(self, request: scheduler_pb2.RequestPlanRequest) -> scheduler_pb2.RequestPlanResponse:
        channel, started = await self._dialled(), self._clock()
        try:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            answer = await stub.RequestPlan(request, timeout=self._timeout_s)
            self._answered_at, self._away_until = self._clock(), None
            return answer
        except grpc.aio.AioRpcError as error:
            self._retire(channel, grace_s=self._timeout_s)
            why, now = f"{error.code().name} {error.details() or ''}", self._clock()
            slow = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or now - started > PATIENCE_S
            if slow and self._answered_at <= started:  # no answer came to anybody since it began
                self._away_until, self._away_why = now + AWAY_S, why
            else:
                self._answered_at, self._away_until = now, None
            raise self._unreachable(why) from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise self._unreachable("the connection was closed") from None

    async def _dialled(self) -> grpc.aio.Channel:
        async with self._dialling:  # one of the passes that come at once dials, the others wait for it
            if self._channel is None:
                self._channel = await rpc.dial(self._address, tls=self._tls, server=names.tls_name("scheduler"))
            return self._channel

    def _retire(self, channel: grpc.aio.Channel | None, *, grace_s: float) -> None:
        """Closing cancels what is on it after `grace_s`; no call takes longer."""
        if channel is not None and self._channel is channel:
            self._channel = None
            task = asyncio.create_task(channel.close(grace_s), name="close of a channel to the scheduler")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _unreachable(self, got: str) -> WorkerUnreachable:
        return WorkerUnreachable(
            f"the scheduler at {self._address} gave no plan",
            got=got.strip(),
            next="it is asked again; look at its pod's log",
        )
