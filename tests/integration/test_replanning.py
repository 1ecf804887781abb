"""A job on this machine is profiled, probed and placed anew, and nobody asks it to."""

import pytest
import yaml

from tests.integration.test_synthetic import file_of
from tests.rljob_runs import Run
from tools import workloads


@pytest.mark.timeout(120)
def test_a_job_side_by_side_takes_turns_once_it_is_measured(tmp_path):
    job = workloads.job(workloads.entries()["drawn-14"], steps=26, time_scale=0.1)
    with Run(tmp_path, file=file_of(tmp_path, job), small=False) as run:
        assert run.end() == 0, run.said
        objects = run.work_dir / "objects"
        plans = {n: yaml.safe_load((objects / f"rlplan-default-drawn-14-p{n}.yaml").read_text()) for n in (1, 2, 3)}
        switched = [
            line for line in (run.work_dir / "events.jsonl").read_text().splitlines() if "plan-switched" in line
        ]
    assert [plans[n]["spec"]["reason"]["code"] for n in (1, 2, 3)] == ["Initial", "Probe", "Profiled"]
    assert not plans[1]["spec"]["leaseSets"]
    chosen = plans[3]["spec"]
    assert {turn["role"] for lease in chosen["leaseSets"] for turn in lease["turns"]} == {"env", "rollout", "train"}
    assert chosen["predicted"]["periodSeconds"] < 0.7 * plans[2]["spec"]["predicted"]["periodSeconds"]
    assert "instead of" in chosen["reason"]["message"]
    assert len(switched) >= 2, "both came into force"
