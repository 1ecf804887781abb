"""What `make bench-reasoning` measures: a step of flow grpo beside TRL's, and what the job costs beside its engine.

    make bench-reasoning ROWS="step_transformers tokens_in_job_vllm"

The task is `sevens` of `make learn-reasoning`: a model of 0.3 million parameters, 64 prompts x 8 samples x 32 tokens in
each step. TRL is installed once into build/bench/trl, beside our own torch and transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, Final

from tools import env
from tools.bench.harness import ROOT, BenchError, Measure, Reference, Row
from tools.bench.reasoning_parts import jobs

TRL: Final = ("trl==1.16.0", "accelerate", "datasets", "multiprocess", "pandas")
"""What of TRL's requirements our environment has not; constraints/bench.txt says which versions."""
TRL_FOLDER: Final = ROOT / "build" / "bench" / "trl"
STEPS, TRL_STEPS = 10, 7
LONG_STEPS: Final = 500
CHILD_TIMEOUT_S: Final = 600.0
ENGINES: Final = ("transformers", "vllm")
FEW: Final[Mapping[str, Any]] = {
    "flow.maxStaleness": 1, "flow.config.promptsPerStep": 4, "flow.config.samplesPerPrompt": 2,
    "flow.config.channels.rewarded.microBatch": 1, "roles.0.config.maxResponseTokens": 200,
    "roles.0.config.minResponseTokens": 200,
}  # fmt: skip
"""8 samples under way, long enough that new weights find them so."""
TINY: Final[Mapping[str, Any]] = {
    "flow.config.promptsPerStep": 8, "flow.config.samplesPerPrompt": 4, "roles.0.config.maxResponseTokens": 8,
    "roles.0.config.minResponseTokens": 8,
}  # fmt: skip
BOTH_CORES: Final[Mapping[str, Any]] = {"roles.0.workers": 2, "roles.2.workers": 2, "pools.0.slots.perPod": 5}
"""All samples of a step end at once, so rollouts and actor work one after the other: each of them on two cores."""
TURNS: Final[Mapping[str, Any]] = {"placement.mode": "Collocated", "pools.0.slots.perPod": 1}


def step(engine: str, steps: int) -> float:
    with jobs.ran(jobs.row_of(f"sevens-{engine}", steps=steps), jobs.task("sevens"), change=BOTH_CORES) as run:
        return jobs.step_s(run.metrics)


def step_of_trl() -> float:
    if not (TRL_FOLDER / "trl").is_dir():
        _install_trl()
    path = os.pathsep.join((str(ROOT), str(TRL_FOLDER)))
    folder = str(jobs.task("sevens"))
    return float(
        _child("tools.bench.reasoning_parts.trl_sevens", folder, "--steps", str(TRL_STEPS), path=path)["step_s"]
    )


def _install_trl() -> None:
    uv = str(ROOT / ".venv" / "bin" / "uv")
    done = subprocess.run(
        [uv, "pip", "install", "--quiet", "--no-deps", "--target", str(TRL_FOLDER), "--constraints",
         "constraints/bench.txt", *TRL],
        cwd=ROOT, env=env.environment(), check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise BenchError(f"{TRL[0]} could not be installed into {TRL_FOLDER.relative_to(ROOT)}; uv's message is above")


def tokens_in_job(engine: str, steps: int) -> float:
    with jobs.ran(jobs.row_of(f"sevens-{engine}", steps=steps), jobs.task("sevens")) as run:
        return jobs.tokens_per_busy_s(run.metrics)


def tokens_bare(engine: str) -> float:
    folder = str(jobs.task("sevens"))
    return float(_child("tools.bench.reasoning_parts.bare_engine", folder, "--engine", engine)["tokens_per_s"])


def _child(module: str, *arguments: str, path: str = str(ROOT)) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise BenchError(f"{module} exited with {done.returncode}: {done.stderr.strip()[-800:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def commit_to_token(engine: str, steps: int) -> float:
    """Milliseconds."""
    with jobs.ran(jobs.row_of(f"sevens-{engine}", steps=steps), jobs.task("sevens"), change=FEW) as run:
        return 1000.0 * jobs.commit_to_token_s(run.metrics, jobs.spans_of(run))


def commit_to_loaded(steps: int) -> float:
    """Milliseconds. How long its tokens take says more of the core than of us: 8 x 200 positions of 92 million."""
    with jobs.ran(jobs.row_of("sevens-transformers", steps=steps), jobs.large_task(), change=FEW) as run:
        return 1000.0 * jobs.commit_to_loaded_s(run.metrics, jobs.spans_of(run))


def turns(engine: str, steps: int) -> float:
    """Per cent."""
    with jobs.ran(jobs.row_of(f"sevens-{engine}", steps=steps), jobs.task("sevens"), change=TURNS) as run:
        return 100.0 * jobs.not_computing(run.metrics)


def memory(steps: int) -> float:
    """Per cent."""
    with jobs.Memory() as seen, jobs.ran(jobs.row_of("sevens-transformers", steps=steps), jobs.task("sevens"),
                                         change=TINY) as run:  # fmt: skip
        around = max(2, steps // 20)
        return jobs.growth(seen.samples, run.metrics, first=max(1, steps // 10), last=steps, around=around)


@cache
def _same(measure: Any, *arguments: Any) -> Measure:
    """One object for one call: rows that share it are measured once."""
    return partial(measure, *arguments)


def _rows(*, steps: int, long_steps: int, runs: int, with_trl: bool) -> list[Row]:
    trl = Reference(name="TRL 1.16, one thread", measure=step_of_trl) if with_trl else None
    ratio = {"transformers": 0.9, "vllm": 1.25}
    found = []
    for engine in ENGINES:
        found.append(Row(
            name=f"step_{engine}", unit="s", better="lower", bar_ratio=ratio[engine] if trl else None,
            subject=_same(step, engine, steps), reference=trl, runs=runs,
        ))  # fmt: skip
        bare = Reference(name="the engine alone", measure=_same(tokens_bare, engine))
        found.append(Row(
            name=f"tokens_in_job_{engine}", unit="tokens/s", better="higher", bar_ratio=0.85,
            subject=_same(tokens_in_job, engine, steps), reference=bare, runs=runs,
        ))  # fmt: skip
        found.append(Row(
            name=f"commit_to_token_{engine}", unit="ms", better="lower", bar=80.0,
            subject=_same(commit_to_token, engine, steps), runs=runs,
        ))  # fmt: skip
        found.append(Row(
            name=f"turns_{engine}", unit="%", better="lower", bar=15.0, subject=_same(turns, engine, steps), runs=runs
        ))  # fmt: skip
    found.append(Row(
        name="commit_to_loaded_92m", unit="ms", better="lower", bar=500.0, subject=_same(commit_to_loaded, 6), runs=1
    ))  # fmt: skip
    found.append(Row(
        name="memory_growth", unit="%", better="lower", bar=2.0, subject=_same(memory, long_steps), runs=1
    ))  # fmt: skip
    return found


def rows() -> list[Row]:
    """Runs of seconds to minutes, so 3 of each: 25 minutes in all on an idle machine."""
    return _rows(steps=STEPS, long_steps=LONG_STEPS, runs=3, with_trl=True)


def small_rows() -> list[Row]:
    small = ("step_transformers", "tokens_in_job_transformers", "commit_to_token_transformers", "turns_transformers")
    every = _rows(steps=4, long_steps=40, runs=1, with_trl=False)
    return [row for row in every if row.name in (*small, "memory_growth")]
