"""What a dead worker leaves on slots that others take turns on: processes that have not ended, memory that is not free.

For: turns.py, which has the next worker wait for it. For slots that change hands otherwise: vacancy.py.

| what | consumes | waits for | unblocked by |
|---|---|---|---|
| `wait` (task per dead worker) | /proc, NVML | processes reaped, memory free | itself; says so each 30 s |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from rlinf_worker import memory
from rlinf_worker.agent.supervisor import Supervisor
from rlinf_worker.memory import Probe

_POLL_S: Final = 0.02
_SAID_EVERY_S: Final = 30.0


class Remains:
    def __init__(
        self, workers: Supervisor, probe: Probe, *, say: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._workers, self._probe, self._say, self._clock = workers, probe, say, clock

    def are_there(self, worker: str, *, limit_bytes: float | None) -> bool:
        """`limit_bytes`: what may be in use once its memory is free; None: nobody can say, and its processes alone are
        looked for."""
        return bool(self._workers.remains(worker)) or not self._is_free(limit_bytes)

    def _is_free(self, limit_bytes: float | None) -> bool:
        used_bytes = None if limit_bytes is None else self._probe.used_bytes()
        return limit_bytes is None or used_bytes is None or used_bytes <= limit_bytes

    async def wait(self, worker: str, *, limit_bytes: float | None) -> None:
        """Until nothing is left, memory that nobody sees to become free apart."""
        since = said_at = self._clock()
        while True:
            left, now = self._workers.remains(worker), self._clock()
            is_free = self._is_free(limit_bytes)
            if not left and (is_free or now - since > memory.LIMIT_S):
                break
            if now - said_at >= _SAID_EVERY_S:
                said_at = now
                self._say(f"the slots of worker {worker} stay taken: {len(left)} processes do not end")
            await asyncio.sleep(_POLL_S)
        if not is_free:
            self._say(f"worker {worker} is dead, but memory of its accelerators is not seen to be free")
