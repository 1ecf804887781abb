"""Idle share of each slot in a step: 1 minus the share of the step in which a worker of the slot had a span that is no
wait (docs/timeline.md). Pure; commits.py brings what workers say with their accounts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.plan import PlacedWorker
from rlinf_worker.spans import exclusive

MAX_SLOTS: Final = 64
"""That a line names one by one; of more the means of pools are written, as accounts are added up by role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Of one worker in one step. `stretches` are of seconds from the window's begin."""

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


def shares(workers: Iterable[PlacedWorker], busy: Mapping[WorkerId, Busy]) -> dict[str, float]:
    """By slot, where one of its workers has said something of the step."""
    on_slot: dict[str, list[Busy]] = {}
    for placed in workers:
        for slot in placed.slots if placed.id in busy else ():
            on_slot.setdefault(str(slot), []).append(busy[placed.id])
    found = {name: round(_share(parts), 4) for name, parts in sorted(on_slot.items())}
    if len(found) <= MAX_SLOTS:
        return found
    pools: dict[str, list[float]] = {}
    for name, share in found.items():
        pools.setdefault(name.partition("/")[0], []).append(share)
    return {pool: round(sum(of_pool) / len(of_pool), 4) for pool, of_pool in pools.items()}


def _share(parts: Sequence[Busy]) -> float:
    """The step ended for all at once; who began late in it was not there before."""
    window_s = max(part.window_s for part in parts)
    if window_s <= 0:
        return 0.0
    if len(parts) == 1:
        return max(0.0, 1.0 - parts[0].seconds / window_s)
    late = [(window_s - part.window_s, part) for part in parts]
    pieces = [(t0 + by, t1 + by, 0) for by, part in late for t0, t1 in part.stretches]
    return max(0.0, 1.0 - sum(seconds for _, seconds, _ in exclusive(pieces)) / window_s)
