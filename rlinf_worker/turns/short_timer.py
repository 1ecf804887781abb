"""A timer for less than a millisecond: the selector under asyncio rounds every wait up to whole ones.

For: turns.worker, which calls a worker idle after half of one. Where the kernel has no timerfd it is asyncio's timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class ShortTimer:
    """`start` runs it once; from the event loop in which it was started first."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._fd: int | None = None
        self._libc: Any = None
        self._fallback: asyncio.TimerHandle | None = None
        self.pending = False

    def start(self, seconds: float) -> None:
        if self._fd is None:
            self._fd = self._open()
        self.pending = True
        if self._fd < 0 or seconds <= 0 or not self._set(seconds):
            self._fallback = asyncio.get_running_loop().call_later(seconds, self._over)

    def _open(self) -> int:
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            fd = int(self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        except (AttributeError, OSError) as error:
            logger.debug("no timerfd; a millisecond is the least", extra={"error": str(error)})
            return -1
        if fd >= 0:
            asyncio.get_running_loop().add_reader(fd, self._fired, fd)
        return fd

    def _set(self, seconds: float) -> bool:
        whole = int(seconds)
        interval_and_value = (ctypes.c_long * 4)(0, 0, whole, max(1, int((seconds - whole) * 1e9)))
        return bool(self._libc.timerfd_settime(self._fd, 0, interval_and_value, None) == 0)

    def _fired(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):  # set anew meanwhile
            os.read(fd, 8)
            self._over()

    def _over(self) -> None:
        self._fallback = None
        if self.pending:
            self.pending = False
            self._callback()

    def close(self) -> None:
        self.pending = False
        if self._fallback is not None:
            self._fallback.cancel()
        if self._fd is not None and self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
        self._fd = -1
