"""The scheduler's gRPC face and what stands behind it: reads a job, asks the planner, writes the RLPlan.

`Planning` is the service without gRPC, which the local runner calls in its own process; `Servicer` only translates.
Plans are written through a PlanWriter: the local store, or a client of the API server.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Final, NoReturn, Protocol

import grpc
import grpc.aio
from pydantic import ValidationError

from rlinf_api import job as api
from rlinf_api import names, rpc, sentences, supported
from rlinf_api._pb.rlinf.scheduler.v1alpha1 import scheduler_pb2 as pb
from rlinf_api._pb.rlinf.scheduler.v1alpha1 import scheduler_pb2_grpc
from rlinf_api.errors import ClusterBusy, InvalidManifest, RLinfError, UserError
from rlinf_api.plan import JobRef, Planned, PlanReason, RLPlanSpec
from rlinf_api.store import AlreadyExists, NotFound
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.initial import initial
from rlinf_scheduler.profiles import MeasuredEdge, Measurement, ProfileReport, Profiles

logger = logging.getLogger(__name__)
Manifest = dict[str, Any]
MAX_TRIES: Final = (
    10  # revisions that somebody else took meanwhile; two schedulers at once take each other's once or twice
)

ALLOWED: Final[rpc.Allowed] = {
    "/rlinf.scheduler.v1alpha1.Scheduler/RequestPlan": frozenset({"operator"}),
    "/rlinf.scheduler.v1alpha1.Scheduler/ReportProfile": frozenset({"driver"}),
    "/rlinf.scheduler.v1alpha1.Scheduler/Explain": frozenset({"operator"}),
    "/rlinf.scheduler.v1alpha1.Scheduler/WhatIf": frozenset({"operator"}),
}


class PlanWriter(Protocol):
    """Called by Planning, from one event loop; an ObjectStore is one."""

    async def create(self, obj: Manifest) -> Manifest:
        """AlreadyExists where the name is taken."""
        ...

    async def get(self, kind: str, name: str, *, namespace: str = "default") -> Manifest:
        """NotFound where there is none."""
        ...


class Planning:
    def __init__(self, writer: PlanWriter, *, profiles: Profiles | None = None) -> None:
        self._writer = writer
        self.profiles = profiles or Profiles()

    async def request_plan(self, job: Manifest, *, reason: str, highest_revision: int) -> Planned:
        """Writes `<job>-p<revision>` with the first free revision above the highest; a plan of this very job that
        stands there already (an answer that was lost) is the answer."""
        spec, problems = supported.validate(job)
        if spec is None or problems:
            return Planned(infeasible=tuple(map(str, problems)))
        meta = job["metadata"]
        namespace, name, uid = meta.get("namespace", "default"), meta["name"], meta["uid"]
        for revision in range(highest_revision + 1, highest_revision + 1 + MAX_TRIES):
            plan = initial(spec, job=JobRef(name=name, uid=uid), revision=revision, reason=_reason(reason))
            if isinstance(plan, Infeasible):
                return Planned(infeasible=tuple(map(str, plan.reasons)))
            manifest = plan_manifest(plan, namespace=namespace)
            try:
                await self._writer.create(manifest)
            except AlreadyExists:
                if await self._is_same(manifest):
                    return Planned(plan=manifest["metadata"]["name"], revision=revision)
                continue
            logger.info("plan written", extra={"job": f"{namespace}/{name}", "revision": revision, "reason": reason})
            return Planned(plan=manifest["metadata"]["name"], revision=revision)
        raise ClusterBusy(
            f"{MAX_TRIES} plan names of job {namespace}/{name} above revision {highest_revision} are taken",
            next="it is asked again with the revisions that exist by then",
        )

    def explain(self, job: Manifest, plan: RLPlanSpec | None) -> str:
        """Why a plan is as it is; without one, what the first plan would be."""
        spec, problems = supported.validate(job)
        if spec is None or problems:
            return "there is no plan: " + "; ".join(map(str, problems))
        shown = plan or initial(spec, job=JobRef(name=job["metadata"]["name"], uid=job["metadata"].get("uid", "")))
        if isinstance(shown, Infeasible):
            return f"there is no plan: {shown}"
        lines = [f"revision {shown.revision}, {shown.reason.code.value}: {shown.reason.message}"]
        lines += [f"  {w.count} x {w.role} on {w.slots}" for w in shown.workers]
        lines += [
            f"  lost: {a.summary}, {a.period_seconds:g} s per step, because {a.lost_because}"
            for a in shown.alternatives
        ]
        return "\n".join(lines)

    async def _is_same(self, wanted: Manifest) -> bool:
        meta = wanted["metadata"]
        try:
            found = await self._writer.get("RLPlan", meta["name"], namespace=meta["namespace"])
        except NotFound:
            return False
        return bool(found.get("spec") == wanted["spec"])


def plan_manifest(plan: RLPlanSpec, *, namespace: str) -> Manifest:
    """The object, owned by its job."""
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": "RLJob",
        "name": plan.job.name,
        "uid": plan.job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": "RLPlan",
        "metadata": {
            "name": names.plan_name(plan.job.name, plan.revision),
            "namespace": namespace,
            "labels": {
                names.LABEL_JOB: plan.job.name,
                names.LABEL_JOB_UID: plan.job.uid,
                "app.kubernetes.io/name": "rlinf",
                "app.kubernetes.io/managed-by": "rlinf-scheduler",
            },
            "ownerReferences": [owner],
        },
        "spec": api.dump(plan),
    }


class Servicer(scheduler_pb2_grpc.SchedulerServicer):
    """Translates; errors become gRPC codes by who can put them right."""

    def __init__(self, planning: Planning) -> None:
        self._planning = planning

    async def RequestPlan(self, request: pb.RequestPlanRequest, context: Any) -> pb.RequestPlanResponse:
        try:
            job = _object(request.job_json, "job_json")
            _check_names(job, request)
            found = await self._planning.request_plan(
                job, reason=request.reason, highest_revision=request.highest_revision
            )
        except RLinfError as error:
            await _abort(context, error)
        return pb.RequestPlanResponse(plan=found.plan, revision=found.revision, infeasible=found.infeasible)

    async def ReportProfile(self, request: pb.ReportProfileRequest, context: Any) -> pb.ReportProfileResponse:
        caller = rpc.peer_identity(context)
        if caller.job_uid not in (request.job_uid, "*"):
            message = f"job {caller.job_uid} reports a profile of job {request.job_uid}; report your own"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)
        report = ProfileReport(
            plan_revision=request.plan_revision,
            measurements=tuple(
                Measurement(
                    role=m.role, quantity=m.quantity, batch=m.batch, value=m.value, spread=m.spread,
                    provenance=m.provenance,
                )
                for m in request.measurements
            ),
            edges=tuple(
                MeasuredEdge(producer=e.producer, consumer=e.consumer, channel=e.channel, distance=e.distance)
                for e in request.edges
            ),
        )  # fmt: skip
        refusal = self._planning.profiles.add(request.job_uid, report)
        return pb.ReportProfileResponse(accepted=not refusal, message=refusal)

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        try:
            plan = _plan(request.plan_json) if request.plan_json else None
            return pb.ExplainResponse(text=self._planning.explain(_object(request.job_json, "job_json"), plan))
        except RLinfError as error:
            await _abort(context, error)

    async def WhatIf(self, request: pb.WhatIfRequest, context: Any) -> pb.WhatIfResponse:
        message = (
            "this version has no planner that could compare plans; Explain shows the plan that pools give in order"
        )
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)
        raise AssertionError("abort returned")


def serve_on(server: grpc.aio.Server, planning: Planning) -> None:
    """Adds the service to a server made with Gatekeeper(ALLOWED, job_uid="*")."""
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(Servicer(planning), server)


def _reason(text: str) -> PlanReason:
    return PlanReason(text) if text in {r.value for r in PlanReason} else PlanReason.INITIAL


def _object(text: str, field: str) -> Manifest:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidManifest(f"{field} is not JSON", got=str(error), wanted="the object as JSON") from error
    if not isinstance(found, dict) or not isinstance(found.get("metadata"), dict):
        raise InvalidManifest(
            f"{field} is no Kubernetes object", got=sentences.shown(found), wanted="kind, metadata, spec"
        )
    return found


def _plan(text: str) -> RLPlanSpec:
    raw = _object(text, "plan_json").get("spec")
    try:
        return RLPlanSpec.model_validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        found: Sequence[object] = sentences.problems(error, RLPlanSpec, value=raw, prefix="spec")
        raise InvalidManifest("plan_json is no RLPlan", got="; ".join(map(str, found))) from error


def _check_names(job: Manifest, request: pb.RequestPlanRequest) -> None:
    meta = job["metadata"]
    got = (meta.get("namespace", "default"), meta.get("name"), meta.get("uid"))
    wanted = (request.namespace, request.job, request.job_uid)
    if got != wanted:
        raise InvalidManifest("job_json is another job than the one asked for", got=str(got), wanted=str(wanted))


async def _abort(context: Any, error: RLinfError) -> NoReturn:
    code = grpc.StatusCode.INVALID_ARGUMENT if isinstance(error, UserError) else grpc.StatusCode.UNAVAILABLE
    await context.abort(code, str(error))
    raise AssertionError("abort returned")
