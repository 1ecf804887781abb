"""A trainer of somebody else's, 50 lines of which none is about rounds or commits, in a whole job that loses a rank."""

import json

import pytest
import yaml

from tests.fakes.line_job import OFFSET, POINTS, SLOPE
from tests.rljob_runs import Run, own_job

STEPS = 60
JOB = own_job(
    "tests.fakes.line_job:flow",
    {
        "sampler": {"kind": "tests.fakes.line_job:Sampler"},
        "trainer": {"kind": "tests.fakes.third_trainer:LineFit", "workers": 2, "config": {"rate": 0.8}},
    },
    steps=STEPS,
    slots=3,
)


@pytest.mark.timeout(120)
def test_a_third_trainer_learns_with_two_ranks_and_goes_on_from_its_checkpoint(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(JOB))
    with Run(tmp_path, file=file, small=False) as run:
        run.until_step(10)
        run.kill("trainer/1")
        assert run.end(timeout_s=100) == 0, run.said
        assert run.answer["condition"] == "Complete", run.said
        lines = run.lines("lineage")
        saved = (run.work_dir / "checkpoints").glob("*/trainer/line.json")
        line = json.loads(max(saved, key=lambda path: path.stat().st_mtime).read_text())
        metrics = run.lines("metrics")
    assert {entry["step"] for entry in lines} == set(range(1, STEPS + 1))
    assert {entry["branch"] for entry in lines} == {0, 1}, "its gang was formed anew, from a checkpoint"
    assert all(entry["units"] == POINTS for entry in lines)
    assert line == pytest.approx({"slope": SLOPE, "offset": OFFSET}, abs=0.1)
    first, last = metrics[0], metrics[-1]
    assert last["loss"] < 0.01 * first["loss"]
    assert last["points_count"] == POINTS, "summed over both ranks"
    assert {"collect_s", "update_s", "publish_s"} <= last.keys()
    assert last["previous"]["off"] < 0.2 < metrics[1]["previous"]["off"], "the sampler works with what was published"
