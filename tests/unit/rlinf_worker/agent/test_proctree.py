"""Processes as /proc shows them."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from rlinf_worker import proctree


def test_a_name_with_parentheses_and_spaces_is_read(tmp_path):
    script = tmp_path / "a) b (c"
    script.symlink_to("/bin/sleep")
    with subprocess.Popen([script, "60"]) as child:
        try:
            found = proctree.read(child.pid)
            assert found is not None
            assert (found.name, found.ppid, found.dead) == ("a) b (c", os.getpid(), False)
        finally:
            child.kill()


def test_a_stopped_process_is_said_to_be_stopped():
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            os.kill(child.pid, signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            found = proctree.read(child.pid)
            assert found is not None
            assert found.stopped
            assert "SIGCONT continues it" in found.doing()
        finally:
            child.kill()


def test_a_signal_spares_a_later_process_with_the_same_pid():
    with subprocess.Popen(["sleep", "60"]) as child:
        found = proctree.read(child.pid)
        assert found is not None
        assert not proctree.send(replace(found, started=found.started - 1), signal.SIGKILL)
        assert child.poll() is None
        assert proctree.send(found, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert not proctree.send(found, signal.SIGKILL)


def test_a_process_that_ends_between_the_look_and_the_signal_was_not_signalled(monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as child:
        found = proctree.read(child.pid)
        assert found is not None

        def ended(pid):
            child.kill()
            child.wait()
            return found

        monkeypatch.setattr(proctree, "read", ended)
        assert proctree.send(found, signal.SIGTERM) is False
    assert child.returncode == -signal.SIGKILL


def test_a_tree_is_its_descendants_and_nobody_elses():
    code = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    with (
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as child,
        subprocess.Popen(["sleep", "60"]) as other,
    ):
        try:
            leader = proctree.read(child.pid)
            assert leader is not None
            while len(found := proctree.tree(child.pid, started=leader.started, mark=b"X=1", reaper=os.getpid())) < 2:
                pass
            assert other.pid not in {process.pid for process in found}
            for process in found:
                proctree.send(process, signal.SIGKILL)
        finally:
            child.kill()
            other.kill()


@pytest.mark.parametrize("file", ["memory.events", "memory.oom_control"])  # cgroup v2, v1
@pytest.mark.parametrize(("text", "kills"), [("low 0\noom 2\noom_kill 3\n", 3), ("low 0\n", 0), (None, 0)])
def test_kills_for_memory_are_counted_where_the_kernel_says_so(tmp_path, monkeypatch, file, text, kills):
    if text is not None:
        (tmp_path / file).write_text(text)
    both = tuple(str(tmp_path / name) for name in ("memory.events", "memory.oom_control"))
    monkeypatch.setattr(proctree, "MEMORY_EVENTS", both)
    assert proctree.oom_kills() == kills


def test_nothing_is_not_there():
    assert proctree.read(2**22 + 1) is None
    assert proctree.environment(2**22 + 1) == []
