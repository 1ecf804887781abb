"""Watches of the in-memory store: bounded, never blocking the writer, honest about gaps.

For: `MemoryStore.watch`. Not for: filtering by anything but kind and namespace.

| concurrent part | consumes | waits for | unblocked by |
|---|---|---|---|
| Watch.__anext__ | its own queue | an event | offer() of the store, or close() |
| offer() of the store | - | nothing: a full queue marks the watch expired and empties it | - |

A slow reader costs `capacity` references and then one `Expired`, as a real watch cache answers 410; a blocked or
unbounded queue would turn one stuck reader into a stuck or swollen control plane.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Literal, Self

from rlinf_api.errors import InvariantBroken
from rlinf_api.store import Change, Expired
from rljob.local.objects import Manifest, clone, meta


class Watch:
    """Async iterator of Change. Ends only by Expired or when it is closed. One reader."""

    def __init__(self, kind: str, *, namespace: str | None, capacity: int, on_close: Callable[[Watch], None]) -> None:
        self._kind, self._namespace, self._capacity, self._on_close = kind, namespace, capacity, on_close
        self._events: deque[Change] = deque()
        self._expired = self._closed = False
        self._arrived: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while not self._events:
            if self._expired:
                self.close()
                raise Expired(
                    f"watch of {self._kind}",
                    got=f"more than {self._capacity} unread events",
                    next="list, then watch again",
                )
            if self._closed:
                raise StopAsyncIteration
            if self._arrived is not None:
                raise InvariantBroken(f"two readers of one watch of {self._kind}", next="open a watch for each")
            # No deadline: silence is what a watch of a quiet cluster looks like; callers that need one use wait_for.
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        return self._events.popleft()

    def offer(self, change: Literal["ADDED", "MODIFIED", "DELETED"], obj: Manifest) -> None:
        """One change of any object; the store calls it, in order."""
        is_of_it = obj["kind"] == self._kind and self._namespace in (None, meta(obj)["namespace"])
        if self._expired or self._closed or not is_of_it:
            return
        if len(self._events) >= self._capacity:
            self._events.clear()
            self._expired = True
        else:
            self._events.append(Change(type=change, object=clone(obj)))
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._on_close(self)
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
