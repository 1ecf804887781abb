"""Memory in which a version of the weights lies, at whoever has it: shared within a pod, and used again.

For: edition (writes a publisher's copy, or what a receiver was sent) and channel. Not for: what lies where.

Whoever has a version in shared memory says where (`Shared`), and another process of the pod maps it instead of being
sent it. The file has no name that a crash could leave behind: a reader opens it by the owner's /proc/PID/fd/N, which
the kernel allows to the same uid, and takes it only if device, inode and size are those it was told. Its mapping is
private: what a role writes into its arrays, it writes into a copy of that page.

    idle ──take()──► written ──► current (hold) ──replaced (let_go)──► still viewed or mapped ──► idle

charged by `take`; free again when nobody holds it, no array or message views it and no peer has it mapped. One that is
not free in time costs another arena, up to MAX_ARENAS; then memory that is not kept.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, Final

from rlinf_worker.links import segments
from rlinf_worker.links.errors import ShmTooSmall

logger = logging.getLogger(__name__)

MAX_ARENAS: Final = 3
"""The version that roles read, the one that is being written, one whose last reader is late."""

SMALL_BYTES: Final = 1 << 20
"""Below it, sending costs less than mapping and the words that go with it."""

MAX_MAPPINGS: Final = 2 * MAX_ARENAS

Shared = tuple[int, int, int, int, int]
"""(pid, descriptor there, device, inode, bytes)."""


class Arena:
    """`held`: current for somebody here. `leases`: who has it mapped, as (peer, branch, number) -> pid."""

    def __init__(self, memory: mmap.mmap | bytearray, *, fd: int = -1, is_ours: bool = True) -> None:
        """`is_ours`: made here; else a peer's, mapped."""
        self.nbytes = len(memory)
        self.held = 0
        self.leases: dict[tuple[str, int, int], int] = {}
        self.memory = memoryview(memory)
        self._memory, self._fd, self._is_ours = memory, fd, is_ours
        self._type: Any = ctypes.c_ubyte * self.nbytes
        self._views: dict[int, weakref.ref[object]] = {}
        if fd >= 0:
            weakref.finalize(self, os.close, fd)

    @property
    def shared(self) -> Shared | None:
        """Where another worker of the pod finds it. A peer's is the peer's to share, which counts who has it mapped."""
        return self.readable if self._is_ours else None

    @property
    def readable(self) -> Shared | None:
        """Where a child process of this worker finds it, whoever made it, for as long as it is held here."""
        if self._fd < 0:
            return None
        stat = os.fstat(self._fd)
        return os.getpid(), self._fd, stat.st_dev, stat.st_ino, stat.st_size

    def lend(self) -> memoryview:
        """All of it. The arena is busy until the last slice, array or tensor over it is collected."""
        # One ctypes object: every view over it keeps it alive, and its death is the only sure sign that none is left.
        exporter = self._type.from_buffer(self._memory)
        views = self._views

        def collected(watch: weakref.ref[object]) -> None:  # in any thread: no lock may be taken here
            views.pop(id(watch), None)

        watch = weakref.ref(exporter, collected)
        views[id(watch)] = watch
        return memoryview(exporter).cast("B")

    @property
    def viewed(self) -> bool:
        return bool(self._views)

    @property
    def busy(self) -> bool:
        """A peer that died without a word is seen to be gone by its pid."""
        for lease in [k for k, pid in self.leases.items() if not _lives(pid)]:
            del self.leases[lease]
        return bool(self.held or self.leases or self._views)


def anonymous(nbytes: int) -> Arena:
    """In memory of no file system, which child processes can map all the same."""
    size = max(nbytes, 1)
    size += -size % mmap.PAGESIZE
    fd = os.memfd_create("weights", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, size)
        return Arena(mmap.mmap(fd, size, flags=mmap.MAP_SHARED), fd=fd)
    except OSError:
        os.close(fd)
        raise


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class Arenas:
    """One worker's, in its event loop, but for the death of views, and for one `take` at a time in a thread."""

    def __init__(self, shm_dir: str | None) -> None:
        self._shm_dir = shm_dir
        self._kept: list[Arena] = []
        self._making = asyncio.Lock()
        self._mapped: dict[tuple[int, int], Arena] = {}

    async def taken(self, nbytes: int) -> Arena:
        """As `take`, which works in a thread where it takes long."""
        async with self._making:
            return await asyncio.to_thread(self.take, nbytes) if self.makes(nbytes) else self.take(nbytes)

    def take(self, nbytes: int) -> Arena:
        """Held once, with whatever was in it. Reserving shared memory takes 0.4 s per GB, the first time."""
        if nbytes < SMALL_BYTES:
            made = Arena(bytearray(max(nbytes, 1)))
            made.held = 1
            return made
        idle = [a for a in self._kept if not a.busy]
        fitting = [a for a in idle if nbytes <= a.nbytes <= 2 * nbytes]
        if fitting:
            found = min(fitting, key=lambda a: a.nbytes)
            found.held = 1
            return found
        if idle and len(self._kept) >= MAX_ARENAS:
            self._kept.remove(idle[0])
        found = self._make(nbytes)
        found.held = 1
        if len(self._kept) < MAX_ARENAS:
            self._kept.append(found)
        return found

    def makes(self, nbytes: int) -> bool:
        """Whether `take` would have to make one, and not use one again."""
        return nbytes >= SMALL_BYTES and not any(nbytes <= a.nbytes <= 2 * nbytes and not a.busy for a in self._kept)

    def end_leases(self, peer: str, is_over: Callable[[tuple[int, int]], bool]) -> None:
        """Ends this peer's leases of versions, (branch, number), that are over. Only what is kept is ever shared."""
        for arena in self._kept:
            over = [k for k in arena.leases if k[0] == peer and is_over((k[1], k[2]))]
            for lease in over:
                del arena.leases[lease]

    def _make(self, nbytes: int) -> Arena:
        size = nbytes + -nbytes % mmap.PAGESIZE
        if self._shm_dir is not None and segments.supported() is None and len(self._kept) < MAX_ARENAS:
            try:
                fd = segments.make_segment(self._shm_dir, size)
                return Arena(mmap.mmap(fd, size, flags=mmap.MAP_SHARED), fd=fd)
            except ShmTooSmall as error:
                logger.warning("weights are sent within the pod, not mapped", extra={"why": str(error)})
                self._shm_dir = None
        return Arena(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def map(self, shared: Shared) -> Arena | None:
        """A peer's arena; None where this process may not, or it is another by now."""
        pid, fd, device, inode, size = shared
        key = device, inode  # an inode is not used again while our mapping keeps it
        known = self._mapped.get(key)
        if known is not None and known.nbytes == size:
            return known
        try:
            here = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            logger.info("cannot map a peer's weights", extra={"pid": pid, "why": str(error)})
            return None
        try:
            stat = os.fstat(here)
            if (stat.st_dev, stat.st_ino, stat.st_size) != (device, inode, size) or size <= 0:
                os.close(here)
                return None
            memory = mmap.mmap(here, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            os.close(here)
            logger.info("cannot map a peer's weights", extra={"pid": pid, "why": str(error)})
            return None
        for old in [k for k, arena in self._mapped.items() if not arena.busy][: len(self._mapped) - MAX_MAPPINGS + 1]:
            del self._mapped[old]
        made = self._mapped[key] = Arena(memory, fd=here, is_ours=False)
        return made
