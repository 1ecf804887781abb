"""Finished jobs that nobody deletes: what their resync asks of the API server, and a restart of the operator beside
them, until a job that works is followed again.

One job is run to its end. The others are made while no operator runs, each with the first one's spec, status and what
else a pass looks for: for an operator that starts they are jobs of its past, without pods.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from rlinf_api import names as known
from rlinf_api import times
from rlinf_operator.handlers.known import FINISHED_PER_S, FINISHED_S
from tools.bench.harness import BenchError
from tools.bench.operator_parts import scale
from tools.bench.operator_parts.field import Field, Manifest, Say
from tools.bench.operator_parts.load import Load, each, is_complete, is_running

FIRST: Final = "finished"
WORKS: Final = "works"
RESYNC_S: Final = 30.0
"""Instead of 300 s: what is asked in a second may not hang on it, and a whole interval passes by."""
LOOK_S: Final = 2 * RESYNC_S
CHILDREN: Final = ("Service", "NetworkPolicy", "ConfigMap")
"""A finished job keeps them, and a pass asks the API server for one that its copies do not have."""
LIMIT_S: Final = 60.0
S_PER_JOB: Final = 0.1
"""How long all jobs may take to be made, to be looked at, to be deleted: LIMIT_S, and S_PER_JOB for each."""


async def measure(field: Field, *, jobs: int, say: Say) -> Mapping[str, float]:
    limit_s = LIMIT_S + S_PER_JOB * jobs
    names = [f"{FIRST}-{number}" for number in range(jobs)]
    async with Load.on(field) as load:
        await load.create([FIRST])
        await load.until([FIRST], is_running, what="the first job to run", timeout_s=LIMIT_S)
        await asyncio.to_thread(field.stubs, "/complete", method="POST")
        await load.until([FIRST], is_complete, what="it to complete", timeout_s=LIMIT_S)
        await load.create([WORKS])
        await load.until([WORKS], is_running, what="a job to run", timeout_s=LIMIT_S)
        field.plane.operator.kill()
        began = time.monotonic()
        await _finished(load, names)
        await load.until(names, is_complete, what="all jobs to be complete", timeout_s=limit_s)
        say(f"{jobs} finished jobs are there after {time.monotonic() - began:.0f} s")
        field.plane.change(resync_s=f"{RESYNC_S:g}")
        restart_s = await asyncio.to_thread(scale.restart, field, 1)
        seen_s = await _until_all_are_seen(field, jobs + 2, limit_s=limit_s)
        memory = field.resident_mib()
        say(f"the job that works was followed after {restart_s:.1f} s, all were looked at {seen_s:.0f} s later")
        await asyncio.to_thread(field.stubs, "/complete", method="POST")
        await load.until([WORKS], is_complete, what="the job that works to complete", timeout_s=LIMIT_S)
        await asyncio.sleep(RESYNC_S)
        gets = await _gets(field)
        said = ", ".join(f"{kind} {rate:.2f}" for kind, rate in sorted(gets.items()) if rate)
        say(f"GETs of the resync a second: {said}; the operator has {memory:.0f} MiB")
        await load.delete([FIRST, WORKS, *names])
        for kind in ("RLJob", "RLPlan", "Pod"):
            await load.until_count(kind, 0, timeout_s=limit_s)
    # A minute has one more or less by where it begins: two digits are all that there is.
    rate = round(sum(gets.values()), 1)
    return {"restart_beside_finished": restart_s, "finished_gets_per_s": rate, "memory_finished": memory}


async def _finished(load: Load, names: Sequence[str]) -> None:
    """What the first one has left, in its spec's and status's place, and of what each pass looks for its own copy."""
    api, namespace = load.api, load.field.namespace
    selector = f"{known.LABEL_JOB}={FIRST}"
    left = [
        found for kind in CHILDREN
        async for page in api.pages(kind, namespace=namespace, label_selector=selector) for found in page.items
    ]  # fmt: skip
    over = {"completionTime": times.text(times.utc_now() - timedelta(hours=1))}
    status: dict[str, Any] = {**load.jobs[FIRST]["status"], **over}

    async def one(name: str) -> None:
        made = await api.create(load.field.job(name))
        await api.patch("RLJob", name, patch={"status": status}, namespace=namespace, subresource="status")
        for child in left:
            await api.create(_of(child, job=name, uid=made["metadata"]["uid"]))

    await each(names, one)


def _of(child: Manifest, *, job: str, uid: str) -> Manifest:
    """As another job's."""
    meta, (owner,) = child["metadata"], child["metadata"]["ownerReferences"]
    labels = {**meta["labels"], known.LABEL_JOB: job, known.LABEL_JOB_UID: uid}
    made = {key: value for key, value in child.items() if key != "status"}
    made["metadata"] = {
        "name": meta["name"].replace(FIRST, job, 1), "namespace": meta["namespace"], "labels": labels,
        "annotations": meta.get("annotations") or {}, "ownerReferences": [{**owner, "name": job, "uid": uid}],
    }  # fmt: skip
    return made


async def _until_all_are_seen(field: Field, jobs: int, *, limit_s: float) -> float:
    """Seconds until each job had its first pass since the operator has started: beside them the resync passes over some
    again, so that there may be as many passes before."""
    began, least_s = time.monotonic(), FINISHED_S + jobs / FINISHED_PER_S
    while (passes := await asyncio.to_thread(field.passes)) < jobs or time.monotonic() - began < least_s:
        if time.monotonic() - began > limit_s:
            operator = field.plane.operator.tail()
            raise BenchError(f"{passes:.0f} passes over {jobs} jobs within {limit_s:g} s:\n{operator}")
        await asyncio.sleep(0.2)
    return time.monotonic() - began


async def _gets(field: Field) -> Mapping[str, float]:
    """A second, by kind; the Lease is leadership's."""

    async def asked() -> Mapping[str, int]:
        calls = await asyncio.to_thread(field.calls)
        return {kind: count for (verb, kind), count in calls.items() if verb == "get" and kind != "Lease"}

    before, began = await asked(), time.monotonic()
    await asyncio.sleep(LOOK_S)
    after, seconds = await asked(), time.monotonic() - began
    return {kind: (count - before.get(kind, 0)) / seconds for kind, count in after.items()}
