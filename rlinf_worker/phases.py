"""The phase that a worker is in, how long it may last, and where its agent can read it without the worker's help.

A role declares a phase and may block its event loop at once, for as long as the phase allows: the message to the agent
would leave afterwards. So the change stands in a file first, of the worker's own folder, and an agent that is about to
take the worker for hung looks there. Signs of life within a phase are messages alone.

The clock is the machine's monotonic one, which worker and agent share.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from rlinf_worker.settings import Settings

FILE: Final = "phase"
STEPS_KEPT: Final = 64  # for the median
_SIZE: Final = 128
"""Bytes, always: a change is one write over the last one, needs no room on a full disk and is never half there."""


class Phases:
    """What the worker says it is doing, and until when it must show life."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._declared: tuple[str, float | None] = ("start", None)
        self._open: list[tuple[str, float | None]] = []  # of what is under way
        self._current: tuple[str, float | None] = self._declared
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)
        self.on_change: Callable[[], None] = lambda: None

    def enter(self, phase: str, *, deadline_s: float | None = None) -> None:
        self._declared = (phase, deadline_s)
        self._settle()

    @contextlib.contextmanager
    def during(self, phase: str, *, deadline_s: float | None = None) -> Iterator[None]:
        """In that phase, or in what is declared or open beside it where that has the later deadline."""
        entry = phase, deadline_s
        self._open.append(entry)
        self._settle()
        try:
            yield
        finally:
            self._open.remove(entry)
            self._settle()

    def _settle(self) -> None:
        others = [entry for entry in self._open if entry != (self._declared[0], None)]
        current = max([self._declared, *others], key=lambda p: self._deadline_of(*p)) if others else self._declared
        if current != self._current:
            self._current = current
            self.on_change()

    @property
    def phase(self) -> str:
        return self._current[0]

    def note_step(self, seconds: float) -> None:
        """How long one piece of work took during which the loop may have been blocked."""
        self._steps.append(seconds)

    @property
    def first_deadline_s(self) -> float | None:
        """How long the first piece of work may take; None once one was measured."""
        return None if self._steps else self._settings.first_step_deadline_s

    def deadline_s(self) -> float:
        return self._deadline_of(*self._current)

    def _deadline_of(self, phase: str, deadline_s: float | None) -> float:
        if deadline_s is not None:
            return deadline_s
        return self._settings.phase_deadline_s(phase, median_step_s=statistics.median(self._steps or [0.0]))


class Mark(NamedTuple):
    phase: str
    deadline_s: float
    at: float  # seconds of the monotonic clock


class MarkWriter:
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
