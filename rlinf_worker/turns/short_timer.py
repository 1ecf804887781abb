"""A timer for less than a millisecond: the selector under asyncio rounds every wait up to whole ones.

For: turns.worker, which calls a worker idle after half of one. A kernel's timerfd, as Python 3.13's os has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable


class ShortTimer:
    """`start` runs it once; from the event loop in which it was started first."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int | None = None
        self.pending = False

    def start(self, seconds: float) -> None:
        """Raises OSError where the process may open no more files."""
        if self._fd is None:
            self._fd = self._checked(self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
            asyncio.get_running_loop().add_reader(self._fd, self._fired, self._fd)
        whole = int(seconds)
        interval_and_value = (ctypes.c_long * 4)(0, 0, whole, max(1, int((seconds - whole) * 1e9)))
        self._checked(self._libc.timerfd_settime(self._fd, 0, interval_and_value, None))
        self.pending = True

    @staticmethod
    def _checked(result: int) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), f"timerfd: {os.strerror(ctypes.get_errno())}")
        return result

    def _fired(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):  # set anew meanwhile
            os.read(fd, 8)
            self.pending = False
            self._callback()

    def close(self) -> None:
        self.pending = False
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
        self._fd = None
