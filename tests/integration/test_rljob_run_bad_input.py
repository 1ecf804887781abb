"""`rljob run` with what cannot work: a sentence (what, got, wanted, next), an exit code, nothing left running."""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest
import yaml

from tests import rljob_runs
from tests.rljob_runs import Run

BROKEN = "tests.fakes.broken_envs"
ENV = "spec.flow.config.env"
WAITING = "tests.fakes.waiting_role:Waiting"
NO_TORCH = (f"spec.roles[rollout].kind={WAITING}", f"spec.roles[actor].kind={WAITING}")
"""Of a job that fails before its policy is needed."""
TOLD_WITHIN_S = 15.0  # whatever happens at run time stands in a condition by then

OTHER = pytest.mark.long("a whole job for another sentence, which test_environment.py has of the environment alone")
ELSEWHERE = pytest.mark.long("a whole job for another field whose module is imported by the same function")

pytestmark = pytest.mark.timeout(150)


def failed(run: Run) -> str:
    """The message of a run that ended by itself as Failed, after the checks that every one of them owes."""
    assert run.end() == 1, run.said
    answer = run.answer
    assert answer["condition"] == "Failed"
    assert {"reason", "message", "steps", "wall_s", "work_dir", "plan"} <= answer.keys()
    assert f"Failed: {answer['message']}\n" in run.said
    assert_for_people(run)
    return str(answer["message"])


def assert_for_people(run: Run) -> None:
    shown = "\n".join(run.said.splitlines()[:-1])  # the last one is the object of --output json
    assert "Traceback" not in shown
    assert '"level"' not in run.said, "a log line is no message for a person"
    assert run.left() == []


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        pytest.param("CartPoll-v1", "does not exist: got 'CartPoll-v1', wanted one of CartPole-v1", marks=OTHER),
        (f"{BROKEN}:RaisesInConstructor-v0", "cannot be made: got RuntimeError: no licence for this simulator ("),
        pytest.param(
            f"{BROKEN}:Pictures-v0",
            "has observations that are no plain array: got Dict, wanted Box; wrap it in",
            marks=OTHER,
        ),
    ],
)
def test_an_environment_that_cannot_be_made_fails_the_job_at_once(tmp_path, env, sentence):
    with Run(tmp_path, *NO_TORCH, f"{ENV}={env}") as run:
        message = failed(run)
        assert message.startswith(f"worker env/0: environment '{env}' ")
        assert sentence in message
        assert run.answer["reason"] == "UserError"


@pytest.mark.parametrize(
    ("field", "who", "what"),
    [
        ("spec.flow.name=theirs:flow", "", "flow 'theirs:flow'"),
        pytest.param(
            "spec.roles[rollout].kind=theirs:Role", "worker rollout/0: ", "role kind 'theirs:Role'", marks=ELSEWHERE
        ),
        (f"{ENV}=theirs:Reach-v0", "worker env/0: ", "environment 'theirs:Reach-v0' names module 'theirs', which"),
    ],
)
def test_a_module_of_ones_own_that_does_not_import_fails_the_job_at_once(tmp_path, field, who, what):
    (tmp_path / "theirs.py").write_text("import gymnasium\n\nregister('Reach-v0')\n")
    with Run(tmp_path, *NO_TORCH, field, environ={"PYTHONPATH": str(tmp_path)}) as run:
        message = failed(run)
        got = f"got NameError: name 'register' is not defined ({tmp_path}/theirs.py, line 3)"
        assert message == f"{who}{what} cannot be imported: {got}; correct it; its stack is in the log"
        assert run.answer["reason"] == "UserError"
        assert "is started again" not in run.said
        logs = [file.read_text() for file in (run.work_dir / "logs").glob("cartpole-*/*.log")]
        assert any("Traceback" in text and "theirs.py" in text for text in logs)


def test_a_module_that_was_imported_before_is_tried_again_at_a_restart(tmp_path):
    taken = tmp_path / "taken"
    (tmp_path / "theirs.py").write_text(
        f"""import pathlib, gymnasium
if pathlib.Path({str(taken)!r}).exists():
    raise RuntimeError("CUDA error: out of memory")
made = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
gymnasium.register("Reach-v0", entry_point=made, max_episode_steps=500)
"""
    )
    sets = (f"{ENV}=theirs:Reach-v0", "spec.flow.steps=40")
    with Run(tmp_path, *sets, environ={"PYTHONPATH": str(tmp_path)}) as run:
        run.until(lambda: len(run.lines("lineage")) > 2, what="steps")
        taken.touch()
        run.kill("env/0", signal.SIGKILL)
        what = "environment 'theirs:Reach-v0' names module 'theirs', which cannot be imported"
        run.until_said(f"worker env/0 is started again: {what}: got RuntimeError: CUDA error: out of memory (")
        taken.unlink()
        assert run.end() == 0, run.said
        assert_for_people(run)
        assert run.answer["condition"] == "Complete"


