"""Rollouts that have their weights by way of each other, one of which freezes: the job goes on, nobody else is lost.

A stopped process keeps its sockets, and what it was about to pass on to others.
"""

import signal
import time

import pytest
import yaml

from tests import rljob_runs
from tests.fakes.pod import alive
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


@pytest.mark.long("a pod has to have run for a minute before it is replaced for its agent's silence")
def test_an_agent_that_stays_frozen_costs_its_pod_and_the_job_goes_on(tmp_path):
    """What it kept frozen ends within its grace; the same place has a second attempt."""
    sets = ("spec.flow.steps=100000", "spec.checkpoint.everySteps=5")
    with Run(tmp_path, *sets, settings={"agent_replaced_after_s": 2}) as run:
        run.until_step(4)
        time.sleep(60.0)
        agent = run.part("agent")
        assert agent is not None
        run.kill("agent", signal.SIGSTOP)
        run.until_said("cartpole-cpu-0-a2 is starting")
        before = max(line["step"] for line in run.lines("lineage"))
        run.until_step(before + 1, branch=1)
        run.until(lambda: not alive([agent]), what="the end of the frozen agent")
        events = [yaml.safe_load(path.read_text()) for path in (run.work_dir / "objects").glob("event-*.yaml")]
        [said] = [event["message"] for event in events if event["reason"] == "AgentSilent"]
        assert said.startswith("pod cartpole-cpu-0-a1 on node local (AgentSilent): its driver hears nothing"), said
        run.process.send_signal(signal.SIGINT)
        run.end()
