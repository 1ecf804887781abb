"""The planner's problem of a job, from its profiles: who feeds whom, what work costs by how much of it, what moves and
memory there are. Pure. For: decide.py, and what-if over a profile that lies in a file.

    profiles of one job and hardware, the newest last ──fit()──> Fit(problem, guesses) | Unfit(reasons)

How a number came about stands on it:

    measured   the mean of what was seen: a load, a publish, a unit where all batches had one size
    fitted     a line through batches of several sizes: seconds = per batch + per unit x units; or over their tokens,
               where these say more of a span's time than its units do
    assumed    nobody has seen it: a load of a role that never took turns (its bytes at MOVE_BYTES_PER_S), another world
               size's share of an exchange, a pool's speed where no role ran in two

The line's shape is of all profiles, its height of the newest one, so that what drifts is followed at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist, fmean, median
from typing import Final

from rlinf_api import declared, quantities
from rlinf_api.job import PoolSpec, RLJobSpec, RoleSpec, as_range
from rlinf_api.plan import RLPlanSpec, WorkerPlan
from rlinf_api.profile import Batch, ChannelProfile, Profile, RoleProfile
from rlinf_api.slots import MAX_SLOTS
from rlinf_scheduler.planner.problem import (
    ZERO,
    Cost,
    CycleEdge,
    InBatches,
    InLanes,
    InRounds,
    Option,
    PlanProblem,
    Pool,
    Provenance,
    QueueEdge,
    RoleCosts,
    Service,
    WeightsEdge,
    resampled,
)

MIB: Final = 1 << 20
MOVE_BYTES_PER_S: Final = 8 * 2**30
"""The speed of a load or an offload that nobody has seen: what one pinned copy over PCIe 4 x16 does at least."""
EXCHANGE_BYTES_PER_S: Final = 8 * 2**30
"""The speed of a gang's exchange that nobody has seen: it sends the weights twice, as a ring does."""
HAND_OVER_MS: Final = 2.0
"""From one role's unit to the next role's hands: docs/bench has 1 to 3 on machines with other work."""
HOP_MS: Final = 1.0
"""A question's way, or an answer's, straight between two workers."""
SATURATED: Final = 0.8
"""The share of a trip's time that an end of a cycle may be at work before what is left of the trip is taken for a
queue."""
TURN_MS: Final = 2.0
"""docs/turns.md: a change of turn in one pod, without loads, where none was seen."""
UNEVEN: Final = 0.30
"""Spread of a unit's time over its mean from which on units count as of different sizes; below it is jitter, and on a
busy machine a unit of some milliseconds has 0.2 of that. Long tails of text have 0.6 to 1.5."""
DRAWN_STEPS: Final = 4
"""How many steps are drawn where units have many sizes: a step's longest unit is not another's, and a plan is judged by
the mean."""
FEWEST_UNITS: Final = 0.5
"""Units of a step on a channel: below it most steps have none, and no step is like the mean."""
OTHER: Final = 1.5
"""Times as many units, or as few, as its channel carries, that a role says it works on, for them to be others than
the channel's; nearer, some were lost or made again."""
ROUNDED: Final = 1e-9
"""Share of a mean below which a variance is what rounding leaves."""
FEW: Final = 8  # measurements whose spread says nothing yet
TOLD: Final = 0.25
"""Share of what spans' seconds vary by that tokens must say beyond their units. Jitter goes by tokens a little, too, as
by anything; taken for a line it would make a cost of each batch of all of a unit's time. Of eight spans chance says a
quarter once in ten times, of twenty once in eighty."""
APART: Final = 1.3
"""Sizes of batches that far apart make a line; nearer ones would make its slope of noise."""
OVERLAP: Final = 1.5
"""Spans of compute that come to so many times the moments with one: the role works on several units at once."""
_NORMAL: Final = NormalDist()
MEASURED, FITTED, ASSUMED = Provenance.MEASURED, Provenance.FITTED, Provenance.ASSUMED


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    problem: PlanProblem
    one_size: tuple[str, ...]
    """Channels whose consumers worked on batches of one size only: what a batch costs by itself is not known."""
    one_stage: tuple[tuple[str, str], ...]
    """Likewise (front, back) of cycles in sub-batches, whose size goes by the number of stages."""
    assumed: tuple[str, ...]
    """What nobody has seen and a choice may hang on, as a person would call it: `the load of rollout`."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why no problem can be made of what was measured."""

    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.reasons)


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a batch of n units: per_batch + per_unit * n.

    >>> Line.through([(1.0, 3.0, 5), (3.0, 7.0, 5)])
    Line(per_batch=1.0, per_unit=2.0, is_fitted=True)
    >>> Line.through([(4.0, 8.0, 5)])
    Line(per_batch=0.0, per_unit=2.0, is_fitted=False)
    """

    per_batch: float
    per_unit: float
    is_fitted: bool

    @classmethod
    def through(cls, points: Sequence[tuple[float, float, float]]) -> Line:
        """Least squares; points are (units, seconds, how many). Neither cost is below zero."""
        weight = math.fsum(w for _, _, w in points)
        mean_n = math.fsum(n * w for n, _, w in points) / weight
        mean_s = math.fsum(s * w for _, s, w in points) / weight
        sizes = [n for n, _, _ in points]
        if max(sizes) < APART * min(sizes):
            return cls(0.0, mean_s / mean_n, is_fitted=False)
        square = math.fsum(w * (n - mean_n) ** 2 for n, _, w in points)
        slope = math.fsum(w * (n - mean_n) * (s - mean_s) for n, s, w in points) / square
        slope = min(max(slope, 0.0), mean_s / mean_n)
        return cls(mean_s - slope * mean_n, slope, is_fitted=True)

    def seconds(self, units: float) -> float:
        return self.per_batch + self.per_unit * units

    def scaled(self, factor: float) -> Line:
        return replace(self, per_batch=self.per_batch * factor, per_unit=self.per_unit * factor)


def fit(
    job: RLJobSpec,
    profiles: Sequence[Profile],
    *,
    plan: RLPlanSpec | None,
    is_in_force: bool = True,
    most_pods: Mapping[str, int] | None = None,
) -> Fit | Unfit:
    """`profiles`: of this job, or of one with the same key, the newest last, at least one. `plan`: under which the
    newest was measured. `is_in_force`: the plan's pods are there, also those that the job does not let its pools have
    any more. `most_pods`: of pools that must not have as many as the job lets them."""
    newest = profiles[-1]
    specs = {role.name: role for role in job.roles}
    by_role: dict[str, list[list[RoleProfile]]] = {name: [] for name in specs}
    for profile in warmed_up(profiles):
        for name in specs:
            if found := [r for r in profile.roles if r.name == name]:
                by_role[name].append(found)
    everywhere = [part for profile in profiles for part in profile.roles]  # a start is of the first step
    silent = [name for name, found in by_role.items() if not any(_batches(parts) for parts in found)]
    if silent:
        return Unfit(
            tuple(
                f"role {name!r} has not said what it worked on (ctx.span('compute', units=...)), so its time by how "
                "much of it is not known"
                for name in silent
            )
        )
    graph = _Graph.of(newest)
    if isinstance(graph, Unfit):
        return graph
    speeds = _speeds(job, by_role)
    trains = graph.weights[0] if graph.weights else graph.last
    works = {
        name: _Work.of(
            specs[name],
            by_role[name],
            [part for part in everywhere if part.name == name],
            entries=[entry for entry in plan.workers if entry.role == name] if plan else (),
            speeds=speeds,
            trains=name == trains,
            bytes=graph.weights_bytes,
            at_once=name == trains and _trains_at_once(job, specs[name], newest, plan=plan, graph=graph),
            graph=graph,
            steps=newest.steps,
        )
        for name in specs
    }
    pods, limits = {pool.name: pool.pods for pool in plan.pools} if plan and is_in_force else {}, most_pods or {}
    problem = PlanProblem(
        roles=tuple(_costs(specs[name], works[name], graph, job) for name in specs),
        edges=tuple(QueueEdge(p, c, name) for name, p, c in graph.queues),
        pools=tuple(
            _pool(
                pool,
                pods=max(pods.get(pool.name, 0), min(as_range(pool.pods).max, limits.get(pool.name, MAX_SLOTS))),
                speed=speeds[pool.name],
            )
            for pool in job.pools
        ),
        items=works[graph.last].units,
        weights=_weights(graph, by_role),
        cycles=tuple(_cycle(graph, cycle, works, newest, specs, plan) for cycle in graph.cycles),
        staleness=job.flow.max_staleness,
        hand_over_ms=Cost(HAND_OVER_MS),
        turn_ms=_turn(profiles),
        mode=job.placement.mode,
        objective=job.objective,
        min_gain_per_slot=job.min_gain_per_slot,
    )
    return Fit(
        problem=problem,
        one_size=_of_one_size(works, graph),
        one_stage=_of_one_stage(works, problem.cycles),
        assumed=tuple(what for name in specs for what in works[name].assumed),
    )


def _of_one_size(works: Mapping[str, _Work], graph: _Graph) -> tuple[str, ...]:
    return tuple(sorted({graph.takes_from[n] for n, w in works.items() if w.may_be_probed and n in graph.takes_from}))


def _of_one_stage(works: Mapping[str, _Work], cycles: Iterable[CycleEdge]) -> tuple[tuple[str, str], ...]:
    ends = ((cycle.front, cycle.back) for cycle in cycles if not cycle.is_single)
    return tuple(pair for pair in ends if any(works[name].may_be_probed for name in pair))


def warmed_up(profiles: Sequence[Profile]) -> tuple[Profile, ...]:
    """Without each plan's first step, where that was told by itself; with it where there is nothing else."""
    seen: set[int] = set()
    found = []
    for profile in profiles:
        if profile.revision in seen or profile.steps > 1:
            found.append(profile)
        seen.add(profile.revision)
    return tuple(found) or tuple(profiles)


