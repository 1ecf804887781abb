"""A job whose checkpoints are in a bucket of an S3 server: it loses its trainer, then all of itself, and goes on."""

import os
import signal
from collections.abc import Iterator

import pytest
import yaml

from tests.fakes.s3_server import S3Server
from tests.rljob_runs import Run, own_job

STEPS = 120


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        server.make_bucket("ckpt")
        yield server


@pytest.fixture
def file(tmp_path):
    job = own_job(
        "tests.fakes.line_job:flow",
        {
            "sampler": {"kind": "tests.fakes.line_job:Sampler"},
            "trainer": {"kind": "tests.fakes.third_trainer:LineFit", "config": {"rate": 0.8}},
        },
        steps=STEPS,
        slots=2,
    )
    job["spec"]["checkpoint"]["uri"] = "s3://ckpt/jobs/line"
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def events(run, kind):
    return [line for line in run.lines("events") if line["event"] == kind]


@pytest.mark.timeout(150)
def test_a_job_goes_on_from_a_bucket_after_its_trainer_and_after_all_of_it_was_killed(tmp_path, file, s3):
    with Run(tmp_path, file=file, small=False, name="first", environ=s3.variables) as first:
        first.until_step(10)
        first.kill("trainer/0")
        first.until_step(15, branch=1)
        first.kill("driver", signal.SIGSTOP)  # nothing more is committed
        os.killpg(first.process.pid, signal.SIGKILL)
        first.process.wait()
        kept = max(int(line["uri"].rpartition("-")[2]) for line in events(first, "checkpoint"))
        assert not (first.work_dir / "checkpoints").exists()
    assert kept >= 10
    with Run(tmp_path, file=file, small=False, name="second", environ=s3.variables) as second:
        assert second.end(timeout_s=100) == 0, second.said
        assert second.answer["condition"] == "Complete", second.said
        lines = second.lines("lineage")
    assert lines[0]["step"] > kept, "it was trained before"
    assert lines[0]["step"] % 5 == 1, "from the step behind a checkpoint on"
    assert {line["branch"] for line in lines} == {2}, "of both branches that were before, there was a trace"
    names = s3.names("ckpt")
    last = [f"b2-{step}" for step in (STEPS - 10, STEPS - 5, STEPS)]
    assert {name for name in names if name.endswith("/COMMIT")} == {f"jobs/line/{name}/COMMIT" for name in last}
    assert {name.split("/")[2] for name in names} == {".b2.opened", *last}


@pytest.mark.timeout(100)
def test_a_job_whose_bucket_is_not_there_ends_before_its_first_step_with_a_sentence(tmp_path, file, s3):
    sets = ("spec.checkpoint.uri=s3://none/x",)
    with Run(tmp_path, *sets, file=file, small=False, environ=s3.variables) as run:
        assert run.end(timeout_s=80) == 1, run.said
        assert run.answer["condition"] == "Failed"
        assert "the checkpoint place s3://none/x cannot be read: got no bucket 'none'" in run.said
        assert run.lines("lineage") == []
