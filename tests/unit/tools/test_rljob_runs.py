"""How tests look after the processes of an `rljob run`: some end while they are looked at."""

import subprocess
import sys

import psutil
import pytest

from tests.rljob_runs import Run


class Ending:
    """A process that is there when it is found, and gone when something is asked of it."""

    def __init__(self, pid, *, at):
        self.pid, self._at = pid, at

    def is_running(self):
        return True

    def status(self):
        if self._at == "status":
            raise psutil.NoSuchProcess(self.pid)
        return psutil.STATUS_SLEEPING

    def kill(self):
        self._at = "status"
        raise psutil.NoSuchProcess(self.pid)


@pytest.fixture
def run():
    """One whose rljob has ended."""
    made = object.__new__(Run)
    made.process = subprocess.Popen([sys.executable, "-c", ""])
    made.process.wait(timeout=60)
    return made


def test_a_process_that_ends_while_it_is_looked_at_is_not_left(run):
    run._known = {7: Ending(7, at="status"), 8: Ending(8, at="kill")}
    assert run.left() == [8]


def test_a_process_that_ends_before_it_is_killed_fails_no_test(run, monkeypatch):
    run._known = {8: Ending(8, at="kill")}
    monkeypatch.setattr("tests.rljob_runs.END_S", 0.0)
    with run:
        pass
    assert run.left() == []
