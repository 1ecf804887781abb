"""The API server by `kubernetes.aio`, as plain JSON: its configuration, credentials and connections, none of its models
(a typed call costs three times the CPU of the same call in dicts, and drops fields that the models do not know yet).

    async with await connect(process) as connection:
        api = KubeApi(connection, timeout_s=10, metrics=metrics)
        pod = await api.create({"kind": "Pod", ...})

Every call has one deadline, tries included. 429 is tried again after the server's Retry-After, 5xx and broken
connections only where doing it twice is the same as once: every verb but a create under a generated name. What cannot
be done within the deadline is a ClusterBusy, and the caller's pass is repeated with back-off.

Not for: caching (cache.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import pydantic_core
from kubernetes.aio import client, config

from rlinf_api import names
from rlinf_api.errors import ClusterBusy, InvariantBroken, RLinfError, UserError
from rlinf_api.store import Listing
from rlinf_operator.clients import api_errors
from rlinf_operator.clients.objects import Subresource
from rlinf_operator.manifests.metadata import Manifest
from rlinf_operator.metrics import Metrics

logger = logging.getLogger(__name__)

STRICT: Final = {"fieldValidation": "Strict"}
"""What each write asks for: a field that the API server does not know, or one that stands twice, is an error and never
dropped."""
MERGE_PATCH: Final = "application/merge-patch+json"
METADATA_LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
METADATA_WATCH: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
PAGE: Final = 100  # objects of one list page: 1.1 MB of pods, 5 MB and 10 ms decoded; ten thousand take 2 s
RETRY_MIN_S: Final = 0.2
MAX_LINE_BYTES: Final = 32 << 20  # one line of a watch: etcd takes 1.5 MB per object, so more is a broken stream
CONNECTIONS: Final = 48  # at once: 250 KiB each, given back after 15 s without use. With 24 pods wait in line for them
_NO_ANSWER: Final = (aiohttp.ClientError, TimeoutError, OSError, ssl.SSLError)


RESOURCES: Final = {
    "RLJob": (names.API_VERSION, "rljobs"),
    "RLPlan": (names.API_VERSION, "rlplans"),
    "RLProfile": (names.API_VERSION, "rlprofiles"),
    "Pod": ("v1", "pods"),
    "Service": ("v1", "services"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "ConfigMap": ("v1", "configmaps"),
    "Secret": ("v1", "secrets"),
    "Event": ("v1", "events"),
    "Namespace": ("v1", "namespaces"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    "RLRuntime": (names.API_VERSION, "rlruntimes"),
    "Workload": ("kueue.x-k8s.io/v1beta2", "workloads"),
    "PodGroup": ("scheduling.k8s.io/v1alpha2", "podgroups"),
    "ResourceFlavor": ("kueue.x-k8s.io/v1beta2", "resourceflavors"),
    "WorkloadPriorityClass": ("kueue.x-k8s.io/v1beta2", "workloadpriorityclasses"),
    "PriorityClass": ("scheduling.k8s.io/v1", "priorityclasses"),
}
"""API version and plural of each kind. `kind` alone names one: no two that the operator uses share a name."""
OF_THE_CLUSTER: Final = ("Namespace", "RLRuntime", "ResourceFlavor", "WorkloadPriorityClass", "PriorityClass")
"""Kinds without namespaces."""


def path_of(
    kind: str, *, api_version: str = "", namespace: str | None = None, name: str = "", subresource: str = ""
) -> str:
    """Where the API server keeps it. `api_version`: another one than RESOURCES says.

    >>> path_of("Pod", namespace="team", name="a", subresource="binding")
    '/api/v1/namespaces/team/pods/a/binding'
    """
    if kind not in RESOURCES:
        raise InvariantBroken(f"the operator has no business with kind {kind!r}", wanted=", ".join(RESOURCES))
    usual, plural = RESOURCES[kind]
    api_version = api_version or usual
    root = "/api/" if "/" not in api_version else "/apis/"
    parts = [root + api_version]
    if namespace is not None and kind not in OF_THE_CLUSTER:
        parts += ["namespaces", quote(namespace, safe="")]
    parts.append(plural)
    parts += [quote(part, safe="") for part in (name, subresource) if part]
    return "/".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """One call; `what` is for sentences, `again` says that twice is the same as once."""

    method: str
    path: str
    verb: str
    kind: str
    what: str
    body: Manifest | None = None
    query: Mapping[str, str] | None = None
    content: str = "application/json"
    accept: str = "application/json"
    again: bool = True


async def connect(*, kubeconfig: str = "", context: str = "", connections: int = CONNECTIONS) -> client.ApiClient:
    """With a kubeconfig as that person, without one as the pod's service account. UserError where neither is there.
    A call for which all `connections` are taken waits for one, within its deadline."""
    settings = client.Configuration()
    settings.connection_pool_maxsize = connections
    # With trust_env aiohttp asks two threads before each request, for a proxy and for .netrc: a quarter of its cost.
    settings.client_session_kwargs = {"trust_env": False}
    try:
        if kubeconfig:
            await config.load_kube_config(
                config_file=kubeconfig, context=context or None, client_configuration=settings, persist_config=False
            )
        else:
            config.load_incluster_config(client_configuration=settings)
    except (config.ConfigException, OSError) as error:
        raise UserError(
            "no API server to talk to", got=str(error), wanted="a service account, or a kubeconfig",
            next="run it in a pod, or set RLINF_OPERATOR_KUBECONFIG",
        ) from error  # fmt: skip
    settings.proxy = settings.proxy or _proxy(settings.host)
    return client.ApiClient(configuration=settings)


def _proxy(server: str) -> str | None:
    """The environment's, looked up once: HTTPS_PROXY and NO_PROXY do not change while a process runs."""
    url = urlsplit(server)
    if urllib.request.proxy_bypass(url.netloc):
        return None
    return urllib.request.getproxies().get(url.scheme)


