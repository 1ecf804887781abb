"""The loop around observe, decide and apply: one pass at a time per job, repeated until there is nothing to do.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| _follow (one per kind) | the store's watch | a change; Expired: watches anew | the store |
| _work (`workers` of them) | the queue's keys | a due key | watches, drivers, requeue, resync |
| _resync | - | resync_s | time |

The local runner drives it over its store; on a cluster Kopf's handlers only enqueue keys here. A pass that fails is
repeated after a pause that doubles; a bug in one job's pass is logged with its traceback and holds up no other job.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from rlinf_api import conditions, names, times
from rlinf_api.errors import RetryableError, RLinfError
from rlinf_operator.clients.authority import Authority
from rlinf_operator.clients.driver import Drivers, OnChange
from rlinf_operator.clients.objects import ObjectStore
from rlinf_operator.clients.queues import Providers
from rlinf_operator.clients.refusals import NamespaceRefused
from rlinf_operator.clients.runtimes import Runtimes
from rlinf_operator.clients.scheduler import Scheduler
from rlinf_operator.manifests.metadata import JobKey, Manifest, is_anothers
from rlinf_operator.reconcile import examining, plans
from rlinf_operator.reconcile.apply import Applied, Clients, apply
from rlinf_operator.reconcile.decide import decide
from rlinf_operator.reconcile.observe import observe
from rlinf_operator.reconcile.queue import WorkQueue
from rlinf_operator.reconcile.state import Observed
from rlinf_operator.reconcile.telling import EventRecorder
from rlinf_operator.settings import DEFAULTS, OperatorSettings

logger = logging.getLogger(__name__)
WORKERS = 24  # passes at once: each spends its time waiting for the API server, at 0.1 s a call when it is busy
GOOD_NEWS_S = 1.0  # at most: how late the start of a pod is seen where more jobs want passes than can be had
GOOD_NEWS_S_PER_POD = 0.001  # how late it is in any case: a pass over so many pods takes a tenth of that, for all jobs
FINISHED_S = 2.0  # how late a finished job's leftovers are seen to
FINISHED_PER_S = 1.0  # passes of the resync, each a GET
TOO_MANY_SILENT = 3  # at once, and more than a third: nodes do not die so, but the operator's way to them does
DOUBTS_TOLD_S = 60.0  # between two warnings of it
PROGRESS_PER_S = 20  # status writes that only move progress, of all jobs together: a twelfth of a small API server


@dataclass(frozen=True, slots=True, kw_only=True)
class _Full:
    """A quota refused a pod. Passes for other reasons, such as pods that start, do not ask it again before `until`,
    unless the job was edited or has fewer pods by now, which may have made room."""

    until: float = 0.0
    said: str
    generation: int
    pods: int

    @staticmethod
    def of(observed: Observed, said: str) -> _Full:
        alive = sum(1 for pod in observed.pods if not pod.has_ended)
        return _Full(said=said, generation=observed.generation, pods=alive)

    def holds(self, observed: Observed, *, now: float) -> bool:
        other = _Full.of(observed, self.said)
        return now < self.until and (other.generation, other.pods >= self.pods) == (self.generation, True)


@dataclass(slots=True, kw_only=True)
class _Pace:
    """What the loop keeps of one job between passes. Only pace hangs on it, never what is decided."""

    failures: int = 0
    trouble: str = ""
    """Why the last pass is repeated; empty: it is not."""
    progress_written_at: float | None = None
    progress_turn_at: float | None = None
    """When the pass is due that was given to the job for its progress alone; None: it waits for none."""
    finished: bool = False
    passed_at: float = 0.0
    pods: int = 0
    """How many the last pass saw."""
    left_status_uid: str = ""
    """Uid of a job a pass over which left its status to the next: once, or a plan of no use would never be told of."""
    going_uid: str = ""
    """Uid of a job whose namespace is being deleted."""
    quiet_until: float = 0.0
    full: _Full | None = None
    driver_runs: tuple[int, float] | None = None
    """(attempt, when it was first seen to run)."""


class Reconciler:
    """`await run()` until it is cancelled; `enqueue` may be called from the same event loop at any time."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        scheduler: Scheduler,
        drivers: Callable[[OnChange], Drivers],
        authority: Authority,
        settings: OperatorSettings = DEFAULTS,
        clock: Callable[[], datetime] = times.utc_now,
        follows: Sequence[str] = ("RLJob", "RLPlan", "Pod"),
        on_pass: Callable[[float, str], None] = lambda seconds, result: None,
        on_rule: Callable[[str], None] = lambda action: None,
        queues: Providers | None = None,
        on_gone: Callable[[JobKey], None] = lambda key: None,
        runs_jobs_of: Callable[[str], bool] = lambda namespace: True,
    ) -> None:
        """`follows`: kinds that are watched through the store; on a cluster none, as its cache and Kopf's handler call
        `enqueue`. `on_pass`: told of each pass, its seconds and done, repeated or broke. `on_rule`: of the action of
        each rule of failurePolicy that a pass found met. `on_gone`: of each job that a pass found gone. `runs_jobs_of`:
        whether jobs of a namespace are looked after, or let alone as they are."""
        self._queue: WorkQueue[JobKey] = WorkQueue(coalesce_s=settings.coalesce_s)
        self._drivers = drivers(self._driver_changed)
        self._clients = Clients(
            store=store,
            scheduler=scheduler,
            drivers=self._drivers,
            authority=authority,
            clock=clock,
            queues=queues,
            recorder=EventRecorder(store),
        )
        self._store, self._settings, self._clock, self._runtimes = store, settings, clock, Runtimes(store)
        self._follows, self._on_pass, self._on_rule, self._on_gone = tuple(follows), on_pass, on_rule, on_gone
        self._runs_jobs_of = runs_jobs_of
        self._memory: dict[JobKey, _Pace] = {}
        self._followed: set[JobKey] = set()
        self._doubts_told_at: float | None = None
        self._progress_turn_at = 0.0

    def overdue(self) -> tuple[int, float]:
        """(jobs that wait for a pass and are due, seconds of the oldest wait or pass)."""
        return self._queue.overdue()

    def enqueue(self, key: JobKey, *, after_s: float = 0.0) -> None:
        self._queue.add(key, after_s=after_s)

    def child_changed(self, key: JobKey, *, can_wait: bool = False) -> None:
        """A pod, a plan, ... of this job. A finished job has time: its pods go one by one, and each would be a pass.
        So would be the starts of a gang's pods: what `can_wait` waits once more as long as jobs wait for their pass
        anyway, and longer the larger the job. One that no pass has met, or that is gone, is none: that a job is there
        is said by its own event."""
        if (memory := self._memory.get(key)) is not None:
            good_news_s = max(GOOD_NEWS_S_PER_POD * memory.pods, min(GOOD_NEWS_S, self._queue.lag_s))
            patience_s = good_news_s if can_wait else 0.0
            self._queue.add(key, after_s=FINISHED_S if memory.finished else patience_s)

    def look_at(self, namespace: str) -> None:
        """It is refused, or served, from now on: its jobs are looked at now and not when their pauses are over."""
        for key in [key for key in self._memory if key.namespace == namespace]:
            self.enqueue(key)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for kind in self._follows:
                    group.create_task(self._follow(kind), name=f"operator: watch of {kind}")
                for number in range(WORKERS):
                    group.create_task(self._work(), name=f"operator: worker {number}")
                group.create_task(self._resync(), name="operator: resync")
        finally:
            await self._drivers.close()

    async def pass_over(self, key: JobKey) -> Applied:
        """One pass over one job: for the workers, and for tests that want to see each step."""
        if not self._runs_jobs_of(key.namespace):
            self._forget(key)
            return Applied()
        memory = self._memory.setdefault(key, _Pace())
        memory.passed_at, memory.progress_turn_at = time.monotonic(), None
        now = self._clock()
        due = self._progress_due_s(memory) <= 0
        trusted = self._clients.authority.trusted()
        observed = await observe(
            key, store=self._store, drivers=self._drivers, now=now, progress_due=due, trusted=trusted,
            platform=self._runtimes, queues=self._clients.queues,
        )  # fmt: skip
        if observed is None or is_anothers(observed.manifest):
            self._forget(key)
            if observed is None:
                self._on_gone(key)
            return Applied()
        if memory.going_uid == observed.job.uid and (left_s := memory.quiet_until - time.monotonic()) > 0:
            self.enqueue(key, after_s=left_s)  # each object that goes wakes this job, whose writes are refused
            return Applied()
        memory.finished, memory.pods = conditions.is_finished(observed.status.conditions), len(observed.pods)
        self._follow_driver(observed)
        observed = self._unless_cut_off(_silent_since_it_runs(observed, memory))
        may_leave_status = not observed.status.attempt and memory.left_status_uid != observed.job.uid
        try:
            decision = decide(observed, now=now, settings=self._settings)
            full = memory.full
            no_room = full.said if full is not None and full.holds(observed, now=time.monotonic()) else ""
            applied = await apply(decision, observed, self._clients, may_leave_status=may_leave_status, no_room=no_room)
            if not no_room:
                memory.full = _Full.of(observed, applied.over_quota) if applied.over_quota else None
        except RLinfError:
            raise
        except Exception as error:
            if memory.failures:  # not of something that is over by the next pass
                await apply(examining.broken(observed, error, now=now), observed, self._clients)
            raise
        for action in decision.ruled:
            self._on_rule(action)
        if applied.left_status:
            memory.left_status_uid = observed.job.uid
        if applied.wrote_status:
            memory.progress_written_at = time.monotonic()
        if applied.finished:
            memory.finished = True
            self._unfollow(key)
        if applied.going:
            self._unfollow(key)
            memory.going_uid, memory.quiet_until = observed.job.uid, time.monotonic() + self._settings.retry_max_s
            self.enqueue(key, after_s=self._settings.retry_max_s)
            return applied
        if not due and observed.driver is not None and observed.driver.report is not None:
            self.enqueue(key, after_s=self._progress_due_s(memory))
        if decision.requeue_after_s is not None:
            self.enqueue(key, after_s=decision.requeue_after_s)
        if applied.progressed:
            self.enqueue(key)
        return applied

    def _unless_cut_off(self, observed: Observed) -> Observed:
        """The silence of a driver is the operator's only witness that it is lost. Where many are silent at once the
        witness is in doubt, and a driver is late at most: replacing them all would end healthy jobs."""
        link, late_s = observed.driver, self._settings.driver_late_s
        if link is None or link.silent_s < self._settings.driver_silent_deadline_s:
            return observed
        silent, followed = self._drivers.silent(for_s=late_s)
        if silent < TOO_MANY_SILENT or 3 * silent <= followed:
            return observed
        now = time.monotonic()
        if self._doubts_told_at is None or now - self._doubts_told_at >= DOUBTS_TOLD_S:
            self._doubts_told_at = now
            logger.warning(
                "too many drivers are silent at once: none is replaced", extra={"silent": silent, "followed": followed}
            )
        # Late, and looked at again when so much time has passed once more.
        silent_s = max(late_s, self._settings.driver_silent_deadline_s - late_s)
        return replace(observed, driver=replace(link, silent_s=silent_s))

    def _progress_due_s(self, memory: _Pace) -> float:
        """Seconds until a pass may write progress alone."""
        if memory.progress_written_at is None:
            return 0.0
        interval_s = max(self._settings.progress_interval_s, len(self._followed) / PROGRESS_PER_S)
        return max(0.0, memory.progress_written_at + interval_s - time.monotonic())

    def _progress_turn_s(self, memory: _Pace) -> float:
        """Seconds until a pass for progress alone. Where many jobs are due at once, as when all of them begin to step,
        they come PROGRESS_PER_S a second: behind a thousand passes a failure would wait for half a minute."""
        due_s, now = self._progress_due_s(memory), time.monotonic()
        if due_s > 0:
            return due_s
        if memory.progress_turn_at is None:
            memory.progress_turn_at = max(now, self._progress_turn_at)
            self._progress_turn_at = memory.progress_turn_at + 1 / PROGRESS_PER_S
        return max(0.0, memory.progress_turn_at - now)

    def _driver_changed(self, key: JobKey, *, progress: bool = False) -> None:
        """A step is no reason for a pass: a thousand jobs would be a thousand passes a second that write nothing."""
        memory = self._memory.get(key) if progress else None
        self.enqueue(key, after_s=self._progress_turn_s(memory) if memory is not None else 0.0)

    def _follow_driver(self, observed: Observed) -> None:
        """Listens to the newest driver that runs and has an address; none once the job is finished or without pods."""
        if conditions.is_finished(observed.status.conditions) or not observed.pods:
            self._unfollow(observed.key)
            return
        running = [p for p in observed.pods if p.component == names.COMPONENT_DRIVER and p.at_work and p.ip]
        newest = max(running, key=lambda p: p.attempt, default=None)
        if (target := plans.target_of(observed.job, newest)) is not None:
            self._followed.add(observed.key)
            self._drivers.follow(observed.key, target)

    def _unfollow(self, key: JobKey) -> None:
        self._followed.discard(key)
        self._drivers.forget(key)

    async def _work(self) -> None:
        while True:
            key = await self._queue.take()
            try:
                await self._one(key)
            finally:
                self._queue.done(key)

    async def _one(self, key: JobKey) -> None:
        memory = self._memory.setdefault(key, _Pace())
        started, result = time.monotonic(), "repeated"
        try:
            applied = await self.pass_over(key)
            trouble = applied.try_again
            result = "repeated" if trouble else "done"
        except RetryableError as error:
            trouble = str(error)
            if isinstance(error, NamespaceRefused):
                self._unfollow(key)  # its driver may be gone, and its silence says nothing of the others
        except RLinfError as error:
            logger.warning("pass failed", extra={"job": str(key), "error": str(error), "reason": error.reason})
            trouble = str(error)
        except asyncio.CancelledError:
            # A library's way to say that a call ended (gRPC's of a channel that was closed) must not end the worker.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            logger.exception("pass broke", extra={"job": str(key)})
            trouble, result = "a call of the pass was cancelled, but not the pass", "broke"
        except Exception as error:
            logger.exception("pass broke", extra={"job": str(key)})
            trouble, result = repr(error), "broke"
        seconds = time.monotonic() - started
        self._on_pass(seconds, result)
        logger.debug("pass", extra={"job": str(key), "seconds": round(seconds, 4), "result": result})
        if not trouble:
            memory.failures, memory.trouble = 0, ""
            return
        full, now = memory.full, time.monotonic()
        if full is not None and now < full.until:  # it was not asked in this pass
            self.enqueue(key, after_s=full.until - now)
            return
        pause_s = min(self._settings.retry_max_s, self._settings.retry_min_s * 2.0**memory.failures)
        if full is not None:
            memory.full = replace(full, until=now + pause_s)
        memory.failures = min(memory.failures + 1, 30)
        level = logging.DEBUG if trouble == memory.trouble else logging.INFO  # the same trouble is one change
        logger.log(level, "pass is repeated", extra={"job": str(key), "why": trouble, "pause_s": pause_s})
        memory.trouble = trouble
        self.enqueue(key, after_s=pause_s)

    async def _follow(self, kind: str) -> None:
        pause_s = self._settings.retry_min_s
        while True:
            try:
                async for change in self._store.watch(kind):
                    pause_s = self._settings.retry_min_s
                    if key := key_of(change.object):
                        self.enqueue(key)
            except RLinfError as error:
                logger.info("watch ended", extra={"kind": kind, "reason": error.reason, "error": str(error)})
            await asyncio.sleep(pause_s)
            pause_s = min(self._settings.retry_max_s, 2 * pause_s)

    async def _resync(self) -> None:
        """Enqueues each job that had a pass. Of the finished ones, of which a cluster may keep thousands and which
        change no more, it takes FINISHED_PER_S a second: those that wait longest."""
        while True:
            await asyncio.sleep(self._settings.resync_s)
            jobs = [key for key, memory in self._memory.items() if not memory.finished]
            most = max(1, int(FINISHED_PER_S * self._settings.resync_s))
            finished = (key for key, memory in self._memory.items() if memory.finished)
            jobs += heapq.nsmallest(most, finished, key=lambda key: self._memory[key].passed_at)
            for number, key in enumerate(jobs):
                # Spread over the interval: all at once would be seconds in which a failure waits.
                self.enqueue(key, after_s=self._settings.resync_s * number / len(jobs))

    def _forget(self, key: JobKey) -> None:
        self._unfollow(key)
        self._memory.pop(key, None)
        self._queue.forget(key)


