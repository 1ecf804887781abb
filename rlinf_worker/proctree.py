"""Processes as /proc shows them: whose tree they belong to, what they are doing, and signals that hit no other.

Called by `supervisor.py`. psutil would do, for 4 MB and 25 ms more in every agent. A pid is used only together with its
start time and through a pidfd, so that a signal never reaches a later process with the same number.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

MEMORY_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""This container's, by cgroup v2 and v1; both have a line `oom_kill NUMBER`."""
_DEAD: Final = frozenset("ZX")
_STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible wait (disk or driver)",
    "T": "stopped by a signal (SIGSTOP); SIGCONT continues it",
    "t": "stopped by a debugger",
    "Z": "dead and not reaped",
    "X": "dead",
    "I": "idle",
}


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    pid: int
    ppid: int
    session: int
    state: str
    started: int  # clock ticks after boot
    name: str

    @property
    def dead(self) -> bool:
        return self.state in _DEAD

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    def doing(self) -> str:
        """In words, for a message."""
        return _STATES.get(self.state, f"in state {self.state}")


def read(pid: int) -> ProcessEntry | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may hold any character, parentheses too.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return ProcessEntry(
        pid=pid,
        ppid=int(fields[1]),
        session=int(fields[3]),
        state=fields[0],
        started=int(fields[19]),
        name=head.partition("(")[2],
    )


def table() -> dict[int, ProcessEntry]:
    """All processes of this pid namespace."""
    found = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process}


def environment(pid: int) -> list[bytes]:
    """What it was started with; empty where it is gone or not ours to read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def descendants(roots: Iterable[int], processes: Mapping[int, ProcessEntry]) -> set[int]:
    """The roots and everything below them."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found: set[int] = set()
    todo = [pid for pid in roots if pid in processes]
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo.extend(children.get(pid, ()))
    return found


def tree(leader: int, *, started: int, mark: bytes, reaper: int) -> list[ProcessEntry]:
    """Living processes of a worker: its leader's descendants, and what left the tree: adopted by `reaper` (the agent),
    but in the leader's session or started with the worker's mark."""
    processes = table()
    roots = []
    own = processes.get(leader)
    if own and own.started == started:
        roots.append(leader)
    for process in processes.values():
        if process.ppid == reaper and process.pid != leader and not process.dead:
            same_session = process.session == leader and process.started >= started
            if same_session or mark in environment(process.pid):
                roots.append(process.pid)
    return [processes[pid] for pid in descendants(roots, processes) if not processes[pid].dead]


def send(process: ProcessEntry, signal_number: int) -> bool:
    """False: it was gone, and whoever has its number now was left alone."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        now = read(process.pid)
        if now is None or now.started != process.started:
            return False
        signal.pidfd_send_signal(fd, signal_number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)


def oom_kills() -> int:
    """How many processes of this container the kernel has killed for its memory limit; 0 where nothing says so."""
    for path in MEMORY_EVENTS:
        try:
            with open(path, encoding="ascii") as file:
                for line in file:
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        return int(value)
        except OSError:
            continue
    return 0
