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
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from rlinf_api import names
from tools.chaos.plans import Plans
from tools.running_job import LOOK_S, ROOT, RunningJob

EXAMPLE: Final = ROOT / "examples" / "cartpole" / "rljob.yaml"
DISK_BYTES: Final = 8 << 20  # of the checkpoints' file system: three of 200 KB and one that is written, with room
GONE_S: Final = 1.0  # for processes that are on their way out when rljob has ended
SETTINGS: Final = {"step_deadline_min_s": 8}  # a worker that is stopped for good is seen sooner; a busy one is not


class JobError(Exception):
    """The job did not do what was asked, with the end of what it said."""


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


class Job(RunningJob):
    def __init__(
        self, folder: Path, *, seed: int, steps: int, spares: bool = False, sets: Mapping[str, Any] | None = None
    ) -> None:
        folder.mkdir(parents=True)
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.has_spares, self.lacks, self.plans = spares, lacking(), Plans(folder / "work")
        file = manifest(folder / "job.yaml", seed=seed, steps=steps, disk=self.disk, spares=spares, sets=sets or {})
        super().__init__(file, folder, inside=self._of_its_own())

    def _of_its_own(self) -> list[str]:
        """Name spaces, with a disk of DISK_BYTES."""
        options = tuple(option for option in _unshared() if option != "--net" or "slow" not in self.lacks)
        disk = f"mount -t tmpfs -o size={DISK_BYTES},mode=0777 tmpfs '{self.disk}'"
        steps = [disk] if "full" not in self.lacks else []
        steps += ["ip link set lo up"] if "--net" in options else []
        if not options:
            return []
        return ["unshare", *options, "--", "sh", "-ec", "; ".join([*steps, 'exec "$@"']), "sh"]

    # --- what it writes -----------------------------------------------------------------------------------------------
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
    def end(self, *, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise JobError(f"the job did not end within {timeout_s:.0f} s:\n{self.said[-2000:]}") from None

    def left(self) -> list[int]:
        """Processes of this job that still live: those that were seen, and any that has its work dir in its environment
        or command, as all parts of a job have."""
        until = time.monotonic() + GONE_S
        while (found := self.living()) and time.monotonic() < until and not self.is_running:
            time.sleep(LOOK_S)
        return sorted(process.pid for process in found)

    def living(self) -> list[psutil.Process]:
        mine = str(self.work_dir)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # of another user, or gone
                if process.environ().get(names.ENV_OUTPUT_DIR) == mine or mine in process.cmdline():
                    self._known.setdefault(process.pid, process)
        return super().living()

    def close(self) -> list[str]:
        said = super().close()
        self.plans.close()
        return said
