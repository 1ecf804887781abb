"""Jobs, plans and profiles in the API server by `kubernetes.aio`: the only calls that the scheduler makes there.

Not for: watching anything. A driver's report says of which job there is news.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import aiohttp
from kubernetes.aio import client, config

from rlinf_api import names
from rlinf_api.errors import ClusterBusy, RLinfError, UserError
from rlinf_api.store import AlreadyExists, Listing, NotFound

Manifest = dict[str, Any]
PLURALS: Final = {"RLJob": "rljobs", "RLPlan": "rlplans", "RLProfile": "rlprofiles"}
STRICT: Final = "Strict"
"""fieldValidation of each write: a field that the API server does not know is an error and never dropped."""
MERGE_PATCH: Final = "application/merge-patch+json"
MAX_PLANS: Final = 500
"""The most objects of one list: of a job's plans the operator keeps 16 of the scheduler's, and people seldom write a
dozen; of a namespace's profiles the scheduler keeps 50."""
_NO_ANSWER: Final = (aiohttp.ClientError, TimeoutError, OSError)


async def connect(*, kubeconfig: str = "") -> client.ApiClient:
    settings = client.Configuration()
    try:
        if kubeconfig:
            await config.load_kube_config(config_file=kubeconfig, client_configuration=settings, persist_config=False)
        else:
            config.load_incluster_config(client_configuration=settings)
    except (config.ConfigException, OSError) as error:
        raise UserError(
            "no API server to talk to", got=str(error), wanted="a service account, or a kubeconfig",
            next="run it in a pod, or set RLINF_SCHEDULER_KUBECONFIG",
        ) from error  # fmt: skip
    return client.ApiClient(configuration=settings)


class ApiPlanWriter:
    """jobs.PlanStore. A call's deadline is below the operator's for RequestPlan, so that it hears the reason."""

    def __init__(self, connection: Any, *, timeout_s: float) -> None:
        self._plans, self._timeout_s = client.CustomObjectsApi(connection), timeout_s

    async def create(self, obj: Manifest) -> Manifest:
        meta = obj["metadata"]
        where, kind = meta["namespace"], obj["kind"]
        call = self._plans.create_namespaced_custom_object(
            names.GROUP, names.VERSION, where, PLURALS[kind], obj, field_validation=STRICT
        )
        return await self._done(call, f"create of {kind} {where}/{meta['name']}")

    async def get(self, kind: str, name: str, *, namespace: str = "default") -> Manifest:
        return await self._done(
            self._plans.get_namespaced_custom_object(names.GROUP, names.VERSION, namespace, PLURALS[kind], name),
            f"get of {kind} {namespace}/{name}",
        )

    async def list(self, kind: str, *, namespace: str, label_selector: str) -> Listing:
        call = self._plans.list_namespaced_custom_object(
            names.GROUP, names.VERSION, namespace, PLURALS[kind], label_selector=label_selector, limit=MAX_PLANS
        )
        found = await self._done(call, f"list of {kind}s in {namespace}")
        return Listing(items=found["items"], resource_version=found["metadata"]["resourceVersion"])

    async def patch(self, kind: str, name: str, *, patch: Manifest, namespace: str = "default") -> Manifest:
        call = self._plans.patch_namespaced_custom_object(
            names.GROUP, names.VERSION, namespace, PLURALS[kind], name, patch, field_validation=STRICT,
            _content_type=MERGE_PATCH,
        )  # fmt: skip
        return await self._done(call, f"patch of {kind} {namespace}/{name}")

    async def delete(self, kind: str, name: str, *, namespace: str = "default") -> None:
        call = self._plans.delete_namespaced_custom_object(names.GROUP, names.VERSION, namespace, PLURALS[kind], name)
        await self._done(call, f"delete of {kind} {namespace}/{name}")

    async def _done(self, call: Any, what: str) -> Manifest:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await call
        except client.ApiException as error:
            raise _refusal(what, error) from error
        except _NO_ANSWER as error:
            raise ClusterBusy(what, got=f"no answer ({type(error).__name__})", next="it is tried again") from error
        if not isinstance(found, dict):
            raise ClusterBusy(what, got=type(found).__name__, wanted="an object", next="it is tried again")
        return found


def _refusal(what: str, error: Any) -> RLinfError:
    try:
        status = json.loads(error.body or "{}")
    except (TypeError, ValueError):
        status = {}
    reason = str(status.get("reason") or "")
    got = f"{error.status} {reason} {str(status.get('message') or '')[:500]}".strip()
    if error.status == 404:
        return NotFound(what, got=got)
    if error.status == 409 and reason == "AlreadyExists":
        return AlreadyExists(what, got=got)
    if error.status in (0, 409, 429) or error.status >= 500:
        return ClusterBusy(what, got=got, next="it is tried again")
    return RLinfError(what, got=got, next="look at the scheduler's Role, and at the namespace's policies and quotas")
