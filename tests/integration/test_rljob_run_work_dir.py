"""A work dir belongs to one job and to one run at a time; a job goes on in it, and is complete once."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.rljob_runs import EXAMPLE, Run, rljob


@pytest.mark.timeout(180)
@pytest.mark.slow("a job is started three times, one after the other")
def test_a_job_stopped_by_ctrl_c_goes_on_in_its_work_dir_and_is_complete_once(tmp_path):
    with Run(tmp_path, "spec.flow.steps=100000") as first:
        first.until_step(3)
        second = rljob("run", EXAMPLE, "--work-dir", first.work_dir)
        assert second.returncode == 2
        assert f"another rljob runs in {first.work_dir}; wait for it or choose another --work-dir" in second.stderr
        first.interrupt()
        assert first.end() == 130, first.said
        answer = first.answer
        assert (answer["condition"], answer["reason"]) == ("Suspended", "SuspendedByUser")
        assert f"to go on: rljob run {EXAMPLE} --work-dir {first.work_dir}" in first.said
        assert first.left() == []
        stopped_after = first.lines("lineage")[-1]["step"]
        assert (first.work_dir / "checkpoints" / f"b0-{stopped_after}" / "COMMIT").exists()
    steps = stopped_after + 3
    with Run(tmp_path, f"spec.flow.steps={steps}") as rest:
        assert rest.end() == 0, rest.said
        assert rest.answer["condition"] == "Complete"
        assert rest.answer["steps"] == steps
        history = [(line["branch"], line["step"]) for line in rest.lines("lineage")]
        want = [(0, n) for n in range(1, stopped_after + 1)] + [(1, n) for n in range(stopped_after + 1, steps + 1)]
        assert history == want
    with Run(tmp_path, f"spec.flow.steps={steps}") as again:
        assert again.end() == 0, again.said
        wanted = f"the job is complete already: its checkpoint is of step {steps} of {steps}"
        assert wanted in again.answer["message"]
        assert again.answer["steps"] == steps
        assert again.left() == []
        assert len(again.lines("lineage")) == steps, "nothing was trained again"


def test_a_work_dir_of_another_job_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "job.json").write_text('{"name": "cartpole", "flow": "ppo", "seed": 7, "roles": {"env": "gymnasium"}}')
    done = rljob("run", EXAMPLE, "--work-dir", tmp_path, "--output", "json")
    assert done.returncode == 2
    assert f"work dir {tmp_path} is of another job: got seed 1" in done.stderr
    assert "wanted seed 7" in done.stderr
    assert "choose another --work-dir, or go on with the job that it is of" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "job.json"]


def test_a_work_dir_that_cannot_be_made_is_said_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    done = rljob("run", EXAMPLE, "--work-dir", tmp_path / "file" / "work")
    assert done.returncode == 2
    assert f"work dir {tmp_path}/file/work cannot be used: got" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_view_and_a_log_that_find_no_room_cost_themselves_and_not_the_job(tmp_path):
    work = tmp_path / "work"
    (work / "logs").mkdir(parents=True)
    (work / "objects").write_text("not a folder")
    (work / "logs" / "rljob.log").symlink_to("/dev/full")
    with Run(tmp_path, "spec.flow.steps=2") as run:
        assert run.end() == 0, run.said
        assert run.answer["condition"] == "Complete"
        assert "Traceback" not in run.said


def test_as_many_checkpoints_are_kept_as_the_job_says(tmp_path):
    sets = ("spec.flow.steps=4", "spec.checkpoint.everySteps=1", "spec.checkpoint.keep=2")
    with Run(tmp_path, *sets) as run:
        assert run.end() == 0, run.said
        assert sorted(folder.name for folder in (run.work_dir / "checkpoints").iterdir()) == ["b0-3", "b0-4"]


def test_a_work_dir_may_be_anywhere_and_keeps_its_checkpoints_itself():
    """Below /dev/shm, which each pod has one of its own of, by a name full of what other places read as theirs."""
    name = "{a}{job} lr#1?%2f$(RLINF_JOB_NAME)$$"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with Run(Path(folder), "spec.flow.steps=2", "spec.checkpoint.everySteps=2", name=name) as run:
            assert run.end() == 0, run.said
            assert run.answer["condition"] == "Complete"
            assert (run.work_dir / "checkpoints" / "b0-2" / "COMMIT").exists()
        assert sorted(os.listdir(folder)) == [name, f"{name}.err", f"{name}.out"]
