"""Rollouts of a run that are killed every few steps, as a machine would lose them."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Final

import psutil

from rlinf_api import names

LOOK_S: Final = 0.2
"""A step takes seconds."""


def kill_every(steps: int, *, child: subprocess.Popen[str], metrics: Path, timeout_s: float) -> int:
    """Until `child`, which is `rljob run`, has ended; after that many steps each time. Returns how many were killed.
    Raises TimeoutExpired."""
    deadline, killed, due = time.monotonic() + timeout_s, 0, steps
    while child.poll() is None:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(child.args, timeout_s)
        done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if done >= due and (rollout := _rollout(child.pid)) is not None:
            rollout.kill()
            killed, due = killed + 1, due + steps
        time.sleep(LOOK_S)
    return killed


def _rollout(pid: int) -> psutil.Process | None:
    """The first worker of role rollout, below that process."""
    try:
        for process in psutil.Process(pid).children(recursive=True):
            if process.cmdline()[-1:] == ["worker"] and process.environ().get(names.ENV_WORKER_ID) == "rollout/0":
                return process
    except psutil.Error:  # one has just ended
        return None
    return None
