"""`rljob run` as a child of a benchmark: runs it to its end in a work directory of its own and reads what it left.

For: foundation.py, learning.py. A run that does not complete raises BenchError with the end of what it said.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.harness import ROOT, BenchError

RLJOB = ROOT / ".venv" / "bin" / "rljob"
CARTPOLE = ROOT / "examples" / "cartpole" / "rljob.yaml"
SOLVED, WINDOW = 475.0, 100  # mean return of so many training episodes
NEVER = 10.0**9  # environment steps of a run that did not get there


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`answer` is the JSON line, `metrics` the lines of metrics.jsonl."""

    answer: dict[str, Any]
    metrics: list[dict[str, Any]]
    started_at: float
    folder: Path

    @property
    def solved_at(self) -> float:
        """Environment steps at which the mean of the last 100 training episodes had reached 475."""
        episodes = 0.0
        for line in self.metrics:
            episodes += line.get("episodes_count", 0.0)
            if episodes >= WINDOW and line.get("return_mean", -math.inf) >= SOLVED:
                return float(line["env_steps"])
        return NEVER

    def first_env_step_s(self) -> float:
        """From the start of the command to the end of the first step of an environment."""
        ends = [s["t1"] for s in self._spans() if s.get("role") == "env" and s["kind"] == "compute"]
        if not ends:
            raise BenchError(f"no compute span of role env in {self.folder / 'spans'}")
        return float(min(ends)) - self.started_at

    def _spans(self) -> Iterator[dict[str, Any]]:
        for file in (self.folder / "spans").glob("*.jsonl"):
            for line in file.read_text(encoding="utf-8").splitlines():
                yield json.loads(line)


@contextmanager
def run(manifest: Path, *arguments: str, timeout_s: float = 300.0) -> Iterator[Run]:
    """The work directory is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="rlinf-bench-") as folder:
        work_dir = Path(folder) / "work"
        command = [str(RLJOB), "run", str(manifest), "--work-dir", str(work_dir), "--output", "json", *arguments]
        started_at = time.time()
        answer = json.loads(_output(command, timeout_s=timeout_s).splitlines()[-1])
        text = (work_dir / "metrics.jsonl").read_text(encoding="utf-8")
        metrics = [json.loads(line) for line in text.splitlines()]
        yield Run(answer=answer, metrics=metrics, started_at=started_at, folder=work_dir)


def _output(command: Sequence[str], *, timeout_s: float) -> str:
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.terminate()  # rljob ends its pods; a kill would leave them running
            out, err = child.communicate()
            raise BenchError(f"{' '.join(command)} took more than {timeout_s:.0f} s: {err.strip()[-500:]}") from None
    if child.returncode != 0:
        raise BenchError(f"{' '.join(command)} exited with {child.returncode}: {err.strip()[-500:]}")
    return out
