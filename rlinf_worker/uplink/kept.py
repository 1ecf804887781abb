"""What was told to a driver and outlives the stream: said again after the next Welcome, or forgotten.

Pure; one per dialling end. A stream that breaks says nothing about what had arrived, so each message has its `Lasts`.

| told | while a stream is open | when the stream ends before it was written | while there is no stream |
|---|---|---|---|
| `Lasts.STREAM` | written | forgotten: the next hello says it | forgotten |
| `Lasts.DRIVER` | written | waits; forgotten where the next driver is another one | likewise |
| `Lasts.JOB` | written | waits for the next Welcome | waits for the next Welcome |
| `repeat(key)` | written | written again after every Welcome, until `forget(key)` | likewise |

Bounded: more than `limit` that wait push out the oldest, which is counted in `dropped`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

M = TypeVar("M")


class Lasts(Enum):
    """How long a message that could not be written is worth saying."""

    STREAM = auto()
    DRIVER = auto()
    JOB = auto()


@dataclass(frozen=True, slots=True)
class Told(Generic[M]):
    message: M
    lasts: Lasts = Lasts.STREAM
    is_repeated: bool = False


class Kept(Generic[M]):
    """`add` .... `welcomed`; what is repeated stays until it is forgotten."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Told[M]] = deque()
        self._repeated: OrderedDict[str, M] = OrderedDict()
        self.dropped = 0

    def add(self, told: Iterable[Told[M]]) -> None:
        """Told, and not written."""
        self._waiting += [one for one in told if one.lasts is not Lasts.STREAM]
        while len(self._waiting) > self._limit:
            self._waiting.popleft()
            self.dropped += 1

    def repeat(self, key: str, message: M) -> None:
        """In place of what had this key."""
        self._repeated.pop(key, None)
        self._repeated[key] = message
        while len(self._repeated) > self._limit:
            self._repeated.popitem(last=False)
            self.dropped += 1

    def forget(self, key: str) -> None:
        self._repeated.pop(key, None)

    def welcomed(self, since_hello: Iterable[Told[M]], *, is_same_driver: bool) -> list[Told[M]]:
        """What a stream begins with: what is repeated, what waited, what was told while the Welcome was on its way."""
        waited, self._waiting = self._waiting, deque()
        rest = [
            one
            for one in (*waited, *since_hello)
            if not one.is_repeated and (is_same_driver or one.lasts is not Lasts.DRIVER)
        ]
        return [*(Told(message, is_repeated=True) for message in self._repeated.values()), *rest]

    def __len__(self) -> int:
        return len(self._waiting)