def told_after_s(run: Run, text: str) -> float:
    """Seconds from the moment at which the environment first broke until a person can read the text."""
    run.until_said(text)
    told_at = time.time()
    [log] = (run.work_dir / "logs").glob("cartpole-cpu-0-a1/env-0.log")
    found = re.search(r"breaks at ([\d.]+)", log.read_text())
    assert found is not None, log.read_text()
    return told_at - float(found[1])


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ("RaisesInStep", "raised in step() in environment 0 of its slice after 3 steps: got ZeroDivisionError"),
        pytest.param(
            "RaisesInReset",
            "raised in reset() in environment 0 of its slice after 0 steps: got RuntimeError: the robot",
            marks=OTHER,
        ),
        pytest.param(
            "NotANumber",
            "after 1 steps: got [nan nan nan nan], wanted finite numbers; correct the environment; its",
            marks=OTHER,
        ),
    ],
)
def test_an_environment_that_raises_is_tried_again_within_the_jobs_bound(tmp_path, broken, sentence):
    with Run(tmp_path, f"{ENV}={BROKEN}:{broken}-v0", "spec.failurePolicy.maxRestarts=2") as run:
        assert told_after_s(run, f"environment '{BROKEN}:{broken}-v0' r") <= TOLD_WITHIN_S  # Recovering, or Failed
        message = failed(run)
        assert run.answer["reason"] == "TooManyRestarts"
        assert "workers failed 3 times within 3600 s, more than spec.failurePolicy.maxRestarts=2 allows" in message
        assert sentence in message
        [log] = (run.work_dir / "logs").glob("cartpole-cpu-0-a1/env-0.log")
        promised = "see the worker's log for its stack" in message
        assert promised == ("broken_envs.py" in log.read_text()) == broken.startswith("Raises")


def test_an_environment_that_hangs_is_named_and_killed(tmp_path):
    template = {"spec": {"containers": [{"name": "agent", "env": [
        {"name": "RLINF_SETTINGS", "value": '{"step_deadline_min_s": 5, "first_step_deadline_s": 5}'}]}]}}  # fmt: skip
    file = rljob_runs.manifest(tmp_path / "job.yaml")
    job = yaml.safe_load(file.read_text())
    job["spec"]["pools"][0]["template"] = template
    file.write_text(yaml.safe_dump(job))
    with Run(tmp_path, f"{ENV}={BROKEN}:HangsInStep-v0", "spec.failurePolicy.maxRestarts=0", file=file) as run:
        message = failed(run)
        said = (
            r"worker env/0 hung and was killed: no progress mark for (\d+\.\d) s in phase 'step', whose deadline is 5 s"
        )
        found = re.search(said, message)
        assert found is not None, message
        assert float(found[1]) >= 5.0
        [hung] = [line for line in run.lines("events") if line["event"] == "hung"]
        assert "broken_envs.py" in hung["stacks"], "the event holds the stacks"


@pytest.mark.slow("waits for the 10 s after which an environment without a sign is named")
def test_an_environment_that_hangs_is_named_long_before_it_is_killed(tmp_path):
    """With the defaults: named after 10 s of silence, killed after minutes, as it is its first step."""
    with Run(tmp_path, f"{ENV}={BROKEN}:HangsInStep-v0") as run:
        after_s = told_after_s(run, "worker env/0 has not moved for ")
        assert 9.0 <= after_s <= TOLD_WITHIN_S
        assert "hung and was killed" not in run.said


def test_an_environment_that_ends_its_process_is_said_to_have_done_so(tmp_path):
    with Run(tmp_path, f"{ENV}={BROKEN}:Exits-v0", "spec.failurePolicy.maxRestarts=0") as run:
        assert failed(run).endswith("the last was env/0: worker env/0 exited with code 3")


def test_a_place_for_checkpoints_that_cannot_be_written_is_said_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    with Run(tmp_path, f"spec.checkpoint.uri=file://{tmp_path}/file/kept") as run:
        message = failed(run)
        assert f"the checkpoint folder {tmp_path}/file/kept cannot be written" in message
        assert "got Not a directory" in message
        assert run.answer["reason"] == "CheckpointUnwritable"
        assert run.lines("lineage") == []


def can_mount() -> bool:
    command = ["unshare", "--mount", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(os.geteuid() != 0 or not can_mount(), reason="a small /dev/shm of its own needs root")


@pytest.fixture
def dev_shm_of(monkeypatch):
    """What runs from now on has a /dev/shm of 64 KiB, of which so many are free."""

    def make(free_kib):
        start = subprocess.Popen
        lines = "mount -t tmpfs -o size=64k tmpfs /dev/shm && "
        lines += f'head -c {64 - free_kib}k /dev/zero > /dev/shm/theirs && exec "$@"'

        def in_own_mounts(command, **kind):
            return start(["unshare", "--mount", "sh", "-c", lines, "sh", *command], **kind)

        monkeypatch.setattr(subprocess, "Popen", in_own_mounts)

    return make


@needs_mounts
def test_a_dev_shm_without_a_free_byte_is_said_before_anything_starts(tmp_path, dev_shm_of):
    dev_shm_of(0)
    with Run(tmp_path) as run:
        assert run.end() == 2, run.said
        assert_for_people(run)
        answer = run.answer
        assert answer["condition"] == "Invalid"
        assert "the certificate of this run cannot be written: got No space left on device (/dev/shm/" in run.said
        assert ", 0 of 65536 bytes free), wanted 16384 bytes" in answer["message"]
        assert "make room in /dev/shm" in answer["message"]


@needs_mounts
def test_a_dev_shm_with_room_for_the_first_files_only_names_the_pod_that_waits(tmp_path, dev_shm_of):
    dev_shm_of(36)
    with Run(tmp_path) as run:
        run.until_said("this machine cannot run a pod, which is tried again: cartpole-")
        assert re.search(r"No space left on device \(/dev/shm/\S+, \d+ of 65536 bytes free\); make room", run.said)
        run.interrupt()
        run.until_said("stopping at the next step boundary")
        assert run.end() == 130, run.said
        assert_for_people(run)


@needs_mounts
def test_a_full_dev_shm_is_said_with_its_size_and_what_is_wanted(tmp_path, dev_shm_of):
    dev_shm_of(64)
    with Run(tmp_path) as run:
        message = failed(run)
        assert "no room for a ring in /dev/shm/" in message
        assert "of 65536 bytes free, wanted " in message
        assert "raise the size limit of the volume" in message
