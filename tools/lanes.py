"""What `.ci/run` runs: lanes of commands beside each other, and one verdict over all of them.

    python3 tools/lanes.py tests='make test' tests='make test-slow' cluster='make test-cluster'

Commands of one lane run one after the other, also when an earlier one failed: what follows is told too. What a lane
says comes at once, each line under the lane's name, and lies in build/ci/LANE.log. At the end each failed command says
which tests failed, or its last lines where no test did, and the last lines are the summaries of pytest. Exit status: 0,
1 when a command failed, 128 and the signal's number after an interrupt.

A signal ends every lane as Ctrl-C in a terminal would. Who has not ended after --patience-s is told to terminate, then
killed: every process of the lanes, by its pid. What has left them on purpose (a cluster's reaper) looks after itself.

It runs before .venv is made, so it uses the standard library only.
"""

from __future__ import annotations  # an old Python must get as far as `make env`, which says what is needed

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

LOGS = Path("build") / "ci"
LOOK_EVERY_S = 0.1
"""How often lanes are looked at: a line is not late for who reads it, and looking costs nothing."""
PATIENCE_S = 60.0
"""How long a lane may clean up when it was interrupted: taking a cluster down takes up to half a minute."""
HARDER_S = 5.0
"""How long each of SIGTERM and SIGKILL is waited for."""
LAST_LINES = 25
"""How much of a command is shown again that failed without a failed test: lint, or a program that was not built."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SUMMARY = re.compile(r"=+ .*(\d+ \w+|no tests ran).* in [\d.]+s\b.*=+")
_FAILED = re.compile(r"(FAILED|ERROR) \S")


class Command:
    """`make test` of a lane: its process, and of what it said only that which is told again at the end."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.process: subprocess.Popen[bytes] | None = None
        self.status: int | None = None
        self.started_at = self.took_s = 0.0
        self.summaries: list[str] = []
        self.failed: list[str] = []
        self.last: list[str] = []

    def heard(self, line: str) -> None:
        if _SUMMARY.fullmatch(line):
            self.summaries.append(line)
        elif _FAILED.match(line):
            self.failed.append(line)
        self.last = [*self.last[1 - LAST_LINES :], line]

    def verdict(self) -> str:
        if self.status is None:
            return "was not run"
        how = "passed" if self.status == 0 else f"FAILED with exit status {self.status}"
        return f"{how} after {self.took_s:.0f} s"


class Lane:
    def __init__(self, name: str, commands: Sequence[str]) -> None:
        self.name = name
        self.commands = [Command(words) for words in commands]
        self._waiting = list(self.commands)
        self.now: Command | None = None
        LOGS.mkdir(parents=True, exist_ok=True)
        self.log = LOGS / f"{name}.log"
        self._writing = self.log.open("wb")
        self._reading = self.log.open("rb")
        self._part = b""

    def go_on(self) -> bool:
        """Whether there is or was something to do: a command that ended, the next one, a new line."""
        if self.now is None:
            if not self._waiting:
                return False
            self._start(self._waiting.pop(0))
            return True
        ended = self.now.process is None or self.now.process.poll() is not None
        self._tell(to_the_end=ended)  # asked before: what it said last is in the file by now
        if ended:
            if self.now.process is not None:
                self.now.status = self.now.process.returncode
            self.now.took_s = time.monotonic() - self.now.started_at
            self.say(f"{self.now.words}: {self.now.verdict()}")
            self.now = None
        return True

    def nothing_more(self) -> None:
        self._waiting.clear()

    def say(self, line: str) -> None:
        print(f"{self.name:<8}| {line}", flush=True)

    def _start(self, command: Command) -> None:
        self.now = command
        command.started_at = time.monotonic()
        self.say(f"{command.words}: the whole of it goes to {self.log}")
        try:
            command.process = subprocess.Popen(
                shlex.split(command.words),
                stdin=subprocess.DEVNULL,
                stdout=self._writing,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it through us alone, so that both ends are ordered
            )
        except OSError as err:
            command.status = 127
            self._writing.write(f"{command.words} cannot be started: {err}\n".encode())
            self._writing.flush()

    def _tell(self, *, to_the_end: bool) -> None:
        assert self.now is not None
        lines = (self._part + self._reading.read()).split(b"\n")
        self._part = lines.pop()
        if to_the_end and self._part:
            lines.append(self._part)
            self._part = b""
        for line in (raw.decode(errors="replace").rstrip() for raw in lines):
            self.now.heard(line)
            self.say(line)


