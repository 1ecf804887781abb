"""How much memory this worker has: of its role on the slots, of its process on the host. For: the account of each step.

A look takes 50 us, which short steps would feel: there is one a second, and none in between.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Final

from rlinf_worker.sums import MemoryUse

LOOK_S: Final = 1.0  # the system keeps the peak of a process, and a role its own
_LINE: Final = re.compile(r"^Vm(HWM|RSS):\s+(\d+) kB$", re.MULTILINE)
STATUS: Final = Path("/proc/self/status")


class OwnMemory:
    """Called once a step; None where a look was just taken. `on_slots`: turns.worker's Residence."""

    def __init__(
        self, on_slots: Callable[[], MemoryUse], *, clock: Callable[[], float] = monotonic, status: Path = STATUS
    ) -> None:
        self._on_slots, self._clock, self._status = on_slots, clock, status
        self._looked_at = float("-inf")

    def __call__(self) -> MemoryUse | None:
        now = self._clock()
        if now - self._looked_at < LOOK_S:
            return None
        self._looked_at = now
        found = dict(_LINE.findall(self._status.read_text()))
        process, peak = (int(found.get(name, 0)) << 10 for name in ("RSS", "HWM"))
        return replace(self._on_slots(), process=process, process_peak=peak)
