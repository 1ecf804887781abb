"""A worker of two that cannot come back: steps go on with the other, and with both once it can."""

import pytest
import yaml

from tests import rljob_runs
from tests.rljob_runs import Run

AFTER_S = 2.0
SLICES = 4
ITEMS = 16

pytestmark = pytest.mark.timeout(150)


def job(path):
    slots = {"cpu": "200m", "memory": "1Gi"}
    return rljob_runs.manifest(
        path,
        roles=[
            {"name": "env", "kind": "gymnasium", "workers": 2},
            {"name": "rollout", "kind": "torch", "workers": 2},
            {"name": "actor", "kind": "fsdp"},
        ],
        pools=[
            {"name": "sim", "roles": ["env"], "pods": 2, "slots": {"perPod": 1, **slots}},
            {"name": "learn", "roles": ["rollout", "actor"], "pods": 1, "slots": {"perPod": 3, **slots}},
        ],
        placement={"profileSteps": 0},
        failurePolicy={"maxRestarts": 10_000},
    )


def cycle():
    """sim <-> policy -> train, two of each of the cycle."""
    role, slots = {"kind": "synthetic", "workers": 2}, {"perPod": 5, "cpu": "10m", "memory": "1000Mi"}
    return {
        "apiVersion": "rlinf.io/v1alpha1", "kind": "RLJob", "metadata": {"name": "cycle"},
        "spec": {
            "seed": 1,
            "placement": {"profileSteps": 0},
            "flow": {"name": "synthetic", "steps": 100_000, "config": {
                "items": ITEMS,
                "edges": [{"from": "policy", "to": "train"}],
                "cycles": [{"roles": ["sim", "policy"], "roundTrips": 2, "hopMs": 1.0, "stages": 2}],
                "channels": {"tickets": {"microBatch": 1, "depth": ITEMS}},
            }},
            "roles": [
                {"name": "sim", **role, "config": {"time": {"perItemMs": 2.0}}},
                {"name": "policy", **role, "config": {"time": {"perItemMs": 2.0}}},
                {"name": "train", "kind": "synthetic", "config": {"time": {"perItemMs": 2.0}}},
            ],
            "pools": [{"name": "cpu", "roles": ["sim", "policy", "train"], "pods": 1, "slots": slots}],
            "failurePolicy": {"maxRestarts": 10_000},
        },
    }  # fmt: skip


def worked(run, worker, step):
    """Seconds of compute in a step, as its account says."""
    line = next(line for line in run.lines("metrics") if line["step"] == step + 1)
    return line["previous"]["account"].get(worker, {}).get("compute", 0.0)


@pytest.mark.long("the same of PPO's environments; either end of a cycle is rehomed in make test")
def test_another_environment_worker_collects_the_segments_of_one_that_cannot_come_back(tmp_path):
    sets = ("spec.flow.steps=100000", f"spec.flow.config.slices={SLICES}")
    with Run(tmp_path, *sets, file=job(tmp_path / "job.yaml"), settings={"rehome_after_s": AFTER_S}) as run:
        run.until_step(5)
        goes_and_comes(run, "env/1", others=("env/0", "rollout/0", "actor/0"))
        ends_well(run, units=SLICES)


def test_either_end_of_a_cycle_stands_in_for_another_of_its_role(tmp_path):
    """The front's tickets are its own; of the back it asks what it asks in a cycle."""
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(cycle()))
    with Run(tmp_path, file=path, settings={"rehome_after_s": AFTER_S}, small=False) as run:
        run.until_step(5)
        goes_and_comes(run, "sim/1", others=("sim/0", "policy/0", "train/0"))
        goes_and_comes(run, "policy/1", others=("sim/0", "sim/1", "policy/0", "train/0"))
        ends_well(run, units=ITEMS)


def ends_well(run, *, units):
    assert {line["branch"] for line in run.lines("lineage")} == {0}, "nothing was made again"
    assert {line["units"] for line in run.lines("lineage")} == {units}
    run.interrupt()
    assert run.end() == 130


def goes_and_comes(run, worker, *, others):
    def rehomed():
        return [line for line in run.lines("events") if line["event"] == "rehomed" and line["worker"] == worker]

    def is_back():
        return rehomed()[-1]["message"].endswith("its own again")

    def kept_away(until):
        """Each further life of it ends as it begins, as in a place that lets nobody start."""
        if (part := run.part(worker)) is not None:
            part.kill()
        return until()

    def gone_on():
        """A life of it that was ready before it was ended was back, and is away again after a while."""
        return len(run.lines("lineage")) > first + 5 and not is_back()

    run.kill(worker)
    run.until(lambda: kept_away(rehomed), what=f"others take over from {worker}")
    first = len(run.lines("lineage"))
    run.until(lambda: kept_away(gone_on), what="5 steps without it")
    without = run.lines("lineage")[-1]["step"]
    assert worked(run, worker, without - 2) == 0.0
    assert all(worked(run, other, without - 2) > 0.0 for other in others)

    run.until(is_back, what=f"{worker} is back")
    back = run.lines("lineage")[-1]["step"]
    run.until_step(back + 5)
    assert worked(run, worker, back + 3) > 0.0, "it has its own again"
