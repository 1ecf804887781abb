"""Memory into which large frames are received, used again when nothing views it any more.

For: `tcp`, and `shm` where it puts chunks together. Not for: frames that stay in a ring.

Touching 64 MiB for the first time is 16,384 page faults; they, not the network, would set the pace (measured on
loopback with a raw socket: 0.4 to 1.0 GB/s into fresh memory, 1.1 to 2.9 GB/s into used).
An area goes back when the last array, tensor or slice
over it is collected, wherever that is (`ring.RingReader._lend` has the same trick), so nothing is ever overwritten
under a living view. One pool per process: charged by `take`, freed by the death of what it returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections import deque
from typing import Any

POOL_FROM_BYTES = 1 << 20
"""Smaller ones come from the allocator's own lists, which are faster than this."""

KEEP_BYTES = 256 << 20
"""Idle areas kept at most: four of 64 MB (one arriving, one waiting, one being read, one to spare)."""

_idle: dict[int, deque[mmap.mmap]] = {}
_types: dict[int, Any] = {}
_watches: dict[int, weakref.ref[object]] = {}


def idle_bytes() -> int:
    """What is kept for the next frames."""
    return sum(size * len(areas) for size, areas in list(_idle.items()))  # a copy: other threads add sizes


def take(nbytes: int) -> memoryview:
    """Writable memory of `nbytes`, with whatever was in it."""
    if nbytes < POOL_FROM_BYTES:
        return memoryview(bytearray(nbytes))
    size = 1 << (nbytes - 1).bit_length()  # what is above nbytes is never touched, and costs addresses only
    areas = _idle.setdefault(size, deque())
    try:
        area = areas.pop()
    except IndexError:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):
            area.madvise(mmap.MADV_HUGEPAGE)
        _types.setdefault(size, ctypes.c_ubyte * size)
    exporter = _types[size].from_buffer(area)

    def collected(watch: weakref.ref[object]) -> None:
        # In any thread, inside any allocation: no lock may be taken here, and none is needed.
        del _watches[id(watch)]
        if idle_bytes() + size <= KEEP_BYTES:
            areas.append(area)

    watch = weakref.ref(exporter, collected)
    _watches[id(watch)] = watch
    return memoryview(exporter).cast("B")[:nbytes]
