"""What ties processes to their agent, so that none outlives it: signals on the parent's death, adoption, a mark.

    agent        adopt_orphans(): what its workers leave behind becomes its child, to be reaped
                 start_watchdog(): ends what is marked as the agent's when kill -9 took the agent
    worker       put_on(): dies with its agent; writes its stacks on SIGUSR1

In a container the agent is PID 1 and the kernel ends everything with it; the watchdog is for local mode, where a
worker's own children (an engine's processes) would be left, as the parent-death signal is not inherited by them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rlinf_api import names
from rlinf_api.errors import InvariantBroken, Stale

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

STACKS_SIGNAL: Final = signal.SIGUSR1


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise InvariantBroken(f"prctl({option}, {value}) failed", got=os.strerror(ctypes.get_errno()), wanted="Linux")


def put_on(environ: Mapping[str, str]) -> None:
    """First thing in a worker. One without an agent in its environment was started by a person, and stays free."""
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    if agent := environ.get(names.ENV_AGENT_PID, ""):
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(agent):  # it died before the call above could tie us to it
            raise Stale(
                f"worker {environ.get(names.ENV_WORKER_ID, '?')} has lost its agent",
                got=f"parent {os.getppid()}", wanted=f"agent {agent}",
            )  # fmt: skip


def adopt_orphans() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start_watchdog(mark: str) -> int | None:
    """pid of a process that waits for this one's death; None where we are PID 1 and the kernel does its work."""
    if os.getpid() == 1:
        return None
    script = str(Path(__file__).with_name("watchdog.py"))
    argv = [sys.executable, "-I", "-S", script, str(os.getpid()), f"{names.ENV_AGENT_MARK}={mark}"]
    # Signals to the agent's group must not end it before the agent: a session of its own.
    return os.posix_spawn(sys.executable, argv, {}, setsid=True, setsigmask=[])
