"""Copies of whole tensors: without the interpreter's lock, and past the caches.

For: edition (into an arena and out of a message) and agent.process, which starts workers so. Not for: arrays (tensors).

A store into memory that is not in the caches reads its line first, and what it evicts is written back: a third of the
traffic of copying a version of the weights, which nobody reads before all of it is there. The C library has stores
that go past the caches, and uses them from a size on that is 119 MB here, three quarters of the last cache: more than
any tensor. Told to use them from 1 MiB on it copies at 18 GB/s instead of 8 (200 MB in pieces of 1 MiB).
"""

from __future__ import annotations

import ctypes
from typing import Final

PAST_CACHE_BYTES: Final = 1 << 20
"""Half of a core's second-level cache here: a larger source would not stay between being copied and being hashed, and
smaller copies are of things that are read again soon."""

TUNABLES: Final = f"glibc.cpu.x86_non_temporal_threshold={PAST_CACHE_BYTES}"
"""GLIBC_TUNABLES of a worker whose pod says none. Where it means nothing (another C library, processor), copies are as
ever."""

UNLOCKED_BYTES: Final = 64 << 10
"""5 us of copying; giving the interpreter's lock up and taking it costs one."""


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """As target[:] = source, but without the interpreter's lock, where the source's address can be had."""
    if source.readonly or source.nbytes < UNLOCKED_BYTES:
        target[:] = source
        return
    here, there = (ctypes.c_char.from_buffer(m) for m in (target, source))
    ctypes.memmove(ctypes.addressof(here), ctypes.addressof(there), source.nbytes)
