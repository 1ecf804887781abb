"""A work queue of keys: each at most once in it, at most once in work, never sooner than its pause allows.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| a worker's `take()` | the earliest due key | a key that is due | add(), done(), time |

Not for: retries and their pauses (the loop knows them), persistence (a restart lists everything again).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Final, Generic, TypeVar

Key = TypeVar("Key")
SLACK: Final = 64  # entries of the heap that may be stale before it is made anew, beside as many as there are keys


class WorkQueue(Generic[Key]):
    """A key that is added while it is in work is taken again after `done()`.

    `_due` says when each key is due; the heap has an entry for each of them that is not in work, and stale ones, which
    say another time than `_due` and are passed over. A thousand jobs are looked through by no take().
    """

    def __init__(self, *, coalesce_s: float) -> None:
        self._coalesce_s = coalesce_s
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._numbers = itertools.count()
        self._in_work: dict[Key, float] = {}
        self._last: dict[Key, float] = {}
        self._forgotten: set[Key] = set()
        self._changed = asyncio.Event()
        self._lag_s = 0.0

    @property
    def lag_s(self) -> float:
        """How long the key that was taken last had been due; 0 where a worker waits for keys."""
        return self._lag_s

    def add(self, key: Key, *, after_s: float = 0.0) -> None:
        """The earliest wish counts. A burst of events becomes one pass: `coalesce_s` lie between two of a key."""
        now = self._now()
        due = max(now + after_s, self._last.get(key, -self._coalesce_s) + self._coalesce_s)
        if key not in self._due or due < self._due[key]:
            self._due[key] = due
            if key not in self._in_work:
                self._push(key, due)

    def forget(self, key: Key) -> None:
        """Also by the one who has it in work: nothing of it is left after `done()`, unless it was added again since it
        was taken: a job that is made again under its name comes while its deletion is still looked at."""
        self._last.pop(key, None)
        if key in self._in_work:
            self._forgotten.add(key)
            if key in self._due:
                self._due[key] = min(self._due[key], self._now())
        else:
            self._due.pop(key, None)

    def __len__(self) -> int:
        return len(self._due)

    def overdue(self) -> tuple[int, float]:
        """(how many keys are due and not in work, seconds that the oldest of them has waited or is in work)."""
        now = self._now()
        waits = [now - due for key, due in self._due.items() if due <= now and key not in self._in_work]
        return len(waits), max([0.0, *waits, *(now - started for started in self._in_work.values())])

    async def take(self) -> Key:
        """The next due key; it is in work until `done(key)`."""
        while True:
            self._changed.clear()
            pause_s = None
            while self._heap:
                due, _, key = self._heap[0]
                if self._due.get(key) != due or key in self._in_work:
                    heapq.heappop(self._heap)
                    continue
                pause_s = due - self._now()
                if pause_s > 0:
                    break
                heapq.heappop(self._heap)
                del self._due[key]
                self._in_work[key] = self._now()
                self._lag_s = -pause_s
                return key
            self._lag_s = 0.0
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: Key) -> None:
        self._in_work.pop(key, None)
        if key in self._forgotten:
            self._forgotten.discard(key)
        else:
            self._last[key] = self._now()
        if (due := self._due.get(key)) is not None:
            self._push(key, due)

    def _push(self, key: Key, due: float) -> None:
        if len(self._heap) > 2 * len(self._due) + SLACK:
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (due, next(self._numbers), key))
        self._changed.set()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
