"""A worker pod is told to end while its job steps, as by a drained node: it works on until another is in its place, and
no step is made twice.

Of pods that are killed: test_rljob_run_recovery.py. On a cluster: tests/cluster/test_operator_pods.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.local import LocalBackend
from tests.conformance.parts import job

STEPS = 60  # more than are made in the time that the pod has to leave: until `go` a step takes 0.4 s

pytestmark = pytest.mark.timeout(60)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    [path] = folder.rglob(f"{name}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(folder: Path) -> dict[str, str]:
    return {line["event"]: line["message"] for line in lines(folder, "events")}


async def step(world) -> int:
    found = await world.job("a")
    return int((found or {}).get("status", {}).get("step") or 0)


async def is_complete(world) -> bool:
    found = await world.job("a")
    conditions = (found or {}).get("status", {}).get("conditions", [])
    assert not any(c["type"] == "Failed" and c["status"] == "True" for c in conditions), conditions
    return any(c["type"] == "Complete" and c["status"] == "True" for c in conditions)


async def test_a_pod_that_is_deleted_hands_its_work_over_and_no_step_is_made_again(tmp_path):
    async with LocalBackend().world(tmp_path) as world:
        await world.apply(job(steps=STEPS, checkpoint={"everySteps": 1000}))
        await world.until(lambda: _reaches(world, 3), what="step 3")
        await world.delete_pod("a", "worker", pool="cpu")
        await world.until(lambda: "pod-lost" in events(tmp_path), what="the hand-over")
        world.touch("go")
        await world.until(lambda: is_complete(world), what="Complete")
        made = await world.job("a")
    assert made is not None
    committed = [(line["branch"], line["step"]) for line in lines(tmp_path, "lineage")]
    assert [number for _, number in committed] == list(range(1, STEPS + 1)), (
        "each step once, without a checkpoint in turn"
    )
    assert {branch for branch, _ in committed} == {0, 1}
    said = events(tmp_path)
    assert said["leaving"].startswith("pod a-cpu-0-a1 is to end: it works on until its successor is there, for 17 s")
    assert said["pod-lost"] == "pod a-cpu-0-a1 has handed its work over to a-cpu-0-a2"
    assert [entry.split(" ")[1:3] for entry in made["status"]["restarts"]] == [["a-cpu-0-a1", "Infrastructure"]]


async def _reaches(world, number: int) -> bool:
    return await step(world) >= number
