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


@pytest.mark.timeout(120)
def test_simulators_that_make_a_policy_wait_get_its_slots(tmp_path):
    """Three slices on two simulators: one of them steps two, and a second policy answers nothing sooner. Simulators
    sleep, so that this machine's cores are not what decides."""
    config = {
        "env": "tests.fakes.sleeping_env:Sleeps-v0", "numEnvs": 3, "slices": 3, "horizon": 16, "epochs": 1,
        "minibatches": 1,
    }  # fmt: skip
    any_number = {"min": 1, "max": 3}
    job = {
        "apiVersion": "rlinf.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "sleepy"},
        "spec": {
            "seed": 1,
            "flow": {"name": "ppo", "steps": 2000, "config": config},
            "roles": [
                {"name": "env", "kind": "gymnasium", "workers": any_number},
                {"name": "rollout", "kind": "torch", "workers": any_number},
                {"name": "actor", "kind": "fsdp"},
            ],
            "pools": [
                {
                    "name": "cpu",
                    "roles": ["rollout", "env", "actor"],
                    "pods": 1,
                    "slots": {"perPod": 5, "cpu": "200m", "memory": "1Gi"},
                }
            ],
        },
    }
    with Run(tmp_path, file=file_of(tmp_path, job), small=False) as run:
        objects = run.work_dir / "objects"
        events = run.work_dir / "events.jsonl"
        run.until(lambda: events.exists() and '"plan-switched"' in events.read_text(), what="another plan")
        plans = [yaml.safe_load((objects / f"rlplan-default-sleepy-p{n}.yaml").read_text())["spec"] for n in (1, 2)]
        run.until_step(int(run.lines("lineage")[-1]["step"]) + 3)
    workers = [{entry["role"]: entry["count"] for entry in plan["workers"]} for plan in plans]
    assert workers == [{"env": 2, "rollout": 2, "actor": 1}, {"env": 3, "rollout": 1, "actor": 1}]
    assert plans[1]["reason"]["code"] in ("Profiled", "Drift"), "a busy machine may say first that steps take longer"
