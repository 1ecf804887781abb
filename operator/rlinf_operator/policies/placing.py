"""Whether a job of spec.allOrNothing may hold what it holds: nodes for some of its pods while others find none. Pure.

| the job | follows |
|---|---|
| has a node for every pod | nothing |
| has a node for none, and all pods are made, or no pod | it holds nothing and waits on |
| has a node for some, or some of its pods are refused | it has timeoutSeconds; then all its pods go |
| gave its pods back | no pod before a pause is over: 10 to 20 s, doubled with each further try, 150 to 300 s at most |

Where in its pause a job begins anew is drawn from its uid and the number of the try. Two jobs that hold what the other
one lacks give back at the same moment, and one of them begins so much earlier that it finds room for all of its pods.
The memory is status.placement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from rlinf_api import times
from rlinf_api.conditions import Reason, Status
from rlinf_api.job import PlacementStatus
from rlinf_operator.policies.queueing import QueueGate

PAUSE_MIN_S: Final = 10.0
"""Before the second try. 10 s: a scheduler has placed another job's pods by then."""
PAUSE_MAX_S: Final = 300.0
"""Before any try. 5 min: as long as a cluster's autoscaler takes to bring nodes."""
LOOKS_S: Final = 30.0
"""How often a job that holds nothing looks whether it holds something by now: no watch tells of a pod's node alone."""
_ONE: Final = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What a pass sees of the pods that the plan in force needs."""

    needed: int
    made: int
    nodes: int
    """How many have a node."""
    lacking: Sequence[str]
    """Names of places whose pod has none, or is not there."""
    why: str = ""
    """The scheduler's words about one of them."""

    @property
    def holds(self) -> bool:
        """What another job may wait for: nodes, or a part of a quota that refuses the rest."""
        return self.nodes > 0 or 0 < self.made < self.needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    memory: PlacementStatus | None
    """As status.placement says it from now on; None: all is well."""
    gives_back: str = ""
    """Why the job is to give back its pods."""
    look_again_s: float | None = None


def judge(before: PlacementStatus | None, seen: Placed, *, timeout_s: float, uid: str, now: datetime) -> Placing:
    """How a job that may have pods is placed, and whether it is to give them back."""
    if not seen.needed:  # nobody knows yet
        return Placing(memory=before)
    if not seen.lacking:
        return Placing(memory=None)
    tries = before.tries if before is not None else 0
    if not seen.holds:
        memory = PlacementStatus(tries=tries) if tries else None
        return Placing(memory=memory, look_again_s=min(timeout_s, LOOKS_S))
    known = times.parse(before.half_placed_since) if before is not None else None
    since = min(known, now) if known is not None else now  # a clock that was put back makes no deadline longer
    left_s = timeout_s - (now - since).total_seconds()
    if left_s > 0:
        whole = since + timedelta(seconds=1) if since.microsecond else since  # written without them: never too early
        memory = PlacementStatus(half_placed_since=times.text(whole), tries=tries)
        return Placing(memory=memory, look_again_s=left_s)
    again_at = now + timedelta(seconds=pause_s(tries + 1, uid=uid))
    memory = PlacementStatus(tries=tries + 1, next_try=times.text(again_at))
    return Placing(memory=memory, gives_back=_sentence(seen, memory, timeout_s=timeout_s))


def gate(before: PlacementStatus | None, *, said: str, pods_left: bool, now: datetime) -> QueueGate | None:
    """The gate of a job that gave its pods back: closed until it tries again. `said`: why it gave them back.
    `pods_left`: whether some of that try are left. None: nothing closes it."""
    again_at = times.parse(before.next_try) if before is not None else None
    if again_at is None:
        return None
    left_s = min(PAUSE_MAX_S, (again_at - now).total_seconds())  # a clock that was put back makes no pause longer
    return closed(said, look_again_s=max(0.0, left_s)) if left_s > 0 or pods_left else None


def closed(message: str, *, look_again_s: float) -> QueueGate:
    return QueueGate(
        opens=False, status=Status.FALSE, reason=Reason.NOT_PLACED, message=message, look_again_s=look_again_s
    )


def pause_s(tries: int, *, uid: str) -> float:
    """
    >>> [round(pause_s(n, uid=uid)) for uid in "ab" for n in (1, 2, 9)]
    [17, 33, 170, 16, 21, 299]
    """
    least: float = min(PAUSE_MAX_S / 2, PAUSE_MIN_S * 2.0 ** (min(tries, 16) - 1))
    drawn = int.from_bytes(hashlib.sha256(f"{uid}/{tries}".encode()).digest()[:4], "big")
    return least * (1 + drawn / _ONE)


def _sentence(seen: Placed, memory: PlacementStatus, *, timeout_s: float) -> str:
    some = ", ".join(seen.lacking[:4]) + (f" and {len(seen.lacking) - 4} more" if len(seen.lacking) > 4 else "")
    why = f" ({seen.why})" if seen.why else ""
    return (
        f"{seen.nodes} of {seen.needed} pods have a node, and {some} found none within {timeout_s:g} s{why}; "
        f"spec.allOrNothing wants all or none, so the job gives back what it holds, for the {memory.tries}. time, and "
        f"tries again at {memory.next_try}; free resources, or lower spec.pools"
    )
