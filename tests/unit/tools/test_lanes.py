"""Lanes of `.ci/run`: beside each other, told line by line, one verdict, and an end that leaves nothing running."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
LANES = [sys.executable, str(ROOT / "tools" / "lanes.py")]
LIMIT_S = 50.0
PASSES = "===== 3 passed in 1.00s ====="
FAILS = "===== 1 failed, 2 passed, 1 warning in 71.50s (0:01:11) ====="


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def made(name, text):
        (tmp_path / name).write_text(text)
        return f"sh {name}"

    return made


def run(*lanes):
    return subprocess.run([*LANES, *lanes], capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_all_lanes_pass_and_both_summaries_come_last(script):
    one = script("one", f"echo '{PASSES}'")
    two = script("two", "echo '===== 2 passed, 1 skipped in 0.50s ====='")
    done = run(f"tests={one}", f"cluster={two}")
    assert done.returncode == 0, done.stdout
    last = done.stdout.rpartition("\n\n")[2].splitlines()
    assert re.fullmatch(r"tests   \| sh one: passed after \d+ s", last[0])
    assert last[1] == f"tests   | {PASSES}"
    assert last[3] == "cluster | ===== 2 passed, 1 skipped in 0.50s ====="


def test_a_lane_that_fails_fails_the_whole_and_its_failed_tests_are_named_again(script):
    fails = script("fails", f"echo noise; echo 'FAILED tests/a.py::test_b - assert 0'; echo '{FAILS}'; exit 2")
    done = run(f"tests={fails}", f"cluster={script('passes', f'echo {PASSES!r}')}")
    assert done.returncode == 1
    _, again, last = done.stdout.rsplit("\n\n", 2)
    assert again.splitlines()[0].startswith(
        "tests: sh fails FAILED with exit status 2 after 0 s; the whole of it is in"
    )
    assert again.splitlines()[1:] == ["tests   | FAILED tests/a.py::test_b - assert 0"]
    assert f"tests   | {FAILS}" in last
    assert f"cluster | {PASSES}" in last


def test_what_fails_before_a_test_ran_shows_its_last_lines(script):
    done = run(f"tests={script('lint', 'for n in $(seq 60); do echo line $n; done; exit 1')}")
    again = done.stdout.rsplit("\n\n", 2)[1].splitlines()[1:]
    assert again == [f"tests   | line {n}" for n in range(36, 61)]


def test_a_program_that_is_not_there_fails_its_lane_in_a_sentence(script):
    done = run("tests=no-such-program at all", f"cluster={script('passes', 'true')}")
    assert done.returncode == 1
    assert "no-such-program at all cannot be started: [Errno 2] No such file" in done.stdout


def test_commands_of_a_lane_run_in_order_and_go_on_after_a_failure(script):
    first, second = script("first", "sleep 0.3; echo 1; exit 3"), script("second", "echo 2")
    done = run(f"tests={first}", f"tests={second}")
    assert done.returncode == 1
    said = [line for line in done.stdout.partition("\n\n")[0].splitlines() if line in ("tests   | 1", "tests   | 2")]
    assert said == ["tests   | 1", "tests   | 2"]
    assert Path("build/ci/tests.log").read_text() == "1\n2\n"


def test_lanes_run_beside_each_other_and_are_heard_at_once(script):
    """Each waits for the other, and the last for a reader who has read it."""
    one = script("one", "touch 1; until [ -e 2 ]; do sleep 0.05; done; echo met; until [ -e 3 ]; do sleep 0.05; done")
    two = script("two", "touch 2; until [ -e 1 ]; do sleep 0.05; done")
    words = [*LANES, f"tests={one}", f"cluster={two}"]
    with subprocess.Popen(["timeout", "40", *words], stdout=subprocess.PIPE, text=True) as lanes:
        assert lanes.stdout is not None
        for line in lanes.stdout:
            if line == "tests   | met\n":
                Path("3").touch()
    assert lanes.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stubborn", [False, True], ids=["in their own time", "killed"])
def test_a_signal_ends_every_process_of_both_lanes(script, number, stubborn):
    """Who cleans up is waited for, and says so; who does not end is killed, in a session of its own too."""
    how = "trap '' INT TERM" if stubborn else "trap 'sleep 0.3; echo cleaned up; exit 1' INT"
    below = (
        "setsid sh -c \"trap '' INT TERM; echo \\$\\$ >$0.below; while :; do sleep 0.1; done\" &" if stubborn else ""
    )
    text = f"{how}\n{below}\necho $$ >$0.pid\nwhile :; do sleep 0.1; done\n"
    lanes = [f"{name}={script(name, text)}" for name in ("one", "two")]
    files = [Path(f"{name}.{what}") for name in ("one", "two") for what in ("pid", *(["below"] if stubborn else []))]
    words = [*LANES, "--patience-s", "1" if stubborn else "30", *lanes]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        deadline = time.monotonic() + LIMIT_S / 2
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline, "the lanes did not start"
            time.sleep(0.05)
        pids = [int(file.read_text()) for file in files]
        began = time.monotonic()
        started.send_signal(number)
        out, err = started.communicate(timeout=LIMIT_S)
    assert started.returncode == 128 + number
    assert f"lanes: ended by {number.name}" in err
    assert out.partition("\n\n")[0].count("cleaned up") == (0 if stubborn else 2)
    assert time.monotonic() - began < 25.0
    assert [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []


def test_what_a_lane_has_not_begun_when_it_is_ended_is_not_begun(script):
    first = script("first", "touch begun; sleep 30")
    words = [*LANES, f"tests={first}", f"tests={script('second', 'touch wrong')}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as started:
        while not Path("begun").exists():
            time.sleep(0.05)
        os.kill(started.pid, signal.SIGINT)
        out, _ = started.communicate(timeout=LIMIT_S)
    assert "sh second: was not run" in out
    assert not Path("wrong").exists()


def test_lanes_end_when_nobody_reads_them(script):
    chatty = script("chatty", "echo $$ >pid; while :; do echo more; sleep 0.05; done")
    with subprocess.Popen([*LANES, "--patience-s", "1", f"tests={chatty}"], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        started.stdout.close()
        assert started.wait(timeout=LIMIT_S) == 128 + signal.SIGPIPE
    assert not psutil.pid_exists(int(Path("pid").read_text()))


@pytest.mark.parametrize("lane", ["tests", "=make test", "te sts=make", "tests= "])
def test_a_lane_without_a_name_or_a_command_is_refused(script, lane):
    done = run(lane)
    assert done.returncode == 2
    assert "is no lane with a command; write it as tests='make test'" in done.stderr
