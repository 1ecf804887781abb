"""What ties processes to their agent: death with the parent, adoption, and the watchdog that ends what is marked."""

import ctypes
import faulthandler
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlinf_api import names
from rlinf_api.errors import InvariantBroken, Stale
from rlinf_worker.agent import leash, watchdog


class Libc:
    """Plays prctl."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, answer: int = 0) -> None:
        self.calls: list[tuple[int, ...]] = []
        self._answer = answer
        monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: self if name is None and use_errno else None)

    def prctl(self, *args: int) -> int:
        self.calls.append(args)
        return self._answer


@pytest.fixture
def faults(monkeypatch):
    said: list[Any] = []
    monkeypatch.setattr(faulthandler, "enable", lambda: said.append("enable"))
    monkeypatch.setattr(faulthandler, "register", lambda number, *, all_threads: said.append((number, all_threads)))
    return said


def test_a_worker_dies_with_its_agent_and_shows_its_stacks_when_asked(monkeypatch, faults):
    libc = Libc(monkeypatch)
    leash.put_on({names.ENV_AGENT_PID: str(os.getppid())})
    assert libc.calls == [(1, signal.SIGKILL, 0, 0, 0)]
    assert faults == ["enable", (signal.SIGUSR1, True)]


def test_one_that_a_person_started_stays_free(monkeypatch, faults):
    libc = Libc(monkeypatch)
    leash.put_on({})
    assert (libc.calls, len(faults)) == ([], 2)


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize(("environ", "who"), [({names.ENV_WORKER_ID: "env/0"}, "env/0"), ({}, "?")])
def test_one_whose_agent_died_meanwhile_ends(monkeypatch, environ, who):
    Libc(monkeypatch)
    with pytest.raises(Stale) as error:
        leash.put_on({names.ENV_AGENT_PID: "1234567", **environ})
    assert str(error.value) == f"worker {who} has lost its agent: got parent {os.getppid()}, wanted agent 1234567"


def test_an_agent_adopts_what_its_workers_leave(monkeypatch):
    libc = Libc(monkeypatch)
    leash.adopt_orphans()
    assert libc.calls == [(36, 1, 0, 0, 0)]


def test_a_kernel_that_cannot_is_named(monkeypatch):
    Libc(monkeypatch, answer=-1)
    with pytest.raises(InvariantBroken, match=r"^prctl\(36, 1\) failed: got .+, wanted Linux$"):
        leash.adopt_orphans()


def test_where_the_agent_is_the_first_process_the_kernel_does_the_watchdogs_work(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "posix_spawn", None)
    assert leash.start_watchdog("m") is None


def test_a_watchdog_has_a_session_of_its_own_and_knows_whom_it_watches(monkeypatch):
    calls: list[Any] = []

    def spawn(*args: Any, **more: Any) -> int:
        calls.append((args, more))
        return 77

    monkeypatch.setattr(os, "posix_spawn", spawn)
    assert leash.start_watchdog("m-1") == 77
    script = str(Path(leash.__file__).with_name("watchdog.py"))
    argv = [sys.executable, "-I", "-S", script, str(os.getpid()), "RLINF_AGENT_MARK=m-1"]
    assert calls == [((sys.executable, argv, {}), {"setsid": True, "setsigmask": []})]


# --- the watchdog -----------------------------------------------------------------------------------------------------
def sleeper(mark: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "60"], env={**os.environ, "RLINF_AGENT_MARK": mark})


def test_what_is_marked_is_what_was_started_with_the_mark_and_nothing_like_it():
    with sleeper("m-1") as one, sleeper("m-12") as other:
        try:
            deadline = time.monotonic() + 20
            while (found := watchdog.marked(b"RLINF_AGENT_MARK=m-1")) != [one.pid] and time.monotonic() < deadline:
                pass  # until it has begun
            assert found == [one.pid]
        finally:
            one.kill()
            other.kill()


def test_itself_is_never_marked(monkeypatch):
    own = Path("/proc/self/environ").read_bytes().split(b"\0")[0]
    assert os.getpid() not in watchdog.marked(own)


class Machine:
    """Plays the agent, the kernel and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, parent: int = 50, alive: bool = True) -> None:
        self.said: list[Any] = []
        self.rounds: list[list[int]] = []
        self.gone: set[int] = set()
        self.now, self._alive = 0.0, alive
        monkeypatch.setattr(os, "pidfd_open", self._open)
        monkeypatch.setattr(os, "getppid", lambda: parent)
        monkeypatch.setattr(os, "kill", self._kill)
        monkeypatch.setattr(select, "select", lambda *fds: self.said.append(("waits", *fds)))
        monkeypatch.setattr(watchdog, "marked", lambda mark: self.rounds.pop(0) if self.rounds else [])
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _open(self, pid: int) -> int:
        if not self._alive:
            raise ProcessLookupError
        return pid + 1000

    def _kill(self, pid: int, number: int) -> None:
        if pid in self.gone:
            raise ProcessLookupError
        self.said.append((pid, number))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


def test_it_waits_for_the_agents_end_and_kills_until_nothing_is_left(monkeypatch):
    machine = Machine(monkeypatch)
    machine.rounds, machine.gone = [[7, 8, 9], [9]], {7}
    watchdog.main(50, b"m")
    kill = signal.SIGKILL
    assert machine.said == [("waits", [1050], [], []), (8, kill), (9, kill), (9, kill)]


@pytest.mark.parametrize("machine_of", [{"parent": 1}, {"alive": False}])
def test_an_agent_that_is_gone_already_is_not_waited_for(monkeypatch, machine_of):
    machine = Machine(monkeypatch, **machine_of)
    machine.rounds = [[7]]
    watchdog.main(50, b"m")
    assert machine.said == [(7, signal.SIGKILL)]


def test_one_that_starts_others_as_fast_as_they_are_killed_does_not_keep_it(monkeypatch):
    machine = Machine(monkeypatch)
    machine.rounds = [[7]] * 5000
    watchdog.main(50, b"m")
    assert watchdog.LIMIT_S <= machine.now < watchdog.LIMIT_S + 0.1
