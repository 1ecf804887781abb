"""Roles whose work stands still while their event loop lives: named, killed with their stacks, and started again."""

import copy
import json
import re

import pytest
import yaml

from tests.integration.test_third_trainer import JOB
from tests.rljob_runs import Run

STEPS = 8


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("kind", "at"),
    [("Forgetful", r"nothing that its runtime knows of for \d s"), ("DeadEngine", r"span compute for \d s")],
)
def test_a_role_whose_work_stands_still_is_killed_at_the_deadline_and_costs_a_life(tmp_path, kind, at):
    job = copy.deepcopy(JOB)
    job["spec"]["flow"]["steps"] = STEPS
    job["spec"]["roles"][0]["kind"] = f"tests.fakes.line_job:{kind}"
    settings = {"step_deadline_min_s": 6, "first_step_deadline_s": 6}
    environ = [{"name": "RLINF_SETTINGS", "value": json.dumps(settings)}]
    job["spec"]["pools"][0]["template"] = {"spec": {"containers": [{"name": "agent", "env": environ}]}}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    with Run(tmp_path, file=file, small=False) as run:
        assert run.end(timeout_s=80) == 0, run.said
        assert run.answer["condition"] == "Complete", run.said
        lines, events = run.lines("lineage"), run.lines("events")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    [hung] = [line for line in events if line["event"] == "hung"]
    assert hung["worker"] == "sampler/0"
    assert "most recent call first" in hung["stacks"]
    [exited] = [line["message"] for line in events if line["event"] == "worker-exited"]
    said = rf"no progress mark for (\d+\.\d) s in phase 'step' \({at}\), whose deadline is 6 s"
    assert re.search(said, exited), exited
