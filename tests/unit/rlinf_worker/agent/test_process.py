"""A worker's process and its account: what it printed, how it ended in words, and what is said of its stacks."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rlinf_api import names
from rlinf_api.report import Failure
from rlinf_worker import last_words, proctree
from rlinf_worker.agent import process as processes
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.lifecycle import SayExited
from rlinf_worker.agent.process import Process, account, how_it_ended, mark_of
from rlinf_worker.agent.worker_log import WorkerLog
from rlinf_worker.bounded_file import BoundedFile
from rlinf_worker.proctree import ProcessEntry

IDENTITY = PodIdentity(
    job_uid="j", pod="math-sim-0", pod_ip="", node="node-5", pool="sim", ordinal=0, attempt=1, slots=1,
    driver_address="", run_dir="", tls_dir="", output_dir="", worker_log_dir="", termination_log="",
)  # fmt: skip
WORDS = Failure(reason="UserError", message="no such environment")


def log_of(folder: Path, name: str = "log") -> WorkerLog:
    return WorkerLog(BoundedFile(folder / name, limit=1 << 20), keep=2048)


def made(folder: Path, **fields: Any) -> Process:
    """A process whose folder is there; what it is is a test's to say."""
    own = folder / "own"
    own.mkdir(exist_ok=True)
    known = {"pid": 7, "started": 100, "mark": b"", "folder": own, "log": log_of(folder), "pipes": {}, "oom_kills": 0}
    return Process(**{**known, **fields})


def said(exit_code: int, *, asked: bool = False, words: Failure | None = None, **more: Any) -> SayExited:
    known: dict[str, Any] = {"hung": "", "survivors": ()}
    return SayExited(1, exit_code, asked, words=words, **{**known, **more})


def told(exited: SayExited, ended: Process | None = None, *, limit_bytes: int = 2000) -> Failure:
    return account("env/3", exited, ended, identity=IDENTITY, limit_bytes=limit_bytes)


def wanted(exit_code: int, reason: str, message: str) -> Failure:
    return Failure(
        role="env", worker=3, pod="math-sim-0", node="node-5", exit_code=exit_code, reason=reason, message=message
    )


@pytest.mark.parametrize(
    ("exited", "account_of_it"),
    [
        (said(0), wanted(0, "Finished", "")),
        (said(0, words=WORDS), wanted(0, "UserError", "no such environment")),
        (said(64, words=WORDS), wanted(64, "UserError", "no such environment")),
        (said(3), wanted(3, "ExitCode", "worker env/3 exited with code 3")),
        (said(139), wanted(139, "Killed", "worker env/3 was killed by signal 11 (SIGSEGV)")),
        (said(137, words=WORDS, hung="no mark"), wanted(137, "Hung", "worker env/3 hung and was killed: no mark")),
        (said(0, words=WORDS, hung="no mark", failed_to_start="no disk"), wanted(75, "SpawnFailed", "no disk")),
        (said(3, survivors=("a (pid 1) is dead", "b")),
         wanted(3, "ExitCode", "worker env/3 exited with code 3; still there: a (pid 1) is dead, b")),
    ],
)  # fmt: skip
def test_the_best_account_of_an_end_is_given(exited, account_of_it):
    assert told(exited) == account_of_it


def test_an_end_that_nobody_asked_for_comes_with_the_last_lines(tmp_path):
    for asked, wanted_end in ((False, "; its last lines: Bus error"), (True, "")):
        process = made(tmp_path)
        process.log.err(b"Bus error\n")
        assert told(said(3, asked=asked), process).message == "worker env/3 exited with code 3" + wanted_end


def test_words_that_a_worker_left_in_its_file_count_where_it_said_none_and_its_folder_goes(tmp_path):
    other = Failure(reason="Other", message="said")
    for words, reason in ((None, "UserError"), (other, "Other")):
        process = made(tmp_path)
        (process.folder / "last_words.json").write_bytes(last_words.encode(WORDS))
        assert told(said(64, words=words), process).reason == reason
        assert not process.folder.exists()


