"""A run whose words nobody can read trains on, stops with a checkpoint, and keeps its exit code."""

import fcntl
import os
import signal
import subprocess
import sys
import termios

import pytest

from rljob import run as command
from tests.rljob_runs import EXAMPLE, LIGHT, ROOT, SMALL, TIMEOUT_S, Run

pytestmark = pytest.mark.timeout(150)


def test_a_full_disk_under_standard_output_costs_the_words_and_not_the_job(tmp_path):
    sets = [part for path in (*SMALL, LIGHT, "spec.flow.steps=2") for part in ("--set", path)]
    work_dir = tmp_path / "läufe"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rljob", "run", str(EXAMPLE), "--work-dir", str(work_dir), *sets],
            cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "ascii"}, stdin=subprocess.DEVNULL, stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=2 * TIMEOUT_S, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert len((work_dir / "lineage.jsonl").read_text().splitlines()) == 2


@pytest.mark.long("a whole job, as that whose terminal closes is in make test")
def test_ctrl_c_without_a_reader_still_writes_a_checkpoint(tmp_path):
    """`rljob run ... | tee run.log`: the terminal tells the whole group, and tee is gone at once."""
    with Run(tmp_path, "spec.flow.steps=100000", is_heard=False) as run:
        run.until_step(2)
        run.interrupt()
        assert run.end() == command.EXIT_INTERRUPTED
        assert run.answer["condition"] == "Suspended"
        stopped_after = run.lines("lineage")[-1]["step"]
        assert (run.work_dir / "checkpoints" / f"b0-{stopped_after}" / "COMMIT").exists()


def test_a_terminal_that_closes_still_leaves_a_checkpoint(tmp_path, monkeypatch):
    """A lost connection to a machine far away: the kernel says SIGHUP, and nothing can be written any more."""
    start, (screen, device) = subprocess.Popen, os.openpty()

    def own_terminal():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may be run under nohup, which is passed on

    def in_a_terminal(command, **kind):
        kind |= {"stdin": device, "stderr": device}
        return start(command, **kind, preexec_fn=own_terminal)

    monkeypatch.setattr(subprocess, "Popen", in_a_terminal)
    with Run(tmp_path, "spec.flow.steps=100000") as run:
        os.close(device)
        run.until_step(2)
        os.close(screen)
        assert run.end() == command.EXIT_INTERRUPTED
        assert run.answer["condition"] == "Suspended"
        stopped_after = run.lines("lineage")[-1]["step"]
        assert (run.work_dir / "checkpoints" / f"b0-{stopped_after}" / "COMMIT").exists()
        assert run.left() == []


def test_an_answer_that_finds_no_room_is_told_and_the_exit_code_is_the_jobs():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rljob", "run", str(EXAMPLE), "--set", "spec.flow.steps=x", "--output", "json"],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=2 * TIMEOUT_S, check=False,
        )  # fmt: skip
    assert done.returncode == command.EXIT_BAD_MANIFEST
    told = "the object of --output json was not written: No space left on device"
    assert done.stderr.splitlines()[1:] == [told]
