"""Where a worker stands in the turns of its lease set: on its slots or off them, at work or stopped, asked to let go.

For: turns.worker, which moves the role and tells the agent.

    outside -> enter() -> grant() -> on its slots ──told──► frozen (DUE at a safe point, IDLE in its waits) -> left()
                                          ▲                   │
                                          └──── resume() ─────┘
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rlinf_worker.channels.waiting import Waits
from rlinf_worker.spans import Recorder
from rlinf_worker.turns.rule import Kind, Standing
from rlinf_worker.turns.short_timer import ShortTimer

_WAITING: Final = ("wait_data", "wait_turn")


class Stance:
    def __init__(self, waits: Waits, *, has_input: Callable[[], bool]) -> None:
        """`has_input`: whether a role that was stopped at a safe point has something to go on with."""
        self._waits, self._has_input = waits, has_input
        self.inside = False  # the role's `async with`
        self.entering = False  # it wants its first turn there
        self.granted = self.is_on = False  # the slots are its own; it is on them
        self.frozen: Standing | None = None
        self.told: Kind | None = None  # how it was told that somebody waits
        self._leaving = False  # frozen, and offloads without being asked

    @property
    def works(self) -> bool:
        return self.is_on and self.frozen is None

    @property
    def is_halted(self) -> bool:
        """Stopped at a safe point and off the slots: it can say nothing of its inputs itself."""
        return self.frozen is Standing.DUE and self.inside and not self.granted

    def standing(self) -> tuple[Standing, bool]:
        """How the role stands, and whether that is ripe."""
        if self._leaving:
            return Standing.LEAVES, True
        ready = [wait for wait in self._waits.gated if wait.condition()] if self.inside else []
        if self.granted:
            if self.frozen is Standing.IDLE and ready:
                return Standing.MORE, True
            return self.frozen or Standing.HOLDS, True
        if self.entering or (self.is_halted and self._has_input()):
            return Standing.WANTS, True
        return (Standing.WANTS, any(wait.ripe() for wait in ready)) if ready else (Standing.CONTENT, True)

    # --- from the grant of a turn to its end --------------------------------------------------------------------------
    def grant(self, *, yielding: bool) -> None:
        self.told = Kind.YIELD if yielding else None
        self.granted, self.frozen = True, None

    def resume(self, *, yielding: bool) -> None:
        self.told = (self.told or Kind.YIELD) if yielding else None
        self.frozen = None

    def may_leave_unasked(self) -> bool:
        """It is frozen for good, and was told so beforehand."""
        standing, _ = self.standing()
        is_over = standing is Standing.DUE or (standing is Standing.IDLE and self.told is Kind.LEAVE)
        return is_over and self.told in (Kind.FINISH, Kind.LEAVE, Kind.END)

    def leave(self) -> None:
        self._leaving = True

    def left(self) -> None:
        self.is_on = self.granted = self._leaving = False
        self.told = None
        self.frozen = self.frozen if self.is_halted else None

    # --- into a lease set, and out of it ------------------------------------------------------------------------------
    def join(self) -> None:
        """With slots that were its own so far."""
        self.is_on = self.granted = True

    def secede(self) -> None:
        self.frozen, self.granted, self.told = None, False, None


class Idleness:
    """Whether a role is idle that was told that somebody waits: none of its waits is over, and no work is under way."""

    def __init__(
        self, stance: Stance, waits: Waits, recorder: Recorder, *, after_s: float, found: Callable[[], None]
    ) -> None:
        """`after_s`: so long a wait lasts before it is looked at; what was waited for is often there at once."""
        self._stance, self._waits, self._recorder = stance, waits, recorder
        self._after_s, self._found = after_s, found
        self._timer = ShortTimer(self.look)

    def suspect(self) -> None:
        """A wait has begun."""
        if self._stance.inside and self._stance.told is not None and not self._timer.pending:
            self._timer.start(self._after_s)

    def work_ended(self) -> None:
        """One task may have worked while another waited."""
        if self._stance.told is not None and self._waits.gated and not self._is_at_work():
            self.suspect()

    def look(self) -> None:
        waits = self._waits.gated
        if not (self._stance.works and self._stance.told is not None and waits):
            return
        if any(wait.condition() for wait in waits):
            return
        if not self._is_at_work():  # else the end of that work asks again
            self._found()

    def _is_at_work(self) -> bool:
        return any(span.kind not in _WAITING for span in self._recorder.open)

    def close(self) -> None:
        self._timer.close()