def test_a_long_account_loses_its_middle(tmp_path):
    message = told(said(1, words=Failure(reason="R", message="a" * 50 + "b" * 50)), limit_bytes=40).message
    assert (len(message), message[:10], message[-10:]) == (40, "a" * 10, "b" * 10)


@pytest.mark.parametrize(
    ("before", "after", "exit_code", "asked", "is_memory"),
    [(2, 3, 137, False, True), (2, 2, 137, False, False), (3, 2, 137, False, False), (2, 3, 137, True, False),
     (2, 3, 139, False, False), (2, 3, 9, False, False)],
)  # fmt: skip
def test_a_kill_by_the_kernel_for_memory_is_told_from_others(
    tmp_path, monkeypatch, before, after, exit_code, asked, is_memory
):
    monkeypatch.setattr(proctree, "oom_kills", lambda: after)
    failure = told(said(exit_code, asked=asked), made(tmp_path, oom_kills=before))
    assert (failure.reason == "OOMKilled") is is_memory
    ends = "; by the kernel, most likely: the pod reached its memory limit; raise it, or make the role smaller"
    assert failure.message.endswith(ends) is is_memory
    assert failure.exit_code == exit_code


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, ("ExitCode", "exited with code 1")),
        (128, ("ExitCode", "exited with code 128")),
        (129, ("Killed", "was killed by signal 1 (SIGHUP)")),
        (128 + 64, ("Killed", "was killed by signal 64 (SIGRTMAX)")),
        (128 + 65, ("ExitCode", "exited with code 193")),
        (128 + 40, ("Killed", "was killed by signal 40 (no name)")),
    ],
)
def test_a_number_says_how_it_ended(code, words):
    assert how_it_ended(code) == words


def test_what_a_worker_starts_is_found_by_its_name():
    assert mark_of("env/3") == b"RLINF_WORKER_ID=env/3"


# --- what it prints ---------------------------------------------------------------------------------------------------
async def piped(folder: Path) -> tuple[Process, int, int]:
    """A process that is listened to, and the ends of its stdout and stderr to write to."""
    (out, out_write), (err, err_write) = os.pipe(), os.pipe()
    log = log_of(folder)
    process = made(folder, log=log, pipes={out: log.out, err: log.err})
    process.listen()
    return process, out_write, err_write


async def test_both_streams_are_kept_and_only_stderr_is_its_last_word(tmp_path):
    process, out, err = await piped(tmp_path)
    os.write(out, b"to stdout\n")
    os.write(err, b"to stderr\n")
    async with asyncio.timeout(10):
        while (tmp_path / "log").stat().st_size < 20 if (tmp_path / "log").exists() else True:
            await asyncio.sleep(0)
    os.close(out)
    os.close(err)
    async with asyncio.timeout(10):
        while process.pipes:
            await asyncio.sleep(0)
    assert process.close() == ("to stderr", None)


async def test_what_a_dead_worker_left_in_its_pipes_is_read_even_where_a_child_holds_them(tmp_path):
    process, out, err = await piped(tmp_path)
    os.write(err, b"x" * 1000 + b"\nthe end\n")
    os.write(out, b"bye\n")
    os.close(out)
    tail, left = process.close()
    assert (tail.endswith("\nthe end"), left, process.pipes) == (True, None, {})
    assert b"bye\n" in (tmp_path / "log").read_bytes()
    os.close(err)


async def test_a_spare_that_becomes_a_worker_writes_to_that_ones_log_from_then_on(tmp_path):
    process, out, err = await piped(tmp_path)
    os.write(err, b"warm\n")
    async with asyncio.timeout(10):
        while process.log.tail() != "warm":
            await asyncio.sleep(0)
    process.become("env/3", log_of(tmp_path, "its"))
    assert process.mark == mark_of("env/3")
    os.write(out, b"to stdout\n")
    os.write(err, b"at work\n")
    os.close(out)
    os.close(err)
    assert process.close() == ("at work", None)
    assert (tmp_path / "log").read_bytes() == b"warm\n"
    assert sorted((tmp_path / "its").read_text().splitlines()) == ["at work", "to stdout"]


