"""The profile of a job under one plan: what the scheduler fits its curves to, as the driver reports it. Seconds, bytes;
no clock, no sockets. docs/profile.md has it with literal values.

    Profile(key="sha256:77ab...", job=JobRef(name="math", uid="1b4e"), revision=2, first_step=4, last_step=33, steps=30,
            step_seconds=Number(value=1.2, spread=0.02, count=30), roles=[...], channels=[...])

For: driver/profile.py, which makes it; the scheduler's service, which refuses what is contradictory and keeps the rest.
A wrong field, or one that contradicts another, is a ValidationError.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Final, Literal, Self

from pydantic import Field, PlainSerializer, ValidationError, model_validator

from rlinf_api import sentences
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import Model, RLJobSpec, dump
from rlinf_api.plan import JobRef

MAX_BYTES: Final = 1 << 20
"""The most bytes of a profile as JSON: 64 roles, each with 32 sizes of batches and 128 release times, take 400 KB."""
MAX_TIMES: Final = 128
MAX_LISTED: Final = 1024  # roles by pool, or ends of one role's channels: a plan has 64 entries of workers
ROUNDING: Final = 0.01  # waits by channel are rounded one by one

Amount = Annotated[
    float, Field(ge=0, allow_inf_nan=False), PlainSerializer(lambda value: float(f"{value:.6g}"), when_used="json")
]
"""Six digits are more than any clock is good for."""
Bytes = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0)]
Label = Annotated[str, Field(max_length=63)]


class Number(Model):
    """A mean, and how sure it is: Number(value=0.0041, spread=0.0003, count=96) is 4.1 ms +- 0.3 ms, 96 times measured.

    `measured`: seen at work. `fitted`: by a line through what was measured. `assumed`: neither."""

    value: Amount
    spread: Amount = 0.0
    """Standard deviation of one measurement."""
    count: Whole = 1
    how: Literal["measured", "fitted", "assumed"] = "measured"


class Batch(Model):
    """Spans of compute that worked on as much. Means of a span."""

    size: Amount
    """Units of each, or the power of two that is not above them; 0: the role did not say."""
    seconds: Number
    units: Amount = 0.0
    tokens: Amount = 0.0
    """Tokens of a span, or whatever finer measure the role has; 0: none."""
    tokens_squared: Amount = 0.0
    token_seconds: Amount = 0.0
    """The mean of tokens times seconds: with `tokensSquared` what a line of seconds over tokens is fitted by."""


class Move(Model):
    """A move onto the slots (load) or off them (offload), or one of weights to others (publish)."""

    what: Label
    seconds: Number
    bytes: Bytes = 0.0


class MemoryProfile(Model):
    """Bytes, the most of any worker. 0: not known. What a role says of its slots, and the pages of its process."""

    resident: Whole = 0
    peak: Whole = 0
    offloaded: Whole = 0
    process: Whole = 0
    process_peak: Whole = 0

    @model_validator(mode="after")
    def _peaks(self) -> Self:
        for name, usual, most in (("peak", self.resident, self.peak), ("processPeak", self.process, self.process_peak)):
            if usual > most:
                raise ValueError(f"{name} is {most} bytes, below the {usual} that are always there")
        return self


class EndProfile(Model):
    """One end of a channel. Of a worker and step."""

    channel: Label
    """Empty: waits that are for no channel, such as for the next turn."""
    side: Literal["producer", "consumer", ""]
    units: Amount = 0.0
    bytes: Bytes = 0.0
    wait_seconds: Number
    """Part of `wait_data`: a consumer's for an item, a producer's for room."""


class Releases(Model):
    """When a worker put the units of a step into a channel, from the first item of the step on that it took."""

    channel: Label
    count: Annotated[int, Field(ge=1)]
    """Units in all that this is of."""
    seconds: Annotated[list[Amount], Field(min_length=1, max_length=MAX_TIMES)]
    """Rising, evenly by rank: the first, ..., the median in the middle, ..., the last."""

    @model_validator(mode="after")
    def _rise(self) -> Self:
        if any(later < earlier for earlier, later in pairwise(self.seconds)):
            raise ValueError("seconds do not rise")
        if len(self.seconds) > max(1, self.count):
            raise ValueError(f"{len(self.seconds)} times are of {self.count} units")
        return self


class RoleProfile(Model):
    """The workers of one role in one pool."""

    name: Label
    pool: Label
    workers: Annotated[int, Field(ge=1)]
    slots_per_worker: Annotated[int, Field(ge=1)] = 1
    seconds: dict[Label, Number]
    """Seconds of a worker and step, by kind of span as in docs/timeline.md: each moment is in one of them, so they add
    up to the step."""
    batches: Annotated[list[Batch], Field(max_length=256)] = []
    moves: Annotated[list[Move], Field(max_length=16)] = []
    ends: Annotated[list[EndProfile], Field(max_length=MAX_LISTED)] = []
    releases: Annotated[list[Releases], Field(max_length=MAX_LISTED)] = []
    memory: MemoryProfile = MemoryProfile()

    @model_validator(mode="after")
    def _waits_add_up(self) -> Self:
        if not self.ends:  # of workers of an older image, which do not say
            return self
        waited = self.seconds["wait_data"].value if "wait_data" in self.seconds else 0.0
        of_ends = sum(end.wait_seconds.value for end in self.ends)
        if abs(of_ends - waited) > ROUNDING * max(waited, of_ends) + 1e-6:
            raise ValueError(f"waits by channel come to {of_ends:.6g} s, wait_data is {waited:.6g} s")
        return self


class ChannelProfile(Model):
    """An edge of the graph as it was: who fed whom, with how much. A cycle is two of them, questions and answers."""

    name: Label
    mode: Literal["Queue", "Cycle", "Weights"]
    producer: Label
    """Empty: the driver's tickets."""
    consumer: Label
    """Empty: the flow, which is told results."""
    units: Number
    """Units of a step, over all workers."""
    bytes: Number


