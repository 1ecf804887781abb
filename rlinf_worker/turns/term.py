"""What a worker's turn is counted in, and when it is due: after so many units, or with the step in which it began."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rlinf_worker.channels.account import Account

NONE: Final = -1
"""No step yet."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What this worker has done since its start. `units`: rounds where it takes rounds, else units of queues, else
    items; `items`: all that went through its channels; `step`: the newest step that it has taken anything of."""

    units: int = 0
    items: int = 0
    step: int = -1

    @classmethod
    def of(cls, accounts: Sequence[Account]) -> Progress:
        inputs = [account for account in accounts if account.side == "consumer"]
        rounds = sum(account.rounds for account in inputs)
        units = sum(account.items for account in inputs if account.units)
        return cls(
            units=rounds or units or sum(account.items for account in inputs or accounts),
            items=sum(account.items for account in accounts),
            step=max((account.step for account in inputs), default=-1),
        )


class Term:
    """
    >>> term = Term(lambda: Progress())
    >>> term.begin(until_units=0)
    >>> term.took(5)                                    # a turn of step 5, whatever the one before was of
    >>> term.is_due()
    False
    >>> term.took(6)
    >>> term.is_due(), term.is_due(oldest=5)            # as long as something of step 5 is under way
    (True, False)
    """

    def __init__(self, progress: Callable[[], Progress]) -> None:
        self._progress = progress
        self._until_units = 0
        self._began = Progress()
        self._step, self._newest = NONE, NONE
        self._step_ended = self._is_over = False

    def begin(self, *, until_units: int | None = None) -> None:
        """A turn; where `until_units` is None, another one of the same length."""
        self._until_units = self._until_units if until_units is None else until_units
        self._began = self._progress()
        self._step, self._newest = NONE, NONE
        self._step_ended = self._is_over = False

    def took(self, step: int) -> None:
        """In this turn. What was taken in one before says nothing: a role that had finished its step in that would be
        due with the first unit of the next."""
        if step > NONE:
            self._step = step if self._step == NONE else self._step
            self._newest = max(self._newest, step)

    def end(self) -> None:
        """Whatever is left of it."""
        self._is_over = True

    def step_ended(self) -> None:
        """The step that this rank has told done is committed."""
        self._step_ended = True

    def is_due(self, *, oldest: int | None = None) -> bool:
        """`oldest`: the step of the oldest work that is under way, some of it perhaps from the turn before. The turn is
        of that step then, and due when there is none of it left."""
        if self._is_over:
            return True
        if self._until_units:
            return self._progress().units - self._began.units >= self._until_units
        if self._step_ended:
            return True
        if oldest is None:
            return self._newest > self._step > NONE
        self._step = oldest if self._step == NONE else min(self._step, oldest)
        return oldest > self._step
