"""Ctrl-C and SIGTERM: once is a clean stop (test_rljob_run_work_dir.py), twice is at once; nothing stays running."""

import re
import shlex
import signal
import time

import psutil
import pytest

from rlinf_api import names
from tests.rljob_runs import Run, rljob

pytestmark = pytest.mark.timeout(150)


def in_pods_of(run: Run) -> list[int]:
    """Living processes that carry a pod uid of this run: those that nobody could lose from sight."""
    found = []
    for process in run.known():
        try:
            if names.ENV_POD_UID in process.environ() and process.status() != "zombie":
                found.append(process.pid)
        except psutil.Error:  # it went while it was looked at
            continue
    return found


def test_ctrl_c_twice_stops_at_once_and_leaves_nothing_running(tmp_path):
    with Run(tmp_path, "spec.flow.steps=100000", "spec.flow.config.env=tests.fakes.broken_envs:HangsInStep-v0") as run:
        run.until_said("Running=True Stepping")
        assert len(in_pods_of(run)) >= 5, "driver, agent, three workers"
        run.interrupt()
        run.until_said("stopping at the next step boundary, with a checkpoint; Ctrl-C again stops at once")
        time.sleep(0.3)  # what makes the next one a second
        run.interrupt()
        assert run.end() == 130, run.said  # a drain has two minutes, and this step does not end
        assert run.answer["condition"] == "Interrupted"
        assert run.answer["message"] == "stopped at once after step 0; no checkpoint was reported"
        assert run.left() == []
        assert in_pods_of(run) == []
        assert "Traceback" not in run.said


def test_ctrl_c_before_anything_runs_ends_with_130(tmp_path):
    with Run(tmp_path, "spec.flow.steps=100000") as run:
        run.until_said("job cartpole in")
        run.interrupt()
        assert run.end() == 130, run.said
        assert run.answer["condition"] in ("Suspended", "Interrupted")
        assert run.left() == []


def test_sigterm_is_a_clean_stop_too_and_what_is_printed_goes_on_with_the_same_job(tmp_path):
    name = "my work"
    with Run(tmp_path, "spec.flow.steps=100000", options=("--seed", "7"), name=name) as run:
        run.until_step(2)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 130, run.said
        assert run.answer["condition"] == "Suspended"
        assert run.answer["steps"] >= 2
        assert "\x1b" not in run.said, "no terminal, no escape sequences"
        assert run.left() == []
        stopped_after = run.lines("lineage")[-1]["step"]
        (told,) = re.findall(r"^to go on: rljob (run .*)$", run.said, re.MULTILINE)
        done = rljob(*shlex.split(told), "--set", f"spec.flow.steps={stopped_after + 1}")
    assert done.returncode == 0, done.stderr + done.stdout
    assert [(line["branch"], line["step"]) for line in run.lines("lineage")][-1] == (1, stopped_after + 1)
