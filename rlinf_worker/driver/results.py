"""What roles tell the flow: rewards, what a filter kept, evaluations. A queue whose consumer is the driver itself.

    role ── put(value, key, parents) ──► announced, with the value ──► held at once ──► released with the step's commit

For: driver.exchange, which hands on what workers say, and driver.flow, which gives it to the flow. A producer keeps it
until the step commits, so a new driver hears all of it again. The first of a key counts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Final

from rlinf_api import conditions
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker.channels import lineage
from rlinf_worker.channels.protocol import LineageKey
from rlinf_worker.driver.flow_queue import tell_producers
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.topology import QueueSpec
from rlinf_worker.flows.protocol import Result
from rlinf_worker.queues.units import Age, UnitId, UnitInfo

MAX_KEPT_BYTES: Final = 256 << 20
"""The most bytes of all open steps: 4,096 values of the largest size. The oldest step of a channel gets in whole
(queues.shelf), so nothing else bounds what a role tells of it."""


class Through:
    """Tickets on which nobody works any more (or for now), by step."""

    def __init__(self) -> None:
        self._steps: dict[Age, set[str]] = {}
        self._closed = Age(0, 0)

    def seal(self, age: Age, ticket: str, *, sealed: bool) -> None:
        if age > self._closed:
            step = self._steps.setdefault(age, set())
            (step.add if sealed else step.discard)(ticket)

    def has(self, age: Age, ticket: str) -> bool:
        return ticket in self._steps.get(age, ())

    def close(self, upto: Age) -> None:
        self._closed = max(self._closed, upto)
        self._steps = {age: step for age, step in self._steps.items() if age > upto}


class ResultsBook:
    def __init__(self, job: Job, spec: QueueSpec) -> None:
        self.spec, self._job = spec, job
        self._known: dict[UnitId, UnitInfo] = {}
        self._kept_bytes = 0

    def announced(self, units: Iterable[pb.Unit], *, producer: WorkerId, after: Age) -> None:
        made = [UnitInfo.from_pb(unit, producer=producer) for unit in units]
        news = [unit for unit in made if unit.age > after]
        for unit in news:
            if self._known.setdefault(unit.id, unit) is unit:
                self._kept_bytes += len(unit.inline)
        mine = {unit.id for unit in news if self._known[unit.id].producer == producer}
        self._say((unit for unit in made if unit.id not in mine), kind="released")
        self._say((unit for unit in news if unit.id in mine), kind="held")
        self._refuse_foreign(news)
        if self._kept_bytes > MAX_KEPT_BYTES:
            self._fail(
                f"worker {producer} tells the flow more by {self.spec.channel!r} than a driver keeps",
                got=f"{self._kept_bytes} bytes of open steps", wanted=f"at most {MAX_KEPT_BYTES}",
                next="tell what the flow decides by, and put the rest into a queue",
            )  # fmt: skip

    def look_at(self, age: Age) -> None:
        """The flow has said all tickets of a step; some of it may have been told by now."""
        self._refuse_foreign(unit for unit in self._known.values() if unit.age == age)

    def _refuse_foreign(self, units: Iterable[UnitInfo]) -> None:
        """Else nobody would ever ask for it."""
        for unit in units:
            step = self._job.ledger.get(unit.step)
            if step is None or step.branch != unit.branch or not step.sealed:
                continue
            if foreign := next((ticket for ticket in unit.of_tickets if ticket not in step.tickets), None):
                self._fail(
                    f"step {unit.step} has no ticket for what worker {unit.producer} tells by {self.spec.channel!r}",
                    got=f"key {unit.key!r}, of ticket {foreign!r}, which is none of the step",
                    wanted="a value of something that came of a ticket",
                    next="put it with parents=[...], or with the ticket's key",
                )  # fmt: skip
                return

    def _fail(self, what: str, **words: str) -> None:
        self._job.fail(conditions.Reason.USER_ERROR, str(UserError(what, **words)))

    def close(self, upto: Age) -> None:
        """These steps have committed, or are void."""
        self._say((unit for unit in self._known.values() if unit.age <= upto), kind="released")
        self._known = {uid: unit for uid, unit in self._known.items() if unit.age > upto}
        self._kept_bytes = sum(len(unit.inline) for unit in self._known.values())

    def of(self, age: Age, tickets: Collection[str]) -> list[Result]:
        """In lineage order, so that a flow decides the same whatever came first."""
        wanted = frozenset(tickets)
        found = (unit for unit in self._known.values() if unit.age == age and not wanted.isdisjoint(unit.of_tickets))
        return [
            Result(
                key=LineageKey(unit.key),
                tickets=tuple(map(LineageKey, unit.of_tickets)),
                value=json.loads(unit.inline),
                version=unit.version,
            )
            for unit in sorted(found, key=lambda unit: lineage.sort_key(unit.key))
        ]

    def _say(self, units: Iterable[UnitInfo], *, kind: str) -> None:
        tell_producers(self._job.sessions, self.spec.channel, units, kind=kind)
