"""Jobs and plans of a cluster for `rljob plan -n NAMESPACE JOB`: as the person of the kubeconfig, with that person's
rights. Called from the command line, one question a process.

    found = objects("math", Cluster(namespace="team"))         the RLJob, and its RLPlans by name
    profiles = measured("math", Cluster(namespace="team"))     what the scheduler has kept of its steps
    answer = ask("math", Cluster(namespace="team"), {"do": "pin", "name": "math-p2", "timeout_s": 120})

Not for: what the operator does (rlinf_operator), nor what is said of plans (reasons.py).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from rlinf_api import names, runtimes
from rlinf_api.errors import UserError
from rlinf_api.job import RLJobSpec
from rlinf_api.profile import Profile, RLProfileSpec, key_of
from rlinf_api.store import Listing, NotFound
from rlinf_operator.clients import kube
from rlinf_operator.clients.kube import KubeApi
from rlinf_operator.metrics import Metrics
from rljob.plan_verbs import Manifest, PlanVerbs

CALL_S: Final = 15.0  # one call, tries included: a person waits for it
MAX_PLANS: Final = 500  # of one job: the operator keeps 16 of the scheduler's, people seldom write a dozen
Found = TypeVar("Found")
LOOK_S: Final = 1.0  # between two looks at a plan on its way: a change takes seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    namespace: str
    context: str = ""
    """The context of the kubeconfig; empty: its current one."""


@dataclass(frozen=True, slots=True)
class JobWithPlans:
    job: Manifest
    """The job as if it had written itself what its runtime says."""
    plans: dict[str, Manifest]
    """The job's plans by name, in the order of their revisions."""


def objects(job: str, cluster: Cluster) -> JobWithPlans:
    async def read(store: _Store) -> JobWithPlans:
        try:
            found = await store.get("RLJob", job, namespace=cluster.namespace)
        except NotFound as error:
            raise _no_job(job, cluster) from error
        selector = f"{names.LABEL_JOB}={job}"
        listed = (await store.list("RLPlan", namespace=cluster.namespace, label_selector=selector)).items
        own = [plan for plan in listed if plan["spec"]["job"].get("uid") == found["metadata"]["uid"]]
        own.sort(key=lambda plan: int(plan["spec"]["revision"]))
        return JobWithPlans(runtimes.of_job(found), {str(plan["metadata"]["name"]): plan for plan in own})

    return asyncio.run(_with_store(cluster, read))


def measured(job: str, cluster: Cluster) -> tuple[Profile, ...]:
    """What was measured of this very job, as the scheduler has kept it: one profile at least."""

    async def read(store: _Store) -> tuple[Profile, ...]:
        try:
            found = await store.get("RLJob", job, namespace=cluster.namespace)
        except NotFound as error:
            raise _no_job(job, cluster) from error
        name = names.profile_name(key_of(RLJobSpec.model_validate(runtimes.of_job(found)["spec"])))
        what = f"nothing that was measured of job {job} is kept yet"
        wanted = "a decision of the scheduler, behind spec.placement.profileSteps"
        look = f"kubectl get rlprofiles -n {cluster.namespace}"
        try:
            kept = RLProfileSpec.model_validate(
                (await store.get("RLProfile", name, namespace=cluster.namespace)).get("spec")
            )
        except NotFound as error:
            raise UserError(what, got=f"no RLProfile {name}", wanted=wanted, next=look) from error
        except ValidationError as error:
            raise UserError(f"RLProfile {name} is not as the scheduler writes it", got=str(error), next=look) from error
        if kept.job.uid != found["metadata"]["uid"]:
            raise UserError(what, got=f"one of job {kept.job.name}, uid {kept.job.uid}", wanted=wanted, next=look)
        return tuple(kept.reports)

    return asyncio.run(_with_store(cluster, read))


def ask(job: str, cluster: Cluster, question: dict[str, Any]) -> dict[str, Any]:
    """As a run on this machine answers it (plan_verbs.py)."""

    async def answer(store: _Store) -> dict[str, Any]:
        try:
            await store.get("RLJob", job, namespace=cluster.namespace)
        except NotFound as error:
            raise _no_job(job, cluster) from error
        verbs = PlanVerbs(store, job=job, namespace=cluster.namespace, look_s=LOOK_S)
        return await verbs.answer(json.dumps(question))

    return asyncio.run(_with_store(cluster, answer))


def _no_job(job: str, cluster: Cluster) -> UserError:
    return UserError(
        f"namespace {cluster.namespace} has no RLJob {job!r}", next=f"kubectl get rljobs -n {cluster.namespace}"
    )


async def _with_store(cluster: Cluster, work: Callable[[_Store], Awaitable[Found]]) -> Found:
    async with _reached(cluster) as store:
        return await work(store)


@asynccontextmanager
async def _reached(cluster: Cluster) -> AsyncIterator[_Store]:
    named = [path for path in os.environ.get("KUBECONFIG", "").split(os.pathsep) if path]
    kubeconfig = named[0] if named else str(Path.home() / ".kube" / "config")
    try:
        if not Path(kubeconfig).is_file():
            raise UserError("", got="no such file")
        connection = await kube.connect(kubeconfig=kubeconfig, context=cluster.context, connections=2)
    except UserError as error:
        raise UserError(
            "no API server to talk to", got=error.got, wanted=f"a kubeconfig at {kubeconfig}",
            next="set KUBECONFIG, or name a --context of it",
        ) from error  # fmt: skip
    async with connection:
        yield _Store(KubeApi(connection, timeout_s=CALL_S, metrics=Metrics()))


class _Store:
    """plan_verbs.VerbStore."""

    def __init__(self, api: KubeApi) -> None:
        self.create, self.get, self.patch, self._api = api.create, api.get, api.patch, api

    async def list(self, kind: str, *, namespace: str, label_selector: str) -> Listing:
        items: list[Manifest] = []
        async for page in self._api.pages(kind, namespace=namespace, label_selector=label_selector):
            items += page.items
            if len(items) > MAX_PLANS:
                raise UserError(
                    f"{kind}s of {label_selector} in {namespace}", got=f"more than {MAX_PLANS}",
                    wanted=f"at most {MAX_PLANS}", next="delete old ones",
                )  # fmt: skip
        return Listing(items=items, resource_version="")
