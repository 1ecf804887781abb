"""Timed spans of a worker: the one record that timeline, metrics and profile are made of.

A span is {slot, role, worker, kind, step, version, t0, t1}. The recorder belongs to one worker process and is called
from its event loop; it holds at most `capacity` spans and counts what it had to drop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

SpanKind = Literal["compute", "wait_data", "wait_turn", "load", "offload", "weights", "comm", "other"]
KINDS: Final[tuple[SpanKind, ...]] = (
    "compute",
    "wait_data",
    "wait_turn",
    "load",
    "offload",
    "weights",
    "comm",
    "other",
)
CAPACITY: Final = 10_000  # spans between two flushes (0.5 s): 50 us each at most, which no role reaches


@dataclass(frozen=True, slots=True)
class Span:
    kind: SpanKind
    step: int
    version: int
    t0: float  # seconds since the epoch
    t1: float


class Recorder:
    """`recorder.start("compute", step=3)` ... `recorder.stop(token)`; `seconds[kind]` are running totals."""

    def __init__(self, *, capacity: int = CAPACITY, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._capacity = capacity
        self._spans: list[Span] = []
        self.dropped = 0
        self.seconds: dict[SpanKind, float] = dict.fromkeys(KINDS, 0.0)

    def add(self, kind: SpanKind, t0: float, t1: float, *, step: int = -1, version: int = -1) -> None:
        self.seconds[kind] += t1 - t0
        if len(self._spans) < self._capacity:
            self._spans.append(Span(kind, step, version, t0, t1))
        else:
            self.dropped += 1

    def now(self) -> float:
        return self._clock()

    def flush(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans
