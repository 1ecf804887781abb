"""Messages on their way to one peer: bounded, batched, closed once. Filled by the core, emptied by one stream of
server.py. A peer that does not read fast enough is disconnected rather than remembered without end: it reconnects and
says what it holds."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

CAPACITY: Final = 20_000  # messages: seconds of the fastest worker's traffic


class Outbox:
    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self._messages: deque[Any] = deque()
        self._capacity = capacity
        self._wake = asyncio.Event()
        self.closed: str | None = None
        self.deaf = False  # its peer has been dismissed and ends by its agent's word: what it still says counts no more

    def put(self, message: Any) -> None:
        if self.closed is not None:
            return
        if len(self._messages) >= self._capacity:
            self.close(f"the peer left {self._capacity} messages unread")
            return
        self._messages.append(message)
        self._wake.set()

    def close(self, why: str) -> None:
        """What is already in it is still delivered."""
        if self.closed is None:
            self.closed = why
            self._wake.set()

    async def drain(self) -> list[Any]:
        """All that waits, at once; an empty list when closed and empty."""
        while not self._messages and self.closed is None:
            self._wake.clear()
            await self._wake.wait()
        batch = list(self._messages)
        self._messages.clear()
        return batch
