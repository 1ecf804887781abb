"""How long steps took, and whether one plan's take longer than another's beyond the noise. Pure. For: decide.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rlinf_api.profile import Number, Profile

SURE: Final = (
    31.82, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764, 2.718, 2.681, 2.650, 2.624, 2.602, 2.583,
    2.567, 2.552, 2.539, 2.528, 2.518, 2.508, 2.500, 2.492, 2.485, 2.479, 2.473, 2.467, 2.462, 2.457,
)  # fmt: skip
"""Student's t, one-sided 99%, for 1, 2, ... 30 degrees of freedom; beyond them 2.46 errs on the safe side."""
LAST: Final = 2.46


@dataclass(frozen=True, slots=True)
class StepTimes:
    """So many steps: their mean, and the standard deviation of one. Seconds."""

    count: int
    mean: float
    spread: float

    def scaled_to(self, mean: float) -> StepTimes:
        """As if they had taken `mean`, with the spread that they have in proportion."""
        return StepTimes(self.count, mean, self.spread * mean / self.mean if self.mean else 0.0)


def own_of(profiles: Sequence[Profile], revision: int) -> tuple[Profile, ...]:
    """The profiles of this plan, without the report in which it warmed up."""
    found = tuple(p for p in profiles if p.revision == revision)
    return found[1:] if len(found) > 1 and found[0].steps == 1 else found


def steps_of(profiles: Sequence[Profile]) -> StepTimes:
    """All steps of these reports.

    >>> from types import SimpleNamespace as S
    >>> steps_of([S(step_seconds=S(value=1.0, spread=0.0, count=1)), S(step_seconds=S(value=3.0, spread=0.0, count=1))])
    StepTimes(count=2, mean=2.0, spread=1.4142135623730951)
    """
    return _together([profile.step_seconds for profile in profiles])


def computed(profiles: Sequence[Profile], role: str) -> StepTimes:
    """What a worker of the role computed in a step, over all of them."""
    parts = (part for profile in profiles for part in profile.roles if part.name == role)
    return _together([part.seconds["compute"] for part in parts if "compute" in part.seconds])


def _together(numbers: Sequence[Number]) -> StepTimes:
    count = sum(number.count for number in numbers)
    if not count:
        return StepTimes(0, 0.0, 0.0)
    mean = math.fsum(number.value * number.count for number in numbers) / count
    square = math.fsum(
        number.spread**2 * max(0, number.count - 1) + number.count * (number.value - mean) ** 2 for number in numbers
    )
    return StepTimes(count, mean, math.sqrt(square / (count - 1)) if count > 1 else 0.0)


def slower(these: StepTimes, those: StepTimes, *, by: float) -> bool:
    """Whether these steps take more than (1 + by) times as long as those, at 99% (Welch). A single step says nothing.

    >>> before = StepTimes(8, 1.0, 0.05)
    >>> slower(StepTimes(8, 1.3, 0.05), before, by=0.1), slower(StepTimes(8, 1.15, 0.2), before, by=0.1)
    (True, False)
    """
    if these.count < 2 or those.count < 2:
        return False
    margin = these.mean - (1 + by) * those.mean
    a, b = these.spread**2 / these.count, ((1 + by) * those.spread) ** 2 / those.count
    if margin <= 0 or a + b == 0.0:
        return margin > 0
    freedom = (a + b) ** 2 / (a**2 / (these.count - 1) + b**2 / (those.count - 1))
    row = int(freedom) - 1
    return margin / math.sqrt(a + b) > (SURE[row] if row < len(SURE) else LAST)
