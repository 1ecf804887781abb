"""Kopf's view of the RLJobs, compared with a list: what its watch missed is enqueued, and a watch that stays behind
makes /readyz fail, as do lists that keep failing. Also counts jobs by state.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| JobsCheck.run | a list of RLJobs | jobs_check_s; then grace_s for events that are under way | time; cancel |

Why: Kopf has no sign of life of a watch (its /healthz says that the process lives), and reports nothing about an object
that was deleted while its watch was broken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from rlinf_api.conditions import JobCondition, Status
from rlinf_api.errors import RLinfError
from rlinf_operator.clients.kube import KubeApi
from rlinf_operator.clients.refusals import Refusals
from rlinf_operator.manifests.metadata import JobKey, Manifest, is_anothers
from rlinf_operator.metrics import Metrics

logger = logging.getLogger(__name__)
ECHO_S: Final = 10.0  # an own status write is looked at, too, mostly by the pass that something else brings sooner
GRACE_S: Final = 3.0  # an event follows its write within milliseconds; seconds on a machine that is busy
STATES: Final = ("Pending", "Running", "Suspended", "Complete", "Failed", "Invalid")


class Enqueue(Protocol):
    def __call__(self, key: JobKey, *, after_s: float = 0.0) -> None: ...


class JobsCheck:
    def __init__(
        self,
        api: KubeApi,
        *,
        enqueue: Enqueue,
        is_own: Callable[[JobKey, str], bool] = lambda key, version: False,
        metrics: Metrics,
        every_s: float,
        namespaces: Sequence[str] = (),
        refusals: Refusals | None = None,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._enqueue, self._is_own, self._metrics = api, enqueue, is_own, metrics
        self._every_s, self._grace_s, self._clock = every_s, grace_s, clock
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._refusals = refusals or Refusals(metrics=metrics)
        self._seen: dict[JobKey, int] = {}
        self._behind_since: float | None = None
        self._checked_at: float | None = None
        self._began_at = clock()

    def seen(self, key: JobKey, version: str) -> None:
        """Kopf's handler: an event came. No version: the job is gone."""
        if version.isdecimal():
            self._seen[key] = int(version)
        else:
            self._seen.pop(key, None)
        self._enqueue(key, after_s=ECHO_S if self._is_own(key, version) else 0.0)

    def behind_s(self) -> float:
        """How long Kopf's watch has been behind the API server, or a check has been overdue that would say so."""
        now = self._clock()
        checked_at = self._began_at if self._checked_at is None else self._checked_at
        overdue_s = max(0.0, now - checked_at - self._every_s - self._grace_s)
        return overdue_s if self._behind_since is None else max(overdue_s, now - self._behind_since)

    async def run(self) -> None:
        while True:
            try:
                await self.once()
            except RLinfError as error:
                logger.warning("jobs not checked", extra={"error": str(error)})
            await asyncio.sleep(self._every_s)

    async def once(self) -> None:
        started, known = self._clock(), set(self._seen)
        versions: dict[JobKey, int] = {}
        counts: Counter[str] = Counter()
        for namespace in self._namespaces:
            try:
                async for page in self._api.pages("RLJob", namespace=namespace):
                    versions |= {_key(job): int(job["metadata"]["resourceVersion"]) for job in page.items}
                    counts.update(state_of(job) for job in page.items if not is_anothers(job))
            except RLinfError as error:
                if not self._refusals.refused(namespace, "RLJob", error):
                    raise
                known = {key for key in known if key.namespace != namespace}  # nobody says that they are gone
            else:
                self._refusals.served(namespace, "RLJob")
        for state in STATES:
            self._metrics.jobs.labels(state=state).set(counts[state])
        first = self._checked_at is None
        if not first:
            await asyncio.sleep(self._grace_s)
        late = [key for key, version in versions.items() if self._seen.get(key, 0) < version]
        for key in known - set(versions):
            if self._seen.pop(key, None) is not None:
                late.append(key)
        for key in late:
            self._enqueue(key)
        self._checked_at = self._clock()
        if first or not late:
            self._behind_since = None
            return
        self._metrics.missed.inc(len(late))
        self._behind_since = started if self._behind_since is None else self._behind_since
        logger.warning("kopf's watch is behind", extra={"jobs": len(late), "job": str(late[0])})


def state_of(job: Manifest) -> str:
    """One word for dashboards.

    >>> state_of({"status": {"conditions": [{"type": "Running", "status": "True"}]}})
    'Running'
    """
    listed = (job.get("status") or {}).get("conditions") or []
    status = {condition.get("type"): condition.get("status") for condition in listed}
    for kind in (JobCondition.COMPLETE, JobCondition.FAILED, JobCondition.SUSPENDED, JobCondition.RUNNING):
        if status.get(kind) == Status.TRUE:
            return str(kind.value)
    return "Invalid" if status.get(JobCondition.VALID) == Status.FALSE else "Pending"


def _key(job: Manifest) -> JobKey:
    return JobKey(namespace=job["metadata"]["namespace"], name=job["metadata"]["name"])
