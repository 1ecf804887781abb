"""What workers say of a step by `ctx.report`, until it goes out with the next commit.

Called by commits.py, which leaves out what was said on a dead branch. A unit that was lost is made again, by whomever,
and reported again: numbers under its key take the place of those before. Numbers without a key do not say what they are
of, and add up over the lives of a worker. Not for: accounts, of which the last one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

STEPS_KEPT: Final = 16  # more than may be open at once; who reports of others finds no reader
KEYS_KEPT: Final = 100_000  # of a step: more than it has units; what comes after is taken as said without a key


@dataclass(slots=True)
class _Said:
    totals: dict[str, float] = field(default_factory=dict)
    sums: dict[str, dict[str, float]] = field(default_factory=dict)  # by key: what of them is in the totals


class Reported:
    def __init__(self) -> None:
        self._steps: dict[int, _Said] = {}

    def add(self, numbers: Mapping[str, float], *, step: int, key: str = "") -> dict[str, float]:
        """The totals of those numbers by now: summed where the name says so, else the last value."""
        said = self._steps.setdefault(step, _Said())
        before: dict[str, float] = {}
        if key and (key in said.sums or len(said.sums) < KEYS_KEPT):
            before = said.sums.setdefault(key, {})
        for name, value in numbers.items():
            if name.endswith(("_sum", "_count")):
                said.totals[name] = said.totals.get(name, 0.0) + value - before.get(name, 0.0)
                before[name] = value
            else:
                said.totals[name] = value
        while len(self._steps) > STEPS_KEPT:
            del self._steps[next(iter(self._steps))]
        return {name: said.totals[name] for name in numbers}

    def take(self, step: int) -> dict[str, float]:
        said = self._steps.pop(step, None)
        return said.totals if said is not None else {}

    def forget(self) -> None:
        """The steps are made again, on another branch."""
        self._steps.clear()
