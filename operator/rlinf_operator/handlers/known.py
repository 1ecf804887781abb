"""The RLJobs that Kopf's watch has told of: who there is, in which state, and whether the watch still tells.

    known = KnownJobs(enqueue=reconciler.enqueue, metrics=metrics)
    known.seen(Sight(key=JobKey("team-a", "math"), version=4711, state="Running"))    # a pass, soon
    known.wrote(Sight(key=JobKey("team-a", "math"), version=4712))    # an own write: its echo is waited for
    known.behind_s()                                        # 0 while it comes; then how long it has not

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| KnownJobs.run | echoes that are late, lists that are over, silence | TICK_S | time; cancel |

No list of jobs is asked for beside Kopf's own (docs/adr/0060), unless watches are silent. What Kopf's could miss shows
here:

    its event loop hangs                 no beat comes (rljobs.py)
    its watch tells nothing any more     the echo of an own status write does not come
    all watches tell nothing any more    those of the copies are silent: then jobs are listed, too (`silent`), as Kopf
                                         opens a silent watch anew where it was, and it may stay so
    a job went while no watch was open   a list tells of all but that one
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rlinf_api import times
from rlinf_api.conditions import JobCondition, Status
from rlinf_api.errors import RLinfError
from rlinf_operator.manifests.metadata import JobKey, is_anothers
from rlinf_operator.metrics import Metrics

logger = logging.getLogger(__name__)
ECHO_S: Final = 10.0  # an own status write is looked at, too, mostly by the pass that something else brings sooner
LATE_S: Final = 10.0  # an event follows its write within milliseconds; seconds on a machine that is busy
BEAT_S: Final = 5.0  # of Kopf's loop
LISTED_S: Final = 30.0  # no job of a list that is under way comes so much later than the one before: a page takes 0.1 s
TICK_S: Final = 5.0
OWN_JOBS: Final = 4096  # whose last own write is known; the echo of another one's is looked at like anybody's change
FINISHED_S: Final = 2.0  # what is listed with a finished job and works has its first pass before it
FINISHED_PER_S: Final = 20.0
"""First passes over jobs that a list tells are finished, each a read: 10,000 of them at once would be minutes in which
nobody looks at those that work."""
LONG_OVER_S: Final = 300.0
"""A job that ended later may still have pods that go, and a quota that others wait for."""
STATES: Final = ("Pending", "Running", "Suspended", "Complete", "Failed", "Invalid")
FINISHED: Final = ("Complete", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What an event said of a job."""

    key: JobKey
    version: int = 0
    """resourceVersion; 0: the job is gone."""
    state: str = ""
    """One of STATES; empty: another controller's job, which is not counted."""
    is_long_over: bool = False
    """It has ended LONG_OVER_S ago, so that nothing of it is under way any more."""
    is_listed: bool = False
    """By a list: Kopf's first, one after a watch that had expired, or one because of silence."""

    @classmethod
    def of(cls, job: Mapping[str, Any], *, is_listed: bool) -> Sight:
        meta = job["metadata"]
        key = JobKey(namespace=str(meta["namespace"]), name=str(meta["name"]))
        state = "" if is_anothers(job) else state_of(job)
        ended_at = times.parse((job.get("status") or {}).get("completionTime"))
        is_long_over = ended_at is not None and (times.utc_now() - ended_at).total_seconds() > LONG_OVER_S
        return cls(
            key=key, version=int(meta["resourceVersion"]), state=state, is_long_over=is_long_over, is_listed=is_listed
        )


class Enqueue(Protocol):
    def __call__(self, key: JobKey, *, after_s: float = 0.0) -> None: ...


@dataclass(slots=True)
class _Known:
    version: int
    state: str
    told_at: float


@dataclass(slots=True)
class _Own:
    """Writes of this process."""

    newest: int
    untold: int
    """The oldest that the watch has not told of; 0: it has told of all."""
    since: float


