"""`rljob run` of a manifest as a child process, for tools that strike at jobs: what it writes, and who of it lives.

    with RunningJob(file, folder) as run:
        run.parts()["rollout/1"].process.kill()
        run.lines("lineage")[-1]["step"]             # 12
        run.objects("rljob")[0]["status"]

Leaving the block ends whatever lives, by the pids that were seen.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil
import yaml

from rlinf_api import names

ROOT: Final = Path(__file__).resolve().parents[1]
LOOK_S: Final = 0.25  # between two looks at the process tree: each costs a walk through /proc
GONE_S: Final = 5.0  # for processes that are on their way out when rljob has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    """driver, agent:POOL (of a pool's first pod; agent:POOL/1 of its second), ROLE/NUMBER, or spare.ROLE/NUMBER."""
    pool: str
    pod: str
    process: psutil.Process


@dataclass(slots=True)
class Tail:
    """Whole lines of a growing .jsonl file, read once."""

    path: Path
    at: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> list[dict[str, Any]]:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.at)
                whole, newline, _ = file.read().rpartition(b"\n")
            self.at += len(whole) + len(newline)
            self.lines += [json.loads(line) for line in whole.splitlines()]
        return self.lines


class RunningJob:
    def __init__(self, file: Path, folder: Path, *, inside: Sequence[str] = ()) -> None:
        """`inside`: a command that executes what follows it, such as unshare(1)."""
        self.file, self.folder, self.work_dir, self._inside = file, folder, folder / "work", tuple(inside)
        self.name = str(yaml.safe_load(file.read_text(encoding="utf-8"))["metadata"]["name"])
        self._known: dict[int, psutil.Process] = {}
        self._named: dict[psutil.Process, Part] = {}
        self._looked_at = 0.0
        self._tails = {name: Tail(self.work_dir / f"{name}.jsonl") for name in ("lineage", "metrics", "events")}
        self.starts = 0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        command = [sys.executable, "-m", "rljob", "run", str(self.file), "--output", "json"]
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("ab") as err:
            return subprocess.Popen(
                [*self._inside, *command, "--work-dir", str(self.work_dir)],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    def again(self) -> None:
        """Killed, and started anew in its work dir."""
        self.look()
        self.process.kill()
        self.process.wait()
        self._await_gone()
        self.process = self._start()

    # --- what it writes -----------------------------------------------------------------------------------------------
    def lines(self, name: str) -> list[dict[str, Any]]:
        return self._tails[name].read()

    def objects(self, kind: str) -> list[dict[str, Any]]:
        found = []
        for path in sorted((self.work_dir / "objects").glob(f"{kind}-*.yaml")):
            with contextlib.suppress(OSError):  # replaced meanwhile
                found.append(yaml.safe_load(path.read_text(encoding="utf-8")))
        return found

    @property
    def said(self) -> str:
        return (self.folder / "err").read_text(errors="replace") + (self.folder / "out").read_text(errors="replace")

    @property
    def answer(self) -> dict[str, Any]:
        """The last line of --output json."""
        lines = (self.folder / "out").read_text().splitlines()
        return dict(json.loads(lines[-1])) if lines else {}

    # --- processes ----------------------------------------------------------------------------------------------------
    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def parts(self) -> dict[str, Part]:
        """Who lives now, by name."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            self.look()
        found = {}
        for process in list(self._known.values()):
            with contextlib.suppress(psutil.Error):
                if lives(process) and (part := self._part(process)):
                    found[part.name] = part
        return found

    def of(self, whom: str) -> list[Part]:
        """Those that live of a role, or of agent or driver, by name."""
        found = sorted(self.parts().items())
        return [part for name, part in found if name.replace(":", "/").partition("/")[0] == whom]

    def part(self, name: str) -> Part | None:
        return self.parts().get(name)

    def look(self) -> None:
        self._looked_at = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            self._known.update((child.pid, child) for child in children)

    def _part(self, process: psutil.Process) -> Part | None:
        """Looked up until it has become one of ours: a child that is just forked bears its parent's command."""
        known = self._named.get(process)
        if known is None:
            known = _part(process)
            if known is not None and not names.is_spare(known.name):  # which becomes a worker one day
                self._named[process] = known
        return known

    def living(self) -> list[psutil.Process]:
        """Those that live of all processes that were seen."""
        return [process for process in self._known.values() if lives(process)]

    # --- ending -------------------------------------------------------------------------------------------------------
    def close(self) -> list[str]:
        """Ends what lives; who that was, beside the run itself."""
        self.look()
        if self.is_running:
            self.process.kill()
        self.process.wait()
        self._await_gone()  # the shims end what a killed rljob leaves
        said = []
        for process in self.living():
            with contextlib.suppress(psutil.Error):
                said.append(f"{process.pid}: {' '.join(process.cmdline())[-80:]}")
                process.kill()
        return said

    def keep(self, at: Path) -> None:
        """What it has left, for who looks into it."""
        shutil.copytree(self.folder, at, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))

    def _await_gone(self) -> None:
        until = time.monotonic() + GONE_S
        while self.living() and time.monotonic() < until:
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def send(process: psutil.Process, number: int) -> None:
    """A signal; nothing, where it has gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _part(process: psutil.Process) -> Part | None:
    command = process.cmdline()
    if "rlinf_worker" not in command or command[-1] not in ("driver", "agent", "worker"):
        return None
    environ = process.environ()
    pod, pool, number = (environ.get(name, "") for name in (names.ENV_POD_NAME, names.ENV_POOL, names.ENV_ORDINAL))
    if command[-1] == "driver":
        return Part(name="driver", pool="", pod=pod, process=process)
    if command[-1] == "agent":
        which = pool if number in ("", "0") else f"{pool}/{number}"
        return Part(name=f"agent:{which}", pool=pool, pod=pod, process=process)
    worker = environ.get(names.ENV_WORKER_ID, "")
    if names.is_spare(worker) and "/" in process.name():  # promoted: its first environment is that of the spare
        worker = process.name()
    return Part(name=worker, pool=pool, pod=pod, process=process) if worker else None


def surviving(lines: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The lines of steps that no later one has made again, and how often that was on the same branch: as by a run that
    was killed before its first checkpoint, and began anew.

    >>> surviving([{"branch": 0, "step": 1}, {"branch": 0, "step": 2}, {"branch": 0, "step": 1}])
    ([{'branch': 0, 'step': 1}], 1)
    >>> surviving([{"branch": 0, "step": 1}, {"branch": 0, "step": 2}, {"branch": 1, "step": 2}])
    ([{'branch': 0, 'step': 1}, {'branch': 1, 'step': 2}], 0)
    """
    survived: list[dict[str, Any]] = []
    anew = 0
    for line in lines:
        anew += bool(survived) and survived[-1]["step"] >= line["step"] and survived[-1]["branch"] == line["branch"]
        while survived and survived[-1]["step"] >= line["step"]:
            survived.pop()
        survived.append(line)
    return survived, anew