def run(lanes: Sequence[Lane], *, patience_s: float) -> int:
    """The number of the signal that ended them, or 0."""
    asked: list[int] = []
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT:  # nohup's SIGHUP stays ignored
            signal.signal(number, lambda number, _: asked.append(number))
    try:
        while not asked and sum(lane.go_on() for lane in lanes) > 0:  # every lane goes on, not the first alone
            time.sleep(LOOK_EVERY_S)
    except BrokenPipeError:  # nobody reads what we say any more: a signal, too
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (as long as we live)
        asked.append(signal.SIGPIPE)
    finally:
        end(lanes, patience_s=patience_s)
    return asked[0] if asked else 0


def end(lanes: Sequence[Lane], *, patience_s: float) -> None:
    """Every process of the lanes has ended, or was killed, within patience_s and twice HARDER_S."""
    for lane in lanes:
        lane.nothing_more()
    running = [lane.now.process for lane in lanes if lane.now is not None and lane.now.process is not None]
    if not running:
        return
    known: set[tuple[int, int]] = set()
    for number, wait_s in ((signal.SIGINT, patience_s), (signal.SIGTERM, HARDER_S), (signal.SIGKILL, HARDER_S)):
        known |= family(process.pid for process in running)
        if number == signal.SIGINT:
            for process in running:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):  # it has ended just now
                        os.killpg(process.pid, number)
        else:
            for pid, started in known:
                if started_at(pid) == started:
                    with contextlib.suppress(ProcessLookupError):  # it has ended just now
                        os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
            for lane in lanes:
                lane.go_on()
            known |= family(process.pid for process in running)
            if all(process.poll() is not None for process in running) and not alive(known):
                break
    for lane in lanes:
        lane.go_on()  # its last lines


def family(pids: Iterable[int]) -> set[tuple[int, int]]:
    """These processes and all below them."""
    children: dict[int, list[tuple[int, int]]] = {}
    wanted = set(pids)
    found = set()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        if (fields := stat_of(pid)) is not None:
            children.setdefault(int(fields[1]), []).append((pid, int(fields[19])))
            if pid in wanted:
                found.add((pid, int(fields[19])))
    todo = list(wanted)
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += [pid for pid, _ in below]
    return found


def alive(known: set[tuple[int, int]]) -> list[int]:
    return [pid for pid, started in known if started_at(pid) == started]


def started_at(pid: int) -> int | None:
    """In clock ticks; None for a process that is gone, a zombie too."""
    fields = stat_of(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on, as the second may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def report(lanes: Sequence[Lane]) -> None:
    for lane in lanes:
        for command in lane.commands:
            if command.status not in (0, None):
                print(f"\n{lane.name}: {command.words} {command.verdict()}; the whole of it is in {lane.log}")
                for line in command.failed or command.last:
                    lane.say(line)
    print()
    for lane in lanes:
        for command in lane.commands:
            lane.say(f"{command.words}: {command.verdict()}")
            for line in command.summaries:
                lane.say(line)
    sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run lanes of commands beside each other.")
    parser.add_argument("--patience-s", type=float, default=PATIENCE_S, help="to clean up in after an interrupt")
    parser.add_argument("lane", nargs="+", metavar="LANE=COMMAND", help="commands of one lane run one after the other")
    arguments = parser.parse_args(words)
    lanes: dict[str, list[str]] = {}
    for text in arguments.lane:
        name, is_one, command = text.partition("=")
        if not (re.fullmatch(r"[\w-]+", name) and is_one and command.strip()):
            parser.error(f"{text!r} is no lane with a command; write it as tests='make test'")
        lanes.setdefault(name, []).append(command)
    made = [Lane(name, commands) for name, commands in lanes.items()]
    number = run(made, patience_s=arguments.patience_s)
    report(made)
    if number:
        print(f"lanes: ended by {signal.Signals(number).name}", file=sys.stderr)
        return 128 + number
    return 0 if all(command.status == 0 for lane in made for command in lane.commands) else 1


if __name__ == "__main__":
    sys.exit(main())
