"""`rljob run` as a person's shell starts it, for tests: a child process in a group of its own, what it prints, whom it
started.

    with Run(tmp_path, "spec.flow.steps=3") as run:
        assert run.end() == 0 and run.answer["condition"] == "Complete"

Waits have a deadline and a name. Leaving the block ends what is left, by the pids that the run has made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil
import yaml

from rlinf_api import names
from rlinf_worker.channels import lineage
from tests.fakes.pod import alive

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "cartpole" / "rljob.yaml"
SMALL = ("spec.flow.config.numEnvs=8", "spec.flow.config.horizon=16", "spec.flow.config.epochs=1")
LIGHT = "spec.roles[actor].kind=tests.fakes.light_actor:Light"
"""Of a small run of the example: what is tried is the run, and torch takes three seconds of CPU in each."""
TIMEOUT_S = 50.0
"""Of every wait: a run takes seconds, and the machine may be busy."""
END_S = 15.0
"""Until what a killed rljob leaves is killed by its pid."""


def manifest(path: Path, **changes: Any) -> Path:
    """The example with fields of its spec replaced, as a file."""
    job = yaml.safe_load(EXAMPLE.read_text())
    job["spec"] |= changes
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(job))
    return path


def undisturbed(step: int, *, slices: int) -> tuple[int, int, str]:
    """Step, units and digest in lineage.jsonl of a step into which every slice went once: as where nobody is killed."""
    units = sorted(lineage.segment(index, step=step) for index in range(slices))
    return step, slices, hashlib.sha256("\n".join(units).encode()).hexdigest()[:16]


def rljob(*arguments: str | Path, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    command = [sys.executable, "-m", "rljob", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


class Run:
    def __init__(
        self,
        folder: Path,
        *sets: str,
        file: Path = EXAMPLE,
        options: tuple[str, ...] = (),
        name: str = "work",
        environ: Mapping[str, str] | None = None,
        settings: Mapping[str, float] | None = None,
        small: bool = True,
        learns: bool = False,
        is_heard: bool = True,
        cwd: Path = ROOT,
    ) -> None:
        """`learns`: a small run has the actor of its manifest. `settings` are of rlinf_worker.settings, for every
        process of the job. Of a run that is not heard, standard error is a pipe whose reader has gone."""
        self.work_dir = folder / name
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        assignments = [
            part
            for path in (*(SMALL if small else ()), *((LIGHT,) if small and not learns else ()), *sets)
            for part in ("--set", path)
        ]
        command = ["run", str(file), "--output", "json", "--work-dir", str(self.work_dir), *assignments, *options]
        env = {**os.environ, **(environ or {})}
        if settings:
            env[names.ENV_SETTINGS] = json.dumps(settings)
        with self._out.open("wb") as out, self._err.open("wb") if is_heard else _unread() as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rljob", *command],
                cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
        self._known: dict[int, psutil.Process] = {}

    # --- waiting ------------------------------------------------------------------------------------------------------
    def until(self, holds: Callable[[], Any], *, what: str, timeout_s: float = TIMEOUT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := holds()):
            self._look()
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}\n{self.said}"
            time.sleep(0.02)
        return found

    def until_said(self, text: str, *, timeout_s: float = TIMEOUT_S) -> None:
        def said() -> bool:
            return text in self.said or self.process.poll() is not None

        self.until(said, what=f"the run says {text!r}", timeout_s=timeout_s)
        assert text in self.said, f"the run ended and never said {text!r}:\n{self.said}"

    def until_step(self, step: int, *, branch: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        def reached() -> bool:
            return any(line["step"] >= step and line["branch"] >= branch for line in self.lines("lineage"))

        def over() -> bool:
            return reached() or self.process.poll() is not None

        self.until(over, what=f"step {step} of branch {branch}", timeout_s=timeout_s)
        assert reached(), f"the run ended before step {step} of branch {branch}:\n{self.said}"

    def end(self, *, timeout_s: float = TIMEOUT_S) -> int:
        """The exit code, once it has ended by itself."""
        self.until(lambda: self.process.poll() is not None, what="the end of rljob run", timeout_s=timeout_s)
        return self.process.returncode

    # --- what it says -------------------------------------------------------------------------------------------------
    @property
    def said(self) -> str:
        """Everything that a person sees."""
        told = [path.read_text(errors="replace") for path in (self._err, self._out) if path.exists()]  # while written
        return "".join(told)

    @property
    def answer(self) -> dict[str, Any]:
        """The last line of --output json."""
        return dict(json.loads(self._out.read_text().splitlines()[-1]))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Whole lines of a .jsonl file of the work dir."""
        path = self.work_dir / f"{name}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def checksums(self) -> Mapping[tuple[str, str], Mapping[str, set[str]]]:
        """Of each view of each version of the weights, as any life of any worker has seen it: by which worker's log.
        What a rank publishes is a view of its own, named by its log. Workers say it at log level DEBUG."""
        found: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for path in (self.work_dir / "logs").rglob("*"):
            for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
                if '"checksum": "' in line and '"weights_version"' in line:
                    said = json.loads(line[line.index("{") :])
                    found[said["weights_version"], said["view"] or path.name][said["checksum"]].add(path.name)
        return found

    # --- processes ----------------------------------------------------------------------------------------------------
    def _look(self) -> None:
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self._known.update((child.pid, child) for child in children)

    def part(self, name: str) -> psutil.Process | None:
        """`driver`, `agent`, or a worker such as `env/0`: the living process, or None."""
        self._look()
        for process in list(self._known.values()):
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE and _part(process) == name:
                    return process
            except psutil.Error:
                continue
        return None

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        process = self.until(lambda: self.part(name), what=f"a process of {name}")
        process.send_signal(number)
        return int(process.pid)

    def interrupt(self) -> None:
        """Ctrl-C in a terminal: SIGINT to the whole process group, of which only rljob itself is a member."""
        os.killpg(self.process.pid, signal.SIGINT)

    def known(self) -> list[psutil.Process]:
        """Every process that was seen below rljob, living or not."""
        self._look()
        return list(self._known.values())

    def left(self) -> list[int]:
        """Processes of this run that still live."""
        return [process.pid for process in alive(list(self._known.values()))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._look()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + END_S
        while self.left() and time.monotonic() < deadline:  # the shims end what a killed rljob leaves
            time.sleep(0.02)
        for pid in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended a moment ago
                self._known[pid].kill()


def _unread() -> IO[bytes]:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "wb")


def _part(process: psutil.Process) -> str:
    environ, command = process.environ(), process.cmdline()
    if command[-1:] == ["worker"] and "rlinf_worker" in command:
        worker = environ.get(names.ENV_WORKER_ID, "")
        promoted = names.is_spare(worker) and "/" in process.name()  # its first environment is that of the spare
        return process.name() if promoted else worker
    return command[-1] if "rlinf_worker" in command and command[-1] in ("driver", "agent") else ""


def own_job(flow: str, roles: Mapping[str, Mapping[str, Any]], *, steps: int, slots: int) -> dict[str, Any]:
    """In one pod, and saves every five steps. `roles`: {"sampler": {"kind": "tests.fakes.line_job:Sampler"}}."""
    name = flow.rpartition(".")[2].partition("_")[0]
    return {
        "apiVersion": "rlinf.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name},
        "spec": {
            "flow": {"name": flow, "steps": steps, "config": {}},
            "roles": [{"name": role, **fields} for role, fields in roles.items()],
            "pools": [{"name": "cpu", "roles": [*roles], "slots": {"perPod": slots, "cpu": "100m"}}],
            "checkpoint": {"everySteps": 5},
        },
    }
