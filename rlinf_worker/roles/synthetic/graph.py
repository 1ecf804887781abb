"""Which channels a synthetic job has and who is at their ends, read from the flow's checked config. Pure, stdlib only.

Flow and roles both ask here, so that they agree on names:

    tickets            the driver's, to each role without an input (tickets-ROLE where there are several such roles)
    FROM-TO            a queue per edge that carries data
    cycle-FRONT-BACK   a cycle
    weights            the edge with `weights: true`

A role with several inputs takes from the first, and of the others what belongs to it (`joins`).

Who has how many units of a step, and how they are called: of 4 prompts, 4 samples each, a judge puts together 4 groups.

>>> graph = Graph.of({"items": 4, "units": {"rollout": 16, "judge": 16}, "edges": [
...     {"from": "rollout", "to": "judge"}, {"from": "judge", "to": "train"}]})
>>> [graph.units(role) for role in graph.roles]
[16, 16, 4]
>>> graph.inside("w:1/3/0", "rollout")  # what the engine makes of a ticket
['w:1/3/0', 'w:1/3/1', 'w:1/3/2', 'w:1/3/3']
>>> graph.becomes("w:1/3/2", "judge", "train")
(['w:1/3/0'], 4)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    producer: str
    consumer: str
    weights: bool = False
    sync_s: float = 0.0

    @property
    def channel(self) -> str:
        return f"{self.producer}-{self.consumer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """Units travel `round_trips` times through `front` and `back`; they come in at the front and go out at the back."""

    front: str
    back: str
    round_trips: int
    hop_s: float
    stages: int = 1

    @property
    def channel(self) -> str:
        return f"cycle-{self.front}-{self.back}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    edges: tuple[Edge, ...]
    cycles: tuple[Cycle, ...] = ()
    items: int = 1
    """Tickets of a step."""
    counts: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Units of a step by role, where they are not `items`: multiples of it."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Graph:
        """Reads the flow's config as it stands in a manifest (camelCase)."""
        edges = tuple(
            Edge(
                producer=e["from"],
                consumer=e["to"],
                weights=bool(e.get("weights")),
                sync_s=float(e.get("syncMs") or 0.0) / 1e3,
            )
            for e in config["edges"]
        )
        cycles = tuple(
            Cycle(
                front=c["roles"][0],
                back=c["roles"][1],
                round_trips=int(c.get("roundTrips", 1)),
                hop_s=float(c.get("hopMs", 0.0)) / 1e3,
                stages=int(c.get("stages", 1)),
            )
            for c in config.get("cycles") or ()
        )
        return cls(
            edges=edges, cycles=cycles, items=int(config.get("items", 1)), counts=dict(config.get("units") or {})
        )

    # --- roles --------------------------------------------------------------------------------------------------------
    @property
    def roles(self) -> tuple[str, ...]:
        """In the order in which they are named."""
        named = [name for c in self.cycles for name in (c.front, c.back)]
        named += [name for e in self.edges for name in (e.producer, e.consumer)]
        return tuple(dict.fromkeys(named))

    @property
    def data(self) -> tuple[Edge, ...]:
        return tuple(e for e in self.edges if not e.weights)

    @property
    def weights(self) -> Edge | None:
        return next((e for e in self.edges if e.weights), None)

    def cycle_of(self, role: str) -> Cycle | None:
        return next((c for c in self.cycles if role in (c.front, c.back)), None)

    def inputs(self, role: str) -> tuple[str, ...]:
        """Queues of other roles; without the tickets."""
        return tuple(e.channel for e in self.data if e.consumer == role)

    def outputs(self, role: str) -> tuple[Edge, ...]:
        return tuple(e for e in self.data if e.producer == role)

    @property
    def first_roles(self) -> tuple[str, ...]:
        """Those that take tickets."""
        answer = {c.back for c in self.cycles}
        return tuple(r for r in self.roles if not self.inputs(r) and r not in answer)

    def tickets(self, role: str) -> str:
        return "tickets" if len(self.first_roles) == 1 else f"tickets-{role}"

    @property
    def last_roles(self) -> tuple[str, ...]:
        ask = {c.front for c in self.cycles}
        return tuple(r for r in self.roles if not self.outputs(r) and r not in ask)

    @property
    def committing(self) -> str:
        """The role that ends a step: whose weights are published, else the last one."""
        return self.weights.producer if self.weights is not None else self.last_roles[-1]

    def takes_from(self, role: str) -> tuple[str, ...]:
        """Every queue of a role, the first one being that which the others join."""
        return self.inputs(role) or (self.tickets(role),)

    # --- units --------------------------------------------------------------------------------------------------------
    def units(self, role: str) -> int:
        """The units of a step that the role works on. Whoever answers in a cycle has those of who asks."""
        cycle = self.cycle_of(role)
        return self.counts.get(cycle.front if cycle is not None else role, self.items)

    def puts_together(self, role: str) -> bool:
        """One of the next role's units is of several of this one's."""
        return any(self.units(e.consumer) < self.units(role) for e in self.outputs(role))

    def inside(self, key: str, role: str) -> list[str]:
        """The units that a role works on of one that it takes: several where it makes samples of a prompt's ticket."""
        times = self.units(role) // self.items if role in self.first_roles else 1
        return _parts(key, times) if times > 1 else [key]

    def becomes(self, key: str, producer: str, consumer: str) -> tuple[Sequence[str], int]:
        """What a unit is in the next role's hands, and of how many of the producer's each of these is."""
        made, taken = self.units(producer), self.units(consumer)
        if taken >= made:
            return (_parts(key, taken // made) if taken > made else [key]), 1
        of = made // taken
        head, _, number = key.rpartition("/")
        return [f"{head}/{int(number) // of}"], of


def _parts(key: str, times: int) -> list[str]:
    head, _, number = key.rpartition("/")
    return [f"{head}/{int(number) * times + n}" for n in range(times)]
