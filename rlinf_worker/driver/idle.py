"""Idle share of each slot in a step: 1 minus the share of the step in which a worker of the slot had a span that is no
wait (docs/timeline.md). No I/O; commits.py brings what workers say with their accounts, and when steps ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.slots import PlacedWorker
from rlinf_worker.spans import exclusive

if TYPE_CHECKING:
    from rlinf_worker.driver.members import WorkerRecord

MAX_SLOTS: Final = 64
"""That a line names one by one; of more the means of pools are written, as accounts are added up by role."""
STEPS_KEPT: Final = 16  # a step's shares are asked for at the commit of the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """What one worker did in one step. `stretches` are (begin, end) in seconds from the window's begin.

    Busy(window_s=2.0, seconds=1.5, stretches=[(0.0, 1.0), (1.5, 2.0)])
    """

    window_s: float
    seconds: float
    stretches: Sequence[tuple[float, float]]

    @classmethod
    def of(cls, account: pb.Account) -> Busy | None:
        """None: of a worker whose image is of before, which says what it did and not when."""
        if account.seconds.get("compute", 0.0) > 0 and not account.busy_s:
            return None
        ends = iter(account.busy)
        return cls(window_s=account.window_s, seconds=account.busy_s, stretches=list(zip(ends, ends, strict=False)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTimes:
    began_at: float
    ended_at: float
    lost: frozenset[WorkerId]


class IdleSteps:
    """When each began and ended, and which workers died in it, by the driver's clock."""

    def __init__(self) -> None:
        self._steps: dict[int, _StepTimes] = {}

    def ended(self, step: int, workers: Iterable[WorkerRecord], *, at: float, seconds: float) -> None:
        began_at = at - seconds
        self._steps[step] = _StepTimes(began_at=began_at, ended_at=at, lost=_lost(workers, began_at, at))
        while len(self._steps) > STEPS_KEPT:
            del self._steps[next(iter(self._steps))]

    def shares(
        self, step: int, workers: Collection[WorkerRecord], accounts: Mapping[WorkerId, pb.Account]
    ) -> dict[str, float]:
        """Idle shares of the step before the one that ends: all have had the time to close its account."""
        busy = {wid: found for wid, account in accounts.items() if (found := Busy.of(account)) is not None}
        placed = [record.placed for record in workers]
        known = self._steps.pop(step, None)
        if known is None:  # it ended under another driver
            return shares(placed, busy)
        heard_since = _lost(workers, known.began_at, known.ended_at)
        return shares(placed, busy, window_s=known.ended_at - known.began_at, lost=known.lost | heard_since)


def _lost(workers: Iterable[WorkerRecord], began_at: float, ended_at: float) -> frozenset[WorkerId]:
    return frozenset(w.placed.id for w in workers if w.ended_at is not None and began_at <= w.ended_at <= ended_at)


def shares(
    workers: Iterable[PlacedWorker],
    busy: Mapping[WorkerId, Busy],
    *,
    window_s: float = 0.0,
    lost: AbstractSet[WorkerId] = frozenset(),
) -> dict[str, float]:
    """By slot, where one of its workers has said something of the step, and none of `lost` took with it what it did."""
    on_slot: dict[str, list[Busy]] = {}
    unknown: set[str] = set()
    for placed in workers:
        for slot in map(str, placed.slots):
            if placed.id in lost:
                unknown.add(slot)
            elif placed.id in busy:
                on_slot.setdefault(slot, []).append(busy[placed.id])
    of_slots = sorted((name, parts) for name, parts in on_slot.items() if name not in unknown)
    found = {name: round(_share(parts, window_s), 4) for name, parts in of_slots}
    if len(found) <= MAX_SLOTS:
        return found
    pools: dict[str, list[float]] = {}
    for name, share in found.items():
        pools.setdefault(name.partition("/")[0], []).append(share)
    return {pool: round(sum(of_pool) / len(of_pool), 4) for pool, of_pool in pools.items()}


def _share(parts: Sequence[Busy], step_s: float) -> float:
    """The step ended for all at once; who began late in it was not there before, be it all of them."""
    window_s = max(step_s, *(part.window_s for part in parts))
    if window_s <= 0:
        return 0.0
    if len(parts) == 1:
        return max(0.0, 1.0 - parts[0].seconds / window_s)
    late = [(window_s - part.window_s, part) for part in parts]
    pieces = [(t0 + by, t1 + by, 0) for by, part in late for t0, t1 in part.stretches]
    return max(0.0, 1.0 - sum(seconds for _, seconds, _ in exclusive(pieces)) / window_s)
