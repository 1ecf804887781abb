"""What the leader runs: everything put together. Called by `__main__` once the Lease is won.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| watches | clients/reflector.py | | |
| known jobs | handlers/known.py | | |
| certificates | the CA's Secret, the clock | a twentieth of a certificate's life, 10 min at most | time |
| passes | reconcile/loop.py | | |
| memory | - | TRIM_S | time |
| Kopf's thread | handlers/rljobs.py | | |

Order of the start: CA and own certificate, first lists, then passes and Kopf. Nothing is decided before every kind was
listed once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from rlinf_api import rpc, times
from rlinf_api.errors import InvariantBroken
from rlinf_operator import gangs, process
from rlinf_operator.clients.ca_store import Certificates
from rlinf_operator.clients.cache import CachedStore
from rlinf_operator.clients.driver import Drivers, GrpcDrivers, OnChange
from rlinf_operator.clients.kube import KubeApi
from rlinf_operator.clients.kueue import Kueue
from rlinf_operator.clients.podgroups import PodGroups
from rlinf_operator.clients.queues import Providers
from rlinf_operator.clients.refusals import Refusals
from rlinf_operator.clients.scheduler import GrpcScheduler
from rlinf_operator.handlers.known import KnownJobs, Sight
from rlinf_operator.handlers.probes import Probes
from rlinf_operator.handlers.rljobs import Watcher, login_of
from rlinf_operator.manifests.metadata import Manifest
from rlinf_operator.metrics import Metrics
from rlinf_operator.policies import pod_view
from rlinf_operator.process import ProcessSettings
from rlinf_operator.reconcile.loop import Reconciler, key_of
from rlinf_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)
FIRST_LIST_S: Final = 120.0  # 10,000 pods in pages take 5 s here; a slow API server ten times that

TRIM_S: Final = 30.0  # what a start with a thousand jobs leaves is 100 MB, and is gone before anybody looks


class Leader:
    def __init__(
        self,
        connection: Any,
        *,
        standing: Any,
        process: ProcessSettings,
        operator: OperatorSettings,
        metrics: Metrics,
        probes: Probes,
        folder: Path,
        clock: Callable[[], datetime] = times.utc_now,
    ) -> None:
        """`standing`: connections of their own for what must not wait in line behind passes: watches, their lists."""
        self._connection, self._process, self._operator = connection, process, operator
        self._metrics, self._probes, self._clock = metrics, probes, clock
        self._tls = folder
        self._gangs = gangs.SCHEDULERS[operator.gang_scheduler]
        api = partial(
            KubeApi, timeout_s=process.api_timeout_s, metrics=metrics,
            api_versions={"PodGroup": self._gangs.api_version},
        )  # fmt: skip
        self._api, self._standing = api(connection), api(standing)

    async def run(self) -> None:
        """Until it is cancelled; a part that breaks ends it, with its error."""
        certificates = Certificates(
            self._api, namespace=self._process.namespace, folder=self._tls, clock=self._clock,
            ca_life=timedelta(days=self._process.ca_life_days),
            leaf_life=timedelta(seconds=self._operator.certificate_life_s),
        )  # fmt: skip
        await certificates.begin()
        scheduler = GrpcScheduler(
            self._operator.scheduler_address, tls=rpc.TlsFolder(self._tls), timeout_s=self._operator.call_timeout_s
        )
        namespaces = process.namespaces(self._process)
        refusals = Refusals(metrics=self._metrics, on_change=lambda namespace: self._namespace_changed(namespace))
        store = CachedStore(
            self._api, metrics=self._metrics, on_change=lambda obj: self._child_changed(obj),
            inactivity_s=self._process.watch_inactivity_s, namespaces=namespaces, watches=self._standing,
            namespace_selector=self._process.watch_namespace_selector,
            on_namespace=lambda namespace: self._known.look_at(namespace),
            refusals=refusals, on_job_written=lambda job: self._known.wrote(Sight.of(job, is_listed=False)),
            on_silent=lambda: self._known.silent(),
        )  # fmt: skip
        self._reconciler = Reconciler(
            store=store, scheduler=scheduler, drivers=self._drivers, authority=certificates.authority,
            settings=self._operator, clock=self._clock, follows=(), on_pass=self._passed,
            on_rule=lambda action: self._metrics.rules.labels(action=action).inc(),
            queues=Providers(
                Kueue(store, self._api, metrics=self._metrics), PodGroups(store, self._gangs, metrics=self._metrics)
            ),
            on_gone=lambda key: self._known.gone(key), runs_jobs_of=store.runs_jobs_of,
        )  # fmt: skip
        self._known = KnownJobs(
            enqueue=self._reconciler.enqueue, metrics=self._metrics,
            look=partial(self._jobs, namespaces, refusals), look_every_s=self._process.watch_inactivity_s,
            runs_jobs_of=store.runs_jobs_of,
        )  # fmt: skip
        kopf = Watcher(
            self._known, namespaces=namespaces, login=login_of(self._connection.configuration),
            inactivity_s=self._process.watch_inactivity_s,
        )  # fmt: skip
        try:
            async with asyncio.TaskGroup() as group:
                store.start(group)
                await store.wait_listed(timeout_s=FIRST_LIST_S)
                self._watch_over(store)
                group.create_task(certificates.run(), name="operator: certificates")
                group.create_task(self._known.run(), name="operator: known jobs")
                group.create_task(_ends(kopf), name="operator: kopf")
                group.create_task(_keep_small(), name="operator: memory")
                self._known.beat()  # the first is not late because lists were slow
                kopf.start()
                logger.info("ready to decide", extra={"cached": store.counts()})
                await self._reconciler.run()
        finally:
            self._probes.checks.clear()
            await kopf.stop()
            await scheduler.close()

    def _drivers(self, on_change: OnChange) -> Drivers:
        settings = self._operator
        return GrpcDrivers(
            tls=rpc.TlsFolder(self._tls), on_change=on_change, timeout_s=settings.call_timeout_s,
            late_s=settings.driver_late_s,
        )  # fmt: skip

    async def _jobs(self, namespaces: Sequence[str], refusals: Refusals) -> AsyncIterator[Sight]:
        for namespace in namespaces or (None,):
            if not refusals.refuses(namespace):
                async for page in self._standing.pages("RLJob", namespace=namespace):
                    for job in page.items:
                        yield Sight.of(job, is_listed=True)

    def _child_changed(self, obj: Manifest) -> None:
        if key := key_of(obj):
            self._reconciler.child_changed(key, can_wait=pod_view.is_good_news(obj))

    def _namespace_changed(self, namespace: str) -> None:
        self._known.excuse(namespace)
        self._reconciler.look_at(namespace)

    def _passed(self, seconds: float, result: str) -> None:
        self._metrics.reconcile_seconds.labels(result=result).observe(seconds)

    def _watch_over(self, store: CachedStore) -> None:
        """What probes look at, and what is measured when somebody scrapes."""
        process = self._process

        def age_of(kind: str) -> Callable[[], tuple[float, float]]:
            return lambda: (store.age_s()[kind], process.watch_stale_s)

        for kind in store.age_s():
            self._probes.checks[f"watch of {kind}"] = age_of(kind)
        self._probes.checks["watch of RLJob"] = lambda: (self._known.behind_s(), process.watch_stale_s)
        self._probes.checks["queue"] = lambda: (self._reconciler.overdue()[1], process.queue_stale_s)

        def measure() -> None:
            depth, oldest_s = self._reconciler.overdue()
            self._metrics.queue_depth.set(depth)
            self._metrics.queue_age.set(oldest_s)
            for kind, age_s in (store.age_s() | {"RLJob": self._known.behind_s()}).items():
                self._metrics.watch_age.labels(kind=kind).set(age_s)
            for kind, count in store.counts().items():
                self._metrics.cached_objects.labels(kind=kind).set(count)
            for state, count in self._known.counts().items():
                self._metrics.jobs.labels(state=state).set(count)

        self._probes.before_scrape = measure


async def _keep_small() -> None:
    while True:
        await asyncio.sleep(TRIM_S)
        process.give_memory_back()


async def _ends(kopf: Watcher) -> None:
    """Raises when Kopf is over although nobody stopped it: without it nobody tells of a new job."""
    await kopf.ended.wait()
    raise InvariantBroken("kopf ended by itself", next="look at its traceback above; the process starts anew")