class KnownJobs:
    def __init__(
        self,
        *,
        enqueue: Enqueue,
        metrics: Metrics,
        look: Callable[[], AsyncIterator[Sight]],
        look_every_s: float,
        runs_jobs_of: Callable[[str], bool] = lambda namespace: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`look` lists all jobs, no more often than `look_every_s`. `runs_jobs_of`: of which namespaces they count."""
        self._runs_jobs_of = runs_jobs_of
        self._enqueue, self._metrics, self._clock = enqueue, metrics, clock
        self._look, self._look_every_s, self._looked_at = look, look_every_s, -math.inf
        self._is_silent = False
        self._jobs: dict[JobKey, _Known] = {}
        self._own: OrderedDict[JobKey, _Own] = OrderedDict()
        self._beat_at = clock()
        self._list: tuple[float, float] | None = None  # of one that is under way: when it began, and its newest job
        self._is_said = False
        self._finished_until = -math.inf
        """When the first pass over the last of the finished jobs that were listed is due."""

    # --- what is told -------------------------------------------------------------------------------------------------
    def seen(self, sight: Sight) -> None:
        now, key = self._clock(), sight.key
        if not sight.version:
            self._jobs.pop(key, None)
            self._own.pop(key, None)
            self._enqueue(key)
            return
        before = self._jobs.get(key)
        if sight.is_listed and (before is not None or self._list is not None):
            self._list = (self._list[0] if self._list is not None else now), now
        self._jobs[key] = _Known(sight.version, sight.state, now)
        own = self._own.get(key)
        if own is not None and sight.version >= own.untold:
            own.untold = 0
        if before is not None and before.version == sight.version:  # a list tells of ten thousand that have not changed
            return
        if before is None and sight.is_listed and sight.state in FINISHED and sight.is_long_over:
            self._finished_until = max(now + FINISHED_S, self._finished_until + 1 / FINISHED_PER_S)
            self._enqueue(key, after_s=self._finished_until - now)
            return
        self._enqueue(key, after_s=ECHO_S if own is not None and own.newest == sight.version else 0.0)

    def beat(self) -> None:
        """Kopf's event loop goes round."""
        self._beat_at = self._clock()

    def wrote(self, answer: Sight) -> None:
        """An own write, by the API server's answer to it: the watch is to tell of it."""
        key, version = answer.key, answer.version
        own = self._own.setdefault(key, _Own(version, 0, 0.0))
        own.newest = version
        self._own.move_to_end(key)
        known = self._jobs.get(key)
        if not own.untold and (known is None or known.version < version):
            own.untold, own.since = version, self._clock()
        if len(self._own) > OWN_JOBS:
            self._own.popitem(last=False)

    def gone(self, key: JobKey) -> None:
        """A pass has looked: there is no such job. Where no event had told that, it is one that was missed."""
        self._own.pop(key, None)
        if self._jobs.pop(key, None) is not None:
            self._metrics.missed.inc()

    def excuse(self, namespace: str) -> None:
        """The API server refuses it from now on, or serves it again: its watch tells nothing of what was written."""
        for key, own in self._own.items():
            if key.namespace == namespace:
                own.untold = 0

    def look_at(self, namespace: str) -> None:
        """Its jobs are run, or let alone, from now on."""
        for key in self._jobs:
            if key.namespace == namespace:
                self._enqueue(key)

    def silent(self) -> None:
        """A watch of the copies has said nothing for too long, and was given up."""
        self._is_silent = True

    # --- what is asked ------------------------------------------------------------------------------------------------
    def behind_s(self) -> float:
        """How long Kopf's loop has stood still, or an own write has not been told of."""
        now = self._clock()
        of_beat = now - self._beat_at - BEAT_S
        of_echo = max((now - own.since for own in self._own.values() if own.untold), default=0.0) - LATE_S
        return max(0.0, of_beat, of_echo)

    def counts(self) -> dict[str, int]:
        """By state."""
        found = dict.fromkeys(STATES, 0)
        for key, known in self._jobs.items():
            if known.state and self._runs_jobs_of(key.namespace):
                found[known.state] += 1
        return found

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(TICK_S, self._look_every_s))
            self.tick()
            if self._is_silent and self._clock() - self._looked_at >= self._look_every_s:
                self._is_silent, self._looked_at = False, self._clock()
                try:
                    async for sight in self._look():
                        self.seen(sight)
                except RLinfError as error:
                    logger.warning("jobs are not listed", extra={"error": str(error)})

    def tick(self) -> None:
        """Passes over jobs of which something was missed, perhaps: a pass reads the job itself."""
        now = self._clock()
        late = [key for key, own in self._own.items() if own.untold and now - own.since > LATE_S]
        for key in late:
            self._enqueue(key)
        if late and not self._is_said:
            logger.warning("kopf's watch is behind", extra={"jobs": len(late), "job": str(late[0])})
        self._is_said = bool(late)
        if self._list is not None and now - self._list[1] > LISTED_S:
            began, self._list = self._list[0], None
            for key, known in self._jobs.items():
                if known.told_at < began:  # or of another namespace, whose list it was not
                    self._enqueue(key)


def state_of(job: Mapping[str, Any]) -> str:
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
