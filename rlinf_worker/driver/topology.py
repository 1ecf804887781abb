"""What a flow declares: its channels, and at which of them its steps end. Values only.

Topology(
    cycles=(CycleSpec(channel="actions", asker="env", answerer="rollout"),),
    queues=(QueueSpec(channel="segments", producer="", consumer="env", rounds=False),
            QueueSpec(channel="trajectories", producer="env", consumer="actor", rounds=True)),
).gang_roles == ("actor",)
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
    together: bool = False  # units of one ticket go to one worker of the consumer


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What a flow declared, in its order. Empty until it has."""

    cycles: tuple[CycleSpec, ...] = ()
    queues: tuple[QueueSpec, ...] = ()
    weights: tuple[WeightsSpec, ...] = ()  # none, or one
    results: tuple[QueueSpec, ...] = ()

    @property
    def gangs(self) -> tuple[QueueSpec, ...]:
        """The queues by which gangs get their rounds. Their consumers end the steps: one commits when all of them have
        done their part. Empty: the flow has declared nothing."""
        return tuple(queue for queue in self.queues if queue.rounds)

    @property
    def gang_roles(self) -> tuple[str, ...]:
        return tuple(queue.consumer for queue in self.gangs)

    def ends_of(self, gang: QueueSpec) -> tuple[QueueSpec, ...]:
        """Where the units of a step end for this gang: its rounds, and what joins them."""
        return (gang, *(queue for queue in self.queues if queue.joins == gang.channel))

    def gangs_behind(self, channel: str) -> tuple[QueueSpec, ...]:
        """Those that what is put into a queue reaches, or what is made of it."""
        seen, left = set[str](), [channel]
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            queue = next(queue for queue in self.queues if queue.channel == name)
            makers = self._partners(queue.consumer)
            left += [other.channel for other in self.queues if other.producer in makers]
        return tuple(gang for gang in self.gangs if any(end.channel in seen for end in self.ends_of(gang)))

    def _partners(self, role: str) -> set[str]:
        """It, whom it asks or answers in cycles, and their partners: any may make something of what it takes."""
        found, left = set[str](), {role}
        while left:
            one = left.pop()
            found.add(one)
            left |= {other for cycle in self.cycles if one in cycle.roles for other in cycle.roles} - found
        return found

    def names(self) -> set[str]:
        named: tuple[CycleSpec | QueueSpec | WeightsSpec, ...]
        named = (*self.cycles, *self.queues, *self.weights, *self.results)
        return {spec.channel for spec in named}
