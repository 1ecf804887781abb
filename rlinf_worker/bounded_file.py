"""A file that people read and that nobody has to tidy up: appended to, of a bounded size, and never a reason to stop.

For: logs of workers (agent/worker_log.py), samples of a job (roles/reward). Not for what a job has to know again
(checkpoints). What must not be lost unseen (driver/output.py) is an AppendedFile that counts in its own way.
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


class AppendedFile:
    """Takes what is appended whole, or raises OSError and has nothing of it. At `limit` bytes NAME becomes NAME.1, in
    place of an older one."""

    def __init__(self, path: Path, *, limit: int) -> None:
        self.path, self._limit = path, limit
        self._older = path.with_name(f"{path.name}.1")
        self._fd: int | None = None

    def open(self) -> int:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self._fd

    def append(self, data: bytes) -> None:
        size = os.fstat(self.open()).st_size
        if size and size + len(data) > self._limit:
            self._make_room()
        fd = self.open()
        written = os.write(fd, data)
        if written < len(data):  # there was room for a part of it: no half line for the next one to go on with
            os.ftruncate(fd, os.fstat(fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _make_room(self) -> None:
        self.close()  # first: where somebody took the file away, the next line makes another
        self.path.replace(self._older)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class BoundedFile(AppendedFile):
    """What cannot be written (a full disk) is dropped, counted and said once a minute: a log must never stop the work
    that it is about."""

    def __init__(self, path: Path, *, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(path, limit=limit)
        self._clock = clock
        self._complained_at = -_COMPLAIN_EVERY_S
        self.dropped_bytes = 0

    def write(self, data: bytes) -> None:
        try:
            self.append(data)
        except OSError as error:
            self.dropped_bytes += len(data)
            if self._clock() - self._complained_at >= _COMPLAIN_EVERY_S:
                self._complained_at = self._clock()
                fields = {"path": str(self.path), "error": str(error), "dropped_bytes": self.dropped_bytes}
                logger.warning("cannot write, lines are dropped", extra=fields)
