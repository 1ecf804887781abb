"""The scheduler's gRPC face and what stands behind it: first plans when the operator asks, reports of drivers.

`Planning` is the service without gRPC, which the local runner calls in its own process; `Servicer` only translates.
Plans are read and written through a PlanStore: the local store, or a client of the API server. What becomes of a
report: jobs.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from rlinf_api import names, rpc, sentences, supported
from rlinf_api._pb.rlinf.scheduler.v1alpha1 import scheduler_pb2 as pb
from rlinf_api._pb.rlinf.scheduler.v1alpha1 import scheduler_pb2_grpc
from rlinf_api.errors import ClusterBusy, InvalidManifest, RLinfError, UserError
from rlinf_api.job import RLJobSpec
from rlinf_api.plan import JobRef, Planned, PlanReason, RLPlanSpec
from rlinf_api.profile import Profile
from rlinf_api.store import AlreadyExists, NotFound
from rlinf_scheduler.jobs import Jobs, fewest_of, plan_manifest
from rlinf_scheduler.kept import Manifest, PlanStore
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.initial import initial
from rlinf_scheduler.replan.first import as_before, by_profiles

logger = logging.getLogger(__name__)
MAX_TRIES: Final = 10  # revisions that somebody else took meanwhile; two schedulers take each other's once or twice

ALLOWED: Final[rpc.Allowed] = {
    "/rlinf.scheduler.v1alpha1.Scheduler/RequestPlan": frozenset({"operator"}),
    "/rlinf.scheduler.v1alpha1.Scheduler/ReportProfile": frozenset({"driver"}),
}


class Planning:
    """`jobs.run()` decides on further plans; without it there are first ones only."""

    def __init__(
        self, store: PlanStore, *, on_decision: Callable[[str, float], None] = lambda code, seconds: None
    ) -> None:
        self._store = store
        self.jobs = Jobs(store, on_decision=on_decision)

    async def request_plan(self, job: Manifest, *, reason: str, highest_revision: int) -> Planned:
        """Writes `<job>-p<revision>` with the first free revision above the highest; a plan of this very job that
        stands there already (an answer that was lost) is the answer."""
        spec, problems = supported.validate(job)
        if spec is None or problems:
            return Planned(infeasible=tuple(map(str, problems)))
        meta = job["metadata"]
        namespace, name, uid = meta.get("namespace", "default"), meta["name"], meta["uid"]
        ref, code, known = (
            JobRef(name=name, uid=uid),
            _reason(reason),
            await self.jobs.to_begin(spec, namespace=namespace, job_uid=uid),
        )
        revision = highest_revision + 1
        under = await self._measured_under(known, job=ref, namespace=namespace)
        measured = await self._by_profiles(spec, known, job=ref, revision=revision, reason=code, under=under)
        at_work = await self._at_work(job, ref) if measured is None and code is PlanReason.CAPACITY_CHANGED else None
        for revision in range(highest_revision + 1, highest_revision + 1 + MAX_TRIES):
            plan: RLPlanSpec | Infeasible
            if measured is not None:
                plan = measured.model_copy(update={"revision": revision})
            else:
                plan = initial(spec, job=ref, revision=revision, reason=code)
            if isinstance(plan, Infeasible):
                return Planned(infeasible=tuple(map(str, plan.reasons)))
            if at_work is not None:
                plan = as_before(plan, at_work, job=spec)
            fewest = await fewest_of(spec, plan, job)
            manifest = plan_manifest(plan, namespace=namespace, fewest=fewest)
            try:
                await self._store.create(manifest)
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

    async def _measured_under(self, known: tuple[Profile, ...], *, job: JobRef, namespace: str) -> RLPlanSpec | None:
        """The plan that the newest profile is of, where that is the job's own and there is still such a plan."""
        if not known or known[-1].job.uid != job.uid:
            return None
        return await self._plan(names.plan_name(job.name, known[-1].revision), job=job, namespace=namespace)

    async def _at_work(self, job: Manifest, ref: JobRef) -> RLPlanSpec | None:
        """The plan in force, as the operator has written down, where there is still such a plan."""
        name = ((job.get("status") or {}).get("plan") or {}).get("current")
        namespace = job["metadata"].get("namespace", "default")
        return await self._plan(name, job=ref, namespace=namespace) if isinstance(name, str) and name else None

    async def _plan(self, name: str, *, job: JobRef, namespace: str) -> RLPlanSpec | None:
        try:
            found = await self._store.get("RLPlan", name, namespace=namespace)
            plan = RLPlanSpec.model_validate(found.get("spec"))
        except (NotFound, ValueError):
            return None
        return plan if plan.job.uid == job.uid else None

    async def _by_profiles(
        self,
        spec: RLJobSpec,
        known: tuple[Profile, ...],
        *,
        job: JobRef,
        revision: int,
        reason: PlanReason,
        under: RLPlanSpec | None,
    ) -> RLPlanSpec | None:
        """A job begins without what was measured where that breaks the planner."""
        asked = partial(by_profiles, spec, known, job=job, revision=revision, reason=reason, under=under)
        try:
            return await asyncio.to_thread(asked)
        except Exception:
            logger.exception("a plan by profiles broke; the job gets one without them", extra={"job": job.name})
            return None

    async def report_profile(self, text: str, *, namespace: str, job_uid: str) -> None:
        """Keeps it for the planner. InvalidManifest where it is none, or not of that job and a plan of it."""
        profile = Profile.from_json(text)
        if profile.job.uid != job_uid:
            raise InvalidManifest(
                "a profile is of another job", got=f"{profile.job.name}, uid {profile.job.uid}",
                wanted=f"uid {job_uid}", next="report your own",
            )  # fmt: skip
        if not self.jobs.knows_plan(profile):
            await self._check_plan(profile, namespace=namespace)
        await self.jobs.recall(profile, namespace=namespace)
        self.jobs.add(profile, namespace=namespace)

    def report_killed(self, of_role: Mapping[str, int], *, revision: int, job_uid: str) -> None:
        """Workers that died of memory under that plan; what becomes of it is decided once something was measured."""
        self.jobs.killed(of_role, revision=revision, job_uid=job_uid)

    async def _check_plan(self, profile: Profile, *, namespace: str) -> None:
        name = names.plan_name(profile.job.name, profile.revision)
        what = f"a profile is of plan revision {profile.revision}"
        try:
            plan = await self._store.get("RLPlan", name, namespace=namespace)
        except NotFound as error:
            raise InvalidManifest(
                what, got="a plan that is not there", wanted=f"RLPlan {namespace}/{name}",
                next="name a plan by hand <job>-p<revision>",
            ) from error  # fmt: skip
        if (of := plan["spec"]["job"]["uid"]) != profile.job.uid:
            raise InvalidManifest(
                what, got=f"RLPlan {namespace}/{name} of job uid {of}", wanted=f"a plan of job uid {profile.job.uid}",
                next="report your own",
            )  # fmt: skip

    async def _is_same(self, wanted: Manifest) -> bool:
        meta = wanted["metadata"]
        try:
            found = await self._store.get("RLPlan", meta["name"], namespace=meta["namespace"])
        except NotFound:
            return False
        return bool(found.get("spec") == wanted["spec"])


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
        if request.killed:
            self._planning.report_killed(request.killed, revision=request.revision, job_uid=request.job_uid)
            return pb.ReportProfileResponse(accepted=True)
        try:
            await self._planning.report_profile(
                request.profile_json, namespace=request.namespace, job_uid=request.job_uid
            )
        except UserError as error:
            logger.warning("profile refused", extra={"job_uid": request.job_uid, "error": str(error)})
            return pb.ReportProfileResponse(accepted=False, message=str(error))
        except RLinfError as error:
            await _abort(context, error)
        return pb.ReportProfileResponse(accepted=True)


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
