"""A proxy in front of the API server that misbehaves by rule: the API's own faults, without breaking the API server.

    with ApiProxy(cluster) as proxy:
        proxy.add(Rule(path=r"/api/v1/.*/pods", method="GET", watch=True, do=CutWatch(after_s=2)))
        proxy.add(Rule(method="POST", do=Answer(status=429, retry_after_s=1), times=3))
        client = kubernetes.config.new_client_from_config(str(proxy.kubeconfig))

It listens on the machine's end of the cluster's link, on a free port, so processes of the machine and pods both reach
it. A caller's bearer token is passed on; a caller with a client certificate is impersonated, so that RBAC holds for it
as it would without the proxy. exec, attach and port-forward (upgraded connections) do not pass.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import ClientConnectionError, ClientPayloadError, ClientSession, ClientTimeout, TCPConnector, web

from tools.testcluster import pki
from tools.testcluster.cluster import Cluster
from tools.testcluster.errors import ClusterError, StartFailed

START_TIMEOUT_S = 10.0
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The API server's own kind of refusal, without asking it: 410 Gone, 429 Too Many Requests, 500 ..."""

    status: int
    reason: str = ""
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Passes the request on after a while."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Drop:
    """Closes the connection without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropAfter:
    """Passes the request on and closes the connection instead of answering: it was done, but the caller cannot know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutWatch:
    """Ends a watch after a while; with `gone` by the event with which a real one says that its version is too old."""

    after_s: float = 0.0
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Mute:
    """Opens a watch and passes nothing of it on: the connection stands, and nobody can see that it is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Asks the test, in the proxy's thread: `before` may close the connection instead of passing the request on, and
    `after`, told the status, instead of passing the answer on, each by answering True."""

    before: Callable[[], bool] = lambda: False
    after: Callable[[int], bool] = lambda status: False


Action = Answer | Delay | Drop | DropAfter | CutWatch | Mute | Script


@dataclass(slots=True, kw_only=True)
class Rule:
    """The first rule that fits a request acts. All conditions must hold; `times` counts down, None is for ever."""

    do: Action
    path: str = ".*"
    """Regular expression for the whole path, without the query."""
    method: str | None = None
    watch: bool | None = None
    times: int | None = None
    used: int = field(default=0, init=False)
    """How often it acted; a test reads it."""

    def fits(self, *, method: str, path: str, watch: bool) -> bool:
        if isinstance(self.do, CutWatch | Mute) and not watch:  # of another request there is nothing to cut
            return False
        if self.times is not None and self.used >= self.times:
            return False
        if self.method is not None and self.method.upper() != method.upper():
            return False
        if self.watch is not None and self.watch != watch:
            return False
        return re.fullmatch(self.path, path) is not None


def choose(rules: list[Rule], *, method: str, path: str, watch: bool) -> Action | None:
    """The action for a request, counted on its rule."""
    for rule in rules:
        if rule.fits(method=method, path=path, watch=watch):
            rule.used += 1
            return rule.do
    return None


def status_body(answer: Answer) -> dict[str, Any]:
    """What the API server would send with that status."""
    reasons = {410: "Expired", 429: "TooManyRequests", 500: "InternalError", 409: "Conflict", 503: "ServiceUnavailable"}
    body: dict[str, Any] = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"the test cluster's proxy answers {answer.status}",
        "reason": answer.reason or reasons.get(answer.status, "Unknown"),
        "code": answer.status,
    }
    if answer.retry_after_s is not None:
        body["details"] = {"retryAfterSeconds": answer.retry_after_s}
    return body