class KubeApi:
    """Verbs as in objects.ObjectStore, but list and watch: each answer is live. Called from one event loop."""

    def __init__(
        self, connection: Any, *, timeout_s: float, metrics: Metrics, api_versions: Mapping[str, str] | None = None
    ) -> None:
        """`api_versions`: others than RESOURCES says, by kind: several schedulers have a PodGroup."""
        self._connection, self._timeout_s, self._metrics = connection, timeout_s, metrics
        self._api_versions = api_versions or {}

    async def create(self, obj: Manifest) -> Manifest:
        kind, meta = obj["kind"], obj["metadata"]
        named = bool(meta.get("name"))
        what = f"create of {kind} {meta.get('namespace')}/{meta.get('name') or meta.get('generateName')}"
        path = self._path(kind, namespace=meta["namespace"])
        body = {"apiVersion": self._api_versions.get(kind) or RESOURCES[kind][0], **obj}
        return await self._call("POST", path, verb="create", kind=kind, what=what, body=body, query=STRICT, again=named)

    async def get(self, kind: str, name: str, *, namespace: str = "default", live: bool = True) -> Manifest:
        """`live` or not: there are no copies here."""
        path = self._path(kind, namespace=namespace, name=name)
        return _whole(await self._call("GET", path, verb="get", kind=kind, what=f"get of {kind} {namespace}/{name}"))

    async def replace(self, obj: Manifest, *, subresource: Subresource = "") -> Manifest:
        kind, meta = obj["kind"], obj["metadata"]
        path = self._path(kind, namespace=meta["namespace"], name=meta["name"], subresource=subresource)
        what = f"update of {kind} {meta['namespace']}/{meta['name']}"
        return await self._call("PUT", path, verb="update", kind=kind, what=what, body=obj, query=STRICT)

    async def patch(
        self, kind: str, name: str, *, patch: Manifest, namespace: str = "default", subresource: Subresource = ""
    ) -> Manifest:
        path = self._path(kind, namespace=namespace, name=name, subresource=subresource)
        what = f"patch of {kind} {namespace}/{name}"
        return await self._call(
            "PATCH", path, verb="patch", kind=kind, what=what, body=patch, query=STRICT, content=MERGE_PATCH
        )

    async def delete(
        self, kind: str, name: str, *, namespace: str = "default", uid: str = "", grace_period_s: int | None = None
    ) -> Manifest:
        """The object as it is now, with its deletionTimestamp; or a Status where it is gone already."""
        options: Manifest = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_period_s is not None:
            options["gracePeriodSeconds"] = grace_period_s
        path = self._path(kind, namespace=namespace, name=name)
        what = f"delete of {kind} {namespace}/{name}"
        return await self._call("DELETE", path, verb="delete", kind=kind, what=what, body=options)

    async def pages(
        self, kind: str, *, namespace: str | None = None, label_selector: str = "", metadata_only: bool = False
    ) -> AsyncIterator[Listing]:
        """As of now, page by page: each has its own deadline. Expired where the pages' snapshot is gone. Ten thousand
        pods are 110 MB of text and 400 MB decoded, so whoever reads many keeps little of a page before the next."""
        path = self._path(kind, namespace=namespace)
        query = {"limit": str(PAGE)} | ({"labelSelector": label_selector} if label_selector else {})
        while True:
            page = await self._call(
                "GET", path, verb="list", kind=kind, what=f"list of {kind}", query=query,
                accept=METADATA_LIST if metadata_only else "application/json",
            )  # fmt: skip
            meta = page.get("metadata") or {}
            items = page.pop("items", None) or []
            for item in items:
                item["kind"] = kind
            yield Listing(items=items, resource_version=str(meta.get("resourceVersion", "")))
            if not meta.get("continue"):
                return
            query["continue"] = meta["continue"]

    @asynccontextmanager
    async def open_watch(
        self,
        kind: str,
        *,
        resource_version: str,
        server_timeout_s: int,
        namespace: str | None = None,
        label_selector: str = "",
        metadata_only: bool = False,
    ) -> AsyncIterator[AsyncIterator[Manifest]]:
        """Raw watch events, bookmarks and errors among them, until the server ends it or the caller leaves."""
        query = {
            "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": resource_version,
            "timeoutSeconds": str(server_timeout_s),
        }  # fmt: skip
        if label_selector:
            query["labelSelector"] = label_selector
        ask = _Ask(
            method="GET", path=self._path(kind, namespace=namespace), verb="watch", kind=kind,
            what=f"watch of {kind}", query=query, accept=METADATA_WATCH if metadata_only else "application/json",
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._send(ask)
        except _NO_ANSWER as error:
            self._count("watch", kind, 0)
            raise api_errors.of_silence(ask.what, error) from error
        try:
            self._count("watch", kind, response.status)
            if response.status != 200:
                async with asyncio.timeout(self._timeout_s):
                    body = await response.read()
                raise _refusal(ask, response, body=body)
            yield _lines(response, ask.what)
        finally:
            _cut(response)

    def _path(self, kind: str, **where: Any) -> str:
        return path_of(kind, api_version=self._api_versions.get(kind, ""), **where)

    async def _call(self, method: str, path: str, **rest: Any) -> Manifest:
        ask = _Ask(method=method, path=path, **rest)
        loop = asyncio.get_running_loop()
        ends_at, pause_s = loop.time() + self._timeout_s, RETRY_MIN_S
        unanswered: ClusterBusy | None = None
        while True:
            try:
                return await self._once(ask, left_s=ends_at - loop.time())
            except ClusterBusy as error:
                refused = error.got.startswith("429")  # it was not even looked at
                wait_s = max(pause_s, error.delay_s if refused else 0.0)
                if not (ask.again or refused) or loop.time() + wait_s >= ends_at:
                    raise error from (unanswered if refused else error.__cause__)
                unanswered = unanswered if refused else error
            except RLinfError as error:
                raise error from unanswered
            await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))
            pause_s *= 2

    async def _once(self, ask: _Ask, *, left_s: float) -> Manifest:
        try:
            async with asyncio.timeout(left_s):
                response = await self._send(ask)
                try:
                    answer = await response.read()
                finally:
                    response.release()
        except _NO_ANSWER as error:
            self._count(ask.verb, ask.kind, 0)
            raise api_errors.of_silence(ask.what, error) from error
        self._count(ask.verb, ask.kind, response.status)
        if response.status >= 300:
            raise _refusal(ask, response, body=answer)
        return _decode(answer, ask.what)

    async def _send(self, ask: _Ask) -> aiohttp.ClientResponse:
        settings = self._connection.configuration
        headers = {"Accept": ask.accept, "Content-Type": ask.content, "User-Agent": "rlinf-operator"}
        for auth in (await settings.auth_settings()).values():  # reads the service account's token anew when it is due
            headers[auth["key"]] = auth["value"]
        url = f"{settings.host}{ask.path}" + (f"?{urlencode(ask.query)}" if ask.query else "")
        total_s = None if ask.verb == "watch" else self._timeout_s
        answer = await self._connection.rest_client.request(
            ask.method, url, headers=headers, body=ask.body, _request_timeout=aiohttp.ClientTimeout(total=total_s)
        )
        response: aiohttp.ClientResponse = answer.response
        return response

    def _count(self, verb: str, kind: str, code: int) -> None:
        self._metrics.api_calls.labels(verb=verb, kind=kind, code=str(code)).inc()


