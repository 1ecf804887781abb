"""A job run for real, on this machine, for a proof: what its steps took, what was profiled, how busy the cores were."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from rlinf_api.plan import RLPlanSpec
from rlinf_api.profile import Profile
from tools.workloads import ROOT

BUSY: Final = 0.7
"""The share of the machine's cores that may be busy over a run: beyond it a run is void, as what it measures is the
machine."""
WRITTEN: Final = {"pools", "workers", "lease_sets", "channels", "cycles"}
"""What a person writes down of a plan: the rest is about who wrote it, and why."""


class RunFailed(Exception):
    """With the end of what the run said."""


class NotEnded(RunFailed):
    """Within the time that it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Went:
    seconds: tuple[float, ...]
    """From commit to commit; the first step has none."""
    whole_s: float
    """From the first commit to the last, pauses between included."""
    profiles: tuple[Profile, ...]
    plans: tuple[RLPlanSpec, ...]
    """In the order of their revisions."""
    busy: float
    """Share of the machine's cores, everybody's work included."""

    @property
    def is_void(self) -> bool:
        return self.busy > BUSY


def run(job: Mapping[str, Any], *, plan: Mapping[str, Any] | None = None, timeout_s: float) -> Went:
    """`plan`: instead of the scheduler's first one, and pinned."""
    with _folder() as folder:
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(dict(job)), encoding="utf-8")
        words = [sys.executable, "-m", "rljob", "run", str(file), "--work-dir", str(folder / "work")]
        if plan is not None:
            (folder / "plan.yaml").write_text(yaml.safe_dump(dict(plan)), encoding="utf-8")
            words += ["--plan", str(folder / "plan.yaml")]
        before = psutil.cpu_times()
        try:
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise NotEnded(f"not ended within {timeout_s:.0f} s: {str(error.stderr)[-1000:]}") from error
        busy = _busy(before, psutil.cpu_times())
        if done.returncode:
            raise RunFailed(f"exit code {done.returncode}: {done.stderr[-2000:]!r}")
        return _read(folder / "work", busy)


def _busy(before: Any, after: Any) -> float:
    """The share of the cores that was at work between; of runs side by side each has its own."""
    spent: dict[str, float] = {
        kind: getattr(after, kind) - getattr(before, kind) for kind in after._fields if "guest" not in kind
    }
    return 1.0 - (spent["idle"] + spent["iowait"]) / sum(spent.values())


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="prove-") as name:
        yield Path(name)


def _read(work: Path, busy: float) -> Went:
    commits = [json.loads(line)["time"] for line in _lines(work / "metrics.jsonl")]
    objects = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in (work / "objects").glob("rlplan-*.yaml")]
    plans = sorted((RLPlanSpec.model_validate(one["spec"]) for one in objects), key=lambda one: one.revision)
    return Went(
        seconds=tuple(b - a for a, b in pairwise(commits)),
        whole_s=commits[-1] - commits[0],
        profiles=tuple(Profile.from_json(line) for line in _lines(work / "profiles.jsonl")),
        plans=tuple(plans),
        busy=busy,
    )


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def written(plan: RLPlanSpec) -> dict[str, Any]:
    """As a file of `rljob run --plan`."""
    return plan.model_dump(mode="json", by_alias=True, include=WRITTEN)
