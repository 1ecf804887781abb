"""One large job beside many small ones, all made at once: how long its pods take, and what the others feel of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
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
    """`pods`: workers of the large one. The small ones are made once alone before: what they take of the machine
    themselves, no operator can give them."""
    limit_s = START_S + S_PER_POD * (pods + small * (field.pods + 1))
    alone, beside = ([f"{kind}-{number}" for number in range(small)] for kind in ("alone", "small"))
    async with Load.on(field) as load:
        latencies = await _made(load, alone, limit_s=limit_s)
        await scale.end(load, alone, limit_s=limit_s)
        alone_p99 = scale.p99(latencies)
        made = load.first(LARGE, has_all_its_pods)
        began = time.monotonic()
        await load.api.create(field.job(LARGE, pods=pods))
        latencies = await _made(load, beside, limit_s=limit_s)
        p99 = scale.p99(latencies)
        try:
            async with asyncio.timeout(limit_s):
                took_s = await made - began
        except TimeoutError:
            raise BenchError(f"{LARGE} has not all its pods after {limit_s:g} s:\n{load.describe(LARGE)}") from None
        say(f"{pods} pods of one job took {took_s:.1f} s; small ones ran after {p99:.2f} s, alone {alone_p99:.2f}")
        await scale.end(load, [LARGE, *beside], limit_s=limit_s)
        return {"large_job_created": took_s, "small_jobs_beside_p99": p99, "small_jobs_alone_p99": alone_p99}


async def _made(load: Load, names: Sequence[str], *, limit_s: float) -> list[float]:
    """Seconds from the creation of each until it is seen to run."""
    running = {name: load.first(name, is_running) for name in names}
    applied: dict[str, float] = {}
    for name in names:
        applied[name] = time.monotonic()
        await load.api.create(load.field.job(name))
    try:
        async with asyncio.timeout(limit_s):
            return [await running[name] - applied[name] for name in names]
    except TimeoutError:
        # A future that was waited for is cancelled by the timeout.
        waits = next(name for name, moment in running.items() if moment.cancelled() or not moment.done())
        raise BenchError(f"{waits} does not run after {limit_s:g} s:\n{load.describe(waits)}") from None
