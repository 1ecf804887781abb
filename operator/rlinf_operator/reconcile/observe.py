"""Reads everything that a decision about one job rests on into one frozen Observed. No decisions, no writes."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from rlinf_api import conditions, names, runtimes, sentences, times, unknown
from rlinf_api.errors import RetryableError
from rlinf_api.job import RLJobSpec, RLJobStatus
from rlinf_api.plan import RLPlanSpec, RLPlanStatus
from rlinf_operator.clients import objects
from rlinf_operator.clients.driver import Drivers
from rlinf_operator.clients.objects import ObjectStore
from rlinf_operator.clients.queues import Providers
from rlinf_operator.clients.runtimes import FRESH_S, OLD_S, Runtimes
from rlinf_operator.manifests.metadata import JobKey, JobMeta, Manifest
from rlinf_operator.policies import pod_view, runtime
from rlinf_operator.policies.runtime import RuntimeView
from rlinf_operator.reconcile.state import ConfigView, DriverView, Observed, PlanView, PolicyView


async def observe(
    key: JobKey,
    *,
    store: ObjectStore,
    drivers: Drivers,
    now: datetime,
    progress_due: bool = True,
    trusted: tuple[str, ...] = (),
    platform: Runtimes,
    queues: Providers | None = None,
) -> Observed | None:
    """None: the job does not exist (any more). `queues`: None for a run without queues, whatever labels say."""
    manifest = await objects.get_or_none(store, "RLJob", key.name, namespace=key.namespace)
    if manifest is None:
        return None
    meta = manifest["metadata"]
    job = JobMeta(namespace=key.namespace, name=key.name, uid=meta["uid"])
    begun = bool(manifest.get("status"))  # before its first pass it has no children, or is told so by a 409

    status = read_status(manifest)
    left_out: tuple[str, ...] = ()
    if status.attempt:  # it has begun; one that is to begin waits for an operator that knows all of its spec
        spec, left_out = unknown.pruned(manifest.get("spec") or {}, RLJobSpec, "spec")
        manifest = {**manifest, "spec": spec}
    made_with = await _runtime(manifest, status, platform)
    if made_with is not None and made_with.spec is not None:
        manifest = runtimes.with_runtime(manifest, made_with.spec)

    async def child(kind: str, name: str, *, is_rare: bool = False) -> Manifest | None:
        """`is_rare`: most jobs have none, and what the copy does not have is not asked for."""
        live = begun and not is_rare
        return await objects.get_owned(store, kind, name, namespace=key.namespace, uid=job.uid, live=live)

    budget = await child("PodDisruptionBudget", names.disruption_budget_name(key.name), is_rare=True)
    pods, plans, service, policy, config, queue = await asyncio.gather(
        store.list("Pod", namespace=key.namespace, label_selector=f"{names.LABEL_JOB_UID}={job.uid}"),
        store.list("RLPlan", namespace=key.namespace, label_selector=f"{names.LABEL_JOB}={key.name}"),
        child("Service", names.service_name(key.name)),
        child("NetworkPolicy", names.network_policy_name(key.name)),
        child("ConfigMap", names.config_name(key.name)),
        queues.look(manifest) if queues is not None else _no_queue(),
    )
    heard = drivers.heard(key)
    views = sorted((plan_view(p) for p in plans.items), key=lambda found: found[0].revision)
    heeded = {status.plan.current, status.plan.pending}
    left_out += tuple(f"{field} of {view.name}" for view, fields in views for field in fields if view.name in heeded)
    return Observed(
        job=job,
        manifest=manifest,
        generation=int(meta.get("generation", 1)),
        deleting="deletionTimestamp" in meta,
        created_at=times.parse(meta.get("creationTimestamp")) or now,
        status=status,
        pods=tuple(pod_view.view(p) for p in pods.items if job.uid in objects.owner_uids(p)),
        plans=tuple(view for view, _ in views),
        has_service=service is not None,
        network_policy=_policy(policy),
        disruption_budget=budget["metadata"]["uid"] if budget is not None else "",
        config=_config(config),
        driver=DriverView(attempt=heard[0], report=heard[1], silent_s=heard[2]) if heard else None,
        unknown=left_out,
        trusted=trusted,
        runtime=made_with,
        queue=queue,
        progress_due=progress_due,
    )


async def _runtime(job: Manifest, status: RLJobStatus, platform: Runtimes) -> RuntimeView | None:
    name = runtimes.named_by(job)
    if not name:
        return None
    if conditions.is_finished(status.conditions):
        return runtime.as_it_began(status)
    kept = runtime.keeps(name, status)
    try:
        found = await platform.look(name, max_age_s=OLD_S if kept else FRESH_S)
    except RetryableError:
        if not kept:
            raise
        return runtime.as_it_began(status)
    return runtime.judge(found, status)


async def _no_queue() -> None:
    """What a run without queues knows of a job's place in one: nothing."""


def read_status(manifest: Manifest) -> RLJobStatus:
    """Fields that this version does not know (a newer operator's, before a rollback) are left out, not fatal."""
    raw, _ = unknown.pruned(manifest.get("status") or {}, RLJobStatus, "status")
    return RLJobStatus.model_validate(raw)


def plan_view(manifest: Manifest) -> tuple[PlanView, tuple[str, ...]]:
    """(the plan, fields of its spec that this version does not know). Those are left out for plans that are to begin,
    too: a newer CRD gives their defaults to what this version's own scheduler wrote."""
    meta = manifest["metadata"]
    raw, left_out = unknown.pruned(manifest.get("spec") or {}, RLPlanSpec, "spec")
    found, _ = unknown.pruned(manifest.get("status") or {}, RLPlanStatus, "status")
    status = RLPlanStatus.model_validate(found)
    revision = raw.get("revision")
    spec, problem = None, ""
    try:
        spec = RLPlanSpec.model_validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        problem = "; ".join(map(str, sentences.problems(error, RLPlanSpec, value=raw, prefix="spec")))
    annotations = meta.get("annotations") or {}
    view = PlanView(
        name=meta["name"],
        revision=revision if isinstance(revision, int) else 0,
        uid=meta["uid"],
        generation=int(meta.get("generation", 1)),
        spec=spec,
        status=status,
        problem=problem,
        approved_by=str(annotations.get(names.ANNOTATION_APPROVED_BY, "")),
        stays=str(annotations.get(names.ANNOTATION_STAYS, ""))[: names.MAX_STAYS],
        fewest=_fewest(annotations),
    )
    return view, left_out


def _fewest(annotations: Manifest) -> dict[str, int]:
    """Empty where somebody made something else of it."""
    try:
        found = json.loads(annotations.get(names.ANNOTATION_FEWEST) or "{}")
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(pool): pods for pool, pods in found.items() if isinstance(pods, int) and pods >= 1}


def _policy(manifest: Manifest | None) -> PolicyView | None:
    if manifest is None:
        return None
    meta = manifest["metadata"]
    return PolicyView(uid=meta["uid"], inputs=(meta.get("annotations") or {}).get(names.ANNOTATION_INPUTS, ""))


def _config(manifest: Manifest | None) -> ConfigView | None:
    if manifest is None:
        return None
    annotations: dict[str, Any] = manifest["metadata"].get("annotations") or {}
    return ConfigView(
        inputs=annotations.get(names.ANNOTATION_INPUTS, ""),
        certificates_expire=times.parse(annotations.get(names.ANNOTATION_CERT_EXPIRY)),
        issuer=annotations.get(names.ANNOTATION_CERT_ISSUER, ""),
    )
