"""The body of `Movable` for roles whose state is torch tensors; imports no torch itself, as a rollout on a CPU does
without. `host` is set once there is something to move (algorithms/offloading.py)."""

from __future__ import annotations

import asyncio
from typing import Protocol

from rlinf_worker.roles.protocol import Memory


class Movable(Protocol):
    def bytes_now(self) -> int: ...

    def offload(self) -> None: ...

    def load(self) -> None: ...


class Offloads:
    """Mixin. Copies run beside the event loop: the agent goes on hearing from us while 80 GB move."""

    host: Movable | None = None

    def memory(self) -> Memory:
        return Memory(now=self.host.bytes_now() if self.host is not None else 0)

    async def load(self) -> None:
        if self.host is not None:
            await asyncio.to_thread(self.host.load)

    async def offload(self) -> None:
        if self.host is not None:
            await asyncio.to_thread(self.host.offload)
