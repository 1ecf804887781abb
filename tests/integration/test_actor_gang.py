"""A gang of actors one of whose ranks is held up, by its volume or by its data: nobody is taken for hung."""

import pytest
import yaml

from tests import rljob_runs
from tests.rljob_runs import Run

LIMIT_S = 4.0
"""Of a step that gives no sign, in place of the 20 s that users have."""
STEPS = 3


@pytest.mark.slow("a rank is held up for longer than a step may hang, in each of several steps")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["SlowSaver", "LateRank"])
def test_a_rank_may_be_held_up_for_longer_than_a_step_may_hang(tmp_path, kind):
    """Who writes a checkpoint, or has its data late, has said so; who waits for another gives signs of life."""
    file = rljob_runs.manifest(tmp_path / "job.yaml")
    job = yaml.safe_load(file.read_text())
    held_up = {"kind": f"tests.fakes.held_up:{kind}", "workers": 2, "config": {"seconds": 2 * LIMIT_S}}
    job["spec"]["roles"][2] |= held_up
    job["spec"]["pools"][0]["slots"]["perPod"] = 4
    job["spec"]["checkpoint"] = {"everySteps": STEPS - 1}
    file.write_text(yaml.safe_dump(job))
    settings = {"step_deadline_min_s": LIMIT_S, "step_deadline_factor": 1.0}
    with Run(tmp_path, f"spec.flow.steps={STEPS}", file=file, settings=settings, learns=True) as run:
        assert run.end(timeout_s=150) == 0, run.said
        assert run.answer["condition"] == "Complete"
        assert [line for line in run.lines("events") if line["event"] == "worker-exited"] == []
        assert {(line["branch"], line["step"]) for line in run.lines("lineage")} == {(0, n + 1) for n in range(STEPS)}