# --- who feeds whom ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Asked:
    """A cycle as it was seen: who has units to ask for, and who answers."""

    channel: str
    front: str
    back: str

    @classmethod
    def of(cls, channel: str, ways: Sequence[ChannelProfile], fed: Collection[str]) -> _Asked:
        """`fed`: roles that have units, from the driver or from another role."""
        front = next((c for c in ways if c.producer in fed), ways[0])
        return cls(channel, front.producer, front.consumer)


def _not_planned(cycles: Sequence[_Asked], feeders: Collection[str]) -> Iterator[str]:
    for cycle in cycles:
        if cycle.front in feeders and cycle.back in feeders:
            yield (
                f"roles {cycle.front!r} and {cycle.back!r} ask and answer in a cycle and both feed others: one of them "
                "may"
            )
    of_role: dict[str, list[str]] = defaultdict(list)
    for cycle in cycles:
        for name in (cycle.front, cycle.back):
            of_role[name].append(cycle.channel)
    for name, channels in of_role.items():
        if len(channels) > 1:
            yield f"role {name!r} asks or answers in cycles {', '.join(channels)}: one cycle of a role is planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    queues: tuple[tuple[str, str, str], ...]  # channel, producer, consumer
    tickets: Mapping[str, str]  # role -> channel from the driver
    weights: tuple[str, str] | None
    weights_channel: str
    weights_bytes: float
    cycles: tuple[_Asked, ...]
    units: Mapping[str, int]
    """The units of a step, by role: those that the channel carries whose micro-batches it takes."""
    input_of: Mapping[str, str]
    """The name of that channel, by role."""
    made: Mapping[str, int]
    """The most that any channel carries from a role."""
    last: str

    @classmethod
    def of(cls, profile: Profile) -> _Graph | Unfit:
        queues = [c for c in profile.channels if c.mode == "Queue"]
        between = [c for c in queues if c.producer and c.consumer]
        tickets = {c.consumer: c.name for c in queues if not c.producer and c.consumer}
        weights = next((c for c in profile.channels if c.mode == "Weights"), None)
        asked = [c for c in profile.channels if c.mode == "Cycle"]
        feeders = {c.producer for c in between}
        fed = {*tickets, *(c.consumer for c in between)}
        cycles = [
            _Asked.of(name, [c for c in asked if c.name == name], fed) for name in dict.fromkeys(c.name for c in asked)
        ]
        # Who asks for what another role feeds it, and has its answerer hand that on, ends nothing.
        passing = {cycle.front for cycle in cycles if cycle.back in feeders}
        last = sorted({c.consumer for c in between} - feeders - passing)
        if len(last) != 1:
            said = ", ".join(last) or "none"
            return Unfit((f"the steps of this flow end with {said}, and exactly one role is wanted that feeds nobody",))
        if rare := [c for c in between if c.units.value < FEWEST_UNITS]:
            return Unfit(
                tuple(
                    f"channel {c.name!r} carried {c.units.value:.4g} units a step in steps {profile.first_step} to "
                    f"{profile.last_step}: what does not go in each step is not planned"
                    for c in rare
                )
            )
        if reasons := tuple(_not_planned(cycles, feeders)):
            return Unfit(reasons)
        sources = [c for c in queues if not c.producer and c.consumer]
        taken = {c.consumer: c for c in (*sources, *reversed(between))}
        units = {consumer: max(1, round(c.units.value)) for consumer, c in taken.items()}
        units |= {cycle.back: units[cycle.front] for cycle in cycles if cycle.front in units}
        return cls(
            queues=tuple((c.name, c.producer, c.consumer) for c in between),
            tickets=tickets,
            weights=(weights.producer, weights.consumer) if weights else None,
            weights_channel=weights.name if weights else "",
            weights_bytes=weights.bytes.value / max(1.0, weights.units.value) if weights else 0.0,
            cycles=tuple(cycles),
            units=units,
            input_of={consumer: c.name for consumer, c in taken.items()},
            made={
                c.producer: max(1, round(max(o.units.value for o in between if o.producer == c.producer)))
                for c in between
            },
            last=last[0],
        )

    def outputs_of(self, name: str) -> tuple[str, ...]:
        return tuple(channel for channel, producer, _ in self.queues if producer == name)

    @property
    def in_cycles(self) -> frozenset[str]:
        return frozenset(name for cycle in self.cycles for name in (cycle.front, cycle.back))

    @property
    def takes_from(self) -> dict[str, str]:
        """Role to the channel whose micro-batches it works on: of several the first. None of a cycle's roles."""
        return {role: name for role, name in self.input_of.items() if role not in self.in_cycles}


