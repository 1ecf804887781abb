"""A plan changed on real processes while the driver or an agent is killed, in each phase; and a gang of another size.

Synthetic roles, whose processes start within a second. The phase is read from the driver's log, as a person would.
"""

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rlinf_api import names
from rlinf_worker.driver.pending import Phase
from rljob import plan as command
from tests.cluster import bars
from tests.rljob_runs import Run

ITEMS = 8
STEPS = min(100, round(bars.by_load(20.0)))
"""A plan waits for processes that start, which take longer on a busy machine; steps, which timers make, do not, and the
job must not be over before its plan is in force."""
ROLES: list[dict[str, Any]] = [
    {"name": "rollout", "workers": {"min": 1, "max": 3}, "time": {"perItemMs": 80}},
    {"name": "train", "workers": {"min": 1, "max": 2}, "time": {"perItemMs": 5}, "gang": True, "ranks": [1, 2]},
]
FLOW = {
    "workload": "changed",
    "items": ITEMS,
    "edges": [{"from": "rollout", "to": "train"}, {"from": "train", "to": "rollout", "weights": True}],
}

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.slow(
        "each case starts a job, and kills and starts again its driver or an agent in the middle of a change of plan"
    ),
]


def manifest(folder: Path) -> Path:
    roles = [
        {
            "name": role.pop("name"),
            "kind": "synthetic",
            "workers": role.pop("workers"),
            "config": {**role, "memory": {"resident": 10, "peak": 20, "offloaded": 1}, "loadMs": 5, "offloadMs": 5},
        }
        for role in (dict(role) for role in ROLES)
    ]
    slots = {"perPod": 2, "cpu": "10m", "memory": "1Gi"}
    pools = [
        {"name": "sim", "roles": ["rollout"], "pods": {"min": 1, "max": 2}, "slots": slots},
        {"name": "gpu", "roles": ["train"], "pods": 1, "slots": slots},
    ]
    spec = {
        "flow": {"name": "synthetic", "steps": STEPS, "config": FLOW},
        "roles": roles,
        "pools": pools,
        "checkpoint": {"everySteps": 2},
    }
    job = {"apiVersion": "rlinf.io/v1alpha1", "kind": "RLJob", "metadata": {"name": "changed"}, "spec": spec}
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


def plan(*, rollouts: str, pods: int, ranks: str = "gpu/0/0,gpu/0/1") -> dict[str, Any]:
    return {
        "pools": [{"name": "sim", "pods": pods}, {"name": "gpu", "pods": 1}],
        "workers": [
            {"role": "rollout", "count": rollouts.count("sim/"), "slots": rollouts},
            {"role": "train", "count": ranks.count("gpu/"), "slots": ranks},
        ],
        "channels": [{"name": "rollout-train", "microBatch": 1, "depth": 2}],
    }


@contextmanager
def changing(run: Run, folder: Path, value: dict[str, Any]) -> Iterator[Any]:
    """The future of `rljob plan set`, which waits until the plan is in force."""
    file = folder / "plan.yaml"
    file.write_text(yaml.safe_dump({"spec": value}))
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(command.put, run.work_dir, file, timeout_s=60.0)


def phases(run: Run) -> list[str]:
    """That a driver has gone through, of all drivers in turn."""
    found = []
    for path in sorted((run.work_dir / "logs").rglob("*.log"), key=lambda path: path.stat().st_mtime):
        for line in path.read_text(errors="replace").splitlines():
            if '"switch of plans"' in line:
                found.append(json.loads(line[line.index("{") :])["phase"])
    return found


def agent_of(run: Run, pool: str) -> psutil.Process:
    def found() -> psutil.Process | None:
        for process in run.known():
            try:
                environ = process.environ() if process.cmdline()[-1:] == ["agent"] else {}
                if environ.get(names.ENV_POOL) == pool and environ.get(names.ENV_ORDINAL) == "0":
                    return process
            except psutil.Error:
                continue
        return None

    process: psutil.Process = run.until(found, what=f"the agent of pool {pool}")
    return process


