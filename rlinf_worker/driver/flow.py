"""The runtime of a flow in the driver: implements flows.protocol.Flow over the core's queues and the step ledger.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| the flow function | steps() | all workers ready; step n-1-staleness committed | Driver.settle after every change |

The flow function is run anew after a restore: its declarations are the same (checked), its tickets are idempotent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Final

from rlinf_api.conditions import Reason
from rlinf_api.errors import UserError
from rlinf_worker.channels import labels, plain
from rlinf_worker.channels.payload_type import Declared, PayloadMismatch, PayloadType
from rlinf_worker.channels.protocol import LineageKey
from rlinf_worker.driver.core import Driver
from rlinf_worker.driver.job import Dirty, FlowWait, Job, MetricBound
from rlinf_worker.driver.topology import CycleSpec, QueueSpec, Topology, WeightsSpec
from rlinf_worker.flows.protocol import FlowFunction, Result, Step, Ticket
from rlinf_worker.queues.units import Age, UnitId, UnitInfo

DECLARE_TIMEOUT_S: Final = (
    5.0  # declarations are a few calls; whoever loads data first must not hold the driver's answer
)


class TicketSource:
    """The driver as producer of one queue."""

    def __init__(self, driver: Driver, channel: str, type: PayloadType | None) -> None:
        self._driver, self._channel, self._type = driver, channel, type

    async def put(self, tickets: Sequence[Ticket], *, step: Step) -> None:
        """All of them or none: PayloadMismatch where one is not what the flow declares, LabelError where its key or
        weight cannot be sent."""
        channel, branch, number = self._channel, step.version.branch, step.number
        units, wanted = [], {}
        hears_results = bool(self._driver.job.topology.results)
        try:
            for t in tickets:
                said = labels.checked(channel, key=t.key, step=number, branch=branch, weight=t.weight, version=None)
                if self._type is not None:
                    self._type.check(dict(t.payload), channel, said.key)
                wanted[said.key] = self._count(t)
                units.append(
                    UnitInfo(
                        key=said.key,
                        branch=branch,
                        step=number,
                        weight=said.weight,
                        version=step.version,
                        inline=json.dumps(dict(t.payload)).encode(),
                        affinity=t.affinity,
                        wants_seal=t.units is None or hears_results,
                    )
                )
        except (PayloadMismatch, labels.LabelError):
            self._driver.exchange.queue(channel).core.counts["refused"] += 1
            raise
        rare = any(t.rare for t in tickets)
        self._driver.put_tickets(self._channel, units, step=step.number, wanted=wanted, rare=rare)

    def withdraw(self, tickets: Sequence[LineageKey], *, step: Step) -> None:
        job, branch = self._driver.job, step.version.branch
        entry = job.ledger.get(step.number)
        if strangers := [key for key in tickets if entry is not None and key not in entry.tickets]:
            raise UserError(
                f"flow {job.flow_settings.name!r} withdraws what step {step.number} does not have",
                got=", ".join(map(ascii, strangers[:3])), wanted="keys of tickets that were put for it",
                next="put the tickets first",
            )  # fmt: skip
        self._driver.exchange.withdraw(self._channel, [UnitId(branch, key) for key in tickets])
        job.mark(Dirty.UNITS)
        self._driver.settle()

    def _count(self, ticket: Ticket) -> int | None:
        units: Any = ticket.units  # the flow is the user's own
        if units is not None and (isinstance(units, bool) or not isinstance(units, Integral) or units < 1):
            raise labels.LabelError(
                f"ticket {ascii(ticket.key)[:80]} of channel {self._channel!r} cannot be put",
                got=f"units={ascii(units)[:80]}", wanted="how many units come of it, from 1 on, or None",
                next="leave out a ticket of which nothing comes",
            )  # fmt: skip
        return None if units is None else int(units)


class FlowResults:
    """What role `producer` tells the flow."""

    def __init__(self, driver: Driver, channel: str) -> None:
        self._driver, self._channel = driver, channel

    async def of(self, step: Step, tickets: Sequence[LineageKey] | None = None) -> Sequence[Result]:
        job, exchange, age = self._driver.job, self._driver.exchange, Age(step.version.branch, step.number)
        entry = job.ledger.get(step.number)
        put = entry.tickets if entry is not None else {}
        keys = list(put if tickets is None else tickets)
        if strangers := [key for key in keys if key not in put]:
            raise UserError(
                f"flow {job.flow_settings.name!r} asks for results of what step {step.number} does not have",
                got=", ".join(map(ascii, strangers[:3])), wanted="keys of tickets that were put for it",
                next="put the tickets first",
            )  # fmt: skip
        waiting = list(keys)

        def are_through() -> bool:
            while waiting and exchange.through.has(age, waiting[-1]):
                waiting.pop()
            return not waiting

        await _waits(job, FlowWait(f"results of {len(keys)} tickets of step {step.number}", waiting), are_through)
        return exchange.results[self._channel].of(age, keys)


async def _waits(job: Job, wait: FlowWait, condition: Callable[[], bool]) -> None:
    """So that people are told of it, and of who holds it up."""
    job.flow_waits = wait
    try:
        await job.until(condition, what=wait.what)
    finally:
        if job.flow_waits is wait:  # the flow may run anew by now, and wait for something else
            job.flow_waits = FlowWait()


class FlowRun:
    """One run of the flow function, from its first declaration to its last step."""

    def __init__(
        self, driver: Driver, *, roles: Mapping[str, int], on_declared: Callable[[Topology], None], dry: bool = False
    ) -> None:
        """`dry`: declarations only; there are no steps."""
        settings = driver.job.flow_settings
        self.name, self.seed = settings.name, settings.seed
        self.max_staleness, self.config = settings.max_staleness, settings.config
        self._driver, self._roles, self._on_declared, self._dry = driver, roles, on_declared, dry
        self._cycles: list[CycleSpec] = []
        self._queues: list[QueueSpec] = []
        self._weights: list[WeightsSpec] = []
        self._results: list[QueueSpec] = []
        self.state: dict[str, Any] = {}

    @property
    def max_steps(self) -> int:
        return self._driver.job.ledger.steps

    def workers(self, role: str) -> int:
        self._check(role)
        return self._roles[role]

    def source(self, name: str, *, to: str, payload: Declared | None = None) -> TicketSource:
        self._check(to)
        type, text = self._type(name, payload)
        self._queues.append(QueueSpec(channel=self._new(name), producer="", consumer=to, rounds=False, payload=text))
        return TicketSource(self._driver, name, type)

    def results(self, name: str, *, producer: str, payload: Declared | None = None) -> FlowResults:
        self._check(producer)
        _, text = self._type(name, payload)
        self._results.append(QueueSpec(channel=self._new(name), producer=producer, consumer="", payload=text))
        return FlowResults(self._driver, name)

    def cycle(
        self,
        name: str,
        *,
        ask: str,
        answer: str,
        question: Declared | None = None,
        reply: Declared | None = None,
        anybody: bool = False,
    ) -> None:
        self._check(ask, answer)
        if ask == answer:
            raise UserError(
                f"flow {self.name!r}: in cycle {name!r} role {ask!r} asks itself", wanted="two roles",
                next="let another role answer",
            )  # fmt: skip
        (_, asked), (_, answered) = self._type(name, question), self._type(name, reply)
        spec = CycleSpec(
            channel=self._new(name), asker=ask, answerer=answer, question=asked, answer=answered, anybody=anybody
        )
        self._cycles.append(spec)

    def queue(
        self,
        name: str,
        producer: str,
        consumer: str,
        *,
        rounds: bool = False,
        joins: str = "",
        together: bool = False,
        payload: Declared | None = None,
    ) -> None:
        self._check(producer, consumer)
        if joins and not any(q.channel == joins and q.consumer == consumer for q in self._queues):
            raise UserError(
                f"flow {self.name!r}: queue {name!r} joins {joins!r}, which is no queue of {consumer!r} before it",
                wanted=f"one of {', '.join(q.channel for q in self._queues if q.consumer == consumer) or 'none'}",
                next="declare the queue that it joins first",
            )
        other = next((q for q in self._queues if q.rounds and q.consumer == consumer), None)
        if rounds and (joins or other is not None):
            first = joins or (other.channel if other is not None else "")
            raise UserError(
                f"flow {self.name!r}: queue {name!r} cannot have rounds=True",
                got=f"{first!r}, which brings {consumer!r} its rounds",
                wanted="one such queue of each gang",
                next=f"declare {name!r} with joins={first!r} alone",
            )
        if together and (rounds or joins):
            raise UserError(
                f"flow {self.name!r}: queue {name!r} has together=True and " + ("rounds=True" if rounds else "joins="),
                wanted="a queue whose units go to whoever has room",
                next="leave it out, as a gang's ranks take each round together"
                if rounds else f"say it of {joins!r}, whose units these follow",
            )  # fmt: skip
        _, text = self._type(name, payload)
        spec = QueueSpec(
            channel=self._new(name),
            producer=producer,
            consumer=consumer,
            rounds=rounds,
            payload=text,
            joins=joins,
            together=together,
        )
        self._queues.append(spec)

    def weights(self, producer: str, consumer: str) -> None:
        self._check(producer, consumer)
        self._weights.append(WeightsSpec(channel=self._new("weights"), producer=producer, consumer=consumer))

    def watch(self, metric: str, *, at_most: float, reason: Reason, words: str) -> None:
        self._driver.job.watches[metric] = MetricBound(at_most=at_most, reason=Reason(reason), words=words)

    async def shared(self, name: str) -> Any:
        driver, wait = self._driver, FlowWait(f"fact {name!r}, which no role has shared")
        await _waits(driver.job, wait, lambda: driver.facts.get(name) is not None)
        return json.loads(driver.facts.get(name) or "null")

    def steps(self) -> AsyncIterator[Step]:
        topology = self._declared()
        if not topology.gangs:
            raise UserError(
                f"flow {self.name!r} has no queue with rounds=True", wanted="one, whose consumer ends the steps",
                next="declare it with flow.queue(..., rounds=True)",
            )  # fmt: skip
        if too_late := next((r for r in topology.results if r.producer in topology.gang_roles), None):
            raise UserError(
                f"flow {self.name!r}: results {too_late.channel!r} come of {too_late.producer!r}, which ends the steps",
                wanted="a role before it, as nothing is put of a step that has ended",
                next="report numbers by ctx.report, or keep them in the trainer's checkpoint",
            )  # fmt: skip
        self._on_declared(topology)
        return self._steps()

    async def _steps(self) -> AsyncIterator[Step]:
        driver, job = self._driver, self._driver.job
        if self._dry:
            return
        await job.until(lambda: job.begun, what="all workers ready")
        self.state.update(json.loads(json.dumps(job.ledger.flow_state)))  # the gang has said by now where it stands
        number = job.ledger.committed + 1
        while True:  # an edit may move the last step
            await self._room_for(number)
            if job.ending or not job.ledger.may_open(number):
                break
            yield Step(number=number, version=driver.open_step(number))
            driver.seal_step(number, state=self._state())
            number += 1
        await job.until(lambda: job.ending or job.ledger.finished, what="the last step")

    def _state(self) -> str:
        """As JSON. UserError where that cannot be, or not what comes back from it."""
        what, next = f"flow {self.name!r} keeps a state that no checkpoint can have", "keep plain values, and few"
        text = plain.encoded(self.state, what, next=next)
        if json.loads(text) != self.state:
            raise UserError(what, got=text[:80], wanted="a dict with names as keys, and no tuples", next=next)
        return text

    async def _room_for(self, number: int) -> None:
        driver, job = self._driver, self._driver.job
        await job.until(
            lambda: job.ending or (job.ledger.may_open(number) and not driver.switch.holds),
            what=f"room for step {number}",
        )

    def _type(self, channel: str, payload: Declared | None) -> tuple[PayloadType | None, str]:
        """To check with, and as workers are told."""
        if payload is None:
            return None, ""
        try:
            type = PayloadType(payload)
        except UserError as error:
            raise UserError(f"flow {self.name!r}, channel {channel!r}: {error}") from error
        return type, type.text

    def _declared(self) -> Topology:
        return Topology(
            cycles=tuple(self._cycles),
            queues=tuple(self._queues),
            weights=tuple(self._weights),
            results=tuple(self._results),
        )

    def _new(self, name: str) -> str:
        if name in self._declared().names():
            raise UserError(f"flow {self.name!r} declares channel {name!r} twice", next="give one another name")
        return name

    def _check(self, *roles: str) -> None:
        for role in roles:
            if role not in self._roles:
                raise UserError(
                    f"flow {self.name!r} needs role {role!r}", got=f"roles {', '.join(self._roles)}",
                    next=f"add a role named {role!r} to spec.roles",
                )  # fmt: skip


async def would_run(driver: Driver, function: FlowFunction, *, roles: Mapping[str, int]) -> str:
    """Why the flow does not run with so many workers of each role; empty: it does. It is asked for its declarations,
    within DECLARE_TIMEOUT_S; a running flow goes on beside."""
    declared: list[Topology] = []
    try:
        async with asyncio.timeout(DECLARE_TIMEOUT_S):
            await function(FlowRun(driver, roles=roles, on_declared=declared.append, dry=True))
    except UserError as error:
        return str(error)
    except TimeoutError:
        return f"flow {driver.job.flow_settings.name!r} did not declare its channels within {DECLARE_TIMEOUT_S:g} s"
    except Exception as error:  # noqa: BLE001 - the user's own flow may raise anything
        return f"flow {driver.job.flow_settings.name!r} raised {type(error).__name__}: {error}"
    if driver.job.declared and declared != [driver.job.topology]:
        return f"flow {driver.job.flow_settings.name!r} declares other channels under it"
    return ""
