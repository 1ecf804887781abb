"""`make chaos` at the size of seconds: one fault of each kind that is over quickly, over a job of a few steps."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.chaos import rounds, schedules, verdict
from tools.chaos.faults import Fault
from tools.chaos.job import lacking

STEPS = 60
"""0.1 s each at least until `go`, as each worker of environments makes 64 steps of PACE_S: 6 s on any machine, of which
faults and what follows take three."""


def small(go: Path) -> dict[str, Any]:
    kwargs = {"env": "tests.integration.chaos_envs:Paced-v0", "envKwargs": {"go": str(go)}}
    return {"numEnvs": 8, "slices": 2, "horizon": 16, "epochs": 1, "finalEpochs": 1} | kwargs


MUST = (
    Fault(kind="kill", target="env/0"),
    Fault(kind="slow", target="links", lasts_s=0.5, rate_kbit=4000),
    Fault(kind="full", target="disk", lasts_s=1.0),
    Fault(kind="plan", target="workers", lasts_s=0.3),
    Fault(kind="kill", target="driver"),
)


@pytest.mark.timeout(280)
@pytest.mark.slow("one job waits out a fault of each kind, and another runs without")
def test_a_job_under_faults_comes_to_what_it_comes_to_without(tmp_path):
    go = tmp_path / "go"
    go.touch()
    calm = rounds.undisturbed(tmp_path / "calm", seed=1, steps=STEPS, sets=small(go))
    assert verdict.problems(calm, calm=calm) == []
    said, lacks = list[str](), lacking()
    must = [fault for fault in MUST if fault.kind not in lacks]
    go.unlink()

    def in_turn() -> Iterator[Fault]:
        yield from must
        go.touch()  # the job has recovered from the last one

    found = rounds.disturbed(
        tmp_path / "chaos", seed=1, steps=STEPS, sets=small(go), chance=random.Random(1),
        until=time.monotonic() + 120, say=said.append, plan=in_turn(),
    )  # fmt: skip
    assert verdict.problems(found, calm=calm) == [], found.said
    assert verdict.changes([found]) == ""
    done = [entry.fault for entry in found.done]
    assert done == must, f"the job was through too early: {said}; not allowed here: {lacks}"
    assert all(entry.recovered_s is not None for entry in found.done)
    exits = [event["message"] for event in found.events if event["event"] == "worker-exited"]
    assert not [text for text in exits if "No space" in text], "a full disk costs checkpoints, no worker"
    recovered = [event for event in found.events if event["event"] == "recovered"]
    assert recovered[0]["who"] == "env/0"
    assert 0 < recovered[0]["seconds"] < 30
    assert recovered[0]["lost_s"].keys() <= {"env", "rollout", "actor"}


@pytest.mark.timeout(330)
@pytest.mark.long("a whole job and the ways back of two strikes; make chaos has hundreds")
def test_a_schedule_over_another_shape_is_struck_and_held():
    """A sampler is killed and another frozen; then an agent is told to end, and a critic frozen at once."""
    line = schedules.one(121)
    assert line["name"] == "critic"
    assert len(line["strikes"]) == 2
    assert line["ok"], line
