"""What a flow declares: its channels, and which of them commits its steps. Values only.

Topology(
    cycles=(CycleSpec(channel="actions", asker="env", answerer="rollout"),),
    queues=(QueueSpec(channel="segments", producer="", consumer="env", rounds=False),
            QueueSpec(channel="trajectories", producer="env", consumer="actor", rounds=True)),
).committing.consumer == "actor"
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleSpec:
    channel: str
    asker: str
    answerer: str
    question: str = ""  # what the flow declares of it, as the workers are told
    answer: str = ""
    anybody: bool = False  # each asker has all answerers, and asks whoever has least to do

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({self.asker, self.answerer})


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSpec:
    """From rank 0 of the producer to every consumer."""

    producer: str
    consumer: str
    channel: str = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    channel: str
    producer: str  # "": the driver
    consumer: str  # "": the flow, which is told values (`Topology.results`)
    rounds: bool = False
    payload: str = ""  # what the flow declares of it, as the workers are told
    joins: str = ""
    """Queue of the same consumer that this one completes, unit by unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What a flow declared, in its order. Empty until it has."""

    cycles: tuple[CycleSpec, ...] = ()
    queues: tuple[QueueSpec, ...] = ()
    weights: tuple[WeightsSpec, ...] = ()  # none, or one
    results: tuple[QueueSpec, ...] = ()

    @property
    def committing(self) -> QueueSpec | None:
        """The queue whose consumer is the gang that commits steps."""
        return next((q for q in self.queues if q.rounds), None)

    @property
    def gang_role(self) -> str:
        """The role that commits steps; empty: the flow has declared nothing."""
        return self.committing.consumer if self.committing else ""

    def names(self) -> set[str]:
        named: tuple[CycleSpec | QueueSpec | WeightsSpec, ...]
        named = (*self.cycles, *self.queues, *self.weights, *self.results)
        return {spec.channel for spec in named}
