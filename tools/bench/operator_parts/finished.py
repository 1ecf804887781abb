"""Finished jobs that nobody deletes: what their resync asks of the API server, and a restart of the operator beside
them, until a job that works is followed again.

One job is run to its end. The others are made while no operator runs, each with the first one's spec and status: for an
operator that starts they are jobs of its past.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tools.bench.harness import BenchError
from tools.bench.operator_parts import scale
from tools.bench.operator_parts.field import Field, Say
from tools.bench.operator_parts.load import Load, each, is_complete, is_running

FIRST: Final = "finished"
WORKS: Final = "works"
RESYNC_S: Final = 30.0
"""Instead of 300 s: what is asked in a second may not hang on it, and a whole interval passes by."""
LOOK_S: Final = 2 * RESYNC_S
QUIET_S: Final = 3.0  # without a pass of any job: all have been looked at since the restart
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
        await asyncio.sleep(RESYNC_S)
        gets = await _gets(field)
        say(f"the resync asks {gets:.2f} times a second; the operator has {memory:.0f} MiB")
        await asyncio.to_thread(field.stubs, "/complete", method="POST")
        await load.until([WORKS], is_complete, what="the job that works to complete", timeout_s=LIMIT_S)
        await load.delete([FIRST, WORKS, *names])
        for kind in ("RLJob", "RLPlan", "Pod"):
            await load.until_count(kind, 0, timeout_s=limit_s)
    return {"restart_beside_finished": restart_s, "finished_gets_per_s": gets, "memory_finished": memory}


async def _finished(load: Load, names: Sequence[str]) -> None:
    status: dict[str, Any] = load.jobs[FIRST]["status"]

    async def one(name: str) -> None:
        await load.api.create(load.field.job(name))
        await load.api.patch(
            "RLJob", name, patch={"status": status}, namespace=load.field.namespace, subresource="status"
        )

    await each(names, one)


async def _until_all_are_seen(field: Field, jobs: int, *, limit_s: float) -> float:
    """Seconds until each job had a pass since the operator has started, and none is under way."""
    began = time.monotonic()
    passes, changed_at = 0.0, began
    while passes < jobs or time.monotonic() - changed_at < QUIET_S:
        if time.monotonic() - began > limit_s:
            raise BenchError(
                f"{passes:.0f} passes over {jobs} jobs within {limit_s:g} s:\n{field.plane.operator.tail()}"
            )
        now = await asyncio.to_thread(field.passes)
        if now != passes:
            passes, changed_at = now, time.monotonic()
        await asyncio.sleep(0.2)
    return changed_at - began


async def _gets(field: Field) -> float:
    """A second, of any kind."""

    async def asked() -> float:
        calls = await asyncio.to_thread(field.calls)
        return float(sum(count for (verb, _), count in calls.items() if verb == "get"))

    before, began = await asked(), time.monotonic()
    await asyncio.sleep(LOOK_S)
    return (await asked() - before) / (time.monotonic() - began)
