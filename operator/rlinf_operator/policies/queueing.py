"""Whether a job may have pods, by its queue. Pure.

| the job | Admitted | follows |
|---|---|---|
| has no label `kueue.x-k8s.io/queue-name` | True/NoQueue | pods at once |
| has lost the label since it was admitted | as it was | its pods count in the queue until they are gone |
| nobody serves queues here | False/NoProvider | no pod; a job that has pods keeps them |
| waits | False/Queued | no pod |
| is admitted | True/Admitted | pods, where its share of the quota says |
| is evicted, or its place was deleted | False/Evicted | drained within the grace, then it waits again |
| is deactivated | False/Deactivated | drained; it stays so until somebody activates it |
| has none and allOrNothing, where PodGroups are served | False/Queued, True/Admitted | a PodGroup, then pods |
| has none, and holds nodes for some of its pods only (placing.py) | False/NotPlaced | as one that is evicted |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from rlinf_api import names
from rlinf_api.conditions import Reason, Status
from rlinf_operator.manifests.asking import (
    DRIVER_SET,
    PODGROUPS,
    OrderKind,
    PlaceInQueue,
    PodGang,
    QueueOrder,
    QueueStanding,
    QueueView,
    Share,
)

LOOKS_FOR_A_PROVIDER_S: Final = 30.0
"""How often a job looks whether somebody serves queues by now: as often as the watch of the kind does."""

LOOKS_FOR_ITS_GROUP_S: Final = 1.0
"""When a job looks for the PodGroup that it had made: nobody else writes into that, and so nobody tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueGate:
    opens: bool
    status: Status
    reason: Reason
    message: str
    shares: Mapping[str, Share] = field(default_factory=dict)
    """What each pod set was granted, by its name; empty where no queue counts them."""
    gang: PodGang | None = None
    """The group that the first pods of a life belong to."""
    look_again_s: float | None = None
    """In how many seconds it may open although nobody tells; None: who closed it tells."""

    def most(self) -> dict[str, int] | None:
        """Pods that each pool may have; None: as many as its plan wants."""
        return {name: share.count for name, share in self.shares.items() if name != DRIVER_SET} or None

    def share_of(self, pool: str) -> Share | None:
        """`pool`: empty for the driver."""
        return self.shares.get(pool or DRIVER_SET)


NO_QUEUE = QueueGate(
    opens=True, status=Status.TRUE, reason=Reason.NO_QUEUE, message="no queue is configured; pods start at once"
)


def judge(view: QueueView | None, *, has_pods: bool) -> QueueGate:
    """`has_pods`: it was admitted before; without a provider nobody can take that back."""
    if view is None or not (view.queue or _counts_its_pods(view, has_pods=has_pods)):
        return NO_QUEUE
    if view.provider == PODGROUPS:
        return _of_gang(view, has_pods=has_pods)
    if not view.provider:
        message = (
            f"label {names.LABEL_QUEUE} is {view.queue!r}, and no Kueue serves kueue.x-k8s.io/v1beta2 here; install "
        )
        message += "Kueue, or take the label off"
        told = f"{message}; the pods that the job has stay" if has_pods else message
        return QueueGate(
            opens=has_pods, status=Status.FALSE, reason=Reason.NO_PROVIDER, message=told,
            look_again_s=LOOKS_FOR_A_PROVIDER_S,
        )  # fmt: skip
    place = view.place
    if place is None or place.finished or place.standing is QueueStanding.GOING:
        gone = has_pods or place is not None
        message = (
            f"it has no place in queue {view.queue!r} any more and asks anew"
            if gone
            else f"queue {view.queue!r} is asked"
        )
        return _closed(Reason.EVICTED if has_pods else Reason.QUEUED, message)
    words = _words(place)
    if place.standing is QueueStanding.STOPPED:
        how = f"set spec.active of Workload {place.name} to true to go on"
        return _closed(Reason.DEACTIVATED, f"Workload {place.name} is deactivated{words}; {how}")
    if place.standing is QueueStanding.WITHDRAWN or (place.standing is QueueStanding.WAITS and has_pods):
        return _closed(Reason.EVICTED, f"queue {place.queue!r} took its admission back{words}")
    if place.standing is QueueStanding.WAITS:
        return _closed(Reason.QUEUED, f"it waits in queue {place.queue!r}{words}")
    elsewhere = ""
    if place.queue != view.queue:
        said = f"says {view.queue!r}: suspend the job to move it" if view.queue else "is gone: suspend the job to leave"
        elsewhere = f"; label {names.LABEL_QUEUE} {said}"
    return QueueGate(
        opens=True, status=Status.TRUE, reason=Reason.ADMITTED, shares=place.shares,
        message=f"queue {place.queue!r} admitted it{words}{elsewhere}",
    )  # fmt: skip


