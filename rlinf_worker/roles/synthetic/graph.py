"""Which channels a synthetic job has and who is at their ends, read from the flow's checked config. Pure, stdlib only.

Flow and roles both ask here, so that they agree on names:

    tickets            the driver's, to each role without an input (tickets-ROLE where there are several such roles)
    FROM-TO            a queue per edge that carries data
    cycle-FRONT-BACK   the cycle, if there is one
    weights            the edge with `weights: true`

A role with several inputs takes from the first, and of the others what belongs to it (`joins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    cycle: Cycle | None = None

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
        found = config.get("cycle")
        if not found:
            return cls(edges=edges)
        cycle = Cycle(
            front=found["roles"][0],
            back=found["roles"][1],
            round_trips=int(found.get("roundTrips", 1)),
            hop_s=float(found.get("hopMs", 0.0)) / 1e3,
            stages=int(found.get("stages", 1)),
        )
        return cls(edges=edges, cycle=cycle)

    # --- roles --------------------------------------------------------------------------------------------------------
    @property
    def roles(self) -> tuple[str, ...]:
        """In the order in which they are named."""
        named = [name for e in self.edges for name in (e.producer, e.consumer)]
        if self.cycle is not None:
            named = [self.cycle.front, self.cycle.back, *named]
        return tuple(dict.fromkeys(named))

    @property
    def data(self) -> tuple[Edge, ...]:
        return tuple(e for e in self.edges if not e.weights)

    @property
    def weights(self) -> Edge | None:
        return next((e for e in self.edges if e.weights), None)

    def inputs(self, role: str) -> tuple[str, ...]:
        """Queues of other roles; without the tickets."""
        return tuple(e.channel for e in self.data if e.consumer == role)

    def outputs(self, role: str) -> tuple[str, ...]:
        return tuple(e.channel for e in self.data if e.producer == role)

    @property
    def first_roles(self) -> tuple[str, ...]:
        """Those that take tickets."""
        inside = {self.cycle.back} if self.cycle is not None else set()
        return tuple(r for r in self.roles if not self.inputs(r) and r not in inside)

    def tickets(self, role: str) -> str:
        return "tickets" if len(self.first_roles) == 1 else f"tickets-{role}"

    @property
    def last_roles(self) -> tuple[str, ...]:
        inside = {self.cycle.front} if self.cycle is not None else set()
        return tuple(r for r in self.roles if not self.outputs(r) and r not in inside)

    @property
    def committing(self) -> str:
        """The role that ends a step: whose weights are published, else the last one."""
        return self.weights.producer if self.weights is not None else self.last_roles[-1]

    def takes_from(self, role: str) -> tuple[str, ...]:
        """Every queue of a role, the first one being that which the others join."""
        return self.inputs(role) or (self.tickets(role),)
