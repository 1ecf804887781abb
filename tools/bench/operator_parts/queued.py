"""Jobs through one quota of Kueue's: whether they come in the order in which they were made, whether there are ever
more pods than the quota, and how soon a job runs once it is admitted. JobSets go through the same one (jobsets.py).

Kueue and JobSet are started in the field's cluster for this and stay in it: of all parts this is the last. A job that
runs is completed HOLD_S later, so that jobs wait for each other from the first dozen on.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| one per job | - | it is admitted, it runs, HOLD_S | Admissions, Load; the API server's answer |
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlinf_api import names as known
from tools.bench.harness import BenchError
from tools.bench.operator_parts.field import Field, Manifest, Say
from tools.bench.operator_parts.load import Load, condition, is_running
from tools.testcluster import extras

QUEUE: Final = "bench"
AT_ONCE: Final = 8
"""Jobs that the quota has room for."""
EVERY_S: Final = 0.25
"""Between two jobs that are made: twice as often as any can end, so that most of them wait."""
HOLD_S: Final = 1.0
LATE_S: Final = 3.0
"""Kueue goes by when a Workload was made, in whole seconds, and the operator makes it within a second: of two jobs that
were made so close to each other either may come first."""
STRATEGY: Final = "StrictFIFO"
"""Under Kueue's default, BestEffortFIFO, who comes while quota is free goes before those that were once refused it."""
LIMIT_S: Final = 120.0
S_PER_JOB: Final = 5.0
"""How long all jobs may take: LIMIT_S, and S_PER_JOB for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """When a job was made, admitted by Kueue as its Workload shows, and seen to run."""

    made: float
    admitted: float
    running: float


class BenchQueue:
    """Made at the first call, for all who go through it: Kueue, JobSet, and the quota in the field's namespace."""

    def __init__(self) -> None:
        self._pods = 0

    def pods(self, field: Field) -> int:
        """What the quota has room for."""
        if not self._pods:
            _prepare(field, quota=AT_ONCE * (field.pods + 1))
            self._pods = AT_ONCE * (field.pods + 1)
        return self._pods


async def measure(field: Field, *, queue: BenchQueue, jobs: int, say: Say) -> Mapping[str, float]:
    quota = await asyncio.to_thread(queue.pods, field)
    names = [f"queued-{number}" for number in range(jobs)]
    pods, admissions = LivePods(), Admissions("RLJob")
    async with (
        Load.on(field) as load,
        load.following("Pod", known=pods.live, seen=pods.seen, gone=pods.gone),
        load.following("Workload", known=admissions.known, seen=admissions.seen, gone=admissions.gone),
    ):

        async def run(name: str) -> Passage:
            return await _run(load, admissions, name)

        await _until_kueue_is_known(load, run)
        passages = await one_after_the_other(names, run, describe=load.describe)
        most = pods.most
        await load.delete(names)
        for kind in ("RLJob", "RLPlan", "Pod"):
            await load.until_count(kind, 0, timeout_s=LIMIT_S + S_PER_JOB * jobs)
    return summary("jobs", passages, quota=quota, most=most, say=say)


async def one_after_the_other(
    names: Sequence[str], run: Callable[[str], Awaitable[Passage]], *, describe: Callable[[str], str]
) -> list[Passage]:
    """One is made every EVERY_S, however long those before it wait."""
    runs: list[asyncio.Future[Passage]] = []
    for name in names:
        runs.append(asyncio.ensure_future(run(name)))
        await asyncio.sleep(EVERY_S)
    try:
        async with asyncio.timeout(LIMIT_S + S_PER_JOB * len(names)):
            return await asyncio.gather(*runs)
    except TimeoutError:
        waits = next(name for name, run in zip(names, runs, strict=True) if run.cancelled() or not run.done())
        raise BenchError(f"{waits} has not come to its end:\n{describe(waits)}") from None


def summary(what: str, passages: Sequence[Passage], *, quota: int, most: int, say: Say) -> Mapping[str, float]:
    late = [one.running - one.admitted for one in passages]
    early = overtaken([(one.made, one.admitted) for one in passages])
    took_s = max(one.running for one in passages) - passages[0].made
    say(
        f"{len(passages)} {what} came through a quota of {quota} pods, of which {most} were there at most; the last "
        f"ran {took_s:.0f} s after the first was made; one ran {statistics.median(late):.2f} s after its admission, at "
        f"most {max(late):.2f} s; {early} were admitted before one that had waited longer"
    )
    return {
        "queue_violations": float(early + max(0, most - quota)),
        "admitted_to_running_p50": statistics.median(late), "queued_jobs_per_s": len(passages) / took_s,
    }  # fmt: skip


