"""A job whose trainer is sharded: it is killed while it saves, and goes on with as many ranks as there are then."""

import os
import signal

import pytest
import yaml

from tests.fakes import sharded_trainer
from tests.rljob_runs import Run, own_job

STEPS = 20


def job(folder, *, ranks):
    trainer = {"kind": "tests.fakes.sharded_trainer:Sharded", "workers": ranks, "config": {"folder": str(folder)}}
    found = own_job(
        "tests.fakes.line_job:flow",
        {"sampler": {"kind": "tests.fakes.line_job:Sampler"}, "trainer": trainer},
        steps=STEPS,
        slots=3,
    )
    found["spec"]["checkpoint"]["uri"] = str(folder / "ckpt")
    path = folder / f"job-{ranks}.yaml"
    path.write_text(yaml.safe_dump(found))
    return path


def right(step, *, rows):
    """As the trainer tells it."""
    values = {"weights": [float(sum(range(step + 1)))], "moments": [0.5**step]}
    return f"{step} {values} { ({'weights': rows, 'moments': rows}) }"


@pytest.mark.slow("imports torch in four workers, one after the other on two cores")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), pytest.param(1, 2, marks=pytest.mark.long("more ranks than wrote, as test_shards.py reads"))],
)
def test_what_was_saved_before_a_kill_in_a_save_is_gone_on_from_by_another_number_of_ranks(tmp_path, before, after):
    with Run(tmp_path, file=job(tmp_path, ranks=before), small=False, name="first") as first:
        first.until_step(7)  # b0-5 is whole, or about to be
        first.until(lambda: (tmp_path / "ckpt" / "b0-5" / "COMMIT").exists(), what="a first checkpoint")
        (tmp_path / "hold").touch()

        def writes():
            return list(tmp_path.glob("writes-*-0"))

        [held] = first.until(writes, what="a save that is held up")
        saving = int(held.name.split("-")[1])
        first.until_step(saving + 2)  # they go on beside it, until the next save waits
        os.killpg(first.process.pid, signal.SIGKILL)
        first.process.wait()
        assert not (tmp_path / "ckpt" / f"b0-{saving}" / "COMMIT").exists()
    (tmp_path / "hold").unlink()
    with Run(tmp_path, file=job(tmp_path, ranks=after), small=False, name="second") as second:
        assert second.end(timeout_s=100) == 0, second.said
        assert second.answer["condition"] == "Complete", second.said
        lines = second.lines("lineage")
    assert lines[0]["step"] == saving - 4, "behind the newest that was whole"
    rows = sharded_trainer.ROWS // after
    for rank in range(after):
        assert (tmp_path / f"read-by-{rank}-of-{after}").read_text() == f"b0-{saving - 5} {saving - 5}"
        assert (tmp_path / f"has-{rank}-of-{after}").read_text() == right(STEPS, rows=rows)
    files = sorted(path.name for path in (tmp_path / "ckpt" / f"b1-{STEPS}" / "trainer").glob("*.distcp"))
    assert files == [f"__{rank}_0.distcp" for rank in range(after)]
