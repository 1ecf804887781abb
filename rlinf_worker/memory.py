"""Memory in use on slots: of accelerators, as their driver says, and of the host by a worker's processes.

For: the agent, which waits until a dead worker's memory is free (turns.py, vacancy.py), and turns.worker, which looks
at what a role keeps when it has been offloaded. NVML is asked through ctypes, as an agent imports nothing large; where
there is no libnvidia-ml there is no GPU whose memory could stay.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from typing import Final

from rlinf_worker import proctree

logger = logging.getLogger(__name__)

_LIBRARY: Final = "libnvidia-ml.so.1"
FREED_SHARE: Final = 0.5  # so much of what a worker had on the pod's accelerators: others of the pod come and go
LIMIT_S: Final = 30.0  # a driver frees a dead process within a second; then the level is somebody else's


def free_level(before_bytes: int, had_bytes: int) -> float:
    """At which the memory counts as free of a worker that had so much, and before whom so much was used."""
    return before_bytes + (1 - FREED_SHARE) * had_bytes


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Probe:
    """The accelerators of this pod, or those of some slots by name (devices.py); without a driver there are none."""

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self._devices: list[ctypes.c_void_p] = []
        self._said = False
        try:
            self._nvml = ctypes.CDLL(_LIBRARY)
            self._call("nvmlInit_v2")
            self._devices.extend(map(self._device, self._all() if names is None else names))
        except OSError as error:
            logger.debug("no accelerator memory to watch", extra={"error": str(error)})
            self._devices.clear()

    def _all(self) -> list[str]:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [str(index) for index in range(count.value)]

    def _device(self, name: str) -> ctypes.c_void_p:
        device = ctypes.c_void_p()
        if name.isdigit():
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(name)), ctypes.byref(device))
        else:
            self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(name.encode()), ctypes.byref(device))
        return device

    @property
    def sees_any(self) -> bool:
        return bool(self._devices)

    def used_bytes(self) -> int | None:
        """On all of them. None: not known, and nobody may wait for it. Under MIG the driver tells the privileged alone,
        and nobody of a GPU that has fallen off its bus."""
        used = 0
        try:
            for device in self._devices:
                memory = _NvmlMemory()
                self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
                used += memory.used
        except OSError as error:
            if not self._said:
                self._said = True
                what = "the memory of this pod's accelerators is not known: slots go on without a look at it"
                logger.warning(what, extra={"error": str(error)})
            return None
        return used

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._nvml, name)(*args)
        if code != 0:
            raise OSError(code, f"{name} of {_LIBRARY} failed")


class Footprint:
    """What one worker has on its slots: on its accelerators, where it has some, else in its processes."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._names = list(dict.fromkeys(devices))
        self._probe: Probe | None = None

    def now(self) -> int | None:
        """The bytes in use: on accelerators all, by whomever. None: nobody knows. It takes milliseconds: beside the
        loop."""
        if not self._names:
            return of_tree(os.getpid())
        self._probe = self._probe or Probe(self._names)
        return self._probe.used_bytes() if self._probe.sees_any else None

    def kept(self, before: int | None, after: int | None, *, said: int) -> int | None:
        """The bytes that a role has kept which was offloaded between two looks. Others have memory on an accelerator,
        too: so it counts as what the role `said` that it had before, less what was seen to go."""
        if before is None or after is None:
            return None
        return max(0, said - (before - after)) if self._names else after


TOLERANCE: Final = 0.1
"""The share of what a plan allows that may be kept beyond it: pools of allocators, and measurements that differ from
run to run."""
FLOOR_BYTES: Final = 64 << 20
"""What is less is no reason to speak: an allocator's arenas, pages of a stack."""


def excess(worker: str, *, kept: int, allowed: int) -> str:
    """In words; empty where it is within what the plan allows, or the plan does not say.

    >>> excess("engine/0", kept=3 << 30, allowed=1 << 30)  # doctest: +ELLIPSIS
    'worker engine/0 has left its slots and keeps 3072 MiB on them, measured, and its plan allows 1024 MiB; ...'
    """
    if not allowed or kept <= allowed + max(TOLERANCE * allowed, FLOOR_BYTES):
        return ""
    return (
        f"worker {worker} has left its slots and keeps {kept >> 20} MiB on them, measured, and its plan allows "
        f"{allowed >> 20} MiB; free more in offload(), or raise workers[].memory.offloaded of the plan"
    )


def of_tree(pid: int) -> int | None:
    """The bytes of a process and of all that it has started, what they share counted once. None where the kernel does
    not say."""
    found = [_proportional(each) for each in proctree.descendants([pid], proctree.table())]
    known = [nbytes for nbytes in found if nbytes is not None]
    return sum(known) if known else None


def _proportional(pid: int) -> int | None:
    """The bytes of a process without code and files that are mapped: the kernel takes these back when it needs room."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            lines = [line.partition(":") for line in file if "Pss" in line]
        sizes = {name: int(size.split()[0]) for name, _, size in lines}
    except (OSError, ValueError):  # it has ended meanwhile, or is none of ours
        return None
    return (sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0)) << 10
