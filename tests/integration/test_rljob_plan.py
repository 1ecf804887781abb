"""A plan changed by hand on a running job, on this machine: `rljob plan` beside `rljob run`, with real processes."""

import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlinf_api.errors import UserError
from rljob import plan as command
from rljob.local.control import reached
from tests import rljob_runs
from tests.cluster import bars
from tests.rljob_runs import Run, rljob

STEPS, SLICES = 200, 6
POOLS = [
    {"name": "sim", "roles": ["env"], "pods": {"min": 1, "max": 2}, "slots": {"perPod": 3, "cpu": "100m"}},
    {"name": "train", "roles": ["rollout", "actor"], "pods": 1, "slots": {"perPod": 3, "cpu": "100m"}},
]  # fmt: skip
ROLES = [
    {"name": "env", "kind": "gymnasium", "workers": {"min": 1, "max": 4}},
    {"name": "rollout", "kind": "torch"},
    {"name": "actor", "kind": "fsdp"},
]

pytestmark = pytest.mark.timeout(280)


def plan(*, envs: str = "sim/0/[0-1]", pods: int = 1, stages: int = 3, **channel: Any) -> dict[str, Any]:
    count = 2 if envs == "sim/0/[0-1]" else 3
    sizes = {"name": "trajectories", "microBatch": 1, "depth": 2} | channel
    return {
        "pools": [{"name": "sim", "pods": pods}, {"name": "train", "pods": 1}],
        "workers": [
            {"role": "env", "count": count, "slots": envs},
            {"role": "rollout", "count": 1, "slots": "train/0/0"},
            {"role": "actor", "count": 1, "slots": "train/0/1"},
        ],
        "channels": [sizes, {"name": "segments", "microBatch": sizes["microBatch"], "depth": 3}],
        "cycles": [{"roles": ["env", "rollout"], "stages": stages}],
    }


def in_two_entries(value: dict[str, Any], first: str, second: str) -> dict[str, Any]:
    """As a person adds workers in another pod: a line more."""
    envs, *others = value["workers"]
    lines = [envs | {"count": 2, "slots": first}, envs | {"count": envs["count"] - 2, "slots": second}]
    return value | {"workers": [*lines, *others]}


CHANGES: dict[str, dict[str, Any]] = {
    "two workers": plan(),
    "micro-batch and depth": plan(microBatch=2, depth=3),
    "stages": plan(stages=1),
    "a third worker": plan(envs="sim/0/[0-2]"),
    "two again": plan(microBatch=3),
    "a second pod": in_two_entries(plan(envs="sim/0/[0-1],sim/1/0", pods=2), "sim/0/[0-1]", "sim/1/0"),
    "one pod again": plan(),
}


def manifest(folder: Path) -> Path:
    file = rljob_runs.manifest(folder / "job.yaml", roles=ROLES, pools=POOLS, placement={"profileSteps": 0})
    job = yaml.safe_load(file.read_text())
    job["spec"]["flow"]["config"] |= {"slices": SLICES, "numEnvs": 2 * SLICES}
    file.write_text(yaml.safe_dump(job))
    return file


SETS = (f"spec.flow.steps={STEPS}", "spec.flow.config.numEnvs=12", "spec.checkpoint.everySteps=1000")


def pauses_of(run: Run) -> list[float]:
    return [line["pause_s"] for line in run.lines("events") if line["event"] == "plan-switched"]


def pids_of(run: Run) -> dict[str, int]:
    return {name: part.pid for name in ("actor/0", "rollout/0", "env/0") if (part := run.part(name))}


def put(run: Run, folder: Path, change: str) -> str:
    file = folder / "plan.yaml"
    file.write_text(yaml.safe_dump({"spec": CHANGES[change]}))
    is_in_force, says = command.put(run.work_dir, file, timeout_s=60.0)
    assert is_in_force, f"{change}: {says}\n{run.said}"
    return says


