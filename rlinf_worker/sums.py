"""What a profile needs of one worker, summed up while it works: time by how much was worked on, moves onto slots and
off them, when units were handed on. Sums only: no span is kept for it, and all of it is bounded.

For: the recorder (spans.py), which is told all of it and gives the sums of a step with that step's account.
Not for: whose time a moment was, which is the account's.

    took(step) ──> worked(4 units, 0.2 s) ──> released("trajectories", step) ──> take(step) ──> Summed ──> driver
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

SIZES: Final = 16
"""Batches of so many different sizes are told apart; a plan has one or two per queue, and the end of a step some more.
Those of further sizes are put together by powers of two."""
KEPT: Final = 128
"""Release times of a channel and step that are told, 1 KB of message: the slowest 1% of 10,000 units is one of them."""
CHANNELS: Final = 64  # that one role puts into; a plan names no more
STEPS: Final = 16  # that are open at once: more than any staleness in use
COUNTED_STEPS: Final = 1024  # the same, of which what was taken is counted: more than any staleness that a job may have


class End(NamedTuple):
    """One end of a channel, and what is waited for there.

    >>> End("trajectories", "consumer"), End("trajectories", "producer")  # a unit; room for one
    (End(channel='trajectories', side='consumer'), End(channel='trajectories', side='producer'))
    """

    channel: str = ""
    side: str = ""


NO_END: Final = End()


@dataclass(slots=True)
class Amount:
    """How much a span worked on. `units`: items of its inputs; `tokens`: whatever finer measure the role has, such as
    tokens of a text or observations. 0: not said."""

    units: float = 0.0
    tokens: float = 0.0


NOTHING: Final = Amount()


@dataclass(slots=True)
class Batches:
    """Spans of compute of one size: sums from which a mean, a spread and a line through them follow."""

    count: int = 0
    units: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    seconds_squared: float = 0.0
    tokens_squared: float = 0.0
    token_seconds: float = 0.0


@dataclass(slots=True)
class Moves:
    """Loads, offloads, publications."""

    count: int = 0
    seconds: float = 0.0
    seconds_squared: float = 0.0
    bytes: float = 0.0

    def add(self, seconds: float, nbytes: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.seconds_squared += seconds * seconds
        self.bytes += nbytes


@dataclass(slots=True)
class ReleaseTimes:
    """When units were handed on, in the order of time, which is that of their rank: every `_stride`th, and the last."""

    count: int = 0
    _stride: int = 1
    _seconds: list[float] = field(default_factory=list)
    _last: float = 0.0

    def add(self, seconds: float) -> None:
        if self.count % self._stride == 0:
            self._seconds.append(seconds)
            if len(self._seconds) == 2 * KEPT:
                del self._seconds[1::2]
                self._stride *= 2
        self.count += 1
        self._last = seconds

    def evenly(self) -> list[float]:
        """At most KEPT, at ranks that are as far from each other, the first and the last among them.

        >>> releases = ReleaseTimes()
        >>> for n in range(1000):
        ...     releases.add(float(n))
        >>> releases.evenly()[:3], releases.evenly()[-1], len(releases.evenly())
        ([0.0, 8.0, 16.0], 999.0, 128)
        """
        ranks = evenly(self.count, KEPT)
        highest = len(self._seconds) - 1
        found = [self._seconds[min(highest, round(rank / self._stride))] for rank in ranks[:-1]]
        return [*found, self._last] if ranks else []


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes; 0: not known. Of the role on its slots, as it says itself: when loaded, at most, when offloaded. Of the
    process: its pages in memory, those that it shares included, now and at most since it began.

    MemoryUse(resident=51_000_000_000, peak=62_000_000_000, offloaded=800_000_000, process=2_100_000_000,
              process_peak=2_400_000_000)
    """

    resident: int = 0
    peak: int = 0
    offloaded: int = 0
    process: int = 0
    process_peak: int = 0


