"""What the life of a job costs the API server in writes, the operator's and the scheduler's, counted at the server."""

import asyncio
import contextlib
import time

import pytest

from rlinf_api import names, times
from rlinf_api.report import DriverState
from rlinf_operator.clients.cache import CachedStore
from rlinf_operator.manifests.metadata import JobKey
from rlinf_operator.reconcile.loop import Reconciler, key_of
from rlinf_operator.settings import OperatorSettings
from rlinf_scheduler.service import Planning
from tests.builders import make_job
from tests.fakes.api_server import FakeApiServer
from tests.fakes.cluster import AUTHORITY
from tests.fakes.drivers import FakeDrivers

KEY = JobKey(namespace="team", name="math")
PODS = 10
BUDGET = 2 * PODS + 22
"""Each pod is made and deleted; 22 for the rest: plan, Service, NetworkPolicy, Secrets, ConfigMap, statuses, events."""
WRITES = ("POST", "PUT", "PATCH", "DELETE")
COALESCE_S = 0.01
TIMEOUT_S = 20.0


def ten_pods():
    return (
        make_job("ppo")
        .role("env", "gymnasium", workers=8)
        .role("rollout", "torch")
        .role("actor", "fsdp")
        .pool("sim", ["env"], pods=8, per_pod=1)
        .pool("train", ["rollout", "actor"], pods=1, per_pod=2)
    )


class Run:
    def __init__(self, server):
        self.server, self.api = server, server.client()
        self.store = CachedStore(self.api, metrics=server.metrics, on_change=self._changed, inactivity_s=30.0)
        self.reconciler = Reconciler(
            store=self.store, scheduler=Planning(self.api), drivers=self._drivers, authority=AUTHORITY,
            settings=OperatorSettings(coalesce_s=COALESCE_S, progress_interval_s=3600.0), clock=times.utc_now,
            follows=(),
        )  # fmt: skip

    def _drivers(self, on_change):
        self.drivers = FakeDrivers(on_change)
        return self.drivers

    def _changed(self, obj):
        if key := key_of(obj):
            self.reconciler.enqueue(key)

    def writes(self):
        return [(method, path) for method, path in self.server.requests if method in WRITES]

    def job(self):
        return self.server.objects["RLJob", "team", "math"]

    def condition(self, kind):
        listed = self.job().get("status", {}).get("conditions", [])
        return next((c["status"] for c in listed if c["type"] == kind), "")

    def pods(self):
        return [obj for (kind, _, _), obj in self.server.objects.items() if kind == "Pod"]

    def says(self, pod, phase, *, ready):
        main = pod["spec"]["containers"][0]["name"]
        state = {"running": {"startedAt": times.text(times.utc_now())}}
        status = {
            "phase": phase,
            "podIP": "10.0.0.9",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"name": main, "state": state}],
        }
        self.server.put({**pod, "status": status})

    async def until(self, holds, what):
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s: {what}; {self.writes()}"
            await asyncio.sleep(0.01)

    async def settled(self):
        """No write for some passes: what was going to be written is."""
        known = -1
        while known != (known := len(self.writes())):
            await asyncio.sleep(4 * COALESCE_S)


@contextlib.asynccontextmanager
async def running():
    async with FakeApiServer() as server, asyncio.TaskGroup() as group:
        run = Run(server)
        before = set(asyncio.all_tasks())
        run.store.start(group)
        await run.store.wait_listed(timeout_s=TIMEOUT_S)
        group.create_task(run.reconciler.run(), name="operator")
        server.put(ten_pods().build())
        run.reconciler.enqueue(KEY)
        try:
            yield run
        finally:
            for task in set(asyncio.all_tasks()) - before:
                if "watch of" in task.get_name() or task.get_name() == "operator":
                    task.cancel()


@pytest.mark.parametrize("pace", ["together", "one by one"])
async def test_the_life_of_a_ten_pod_job_stays_within_its_writes(pace):
    async with running() as run:
        await run.until(lambda: len(run.pods()) == PODS, "the pods")
        for pod in run.pods():
            run.says(pod, "Running", ready=False)
        await run.settled()
        for pod in sorted(run.pods(), key=lambda p: "driver" not in p["metadata"]["name"]):
            run.says(pod, "Running", ready=True)
            if pace == "one by one":
                await run.settled()
        await run.until(lambda: KEY in run.drivers.followed, "the driver to be followed")
        roles = [*(f"env/{n}" for n in range(8)), "rollout/0", "actor/0"]
        for number in range(len(roles) if pace == "one by one" else 0):
            run.drivers.say(KEY, state=DriverState.STARTING, plan_revision=1, missing=tuple(roles[number:]))
            await run.settled()
        run.drivers.say(KEY, state=DriverState.RUNNING, plan_revision=1)
        await run.until(lambda: run.condition("Running") == "True", "Running")
        await run.settled()
        run.drivers.say(KEY, state=DriverState.COMPLETE, plan_revision=1, step=100)
        await run.until(lambda: run.condition("Complete") == "True", "Complete")
        await run.settled()
        run.says(next(p for p in run.pods() if "driver" in p["metadata"]["name"]), "Succeeded", ready=False)
        await run.settled()
        left = [pod["metadata"]["labels"][names.LABEL_COMPONENT] for pod in run.pods()]
        assert left == [names.COMPONENT_DRIVER]
        assert len(run.writes()) <= BUDGET, "\n".join(" ".join(write) for write in run.writes())
