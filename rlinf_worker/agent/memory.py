"""Whether a dead worker's memory is free again: of the host with its processes, of a GPU when the driver has let it go.

Called by turns.py before a lease set is granted to the next role, and by vacancy.py before a worker starts. NVML is
asked through ctypes, as an agent imports nothing large; where there is no libnvidia-ml there is no GPU whose memory
could stay.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Final

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
    """The accelerators of this pod; without a driver there are none."""

    def __init__(self) -> None:
        self._devices: list[ctypes.c_void_p] = []
        self._said = False
        try:
            self._nvml = ctypes.CDLL(_LIBRARY)
            self._call("nvmlInit_v2")
            count = ctypes.c_uint()
            self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
            for index in range(count.value):
                device = ctypes.c_void_p()
                self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
                self._devices.append(device)
        except OSError as error:
            logger.debug("no accelerator memory to watch", extra={"error": str(error)})
            self._devices.clear()

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
