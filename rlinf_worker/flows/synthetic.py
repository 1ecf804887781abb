"""Any graph of synthetic roles: the workloads that placements, plans and the scheduler are proven with.

                 tickets            FROM-TO              FROM-TO
    driver ───────────────> rollout ─────────> reward ─────────────> train ── weights ──> rollout
                                └────────────> reference ────────────┘

A step has `items` tickets. A role works on as many units, or on `units[ROLE]`, a multiple of it: what feeds it makes
several of each, or puts several of one ticket together; a unit keeps its lineage key through roles of one number. A
role with several inputs gets a unit when all of them are there. In a cycle the units of a step travel in sub-batches
(`stages` of them per worker) between two roles, or one by one where another role makes them. The role at the producing
end of the weights edge, or the last one, commits the steps. docs/synthetic.md.

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
THERE: Final = {"keys": "list", "tickets": "list", "trip": "int", "sent": "float"}
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


class TokensConfig(Model):
    """The tokens of a unit: `mean` of them, drawn by its key alone, so that what is long is long for every role."""

    mean: Annotated[float, Field(gt=0, le=1e9)]
    sigma: Annotated[float, Field(ge=0, le=5)] = 0.0
    """Width of their lognormal."""


class DriftConfig(Model):
    step: Annotated[int, Field(ge=1)]
    role: Name
    factor: Annotated[float, Field(gt=0, le=1000)]


class SyntheticFlowConfig(Model):
    """spec.flow.config of flow synthetic."""

    workload: Annotated[str, Field(max_length=200)] = ""
    """Name that sizes are drawn by: the same name, the same sizes. Empty: one of its own for all such jobs."""
    items: Annotated[int, Field(ge=1, le=1_000_000)]
    """Tickets per step, and units of every role that `units` does not name."""
    units: dict[Name, Annotated[int, Field(ge=1, le=1_000_000)]] = {}
    """Units per step of a role, where they are others than its tickets: {"rollout": 16, "judge": 16} of 4 items makes
    four samples of each prompt, which become one again behind the judge."""
    sealed: bool = False
    """Nobody says how many units come of a ticket: whoever works on it says when that was all."""
    tokens: TokensConfig | None = None
    edges: Annotated[list[EdgeConfig], Field(min_length=1, max_length=64)]
    cycles: Annotated[list[CycleConfig], Field(max_length=16)] = []
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
    yield from _cycle_problems(graph)
    if graph.committing not in graph.last_roles:
        yield f"edges: {graph.committing!r} publishes weights but feeds other roles; the last role publishes"
    if others := [r for r in graph.last_roles if r != graph.committing]:
        yield f"edges: nothing takes what {others[0]!r} makes; add an edge to {graph.committing!r}"
    if graph.committing in graph.first_roles:
        yield f"edges: {graph.committing!r} has no input; add an edge to it"
    yield from _unit_problems(graph)
    if config.drift is not None and config.drift.role not in graph.roles:
        yield f"drift.role: {config.drift.role!r} is no role of the edges; write one of {', '.join(graph.roles)}"


def _cycle_problems(graph: Graph) -> Iterator[str]:
    ends = [role for cycle in graph.cycles for role in (cycle.front, cycle.back)]
    for cycle in graph.cycles:
        front, back = cycle.front, cycle.back
        if front == back:
            yield f"cycles: roles {front!r} twice; write two roles"
        elif shared := [role for role in (front, back) if ends.count(role) > 1]:
            yield f"cycles: {shared[0]!r} is in two of them; give each roles of its own"
        if graph.outputs(front):
            yield f"edges: from {front!r}, but units leave the cycle at {back!r}; write from: {back}"
        if graph.inputs(back):
            yield f"edges: to {back!r}, but units enter the cycle at {front!r}; write to: {front}"
        if len(graph.inputs(front)) > 1:
            yield f"edges: two of them to {front!r}, and who asks in a cycle has one input; leave one"
        if graph.committing in (front, back):
            yield f"edges: {graph.committing!r} is in a cycle and cannot end the step; add a role behind the cycle"


def _unit_problems(graph: Graph) -> Iterator[str]:
    items = graph.items
    for role, count in graph.counts.items():
        cycle = graph.cycle_of(role)
        if role not in graph.roles:
            yield f"units: {role!r} is no role of the edges; write one of {', '.join(graph.roles)}"
        elif cycle is not None and role == cycle.back:
            yield f"units: of {role!r}, who answers in a cycle and has those of {cycle.front!r}; write them there"
        elif count % items:
            yield f"units: {role!r} has {count}, and each of the {items} tickets becomes as many; write a multiple"
        elif cycle is not None and role in graph.first_roles and count != items:
            yield f"units: {role!r} has {count}, and who asks in a cycle has its {items} tickets; remove it"
    for edge in graph.data:
        made, taken = graph.units(edge.producer), graph.units(edge.consumer)
        if max(made, taken) % min(made, taken):
            yield f"units: {edge.producer!r} has {made} and {edge.consumer!r} {taken}; write multiples of each other"
    for role in (r for r in graph.roles if graph.puts_together(r)):
        if (cycle := graph.cycle_of(role)) is not None:
            text = "and the units of a group may be at several workers of a cycle"
            yield f"units: {role!r} puts units together, {text}; add a role behind the cycle"
        if role in graph.first_roles and graph.units(role) > items:
            yield f"units: {role!r} makes several of each ticket and puts them together; leave the fewer ones out"
        if len(graph.outputs(role)) > 1:
            yield f"edges: {role!r} puts units together and feeds others, too; add a role for that"
        if len(graph.inputs(role)) > 1:
            yield f"edges: {role!r} puts units together and has several inputs; add a role for that"


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
        times = graph.units(name) // graph.items if name in graph.first_roles else 1
        if times > 1 and (config.service != "concurrent" or name == graph.committing):
            text = f"{name!r} makes {times} units of each ticket, each in a lane; write service: concurrent"
            yield Problem(field="spec.flow.config.units", message=text)
        if config.time.by_tokens and flow["tokens"] is None:
            text = "true, and the flow says nothing of tokens; write spec.flow.config.tokens: {mean: 512, sigma: 0.8}"
            yield Problem(field=f"{field}.config.time.byTokens", message=text)
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
    fronts, backs = {c.front for c in graph.cycles}, {c.back for c in graph.cycles}
    sources: list[tuple[str, Source]] = []
    for role in graph.first_roles:
        payload = PLACE if role in fronts else {}
        sources.append((role, flow.source(graph.tickets(role), to=role, payload=payload)))
    for cycle in graph.cycles:
        flow.cycle(cycle.channel, ask=cycle.front, answer=cycle.back, question=THERE, reply=RETURN)
    for role in graph.roles:
        first = graph.takes_from(role)[0] if role not in backs else ""
        for edge in (e for e in graph.data if e.consumer == role):
            is_first = edge.channel == first
            flow.queue(
                edge.channel, edge.producer, edge.consumer,
                rounds=is_first and role == graph.committing, joins="" if is_first else first,
                together=graph.puts_together(role), payload=UNIT,
            )  # fmt: skip
    if graph.weights is not None:
        flow.weights(graph.weights.producer, graph.weights.consumer)

    units = None if config.get("sealed") else graph.units(graph.committing) // graph.items
    async for step in flow.steps():
        for role, source in sources:
            workers = flow.workers(role) if role in fronts else 0
            await source.put(_tickets(flow, graph, step=step.number, workers=workers, units=units), step=step)


def _tickets(flow: Flow, graph: Graph, *, step: int, workers: int, units: int | None) -> list[Ticket]:
    """`workers`: of a cycle's front. There they are pinned to a worker, which divides its share into as many
    sub-batches as the plan has stages. `units`: that come of each where the step ends."""
    workload = str(flow.config.get("workload") or "synthetic")
    keys = [lineage.sample(workload, step, index=index, sample=0) for index in range(graph.items)]
    if not workers:
        return [Ticket(key=key, units=units) for key in keys]
    tickets = list[Ticket]()
    for worker in range(workers):
        share = keys[worker::workers]
        tickets += [
            Ticket(key=key, payload={"at": at, "of": len(share)}, affinity=worker, units=units)
            for at, key in enumerate(share)
        ]
    return tickets
