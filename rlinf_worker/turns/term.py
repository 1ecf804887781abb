"""What a worker's turn is counted in, and when it is due: after so many units, or with the step in which it began."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlinf_worker.channels.account import Account


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
    def __init__(self, progress: Callable[[], Progress]) -> None:
        self._progress = progress
        self._until_units = 0
        self._began = Progress()
        self._step: int | None = None
        self._step_ended = self._is_over = False

    def begin(self, *, until_units: int | None = None) -> None:
        """A turn; where `until_units` is None, another one of the same length."""
        self._until_units = self._until_units if until_units is None else until_units
        self._began, self._step = self._progress(), None
        self._step_ended = self._is_over = False

    def end(self) -> None:
        """Whatever is left of it."""
        self._is_over = True

    def step_ended(self) -> None:
        """The step that this rank has told done is committed."""
        self._step_ended = True

    def is_due(self) -> bool:
        now = self._progress()
        if self._is_over:
            return True
        if self._until_units:
            return now.units - self._began.units >= self._until_units
        if self._step is None and now.step >= 0:
            self._step = now.step
        return self._step_ended or (self._step is not None and now.step > self._step)