def evenly(count: int, most: int) -> list[int]:
    """Ranks of at most so many of `count`, the lowest and the highest among them.

    >>> evenly(3, 128), evenly(9, 3), evenly(1, 128), evenly(0, 128)
    ([0, 1, 2], [0, 4, 8], [0], [])
    """
    number = min(count, most)
    return [round(n * (count - 1) / max(1, number - 1)) for n in range(number)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """One worker's sums since the step before."""

    batches: dict[float, Batches] = field(default_factory=dict)
    """By size: units of a span, or the power of two that is not above them; 0: of spans that say nothing."""
    moves: dict[str, Moves] = field(default_factory=dict)
    """By what they were: load, offload, publish."""
    releases: dict[str, ReleaseTimes] = field(default_factory=dict)
    """By channel, from the moment on at which the worker took the first thing of the step."""
    went: dict[End, int] = field(default_factory=dict)
    """What was taken and handed on of the step, by the channel's end, however far ahead of the step."""


class Sums:
    def __init__(self) -> None:
        self._batches: dict[float, Batches] = {}
        self._moves: dict[str, Moves] = {}
        self._began: dict[tuple[int, int], float] = {}  # by branch and step
        self._taken: dict[tuple[int, int], Counter[End]] = {}
        self._releases: dict[tuple[int, int], dict[str, ReleaseTimes]] = {}

    def worked(self, seconds: float, amount: Amount) -> None:
        batches = self._batches.get(amount.units)
        if batches is None:
            size = amount.units
            if len(self._batches) >= SIZES and size > 0:
                size = 2.0 ** math.floor(math.log2(size))
            batches = self._batches.setdefault(size, Batches())
        batches.count += 1  # not in a method of its own: the inner loop of recording
        batches.units += amount.units
        batches.seconds += seconds
        batches.seconds_squared += seconds * seconds
        if tokens := amount.tokens:
            batches.tokens += tokens
            batches.tokens_squared += tokens * tokens
            batches.token_seconds += tokens * seconds

    def moved(self, what: str, seconds: float, nbytes: float) -> None:
        self._moves.setdefault(what, Moves()).add(seconds, nbytes)

    def took(self, step: int, branch: int, *, at: float) -> Counter[End]:
        """Where what is taken of the step is counted, by end."""
        age = branch, step
        if age not in self._began:
            self._began[age] = at
            if len(self._began) > STEPS:
                del self._began[min(self._began)]
        if (counted := self._taken.get(age)) is None:
            counted = self._taken[age] = Counter()
            if len(self._taken) > COUNTED_STEPS:
                del self._taken[min(self._taken)]
        return counted

    def released(self, channel: str, step: int, branch: int, *, at: float, since: float) -> None:
        """`since`: where nothing of the step was taken."""
        channels = self._releases.setdefault((branch, step), {})
        if len(self._releases) > STEPS:
            del self._releases[min(self._releases)]
        if (releases := channels.get(channel)) is None:
            if len(channels) >= CHANNELS:
                return
            releases = channels[channel] = ReleaseTimes()
        releases.add(at - self._began.get((branch, step), since))

    def take(self, step: int, branch: int) -> Summed:
        """All of the step, which is over, and of what is made no more; what has begun of the next ones stays."""
        age = branch, step
        releases = self._releases.get(age, {})
        handed_on = {End(channel, "producer"): found.count for channel, found in releases.items()}
        found = Summed(
            batches=self._batches, moves=self._moves, releases=releases, went={**self._taken.get(age, {}), **handed_on}
        )
        self._batches, self._moves = {}, {}
        for known in (self._began, self._taken, self._releases):
            for over in [of for of in known if of <= age]:
                del known[over]
        return found


def quantiles(weighted: Sequence[tuple[float, float]], most: int = KEPT) -> list[float]:
    """Quantiles of values with weights, which may be in any order: at most so many, evenly by rank, the lowest and the
    highest among them.

    >>> quantiles([(3.0, 1.0), (1.0, 1.0), (2.0, 8.0)], most=3)
    [1.0, 2.0, 3.0]
    """
    values = sorted(weighted)
    if len(values) <= most and len({weight for _, weight in values}) <= 1:
        return [value for value, _ in values]
    total, number = sum(weight for _, weight in values), most
    found, below, at = [values[0][0]], 0.0, 0
    for n in range(1, number - 1):
        while at < len(values) - 1 and below + values[at][1] < total * n / (number - 1):
            below += values[at][1]
            at += 1
        found.append(values[at][0])
    return [*found, values[-1][0]]
