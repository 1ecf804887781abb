"""Shared memory without a name: made, mapped, and its page tables filled without stopping the event loop.

For: `shm`, and the arenas of weights. Not for: what lies in it (`ring`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import platform
import tempfile
import threading

from rlinf_worker.links.errors import ShmTooSmall
from rlinf_worker.links.settings import MIB

logger = logging.getLogger(__name__)

_STRONG_ORDER = frozenset({"x86_64", "AMD64"})

AT_ONCE_BYTES = 4 * MIB
"""Up to this size a mapping is filled where it is made: 4 ms."""

_MADV_POPULATE_WRITE = 23
_STEP_BYTES = 4 * MIB
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def supported() -> str | None:
    """None, or why this machine cannot have shared-memory links."""
    if platform.system() != "Linux":
        return f"shared-memory links need Linux (memfd, eventfd), this is {platform.system()}"
    if platform.machine() not in _STRONG_ORDER:
        return f"shared-memory links rely on x86's memory order, this is {platform.machine()}; TCP is used instead"
    return None


def make_segment(directory: str, nbytes: int) -> int:
    """A descriptor of `nbytes` reserved bytes of shared memory without a name. Raises ShmTooSmall."""
    try:
        try:
            fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as err:
            if err.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                raise
            fd, path = tempfile.mkstemp(prefix="rlinf-link-", dir=directory)
            os.unlink(path)
    except OSError as err:
        raise ShmTooSmall(
            f"cannot make shared memory in {directory}",
            got=err.strerror or str(err),
            wanted="a writable tmpfs",
            next="mount a Memory emptyDir there",
        ) from err
    try:
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as err:
        stat = os.statvfs(directory)
        os.close(fd)
        if err.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
            raise
        raise ShmTooSmall(
            f"no room for a ring in {directory}",
            got=f"{stat.f_bavail * stat.f_frsize} of {stat.f_blocks * stat.f_frsize} bytes free",
            wanted=f"{nbytes} bytes",
            next=f"raise the size limit of the volume at {directory}, or lower ring_bytes",
        ) from err
    return fd


def map_segment(fd: int) -> mmap.mmap:
    """Maps all of it; the descriptor is no longer needed afterwards and is closed.

    The page tables of a large one stay empty: filling those of 64 MiB takes 60 ms, in which CPython's mmap holds the
    GIL. Whoever is about to use all of it calls `populate`, in a thread; whoever does not pays by the page.
    """
    try:
        size = os.fstat(fd).st_size
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if size <= AT_ONCE_BYTES else 0))
    finally:
        os.close(fd)


def populate(memory: mmap.mmap) -> None:
    """Fill the page tables of a large mapping. Blocks, without the GIL (ctypes gives it up); call it in a thread.

    Only a hint: a kernel before 5.14 does not know it, and pages then come as they are touched.
    """
    size = len(memory)
    if size <= AT_ONCE_BYTES:
        return
    view = (ctypes.c_ubyte * size).from_buffer(memory)  # while it lives nobody can unmap what is being filled
    start = ctypes.addressof(view)
    for at in range(0, size, _STEP_BYTES):  # in steps, as each holds a lock that other faults of the process need
        if _libc.madvise(start + at, min(_STEP_BYTES, size - at), _MADV_POPULATE_WRITE) != 0:
            logger.debug("cannot fill page tables ahead", extra={"why": os.strerror(ctypes.get_errno())})
            return


def populate_aside(memory: mmap.mmap) -> None:
    """As `populate`, in a thread of its own, for a caller that goes on with the memory meanwhile."""
    if len(memory) > AT_ONCE_BYTES:
        with contextlib.suppress(RuntimeError):  # no thread to be had: pages come as they are touched
            threading.Thread(target=populate, args=(memory,), name="populate", daemon=True).start()
