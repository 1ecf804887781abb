"""The highest branch of the weights' history that this worker has heard of, from anybody. A new driver, which has heard
of none, gives the next one a higher number than any worker states.

For: runtime.session, which hears with it and states it in each Hello. A worker outside the committing gang hears of a
branch by the steps that commit on it, by what is cancelled for it and by what it is given to do; by weights, see
`WeightsChannel.highest_branch`.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb


class Branches:
    def __init__(self) -> None:
        self.highest = 0

    def hear(self, message: pb.DriverMessage) -> None:
        self.highest = max(self.highest, *_named(message))


def _named(message: pb.DriverMessage) -> Iterable[int]:
    kind = message.WhichOneof("kind")
    if kind in ("begin", "step_commit"):
        return (getattr(message, kind).version.branch,)
    if kind in ("cancel", "round", "released", "held"):
        return (getattr(message, kind).branch,)
    if kind == "assign":
        return [0, *(unit.branch for unit in message.assign.units)]
    return (0,)
