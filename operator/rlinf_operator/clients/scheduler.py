"""The operator's one question to the scheduler: RequestPlan. It writes the RLPlan, which is read like any object.

`Scheduler` is satisfied by this package's gRPC client and by the scheduler's own `Planning` in one process with it.
"""

from __future__ import annotations

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


class GrpcScheduler:
    """One channel, made on first use and again after it broke: the scheduler's pod may move."""

    def __init__(self, address: str, *, tls: rpc.TlsFolder, timeout_s: float) -> None:
        self._address, self._tls, self._timeout_s = address, tls, timeout_s
        self._channel: grpc.aio.Channel | None = None

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
        try:
            if self._channel is None:
                self._channel = await rpc.dial(self._address, tls=self._tls, server=names.tls_name("scheduler"))
            stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
            answer = await stub.RequestPlan(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            await self.close()
            raise WorkerUnreachable(
                f"the scheduler at {self._address} gave no plan",
                got=f"{error.code().name} {error.details() or ''}".strip(),
                next="it is asked again; look at its pod's log",
            ) from error
        return Answer(plan=answer.plan, revision=answer.revision, infeasible=tuple(answer.infeasible))

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
