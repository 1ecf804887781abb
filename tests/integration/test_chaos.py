"""`make chaos` at the size of seconds: one fault of each kind that is over quickly, over a job of a few steps."""

import random
import time

import pytest

from tools.chaos import rounds, verdict
from tools.chaos.faults import Fault
from tools.chaos.job import _unshared

STEPS = 250  # a second or two of an idle machine go by while faults are done and seen to be over
SMALL = {"numEnvs": 8, "slices": 2, "horizon": 16, "epochs": 1, "finalEpochs": 1}

pytestmark = [pytest.mark.timeout(280), pytest.mark.slow]


def plan():
    """What lets the job go on comes last: it is through sooner on a machine that is idle."""
    yield Fault(kind="kill", target="env/0")
    yield Fault(kind="pause", target="rollout/0", lasts_s=0.5)
    yield Fault(kind="kill", target="driver")
    yield Fault(kind="kill", target="actor/0")
    if "--net" in _unshared():
        yield Fault(kind="slow", target="links", lasts_s=0.5, rate_kbit=4000)
    if _unshared():
        yield Fault(kind="full", target="disk", lasts_s=1.5)


def test_a_job_under_faults_comes_to_what_it_comes_to_without(tmp_path):
    calm = rounds.undisturbed(tmp_path / "calm", seed=1, steps=STEPS, sets=SMALL)
    assert verdict.problems(calm, calm=calm) == []
    chance, said = random.Random(1), list[str]()
    wanted = list(plan())
    found = rounds.disturbed(
        tmp_path / "chaos", seed=1, steps=STEPS, sets=SMALL, chance=chance, until=time.monotonic() + 120,
        say=said.append, plan=wanted,
    )  # fmt: skip
    assert verdict.problems(found, calm=calm) == [], found.said
    done = [entry.fault for entry in found.done]
    assert done == wanted[: len(done)]
    assert len(done) >= 4, f"the job was through too early: {said}"
    assert all(entry.recovered_s is not None for entry in found.done[:4])
    exits = [event["message"] for event in found.events if event["event"] == "worker-exited"]
    assert not [text for text in exits if "No space" in text], "a full disk costs checkpoints, no worker"
    recovered = [event for event in found.events if event["event"] == "recovered"]
    assert recovered[0]["who"] == "env/0"
    assert 0 < recovered[0]["seconds"] < 30
    assert recovered[0]["lost_s"].keys() <= {"rollout", "actor"}
