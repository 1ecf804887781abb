"""Starting a process in a machine: what goes wrong with it is one sentence."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.testcluster import commands, machine, reaper
from tools.testcluster.errors import CommandFailed, StartFailed
from tools.testcluster.layout import Paths
from tools.testcluster.machine import Machine, Process
from tools.testcluster.waiting import until


@pytest.fixture
def hub(tmp_path: Path) -> Machine:
    return Machine("hub", Paths(name="dev", root=tmp_path), programs=tmp_path)


def test_a_start_that_hangs_is_told(hub: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "BOOT_TIMEOUT_S", 0.1)
    with pytest.raises(StartFailed, match=r"etcd could not be started in 0\.1 s"):
        hub._launch(["sleep", "60"], {"PATH": machine.SYSTEM_PATH}, name="etcd")


def test_a_machine_whose_first_process_ends_is_not_waited_for(hub: Machine):
    """As without a free loop device; the stand-in for `unshare` stays as long as its child."""
    (hub.paths.logs).mkdir()
    (hub.paths.logs / "hub.log").write_text("mount: no free loop device\n")
    started = time.monotonic()
    with pytest.raises(StartFailed, match="hub ended before it had started; its log ends:\nmount: no free loop device"):
        launch(hub, "exec >&- 2>&-; sleep 0.2; exit 3")
    assert time.monotonic() - started < machine.BOOT_TIMEOUT_S / 2
    process = launch(hub, "exec >&- 2>&-; sleep 0.2; echo $$ >$PID_FILE; exec sleep 60")
    assert process.alive
    process.end()


def launch(hub: Machine, program: str) -> Process:
    words = ["setsid", "--fork", "sh", "-c", f"sh -c '{program}'; exit"]
    told = {"PATH": machine.SYSTEM_PATH, "PID_FILE": str(hub.paths.processes / ".hub.pid")}
    return hub._launch(words, told, name="hub", guarded=True)


def test_a_process_whose_first_thread_has_ended_before_the_others_is_not_over():
    """As an API server under SIGKILL on busy cores: its port was still bound when the next one was started."""
    program = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("x", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit: of this thread alone
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        process = Process.of_pid("apiserver", child.pid)
        assert child.stdout.readline() == "x\n"
        stat = Path(f"/proc/{child.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", what="its first thread's end", timeout_s=5)
        assert process.alive
        assert process.end()
        assert not process.alive


@pytest.mark.parametrize(("program", "why"), [("exit 3", "exit status 3"), ("exec sleep 60", "timed out")])
def test_a_reaper_that_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str):
    (tmp_path / "setsid").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "setsid").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{machine.SYSTEM_PATH}")
    monkeypatch.setattr(reaper, "START_TIMEOUT_S", 0.2)
    with pytest.raises(StartFailed, match=f"the reaper of dev could not be started: .*{why}"):
        reaper.start(Paths(name="dev", root=tmp_path / "dev"), 1)


def test_a_command_that_is_overdue_in_a_machine_ends_there_too(tmp_path: Path):
    """`nsenter` that is killed leaves its child alive: the stand-in starts it as one, and waits."""
    pid = tmp_path / "pid"
    within = ["sh", "-c", '"$@" & wait $!', "sh"]
    with pytest.raises(CommandFailed, match=r"sleep 60.* was not done after 0\.3 s and was ended"):
        commands.run(["sh", "-c", f"echo $$ >{pid}; exec sleep 60"], timeout_s=0.3, within=within)
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_a_command_that_ends_in_time_in_a_machine_says_what_it_said():
    assert commands.run(["cat"], stdin="word", within=["env"]) == "word"
    with pytest.raises(CommandFailed, match=r"`env timeout .* ended with 3: it said nothing"):
        commands.run(["sh", "-c", "exit 3"], within=["env"])
    assert commands.says(["sleep", "60"], timeout_s=0.1, within=["env"]) == ""
