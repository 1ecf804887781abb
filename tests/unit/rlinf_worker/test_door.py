"""`python -m rlinf_worker`: what a failure at the top becomes, and how lines of the log look."""

import io
import json
import logging
import os
import subprocess
import sys

import pytest

from rlinf_api.errors import UserError
from rlinf_worker import __main__ as door
from rlinf_worker import logs


@pytest.fixture
def quiet_root():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def ended(error, monkeypatch, tmp_path, *, part="agent", level="INFO"):
    def run():
        raise error

    monkeypatch.setitem(door.RUN, part, run)
    monkeypatch.setenv("RLINF_TERMINATION_LOG", str(tmp_path / "t.json"))
    monkeypatch.setenv("RLINF_LOG_LEVEL", level)
    return door.main([part])


@pytest.mark.usefixtures("quiet_root")
def test_an_error_of_ours_is_one_sentence_and_a_termination_message(monkeypatch, tmp_path, capsys):
    error = UserError("no such pool", got="'gpu'", wanted="sim", next="write sim")
    assert ended(error, monkeypatch, tmp_path) == 64
    assert capsys.readouterr().err == "no such pool: got 'gpu', wanted sim; write sim\n"
    assert json.loads((tmp_path / "t.json").read_text())["reason"] == "UserError"


@pytest.mark.usefixtures("quiet_root")
def test_its_traceback_is_a_log_line_at_debug(monkeypatch, tmp_path, capsys):
    ended(UserError("no such pool"), monkeypatch, tmp_path, level="DEBUG")
    line, sentence = capsys.readouterr().err.splitlines()
    assert "Traceback" in json.loads(line)["traceback"]
    assert sentence == "no such pool"


@pytest.mark.usefixtures("quiet_root")
def test_what_the_users_code_raised_shows_its_stack_in_the_log(monkeypatch, tmp_path, capsys):
    error = UserError("environment 'X-v0' cannot be made")
    error.__cause__ = ZeroDivisionError("by zero")
    ended(error, monkeypatch, tmp_path, part="worker")
    line, sentence = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError: by zero" in json.loads(line)["traceback"]
    assert sentence == "environment 'X-v0' cannot be made"


@pytest.mark.usefixtures("quiet_root")
@pytest.mark.parametrize(("part", "code"), [("agent", 70), ("driver", 70), ("worker", 75)])
def test_a_bug_shows_its_traceback_in_the_log_and_ends_in_a_sentence(monkeypatch, tmp_path, capsys, part, code):
    assert ended(KeyError("x"), monkeypatch, tmp_path, part=part) == code
    line, sentence = capsys.readouterr().err.splitlines()
    assert json.loads(line)["level"] == "ERROR"
    assert sentence == "KeyError: 'x'"


@pytest.mark.parametrize(("argv", "got"), [([], "nothing"), (["agnet"], "'agnet'"), (["agent", "x"], "'agent x'")])
def test_a_wrong_call_is_a_sentence(argv, got, capsys):
    assert door.main(argv) == 64
    assert capsys.readouterr().err == f"python -m rlinf_worker: got {got}, wanted one of agent, driver, worker\n"


@pytest.mark.usefixtures("quiet_root")
def test_a_log_line_says_who_and_what():
    stream = io.StringIO()
    environ = {"RLINF_JOB_NAME": "math", "RLINF_POD_NAME": "p-0", "RLINF_ATTEMPT": "1"}
    worker = {**environ, "RLINF_WORKER_ID": "env/3", "RLINF_WORKER_ATTEMPT": "4"}
    logs.configure("worker", worker, stream=stream)
    logging.getLogger("rlinf_worker.x").info("step %s", "done", extra={"step": 7, "pod": "other"})
    line = json.loads(stream.getvalue())
    assert line["time"].endswith("Z")
    del line["time"]
    assert line == {
        "level": "INFO", "logger": "rlinf_worker.x", "message": "step done", "step": 7,
        "part": "worker", "job": "math", "pod": "p-0", "worker": "env/3", "attempt": 4,
    }  # fmt: skip
    assert logs.who("agent", environ)["attempt"] == 1


@pytest.mark.usefixtures("quiet_root")
def test_a_level_that_does_not_exist_is_said_and_info_is_used():
    stream = io.StringIO()
    logs.configure("agent", {"RLINF_LOG_LEVEL": "loud"}, stream=stream)
    said = json.loads(stream.getvalue())
    assert (said["message"], said["got"]) == ("RLINF_LOG_LEVEL is none that exists, INFO is used", "loud")
    assert logging.getLogger().level == logging.INFO


def test_the_door_of_a_worker_imports_neither_grpc_nor_pydantic():
    code = "import sys, rlinf_worker.__main__, rlinf_worker.agent.leash; print([m for m in ('grpc', 'pydantic') if m in sys.modules])"  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_part_that_is_ended_while_it_imports_says_so_by_its_exit_code(tmp_path):
    """By a handler and not by the signal's default, which the first process of a container does not have."""
    slow = tmp_path / "grpc"
    slow.mkdir()
    (slow / "__init__.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    with subprocess.Popen(
        [sys.executable, "-m", "rlinf_worker", "driver"], env=environ, stdout=subprocess.PIPE, text=True
    ) as part:
        try:
            assert part.stdout is not None
            assert part.stdout.readline() == "importing\n"
            part.terminate()
            assert part.wait(timeout=10) == 143
        finally:
            part.kill()
