"""A machine of the cluster, the hub or a node: a PID 1 in pid, mount, network and uts namespaces of its own.

Everything that is started in it ends with its PID 1: the kernel sees to that, and frees its mounts, its network
devices and its loop device. The nodes' pid namespaces lie inside the hub's, so ending the hub ends the cluster. Inside,
/run is empty at start, and a node's /var/lib and /var/log lie on a disk of its own (a sparse file), so that kubelet and
containerd run with their usual paths and two of them never meet.

`Cluster` makes machines and starts daemons in them; `Faults` kills them.

    started by           what                                             ended by
    Machine.boot()       init.sh, whose host pid lies in processes/NAME   Machine.kill(), or the hub's end
    Machine.start()      a daemon, whose host pid lies in processes/NAME  Machine.stop(), its machine's end
    Machine.run()        a short command; waited for                      its time-out
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tools.testcluster import cgroups, commands
from tools.testcluster.errors import ClusterError, CommandFailed, StartFailed
from tools.testcluster.layout import Paths
from tools.testcluster.waiting import until

INIT = Path(__file__).with_name("init.sh")
STARTER = Path(__file__).with_name("start.sh")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOT_TIMEOUT_S = 20.0
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that cannot be mistaken for another one that got its pid later: the start time is part of its name."""

    name: str
    pid: int
    started_ticks: int

    @classmethod
    def of_pid(cls, name: str, pid: int) -> Process:
        ticks = _started_ticks(pid)
        if ticks is None:
            raise StartFailed(f"{name} (pid {pid}) ended before it could be recorded")
        return cls(name=name, pid=pid, started_ticks=ticks)

    @property
    def alive(self) -> bool:
        return _started_ticks(self.pid) == self.started_ticks

    @property
    def stopped(self) -> bool:
        """Every thread of it, after SIGSTOP: on busy cores one may still answer a moment longer."""
        try:
            texts = [stat.read_text(errors="replace") for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        except (FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            return False
        return bool(texts) and all(text.rpartition(")")[2].split()[0] in "Tt" for text in texts)

    def send(self, number: signal.Signals) -> bool:
        """False when it had already ended."""
        if not self.alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def end(self, number: signal.Signals = signal.SIGKILL, *, timeout_s: float = 10.0) -> bool:
        sent = self.send(number)
        until(lambda: not self.alive, what=f"{self.name} (pid {self.pid}) to end", timeout_s=timeout_s, every_s=0.01)
        return sent


def _started_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None when there is no such process or only its zombie.

    A first thread that is a zombie beside others is a process that still ends: its ports are still bound.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        if fields[0] == "X" or (fields[0] == "Z" and len(os.listdir(f"/proc/{pid}/task")) < 2):
            return None
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[19])


class Record:
    """Who was started: a file `pid start-time` per name in the cluster's `processes` folder.

    A file that is torn or absent (a power cut) reads as "not running"; cgroups.py finds what the record lost.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, process: Process) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = self.folder / f".{process.name}"
        scratch.write_text(f"{process.pid} {process.started_ticks}\n", encoding="ascii")
        scratch.replace(self.folder / process.name)

    def read(self, name: str) -> Process | None:
        """The process of that name if it still runs."""
        try:
            words = (self.folder / name).read_bytes().decode("ascii", errors="replace").split()
            process = Process(name=name, pid=int(words[0]), started_ticks=int(words[1]))
        except (FileNotFoundError, IndexError, ValueError):
            return None
        return process if process.alive else None

    def forget(self, pattern: str) -> None:
        """What ended on purpose is not missed."""
        for path in self.folder.glob(pattern):
            path.unlink(missing_ok=True)

    def ended(self) -> list[str]:
        """Names of those that run no more although nobody ended them on purpose."""
        names = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        return [name for name in names if self.read(name) is None]

    def running(self) -> list[Process]:
        if not self.folder.is_dir():
            return []
        found = (self.read(path.name) for path in sorted(self.folder.iterdir()) if not path.name.startswith("."))
        return [process for process in found if process is not None]


@contextmanager
def orphans_go_to_init() -> Iterator[None]:
    """What is started in the block with `setsid --fork` is no descendant of this process, whatever it is.

    pytest makes itself the reaper of its orphans (tests/conftest.py) and ends those that a test leaves behind: without
    this the pods of a cluster would be among them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    was = ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0)
    if not was.value:
        yield
        return
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Machine:
    def __init__(
        self, name: str, paths: Paths, *, programs: Path, inside: Machine | None = None, disk: Path | None = None
    ) -> None:
        self.name = name
        self.paths = paths
        self.programs = programs
        self.inside = inside
        """The machine in whose pid namespace this one lives: the hub, for a node."""
        self.disk = disk
        self.record = Record(paths.processes)

    @property
    def cgroup(self) -> str:
        """Where its daemons live; a node's pods live in `<cluster>/<node>`."""
        own = "hub" if self.inside is None else f"{self.name}-system"
        return f"{self.paths.cgroup}/{own}"

    @property
    def init(self) -> Process | None:
        return self.record.read(self.name)

    @property
    def pid(self) -> int:
        init = self.init
        if init is None:
            raise ClusterError(f"{self.name} is down; `python -m tools.testcluster fault revive` brings a node back")
        return init.pid

    def boot(self, *, holding: Sequence[TextIO] = ()) -> None:
        """Its PID 1 keeps the files `holding` open, and whatever lock is on them, for as long as it lives."""
        cgroups.make(self.cgroup)
        words = [
            *([] if self.inside is None else ["nsenter", "--target", str(self.inside.pid), "--pid"]),
            *("setsid", "--fork", "unshare", "--mount", "--net", "--pid", "--uts", "--fork", "--kill-child"),
            *("--propagation", "private", "bash", str(INIT)),
        ]
        environment = {
            "PATH": SYSTEM_PATH,
            "MACHINE": self.name,
            "RLINF_TESTCLUSTER": self.paths.name,
            **self._reporting(self.name),
        }
        if self.disk is not None:
            environment["DISK"] = str(self.disk)
        with orphans_go_to_init():
            self._launch(words, environment, name=self.name, holding=holding, guarded=True)

    def start(self, name: str, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None) -> Process:
        """Starts a daemon in this machine; its output goes to logs/NAME.log."""
        words = [*self.entering(), "setsid", "--fork", "sh", str(STARTER), *(str(word) for word in argv)]
        environment = {**self.environment(), **(env or {}), **self._reporting(name)}
        return self._launch(words, environment, name=name)

    def run(
        self, argv: Sequence[str | Path], *, timeout_s: float = 30.0, stdin: str | None = None, check: bool = True
    ) -> str:
        """A short command in this machine, in all its namespaces."""
        return commands.run(
            argv, timeout_s=timeout_s, stdin=stdin, env=self.environment(), check=check, within=self.entering()
        )

    def says(self, argv: Sequence[str | Path], *, timeout_s: float) -> str:
        """`commands.says` in this machine."""
        return commands.says(argv, timeout_s=timeout_s, env=self.environment(), within=self.entering())

    def stop(self, name: str, number: signal.Signals = signal.SIGKILL) -> bool:
        """Ends a daemon on purpose; False when it did not run."""
        process = self.record.read(name)
        self.record.forget(name)
        return process is not None and process.end(number)

    def kill(self) -> None:
        """Ends everything in it at once, as a power cut would."""
        init = self.init
        if init is not None:
            init.end()
        self.record.forget(self.name)
        self.record.forget(f"{self.name}-*")

    def log_tail(self, name: str, *, lines: int = 12) -> str:
        log = self.paths.logs / f"{name}.log"
        try:
            text = log.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:]) or "(its log is empty)"

    def entering(self) -> list[str]:
        """Words before a command that make it run in this machine."""
        return ["nsenter", "--target", str(self.pid), "--mount", "--net", "--uts", "--pid", "--"]

    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.programs}:{SYSTEM_PATH}", "HOME": "/", "LANG": "C.UTF-8"}

    def _reporting(self, name: str) -> dict[str, str]:
        return {
            "CGROUPS": " ".join(str(folder) for folder in cgroups.folders(self.cgroup)),
            "PID_FILE": str(self.paths.processes / f".{name}.pid"),
            "LOG_FILE": str(self.paths.logs / f"{name}.log"),
        }

    def _launch(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        name: str,
        holding: Sequence[TextIO] = (),
        guarded: bool = False,
    ) -> Process:
        """`guarded`: the last of `words` stays until what it started ends, as `unshare` does, and so tells of that."""
        self.paths.processes.mkdir(parents=True, exist_ok=True)
        self.paths.logs.mkdir(parents=True, exist_ok=True)
        pid_file = self.paths.processes / f".{name}.pid"
        pid_file.unlink(missing_ok=True)
        # A file, not a pipe: `unshare` stays as the machine's parent and would hold a pipe open for ever. It holds the
        # file's lock instead, a new file's, as one that was killed may hold its own for a moment yet.
        said = self.paths.logs / f"{name}.launch.log"
        said.unlink(missing_ok=True)
        with said.open("w+") as complaints:
            fcntl.flock(complaints, fcntl.LOCK_EX)
            try:
                launcher = subprocess.run(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=complaints,
                    stderr=complaints,
                    env=environment,
                    timeout=BOOT_TIMEOUT_S,
                    check=False,
                    pass_fds=[file.fileno() for file in holding],
                )
            except subprocess.TimeoutExpired as err:
                raise StartFailed(f"{name} could not be started in {BOOT_TIMEOUT_S:g} s") from err
            if launcher.returncode != 0:
                complaints.seek(0)
                raise CommandFailed(f"{name} could not be started: {complaints.read().strip()}")
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while True:
            over = guarded and _is_free(said)
            if pid_file.exists() and pid_file.read_bytes().endswith(b"\n"):
                break
            if over:
                raise StartFailed(f"{name} ended before it had started; its log ends:\n{self.log_tail(name)}")
            if time.monotonic() >= deadline:
                raise StartFailed(
                    f"{name} did not report in {BOOT_TIMEOUT_S:g} s; its log ends:\n{self.log_tail(name)}"
                )
            time.sleep(0.003)
        try:
            process = Process.of_pid(name, int(pid_file.read_bytes()))
        except StartFailed as err:
            raise StartFailed(f"{err}; its log ends:\n{self.log_tail(name)}") from err
        pid_file.unlink()
        self.record.write(process)
        return process


def _is_free(file: Path) -> bool:
    with file.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
