"""Jobs through one quota of Kueue's: whether they come in the order in which they were made, whether there are ever
more pods than the quota, and how soon a job runs once it is admitted.

Kueue is started in the field's cluster for this and stays in it: of all parts this is the last. A job that runs is
completed HOLD_S later, so that jobs wait for each other from the first dozen on.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| one per job | - | it is admitted, it runs, HOLD_S | Load; the API server's answer |
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Mapping, Sequence
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
LIMIT_S: Final = 120.0
S_PER_JOB: Final = 5.0
"""How long all jobs may take: LIMIT_S, and S_PER_JOB for each."""


async def measure(field: Field, *, jobs: int, say: Say) -> Mapping[str, float]:
    pods_of_all = AT_ONCE * (field.pods + 1)
    await asyncio.to_thread(_prepare, field, quota=pods_of_all)
    names = [f"queued-{number}" for number in range(jobs)]
    pods = _Pods()
    async with Load.on(field) as load, load.following("Pod", known=pods.live, seen=pods.seen, gone=pods.gone):
        await _until_kueue_is_known(load)
        runs = []
        for name in names:
            runs.append(asyncio.create_task(_run(load, name)))
            await asyncio.sleep(EVERY_S)
        try:
            async with asyncio.timeout(LIMIT_S + S_PER_JOB * jobs):
                times = await asyncio.gather(*runs)
        except TimeoutError:
            waits = next(name for name, run in zip(names, runs, strict=True) if run.cancelled() or not run.done())
            raise BenchError(f"{waits} has not come to its end:\n{load.describe(waits)}") from None
        most = pods.most
        await load.delete(names)
        for kind in ("RLJob", "RLPlan", "Pod"):
            await load.until_count(kind, 0, timeout_s=LIMIT_S + S_PER_JOB * jobs)
    late = [running - admitted for _, admitted, running in times]
    broken = overtaken([(made, admitted) for made, admitted, _ in times]) + max(0, most - pods_of_all)
    say(
        f"{jobs} jobs came through a quota of {pods_of_all} pods, of which {most} were there at most; the last ran "
        f"{times[-1][2] - times[0][0]:.0f} s after the first was made; a job ran {statistics.median(late):.2f} s after "
        f"its admission, at most {max(late):.2f} s; {broken} times the order or the quota was not kept"
    )
    return {
        "queue_violations": float(broken), "admitted_to_running_p50": statistics.median(late),
        "queued_jobs_per_s": jobs / (max(running for _, _, running in times) - times[0][0]),
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


async def _run(load: Load, name: str) -> tuple[float, float, float]:
    """When it was made, admitted, and seen to run. Then it is completed."""
    admitted, running = load.first(name, _is_admitted), load.first(name, is_running)
    made = time.monotonic()
    await load.api.create(_queued(load.field.job(name)))
    moments = made, await admitted, await running
    await asyncio.sleep(HOLD_S)
    await asyncio.to_thread(load.field.stubs, f"/complete?job={name}", method="POST")
    return moments


def _is_admitted(job: Manifest) -> bool:
    return condition(job, "Admitted").get("status") == "True"


def _queued(job: Manifest) -> Manifest:
    return {**job, "metadata": {**job["metadata"], "labels": {known.LABEL_QUEUE: QUEUE}}}


def _prepare(field: Field, *, quota: int) -> None:
    cluster = field.cluster
    extras.add_kueue(cluster)
    api = {"apiVersion": "kueue.x-k8s.io/v1beta2"}
    amounts = {"cpu": "100k", "memory": "1000Ti", "pods": str(quota)}
    flavor = {"name": QUEUE, "resources": [{"name": name, "nominalQuota": much} for name, much in amounts.items()]}
    group = {"coveredResources": list(amounts), "flavors": [flavor]}
    made: list[Manifest] = [
        api | {"kind": "ResourceFlavor", "metadata": {"name": QUEUE}, "spec": {}},
        api | {
            "kind": "ClusterQueue", "metadata": {"name": QUEUE},
            "spec": {"namespaceSelector": {}, "resourceGroups": [group]},
        },
        api | {
            "kind": "LocalQueue", "metadata": {"name": QUEUE, "namespace": field.namespace},
            "spec": {"clusterQueue": QUEUE},
        },
    ]  # fmt: skip
    for manifest in made:
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(manifest))


async def _until_kueue_is_known(load: Load) -> None:
    """The operator asks twice a minute whether a cluster has Kueue's kinds."""
    name = "first-queued"
    try:
        async with asyncio.timeout(LIMIT_S):
            await _run(load, name)
    except TimeoutError:
        raise BenchError(f"no job is admitted within {LIMIT_S:g} s:\n{load.describe(name)}") from None
    await load.delete([name])
    for kind in ("RLJob", "Pod"):
        await load.until_count(kind, 0, timeout_s=LIMIT_S)


class _Pods:
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