def steps_made(run: Run) -> list[int]:
    """Of the branch that survived, in order."""
    survived: list[dict[str, Any]] = []
    for line in run.lines("lineage"):
        while survived and survived[-1]["branch"] < line["branch"] and survived[-1]["step"] >= line["step"]:
            survived.pop()
        survived.append(line)
    assert {line["units"] for line in survived} == {ITEMS}
    return [line["step"] for line in survived]


def well(run: Run, *, plan: str) -> None:
    """Complete under one plan, each step once."""
    shown = command.show(run.work_dir, as_yaml=False).splitlines()
    assert [line.split()[1] for line in shown if line.startswith("*")] == [plan], shown
    assert run.end() == 0, run.said
    assert (run.answer["condition"], run.answer["plan"]) == ("Complete", plan)
    assert steps_made(run) == list(range(1, STEPS + 1))
    assert run.left() == []


OTHER = pytest.mark.long("a whole job for a phase and a victim that test_switch.py has with the others")


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        (Phase.PREPARING, "agent"),
        (Phase.TELLING, "driver"),
        pytest.param(Phase.PREPARING, "driver", marks=OTHER),
        pytest.param(Phase.WAITING, "driver", marks=OTHER),
        pytest.param(Phase.WAITING, "agent", marks=OTHER),
        pytest.param(Phase.TELLING, "agent", marks=OTHER),
    ],
)
def test_killed_in_any_phase_one_plan_is_in_force_afterwards_and_the_job_completes(tmp_path, phase, victim):
    with Run(tmp_path, file=manifest(tmp_path), small=False) as run:
        run.until_step(2)
        other = agent_of(run, "gpu")
        with changing(run, tmp_path, plan(rollouts="sim/0/0,sim/0/1,sim/1/0", pods=2)) as change:
            if phase is Phase.TELLING:  # lasts until this one answers, or is given up
                run.until(lambda: Phase.WAITING.value in phases(run) or change.done(), what="the end of a step")
                other.send_signal(signal.SIGSTOP)
            run.until(lambda: phase.value in phases(run) or change.done(), what=f"phase {phase.name}")
            assert not change.done() or change.result()[0], change.result()[1]
            if victim == "driver":
                run.kill("driver")
            else:
                agent_of(run, "sim").kill()
            if phase is Phase.TELLING:
                time.sleep(0.1)
                other.send_signal(signal.SIGCONT)
            is_in_force, says = change.result(timeout=70)
        assert is_in_force, f"{says}\n{run.said}"
        well(run, plan="changed-p2")


def test_a_gang_of_another_size_goes_on_from_the_checkpoint_of_the_step_before(tmp_path):
    with Run(tmp_path, file=manifest(tmp_path), small=False) as run:
        run.until_step(2)
        kept = run.until(lambda: run.part("rollout/0"), what="rollout/0").pid
        lives = {run.until(lambda: run.part("train/0"), what="train/0").pid}
        for ranks in ("gpu/0/1", "gpu/0/0,gpu/0/1"):
            with changing(run, tmp_path, plan(rollouts="sim/0/0,sim/0/1", pods=1, ranks=ranks)) as change:
                is_in_force, says = change.result(timeout=70)
            assert is_in_force, f"{says}\n{run.said}"
            run.until_step(len(run.lines("lineage")) + 1)
            assert (run.part("train/1") is not None) == ("," in ranks)
            lives.add(run.until(lambda: run.part("train/0"), what="the first rank").pid)
        assert len(lives) == 3, "every rank of a gang starts again"
        assert run.until(lambda: run.part("rollout/0"), what="rollout/0").pid == kept
        well(run, plan="changed-p3")
        assert [line["step"] for line in run.lines("lineage")] == list(range(1, STEPS + 1)), "none was made again"
        assert {line["branch"] for line in run.lines("lineage")} == {0, 1, 2}
