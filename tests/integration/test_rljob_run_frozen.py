"""Rollouts that have their weights by way of each other, one of which freezes: the job goes on, nobody else is lost.

A stopped process keeps its sockets, and what it was about to pass on to others.
"""

import signal

import pytest

from tests import rljob_runs
from tests.integration.test_rljob_run_recovery import strike
from tests.rljob_runs import Run

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow("freezes two rollouts, each of which is given up after seconds, and waits for further steps")
def test_a_rollout_that_freezes_holds_up_neither_weights_nor_steps(tmp_path):
    slots = {"cpu": "500m", "memory": "1Gi"}
    file = rljob_runs.manifest(
        tmp_path / "job.yaml",
        roles=[
            {"name": "env", "kind": "gymnasium"},
            {"name": "actor", "kind": "fsdp"},
            {"name": "rollout", "kind": "torch", "workers": 4},
        ],
        pools=[
            {"name": "train", "roles": ["env", "actor"], "pods": 1, "slots": {"perPod": 2, **slots}},
            {"name": "gen", "roles": ["rollout"], "pods": 2, "slots": {"perPod": 2, **slots}},
        ],
    )
    sets = ("spec.flow.steps=1000", "spec.flow.config.slices=4")
    with Run(tmp_path, *sets, file=file) as run:
        run.until_step(4)
        for name in ("rollout/0", "rollout/3"):
            strike(run, name, signal.SIGSTOP)
        run.process.send_signal(signal.SIGINT)
        run.end()
        assert {line["branch"] for line in run.lines("lineage")} == {0}, "the actor lost nothing"
