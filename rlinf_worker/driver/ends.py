"""Where the units of a step end: at the gangs that end steps, in the queues that bring their rounds. What each is still
to get, when a ticket is sealed, and who holds what a step waits for.

For: exchange.py, which hears what becomes of units; stalls.py, notices.py and commits.py, which look in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product

from rlinf_api.names import WorkerId
from rlinf_worker.driver.flow_queue import FlowQueue
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.steps import OpenStep, TicketsOf
from rlinf_worker.queues.book import UnitBook
from rlinf_worker.queues.core import QueueCore
from rlinf_worker.queues.expected import Wanted
from rlinf_worker.queues.steps import OpenSteps
from rlinf_worker.queues.units import Age, UnitId, UnitInfo


@dataclass(frozen=True, slots=True)
class GangEnds:
    """Where the units of a step end for one gang: the queue that brings its rounds, and those that join it."""

    role: str
    queues: tuple[FlowQueue, ...]

    @property
    def steps(self) -> OpenSteps:
        return self.queues[0].core.steps


class StepEnds:
    def __init__(self, job: Job, queues: Mapping[str, FlowQueue]) -> None:
        """`queues`: all of the flow, once they are declared."""
        self._job, self._queues = job, queues
        self._gangs: tuple[GangEnds, ...] = ()
        self._behind: dict[str, tuple[GangEnds, ...]] = {}  # by queue

    def declare(self) -> None:
        topology = self._job.topology
        ends = {gang: tuple(self._queues[end.channel] for end in topology.ends_of(gang)) for gang in topology.gangs}
        gangs = {gang: GangEnds(gang.consumer, queues) for gang, queues in ends.items()}
        self._gangs = tuple(gangs.values())
        self._behind = {name: tuple(gangs[gang] for gang in topology.gangs_behind(name)) for name in self._queues}
        for gang in self._gangs:
            for end in gang.queues:
                end.expected = gang.steps
                end.core.end_here()

    def behind(self, channel: str) -> tuple[GangEnds, ...]:
        """The gangs that what is put there reaches."""
        return self._behind[channel]

    # --- what is to come ----------------------------------------------------------------------------------------------
    def expect(self, channel: str, ages: Iterable[Age], wanted: Wanted) -> list[QueueCore]:
        """Notes how many units come of each of the tickets that are put there. Returns the queues where they end."""
        found = [end.core for gang in self._behind[channel] for end in gang.queues]
        for end, age in product(found, ages):
            end.steps.at(age).expect(wanted)
        return found

    def open(self, entry: OpenStep) -> None:
        """The flow has said all of a step."""
        age = Age(entry.branch, entry.number)
        for gang in self._gangs:
            for end in gang.queues:
                end.core.steps.at(age).open(entry.part(gang.role).wanted)
            for end in gang.queues:
                end.look_at(age)

    def made_again(self, unit: UnitInfo) -> None:
        for end in self._ends():
            end.core.steps.at(unit.age).again(unit.of_tickets)

    def seal(self, turned: Mapping[UnitId, Age]) -> Iterator[tuple[UnitId, Age, bool]]:
        """Tickets of which nothing is on its way any more, or again. Yields each, and whether it is sealed."""
        within = self._within()
        for ticket, age in turned.items():
            sealed = not any(ticket in book.worked_on for book in within)
            for end in self._ends():
                end.core.steps.at(age).seal(ticket.key, sealed=sealed)
            yield ticket, age, sealed

    def has_begun(self, source: FlowQueue, ticket: UnitInfo) -> bool:
        """Some unit of it is on its way, or has come."""
        if any(not gang.steps.at(ticket.age).is_empty(ticket.key) for gang in self._gangs):
            return True
        return any(ticket.id in book.worked_on for book in self._within() if book is not source.core.book)

    def is_over(self, age: Age, ticket: str) -> bool:
        """Filters have ended all of it, wherever it was to come."""
        steps = [gang.steps.at(age) for gang in self._gangs]
        waiting = [step for step in steps if ticket in step.wanted]
        return bool(waiting) and all(step.has_all(ticket) and step.is_empty(ticket) for step in waiting)

    def _within(self) -> list[UnitBook]:
        """Where more may be made of what is there: books of queues within the flow."""
        return [queue.core.book for queue in self._queues.values() if not queue.core.is_end]

    def _ends(self) -> Iterator[FlowQueue]:
        return chain.from_iterable(gang.queues for gang in self._gangs)

    # --- looking in ---------------------------------------------------------------------------------------------------
    def tickets_of(self, step: int, gang: str) -> TicketsOf:
        """A function that tells the tickets of a unit of that step by its key, as the gang's queue knows them."""
        age = self.age_of(step)
        return next(ends for ends in self._gangs if ends.role == gang).steps.at(age).tickets_of

    def age_of(self, step: int) -> Age:
        entry = self._job.ledger.get(step)
        return Age(entry.branch if entry is not None else 0, step)

    def waiting_for(self, step: int) -> list[str]:
        """What an open step waits for, for messages: tickets of which units are to come, and units that have not
        reached a rank."""
        return list(dict.fromkeys(key for gang in self._gangs for key in gang.steps.waiting_for(step)))

    def short(self, step: int) -> list[tuple[str, int, int]]:
        """Tickets of which fewer units came than the flow said, though whoever worked on them is through: (key, units
        that came or were dropped, units)."""
        age, within = self.age_of(step), self._within()
        known = [found for gang in self._gangs if (found := gang.steps.of(age)) is not None]
        return [
            (ticket, units - found.missing(ticket), units)
            for found in known
            for ticket in found.by_lineage.to_come()
            if (units := found.wanted[ticket]) is not None
            and not any(UnitId(age.branch, ticket) in book.worked_on for book in within)
        ]

    def holders(self, step: int) -> list[WorkerId]:
        """Who has in hand what the step waits for, in the order of what waits longest."""
        age = self.age_of(step)
        waited = {
            ticket
            for gang in self._gangs
            for key in gang.steps.waiting_for(step)
            for ticket in gang.steps.at(age).tickets_of(key)
        }
        return self.holders_of(waited)

    def holders_of(self, waited: Collection[str]) -> list[WorkerId]:
        """Who works on these tickets, or on what came of them."""
        found: dict[WorkerId, None] = {}
        for queue in self._queues.values():
            found |= dict.fromkeys(queue.core.book.consumers_of(waited))
        return list(found)
