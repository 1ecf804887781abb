"""An API server with a script of faults, on a loopback port: list in pages, watch, and the verbs that write.

    async with FakeApiServer() as server:
        api = server.client(timeout_s=2)
        server.put(pod("a"))                    # as if somebody else had written it
        server.fault(status=429, times=2, method="POST", headers={"Retry-After": "0"})
        server.break_watches()                  # connections drop; silence(): they stay, and say nothing
        server.expire()                         # 410 for whatever is older than now

Not a Kubernetes: no validation, no admission, no graceful deletion (tests/cluster has a real one). It is for what a
real one does rarely and never when asked.
"""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from kubernetes.aio import client

from rlinf_api import times
from rlinf_operator.clients.kube import KubeApi
from rlinf_operator.metrics import Metrics

Manifest = dict[str, Any]
_PATH = re.compile(
    r"^/(?:api|apis)/(?P<version>v1|[^/]+/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?$"
)
KINDS = {
    "pods": "Pod", "rljobs": "RLJob", "rlplans": "RLPlan", "services": "Service", "configmaps": "ConfigMap",
    "networkpolicies": "NetworkPolicy", "poddisruptionbudgets": "PodDisruptionBudget",
    "secrets": "Secret", "events": "Event", "leases": "Lease", "namespaces": "Namespace",
    "workloads": "Workload", "podgroups": "PodGroup",
    "resourceflavors": "ResourceFlavor", "workloadpriorityclasses": "WorkloadPriorityClass",
    "priorityclasses": "PriorityClass",
}  # fmt: skip


@dataclass(kw_only=True)
class Fault:
    """Answers `times` requests of that method and path instead of the server; `after`: does what was asked first."""

    status: int
    times: int
    method: str = ""
    path: str = ""
    watch: bool | None = None
    after: bool = False
    delay_s: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    reason: str = ""


