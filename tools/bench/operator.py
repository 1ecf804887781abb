"""What `make bench-operator` measures: the bars of the operator, on a test cluster of its own.

    make bench-operator
    make bench-operator ROWS="apply_to_running memory_one_job"
    make bench-operator ARGS=--small                 # 50 jobs: whether it works, not how well

One real node, fake ones (kwok) for the rest; drivers are one process of stubs with mTLS and the real Job service. Rows
of all jobs come from one run, which takes minutes. A job has ten pods: nine workers and the driver.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tools.bench.harness import BenchError, Measure, Reference, Row
from tools.bench.operator_parts import beside, finished, jobsets, queued, scale, single
from tools.bench.operator_parts.field import Field, Say
from tools.testcluster import jobset

WORKERS: Final = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    jobs: int
    failures: int
    large: int
    """Worker pods of the one job that is large."""
    beside: int
    """Small jobs beside it."""
    finished: int
    """Jobs that nobody deletes."""
    queued: int
    """Jobs through one quota."""


FULL: Final = Size(jobs=1000, failures=100, large=2000, beside=100, finished=10_000, queued=200)
SMALL: Final = Size(jobs=50, failures=10, large=200, beside=20, finished=100, queued=20)


class Session:
    """The cluster of all rows, made when the first one needs it."""

    def __init__(self) -> None:
        self.say: Say = print
        self.size = FULL
        self.field: Field | None = None
        self.real = single.RealPods()
        self.queue = queued.BenchQueue()

    def the_field(self) -> Field:
        if self.field is None:
            raise BenchError("the rows of tools/bench/operator.py are measured within its session()")
        return self.field

    def one_job(self) -> Mapping[str, float]:
        return self.real.measure(self.the_field())

    def writes(self) -> float:
        return asyncio.run(single.writes(self.the_field()))

    def fail_over(self, *, killed: bool) -> float:
        return asyncio.run(single.fail_over(self.the_field(), killed=killed))

    def all_jobs(self) -> Mapping[str, float]:
        field, size = self.the_field(), self.size
        return asyncio.run(scale.whole_life(field, jobs=size.jobs, failures=size.failures, say=self.say))

    def beside(self) -> Mapping[str, float]:
        field, size = self.the_field(), self.size
        return asyncio.run(beside.measure(field, pods=size.large, small=size.beside, say=self.say))

    def finished(self) -> Mapping[str, float]:
        return asyncio.run(finished.measure(self.the_field(), jobs=self.size.finished, say=self.say))

    def queued(self) -> Mapping[str, float]:
        field, queue = self.the_field(), self.queue
        return asyncio.run(queued.measure(field, queue=queue, jobs=self.size.queued, say=self.say))

    def queued_jobsets(self) -> Mapping[str, float]:
        field, queue = self.the_field(), self.queue
        return asyncio.run(jobsets.measure(field, queue=queue, jobs=self.size.queued, say=self.say))


_SESSION: Final = Session()


@contextmanager
def session(say: Say) -> Iterator[None]:
    _SESSION.say = say
    with Field.up(say, jobs=_SESSION.size.jobs, pods=WORKERS) as field:
        _SESSION.field, _SESSION.real, _SESSION.queue = field, single.RealPods(), queued.BenchQueue()
        try:
            yield
        finally:
            _SESSION.field = None


def rows() -> list[Row]:
    return _rows(FULL)


def small_rows() -> list[Row]:
    return _rows(SMALL)


def _rows(size: Size) -> list[Row]:
    _SESSION.size = size
    # The order matters: memory of one job first, as a process does not give all of it back.
    one_job, all_jobs = _SESSION.one_job, _SESSION.all_jobs
    large: Measure = _SESSION.beside
    kept: Measure = _SESSION.finished
    through: Measure = _SESSION.queued
    others = Reference(name=f"JobSet {jobset.version()}, the same Kueue", measure=_SESSION.queued_jobsets)
    killed: Measure = functools.partial(_SESSION.fail_over, killed=True)
    stopped: Measure = functools.partial(_SESSION.fail_over, killed=False)
    return [
        Row(name="apply_to_running", unit="s", better="lower", bar=6, subject=one_job),
        Row(name="memory_one_job", unit="MiB", better="lower", bar=110, subject=one_job),
        Row(
            name="api_writes_of_a_job",
            unit="writes",
            better="lower",
            bar=2 * (WORKERS + 1) + 22,
            subject=_SESSION.writes,
        ),
        Row(name="failover_killed", unit="s", better="lower", bar=20, subject=killed),
        Row(name="failover_stopped", unit="s", better="lower", bar=3, subject=stopped),
        Row(name="large_job_created", unit="s", better="lower", bar=40, subject=large, runs=1),
        Row(name="small_jobs_beside_p99", unit="s", better="lower", bar=5, subject=large, runs=1),
        Row(name="small_jobs_alone_p99", unit="s", better="lower", subject=large, runs=1),
        Row(name="worker_pods_per_s", unit="pods/s", better="higher", bar=130, subject=all_jobs, runs=1),
        Row(name="operator_cpu_per_pod", unit="ms", better="lower", bar=7, subject=all_jobs, runs=1),
        Row(name="memory_all_jobs", unit="MiB", better="lower", bar=250, subject=all_jobs, runs=1),
        Row(name="failure_to_condition_p99", unit="s", better="lower", bar=1, subject=all_jobs, runs=1),
        Row(name="restart", unit="s", better="lower", bar=30, subject=all_jobs, runs=1),
        Row(name="finished_gets_per_s", unit="GETs/s", better="lower", bar=1, subject=kept, runs=1),
        Row(name="restart_beside_finished", unit="s", better="lower", bar=30, subject=kept, runs=1),
        Row(name="memory_finished", unit="MiB", better="lower", subject=kept, runs=1),
        Row(name="operator_cores_creating", unit="cores", better="lower", subject=all_jobs, runs=1),
        Row(name="kube-apiserver_cores_creating", unit="cores", better="lower", subject=all_jobs, runs=1),
        Row(name="operator_cores_running", unit="cores", better="lower", subject=all_jobs, runs=1),
        # The last ones: Kueue stays in the cluster.
        Row(name="queue_violations", unit="times", better="lower", bar=0, subject=through, reference=others, runs=1),
        Row(
            name="admitted_to_running_p50",
            unit="s",
            better="lower",
            bar=3,
            subject=through,
            reference=others,
            runs=1,
        ),
        Row(name="queued_jobs_per_s", unit="jobs/s", better="higher", subject=through, reference=others, runs=1),
    ]
