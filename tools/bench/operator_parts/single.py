"""One job at a time: CartPole in real pods, the writes of a ten-pod job, who leads when the leader is gone."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from rlinf_api import names
from tests.cluster import worker_image
from tests.cluster.control_plane import Process, cartpole
from tools.bench.harness import BenchError
from tools.bench.operator_parts.field import Field, Manifest
from tools.bench.operator_parts.load import Load, condition, is_complete, is_running
from tools.testcluster.waiting import until

REAL: Final = "bench-real"
"""The namespace whose pods run on the real node."""
JOB: Final = "cartpole"
RUN_S: Final = 3.0
WAIT_S: Final = 60.0
WRITES: Final = ("create", "update", "patch", "delete")
PLANS: Final = 1
"""The plans of a job: written by the scheduler, and counted here as the operator's writes."""
JOBS_AT_FAILOVER: Final = 3


class RealPods:
    """CartPole as in examples/, its images present. The namespace and the image are made at the first call."""

    def __init__(self) -> None:
        self._claim = ""

    def measure(self, field: Field) -> Mapping[str, float]:
        claim = self._prepare(field)
        plane, api = field.plane, field.cluster.api
        pods = f"/api/v1/namespaces/{REAL}/pods"
        manifest = cartpole(JOB, claim=claim, steps=100_000)

        def phases() -> list[str]:
            return [str(pod["status"].get("phase")) for pod in api.get(pods)["items"]]

        started = time.monotonic()
        plane.apply(REAL, manifest)
        until(lambda: phases() == ["Running"] * 2, what="both pods to be Running", timeout_s=WAIT_S, every_s=0.02)
        took_s = time.monotonic() - started
        # The operator has its connection to the driver, which has its plan; how soon the workers have loaded torch is
        # no matter of the operator.
        plane.until(REAL, JOB, _has_plan, what="the plan to be in force", timeout_s=WAIT_S)
        resident_mib = field.resident_mib()
        field.cluster.kubectl("-n", REAL, "delete", "rljob", JOB)
        api.request("DELETE", f"{pods}?gracePeriodSeconds=0")
        until(lambda: not phases(), what="the pods to be gone", timeout_s=WAIT_S, every_s=0.1)
        # The next job bears the same name, and the garbage collector learns of a new CRD within 30 s only.
        services = f"/api/v1/namespaces/{REAL}/services"
        until(lambda: not api.get(services)["items"], what="the Service to be gone", timeout_s=WAIT_S, every_s=0.1)
        return {"apply_to_running": took_s, "memory_one_job": resident_mib}

    def _prepare(self, field: Field) -> str:
        if not self._claim:
            label = {"pod-security.kubernetes.io/enforce": "restricted"}
            body = {"metadata": {"name": REAL, "labels": label}}
            field.cluster.api.request("POST", "/api/v1/namespaces", body=body)
            worker_image.load(field.cluster)
            self._claim = field.cluster.site_packages_volume(REAL, name="site-packages")
        return self._claim


def _has_plan(job: Manifest) -> bool:
    return condition(job, "PlanApplied").get("status") == "True"


async def writes(field: Field) -> float:
    """The writes of one job's whole life, counted at the operator: create, run a few seconds, complete, delete."""
    async with Load.on(field) as load:
        before = _writes(field)
        await load.create(["one"])
        await load.until(["one"], is_running, what="the job to run", timeout_s=WAIT_S)
        await asyncio.sleep(RUN_S)
        await asyncio.to_thread(field.stubs, "/complete", method="POST")
        await load.until(["one"], is_complete, what="the job to complete", timeout_s=WAIT_S)
        await load.until_count("Pod", 1, timeout_s=WAIT_S)
        await load.delete(["one"])
        for kind in ("RLJob", "Pod"):
            await load.until_count(kind, 0, timeout_s=WAIT_S)
        return _writes(field) - before + PLANS


def _writes(field: Field) -> float:
    return float(sum(count for (verb, _), count in field.calls().items() if verb in WRITES))


async def fail_over(field: Field, *, killed: bool) -> float:
    """Seconds from the leader's end, with jobs half made, to the first pass of the next one. Nothing may be done twice:
    one pod for each place, of the first attempt, one plan for each job, no event told twice."""
    leader, standby = field.plane.operator, await asyncio.to_thread(_standby, field)
    jobs = [f"over-{number}" for number in range(JOBS_AT_FAILOVER)]
    async with Load.on(field) as load:
        await load.create(jobs)
        await _until_pods(load, JOBS_AT_FAILOVER)
        started = time.monotonic()
        if killed:
            leader.kill()
        else:
            await asyncio.to_thread(leader.stop)
        await asyncio.to_thread(_until_it_works, field, standby)
        took_s = time.monotonic() - started
        field.plane.operators.remove(leader)
        await load.until(jobs, is_running, what="the jobs to run under the next leader", timeout_s=WAIT_S)
        await asyncio.to_thread(_check_nothing_twice, field, jobs)
        await load.delete(jobs)
        for kind in ("RLJob", "Pod"):
            await load.until_count(kind, 0, timeout_s=WAIT_S)
    return took_s


def _standby(field: Field) -> Process:
    standby = field.plane.add_operator().start()
    until(lambda: standby.get("/readyz")[0] == 200, what="the second operator", timeout_s=WAIT_S)
    return standby


async def _until_pods(load: Load, least: int) -> None:
    """The jobs are half made."""
    async with asyncio.timeout(WAIT_S):
        while await load.count("Pod") < least:  # noqa: ASYNC110  (the API server has no event for a count)
            await asyncio.sleep(0.02)


def _until_it_works(field: Field, operator: Process) -> None:
    until(lambda: field.passes(operator) > 0, what="a pass of the next leader", timeout_s=WAIT_S, every_s=0.05)


def _check_nothing_twice(field: Field, jobs: list[str]) -> None:
    api, root = field.cluster.api, f"namespaces/{field.namespace}"
    pods: list[Manifest] = api.get(f"/api/v1/{root}/pods")["items"]
    plans: list[Manifest] = api.get(f"/apis/rlinf.io/v1alpha1/{root}/rlplans")["items"]
    events: list[Manifest] = api.get(f"/api/v1/{root}/events")["items"]
    places = Counter(_place(pod) for pod in pods)
    wrong = [f"{place}: {count} pods" for place, count in places.items() if count > 1]
    wrong += [f"{p['metadata']['name']} is a later attempt" for p in pods if not p["metadata"]["name"].endswith("-a1")]
    if len(pods) != len(jobs) * (field.pods + 1) or len(plans) != len(jobs):
        wrong.append(f"{len(pods)} pods and {len(plans)} plans of {len(jobs)} jobs")
    told = Counter(
        (event["involvedObject"].get("uid"), event.get("reason"), event.get("message"))
        for event in events
        if event.get("source", {}).get("component") == names.MANAGER
    )
    wrong += [f"{reason} was told {count} times" for (_, reason, _), count in told.items() if count > 1]
    if wrong:
        raise BenchError(f"done twice after the fail-over: {'; '.join(wrong[:5])}")


def _place(pod: Manifest) -> tuple[Any, ...]:
    label = pod["metadata"]["labels"]
    return label[names.LABEL_JOB], label[names.LABEL_COMPONENT], label.get(names.LABEL_ORDINAL)
