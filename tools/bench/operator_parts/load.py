"""Jobs made, watched and taken away by the hundred, over a few connections. For the parts of the benchmark `operator`.

    async with Load.on(field) as load:
        await load.create(names)
        await load.until(names, is_running, what="all jobs to run", timeout_s=300)
        await load.delete(names)

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| Load._follow, one per kind | RLJobs or pods by list and watch | an event | the API server; a new list when it ends |
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from rlinf_api.errors import RLinfError
from rlinf_operator.clients import kube
from rlinf_operator.clients.kube import KubeApi
from rlinf_operator.metrics import Metrics
from tools.bench.harness import BenchError
from tools.bench.operator_parts.field import Field, Manifest

AT_ONCE: Final = 16
API_TIMEOUT_S: Final = 30.0
Holds = Callable[[Manifest], bool]


class Load:
    """`jobs` holds each job as last seen."""

    def __init__(self, field: Field, api: KubeApi) -> None:
        self.field, self.api = field, api
        self.jobs: dict[str, Manifest] = {}
        self._changed, self._news = asyncio.Event(), set[str]()
        self._first: dict[str, list[tuple[Holds, asyncio.Future[float]]]] = {}

    @classmethod
    @asynccontextmanager
    async def on(cls, field: Field) -> AsyncIterator[Load]:
        async with await kube.connect(kubeconfig=str(field.cluster.kubeconfig)) as connection:
            load = cls(field, KubeApi(connection, timeout_s=API_TIMEOUT_S, metrics=Metrics()))
            async with load.following("RLJob", known=load.jobs, seen=load._seen, gone=load._gone):
                yield load

    @asynccontextmanager
    async def following(
        self, kind: str, *, known: MutableMapping[str, Any], seen: Callable[[Manifest], None],
        gone: Callable[[str], None],
    ) -> AsyncIterator[None]:  # fmt: skip
        """Tells of each object of the namespace, and of each that went. `known`: by name, made anew with each list."""
        follower = asyncio.create_task(self._follow(kind, known, seen, gone))
        try:
            yield
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    async def _follow(
        self, kind: str, known: MutableMapping[str, Any], seen: Callable[[Manifest], None], gone: Callable[[str], None]
    ) -> None:
        while True:
            with contextlib.suppress(RLinfError):
                await self._watch(kind, known, seen, gone)
            await asyncio.sleep(0.1)

    async def _watch(
        self, kind: str, known: MutableMapping[str, Any], seen: Callable[[Manifest], None], gone: Callable[[str], None]
    ) -> None:
        known.clear()
        async for page in self.api.pages(kind, namespace=self.field.namespace):
            for found in page.items:
                seen(found)
        async with self.api.open_watch(
            kind, resource_version=page.resource_version, server_timeout_s=900, namespace=self.field.namespace
        ) as events:
            async for event in events:
                if event["type"] == "ERROR":
                    return
                if event["type"] == "DELETED":
                    gone(event["object"]["metadata"]["name"])
                elif event["type"] != "BOOKMARK":
                    seen(event["object"])

    def describe(self, name: str) -> str:
        """Its conditions, and the end of the operator's log."""
        listed = (self.jobs.get(name, {}).get("status") or {}).get("conditions") or []
        lines = [f"{c['type']}={c['status']} {c['reason']}: {c['message'][:200]}" for c in listed]
        return "\n".join([*lines, self.field.plane.operator.tail(10)[-4000:]])

    async def create(self, names: Sequence[str]) -> None:
        await each(names, lambda name: self.api.create(self.field.job(name)))

    async def delete(self, names: Sequence[str]) -> None:
        await each(names, lambda name: self.api.delete("RLJob", name, namespace=self.field.namespace))

    async def until(self, names: Iterable[str], holds: Holds, *, what: str, timeout_s: float) -> float:
        """The moment at which the last of the jobs was seen to be so."""
        left = {name for name in names if name not in self.jobs or not holds(self.jobs[name])}
        self._news.clear()
        try:
            async with asyncio.timeout(timeout_s):
                while left:
                    await self._changed.wait()
                    self._changed.clear()
                    news, self._news = self._news, set()
                    left -= {name for name in news & left if name in self.jobs and holds(self.jobs[name])}
            return time.monotonic()
        except TimeoutError:
            one = sorted(left)[0]
            raise BenchError(
                f"waited {timeout_s:g} s for {what}; {len(left)} jobs are not so, {one} among them:\n"
                f"{self.describe(one)}"
            ) from None

    def first(self, name: str, holds: Holds) -> asyncio.Future[float]:
        """The moment of the next event that shows the job to be so, though the one behind it may show otherwise."""
        moment: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._first.setdefault(name, []).append((holds, moment))
        return moment

    async def until_count(self, kind: str, wanted: int, *, timeout_s: float) -> None:
        """Until that many objects of the kind are left in the namespace."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self.count(kind) > wanted:  # noqa: ASYNC110  (the API server has no event for a count)
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise BenchError(f"{await self.count(kind)} {kind}s are left after {timeout_s:g} s") from None

    async def count(self, kind: str) -> int:
        """Asks for one object and how many more there are."""
        plural = {"Pod": "/api/v1", "RLJob": "/apis/rlinf.io/v1alpha1", "RLPlan": "/apis/rlinf.io/v1alpha1"}[kind]
        path = f"{plural}/namespaces/{self.field.namespace}/{kind.lower()}s?limit=1"
        page = await asyncio.to_thread(self.field.cluster.api.get, path)
        return len(page["items"]) + int(page["metadata"].get("remainingItemCount") or 0)

    def _gone(self, name: str) -> None:
        self.jobs.pop(name, None)
        self._changed.set()

    def _seen(self, job: Manifest) -> None:
        name = job["metadata"]["name"]
        self.jobs[name] = job
        for wanted in [one for one in self._first.get(name, ()) if one[0](job)]:
            self._first[name].remove(wanted)
            if not wanted[1].done():
                wanted[1].set_result(time.monotonic())
        self._news.add(name)
        self._changed.set()


async def each(names: Sequence[str], act: Callable[[str], Awaitable[Any]]) -> None:
    left = iter(names)

    async def work() -> None:
        for name in left:
            await act(name)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(AT_ONCE, len(names))):
            group.create_task(work())


def condition(job: Manifest, kind: str) -> dict[str, Any]:
    listed = (job.get("status") or {}).get("conditions") or []
    return next((c for c in listed if c["type"] == kind), {})


def is_running(job: Manifest) -> bool:
    return all(condition(job, kind).get("status") == "True" for kind in ("PodsReady", "Running"))


def is_complete(job: Manifest) -> bool:
    return condition(job, "Complete").get("status") == "True"


def is_replacing(job: Manifest) -> bool:
    return condition(job, "Degraded").get("reason") == "PodReplaced"


def is_healthy(job: Manifest) -> bool:
    return is_running(job) and condition(job, "Degraded").get("status") == "False"