def _cut(response: aiohttp.ClientResponse) -> None:
    """What is left of a watch. Closed in good order, its TLS would wait for the server's farewell, and nobody for that
    when the process ends."""
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()
    response.close()


async def _lines(response: aiohttp.ClientResponse, what: str) -> AsyncIterator[Manifest]:
    """Events of a watch. aiohttp's own readline gives up at 64 KiB, which a plan with alternatives passes."""
    rest = bytearray()
    try:
        async for chunk in response.content.iter_any():
            rest += chunk
            if b"\n" not in chunk:
                if len(rest) > MAX_LINE_BYTES:
                    raise ClusterBusy(what, got=f"a line of more than {MAX_LINE_BYTES} bytes", next="it is opened anew")
                continue
            *whole, tail = rest.split(b"\n")
            rest = bytearray(tail)
            for line in whole:
                if line:
                    yield _decode(bytes(line), what)
    except _NO_ANSWER as error:
        raise api_errors.of_silence(what, error) from error


def _decode(text: bytes, what: str) -> Manifest:
    try:
        found = pydantic_core.from_json(text)
    except ValueError as error:
        raise ClusterBusy(what, got=f"{len(text)} bytes that are not JSON", next="it is tried again") from error
    if not isinstance(found, dict):
        raise ClusterBusy(what, got=f"JSON that is {type(found).__name__}", wanted="an object")
    return found


def _whole(found: Manifest) -> Manifest:
    if "metadata" not in found or "kind" not in found:
        raise RLinfError("an answer of the API server has no kind or metadata", got=", ".join(sorted(found)))
    return found


def _refusal(ask: _Ask, response: aiohttp.ClientResponse, *, body: bytes) -> RLinfError:
    return api_errors.of_answer(
        ask.what, status=response.status, body=body, retry_after_s=_retry_after_s(response.headers)
    )


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    text = headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else None
