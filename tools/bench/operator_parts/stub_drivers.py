"""The drivers of a thousand jobs in one process: each its own address and certificate, gRPC with mTLS, the Job service.

It stands in for what runs in driver pods, which on fake nodes are objects without processes. Started by field.py in the
hub of a test cluster:

    python -m tools.bench.operator_parts.stub_drivers --kubeconfig K --namespace N --subnet 10.64.192.0 ...

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| watch of driver pods | list and watch events | an event | the API server; a new list when it ends |
| _serve, 8 at once | a driver pod that runs and has no address | Secret, address patch | the API server |
| Watch, one per job | - | the pace, or a change | time; CommitPlan; control |
| control | HTTP requests | | |

    GET  /state                  {"drivers": 1000, "watched": 1000, "attached": {"job-7": 1718000000.25, ...}}
    POST /pace?seconds=1         a step so often; 0: none, only the repeated status of a real driver every 10 s
    POST /complete               every driver says Complete, and its pod ends with exit code 0; ?job=NAME: that one's

Not for: tests of what drivers do (rlinf_worker/driver), anything that lasts longer than a benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from ipaddress import IPv4Address
from typing import Any, Final

import grpc
import grpc.aio
from aiohttp import web

from rlinf_api import names, rpc, wire
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2, job_pb2_grpc
from rlinf_api.errors import RLinfError
from rlinf_api.report import DriverReport, DriverState
from rlinf_operator.clients import kube
from rlinf_operator.clients.kube import KubeApi
from rlinf_operator.metrics import Metrics

Manifest = dict[str, Any]
Context = grpc.aio.ServicerContext[Any, Any]
AT_ONCE: Final = 8
API_TIMEOUT_S: Final = 30.0
REPEAT_S: Final = 10.0  # rlinf_worker/driver/server.py repeats an unchanged status so often
STEPS: Final = 100_000
OPTIONS: Final = [*({**dict(rpc.SERVER_OPTIONS), "grpc.http2.ping_timeout_ms": 30_000}).items()]
"""A driver has its process for itself. Of a thousand in one, on cores that others use, each would take the delay of all
for the operator's death after 2 s."""
ALLOWED: Final[rpc.Allowed] = {
    f"/rlinf.job.v1alpha1.Job/{method.name}": frozenset({"operator"})
    for method in job_pb2.DESCRIPTOR.services_by_name["Job"].methods
}