def key_of(obj: Manifest) -> JobKey | None:
    """The job that an object belongs to; None for one that is not ours."""
    meta = obj["metadata"]
    namespace = meta.get("namespace", "default")
    if obj["kind"] == "RLJob":
        return JobKey(namespace=namespace, name=meta["name"])
    job = (meta.get("labels") or {}).get(names.LABEL_JOB)
    if not job and obj["kind"] == "RLPlan":
        job = ((obj.get("spec") or {}).get("job") or {}).get("name")
    return JobKey(namespace=namespace, name=job) if job else None


def _silent_since_it_runs(observed: Observed, memory: _Pace) -> Observed:
    """A driver that nobody has heard yet is silent from when this operator first saw it run: an operator that begins
    has heard nobody. Whether its pod is ready says nothing of it: that is also a sidecar's word."""
    link = observed.driver
    if link is None or link.report is not None:
        return observed
    drivers = (p for p in observed.pods if p.component == names.COMPONENT_DRIVER and p.attempt == link.attempt)
    if not any(p.at_work for p in drivers):
        memory.driver_runs = None
    elif memory.driver_runs is None or memory.driver_runs[0] != link.attempt:
        memory.driver_runs = link.attempt, time.monotonic()
    since_s = time.monotonic() - memory.driver_runs[1] if memory.driver_runs is not None else 0.0
    return replace(observed, driver=replace(link, silent_s=min(link.silent_s, max(1e-3, since_s))))
