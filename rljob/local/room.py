"""What the machine refused to hold, in words: the error, the path, and how much room there is. Raises nothing.

For: whoever writes files that a run cannot do without. Not for: files for people, which are left out (dump.py).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})


def told(error: OSError, path: Path) -> str:
    """`path`: where it was tried, for errors that do not say.

    >>> told(OSError(errno.EACCES, "Permission denied", "/dev/shm/rlj-1"), Path("/dev/shm"))
    'Permission denied (/dev/shm/rlj-1)'
    """
    place = Path(error.filename or path)
    facts = [str(place)]
    if error.errno in _FULL:
        try:
            disk = os.statvfs(next(folder for folder in (place, *place.parents) if folder.is_dir()))
        except (OSError, StopIteration):
            facts.append("how much is free cannot be read")
        else:
            facts.append(f"{disk.f_bavail * disk.f_frsize} of {disk.f_blocks * disk.f_frsize} bytes free")
    return f"{error.strerror or error} ({', '.join(facts)})"
