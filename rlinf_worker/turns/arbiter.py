"""One lease set with a clock: feeds the rule what workers say, sends its orders, and lets nobody be late.

For: agent/turns.py and driver/turns.py, which know how an order reaches a worker and how a worker is killed. All calls
from one event loop.

| timer | runs while | when it is over |
|---|---|---|
| release | a worker owes an answer, or works on where another of its role has ended the turn | it is killed |
| patience | somebody unripe waits for slots that nobody uses | it is granted all the same |
| turn | a holder works on and another wants its slots | it is told that its turn is over; then as release |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rlinf_worker.settings import Settings
from rlinf_worker.turns import rule
from rlinf_worker.turns.rule import Kill, Late, LeaseSet, Order, Said, Standing, Warn

logger = logging.getLogger(__name__)

STALLED_EVERY_S: Final = 10.0  # a word of a hundred bytes; a new driver knows within the time that people take to look


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A worker's own account of its turn. `seen`: number of the last order it obeyed; `items`: since its start."""

    worker: str
    standing: Standing
    ripe: bool = True
    seen: int = 0
    items: int = 0
    memory_bytes: int = 0


class Timer(Protocol):
    def cancel(self) -> None: ...


class Timers(Protocol):
    """The time that an arbiter waits by: the event loop of whoever made it, or a test's."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[..., None], *args: Any) -> Timer: ...


class Hands(Protocol):
    """What an arbiter does with its decisions; must not block."""

    def order(self, lease: LeaseSet, order: Order, *, number: int) -> None: ...

    def kill(self, lease: LeaseSet, worker: str, *, why: str) -> None:
        """Its whole process tree. `gone` is called when it is reaped and its memory free, however long that takes."""
        ...

    def overdue(self, lease: LeaseSet, why: str) -> None:
        """A turn has lasted too long and is to end: for people."""
        ...

    def stalled(self, lease: LeaseSet, why: str) -> None:
        """Two turns in a row went without an item; empty: something moves again. Said once more every
        STALLED_EVERY_S while it lasts, for a driver that has come since."""
        ...


class Arbiter:
    """`first_number` is above all numbers that an arbiter before this one has used."""

    def __init__(
        self, lease: LeaseSet, hands: Hands, settings: Settings, *, timers: Timers, first_number: int = 1
    ) -> None:
        self.lease, self._hands, self._settings, self._timers = lease, hands, settings, timers
        self.state = rule.fresh(lease)
        self.changes = 0
        self._number = first_number
        self._sent: dict[str, tuple[int, Order]] = {}  # the last order to a worker
        self._stalled, self._stalled_said = "", 0.0
        self._items: dict[str, int] = {}
        self._owing: frozenset[str] = frozenset()
        self._release: Timer | None = None
        self._patience: Timer | None = None
        self._lingering: Timer | None = None

    def rebuild(self, reports: Mapping[str, Report], sent: Mapping[str, tuple[int, Order]]) -> None:
        """Begin from what agents hold, for a driver that begins anew, or from what was known before, where another plan
        changes a set. `sent`: the last order to a worker by whoever decided before; one not yet obeyed counts."""
        open_orders = {
            worker: (number, order)
            for worker, (number, order) in sent.items()
            if worker in self.lease.workers and (worker not in reports or reports[worker].seen < number)
        }
        standings = {worker: report.standing for worker, report in reports.items()}
        asked = {worker: order.kind for worker, (_, order) in open_orders.items()}
        self.state = rule.rebuilt(self.lease, standings, asked)
        self._sent |= open_orders
        used = [*(report.seen for report in reports.values()), *(number for number, _ in sent.values())]
        self._number = max([self._number, *used])
        self._items = {worker: report.items for worker, report in reports.items()}
        for worker, report in reports.items():
            self.said(report)
            logger.debug("turn taken over", extra={"worker": worker, "standing": report.standing})

    def said(self, report: Report) -> None:
        items = report.items > self._items.get(report.worker, 0)
        self._items[report.worker] = report.items
        number, _ = self._sent.get(report.worker, (0, None))
        answers = report.seen >= number
        self._step(Said(report.worker, report.standing, ripe=report.ripe, items=items, answers=answers))

    def gone(self, worker: str) -> None:
        self._sent.pop(worker, None)
        self._items.pop(worker, None)
        self._step(rule.Gone(worker))

    def again(self, worker: str) -> None:
        """The way to it was broken: what it has not answered may have been lost, and is sent once more; so is the word
        to kill it, where it is still there."""
        if self.state[worker].killed:
            self._kill(worker)
        elif worker in self._sent and self.state[worker].asked is not None:
            number, order = self._sent[worker]
            self._hands.order(self.lease, order, number=number)

    @property
    def sent(self) -> Mapping[str, tuple[int, Order]]:
        """The last order to each worker, for an arbiter that follows this one."""
        return self._sent

    def close(self) -> None:
        for timer in (self._release, self._patience, self._lingering):
            if timer is not None:
                timer.cancel()

    def _step(self, event: rule.Event) -> None:
        held = self.state.at if self.state.holding else None
        self.state, actions = rule.step(self.lease, self.state, event)
        if self.state.holding and self.state.at != held:
            self.changes += 1
        for action in actions:
            match action:
                case Order(worker):
                    self._number += 1
                    self._sent[worker] = self._number, action
                    self._hands.order(self.lease, action, number=self._number)
                case Kill(worker):
                    self._kill(worker)
                case Warn(text):
                    self._say_stalled(text)
        if self._stalled and self.state.items:
            self._say_stalled("")
        elif self._stalled and self._timers.time() - self._stalled_said >= STALLED_EVERY_S:
            self._say_stalled(self._stalled)
        self._set_timers()

    def _kill(self, worker: str) -> None:
        why = f"lease set {self.lease.name!r} not released within {self._settings.turn_release_s:g} s"
        logger.warning("turn not released in time", extra={"lease_set": self.lease.name, "worker": worker})
        self._hands.kill(self.lease, worker, why=why)

    def _say_stalled(self, why: str) -> None:
        self._stalled, self._stalled_said = why, self._timers.time()
        self._hands.stalled(self.lease, why)

    def _set_timers(self) -> None:
        owing = frozenset(rule.late(self.state))
        if not (owing and owing <= self._owing):  # one of several that answers gives the others no more time
            if self._release is not None:
                self._release.cancel()
            self._release = None
            if owing:
                self._release = self._timers.call_later(self._settings.turn_release_s, self._over, Late.RELEASE)
        self._owing = owing
        needed = rule.is_patience_needed(self.lease, self.state)
        if needed and self._patience is None:
            self._patience = self._timers.call_later(self._settings.turn_patience_s, self._over, Late.PATIENCE)
        elif not needed and self._patience is not None:
            self._patience.cancel()
            self._patience = None
        lingers = bool(rule.lingering(self.lease, self.state))
        if lingers and self._lingering is None:
            self._lingering = self._timers.call_later(self._settings.turn_most_s, self._over, Late.TURN)
        elif not lingers and self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None

    def _over(self, what: Late) -> None:
        match what:
            case Late.RELEASE:
                self._owing, self._release = frozenset(), None
            case Late.PATIENCE:
                self._patience = None
            case Late.TURN:
                self._lingering = None
                who = ", ".join(rule.lingering(self.lease, self.state))
                why = f"worker {who} has worked on for {self._settings.turn_most_s:g} s in a turn of lease set "
                self._hands.overdue(self.lease, f"{why}{self.lease.name!r} that others wait for: it is to end")
        self._step(what)
