"""What the operator does and needs with all its jobs at once: their whole life, failures, a restart, in one run.

The order: create, run for a while with a report of each driver once a second, fall silent, fail pods one by one, kill
the operator and start it again, complete, delete. CPU of a job's life is that of create, run, complete and delete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Final

from tools.bench.harness import BenchError
from tools.bench.operator_parts.field import PARTS, Field, Manifest, Say
from tools.bench.operator_parts.load import Load, is_complete, is_healthy, is_replacing, is_running

RUN_S: Final = 30.0
QUIET_S: Final = 10.0
SAMPLE_S: Final = 1.0
START_S_PER_JOB: Final = 0.6
START_S: Final = 60.0
"""How long all jobs may take to run, or to end: six times what the bar says."""
FAILURE_S: Final = 30.0
RESTART_S: Final = 120.0


@dataclass(slots=True)
class Curve:
    """(seconds, worker pods created so far), once a second; the first look is before the first of them."""

    points: list[tuple[float, float]] = dataclass_field(default_factory=list)

    def rate(self) -> float:
        """Between the first and the last tenth: starting up and the last stragglers are not what is asked for."""
        before = self.points[0][1]  # the operator may have made pods for others
        total = self.points[-1][1] - before
        middle = [p for p in self.points if 0.05 * total <= p[1] - before <= 0.95 * total]
        if len(middle) < 2 or middle[0][1] == middle[-1][1]:  # so few pods that they came between two looks
            middle = self.points
        (t0, n0), (t1, n1) = middle[0], middle[-1]
        return (n1 - n0) / max(1e-9, t1 - t0)


async def whole_life(field: Field, *, jobs: int, failures: int, say: Say) -> Mapping[str, float]:
    names = [f"job-{number}" for number in range(jobs)]
    limit_s = START_S + START_S_PER_JOB * jobs
    found: dict[str, float] = {}
    async with Load.on(field) as load:
        used = _Used(field)
        curve = await _create(load, names, limit_s=limit_s)
        created = used.lap()
        share = field.pods / (field.pods + 1)  # of the pods that are workers; the others are drivers
        found["worker_pods_per_s"] = curve.rate() * share
        found |= {f"{part}_cores_creating": created[part] for part in ("operator", "kube-apiserver")}
        say(f"{jobs} jobs run after {created.wall_s:.0f} s: {created}")
        await _run(field, names)
        found["memory_all_jobs"] = field.resident_mib()
        ran = used.lap()
        found["operator_cores_running"] = ran["operator"]
        say(f"they ran: {ran}; the operator has {found['memory_all_jobs']:.0f} MiB")
        await asyncio.sleep(QUIET_S)
        say(f"they were quiet: {used.lap()}")
        latencies = [await _fail(load, names[-1 - k % jobs]) for k in range(failures)]
        found["failure_to_condition_p99"] = p99(latencies)
        say(f"failures to conditions: {' '.join(f'{s:.2f}' for s in sorted(latencies)[-8:])} s at most")
        used.lap()
        found["restart"] = await asyncio.to_thread(restart, field, jobs)
        say(f"restarted after {found['restart']:.1f} s; the operator has {field.resident_mib():.0f} MiB")
        used = _Used(field)
        await end(load, names, limit_s=limit_s)
        ended = used.lap()
        say(f"they completed and are gone: {ended}")
        cpu_s = sum(lap["operator"] * lap.wall_s for lap in (created, ran, ended))
        found["operator_cpu_per_pod"] = 1000 * cpu_s / (jobs * (field.pods + 1))
    return found


class _Lap(dict[str, float]):
    """Cores that each part used on average."""

    wall_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.wall_s:.0f} s, cores: " + ", ".join(f"{part} {cores:.2f}" for part, cores in self.items())


class _Used:
    def __init__(self, field: Field) -> None:
        self._field = field
        self._at, self._cpu = time.monotonic(), self._read()

    def lap(self) -> _Lap:
        now, cpu = time.monotonic(), self._read()
        lap = _Lap({part: (cpu[part] - self._cpu[part]) / (now - self._at) for part in cpu})
        lap.wall_s = now - self._at
        self._at, self._cpu = now, cpu
        return lap

    def _read(self) -> dict[str, float]:
        return {part: self._field.cpu_s(part) for part in ("operator", *PARTS)}


async def _create(load: Load, names: list[str], *, limit_s: float) -> Curve:
    curve, started = Curve(), time.monotonic()

    async def look() -> None:
        calls = await asyncio.to_thread(load.field.calls)
        curve.points.append((time.monotonic() - started, calls["create", "Pod"]))

    async def sample() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            await look()

    await look()
    sampler = asyncio.create_task(sample())
    try:
        await load.create(names)
        await load.until(names, is_running, what="all jobs to run", timeout_s=limit_s)
    finally:
        sampler.cancel()
        with suppress(asyncio.CancelledError):
            await sampler
    await look()
    return curve


async def _run(field: Field, names: list[str]) -> None:
    await asyncio.to_thread(field.stubs, "/pace?seconds=1", method="POST")
    await asyncio.sleep(RUN_S)
    state = await asyncio.to_thread(field.stubs, "/state")
    if state["watched"] != len(names):
        raise BenchError(f"the operator follows {state['watched']} of {len(names)} drivers")
    await asyncio.to_thread(field.stubs, "/pace?seconds=0", method="POST")


async def _fail(load: Load, job: str) -> float:
    """Seconds from the end of a worker pod's container to the job's condition that says so, as a watch sees it."""
    pod = await _a_worker(load, job)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ended = {"exitCode": 137, "reason": "OOMKilled", "message": "out of memory", "startedAt": now, "finishedAt": now}
    container = {
        "name": "agent", "image": "stub", "imageID": "", "ready": False, "restartCount": 0,
        "state": {"terminated": ended},
    }  # fmt: skip
    told, started = load.first(job, is_replacing), time.monotonic()
    await load.api.patch(
        "Pod", pod["metadata"]["name"], patch={"status": {"phase": "Failed", "containerStatuses": [container]}},
        namespace=load.field.namespace, subresource="status",
    )  # fmt: skip
    try:
        async with asyncio.timeout(FAILURE_S):
            took_s = await told - started
    except TimeoutError:
        raise BenchError(
            f"{job} does not say within {FAILURE_S:g} s that a pod failed:\n{load.describe(job)}"
        ) from None
    await load.until([job], is_healthy, what="the job to be whole again", timeout_s=FAILURE_S)
    return took_s


async def _a_worker(load: Load, job: str) -> Manifest:
    selector = f"rlinf.io/job={job},rlinf.io/component=worker"
    pages = load.api.pages("Pod", namespace=load.field.namespace, label_selector=selector)
    pods = [pod async for page in pages for pod in page.items]
    return next(pod for pod in pods if pod["status"]["phase"] == "Running")


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def restart(field: Field, jobs: int) -> float:
    """Killed, as a container that crashes and is started again in its pod: until the last job's driver is followed
    anew, which a pass over the job begins with."""
    operator = field.plane.operator
    operator.kill()
    killed_at, started = time.time(), time.monotonic()
    operator.start()
    while True:
        attached: dict[str, Any] = field.stubs("/state")["attached"]
        if sum(at > killed_at for at in attached.values()) >= jobs:
            return time.monotonic() - started
        if time.monotonic() - started > RESTART_S:
            raise BenchError(f"{len(attached)} of {jobs} drivers are followed {RESTART_S:g} s after the restart")
        time.sleep(0.2)


async def end(load: Load, names: list[str], *, limit_s: float) -> None:
    await asyncio.to_thread(load.field.stubs, "/complete", method="POST")
    await load.until(names, is_complete, what="all jobs to complete", timeout_s=limit_s)
    await load.until_count("Pod", len(names), timeout_s=limit_s)  # the drivers stay for readers
    await load.delete(names)
    for kind in ("RLJob", "RLPlan", "Pod"):
        await load.until_count(kind, 0, timeout_s=limit_s)
