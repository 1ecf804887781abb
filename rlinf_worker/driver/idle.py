"""Idle share of each slot in a step: 1 minus the share of the step in which a worker of the slot had a span that is no
wait (docs/timeline.md). No I/O; commits.py brings what workers say with their accounts, and when steps ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.slots import PlacedWorker
from rlinf_worker.driver.members import WorkerRecord
from rlinf_worker.spans import exclusive

MAX_SLOTS: Final = 64
"""That a line names one by one; of more the means of pools are written, as accounts are added up by role."""
STEPS_KEPT: Final = 16  # a step's shares are asked for at the commit of the next


class IdleSteps:
    """When each began and ended, and which workers died in it, by the driver's clock."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[float, float, frozenset[WorkerId]]] = {}  # began at, ended at, who was lost

    def ended(self, step: int, workers: Iterable[WorkerRecord], *, at: float, seconds: float) -> None:
        began_at = at - seconds
        self._steps[step] = began_at, at, _lost(workers, began_at, at)
        while len(self._steps) > STEPS_KEPT:
            del self._steps[next(iter(self._steps))]

    def shares(
        self, step: int, workers: Collection[WorkerRecord], accounts: Mapping[WorkerId, pb.Account]
    ) -> dict[str, float]:
        """Idle shares of the step before the one that ends: all have had the time to close its account."""
        placed = [record.placed for record in workers]
        known = self._steps.pop(step, None)
        if known is None:  # it ended under another driver
            return shares(placed, accounts)
        began_at, ended_at, lost = known
        heard_since = _lost(workers, began_at, ended_at)
        return shares(placed, accounts, window_s=ended_at - began_at, lost=lost | heard_since)


def _lost(workers: Iterable[WorkerRecord], began_at: float, ended_at: float) -> frozenset[WorkerId]:
    return frozenset(w.placed.id for w in workers if w.ended_at is not None and began_at <= w.ended_at <= ended_at)


def shares(
    workers: Iterable[PlacedWorker],
    accounts: Mapping[WorkerId, pb.Account],
    *,
    window_s: float = 0.0,
    lost: AbstractSet[WorkerId] = frozenset(),
) -> dict[str, float]:
    """By slot, where one of its workers has said something of the step, and none of `lost` took with it what it did."""
    on_slot: dict[str, list[pb.Account]] = {}
    unknown: set[str] = set()
    for placed in workers:
        for slot in map(str, placed.slots):
            if placed.id in lost:
                unknown.add(slot)
            elif (account := accounts.get(placed.id)) is not None:
                on_slot.setdefault(slot, []).append(account)
    of_slots = sorted((name, parts) for name, parts in on_slot.items() if name not in unknown)
    found = {name: round(_share(parts, window_s), 4) for name, parts in of_slots}
    if len(found) <= MAX_SLOTS:
        return found
    pools: dict[str, list[float]] = {}
    for name, share in found.items():
        pools.setdefault(name.partition("/")[0], []).append(share)
    return {pool: round(sum(of_pool) / len(of_pool), 4) for pool, of_pool in pools.items()}


def _share(parts: Sequence[pb.Account], step_s: float) -> float:
    """The step ended for all at once; who began late in it was not there before, be it all of them."""
    window_s = max(step_s, *(part.window_s for part in parts))
    if window_s <= 0:
        return 0.0
    if len(parts) == 1:
        return max(0.0, 1.0 - parts[0].busy_s / window_s)
    pieces = []
    for part in parts:
        late_s, ends = window_s - part.window_s, iter(part.busy)
        pieces += [(t0 + late_s, t1 + late_s, 0) for t0, t1 in zip(ends, ends, strict=False)]
    return max(0.0, 1.0 - sum(seconds for _, seconds, _ in exclusive(pieces)) / window_s)
