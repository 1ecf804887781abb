"""What of checkpoints in an object store lies on this machine for a while: a draft, or what is read whole.

    $TMPDIR/rlinf-<uid>-<hash>/<pid>/<name>/...

For: objects.py.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from pathlib import Path


class OwnDisk:
    """Folders of this process, of one place of checkpoints."""

    def __init__(self, uri: str) -> None:
        self._hash = hashlib.sha256(uri.encode()).hexdigest()[:16]

    @property
    def _root(self) -> Path:
        return Path(tempfile.gettempdir()) / f"rlinf-{os.geteuid()}-{self._hash}"

    def at(self, name: str) -> Path:
        return self._root / str(os.getpid()) / name

    def make(self, name: str) -> Path:
        """Empty. What processes that were killed have left goes."""
        self._root.mkdir(mode=0o700, exist_ok=True)
        if self._root.stat().st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"{self._root} belongs to another user")
        for left in self._root.iterdir():
            if not Path("/proc", left.name).exists():
                shutil.rmtree(left, ignore_errors=True)
        self.discard(name)
        self.at(name).mkdir(parents=True)
        return self.at(name)

    def discard(self, name: str) -> None:
        shutil.rmtree(self.at(name), ignore_errors=True)