class Profile(Model):
    key: Annotated[str, Field(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")]
    """The key of job and hardware (`key_of`): what has the same key may begin with this profile."""
    job: JobRef
    revision: Annotated[int, Field(ge=1)]
    """The revision of the plan that was in force."""
    first_step: Annotated[int, Field(ge=1)]
    last_step: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=1)]
    """How many of the steps from firstStep to lastStep are in the numbers, without those in which somebody was lost."""
    step_seconds: Number
    checkpoints: bool = True
    """Whether the job writes any: a gang begins elsewhere on one alone."""
    roles: Annotated[list[RoleProfile], Field(min_length=1, max_length=MAX_LISTED)]
    channels: Annotated[list[ChannelProfile], Field(max_length=MAX_LISTED)] = []

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        between = self.last_step - self.first_step + 1
        if self.steps > between:
            raise ValueError(f"{self.steps} steps are said to lie between {self.first_step} and {self.last_step}")
        return self

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_defaults=True)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """InvalidManifest with a sentence per problem."""
        if len(text) > MAX_BYTES:
            raise InvalidManifest(
                "a profile is too large", got=f"{len(text)} bytes", wanted=f"at most {MAX_BYTES}",
                next="report fewer roles, sizes or release times",
            )  # fmt: skip
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InvalidManifest("a profile is not JSON", got=str(error), wanted="an object") from error
        if not isinstance(value, dict):
            raise InvalidManifest("a profile is no object", got=sentences.kind_of(value), wanted="key, job, roles ...")
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            problems = sentences.problems(error, cls, value=value, prefix="profile")
            raise InvalidManifest("; ".join(map(str, problems))) from error


def forget(profiles: list[Profile], *, most: int) -> None:
    """Down to so many, the newest last. What no newer one tells is forgotten last: the loads that a worker tried as it
    started, the smallest and the largest batches of a role."""
    while len(profiles) > most:
        moves, sizes = _sole(profiles, _moves), _sole(profiles, _sizes)
        old = range(len(profiles) - 1)
        first = next((i for i in old if i not in moves | sizes), next((i for i in old if i not in moves), 0))
        del profiles[first]


def _sole(profiles: Sequence[Profile], facts: Callable[[RoleProfile], Iterable[object]]) -> set[int]:
    """Those of which each has a fact that is in no newer one."""
    seen, found = set[object](), set[int]()
    for number in reversed(range(len(profiles))):
        for fact in (fact for role in profiles[number].roles for fact in facts(role)):
            if fact not in seen:
                seen.add(fact)
                found.add(number)
    return found


def _moves(role: RoleProfile) -> Iterator[object]:
    yield from ((role.name, role.pool, move.what) for move in role.moves)


def _sizes(role: RoleProfile) -> Iterator[object]:
    sizes = [batch.units for batch in role.batches if batch.units > 0]
    yield from ((role.name, size) for size in {*sizes[:1], *sizes[-1:]})


KEPT_REPORTS: Final = 8
"""The most reports of one RLProfile: what no other tells, and the newest. More make a fit steadier, not different."""


class RLProfileSpec(Model):
    """What was measured of jobs with one key, where it outlives scheduler and job: an object of their namespace, named
    `names.profile_name(key)`, that the scheduler writes. Of the last such job alone.

        RLProfileSpec(key="sha256:77ab...", job=JobRef(name="math", uid="1b4e"), steps=33,
                      updated="2026-11-26T12:00:00Z", reports=[Profile(...), ...])
    """

    key: Annotated[str, Field(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")]
    """The key of job and hardware (`key_of`)."""
    job: JobRef
    """Whose steps these are; it may be long gone."""
    steps: Annotated[int, Field(ge=1)]
    """The last step that is in them."""
    updated: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]
    """When it was written; the oldest of a namespace go first."""
    reports: Annotated[list[Profile], Field(min_length=1, max_length=KEPT_REPORTS)]
    """In the order of their steps."""

    @model_validator(mode="after")
    def _are_of_one(self) -> Self:
        if other := next((p for p in self.reports if (p.key, p.job) != (self.key, self.job)), None):
            raise ValueError(f"a report is of job uid {other.job.uid} and key {other.key}, not of this one's")
        return self


def read_lines(text: str) -> tuple[Profile, ...]:
    """The profiles of `profiles.jsonl`, one a line. InvalidManifest with a sentence per problem."""
    return tuple(Profile.from_json(line) for line in text.splitlines() if line.strip())


def key_of(spec: RLJobSpec) -> str:
    """The key of all that decides how long work takes and how much memory it needs: the flow, the roles and what they
    run on. Not: who and how many there are, for how long, with which plan."""
    said = dump(spec)
    decisive = {
        "flow": {name: said["flow"].get(name) for name in ("name", "config")},
        "roles": [{name: value for name, value in role.items() if name not in _COUNTS} for role in said["roles"]],
        "pools": [{name: value for name, value in pool.items() if name not in _COUNTS} for pool in said["pools"]],
        "model": said.get("model"),
        "data": said.get("data"),
    }
    return f"sha256:{hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()}"


_COUNTS: Final = frozenset({"workers", "spares", "pods", "roles"})
