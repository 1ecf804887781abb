"""A file that people read and that nobody has to tidy up: appended to, of a bounded size, and never a reason to stop.

For: logs of workers (agent/worker_log.py), samples of a job (roles/reward). Not for what a job has to know again
(checkpoints), nor for what must not be lost unseen (driver/output.py).
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_COMPLAIN_EVERY_S: Final = 60.0


class BoundedFile:
    """Appends; at `limit` bytes NAME becomes NAME.1, once. What cannot be written (a full disk) is dropped, counted and
    said once a minute: a log must never stop the work that it is about."""

    def __init__(self, path: Path, *, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._limit, self._clock = path, limit, clock
        self._fd: int | None = None
        self._size = 0
        self._complained_at = -_COMPLAIN_EVERY_S
        self.dropped_bytes = 0

    def write(self, data: bytes) -> None:
        try:
            if self._fd is None:
                self._open()
            elif self._size and self._size + len(data) > self._limit:
                self.close()
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._open()
            assert self._fd is not None
            written = os.write(self._fd, data)
            if written < len(data):  # there was room for a part of it: no half line for the next one to go on with
                os.ftruncate(self._fd, self._size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += written
        except OSError as error:
            self.dropped_bytes += len(data)
            if self._clock() - self._complained_at >= _COMPLAIN_EVERY_S:
                self._complained_at = self._clock()
                fields = {"path": str(self.path), "error": str(error), "dropped_bytes": self.dropped_bytes}
                logger.warning("cannot write, lines are dropped", extra=fields)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
