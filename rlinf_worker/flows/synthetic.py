"""Any graph of synthetic roles: the workloads that placements, plans and the scheduler are proven with.

                 tickets            FROM-TO              FROM-TO
    driver ───────────────> rollout ─────────> reward ─────────────> train ── weights ──> rollout
                                └────────────> reference ────────────┘

A unit is one of `items` per step and keeps its lineage key through all roles. A role with several inputs gets a unit
when all of them are there. In a cycle the units of a step travel in sub-batches (`stages` of them per worker) between
two roles. The role at the producing end of the weights edge, or the last one, commits the steps. docs/synthetic.md.

Runs in the driver. Not for: what a unit costs (roles/synthetic).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from rlinf_api.job import Model, Name, Problem, RLJobSpec, as_range
from rlinf_api.sentences import checked
from rlinf_worker.channels import lineage
from rlinf_worker.flows.ppo import ChannelConfig
from rlinf_worker.flows.protocol import Flow, Source, Ticket
from rlinf_worker.roles.synthetic.graph import Graph
from rlinf_worker.roles.synthetic.schema import Milliseconds, SyntheticConfig

KIND = "synthetic"
UNIT: Final = {"bytes": "bytes"}
THERE: Final = {"keys": "list", "trip": "int", "sent": "float"}
RETURN: Final = {"sent": "float"}
PLACE: Final = {"at": "int", "of": "int"}  # a unit's, in its front worker's share


class EdgeConfig(Model):
    from_: Annotated[Name, Field(alias="from")]
    to: Name
    weights: bool = False
    """Publishes weights, once per step: it closes the step."""
    sync_ms: Milliseconds = 0.0
    """How long a publish takes; for the edge with weights only."""

    @model_validator(mode="after")
    def _weights_only(self) -> EdgeConfig:
        if self.sync_ms and not self.weights:
            raise ValueError(f"syncMs {self.sync_ms:g} on an edge without weights: true; remove it")
        if self.from_ == self.to:
            raise ValueError(f"an edge from {self.from_!r} to itself; write a cycle, or another role")
        return self


class CycleConfig(Model):
    roles: Annotated[list[Name], Field(min_length=2, max_length=2)]
    """Front and back: units come in at the front and go out at the back."""
    round_trips: Annotated[int, Field(ge=1, le=100_000)] = 1
    hop_ms: Milliseconds = 0.0
    """Per hand-over, the real one included."""
    stages: Annotated[int, Field(ge=1, le=64)] = 1
    """Sub-batches in flight per front worker, which the first plan takes over. 1: the roles work in turn."""


class DriftConfig(Model):
    step: Annotated[int, Field(ge=1)]
    role: Name
    factor: Annotated[float, Field(gt=0, le=1000)]


class SyntheticFlowConfig(Model):
    """spec.flow.config of flow synthetic."""

    workload: Annotated[str, Field(max_length=200)] = ""
    """Name that sizes are drawn by: the same name, the same sizes. Empty: one of its own for all such jobs."""
    items: Annotated[int, Field(ge=1, le=1_000_000)]
    """Units per step."""
    edges: Annotated[list[EdgeConfig], Field(min_length=1, max_length=64)]
    cycle: CycleConfig | None = None
    drift: DriftConfig | None = None
    speeds: dict[Name, Annotated[float, Field(gt=0, le=1000)]] = {}
    """Speed of a pool, which divides all times on it. 1 where a pool is not named."""
    channels: dict[Annotated[str, Field(max_length=63)], ChannelConfig] = {}
    """Micro-batch and depth by channel name, which the first plan takes over."""

    @model_validator(mode="after")
    def _graph(self) -> SyntheticFlowConfig:
        if text := next(_graph_problems(self), ""):
            raise ValueError(text)
        return self


def _graph_problems(config: SyntheticFlowConfig) -> Iterator[str]:
    graph = Graph.of(_dump(config))
    pairs = [(e.producer, e.consumer, e.weights) for e in graph.edges]
    for producer, consumer, _ in (p for p in pairs if pairs.count(p) > 1):
        yield f"edges: {producer} -> {consumer} stands there twice; remove one"
    if sum(e.weights for e in graph.edges) > 1:
        yield "edges: two of them have weights: true, and one role publishes; leave one"
    if loop := _loop(graph):
        yield f"edges: {' -> '.join(loop)} is a loop; write it as cycle, or make one edge weights: true"
    cycle = graph.cycle
    if cycle is not None:
        if cycle.front == cycle.back:
            yield f"cycle.roles: {cycle.front!r} twice; write two roles"
        if graph.outputs(cycle.front):
            yield f"edges: from {cycle.front!r}, but units leave the cycle at {cycle.back!r}; write from: {cycle.back}"
        if graph.inputs(cycle.back):
            yield f"edges: to {cycle.back!r}, but units enter the cycle at {cycle.front!r}; write to: {cycle.front}"
        if graph.inputs(cycle.front):
            yield f"edges: to {cycle.front!r}, where the cycle begins with a reset; remove that edge"
        if graph.committing in (cycle.front, cycle.back):
            yield f"edges: {graph.committing!r} is in the cycle and cannot end the step; add a role behind the cycle"
    if graph.committing not in graph.last_roles:
        yield f"edges: {graph.committing!r} publishes weights but feeds other roles; the last role publishes"
    if others := [r for r in graph.last_roles if r != graph.committing]:
        yield f"edges: nothing takes what {others[0]!r} makes; add an edge to {graph.committing!r}"
    if graph.committing in graph.first_roles:
        yield f"edges: {graph.committing!r} has no input; add an edge to it"
    if config.drift is not None and config.drift.role not in graph.roles:
        yield f"drift.role: {config.drift.role!r} is no role of the edges; write one of {', '.join(graph.roles)}"


def _loop(graph: Graph) -> list[str]:
    """A loop of edges that carry data; empty where there is none."""
    sorter = TopologicalSorter[str]()
    for edge in graph.data:
        sorter.add(edge.consumer, edge.producer)
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _dump(config: SyntheticFlowConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=True)


def check_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """With all defaults, as it stands in a manifest. InvalidManifest with a sentence per problem."""
    return _dump(checked(SyntheticFlowConfig, config, prefix="spec.flow.config"))


def check_job(spec: RLJobSpec) -> Iterator[Problem]:
    """What flow config and roles do not say alone. Each has been checked."""
    flow = check_config(spec.flow.config)
    graph = Graph.of(flow)
    present = {role.name: role for role in spec.roles}
    for missing in (r for r in graph.roles if r not in present):
        text = f"names role {missing!r}, got {', '.join(present)}; add it to spec.roles or change the edge"
        yield Problem(field="spec.flow.config.edges", message=text)
    for name, role in present.items():
        field = f"spec.roles[{name}]"
        if name not in graph.roles:
            text = f"no edge of spec.flow.config.edges names {name!r}; add one or remove the role"
            yield Problem(field=field, message=text)
        if role.kind != KIND:
            continue
        config = SyntheticConfig.model_validate(role.config)
        if config.gang and name != graph.committing:
            text = f"a gang takes rounds, which only {graph.committing!r} gets, as it ends the steps; write gang: false"
            yield Problem(field=f"{field}.config.gang", message=text)
        if config.slots_per_worker != role.slots_per_worker:
            text = (
                f"got {config.slots_per_worker}, but {field}.slotsPerWorker is {role.slots_per_worker}; write the same"
            )
            yield Problem(field=f"{field}.config.slotsPerWorker", message=text)
        workers = as_range(role.workers)
        if config.ranks and not any(workers.min <= r <= workers.max for r in config.ranks):
            text = f"none of ranks {config.ranks} is within {workers.min} to {workers.max}; change {field}.config.ranks"
            yield Problem(field=f"{field}.workers", message=text)
    for pool in flow["speeds"]:
        if pool not in {p.name for p in spec.pools}:
            text = f"{pool!r} is no pool, got {', '.join(p.name for p in spec.pools)}; write one of these"
            yield Problem(field="spec.flow.config.speeds", message=text)


async def synthetic(flow: Flow) -> None:
    graph, config = Graph.of(flow.config), flow.config
    sources: list[tuple[str, Source]] = []
    cycle = graph.cycle
    for role in graph.first_roles:
        payload = PLACE if cycle is not None and role == cycle.front else {}
        sources.append((role, flow.source(graph.tickets(role), to=role, payload=payload)))
    if cycle is not None:
        flow.cycle(cycle.channel, ask=cycle.front, answer=cycle.back, question=THERE, reply=RETURN)
    for role in graph.roles:
        first = graph.takes_from(role)[0] if role not in (cycle.back if cycle else "",) else ""
        for edge in (e for e in graph.data if e.consumer == role):
            is_first = edge.channel == first
            flow.queue(
                edge.channel, edge.producer, edge.consumer,
                rounds=is_first and role == graph.committing, joins="" if is_first else first, payload=UNIT,
            )  # fmt: skip
    if graph.weights is not None:
        flow.weights(graph.weights.producer, graph.weights.consumer)

    async for step in flow.steps():
        for role, source in sources:
            tickets = _tickets(flow, graph, role, step=step.number, items=int(config["items"]))
            await source.put(tickets, step=step)


def _tickets(flow: Flow, graph: Graph, role: str, *, step: int, items: int) -> list[Ticket]:
    """In a cycle pinned to a front worker, which divides its share into as many sub-batches as the plan has stages."""
    workload = str(flow.config.get("workload") or "synthetic")
    keys = [lineage.sample(workload, step, index=index, sample=0) for index in range(items)]
    cycle = graph.cycle
    if cycle is None or role != cycle.front:
        return [Ticket(key=key) for key in keys]
    workers, tickets = flow.workers(role), list[Ticket]()
    for worker in range(workers):
        share = keys[worker::workers]
        tickets += [
            Ticket(key=key, payload={"at": at, "of": len(share)}, affinity=worker) for at, key in enumerate(share)
        ]
    return tickets
