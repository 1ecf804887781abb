"""When a slot may be had again: the worker that ends on it is gone with all that it started, and its memory is free.

For: instructions.py, before it starts a worker; main.py says who began and who exited. Not for workers that take turns
with each other: both have their processes all the time, and agent/turns.py hands the slots over.

| what | consumes | waits for | unblocked by |
|---|---|---|---|
| `wait` (in the task of a Start) | /proc, NVML | the former worker of its slots to be gone | itself; a Stop; 45 s |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rlinf_api.errors import RetryableError, Stale
from rlinf_worker import memory
from rlinf_worker.agent.lifecycle import Start
from rlinf_worker.agent.supervisor import Supervisor
from rlinf_worker.memory import Probe

logger = logging.getLogger(__name__)

LIMIT_S: Final = 45.0
"""A grace, a kill and the memory take a few seconds. Less than the 60 s after which a driver gives up a worker that
does not connect: its next try must not meet this one."""
FLAT_S: Final = 1.0  # a driver frees a dead process within a second: no fall for so long, and it has
_POLL_S: Final = 0.02


@dataclass(slots=True)
class _Left:
    """A worker that was told to end and has: its slots, and the level that its memory has to fall to."""

    slots: frozenset[int]
    free_at_bytes: float | None  # None: not known, its processes alone are waited for
    lowest_bytes: int
    fell_at: float
    exited_at: float

    def is_free(self, used_bytes: int | None, now: float) -> bool:
        if used_bytes is None or self.free_at_bytes is None:
            return True
        if used_bytes < self.lowest_bytes:
            self.lowest_bytes, self.fell_at = used_bytes, now
        fallen = used_bytes <= self.free_at_bytes or now - self.fell_at >= FLAT_S
        return fallen or now - self.exited_at >= memory.LIMIT_S


class Vacancy:
    def __init__(
        self,
        *,
        workers: Supervisor,
        take_turns: Callable[[str, str], bool],
        probe: Probe,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: the agent's, as a level that nobody has looked at has not stayed."""
        self._workers, self._take_turns, self._probe, self._clock = workers, take_turns, probe, clock
        self._began: dict[str, tuple[frozenset[int], int | None]] = {}  # slots, and what was used before, by worker
        self._left: dict[str, _Left] = {}
        self.waiting: dict[str, Start] = {}

    async def wait(self, start: Start) -> None:
        """Returns when its slots are free. Raises where they do not become so, or it was given up meanwhile."""
        self.waiting[start.worker] = start
        try:
            deadline = self._clock() + LIMIT_S
            while held := self._held_by(start):
                if self._clock() >= deadline:
                    raise RetryableError(
                        f"worker {start.worker} cannot start: its slots are not free within {LIMIT_S:g} s",
                        got=f"still there: {', '.join(held)}", next="replace the pod where a process does not end",
                    )  # fmt: skip
                await asyncio.sleep(_POLL_S)
                if self.waiting.get(start.worker) is not start:
                    raise Stale(f"attempt {start.attempt} of worker {start.worker} was given up before it began")
        finally:
            if self.waiting.get(start.worker) is start:
                del self.waiting[start.worker]
        self._began[start.worker] = frozenset(start.slots), self._probe.used_bytes() if start.slots else 0

    async def left_to(self, worker: str) -> None:
        """Returns when nobody else that ends has its slots any more, or after LIMIT_S: it lives, and goes on there."""
        deadline = self._clock() + LIMIT_S
        while (start := self._workers.life(worker).start) is not None and (held := self._held_by(start, but=worker)):
            if self._clock() >= deadline:
                said = {"worker": worker, "limit_s": LIMIT_S, "there": ", ".join(held)}
                logger.warning("slots of a worker that goes on alone are not free; it loads all the same", extra=said)
                return
            await asyncio.sleep(_POLL_S)

    def give_up(self, worker: str) -> None:
        """A Stop came: what waits to start is not to."""
        self.waiting.pop(worker, None)

    def exited(self, worker: str, *, asked: bool) -> None:
        """One that failed starts again on its own slots, and its memory is as free as it was for that."""
        slots, before = self._began.pop(worker, (frozenset[int](), 0))
        if not asked or not slots:
            return
        used, now = self._probe.used_bytes(), self._clock()
        if before is None or used is None:
            self._left[worker] = _Left(slots, None, 0, now, now)
        else:
            level = memory.free_level(before, max(0, used - before))
            self._left[worker] = _Left(slots, level, used, now, now)

    def _held_by(self, start: Start, *, but: str = "") -> list[str]:
        slots, mine = set(start.slots), start.worker
        ending = [
            worker.id
            for worker in self._workers.held()
            if worker.ending
            and worker.id != but
            and worker.start is not None
            and (worker.id == mine or not slots.isdisjoint(worker.start.slots))
            and (worker.id == mine or not self._take_turns(worker.id, mine))
        ]
        for worker, left in list(self._left.items()):
            if not self._workers.remains(worker) and left.is_free(self._probe.used_bytes(), self._clock()):
                del self._left[worker]
            elif not slots.isdisjoint(left.slots) and not self._take_turns(worker, mine):
                ending.append(f"memory or processes of {worker}")
        return ending