def _counts_its_pods(view: QueueView, *, has_pods: bool) -> bool:
    """A queue that has admitted the pods that are there, though the job names it no more: another job would be let in
    beside them."""
    return has_pods and view.place is not None and view.place.gang is None and not view.place.finished


def _of_gang(view: QueueView, *, has_pods: bool) -> QueueGate:
    place = view.place
    if place is not None and place.standing is QueueStanding.GRANTED and place.gang is not None:
        said = f"PodGroup {place.name}: the scheduler gives {place.gang.size} pods a node each, or none{_words(place)}"
        return QueueGate(
            opens=True, status=Status.TRUE, reason=Reason.ADMITTED, message=said, gang=place.gang
        )  # fmt: skip
    if has_pods:
        said = "its PodGroup is gone or going; pods that it has stay, and others are placed one by one"
        return QueueGate(opens=True, status=Status.TRUE, reason=Reason.NO_QUEUE, message=said)
    closed = _closed(Reason.QUEUED, "its PodGroup is made before its pods")
    return replace(closed, look_again_s=LOOKS_FOR_ITS_GROUP_S)


def _words(place: PlaceInQueue) -> str:
    return f": {place.message}" if place.message else ""


def asks(view: QueueView, *, wanted: str) -> OrderKind | None:
    """What the provider is told of a job that has no pods and is to have none now. `wanted`: hash of the pod sets that
    it would ask for; empty: nobody knows yet."""
    place = view.place
    if not view.provider:
        return None
    if place is None:
        return OrderKind.ASK if wanted else None
    if place.standing is QueueStanding.GOING:
        return None
    if place.holds and place.standing in (QueueStanding.WITHDRAWN, QueueStanding.STOPPED):
        return OrderKind.GIVE_BACK
    if place.finished:  # by somebody: nothing that is finished waits
        return OrderKind.LEAVE
    is_other = (place.queue, place.priority) != (view.queue, view.priority)
    moved = is_other or (wanted and place.asked != wanted)
    return OrderKind.CHANGE if moved and not place.holds else None


def of_running(view: QueueView | None, *, has_pods: bool, ready: bool, lacks: str = "") -> QueueOrder | None:
    """What a queue is told of a job that may have pods. A provider that waits for pods to be ready evicts those that
    nobody calls so. It is told when they are, and afterwards of a pod that is lacking with no prospect (`lacks` says
    why); those that start anew are none of its business. A job whose label was taken off leaves once it has no pods
    that count there."""
    if view is not None and not view.queue and not _counts_its_pods(view, has_pods=has_pods):
        return leaves(view, pods_left=False)
    place = view.place if view is not None else None
    if place is None or place.standing is not QueueStanding.GRANTED or place.gang is not None:
        return None
    if place.ready:
        return QueueOrder(kind=OrderKind.LACKS, message=lacks) if lacks else None
    return QueueOrder(kind=OrderKind.READY) if ready else None


def leaves(view: QueueView | None, *, pods_left: bool) -> QueueOrder | None:
    """The order by which a job that its user, or a rule, suspends leaves its queue. A place that somebody deactivated
    is kept: who suspends a job and takes that back would activate it otherwise."""
    place = view.place if view is not None else None
    if place is None or pods_left or place.standing in (QueueStanding.STOPPED, QueueStanding.GOING):
        return None
    return QueueOrder(kind=OrderKind.LEAVE)


def finishes(view: QueueView | None, *, at_work: bool, succeeded: bool, message: str) -> QueueOrder | None:
    place = view.place if view is not None else None
    if place is None or at_work or place.finished or place.standing is QueueStanding.GOING:
        return None
    return QueueOrder(kind=OrderKind.FINISH, succeeded=succeeded, message=message)


def exceeds(pods: Mapping[str, int], most: Mapping[str, int] | None) -> str:
    """Why a plan that wants so many pods per pool is not covered by what was admitted.

    >>> exceeds({"gpu": 4}, {"gpu": 2})
    'it needs 4 pods of pool gpu, and the queue admitted 2'
    """
    over = ((pool, count, (most or {}).get(pool, 0)) for pool, count in sorted(pods.items()))
    found = [
        f"it needs {count} pods of pool {pool}, and the queue admitted {most_}"
        for pool, count, most_ in over
        if count > most_
    ]
    return found[0] if most is not None and found else ""


def leaves_placing(gate: QueueGate) -> QueueGate:
    """The gate of a job that has a queue, and spec.allOrNothing, which is left to the queue: quota would count for pods
    that it gave back."""
    said = f"{gate.message}; spec.allOrNothing is left to the queue, which admits all pods or none"
    return replace(gate, message=said)


def _closed(reason: Reason, message: str) -> QueueGate:
    return QueueGate(opens=False, status=Status.FALSE, reason=reason, message=message)
