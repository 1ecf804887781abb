"""An engine on two slots and a gang of four ranks over two pods take turns, and a rank is stopped every 20 switches.

`make test-turns` makes 200 switches; here are enough of them to see one rank stopped.
"""

import copy
import json
import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.rljob_runs import Run

EVERY = 20
"""Switches between two stops: a step is a turn of the engine and one of the gang."""

pytestmark = pytest.mark.timeout(400)

JOB: dict[str, Any] = {
    "apiVersion": "rlinf.io/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "turns"},
    "spec": {
        "flow": {"name": "tests.fakes.turn_roles:flow", "steps": 1, "config": {}},
        "roles": [
            {"name": "engine", "kind": "tests.fakes.turn_roles:Engine", "slotsPerWorker": 2},
            {"name": "trainer", "kind": "tests.fakes.turn_roles:Rank", "workers": 4},
        ],
        "pools": [
            {"name": "two", "roles": ["engine", "trainer"], "pods": 2, "slots": {"perPod": 2, "cpu": "100m"}},
        ],
        "placement": {"mode": "Collocated"},
        "checkpoint": {"everySteps": 1},
        "failurePolicy": {"maxRestarts": 100},
    },
}


SOON = {"idle_deadline_s": 3.0, "step_deadline_min_s": 3.0, "turn_release_s": 3.0}
"""For runs in which a rank is stopped: the defaults notice it after 20 s to 120 s. Where none is, a pause of the
machine would count as one."""


def over_pods(tmp_path, *, steps: int, settings: Mapping[str, float] | None = None) -> Run:
    locks = tmp_path / "locks"
    locks.mkdir()
    job = copy.deepcopy(JOB)
    for role in job["spec"]["roles"]:
        role["config"] = {"locks": str(locks)}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    sets = (f"spec.flow.steps={steps}",)
    return Run(tmp_path, *sets, file=file, settings=settings, small=False)


def switch(tmp_path, *, switches: int) -> None:
    steps = switches // 2
    with over_pods(tmp_path, steps=steps, settings=SOON) as run:
        for number in range(1, switches // EVERY):
            run.until_step(number * EVERY // 2)
            run.kill(f"trainer/{number % 4}", signal.SIGSTOP)
        assert run.end(timeout_s=240) == 0, run.said
        assert run.answer["condition"] == "Complete", run.said
        lines = run.lines("lineage")
        assert sorted({line["step"] for line in lines}) == list(range(1, steps + 1))
        assert all(line["units"] == 8 for line in lines)
        texts = [path.read_text() for path in (run.work_dir / "spans").iterdir()]
        spans = [json.loads(line) for text in texts for line in text.splitlines()]
        loads = [span for span in spans if span.get("kind") == "load"]
        assert len([s for s in loads if s["role"] == "engine"]) >= steps - 1 - switches // EVERY
        assert len([s for s in loads if s["worker"] == "trainer/0"]) >= steps // 2
        assert "held by two roles" not in run.said + str(run.lines("events"))


def test_turns_go_on_over_two_pods_though_a_rank_is_stopped(tmp_path):
    switch(tmp_path, switches=2 * EVERY)


@pytest.mark.skipif("TURNS_LONG" not in os.environ, reason="takes minutes; make test-turns asks for it")
def test_two_hundred_switches_with_a_rank_stopped_every_twenty(tmp_path):
    switch(tmp_path, switches=200)