def overtaken(times: Sequence[tuple[float, float]]) -> int:
    """How many jobs were admitted though one made more than LATE_S before them waited, and waited LATE_S longer. Each
    is (made, admitted), in the order in which they were made.

    >>> overtaken([(0.0, 1.0), (10.0, 30.0), (20.0, 22.0)])
    1
    """
    return sum(
        any(made - earlier > LATE_S and others - admitted > LATE_S for earlier, others in times[:number])
        for number, (made, admitted) in enumerate(times)
    )


async def _run(load: Load, admissions: Admissions, name: str) -> Passage:
    """Then it is completed."""
    admitted, running = admissions.first(name), load.first(name, is_running)
    made = time.monotonic()
    await load.api.create(_queued(load.field.job(name)))
    passage = Passage(made=made, admitted=await admitted, running=await running)
    await asyncio.sleep(HOLD_S)
    await asyncio.to_thread(load.field.stubs, f"/complete?job={name}", method="POST")
    return passage


def _queued(job: Manifest) -> Manifest:
    return {**job, "metadata": {**job["metadata"], "labels": {known.LABEL_QUEUE: QUEUE}}}


def _prepare(field: Field, *, quota: int) -> None:
    cluster = field.cluster
    extras.add_kueue(cluster, with_jobset=True)
    api = {"apiVersion": "kueue.x-k8s.io/v1beta2"}
    amounts = {"cpu": "100k", "memory": "1000Ti", "pods": str(quota)}
    flavor = {"name": QUEUE, "resources": [{"name": name, "nominalQuota": much} for name, much in amounts.items()]}
    group = {"coveredResources": list(amounts), "flavors": [flavor]}
    made: list[Manifest] = [
        api | {"kind": "ResourceFlavor", "metadata": {"name": QUEUE}, "spec": {}},
        api | {
            "kind": "ClusterQueue", "metadata": {"name": QUEUE},
            "spec": {"namespaceSelector": {}, "resourceGroups": [group], "queueingStrategy": STRATEGY},
        },
        api | {
            "kind": "LocalQueue", "metadata": {"name": QUEUE, "namespace": field.namespace},
            "spec": {"clusterQueue": QUEUE},
        },
    ]  # fmt: skip
    for manifest in made:
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(manifest))


async def _until_kueue_is_known(load: Load, run: Callable[[str], Awaitable[Passage]]) -> None:
    """The operator asks twice a minute whether a cluster has Kueue's kinds."""
    name = "first-queued"
    try:
        async with asyncio.timeout(LIMIT_S):
            await run(name)
    except TimeoutError:
        raise BenchError(f"no job is admitted within {LIMIT_S:g} s:\n{load.describe(name)}") from None
    await load.delete([name])
    for kind in ("RLJob", "Pod"):
        await load.until_count(kind, 0, timeout_s=LIMIT_S)


class Moments:
    """When something was first seen of each one that is waited for."""

    def __init__(self) -> None:
        self._first: dict[str, asyncio.Future[float]] = {}

    def of(self, name: str) -> asyncio.Future[float]:
        moment: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._first[name] = moment
        return moment

    def came(self, name: str) -> None:
        moment = self._first.get(name)
        if moment is not None and not moment.done():
            moment.set_result(time.monotonic())


class Admissions:
    """Moments at which Kueue admits the jobs of one kind, as a watch of its Workloads shows."""

    def __init__(self, kind: str) -> None:
        self.known: dict[str, Manifest] = {}
        self._kind = kind
        self._moments = Moments()
        self.first = self._moments.of

    def seen(self, workload: Manifest) -> None:
        if condition(workload, "Admitted").get("status") != "True":
            return
        for owner in workload["metadata"].get("ownerReferences", ()):
            if owner["kind"] == self._kind:
                self._moments.came(owner["name"])

    def gone(self, name: str) -> None:
        """Its job has ended, or is not known here."""


class LivePods:
    """`most`: pods of jobs that were there at once and had not ended."""

    def __init__(self) -> None:
        self.live: dict[str, Manifest] = {}
        self.most = 0

    def seen(self, pod: Manifest) -> None:
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            self.gone(pod["metadata"]["name"])
        else:
            self.live[pod["metadata"]["name"]] = pod
        self.most = max(self.most, len(self.live))

    def gone(self, name: str) -> None:
        self.live.pop(name, None)
