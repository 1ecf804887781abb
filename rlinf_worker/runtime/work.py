"""Whether the work of a role moves: what a sign of life of its worker is worth.

For: runtime.agent_link, which tells the agent each second, and runtime.context, through which a role opens its spans.
Not for: deadlines, which are the phase's (phases.py), and what is done about a role that does not move (the agent's).

An event loop that lives says nothing of a role that awaits an engine which is dead, or whose thread stands in a
collective. Work has moved when a span began or ended, a unit was taken or made, a phase was entered, a version came or
went, or the role said so (`ctx.moved()`). A role that does not move is *stuck*, unless others are to move first:

| the role | is |
|---|---|
| has a span open, whose task is in no wait of the runtime | stuck: what it computes does not end |
| has none, and some task is in such a wait, which has a name and a bound | waiting |
| has none, and waits for `ctx.stopping` | waiting |
| has none, and no task is in either: it awaits something of its own | stuck |
| is in phase start, ready, idle or stop | waiting |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final, Literal

from rlinf_worker.channels.waiting import Waits
from rlinf_worker.phases import Phases

AT_REST: Final = frozenset({"start", "ready", "idle", "stop"})
TOLD_FROM_S: Final = 5.0
"""For how long a role stands still before it is said at what: half of what people are told of."""


class Stopping(asyncio.Event):
    """`ctx.stopping`. A role that waits for it, with no span open, has done its work."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = 0

    async def wait(self) -> Literal[True]:
        self.awaited += 1
        try:
            return await super().wait()
        finally:
            self.awaited -= 1

    async def told(self) -> None:
        """The runtime's own wait for it, which says nothing of the role."""
        await super().wait()


class Work:
    """`tick` it once a second; a second in which the process stood still counts as one at most."""

    def __init__(
        self, *, waits: Waits, phases: Phases, moves: Callable[[], Hashable], stopping: Stopping | None = None
    ) -> None:
        """`moves`: counts that change when work has moved."""
        self._waits, self._phases, self._moves, self._stopping = waits, phases, moves, stopping
        self._open: dict[object, tuple[str, float, asyncio.Task[object] | None]] = {}
        self._seen: Hashable = None
        self.still_s = 0.0
        """Seconds since it moved last."""
        self.stuck_s = 0.0
        """The last of these seconds, in which it waited for nobody."""

    @contextmanager
    def piece(self, kind: str) -> Iterator[None]:
        """Around a span of the role."""
        mine = object()
        self._open[mine] = kind, monotonic(), _task()
        self.moved()
        try:
            yield
        finally:
            del self._open[mine]
            self.moved()

    def moved(self) -> None:
        self.still_s = self.stuck_s = 0.0

    def tick(self, seconds: float) -> None:
        seen = self._moves()
        if seen != self._seen:
            self._seen = seen
            self.moved()
            return
        self.still_s += seconds
        self.stuck_s = 0.0 if self._waits_for_others else self.stuck_s + seconds

    @property
    def _at_work(self) -> list[tuple[str, float]]:
        """Spans whose task is in no wait, the oldest first: (kind, since)."""
        waiting, pieces = self._waits.tasks, list(self._open.values())  # a copy: threads of a role may open spans
        found = [(kind, since) for kind, since, task in pieces if task is None or task not in waiting]
        return sorted(found, key=lambda piece: piece[1])

    @property
    def _waits_for_others(self) -> bool:
        if self._phases.phase in AT_REST:
            return True
        awaits_the_end = self._stopping is not None and self._stopping.awaited > 0
        return not self._at_work and (awaits_the_end or bool(self._waits.tasks))

    @property
    def doing(self) -> str:
        """At what it stands still, for people: "span compute for 12 s", "waits for weights b0-3 or newer for 7 s";
        empty while it moves."""
        if self.still_s < TOLD_FROM_S:
            return ""
        if pieces := self._at_work:
            kind, since = pieces[0]
            return f"span {kind} for {monotonic() - since:.0f} s"
        if waits := self._waits.current():
            what, seconds = waits[0]
            return f"waits for {what} for {seconds:.0f} s"
        return f"nothing that its runtime knows of for {self.still_s:.0f} s"


def _task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread of the role's
        return None
