"""A job on this machine is profiled, probed and placed anew, and nobody asks it to."""

import pytest
import yaml

from tests.integration.test_synthetic import file_of
from tests.rljob_runs import Run
from tools import workloads


@pytest.mark.timeout(150)
def test_a_job_side_by_side_takes_turns_once_it_is_measured(tmp_path):
    """So many steps that a change pays also on a machine on which a worker takes ten seconds to start."""
    job = workloads.job(workloads.entries()["drawn-14"], steps=400, time_scale=0.1)
    with Run(tmp_path, file=file_of(tmp_path, job), small=False) as run:
        events = run.work_dir / "events.jsonl"
        run.until(lambda: events.exists() and events.read_text().count('"plan-switched"') >= 2, what="two more plans")
        objects = run.work_dir / "objects"
        plans = {n: yaml.safe_load((objects / f"rlplan-default-drawn-14-p{n}.yaml").read_text()) for n in (1, 2, 3)}
    assert [plans[n]["spec"]["reason"]["code"] for n in (1, 2, 3)] == ["Initial", "Probe", "Profiled"]
    assert not plans[1]["spec"]["leaseSets"]
    chosen = plans[3]["spec"]
    assert {turn["role"] for lease in chosen["leaseSets"] for turn in lease["turns"]} == {"env", "rollout", "train"}
    assert chosen["predicted"]["periodSeconds"] < 0.7 * plans[2]["spec"]["predicted"]["periodSeconds"]
    assert "instead of" in chosen["reason"]["message"]
    job["metadata"]["name"] = "again"
    file, first = file_of(tmp_path, job), run.work_dir
    with Run(tmp_path, options=("--profile", str(first)), name="again", file=file, small=False) as run:
        path = run.work_dir / "objects" / "rlplan-default-again-p1.yaml"
        run.until(path.exists, what="its first plan")
        begun = yaml.safe_load(path.read_text())["spec"]
        run.until_step(2)
    assert begun["reason"]["code"] == "Initial"
    assert "of job drawn-14, uid" in begun["reason"]["message"]
    assert begun["leaseSets"], f"it begins where the other had come: {begun['reason']['message']}"