# --- what work costs --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A role's costs on a worker of a pool of speed 1."""

    line: Line
    variation: float
    """Standard deviation of a unit's time over its mean."""
    units: int  # of a step
    tokens: float
    """The tokens of a mean unit, where its time goes by them; 0: it goes by units."""
    lanes: int  # 0: one batch after the other
    gang: bool
    at_once: bool  # of a gang: it trains when all units of the step are there
    sync: Cost
    load: Cost
    offload: Cost
    memory: declared.SlotMemory
    kv: int  # of it, bytes of the plan's cache
    may_be_probed: bool
    assumed: tuple[str, ...]

    @classmethod
    def of(
        cls,
        role: RoleSpec,
        found: Sequence[Sequence[RoleProfile]],
        seen: Sequence[RoleProfile],
        *,
        entries: Sequence[WorkerPlan],
        speeds: Mapping[str, float],
        trains: bool,
        bytes: float,
        at_once: bool,
        graph: _Graph,
        steps: int,
    ) -> _Work:
        """`found`: of each profile, the role's workers by pool; `seen`: all of them, those included in which it warmed
        up. `entries`: the role's, of the plan that the last one is of. `bytes`: of the weights, 0 where nobody gets
        any. `steps`: of the last profile."""
        lanes = _lanes(role, found[-1])
        gang = declared.is_gang(role, trains=trains)
        line = _line(found, speeds, lanes=lanes)
        variation = _variation([_seen(parts, speeds) for parts in found], line, lanes=lanes)
        tokens = 0.0
        if by_tokens := _by_tokens(found, speeds, lanes=lanes):
            line, variation, tokens = by_tokens
        own = math.fsum(b.units * b.seconds.count for b in _batches(found[-1])) / steps
        units, times = _units(role.name, graph, found[-1], own, lanes=lanes)
        line, variation = replace(line, per_unit=line.per_unit * times), variation / math.sqrt(times)
        memory, kv = _memory(role, found, entries)
        said = []
        load, offload = (_move(seen, what, speeds) for what in ("load", "offload"))
        if load is None or offload is None:
            moved = max(0, memory.resident - memory.offloaded) / MOVE_BYTES_PER_S
            load, offload = load or Cost(1e3 * moved), offload or Cost(1e3 * moved)
            if moved:
                said.append(f"the load of {role.name}")
        sync = ZERO
        if gang:
            line, sync = _exchanges(found[-1], line, speeds, bytes=bytes, steps=steps)
        return cls(
            line=line,
            variation=variation,
            units=units,
            tokens=tokens * times,
            lanes=lanes,
            gang=gang,
            at_once=gang and at_once,
            sync=sync,
            load=load,
            offload=offload,
            memory=memory,
            kv=kv,
            may_be_probed=not lanes
            and not at_once
            and not line.is_fitted
            and max((b.units for b in _batches(found[-1])), default=0) >= 2,
            assumed=tuple(said),
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """Spans of compute that worked on as many units, in seconds of a worker in a pool of speed 1."""

    units: float
    seconds: float
    spread: float
    count: int


def _seen(parts: Iterable[RoleProfile], speeds: Mapping[str, float]) -> list[_Seen]:
    return [
        _Seen(b.units, b.seconds.value * speeds[p.pool], b.seconds.spread * speeds[p.pool], b.seconds.count)
        for p in parts
        for b in p.batches
        if b.seconds.count > 0
    ]


def _batches(parts: Iterable[RoleProfile]) -> list[Batch]:
    return [b for part in parts for b in part.batches if b.units > 0 and b.seconds.count > 0]


def _line(found: Sequence[Sequence[RoleProfile]], speeds: Mapping[str, float], *, lanes: int) -> Line:
    """Its shape by all that was seen, its height by what was seen last."""
    ever = [s for parts in found for s in _seen(parts, speeds) if s.units]
    now = _seen(found[-1], speeds)
    line = Line.through([(s.units, s.seconds, float(s.count)) for s in ever])
    expected = math.fsum(line.seconds(s.units) * s.count for s in now if s.units)
    really = math.fsum(s.seconds * s.count for s in now if s.units)
    line = line.scaled(really / expected) if expected > 0 and really > 0 else line
    if not lanes:
        return line
    # A unit holds its lane for lanes times what it takes of the engine; work on no unit is once a step.
    once = [s for s in now if not s.units]
    count = sum(s.count for s in once)
    per_step = math.fsum(s.seconds * s.count for s in once) / count if count else 0.0
    return Line(per_step, line.seconds(1.0) / lanes, line.is_fitted)


def _units(name: str, graph: _Graph, parts: Sequence[RoleProfile], own: float, *, lanes: int) -> tuple[int, float]:
    """What a role works on, of a step, and how many of the units that it says it does one of these is. They are those
    of its channel; an engine's that makes several of each are what it makes, as each takes a lane. `own`: the units
    that it says, in the time of a step, as what went through its channels is of that time."""
    units = graph.units.get(name, 1)
    if name in graph.in_cycles or not own:
        return units, 1.0
    went = _went(parts, graph.input_of.get(name, ""), "consumer") or units
    made = graph.made.get(name, units)
    if lanes:
        went_out = max((_went(parts, channel, "producer") for channel in graph.outputs_of(name)), default=0.0) or made
        if abs(math.log(own / went_out)) < abs(math.log(own / went)):
            units, went = made, went_out
    times = own / went
    return units, times if max(times, 1 / times) >= OTHER else 1.0


def _went(parts: Sequence[RoleProfile], channel: str, side: str) -> float:
    """Units at this end, of all workers, in the time of a step."""
    return math.fsum(e.units * p.workers for p in parts for e in p.ends if e.channel == channel and e.side == side)


def _by_tokens(
    found: Sequence[Sequence[RoleProfile]], speeds: Mapping[str, float], *, lanes: int
) -> tuple[Line, float, float] | None:
    """The line over tokens, as one over the units that they come in: its shape by all that was seen, its height by what
    was seen last, with the variation of a unit and its tokens. None: not all spans had any, or they say less of a
    span's time than its units do."""
    ever = [_Moments.of(b, speeds[p.pool]) for parts in found for p in parts for b in _batches([p])]
    last = [_Moments.of(b, speeds[p.pool]) for p in found[-1] for b in _batches([p])]
    if not last or not all(m.tokens for m in ever):
        return None
    whole = _Moments.mean(ever)
    if whole.explained_by_tokens < whole.explained_by_units + TOLD or whole.deviation < (APART - 1) / 2 * whole.tokens:
        return None
    slope = min(max(whole.covariance / whole.deviation**2, 0.0), whole.seconds / whole.tokens)
    alone = whole.seconds - slope * whole.tokens
    now = _Moments.mean(last)
    height = now.seconds / (alone + slope * now.tokens)
    tokens, spread = now.tokens / now.units, _Moments.of_a_unit(last) / (now.tokens / now.units)
    per_unit, per_batch = height * slope * tokens, height * alone
    if not lanes:
        return Line(per_batch, per_unit, is_fitted=True), spread, tokens
    # A lane is held for all of a unit's time; what varies of it goes by its tokens.
    once = [s for part in found[-1] for s in _seen([part], speeds) if not s.units]
    count = sum(s.count for s in once)
    per_step = math.fsum(s.seconds * s.count for s in once) / count if count else 0.0
    unit = per_batch + per_unit
    return Line(per_step, unit / lanes, is_fitted=True), spread * per_unit / unit, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moments:
    """Means over spans of compute, and means of products, in seconds of a pool of speed 1."""

    count: float
    units: float
    tokens: float
    seconds: float
    units_squared: float
    tokens_squared: float
    seconds_squared: float
    unit_seconds: float
    token_seconds: float

    @classmethod
    def of(cls, batch: Batch, speed: float) -> _Moments:
        seconds, spread = batch.seconds.value * speed, batch.seconds.spread * speed
        return cls(
            count=batch.seconds.count,
            units=batch.units,
            tokens=batch.tokens,
            seconds=seconds,
            units_squared=batch.units**2,
            tokens_squared=max(batch.tokens_squared, batch.tokens**2),
            seconds_squared=seconds**2 + spread**2,
            unit_seconds=batch.units * seconds,
            token_seconds=batch.token_seconds * speed or batch.tokens * seconds,
        )

    @classmethod
    def mean(cls, found: Sequence[_Moments]) -> _Moments:
        count = math.fsum(m.count for m in found)
        of_each = {
            field.name: math.fsum(getattr(m, field.name) * m.count for m in found) / count for field in fields(cls)
        }
        return cls(**{**of_each, "count": count})

    @staticmethod
    def of_a_unit(found: Sequence[_Moments]) -> float:
        """Standard deviation of one unit's tokens: those of spans of n units spread as the root of n do."""
        count = math.fsum(m.count for m in found)
        return math.sqrt(math.fsum(m.count * m.deviation**2 / m.units for m in found) / count)

    @property
    def deviation(self) -> float:
        """Standard deviation of a span's tokens."""
        return math.sqrt(max(0.0, self.tokens_squared - self.tokens**2))

    @property
    def covariance(self) -> float:
        return self.token_seconds - self.tokens * self.seconds

    @property
    def explained_by_tokens(self) -> float:
        """Share of what seconds vary by."""
        return self._explained(self.covariance, self.tokens_squared - self.tokens**2)

    @property
    def explained_by_units(self) -> float:
        covariance = self.unit_seconds - self.units * self.seconds
        return self._explained(covariance, self.units_squared - self.units**2)

    def _explained(self, covariance: float, variance: float) -> float:
        of_seconds = self.seconds_squared - self.seconds**2
        enough = variance > ROUNDED * self.units and of_seconds > ROUNDED * self.seconds_squared
        return max(0.0, covariance) ** 2 / (variance * of_seconds) if enough else 0.0


def _lanes(role: RoleSpec, parts: Sequence[RoleProfile]) -> int:
    """How many units at once: as the kind says, or by how far its spans overlap."""
    if said := declared.lanes(role):
        return said if said > 1 else 0
    at_once = [
        math.fsum(b.seconds.value * b.seconds.count for b in part.batches if b.units > 0) / (own.value * own.count)
        for part in parts
        if (own := part.seconds.get("compute")) is not None and own.value > 0
    ]
    most = max(at_once, default=0.0)
    return round(most) if most >= OVERLAP else 0


def _variation(seen: Sequence[Sequence[_Seen]], line: Line, *, lanes: int) -> float:
    """Standard deviation of a unit's time over its mean, by all profiles, as a long tail is seldom seen: batches of n
    units spread as the root of n do. Over the mean of each profile, as a drift of that is no variation."""
    per_unit = line.per_unit * max(1, lanes)
    count, squares = 0, 0.0
    for of_profile in seen:
        found = [s for s in of_profile if s.units and s.count >= FEW]
        really = math.fsum(s.seconds * s.count for s in found)
        expected = math.fsum(((0.0 if lanes else line.per_batch) + per_unit * s.units) * s.count for s in found)
        if really <= 0 or expected <= 0 or per_unit <= 0:
            continue
        unit_s = per_unit * really / expected
        count += sum(s.count for s in found)
        squares += math.fsum((s.spread / unit_s) ** 2 / s.units * s.count for s in found)
    return math.sqrt(squares / count) if count else 0.0


def _sizes(variation: float, *, count: int = 64) -> tuple[float, ...]:
    """Relative sizes of `count` units that vary so much, with mean 1, as a lognormal has them; long ones lie among the
    others as they come, not at an end.

    >>> _sizes(0.2)
    (1.0,)
    >>> sizes = _sizes(1.0)
    >>> len(sizes), round(sum(sizes), 6), max(sizes) > 4
    (64, 64.0, True)
    """
    if variation < UNEVEN:
        return (1.0,)
    sigma = math.sqrt(math.log1p(variation**2))
    drawn = [math.exp(sigma * _NORMAL.inv_cdf((_reversed_bits(i) + 0.5) / count)) for i in range(count)]
    mean = fmean(drawn)
    return tuple(size / mean for size in drawn)


def _reversed_bits(number: int) -> int:
    """The number with its six bits in reverse: 0, 32, 16, 48, ... lie as far apart as they can."""
    return int(f"{number:06b}"[::-1], 2)


def _exchanges(
    parts: Sequence[RoleProfile], line: Line, speeds: Mapping[str, float], *, bytes: float, steps: int
) -> tuple[Line, Cost]:
    """What a round costs beside its work: seen with one rank it is of the round, with several it is of the exchange.
    There it is that of the rank that waited least, as what the others wait is the work of the slowest one."""
    world = sum(part.workers for part in parts)
    least = [(m.seconds, speeds[p.pool]) for p in parts for m in p.moves if m.what == "exchange" and m.seconds.count]
    if world > 1 and least:
        rounds_of_step = sum(b.seconds.count for p in parts for b in _batches([p])) / world / steps
        of_step = fmean(number.value * speed for number, speed in least)
        return line, Cost(1e3 * of_step / max(1.0, rounds_of_step) * world / (world - 1), by=MEASURED)
    rounds = [
        (
            part.seconds["comm"].value * part.seconds["comm"].count * speeds[part.pool],
            sum(b.seconds.count for b in part.batches),
        )
        for part in parts
        if "comm" in part.seconds
    ]
    count = sum(n for _, n in rounds)
    seconds = math.fsum(s for s, _ in rounds) / count if count else 0.0
    if world > 1 and seconds:
        return line, Cost(1e3 * seconds * world / (world - 1), by=MEASURED)
    alone = replace(line, per_batch=line.per_batch + seconds)
    return alone, Cost(2e3 * bytes / EXCHANGE_BYTES_PER_S)


def _move(parts: Iterable[RoleProfile], what: str, speeds: Mapping[str, float]) -> Cost | None:
    found = [(m.seconds, speeds[p.pool]) for p in parts for m in p.moves if m.what == what and m.seconds.count]
    if not found:
        return None
    count = sum(number.count for number, _ in found)
    mean = math.fsum(number.value * speed * number.count for number, speed in found) / count
    return Cost(1e3 * mean, spread=1e3 * max(number.spread for number, _ in found), by=MEASURED)


def _turn(profiles: Sequence[Profile]) -> Cost:
    """A change of turn, moves apart: into the role into which it takes least. What others take beyond that is of a
    process that has slept long, as a trainer does; where a step is made of changes, nobody does."""
    seen = [part for profile in warmed_up(profiles) for part in profile.roles]
    by_role = {name: [part for part in seen if part.name == name] for name in dict.fromkeys(part.name for part in seen)}
    found = []
    for parts in by_role.values():
        count = sum(move.seconds.count for part in parts for move in part.moves if move.what == "turn")
        cost = _move(parts, "turn", defaultdict(lambda: 1.0))
        if cost is not None and count >= FEW:
            found.append(cost)
    return min(found, key=lambda cost: cost.value, default=Cost(TURN_MS))


def _memory(
    role: RoleSpec, found: Sequence[Sequence[RoleProfile]], entries: Sequence[WorkerPlan]
) -> tuple[declared.SlotMemory, int]:
    """The most that was seen of a slot, and what is declared where that is more; and of it the bytes of the plan's
    cache. They are in what was seen, too, as far as the cache was full."""
    memory = declared.of_role(role)
    for part in (part for parts in found for part in parts):
        seen = declared.SlotMemory(
            resident=part.memory.resident, peak=part.memory.peak, offloaded=part.memory.offloaded
        )
        memory = memory.or_more(seen)
    with_kv = [(entry, kv) for entry in entries if entry.memory and (kv := quantities.to_bytes(entry.memory.kv))]
    if not memory.active or not with_kv:  # a cache alone says nothing of what is beside it
        return memory, 0
    for entry, _ in with_kv:
        memory = memory.or_more(declared.of_entry(entry, role))
    return memory, max(kv for _, kv in with_kv)


def _speeds(job: RLJobSpec, by_role: Mapping[str, Sequence[Sequence[RoleProfile]]]) -> dict[str, float]:
    """The speed of each pool, by what roles took there that an earlier pool has, too; else 1, as for the first."""
    took: dict[str, dict[str, float]] = defaultdict(dict)  # role -> pool -> seconds of a unit
    for name, found in by_role.items():
        for part in (part for parts in found for part in parts):
            if batches := _batches([part]):
                units = math.fsum(b.units * b.seconds.count for b in batches)
                took[name][part.pool] = math.fsum(b.seconds.value * b.seconds.count for b in batches) / units
    speeds: dict[str, float] = {}
    for pool in job.pools:
        ratios = [
            seconds[other] * speeds[other] / seconds[pool.name]
            for seconds in took.values()
            if pool.name in seconds
            for other in seconds
            if other in speeds
        ]
        speeds[pool.name] = median(ratios) if ratios else 1.0
    return speeds


# --- the problem ------------------------------------------------------------------------------------------------------
def _costs(role: RoleSpec, work: _Work, graph: _Graph, job: RLJobSpec) -> RoleCosts:
    bounds, most, by = as_range(role.workers), MAX_SLOTS, FITTED if work.line.is_fitted else MEASURED
    if any(role.name == cycle.front for cycle in graph.cycles):
        most = work.units  # of more, some would have nothing to ask for
    service: Service = InBatches()
    if work.gang:
        service = InRounds(sync_ms=work.sync, at_once=work.at_once, ranks=declared.world_sizes(role))
    elif work.lanes:
        service = InLanes(lanes=work.lanes)
    memory = work.memory
    seen = _sizes(work.variation)
    name = f"tokens of {work.units}" if work.tokens else role.name  # what is long for one role is for the others
    sizes = resampled(seen, items=work.units, steps=DRAWN_STEPS, name=name) if len(seen) > 1 else (seen,)
    homes = [quantities.to_bytes(pool.slots.memory) for pool in job.pools if role.name in pool.roles]
    if not memory.active:  # nothing is known of it: it is taken to fill its slot, so nobody shares that with it
        memory = declared.SlotMemory(peak=min(homes, default=0), offloaded=MIB)
    return RoleCosts(
        name=role.name,
        service=service,
        options=(
            Option(
                per_item_ms=Cost(1e3 * work.line.per_unit, spread=1e3 * work.variation * work.line.per_unit, by=by),
                peak_mib=memory.active / MIB,
            ),
        ),
        per_batch_ms=Cost(1e3 * work.line.per_batch, by=FITTED if work.line.is_fitted else ASSUMED),
        items=work.units,
        tokens=work.tokens,
        sizes=sizes[0],
        later_sizes=sizes[1:],
        load_ms=work.load,
        offload_ms=work.offload,
        resident_mib=memory.resident / MIB,
        offloaded_mib=memory.offloaded / MIB,
        kv_mib=work.kv / MIB,
        may_stay=declared.of_role(role).active > 0,
        slots_per_worker=role.slots_per_worker,
        scaling=0.0,  # its time is that of a worker with the slots that it has
        fewest=max(1, bounds.min),
        most=max(bounds.min, min(bounds.max, most)),
        tickets=graph.tickets.get(role.name, "tickets"),
        bundle=_bundle(work.units, graph.units.get(role.name, 0)) if work.lanes and role.name in graph.tickets else 1,
    )


def _bundle(units: int, tickets: int) -> int:
    """Units of a ticket, where each has as many.

    >>> _bundle(16, 4), _bundle(16, 5), _bundle(4, 4), _bundle(4, 0)
    (4, 1, 1, 1)
    """
    return units // tickets if tickets and not units % tickets else 1


def _pool(pool: PoolSpec, *, pods: int, speed: float) -> Pool:
    return Pool(
        name=pool.name,
        slots=min(MAX_SLOTS, pods * pool.slots.per_pod),
        memory_mib=quantities.to_bytes(pool.slots.memory) / MIB,
        roles=tuple(pool.roles),
        speed=speed,
        slots_per_pod=pool.slots.per_pod,
        fewest_pods=as_range(pool.pods).min,
    )


def _weights(graph: _Graph, by_role: Mapping[str, Sequence[Sequence[RoleProfile]]]) -> WeightsEdge | None:
    if graph.weights is None:
        return None
    producer, consumer = graph.weights
    speeds: Mapping[str, float] = defaultdict(lambda: 1.0)
    publish = _move((part for parts in by_role[producer] for part in parts), "publish", speeds)
    return WeightsEdge(producer, consumer, publish or ZERO)


def _cycle(
    graph: _Graph,
    asked: _Asked,
    works: Mapping[str, _Work],
    newest: Profile,
    specs: Mapping[str, RoleSpec],
    plan: RLPlanSpec | None,
) -> CycleEdge:
    """How often a unit goes round: by the units that all passages through the front were of."""
    front, back = asked.front, asked.back
    parts = [part for part in newest.roles if part.name == front]
    seen = _batches(parts)
    went = _went(parts, graph.input_of.get(front, ""), "consumer") or works[front].units
    trips = max(1, round(math.fsum(b.units * b.seconds.count for b in seen) / newest.steps / went))
    cycle = CycleEdge(front, back, trips, Cost(HOP_MS))
    is_fed = any(consumer == front for _, _, consumer in graph.queues)
    if not is_fed and (declared.gathers(specs[front]) or any(b.units > 1 for b in seen)):
        return cycle
    share = math.ceil(works[front].units / sum(part.workers for part in parts))
    stages = min(share, _stages(plan, newest, asked) or share)
    hop = None if is_fed else _hop(graph, asked, works, newest, trips=trips, stages=stages, waves=share / stages)
    return replace(cycle, is_single=True, hop_ms=hop or cycle.hop_ms)


def _stages(plan: RLPlanSpec | None, newest: Profile, asked: _Asked) -> int:
    """0: the plan did not say, and all of a worker's units are under way, or it is not known."""
    if plan is None or plan.revision != newest.revision:
        return 0
    return next((c.stages for c in plan.cycles if set(c.roles) == {asked.front, asked.back}), 0)


def _hop(
    graph: _Graph, asked: _Asked, works: Mapping[str, _Work], newest: Profile, *, trips: int, stages: int, waves: float
) -> Cost | None:
    """By how long a unit's trips took, from its ticket to where it left the front, without the work at both ends. None:
    one end was at work all the time, and what was left is a queue, or it is another role that feeds the next one."""
    front, back = asked.front, asked.back
    outputs = {name for name, producer, _ in graph.queues if producer == front}
    released = [
        (r.seconds[len(r.seconds) // 2], r.count)
        for part in newest.roles
        if part.name == front
        for r in part.releases
        if r.channel in outputs
    ]
    count = sum(n for _, n in released)
    if not count:
        return None
    weights = [
        end.wait_seconds.value
        for part in newest.roles
        if part.name == back
        for end in part.ends
        if end.side == "consumer" and end.channel == graph.weights_channel
    ]
    seconds = math.fsum(s * n for s, n in released) / count - max(weights, default=0.0)
    trip = seconds / trips / waves
    ends = [works[name].line.seconds(1.0) for name in (front, back)]
    if stages * max(ends) > SATURATED * trip:
        return None
    return Cost(max(0.0, 1e3 * (trip - sum(ends)) / 2), by=MEASURED)


def _trains_at_once(job: RLJobSpec, role: RoleSpec, newest: Profile, *, plan: RLPlanSpec | None, graph: _Graph) -> bool:
    """Whether a step is one piece of work for a rank, where its plan would have it be several rounds."""
    if declared.trains_at_once(role, flow=job.flow.name):
        return True
    if role.kind == declared.KIND or plan is None or plan.revision != newest.revision:
        return False
    ranks = sum(part.workers for part in newest.roles if part.name == role.name)
    channel = graph.takes_from.get(role.name, "")
    size = next((c.micro_batch for c in plan.channels if c.name == channel), 1)
    spans = math.fsum(b.seconds.count for part in newest.roles if part.name == role.name for b in _batches([part]))
    return 2 * size * ranks <= graph.units.get(role.name, 0) and spans <= newest.steps * ranks
