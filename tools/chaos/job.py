"""One learning job under `rljob run`, as chaos needs it: in mount and network name spaces of its own, so that its disk
can be filled and its links slowed without anybody else noticing.

    with Job(folder, seed=3, steps=97) as job:
        job.part("env/0").kill()
        job.end(timeout_s=60)

Two pods, so that there are links between pods: two workers of environments in one, rollout and actor in the other, each
with a warm spare where `spares` says so. What the machine does not allow (no root, no tc) is left out: `lacking()` says
what and why.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil
import yaml

from rlinf_api import names
from tools.chaos.plans import Plans

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLE: Final = ROOT / "examples" / "cartpole" / "rljob.yaml"
DISK_BYTES: Final = 8 << 20  # of the checkpoints' file system: three of 200 KB and one that is written, with room
LOOK_S: Final = 0.25  # between two looks at the process tree: each costs a walk through /proc
GONE_S: Final = 1.0  # for processes that are on their way out when rljob has ended
SETTINGS: Final = {"step_deadline_min_s": 8}  # a worker that is stopped for good is seen sooner; a busy one is not


class JobError(Exception):
    """The job did not do what was asked, with the end of what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    """driver, agent:POOL, ROLE/NUMBER, or spare.ROLE/NUMBER."""
    pool: str
    process: psutil.Process

    @property
    def alive(self) -> bool:
        return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE


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


@functools.cache
def _unshared() -> tuple[str, ...]:
    """The longest list of options of unshare(1) that this machine admits; empty: none."""
    for options in (("--mount", "--net"), ("--user", "--map-root-user", "--mount", "--net"), ("--mount",)):
        done = subprocess.run(["unshare", *options, "true"], capture_output=True, check=False, timeout=10)
        if done.returncode == 0:
            return options
    return ()


def lacking() -> dict[str, str]:
    """Kinds of faults that this machine does not allow, each with the reason."""
    options, found = _unshared(), {}
    if not options:
        reason = "unshare(1) makes no mount name space here, neither as root nor in a user name space"
        return {"full": reason, "slow": reason}
    if shutil.which("mount") is None:
        found["full"] = "there is no mount(8)"
    if "--net" not in options:
        found["slow"] = "unshare(1) makes no network name space here"
    elif missing := [tool for tool in ("tc", "nsenter", "ip") if shutil.which(tool) is None]:
        found["slow"] = f"there is no {', '.join(missing)}"
    return found


def manifest(path: Path, *, seed: int, steps: int, disk: Path, spares: bool, sets: Mapping[str, Any]) -> Path:
    job = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    spec = job["spec"]
    spec["seed"], spec["flow"]["steps"] = seed, steps
    spec["flow"]["config"] |= sets
    spec["checkpoint"] = {"uri": f"file://{disk}", "everySteps": 5}
    for role in spec["roles"]:
        role |= {"spares": 1} if spares else {}
        role |= {"workers": {"min": 1, "max": 2}} if role["name"] == "env" else {}
    spec["failurePolicy"] = {"maxRestarts": 10_000}  # whoever is killed all the time gives up otherwise
    env = [
        {"name": names.ENV_SETTINGS, "value": json.dumps(SETTINGS)},
        {"name": names.ENV_LOG_LEVEL, "value": "DEBUG"},  # each version of the weights with its checksum
    ]
    template = {"spec": {"containers": [{"name": "agent", "env": env}]}}
    slots = {"cpu": "500m", "memory": "1Gi"}
    spec["pools"] = [
        {"name": "sim", "roles": ["env"], "pods": 1, "slots": {"perPod": 2, **slots}, "template": template},
        {"name": "learn", "roles": ["rollout", "actor"], "pods": 1, "slots": {"perPod": 2, **slots},
         "template": template},
    ]  # fmt: skip
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


class Job:
    def __init__(
        self, folder: Path, *, seed: int, steps: int, spares: bool = False, sets: Mapping[str, Any] | None = None
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self.work_dir, self.disk = folder, folder / "work", folder / "disk"
        self.disk.mkdir()
        self.has_spares, self.lacks, self.plans = spares, lacking(), Plans(self.work_dir)
        options = tuple(option for option in _unshared() if option != "--net" or "slow" not in self.lacks)
        file = manifest(folder / "job.yaml", seed=seed, steps=steps, disk=self.disk, spares=spares, sets=sets or {})
        run = [sys.executable, "-m", "rljob", "run", str(file), "--output", "json", "--work-dir", str(self.work_dir)]
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [*self._inside(options), *run],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
        self._known: dict[int, psutil.Process] = {}
        self._named: dict[psutil.Process, Part | None] = {}
        self._looked_at = 0.0
        self._tails = {name: Tail(self.work_dir / f"{name}.jsonl") for name in ("lineage", "metrics", "events")}

    def _inside(self, options: tuple[str, ...]) -> list[str]:
        disk = f"mount -t tmpfs -o size={DISK_BYTES},mode=0777 tmpfs '{self.disk}'"
        steps = [disk] if "full" not in self.lacks else []
        steps += ["ip link set lo up"] if "--net" in options else []
        if not options:
            return []
        return ["unshare", *options, "--", "sh", "-ec", "; ".join([*steps, 'exec "$@"']), "sh"]

    # --- what it writes -----------------------------------------------------------------------------------------------
    def lines(self, name: str) -> list[dict[str, Any]]:
        return self._tails[name].read()

    @property
    def said(self) -> str:
        return (self.folder / "err").read_text(errors="replace") + (self.folder / "out").read_text(errors="replace")

    @property
    def answer(self) -> dict[str, Any]:
        """The last line of --output json."""
        lines = (self.folder / "out").read_text().splitlines()
        return dict(json.loads(lines[-1])) if lines else {}

    def checksums(self) -> Iterator[tuple[str, str, str]]:
        """(version, which view of it, checksum) as any worker of any life has seen it."""
        for path in sorted((self.work_dir / "logs").rglob("*")):
            if not path.is_file():
                continue
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    if '"checksum": "' in line and '"weights_version"' in line:
                        found = json.loads(line[line.index("{") :])
                        yield found["weights_version"], found["view"], found["checksum"]

    # --- processes ----------------------------------------------------------------------------------------------------
    def parts(self) -> dict[str, Part]:
        """Who lives now, by name."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            self._looked_at = time.monotonic()
            try:
                children = psutil.Process(self.process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                children = []
            self._known.update((child.pid, child) for child in children)
        found = {}
        for process in list(self._known.values()):
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE and (part := self._part(process)):
                    found[part.name] = part
            except psutil.Error:
                continue
        return found

    def _part(self, process: psutil.Process) -> Part | None:
        """Looked up until it has become one of ours: a child that is just forked bears its parent's command."""
        known = self._named.get(process)
        if known is None:
            known = _part(process)
            if known is not None and not names.is_spare(known.name):  # which becomes a worker one day
                self._named[process] = known
        return known

    def part(self, name: str) -> Part | None:
        return self.parts().get(name)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def end(self, *, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise JobError(f"the job did not end within {timeout_s:.0f} s:\n{self.said[-2000:]}") from None

    # --- its disk and its links ---------------------------------------------------------------------------------------
    @property
    def disk_from_outside(self) -> Path:
        return Path(f"/proc/{self.process.pid}/root{self.disk}")

    def tc(self, *words: str) -> None:
        command = ["nsenter", "--target", str(self.process.pid), "--user", "--preserve-credentials", "--net", "tc"]
        if "--user" not in _unshared():
            command = ["nsenter", "--target", str(self.process.pid), "--net", "tc"]
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False, timeout=10)
        if done.returncode != 0:
            raise JobError(f"tc {' '.join(words)}: {done.stderr.strip()}")

    # --- ending -------------------------------------------------------------------------------------------------------
    def left(self) -> list[int]:
        """Processes of this job that still live: those that were seen, and any that has its work dir in its environment
        or command, as all parts of a job have."""
        until = time.monotonic() + GONE_S
        while (found := self._living()) and time.monotonic() < until and not self.is_running:
            time.sleep(LOOK_S)
        return found

    def _living(self) -> list[int]:
        mine = str(self.work_dir)
        found = set[int]()
        for process in list(self._known.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(process.pid)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # of another user, or gone
                if process.environ().get(names.ENV_OUTPUT_DIR) == mine or mine in process.cmdline():
                    found.add(process.pid)
                    self._known.setdefault(process.pid, process)
        return sorted(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._looked_at = 0.0
        self.parts()
        if self.is_running:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.plans.close()
        deadline = time.monotonic() + 3.0
        while self._living() and time.monotonic() < deadline:  # the shims end what a killed rljob leaves
            time.sleep(0.05)
        for pid in self._living():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._known[pid].kill()


def _part(process: psutil.Process) -> Part | None:
    command = process.cmdline()
    if "rlinf_worker" not in command or command[-1] not in ("driver", "agent", "worker"):
        return None
    environ = process.environ()
    pod = environ.get(names.ENV_POD_NAME, "")
    pool = next((name for name in ("sim", "learn") if f"-{name}-" in pod), "")
    if command[-1] == "driver":
        return Part(name="driver", pool="", process=process)
    if command[-1] == "agent":
        return Part(name=f"agent:{pool}", pool=pool, process=process)
    worker = environ.get(names.ENV_WORKER_ID, "")
    if names.is_spare(worker) and "/" in process.name():  # promoted: its first environment is that of the spare
        worker = process.name()
    return Part(name=worker, pool=pool, process=process) if worker else None
