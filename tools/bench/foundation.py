"""What `make bench-foundation` measures: the bars of the first version, on a job that learns CartPole.

The job is examples/cartpole/rljob.yaml as committed, so that speed and learning are of the same run; each run of the
harness takes three seeds: the slowest of them to learn counts, and the median of their rates. The row demo_fresh makes
the whole environment from nothing with empty caches (two minutes, 6 GB) and is only run when asked for by name:

    make bench-foundation
    .venv/bin/python -m tools.bench foundation --row demo_fresh
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools import env
from tools.bench.foundation_parts import runs
from tools.bench.harness import ROOT, BenchError, Reference, Row, command

SEEDS: Final = (1, 2, 3)
SB3: Final = "stable-baselines3==2.9.2"
SB3_FOLDER: Final = ROOT / "build" / "bench" / "sb3"
HOP: Final = Path(__file__).parent / "foundation_parts" / "hop.yaml"
DEMO_TIMEOUT_S: Final = 900.0


def cartpole() -> Mapping[str, float]:
    solved, rates = [], []
    for seed in SEEDS:
        with runs.run(runs.CARTPOLE, "--seed", str(seed)) as run:
            solved.append(run.solved_at)
            rates.append(float(run.answer["env_steps_per_s"]))
    return {"cartpole_steps_to_475": max(solved), "cartpole_env_steps_per_s": statistics.median(rates)}


def cartpole_with_sb3() -> Mapping[str, float]:
    """Our Python, torch and gymnasium; only Stable-Baselines3 itself is installed beside them, once."""
    if not (SB3_FOLDER / "stable_baselines3").is_dir():
        _install_sb3()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tools.bench.foundation_parts.sb3_cartpole", "--seed", str(SEEDS[0])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(SB3_FOLDER)))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        raise BenchError(f"the reference exited with {done.returncode}: {done.stderr.strip()[-500:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return {
        "cartpole_steps_to_475": float(answer["solved_at"] or runs.NEVER),
        "cartpole_env_steps_per_s": float(answer["env_steps_per_s"]),
    }


def _install_sb3() -> None:
    uv = str(ROOT / ".venv" / "bin" / "uv")
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--target", str(SB3_FOLDER)]
    done = subprocess.run(
        [*install, "--constraints", "constraints/bench.txt", SB3, "cloudpickle"],
        cwd=ROOT, env=env.environment(), check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise BenchError(f"{SB3} could not be installed into {SB3_FOLDER.relative_to(ROOT)}; uv's message is above")


def first_env_step() -> float:
    with runs.run(runs.CARTPOLE, "--set", "spec.flow.steps=2") as run:
        return run.first_env_step_s()


def hop() -> Mapping[str, float]:
    """Medians over the steps behind the first, which warms up."""
    with runs.run(HOP) as run:
        steps = run.metrics[1:]
    names = {"stream_1kb_p50": "p50_us", "stream_1kb_p99": "p99_us", "stream_1kb_rate": "messages_per_s"}
    return {row: statistics.median(step[name] for step in steps) for row, name in names.items()}


def demo_fresh() -> float:
    """`make demo` in a clone of what is committed, with nothing in any cache of uv or pip."""
    with tempfile.TemporaryDirectory(prefix="rlinf-demo-") as folder:
        clone, cache = Path(folder) / "clone", Path(folder) / "cache"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        environment |= {"UV_CACHE_DIR": str(cache / "uv"), "PIP_CACHE_DIR": str(cache / "pip")}
        python = shutil.which(getattr(sys, "_base_executable", "") or "python3") or "python3"
        started = time.perf_counter()
        done = subprocess.run(
            ["make", "demo", f"PYTHON={python}"],
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEMO_TIMEOUT_S,
            check=False,
        )
        took_s = time.perf_counter() - started
        if done.returncode != 0:
            raise BenchError(f"make demo exited with {done.returncode}: {(done.stdout + done.stderr).strip()[-500:]}")
        return took_s


def rows() -> list[Row]:
    sb3 = Reference(name="SB3 2.9.2, rl-zoo settings", measure=cartpole_with_sb3)
    validate = command([str(runs.RLJOB), "validate", str(runs.CARTPOLE)])
    found = [
        Row(
            name="cartpole_steps_to_475", unit="env steps", better="lower", bar=100_000, subject=cartpole, reference=sb3
        ),
        Row(
            name="cartpole_env_steps_per_s", unit="steps/s", better="higher", bar_ratio=1.2, subject=cartpole,
            reference=sb3,
        ),
        Row(name="stream_1kb_p50", unit="us", better="lower", bar=300, subject=hop),
        Row(name="stream_1kb_p99", unit="us", better="lower", bar=1000, subject=hop),
        Row(name="stream_1kb_rate", unit="msg/s", better="higher", bar=20_000, subject=hop),
        Row(name="first_env_step", unit="s", better="lower", bar=8, subject=first_env_step),
        Row(name="validate", unit="s", better="lower", bar=0.5, subject=validate),
    ]  # fmt: skip
    if "demo_fresh" in sys.argv:
        found.append(Row(name="demo_fresh", unit="s", better="lower", bar=300, subject=demo_fresh))
    return found
