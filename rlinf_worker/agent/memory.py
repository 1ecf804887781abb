"""Whether a dead worker's memory is free again: of the host with its processes, of a GPU when the driver has let it go.

Called by agent/turns.py before a lease set is granted to the next role. NVML is asked through ctypes, as an agent
imports nothing large; where there is no libnvidia-ml there is no GPU whose memory could stay.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Final, Protocol

logger = logging.getLogger(__name__)

_LIBRARY: Final = "libnvidia-ml.so.1"


class Probe(Protocol):
    def used_bytes(self) -> int:
        """On all accelerators of this pod."""
        ...


class NoAccelerator:
    def used_bytes(self) -> int:
        return 0


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """Raises OSError where there is no driver."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL(_LIBRARY)
        self._call("nvmlInit_v2")
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self._devices: list[ctypes.c_void_p] = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
            self._devices.append(device)

    def used_bytes(self) -> int:
        used = 0
        for device in self._devices:
            memory = _NvmlMemory()
            self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
            used += memory.used
        return used

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._nvml, name)(*args)
        if code != 0:
            raise OSError(code, f"{name} of {_LIBRARY} failed")


def probe() -> Probe:
    try:
        return Nvml()
    except OSError as error:
        logger.debug("no accelerator memory to watch", extra={"error": str(error)})
        return NoAccelerator()