class StubDriver(job_pb2_grpc.JobServicer):
    """One job's. A step is a report that differs from the last one as those of a real driver do."""

    def __init__(self, stubs: Stubs, *, job: str, uid: str, attempt: int) -> None:
        self._stubs, self.job, self.attempt = stubs, job, attempt
        self.watched_at: float | None = None
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Event()
        self._report: dict[str, Any] = {
            "job_uid": uid, "driver_attempt": attempt, "state": DriverState.WAITING, "steps": STEPS,
            "step_seconds": 1.0,
        }  # fmt: skip

    async def start(self, address: str, *, secret: Manifest, uid: str) -> None:
        files = {name: base64.b64decode(text) for name, text in secret["data"].items()}
        gate = rpc.Gatekeeper(ALLOWED, job_uid=uid)
        self._server = grpc.aio.server(interceptors=[gate], options=OPTIONS)
        job_pb2_grpc.add_JobServicer_to_server(self, self._server)
        credentials = grpc.ssl_server_credentials(
            [(files["tls.key"], files["tls.crt"])], root_certificates=files["ca.crt"], require_client_auth=True
        )
        self._server.add_secure_port(f"{address}:{names.PORT_DRIVER_GRPC}", credentials)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    def say(self, **fields: Any) -> None:
        self._report |= fields
        self._report["sequence"] = self._report.get("sequence", 0) + 1
        self._changed.set()

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        self.watched_at = time.time()
        try:
            while True:
                self._changed.clear()
                yield wire.report_to_pb(DriverReport(**self._report))
                if self._report["state"] is DriverState.COMPLETE:
                    await self._stubs.end_pod(self)
                    return
                await self._next()
        finally:
            self.watched_at = None

    async def _next(self) -> None:
        """Until there is something to say, once a second at most."""
        pace_s = self._stubs.pace_s
        try:
            async with asyncio.timeout(pace_s or REPEAT_S):
                await self._changed.wait()
        except TimeoutError:
            if pace_s and self._report["state"] is DriverState.RUNNING:
                step = self._report.get("step", 0) + 1
                self.say(step=step, metrics={"return_mean": step / 10, "loss": 1 / step})

    async def PreparePlan(self, request: Any, context: Context) -> Any:  # noqa: N802
        return job_pb2.PlanResponse(ok=True)

    async def CommitPlan(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.say(state=DriverState.RUNNING, plan_revision=request.revision)
        return job_pb2.PlanResponse(ok=True)

    async def AbortPlan(self, request: Any, context: Context) -> Any:  # noqa: N802
        return job_pb2.PlanResponse(ok=True)

    async def GetStatus(self, request: Any, context: Context) -> Any:  # noqa: N802
        return wire.report_to_pb(DriverReport(**self._report))

    async def Adjust(self, request: Any, context: Context) -> Any:  # noqa: N802
        return job_pb2.AdjustResponse(ok=True)

    async def Drain(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.say(state=DriverState.DRAINED)
        return job_pb2.DrainResponse(drained=True)

    def complete(self) -> None:
        self.say(state=DriverState.COMPLETE, message="the flow finished")


class Stubs:
    def __init__(self, api: KubeApi, *, namespace: str, subnet: str) -> None:
        self._api, self._namespace = api, namespace
        self._first = int(IPv4Address(subnet))
        self.pace_s = 0.0
        self.drivers: dict[str, StubDriver] = {}
        self._wanted: asyncio.Queue[Manifest] = asyncio.Queue()
        self._given = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._work())
            while True:
                with contextlib.suppress(RLinfError):
                    await self._follow()
                await asyncio.sleep(0.2)

    async def _follow(self) -> None:
        selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_DRIVER}"
        async for page in self._api.pages("Pod", namespace=self._namespace, label_selector=selector):
            for pod in page.items:
                self._seen(pod)
        async with self._api.open_watch(
            "Pod", resource_version=page.resource_version, server_timeout_s=600, namespace=self._namespace,
            label_selector=selector,
        ) as events:  # fmt: skip
            async for event in events:
                if event["type"] == "ERROR":
                    return
                if event["type"] == "DELETED":
                    if driver := self.drivers.pop(event["object"]["metadata"]["name"], None):
                        await driver.stop()
                elif event["type"] != "BOOKMARK":
                    self._seen(event["object"])

    def _seen(self, pod: Manifest) -> None:
        meta = pod["metadata"]
        if "deletionTimestamp" in meta or meta["name"] in self.drivers or pod["status"].get("phase") != "Running":
            return
        label = meta["labels"]
        self.drivers[meta["name"]] = StubDriver(
            self, job=label[names.LABEL_JOB], uid=label[names.LABEL_JOB_UID],
            attempt=int(label[names.LABEL_ATTEMPT]),
        )  # fmt: skip
        self._wanted.put_nowait(pod)

    async def _work(self) -> None:
        while True:
            pod = await self._wanted.get()
            meta = pod["metadata"]
            try:
                await self._serve(
                    meta["name"], job=meta["labels"][names.LABEL_JOB], uid=meta["labels"][names.LABEL_JOB_UID]
                )
            except RLinfError as error:
                print(f"driver {meta['name']} not served: {error}", flush=True)
                self.drivers.pop(meta["name"], None)

    async def _serve(self, name: str, *, job: str, uid: str) -> None:
        """As the kubelet and a driver would: the certificate is mounted, it listens, its address is known."""
        driver = self.drivers.get(name)
        if driver is None:
            return
        secret = await self._api.get("Secret", names.secret_name(job, "driver", uid=uid), namespace=self._namespace)
        self._given += 1
        address = str(IPv4Address(self._first + self._given))
        await driver.start(address, secret=secret, uid=uid)
        await self._patch(name, {"podIP": address, "podIPs": [{"ip": address}]})

    async def end_pod(self, driver: StubDriver) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        state = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": now, "startedAt": now}}
        container = {
            "name": names.CONTAINER_DRIVER, "image": "stub", "imageID": "", "ready": False, "restartCount": 0,
            "state": state,
        }  # fmt: skip
        ended = {"phase": "Succeeded", "containerStatuses": [container]}
        with contextlib.suppress(RLinfError):
            await self._patch(names.driver_pod(driver.job, driver.attempt), ended)

    async def _patch(self, pod: str, status: Manifest) -> None:
        await self._api.patch("Pod", pod, patch={"status": status}, namespace=self._namespace, subresource="status")


async def control(stubs: Stubs, *, host: str, port: int) -> web.AppRunner:
    async def state(_: web.Request) -> web.Response:
        attached = {d.job: d.watched_at for d in stubs.drivers.values() if d.watched_at is not None}
        return web.json_response({"drivers": len(stubs.drivers), "watched": len(attached), "attached": attached})

    async def pace(request: web.Request) -> web.Response:
        stubs.pace_s = float(request.query["seconds"])
        return web.Response(text="ok\n")

    async def complete(request: web.Request) -> web.Response:
        job = request.query.get("job")
        for driver in list(stubs.drivers.values()):
            if job in (None, driver.job):
                driver.complete()
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/state", state)
    app.router.add_post("/pace", pace)
    app.router.add_post("/complete", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--subnet", required=True, help="first address; the ones after it are given out")
    parser.add_argument("--control", required=True, help="host:port of the HTTP control")
    options = parser.parse_args()
    host, _, port = options.control.rpartition(":")
    async with await kube.connect(kubeconfig=options.kubeconfig) as connection:
        api = KubeApi(connection, timeout_s=API_TIMEOUT_S, metrics=Metrics())
        stubs = Stubs(api, namespace=options.namespace, subnet=options.subnet)
        runner = await control(stubs, host=host, port=int(port))
        try:
            await stubs.run()
        finally:
            await runner.cleanup()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
