"""A worker of two that cannot come back: steps go on with the other, and with both once it can."""

import pytest

from tests import rljob_runs
from tests.rljob_runs import Run

AFTER_S = 2.0
SLICES = 4

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]


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
        failurePolicy={"maxRestarts": 10_000},
    )


def worked(run, worker, step):
    """Seconds of compute in a step, as its account says."""
    line = next(line for line in run.lines("metrics") if line["step"] == step + 1)
    return line["previous"]["account"].get(worker, {}).get("compute", 0.0)


@pytest.mark.parametrize("worker", ["env/1", "rollout/1"])
def test_steps_go_on_without_a_worker_that_cannot_come_back(tmp_path, worker):
    sets = ("spec.flow.steps=100000", f"spec.flow.config.slices={SLICES}")
    with Run(tmp_path, *sets, file=job(tmp_path / "job.yaml"), settings={"rehome_after_s": AFTER_S}) as run:
        run.until_step(5)
        run.kill(worker)

        def rehomed():
            return [line for line in run.lines("events") if line["event"] == "rehomed"]

        def kept_away(until):
            """Each further life of it ends as it begins, as in a place that lets nobody start."""
            if (part := run.part(worker)) is not None:
                part.kill()
            return until()

        run.until(lambda: kept_away(rehomed), what=f"others take over from {worker}")
        first = len(run.lines("lineage"))
        run.until(lambda: kept_away(lambda: len(run.lines("lineage")) > first + 10), what="10 steps without it")
        without = run.lines("lineage")[-1]["step"]
        assert worked(run, worker, without - 2) == 0.0
        assert all(worked(run, f"{role}/0", without - 2) > 0.0 for role in ("env", "rollout", "actor"))

        run.until(lambda: len(rehomed()) == 2, what=f"{worker} is back")
        assert [line["worker"] for line in rehomed()] == [worker, worker]
        back = run.lines("lineage")[-1]["step"]
        run.until_step(back + 5)
        assert worked(run, worker, back + 3) > 0.0, "it has its own again"
        assert {line["branch"] for line in run.lines("lineage")} == {0}, "nothing was made again"
        assert {line["units"] for line in run.lines("lineage")} == {SLICES}
        run.interrupt()
        assert run.end() == 130
