"""`python -m rlinf_worker`: what a failure at the top becomes, and how lines of the log look."""

import importlib
import inspect
import io
import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rlinf_api.errors import InvariantBroken, UserError, WorkerUnreachable
from rlinf_worker import __main__ as door
from rlinf_worker import logs
from rlinf_worker.agent import leash


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
    raised_at = inspect.getsourcelines(ended)[1] + 2
    assert sentence == f"KeyError: 'x' ({__file__}, line {raised_at})"


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


LINE = {"level": "WARNING", "logger": "a", "message": "slow"}


@pytest.mark.parametrize(
    ("lines", "people_read"),
    [
        ([LINE], "warning: slow"),
        ([LINE | {"error": "why", "time": "t"}], "warning: slow: why"),
        ([LINE | {"level": level} for level in ("DEBUG", "INFO", "ERROR")], "error: slow"),
        ([{k: v for k, v in LINE.items() if k != "logger"}], '{"level": "WARNING", "message": "slow"}'),
        (["  printed", "", LINE, "{half"], "printed\n\nwarning: slow\n{half"),
        (["[1]", " " + json.dumps(LINE)], '[1]\n {"level": "WARNING", "logger": "a", "message": "slow"}'),
    ],
)
def test_of_a_log_people_read_what_it_warns_of_and_all_that_was_printed(lines, people_read):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    assert logs.readable(text) == people_read


@pytest.mark.parametrize(
    ("part", "environ", "fields"),
    [
        ("driver", {}, {}),
        ("driver", {"RLINF_ATTEMPT": "2", "RLINF_JOB_NAME": "math"}, {"attempt": 2, "job": "math"}),
        ("agent", {"RLINF_ATTEMPT": "2", "RLINF_WORKER_ATTEMPT": "5"}, {"attempt": 2}),
        ("worker", {"RLINF_ATTEMPT": "2", "RLINF_WORKER_ATTEMPT": "5"}, {"attempt": 5}),
        ("worker", {"RLINF_WORKER_ATTEMPT": "first", "RLINF_POD_NAME": ""}, {}),
    ],
)
def test_a_process_says_of_itself_what_it_knows(part, environ, fields):
    assert logs.who(part, environ) == {"part": part, **fields}


@pytest.mark.usefixtures("quiet_root")
@pytest.mark.parametrize(
    ("error", "level"),
    [
        (UserError("x"), "DEBUG"),
        (InvariantBroken("x"), "ERROR"),
        (WorkerUnreachable("x"), "DEBUG"),
        (ValueError("x"), "ERROR"),
    ],
)
@pytest.mark.parametrize("cause", [None, OSError(), ImportError(), UserError("y"), ZeroDivisionError()])
def test_a_stack_is_shown_to_whoever_can_mend_it(monkeypatch, tmp_path, capsys, error, level, cause):
    """Of a peer that is away nobody; of what the user's code raised, the user."""
    error.__cause__ = cause
    ended(error, monkeypatch, tmp_path, level="DEBUG")
    line, _ = capsys.readouterr().err.splitlines()
    theirs = isinstance(cause, ZeroDivisionError) and not isinstance(error, WorkerUnreachable)
    assert json.loads(line)["level"] == ("ERROR" if theirs else level)
    assert json.loads(line)["message"] == f"agent ended by {type(error).__name__}"


@pytest.mark.usefixtures("quiet_root")
@pytest.mark.parametrize("part", ["agent", "driver", "worker"])
def test_each_part_ends_by_its_own_code_and_by_ctrl_c_as_one_that_was_told_to(monkeypatch, part):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setitem(door.RUN, part, lambda: 7)
    assert door.main([part]) == 7
    monkeypatch.setitem(door.RUN, part, interrupted)
    assert door.main([part]) == 143


@pytest.mark.usefixtures("quiet_root")
def test_each_word_starts_that_part_and_a_worker_is_tied_to_its_agent_first(monkeypatch):
    did: list[str] = []

    def runs(name):
        def run():
            did.append(name)
            return len(did)

        return run

    for name in ("agent", "driver", "runtime"):
        package = importlib.import_module(f"rlinf_worker.{name}")
        monkeypatch.setattr(package, "main", SimpleNamespace(run=runs(name)), raising=False)
    monkeypatch.setattr(leash, "put_on", lambda environ: did.append("leash"))
    assert [door.main([part]) for part in ("agent", "driver", "worker")] == [1, 2, 4]
    assert did == ["agent", "driver", "leash", "runtime"]