@pytest.mark.slow("a job goes through five changes of its plan; another goes through two in make test")
def test_a_job_whose_plan_changes_again_and_again_trains_on_every_unit_once(tmp_path):
    with Run(tmp_path, *SETS, file=manifest(tmp_path)) as run:
        run.until_step(2)
        pids = pids_of(run)
        for number, change in enumerate(CHANGES):
            run.until_step(2 + 10 * number)
            put(run, tmp_path, change)
            if change == "a third worker":
                third = run.until(lambda: run.part("env/2"), what="the third worker").pid
            if change == "two again":
                run.until(lambda: run.part("env/2") is None, what="the end of the third worker")
            if change == "a second pod":
                assert run.until(lambda: run.part("env/2"), what="its worker").pid != third
        shown = command.show(run.work_dir, as_yaml=False).splitlines()
        assert shown[-1].startswith("* cartpole-p8  User  Prepared Applied")
        assert "Superseded" in shown[0]
        assert pids_of(run) == pids, "who stays keeps its process"
        assert run.end(timeout_s=200) == 0, run.said
        assert run.answer["condition"] == "Complete"
        assert run.answer["plan"] == "cartpole-p8"
        trained = [(line["step"], line["units"], line["digest"]) for line in run.lines("lineage")]
        wanted = [rljob_runs.undisturbed(step, slices=SLICES) for step in range(1, STEPS + 1)]
        assert trained == wanted, "each step once, each unit once"
        pauses = pauses_of(run)
        assert len(pauses) == len(CHANGES)
        assert all(0 < pause < bars.by_load(4.5) for pause in pauses), "a worker that does not answer costs 5 s"
        assert not (run.work_dir / "control.sock").exists()
        assert run.left() == []


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A job at work under its first plan, of which two tests ask something; either leaves it so."""
    folder = tmp_path_factory.mktemp("running")
    with Run(folder, *SETS, "spec.flow.steps=100000", file=manifest(folder)) as run:
        run.until_step(1)
        yield run


def test_what_cannot_be_set_is_a_sentence_and_the_job_goes_on(running, tmp_path):
    run = running
    mode = (run.work_dir / "control.sock").stat().st_mode
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
    file = tmp_path / "plan.yaml"
    for value, says in (
        ({**plan(), "pools": [{"name": "sim", "pods": 9}, {"name": "train", "pods": 1}]}, "allows 2"),
        ({**plan(), "channels": [{"name": "trajectorys"}]}, "the flow has no channel trajectorys"),
        ({**plan(), "channels": 2 * [{"name": "segments"}]}, "channels: got 'segments' twice"),
        ({**plan(), "job": {"name": "cartpole", "uid": "another"}}, "the plan is of another job"),
        ({**plan(), "chanels": []}, "spec.chanels: is not a field; did you mean 'channels'?"),
    ):
        file.write_text(yaml.safe_dump(value))
        done = rljob("plan", "set", str(run.work_dir), str(file)) if "uid" in str(value) else None
        if done is not None:
            assert (done.returncode, says in done.stderr) == (2, True), done.stderr
            continue
        try:
            is_in_force, said = command.put(run.work_dir, file, timeout_s=30)
        except UserError as error:
            is_in_force, said = False, str(error)
        assert not is_in_force
        assert says in said
    is_in_force, said = command.pin(run.work_dir, "cartpole-p99", timeout_s=30)
    assert not is_in_force
    assert said.startswith("this job has no plan 'cartpole-p99': wanted one of cartpole-p1")
    assert command.show(run.work_dir, as_yaml=False).splitlines()[0].startswith("* cartpole-p1")
    with reached(run.work_dir) as path, socket.socket(socket.AF_UNIX) as mute:  # says nothing, keeps nobody out
        mute.connect(path)
        assert "channels" in command.show(run.work_dir, as_yaml=True)
    run.until_step(len(run.lines("lineage")) + 2)


def test_an_older_plan_pinned_again_is_worked_under_at_once(running, tmp_path):
    run = running
    put(run, tmp_path, "a third worker")
    is_in_force, says = command.pin(run.work_dir, "cartpole-p1", timeout_s=60)
    assert is_in_force, says
    run.until_step(len(run.lines("lineage")) + 5)
    pauses = run.until(lambda: len(pauses_of(run)) == 2 and pauses_of(run), what="the pauses of both switches")
    assert all(0 < pause < bars.by_load(4.5) for pause in pauses), "a worker that does not answer costs 5 s"


def test_nobody_to_ask_is_a_sentence(tmp_path):
    done = rljob("plan", "show", str(tmp_path))
    assert done.returncode == 2
    assert f"no rljob runs in {tmp_path}" in done.stderr


def test_a_pinned_manifest_is_refused_where_there_is_no_plan_yet(tmp_path):
    file = rljob_runs.manifest(tmp_path / "job.yaml", placement={"mode": "Pinned", "pin": "cartpole-p2"})
    done = rljob("run", str(file), "--work-dir", str(tmp_path / "work"))
    assert done.returncode == 2
    assert "wanted Auto, or --plan; give the plan with --plan FILE" in done.stderr
