"""The phase that a worker is in, where its agent can read it without the worker's help.

A role declares a phase and may block its event loop at once, for as long as the phase allows: the message to the agent
would leave afterwards. So the change stands in a file first, of the worker's own folder, and an agent that is about to
take the worker for hung looks there. Signs of life within a phase are messages alone.

The clock is the machine's monotonic one, which worker and agent share.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, NamedTuple

FILE: Final = "phase"
_SIZE: Final = 128
"""Bytes, always: a change is one write over the last one, needs no room on a full disk and is never half there."""


class Mark(NamedTuple):
    phase: str
    deadline_s: float
    at: float  # seconds of the monotonic clock


class Writer:
    """`close` it. Raises OSError where the folder takes no file."""

    def __init__(self, folder: str) -> None:
        self._fd = os.open(os.path.join(folder, FILE), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, mark: Mark) -> None:
        text = f"{mark.at:.3f} {mark.deadline_s:.3f} {mark.phase}"
        os.pwrite(self._fd, text.encode()[:_SIZE].ljust(_SIZE), 0)

    def close(self) -> None:
        os.close(self._fd)


def read(folder: Path) -> Mark | None:
    """None where the worker has declared nothing."""
    with contextlib.suppress(OSError, ValueError):
        at, deadline_s, phase = (folder / FILE).read_text(encoding="utf-8").rstrip().split(" ", 2)
        return Mark(phase, float(deadline_s), float(at))
    return None
