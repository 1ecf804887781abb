"""One large job beside many small ones, all made at once: how long its pods take, and what the others feel of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from tools.bench.harness import BenchError
from tools.bench.operator_parts import scale
from tools.bench.operator_parts.field import Field, Manifest, Say
from tools.bench.operator_parts.load import Load, is_running

LARGE: Final = "large"
S_PER_POD: Final = 0.1
START_S: Final = 60.0
"""How long it may take: START_S, and for each pod five times what the bars say."""


def has_all_its_pods(job: Manifest) -> bool:
    """Its first attempt is given out with the last of them; what follows is the kubelets'."""
    return bool((job.get("status") or {}).get("attempt"))


async def measure(field: Field, *, pods: int, small: int, say: Say) -> Mapping[str, float]:
    """`pods`: workers of the large one."""
    names = [f"small-{number}" for number in range(small)]
    limit_s = START_S + S_PER_POD * (pods + small * (field.pods + 1))
    async with Load.on(field) as load:
        made = load.first(LARGE, has_all_its_pods)
        running = {name: load.first(name, is_running) for name in names}
        began = time.monotonic()
        await load.api.create(field.job(LARGE, pods=pods))
        applied: dict[str, float] = {}
        for name in names:
            applied[name] = time.monotonic()
            await load.api.create(field.job(name))
        try:
            async with asyncio.timeout(limit_s):
                took_s = await made - began
                latencies = [await running[name] - applied[name] for name in names]
        except TimeoutError:
            # A future that was waited for is cancelled by the timeout.
            moments = {LARGE: made, **running}
            waits = next(name for name, moment in moments.items() if moment.cancelled() or not moment.done())
            raise BenchError(f"{waits} is not there after {limit_s:g} s:\n{load.describe(waits)}") from None
        say(f"{pods} pods of one job took {took_s:.1f} s; small ones ran after {scale.p99(latencies):.2f} s at most")
        await scale.end(load, [LARGE, *names], limit_s=limit_s)
        return {"large_job_created": took_s, "small_jobs_beside_p99": scale.p99(latencies)}
