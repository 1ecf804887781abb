"""The operator's one question to the scheduler: RequestPlan. It writes the RLPlan, which is read like any object.

`Scheduler` is satisfied by this package's gRPC client and by the scheduler's own `Planning` in one process with it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from rlinf_api import names, rpc
from rlinf_api._pb.rlinf.scheduler.v1alpha1 import scheduler_pb2, scheduler_pb2_grpc
from rlinf_api.errors import WorkerUnreachable
from rlinf_operator.manifests.metadata import Manifest


class PlanAnswer(Protocol):
    """Either the name of a plan that now exists, or the sentences why there can be none."""

    @property
    def plan(self) -> str: ...
    @property
    def revision(self) -> int: ...
    @property
    def infeasible(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A PlanAnswer that came over the wire."""

    plan: str = ""
    revision: int = 0
    infeasible: tuple[str, ...] = ()


class Scheduler(Protocol):
    """Called by apply, once per pass at most. Raises WorkerUnreachable; the pass goes on without a plan then."""

    async def request_plan(self, job: Manifest, *, reason: str, highest_revision: int) -> PlanAnswer: ...


class _Line:
    """A channel and how many calls are on it: closing one cancels whatever is under way there."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel, self.calls = channel, 0


class GrpcScheduler:
    """One channel for all passes, made on first use. After a failure the next call makes another, as the scheduler's
    pod and the certificates may be new ones; the old channel is closed by the last call that is on it."""

    def __init__(self, address: str, *, tls: rpc.TlsFolder, timeout_s: float) -> None:
        self._address, self._tls, self._timeout_s = address, tls, timeout_s
        self._line: _Line | None = None
        self._dialling = asyncio.Lock()

    async def request_plan(self, job: Manifest, *, reason: str, highest_revision: int) -> PlanAnswer:
        meta = job["metadata"]
        request = scheduler_pb2.RequestPlanRequest(
            namespace=meta.get("namespace", "default"),
            job=meta["name"],
            job_uid=meta["uid"],
            reason=reason,
            job_json=json.dumps(job),
            highest_revision=highest_revision,
        )
        answer = await self._ask(request)
        return Answer(plan=answer.plan, revision=answer.revision, infeasible=tuple(answer.infeasible))

    async def close(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            await line.channel.close()

    async def _ask(self, request: scheduler_pb2.RequestPlanRequest) -> scheduler_pb2.RequestPlanResponse:
        line = await self._dialled()
        line.calls += 1
        try:
            stub = scheduler_pb2_grpc.SchedulerStub(line.channel)
            return await stub.RequestPlan(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            self._retire(line)
            raise self._unreachable(f"{error.code().name} {error.details() or ''}") from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise self._unreachable("the connection was closed") from None
        finally:
            line.calls -= 1
            if line is not self._line and line.calls == 0:
                await line.channel.close()

    async def _dialled(self) -> _Line:
        async with self._dialling:  # one of the passes that come at once dials, the others wait for it
            if self._line is None:
                channel = await rpc.dial(self._address, tls=self._tls, server=names.tls_name("scheduler"))
                self._line = _Line(channel)
            return self._line

    def _retire(self, line: _Line) -> None:
        if self._line is line:
            self._line = None

    def _unreachable(self, got: str) -> WorkerUnreachable:
        return WorkerUnreachable(
            f"the scheduler at {self._address} gave no plan",
            got=got.strip(),
            next="it is asked again; look at its pod's log",
        )
