"""What a flow declares: its channels, and which of them commits its steps. Values only.

Topology(
    streams=(StreamSpec(channel="actions", producer="rollout", consumer="env"),),
    queues=(QueueSpec(channel="segments", producer="", consumer="env", rounds=False),
            QueueSpec(channel="trajectories", producer="env", consumer="actor", rounds=True)),
).committing.consumer == "actor"
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    channel: str
    producer: str
    consumer: str
    first_rank_only: bool = False  # weights: rank 0 of the producer to every consumer
    payload: str = ""  # what the flow declares of it, as the workers are told


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    channel: str
    producer: str  # "": the driver
    consumer: str
    rounds: bool
    payload: str = ""  # what the flow declares of it, as the workers are told
    joins: str = ""
    """Queue of the same consumer that this one completes, unit by unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What a flow declared, in its order. Empty until it has."""

    streams: tuple[StreamSpec, ...] = ()
    queues: tuple[QueueSpec, ...] = ()

    @property
    def committing(self) -> QueueSpec | None:
        """The queue whose consumer is the gang that commits steps."""
        return next((q for q in self.queues if q.rounds), None)

    @property
    def gang_role(self) -> str:
        """The role that commits steps; empty: the flow has declared nothing."""
        return self.committing.consumer if self.committing else ""

    def names(self) -> set[str]:
        return {s.channel for s in self.streams} | {q.channel for q in self.queues}