class FakeApiServer:
    def __init__(self, *, discovery: bool = False) -> None:
        """`discovery`: also says which kinds there are, as Kopf wants to know."""
        self._discovery = discovery
        self.objects: dict[tuple[str, str, str], Manifest] = {}
        self.requests: list[tuple[str, str]] = []
        self.version = 100
        self.metrics = Metrics()
        self._history: list[tuple[int, str, Manifest, Manifest | None]] = []
        """Version, event, object, and what it was before."""
        self._oldest = 0
        self._faults: list[Fault] = []
        self._changed = asyncio.Event()
        self._watches: set[asyncio.Task[Any]] = set()
        self._silent = False
        self._uids = 0

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        settings = client.Configuration(host=f"http://127.0.0.1:{self._runner.addresses[0][1]}")
        self.connection = client.ApiClient(configuration=settings)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.connection.close()
        self.break_watches()
        await self._runner.cleanup()

    def client(self, *, timeout_s: float = 2.0) -> KubeApi:
        return KubeApi(self.connection, timeout_s=timeout_s, metrics=self.metrics)

    # --- what a test does -----------------------------------------------------------------------------------------

    def put(self, obj: Manifest, *, silently: bool = False) -> Manifest:
        """Creates or replaces; `silently`: no watch ever hears of it."""
        meta = obj["metadata"]
        key = (obj["kind"], meta.get("namespace", "default"), meta["name"])
        known = self.objects.get(key)
        self.version += 1
        if known is None:
            self._uids += 1
        uid = meta.get("uid") or (known["metadata"]["uid"] if known else f"uid-{self._uids}")
        made = known["metadata"] if known else {"creationTimestamp": times.text(datetime.now(UTC))}
        meta = {"creationTimestamp": made.get("creationTimestamp"), **meta}
        new = {**obj, "metadata": {**meta, "namespace": key[1], "uid": uid, "resourceVersion": str(self.version)}}
        self.objects[key] = new
        if not silently:
            self._tell("ADDED" if known is None else "MODIFIED", new, before=known)
        return new

    def remove(self, kind: str, name: str, *, namespace: str = "team", silently: bool = False) -> Manifest:
        gone = self.objects.pop((kind, namespace, name))
        self.version += 1
        last = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self.version)}}
        if not silently:
            self._tell("DELETED", last)
        return last

    def fault(self, *, status: int, times: int = 1, **more: Any) -> None:
        self._faults.append(Fault(status=status, times=times, **more))

    def break_watches(self) -> None:
        for task in list(self._watches):
            task.cancel()

    def mend(self) -> None:
        """No fault is left."""
        self._faults.clear()

    def silence(self, silent: bool = True) -> None:
        self._silent = silent
        self._changed.set()

    def expire(self) -> None:
        """What happened so far can no longer be watched from; streams that are open end with 410."""
        self._oldest = self.version + 1
        self._history.clear()
        self._changed.set()

    def count(self, method: str, part: str) -> int:
        return sum(1 for m, path in self.requests if m == method and part in path)

    # --- the server -----------------------------------------------------------------------------------------------

    def _tell(self, kind: str, obj: Manifest, *, before: Manifest | None = None) -> None:
        self._history.append((self.version, kind, obj, before))
        self._changed.set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs))
        fault = self._take_fault(request)
        if fault is not None and not fault.after:
            await asyncio.sleep(fault.delay_s)
            return _status(fault.status, fault.reason, headers=fault.headers)
        if self._discovery and (known := _discovered(request.path)) is not None:
            return web.json_response(known)
        match = _PATH.match(request.path)
        assert match is not None, request.path
        kind, namespace, name = KINDS[match["plural"]], match["namespace"], match["name"]
        verb = {"POST": self._create, "PUT": self._write, "PATCH": self._write, "DELETE": self._delete}.get(
            request.method, self._read
        )
        if request.query.get("watch") == "true":
            return await self._watch(request, kind, namespace)
        body = await request.json() if request.can_read_body else {}
        answer = verb(request, kind, namespace=namespace, name=name, body=body)
        if fault is not None:
            await asyncio.sleep(fault.delay_s)
            return _status(fault.status, fault.reason, headers=fault.headers)
        return answer

    def _take_fault(self, request: web.Request) -> Fault | None:
        watch = request.query.get("watch") == "true"
        for fault in self._faults:
            fits = fault.method in ("", request.method) and fault.path in request.path
            if fault.times > 0 and fits and fault.watch in (None, watch):
                fault.times -= 1
                return fault
        return None

    def _read(self, request: web.Request, kind: str, *, namespace: str, name: str, body: Manifest) -> web.Response:
        if name:
            found = self.objects.get((kind, namespace or "", name))  # "": of the whole cluster
            return web.json_response(found) if found else _status(404, "NotFound")
        items = self._selected(request, kind, namespace)
        start, size = int(request.query.get("continue", "0")), int(request.query.get("limit", "1000"))
        meta: Manifest = {"resourceVersion": str(self.version)}
        if start + size < len(items):
            meta["continue"] = str(start + size)
        # Items of a list have no kind, as on a real API server.
        page = [{k: v for k, v in item.items() if k != "kind"} for item in items[start : start + size]]
        return web.json_response({"kind": f"{kind}List", "metadata": meta, "items": page})

    def _selected(self, request: web.Request, kind: str, namespace: str | None) -> list[Manifest]:
        fits = _matcher(request.query.get("labelSelector", ""))
        return [
            o for (k, ns, _), o in sorted(self.objects.items()) if k == kind and namespace in (None, ns) and fits(o)
        ]

    def _create(self, request: web.Request, kind: str, *, namespace: str, name: str, body: Manifest) -> web.Response:
        meta = body["metadata"]
        meta["namespace"] = namespace
        meta.setdefault("name", f"{meta.get('generateName', '')}{self.version}")
        if (kind, namespace, meta["name"]) in self.objects:
            return _status(409, "AlreadyExists")
        return web.json_response(self.put({**body, "kind": kind}), status=201)

    def _write(self, request: web.Request, kind: str, *, namespace: str, name: str, body: Manifest) -> web.Response:
        known = self.objects.get((kind, namespace, name))
        if known is None:
            return _status(404, "NotFound")
        wanted = (body.get("metadata") or {}).get("resourceVersion")
        if wanted and wanted != known["metadata"]["resourceVersion"]:
            return _status(409, "Conflict")
        meta = {**known["metadata"], **(body.get("metadata") or {})}
        new = _merged(known, body) if request.method == "PATCH" else {**body, "metadata": meta}
        return web.json_response(self.put({**new, "kind": kind}))

    def _delete(self, request: web.Request, kind: str, *, namespace: str, name: str, body: Manifest) -> web.Response:
        known = self.objects.get((kind, namespace, name))
        if known is None:
            return _status(404, "NotFound")
        uid = (body.get("preconditions") or {}).get("uid")
        if uid and uid != known["metadata"]["uid"]:
            return _status(409, "Conflict")
        self.remove(kind, name, namespace=namespace)
        return web.json_response({"kind": "Status", "status": "Success", "details": {"uid": known["metadata"]["uid"]}})

    async def _watch(self, request: web.Request, kind: str, namespace: str | None) -> web.StreamResponse:
        sent = int(request.query["resourceVersion"])
        fits = _matcher(request.query.get("labelSelector", ""))
        response = web.StreamResponse()
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            while True:
                self._changed.clear()
                if not self._silent:
                    if sent < self._oldest:
                        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                        await _line(response, "ERROR", gone)
                        return response
                    for version, event, obj, before in list(self._history):
                        same = obj["kind"] == kind and namespace in (None, obj["metadata"]["namespace"])
                        if version > sent:
                            sent = version
                            if same and fits(obj):
                                await _line(response, event, obj)
                            elif same and before is not None and fits(before):
                                await _line(response, "DELETED", obj)
                await self._changed.wait()
        finally:
            self._watches.discard(task)


def _discovered(path: str) -> Manifest | None:
    """Groups, versions and resources, as far as Kopf asks."""
    crds = {"name": "customresourcedefinitions", "kind": "CustomResourceDefinition", "namespaced": False}
    tables = {
        "/api/v1": [{"name": "namespaces", "kind": "Namespace", "namespaced": False}],
        "/apis/apiextensions.k8s.io/v1": [crds],
        "/apis/rlinf.io/v1alpha1": [{"name": "rljobs", "kind": "RLJob", "namespaced": True}],
    }
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        versions = [table.removeprefix("/apis/").split("/") for table in tables if table.startswith("/apis/")]
        return {
            "groups": [
                {"name": group, "preferredVersion": {"version": version}, "versions": [{"version": version}]}
                for group, version in versions
            ]
        }
    if path in tables:
        common = {"singularName": "", "shortNames": [], "categories": [], "verbs": ["get", "list", "watch", "patch"]}
        return {"resources": [common | entry for entry in tables[path]]}
    return None


async def _line(response: web.StreamResponse, kind: str, obj: Manifest) -> None:
    await response.write(json.dumps({"type": kind, "object": obj}).encode() + b"\n")


def _status(code: int, reason: str, *, headers: dict[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": f"scripted {code}"}
    return web.json_response(body, status=code, headers=headers)


def _merged(old: Any, patch: Any) -> Any:
    """A JSON merge patch."""
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = _merged(new.get(key), value)
    return new


def _matcher(selector: str) -> Callable[[Manifest], bool]:
    """`label` or `label=value`."""
    label, has_value, value = selector.partition("=")

    def fits(obj: Manifest) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return not label or (labels.get(label) == value if has_value else label in labels)

    return fits
