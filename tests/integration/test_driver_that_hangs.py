"""A user's flow blocks its driver: process, connection and pings stand, and nothing is said any more."""

import asyncio
import contextlib
from functools import partial
from typing import Any

import pytest

from rlinf_operator.settings import OperatorSettings
from rljob.local import runner
from rljob.local.runner import NAMESPACE, LocalControlPlane

pytestmark = [
    pytest.mark.slow("waits for the deadline of a driver that says nothing, then for another driver"),
    pytest.mark.timeout(150),
]

ROLE = {"time": {"perItemMs": 1}, "memory": {"resident": 10, "peak": 10, "offloaded": 1}}
JOB: dict[str, Any] = {
    "apiVersion": "rlinf.io/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "hangs", "namespace": NAMESPACE},
    "spec": {
        "flow": {
            "name": "tests.fakes.hanging_flow:flow",
            "steps": 6,
            "config": {"items": 4, "edges": [{"from": "make", "to": "train"}]},
        },
        "roles": [
            {"name": "make", "kind": "synthetic", "config": ROLE},
            {"name": "train", "kind": "synthetic", "config": ROLE},
        ],
        "pools": [{"name": "cpu", "roles": ["make", "train"], "slots": {"perPod": 2, "cpu": "10m", "memory": "100Mi"}}],
    },
}


def conditions(job):
    return {c["type"]: (c["status"], c["reason"]) for c in (job.get("status") or {}).get("conditions", [])}


async def test_a_driver_whose_loop_hangs_in_a_flow_is_degraded_then_replaced_and_the_job_goes_on(tmp_path, monkeypatch):
    quick = partial(OperatorSettings, driver_late_s=1.0, driver_silent_deadline_s=3.0, driver_grace_s=1)
    monkeypatch.setattr(runner, "OperatorSettings", quick)
    told: list[tuple[str, str]] = []
    async with LocalControlPlane(tmp_path) as plane, asyncio.timeout(120):
        watch = plane.store.watch("RLJob", namespace=NAMESPACE)
        await plane.store.create(JOB)
        with contextlib.closing(watch):
            async for event in watch:
                found = conditions(event.object)
                if (degraded := found.get("Degraded", ("", ""))) not in told[-1:]:
                    told.append(degraded)
                if found.get("Complete", ("",))[0] == "True" or found.get("Failed", ("",))[0] == "True":
                    break
        plane.hurry()
    status = event.object["status"]
    assert found["Complete"][0] == "True", status
    assert (status["step"], status["attempt"]) == (6, 2)
    assert ("True", "DriverUnreachable") in told, told
    assert told[-1][0] == "False"
