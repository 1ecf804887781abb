"""JobSets through the quota of queued.py, at its pace: what its rows are compared with.

A JobSet has the pods of a job here, a driver and workers in two replicated jobs, and asks for as much. It runs when a
watch shows that all of its pods do, and HOLD_S later its driver's pod succeeds, which by its success policy completes
it.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| one per JobSet | - | it is admitted, its pods run, HOLD_S | Admissions, JobSetPods; the API server's answer |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

from rlinf_api import names as known
from tools.bench.operator_parts.field import SELECTED, TOLERATED, Field, Manifest, Say
from tools.bench.operator_parts.load import Load, each
from tools.bench.operator_parts.queued import (
    HOLD_S,
    LIMIT_S,
    QUEUE,
    S_PER_JOB,
    Admissions,
    BenchQueue,
    LivePods,
    Moments,
    Passage,
    one_after_the_other,
    summary,
)
from tools.testcluster import jobset

LABEL_NAME: Final = "jobset.sigs.k8s.io/jobset-name"
LABEL_PART: Final = "jobset.sigs.k8s.io/replicatedjob-name"
DRIVER: Final = "driver"
MERGE_PATCH: Final = "application/merge-patch+json"


async def measure(field: Field, *, queue: BenchQueue, jobs: int, say: Say) -> Mapping[str, float]:
    quota = await asyncio.to_thread(queue.pods, field)
    names = [f"set-{number}" for number in range(jobs)]
    pods, admissions = JobSetPods(each=field.pods + 1), Admissions("JobSet")
    async with (
        Load.on(field) as load,
        load.following("Pod", known=pods.live, seen=pods.seen, gone=pods.gone),
        load.following("Workload", known=admissions.known, seen=admissions.seen, gone=admissions.gone),
    ):

        async def run(name: str) -> Passage:
            return await _run(field, name, pods=pods, admissions=admissions)

        def describe(name: str) -> str:
            return f"{pods.described(name)}\n{field.cluster.hub.log_tail('jobset')}"

        # Kueue and JobSet have their connections and caches then, as they have for jobs.
        await one_after_the_other(["first-set"], run, describe=describe)
        passages = await one_after_the_other(names, run, describe=describe)
        most = pods.most

        async def delete(name: str) -> None:
            await asyncio.to_thread(field.cluster.api.delete, f"{_path(field)}/{name}")

        await each(["first-set", *names], delete)
        await load.until_count("Pod", 0, timeout_s=LIMIT_S + S_PER_JOB * jobs)
    return summary("JobSets", passages, quota=quota, most=most, say=say)


class JobSetPods(LivePods):
    """And the moments at which all pods of one are Running, `each` as many."""

    def __init__(self, *, each: int) -> None:
        super().__init__()
        self._each = each
        self._running: dict[str, dict[str, str]] = {}
        self._moments = Moments()
        self.all_run = self._moments.of

    def driver(self, name: str) -> str:
        """The name of its pod."""
        return next(pod for pod, part in self._running[name].items() if part == DRIVER)

    def described(self, name: str) -> str:
        return f"{len(self._running.get(name, ()))} of the {self._each} pods of {name} have run"

    def seen(self, pod: Manifest) -> None:
        super().seen(pod)
        labels = pod["metadata"].get("labels") or {}
        if LABEL_NAME not in labels or (pod.get("status") or {}).get("phase") != "Running":
            return
        ran = self._running.setdefault(labels[LABEL_NAME], {})
        ran[pod["metadata"]["name"]] = labels[LABEL_PART]
        if len(ran) == self._each:
            self._moments.came(labels[LABEL_NAME])


async def _run(field: Field, name: str, *, pods: JobSetPods, admissions: Admissions) -> Passage:
    """Then it is completed."""
    api = field.cluster.api
    admitted, running = admissions.first(name), pods.all_run(name)
    made = time.monotonic()
    body = manifest(name, namespace=field.namespace, workers=field.pods)
    await asyncio.to_thread(api.request, "POST", _path(field), body=body)
    passage = Passage(made=made, admitted=await admitted, running=await running)
    await asyncio.sleep(HOLD_S)
    path = f"/api/v1/namespaces/{field.namespace}/pods/{pods.driver(name)}/status"
    await asyncio.to_thread(api.request, "PATCH", path, body={"status": {"phase": "Succeeded"}}, kind=MERGE_PATCH)
    return passage


def manifest(name: str, *, namespace: str, workers: int) -> Manifest:
    return {
        "apiVersion": jobset.API_VERSION,
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": namespace, "labels": {known.LABEL_QUEUE: QUEUE}},
        "spec": {
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [DRIVER]},
            "replicatedJobs": [_part(DRIVER, pods=1), _part("workers", pods=workers)],
        },
    }


def _part(name: str, *, pods: int) -> dict[str, Any]:
    requests = {"cpu": "100m", "memory": "256Mi"}  # those of a worker of Field.job()
    pod = {
        "restartPolicy": "Never",
        "nodeSelector": SELECTED,
        "tolerations": [TOLERATED],
        "containers": [{"name": name, "image": "localhost/box:1", "resources": {"requests": requests}}],
    }
    return {"name": name, "template": {"spec": {"parallelism": pods, "completions": pods, "template": {"spec": pod}}}}


def _path(field: Field) -> str:
    return f"/apis/{jobset.API_VERSION}/namespaces/{field.namespace}/jobsets"