class ApiProxy:
    """Runs in a thread of its own between `__enter__` and `__exit__`; rules may be added and cleared at any time."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rules: list[Rule] = []
        self.requests = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api-proxy", daemon=True)
        self._runner: web.AppRunner | None = None
        self._upstream: ClientSession | None = None
        # One for all requests: a connection is used again only where its context is the same.
        self._tls: dict[bool, ssl.SSLContext] = {}
        self._callers: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()

    @property
    def server(self) -> str:
        return f"https://{self.cluster.addresses.machine_link}:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        return self.cluster.paths.root / f"proxy-{self.port}.kubeconfig"

    def add(self, rule: Rule) -> Rule:
        self.rules.append(rule)
        return rule

    def clear(self) -> None:
        self.rules.clear()

    def __enter__(self) -> ApiProxy:
        self._thread.start()
        try:
            self._run(self._start())
        except BaseException:
            self._end_loop()
            raise
        admin = yaml.safe_load(self.cluster.kubeconfig.read_text(encoding="utf-8"))
        admin["clusters"][0]["cluster"]["server"] = self.server
        self.kubeconfig.write_text(yaml.safe_dump(admin), encoding="utf-8")
        self.kubeconfig.chmod(0o600)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._run(self._stop())
        finally:
            self._end_loop()
            self.kubeconfig.unlink(missing_ok=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=START_TIMEOUT_S)
        except TimeoutError as err:
            raise StartFailed(f"the API proxy did not start or stop in {START_TIMEOUT_S:g} s") from err

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=START_TIMEOUT_S)
        self._loop.close()

    async def _start(self) -> None:
        folder = self.cluster.paths.pki
        identity = pki.Identity(
            file="api-proxy", common_name="api-proxy", ips=(self.cluster.addresses.machine_link, "127.0.0.1")
        )
        key, certificate = pki.issue_from(folder, identity)
        (folder / "api-proxy.pem").write_bytes(key + certificate)
        (folder / "api-proxy.pem").chmod(0o600)
        listening = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
        listening.load_cert_chain(folder / "api-proxy.pem")
        listening.verify_mode = ssl.CERT_OPTIONAL
        self._upstream = ClientSession(
            connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None, sock_connect=10), auto_decompress=False
        )
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A watch never ends by itself: closing waits for no handler.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.cluster.addresses.machine_link, 0, ssl_context=listening)
        await site.start()
        self.port = int(self._runner.addresses[0][1])

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._upstream is not None:
            await self._upstream.close()
        # A polite end of TLS waits for the other side, which may never answer; the loop is about to be closed.
        for transport in self._callers:
            transport.abort()
        await asyncio.sleep(0.05)

    def _tls_upstream(self, *, as_admin: bool) -> ssl.SSLContext:
        folder = self.cluster.paths.pki
        if as_admin not in self._tls:
            context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
            if as_admin:
                context.load_cert_chain(folder / "admin.crt", folder / "admin.key")
            self._tls[as_admin] = context
        return self._tls[as_admin]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        if request.transport is not None:
            self._callers.add(request.transport)
        if request.headers.get("Upgrade"):
            raise web.HTTPNotImplemented(text="the test cluster's proxy passes no exec, attach or port-forward")
        watch = request.query.get("watch") in ("1", "true", "True")
        action = choose(self.rules, method=request.method, path=request.path, watch=watch)
        if isinstance(action, Delay):
            await asyncio.sleep(action.delay_s)
        if isinstance(action, Drop) or (isinstance(action, Script) and action.before()):
            return _hang_up(request)
        if isinstance(action, Answer):
            headers = {} if action.retry_after_s is None else {"Retry-After": str(action.retry_after_s)}
            return web.json_response(status_body(action), status=action.status, headers=headers)
        try:
            return await self._pass_on(request, action)
        except ClientConnectionError:  # the API server is down, or ended: what its callers would see without us
            return _hang_up(request)

    async def _pass_on(self, request: web.Request, action: Action | None) -> web.StreamResponse:
        assert self._upstream is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        who = _impersonation(request)
        headers.update(who)
        url = f"{self.cluster.addresses.server}{request.raw_path}"
        tls = self._tls_upstream(as_admin=bool(who))
        async with self._upstream.request(
            request.method,
            url,
            headers=headers,
            # With a body, be it empty, aiohttp adds a content type of its own, which the API server refuses.
            data=await request.read() or None,
            skip_auto_headers=("Content-Type", "User-Agent", "Accept", "Accept-Encoding"),
            ssl=tls,
            allow_redirects=False,
        ) as answer:
            if isinstance(action, DropAfter) or (isinstance(action, Script) and action.after(answer.status)):
                await answer.read()
                return _hang_up(request)
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            passed = web.StreamResponse(status=answer.status, headers=kept)
            await passed.prepare(request)
            cut = action if isinstance(action, CutWatch) else None
            try:
                async with asyncio.timeout(cut.after_s if cut else None):
                    async for chunk in answer.content.iter_any():
                        if not isinstance(action, Mute):
                            await passed.write(chunk)
            except ClientPayloadError:  # the API server ended in the middle
                return _hang_up(request, passed)
            except TimeoutError:
                assert cut is not None
                if not cut.gone:
                    return _hang_up(request, passed)
                event = {"type": "ERROR", "object": status_body(Answer(status=410))}
                await passed.write(json.dumps(event).encode() + b"\n")
            await passed.write_eof()
            return passed


def _impersonation(request: web.Request) -> dict[str, str]:
    """Headers by which the API server takes us for the caller; empty when it brings a token of its own."""
    if request.headers.get("Authorization"):
        return {}
    peer = request.transport.get_extra_info("peercert") if request.transport else None
    if not peer:
        return {}
    subject = {key: value for pairs in peer["subject"] for key, value in pairs}
    if subject.get("organizationName") == "system:masters":
        return {"X-Testcluster-Proxy": "admin"}
    if "commonName" not in subject:
        raise ClusterError(f"a client certificate without a common name cannot be impersonated: {subject}")
    headers = {"Impersonate-User": subject["commonName"]}
    if "organizationName" in subject:
        headers["Impersonate-Group"] = subject["organizationName"]
    return headers


def _hang_up(request: web.Request, answer: web.StreamResponse | None = None) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return answer or web.Response()
