"""A role on its slots: loaded, or offloaded to make room for others. One move at a time.

For: turns.worker, which decides when. Where a role has nothing to offload, only what its channels keep there moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rlinf_worker.phases import Phases
from rlinf_worker.roles.protocol import Offloadable
from rlinf_worker.spans import Recorder


class Residence:
    def __init__(
        self, recorder: Recorder, phases: Phases, *, spill: Callable[[], int], fatal: Callable[[BaseException], None]
    ) -> None:
        """`spill` moves what channels keep on the slots to host memory; bytes that moved."""
        self._recorder, self._phases, self._spill, self._fatal = recorder, phases, spill, fatal
        self.role: object = None
        self.is_loaded = True  # a role builds itself on its slots
        self.seconds = {"load": 0.0, "offload": 0.0}
        self._moving = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_moving(self) -> bool:
        return self._moving.locked()

    @property
    def memory_bytes(self) -> int:
        return self.role.memory().now if isinstance(self.role, Offloadable) else 0

    def begin(self, move: Coroutine[Any, Any, None]) -> None:
        """Beside the role, behind a move that is under way."""
        task = asyncio.ensure_future(move)
        self._tasks.add(task)
        task.add_done_callback(self._moved)

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal(error)

    async def load(self) -> None:
        async with self._moving:
            if not self.is_loaded and isinstance(self.role, Offloadable):
                loading = self._recorder.begin("load")
                try:
                    with self._phases.during("load"):
                        await self.role.load()
                finally:
                    self.seconds["load"] += loading.end()
            self.is_loaded = True

    async def offload(self) -> None:
        async with self._moving:
            offloading = self._recorder.begin("offload")
            try:
                self._spill()  # first, as it needs the device as it is
                if isinstance(self.role, Offloadable) and self.is_loaded:
                    await self.role.offload()
                    self.is_loaded = False
            finally:
                self.seconds["offload"] += offloading.end()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