# --- the tree and its stacks ------------------------------------------------------------------------------------------
class Kernel:
    """Plays /proc, signals and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entry: ProcessEntry | None = entry()
        self.left = [[entry()], [entry(), entry(8)], [entry(8)]]
        self.sent: list[tuple[int, int]] = []
        self.answers: list[bytes] = []
        self.process: Process | None = None
        self.now = 10.0
        monkeypatch.setattr(proctree, "read", lambda pid: self.entry)
        monkeypatch.setattr(proctree, "tree", lambda pid, **_: self.left.pop(0) if self.left else [])
        monkeypatch.setattr(proctree, "send", self._send)
        monkeypatch.setattr(asyncio, "sleep", self._sleep)
        monkeypatch.setattr(processes, "_QUIET_S", 0.25)

    def _send(self, member: ProcessEntry, number: int) -> bool:
        self.sent.append((member.pid, number))
        return True

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.answers and self.process is not None:
            self.process.log.err(self.answers.pop(0))


def entry(pid: int = 7, *, state: str = "S", started: int = 100) -> ProcessEntry:
    return ProcessEntry(pid=pid, ppid=1, session=7, state=state, started=started, name="python")


@pytest.fixture
def kernel(monkeypatch):
    return Kernel(monkeypatch)


@pytest.mark.parametrize(
    ("found", "is_it"),
    [(entry(), True), (None, False), (entry(started=101), False), (entry(state="Z"), False), (entry(state="T"), True)],
)
def test_the_leader_is_the_process_that_was_started_while_it_lives(tmp_path, kernel, found, is_it):
    kernel.entry = found
    assert made(tmp_path).leader() == (found if is_it else None)


async def test_a_tree_is_killed_in_rounds_until_nothing_of_it_is_left(tmp_path, kernel):
    assert await made(tmp_path).kill(timeout_s=1.0, clock=lambda: kernel.now) == []
    kill = signal.SIGKILL
    assert kernel.sent == [(7, kill), (7, kill), (8, kill), (8, kill)]
    assert kernel.now == pytest.approx(10.0 + 0.002 + 0.004 + 0.008)


async def test_what_does_not_die_is_told_after_the_deadline(tmp_path, kernel):
    kernel.left = [[entry()]] * 1000
    assert await made(tmp_path).kill(timeout_s=1.0, clock=lambda: kernel.now) == [entry()]
    assert 11.0 <= kernel.now <= 11.05, "pauses grow to a twentieth of a second"
    assert 20 < len(kernel.sent) < 30


async def test_a_stopped_or_a_dead_process_is_not_asked(tmp_path, kernel):
    stopped = kernel.entry = entry(state="T")
    said = await made(tmp_path).stacks(timeout_s=1.0, clock=lambda: kernel.now)
    assert said == f"process 7 is {stopped.doing()}; it cannot say where it is"
    kernel.entry = None
    assert await made(tmp_path).stacks(timeout_s=1.0, clock=lambda: kernel.now) == "the process is gone"
    assert (kernel.sent, kernel.now) == ([], 10.0)


async def test_stacks_are_what_comes_on_stderr_until_it_is_quiet(tmp_path, kernel):
    kernel.process = process = made(tmp_path)
    process.log.err(b"before")
    kernel.answers = [b"", b"File a", b", line 3\xff"]
    assert await process.stacks(timeout_s=60.0, clock=lambda: kernel.now) == "File a, line 3\ufffd"
    assert kernel.sent == [(7, signal.SIGUSR1)]
    assert kernel.now == 11.0, "one look after the last word"
    process.log.err(b"after")


async def test_one_that_does_not_answer_is_said_to_do_what_it_does(tmp_path, kernel):
    said = await made(tmp_path).stacks(timeout_s=1.5, clock=lambda: kernel.now)
    assert said == "no answer to SIGUSR1 within 1.5 s; process 7 is sleeping"
    assert kernel.now == 11.5


def test_the_exit_code_of_one_that_could_not_begin_asks_for_another_try():
    assert told(said(0, failed_to_start="no disk")).exit_code == names.EXIT_RETRYABLE
