"""Several units of a ticket, one of several, more tickets by what became of them, in a whole job whose workers and
driver die: it trains on what it would have trained on."""

import json

import pytest
import yaml

from tests.fakes.enough_job import KEPT, SAMPLES, kept_of, luck
from tests.rljob_runs import Run, own_job

STEPS = 30
JOB = own_job(
    "tests.fakes.enough_job:flow",
    {
        "sampler": {"kind": "tests.fakes.enough_job:Sampler", "workers": 2},
        "judge": {"kind": "tests.fakes.enough_job:Judge"},
        "learner": {"kind": "tests.fakes.enough_job:Learner"},
    },
    steps=STEPS,
    slots=4,
)


@pytest.mark.timeout(120)
def test_a_job_samples_until_it_has_enough_and_a_kill_of_each_changes_nothing(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(JOB))
    with Run(tmp_path, file=file, small=False) as run:
        run.until_step(4)
        run.kill("sampler/0")
        run.until_step(9)
        run.kill("judge/0")
        run.until_step(14)
        run.kill("learner/0")
        run.until_step(20, branch=1)
        run.kill("driver")
        assert run.end(timeout_s=100) == 0, run.said
        assert run.answer["condition"] == "Complete", run.said
        lines, metrics = run.lines("lineage"), run.lines("metrics")
        saved = sorted((run.work_dir / "checkpoints").glob("*/driver.json"), key=lambda path: path.stat().st_mtime)
        state = json.loads(saved[-1].read_text())
    last = {line["step"]: line for line in lines}
    assert sorted(last) == list(range(1, STEPS + 1))
    assert {line["units"] for line in lines} == {KEPT}
    wanted = kept_of(upto=STEPS)
    totals = [sum(luck(f"{prompt}/{n}") for prompt in step for n in range(SAMPLES)) for step in wanted]
    told = {line["step"]: line["total"] for line in metrics}
    assert told == {step: sum(totals[:step]) for step in range(1, STEPS + 1)}, "every sample of every step, once"
    assert state["flow"]["next"] > KEPT * STEPS, "others took the place of prompts that were dropped"
    assert state["step"] == STEPS
