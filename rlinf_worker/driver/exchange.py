"""All queues and routes of the flow: the driver's side. What concerns one queue alone is driver.flow_queue's; here is
what goes over several, and the routes of cycles and weights.

| called by | about | tells |
|---|---|---|
| core.py, when somebody comes or goes | redelivery; routes, by routes.py | their ends (route, unroute) |
| core.py, from Channels.Connect | what a filter dropped, what a peer does not have | producers: released |
| the flow | tickets, steps | consumers |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_api.lease_sets import Measured
from rlinf_api.names import WorkerId
from rlinf_api.quantities import to_bytes
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver import routes as routing
from rlinf_worker.driver.flow_queue import FlowQueue
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.results import ResultsBook, Through
from rlinf_worker.driver.steps import OpenStep, TicketsOf
from rlinf_worker.queues.book import UnitBook
from rlinf_worker.queues.expected import Wanted
from rlinf_worker.queues.steps import OpenSteps
from rlinf_worker.queues.together import Homes
from rlinf_worker.queues.units import Age, UnitId, UnitInfo, uids_of


@dataclass(frozen=True, slots=True)
class GangEnds:
    """Where the units of a step end for one gang: the queue that brings its rounds, and those that join it."""

    role: str
    queues: tuple[FlowQueue, ...]

    @property
    def steps(self) -> OpenSteps:
        return self.queues[0].core.steps


class Exchange:
    def __init__(self, job: Job) -> None:
        self._job, self._members = job, job.members
        self._routes = routing.RouteTable(job)
        self._away: frozenset[WorkerId] = frozenset()  # whose units go to others of their role
        self.queues: dict[str, FlowQueue] = {}
        self.results: dict[str, ResultsBook] = {}
        self.through = Through()
        self._gangs: tuple[GangEnds, ...] = ()
        self._behind: dict[str, tuple[GangEnds, ...]] = {}  # by queue: whom what is put there reaches

    def declare(self) -> None:
        """The job knows its channels by now."""
        for spec in self._job.topology.queues:
            self.queues[spec.channel] = FlowQueue(self._job, spec)
        homes = defaultdict[str, Homes](Homes)
        for queue in self.queues.values():
            if queue.spec.together:
                queue.core.keep_together(homes[queue.spec.consumer])
            if queue.spec.joins:
                queue.core.join(self.queues[queue.spec.joins].core)
        topology = self._job.topology
        ends = {gang: tuple(self.queues[end.channel] for end in topology.ends_of(gang)) for gang in topology.gangs}
        gangs = {gang: GangEnds(gang.consumer, queues) for gang, queues in ends.items()}
        self._gangs = tuple(gangs.values())
        self._behind = {name: tuple(gangs[gang] for gang in topology.gangs_behind(name)) for name in self.queues}
        for gang in self._gangs:
            for end in gang.queues:
                end.expected = gang.steps
                end.core.end_here()
        self.results = {told.channel: ResultsBook(self._job, told) for told in topology.results}

    def queue(self, channel: str) -> FlowQueue:
        queue = self.queues.get(channel)
        if queue is None:
            raise UserError(f"{channel!r} is no queue of this flow", wanted=f"one of {', '.join(self.queues)}")
        return queue

    # --- what workers say ---------------------------------------------------------------------------------------------
    def announced(self, channel: str, units: Iterable[pb.Unit], *, producer: WorkerId, after: Age) -> None:
        to: ResultsBook | FlowQueue = self.results.get(channel) or self.queue(channel)
        to.announced(units, producer=producer, after=after)

    def dropped(self, worker: WorkerId, message: pb.Drop) -> None:
        """No step waits for a unit of that key; the gangs that it would have reached hear of it with the last round."""
        queue = self.queue(message.channel)
        self._end(queue, queue.core.acked(worker, branch=message.branch, keys=[message.key], count="dropped"))

    def withdraw(self, channel: str, tickets: Iterable[UnitId]) -> None:
        """The flow wants nothing more of these, where nothing has come of them: as if whoever has each had dropped it,
        who is told."""
        queue = self.queue(channel)
        for uid in tickets:
            entry = queue.core.book.get(uid)
            if entry is None or self._has_begun(queue, entry.unit):
                continue
            holder = entry.consumer
            self._end(queue, queue.core.withdraw(uid))
            if holder is not None:
                queue.tell_superfluous(holder, entry.unit)

    def _has_begun(self, source: FlowQueue, ticket: UnitInfo) -> bool:
        """Some unit of it is on its way, or has come."""
        if any(not gang.steps.at(ticket.age).is_empty(ticket.key) for gang in self._gangs):
            return True
        return any(book.is_worked_on(ticket.id) for book in self._within() if book is not source.core.book)

    def _end(self, queue: FlowQueue, done: Sequence[UnitInfo]) -> None:
        """Nothing more is made of these."""
        queue.tell_producers(done, kind="released")
        for unit in done:
            for gang in self._behind[queue.spec.channel]:
                last = gang.queues[0]
                if queue is not last and (last.core.knows(unit.id) or last.core.has_all_of(unit)):
                    continue  # made by another before
                for end in gang.queues:
                    end.tell_producers(end.core.end(unit), kind="released")
            over = [ticket for ticket in unit.of_tickets if self._is_over(unit.age, ticket)]
            for any_queue in self.queues.values():
                any_queue.tickets.end(UnitId(unit.branch, ticket) for ticket in over)

    def _is_over(self, age: Age, ticket: str) -> bool:
        """Filters have ended all of it, wherever it was to come."""
        steps = [gang.steps.at(age) for gang in self._gangs]
        waiting = [step for step in steps if ticket in step.wanted]
        return bool(waiting) and all(step.has_all(ticket) and step.is_empty(ticket) for step in waiting)

    def reconnected(self, worker: WorkerId, role: str, hello: pb.Hello, *, after: PolicyVersion) -> None:
        """Everything a worker holds on its next connection; what it was told may have been lost with its last stream
        and is said again."""
        over = Age.at(after)
        for taken in hello.taken:
            queue, unit = self.queue(taken.channel), UnitInfo.from_pb(taken.unit)
            if unit.age <= over or not queue.core.restore_held(worker, unit):
                queue.tell_superfluous(worker, unit)
            if unit.age > over:
                self._is_made_again(unit)  # where this driver is another, it hands its tickets out anew
        for made in hello.produced:
            self.announced(made.channel, [made.unit], producer=worker, after=over)
        for queue in self.queues.values():
            if queue.spec.consumer == role:
                queue.reconnected(worker)
        self._routes.reconnected(worker)

    def peer_lost(self, worker: WorkerId, message: pb.PeerLost) -> None:
        """A worker cannot fetch from a peer, which is alive. What the peer keeps is handed out again; a release would
        acknowledge what it was made from. What it does not have is made again."""
        peer = WorkerId(message.worker)
        known = self._members.find(peer)
        if known is None or message.attempt not in (0, known.attempt):
            return
        keys = message.units if message.HasField("units") else None
        named = set(uids_of(keys)) if keys is not None else None
        for queue in self.queues.values() if keys is None else [self.queue(keys.channel)]:
            if message.missing:
                self._make_again(queue.core.missing(worker, peer, units=named))
            else:
                queue.core.hand_back(worker, peer, units=named)

    # --- who comes and goes -------------------------------------------------------------------------------------------
    def gone(self, worker: WorkerId, role: str) -> None:
        """Its units go elsewhere."""
        for queue in self.queues.values():
            if queue.spec.producer == role:
                self._make_again(queue.core.remove_producer(worker))
            if queue.spec.consumer == role:
                self._make_again(queue.consumer_gone(worker))

    def _make_again(self, lost: Iterable[UnitInfo]) -> None:
        """The tickets from which lost units were made wait again."""
        wanted = {UnitId(unit.branch, ticket) for unit in lost for ticket in unit.of_tickets}
        for queue in self.queues.values() if wanted else ():
            queue.tickets.make_again(wanted)
            if not queue.core.is_end:  # what has come there does not come again
                queue.core.expect_again(wanted)

    def stand_in(self, away: frozenset[WorkerId]) -> int:
        """What belongs to workers that are away goes to the others of their role, until they are not. Tickets: an
        affinity is for what a consumer has made for itself, which one that is away has lost. And routes. How many
        tickets wait for somebody else now."""
        self._away = away
        self.update_routes()
        return sum(queue.tickets.stand_in(away) for queue in self.queues.values())

    def cancel(self, branch: int) -> None:
        for queue in self.queues.values():
            queue.cancel(branch)
        self._close_results(Age.end_of(branch))

    def _close_results(self, upto: Age) -> None:
        self.through.close(upto)
        for results in self.results.values():
            results.close(upto)

    def forget_credit(self, worker: WorkerId) -> None:
        for queue in self.queues.values():
            queue.core.consumers.credit(worker, 0)

    def replan(self) -> None:
        """Another plan is in force: sizes, consumers and routes are its own. No step is open; credit that was stated
        before is forgotten one by one, as workers answer."""
        for queue in self.queues.values():
            queue.core.micro_batch = self._job.placement.channel(queue.spec.channel).micro_batch
            queue.core.consumers.ranked = [w.placed.id for w in self._members.of_role(queue.spec.consumer)]
        self._routes.resize(self._wanted_routes())

    def channel_specs(self) -> list[pb.ChannelSpec]:
        """Every channel, with the sizes of the plan in force; a producer's capacity is its share of the channel's."""
        topology, placement = self._job.topology, self._job.placement
        specs = []
        for cycle in topology.cycles:
            plan = placement.channel(cycle.channel)
            specs.append(
                pb.ChannelSpec(
                    name=cycle.channel,
                    mode="Cycle",
                    producer=cycle.asker,
                    consumer=cycle.answerer,
                    micro_batch=plan.micro_batch,
                    depth=plan.depth,
                    stages=placement.stages.get(cycle.roles, 0),
                    payload=cycle.question,
                    answers=cycle.answer,
                )
            )
        for weights in topology.weights:
            name, producer, consumer = weights.channel, weights.producer, weights.consumer
            specs.append(pb.ChannelSpec(name=name, mode="Weights", producer=producer, consumer=consumer))
        for queue in (*topology.queues, *topology.results):
            plan = placement.channel(queue.channel)
            producers = max(1, len(self._members.of_role(queue.producer)))
            specs.append(
                pb.ChannelSpec(
                    name=queue.channel,
                    mode="Queue",
                    producer=queue.producer,
                    consumer=queue.consumer,
                    micro_batch=plan.micro_batch,
                    depth=plan.depth,
                    capacity_units=max(1, plan.capacity.units // producers),
                    capacity_bytes=max(1, to_bytes(plan.capacity.bytes) // producers),
                    rounds=queue.rounds,
                    payload=queue.payload,
                    until_commit=not queue.consumer or any(queue in topology.ends_of(gang) for gang in topology.gangs),
                )
            )
        return specs

    # --- routes -------------------------------------------------------------------------------------------------------
    def update_routes(self, moved: Collection[WorkerId] | None = None) -> None:
        """`moved`: of whom there is news; None: of anybody."""
        topology, members = self._job.topology, self._members
        if moved is not None and not self._away and routing.concerns_itself_alone(topology, members, moved):
            self._routes.want(routing.wanted_of(topology, members, moved), of=moved)
        else:
            self._routes.want(self._wanted_routes())

    def _wanted_routes(self) -> frozenset[routing.RouteKey]:
        rehomed = frozenset(queue.spec.consumer for queue in self.queues.values() if queue.tickets.affinities)
        return routing.wanted(self._job.topology, self._members, away=self._away, rehomed=rehomed)

    # --- what the flow says -------------------------------------------------------------------------------------------
    def put_tickets(self, channel: str, units: Sequence[UnitInfo], *, wanted: Wanted) -> None:
        """`wanted`: of each unit's key, how many units come of it."""
        ends = [end.core for gang in self._behind[channel] for end in gang.queues]
        for end, age in product(ends, {unit.age for unit in units}):
            end.steps.at(age).expect(wanted)
        self.queue(channel).tickets.put(units, ends=ends)

    def open_step(self, entry: OpenStep) -> None:
        """The flow has said all of it."""
        age = Age(entry.branch, entry.number)
        for gang in self._gangs:
            for end in gang.queues:
                end.core.steps.at(age).open(entry.part(gang.role).wanted)
            for end in gang.queues:
                end.look_at(age)
        for results in self.results.values():
            results.look_at(age)

    def close_step(self, step: int, *, branch: int) -> None:
        upto = Age(branch, step)
        self._close_results(upto)
        for queue in self.queues.values():
            if queue.core.is_end:  # nobody takes what still waits there
                queue.forget(upto, waiting_only=True)
            else:
                queue.core.close(upto)
            queue.close_step(upto)

    def forget_committed(self, version: PolicyVersion) -> None:
        """A new driver has learnt what has committed, after it was told of units that are older."""
        for queue in self.queues.values():
            queue.forget(Age.at(version))
        self._close_results(Age.at(version))

    def match(self) -> None:
        self._seal()
        for queue in self.queues.values():
            queue.match()  # one that joins another comes behind it

    def _seal(self) -> None:
        """Tickets of which nothing is on its way any more, or again."""
        turned = dict[UnitId, Age]()
        for queue in self.queues.values():
            news = queue.core.book.take_turned()
            turned |= news if not queue.core.is_end else {}
        for unit in chain.from_iterable(queue.core.take_again() for queue in self.queues.values()):
            self._is_made_again(unit)
        if not turned:
            return
        within = self._within()
        for ticket, age in turned.items():
            sealed = not any(book.is_worked_on(ticket) for book in within)
            self.through.seal(age, ticket.key, sealed=sealed)
            for end in self._ends():
                end.core.steps.at(age).seal(ticket.key, sealed=sealed)
        if self.results:
            self._job.changed.set()  # the flow may wait for them

    def _within(self) -> list[UnitBook]:
        """Where more may be made of what is there."""
        return [queue.core.book for queue in self.queues.values() if not queue.core.is_end]

    def _ends(self) -> Iterator[FlowQueue]:
        return chain.from_iterable(gang.queues for gang in self._gangs)

    def _is_made_again(self, unit: UnitInfo) -> None:
        for end in self._ends():
            end.core.steps.at(unit.age).again(unit.of_tickets)

    # --- looking in ---------------------------------------------------------------------------------------------------
    def tickets_of(self, step: int, gang: str) -> TicketsOf:
        """Of a unit of that step, by its key, as the gang's queue knows it."""
        age = self._age_of(step)
        return next(ends for ends in self._gangs if ends.role == gang).steps.at(age).tickets_of

    def _age_of(self, step: int) -> Age:
        entry = self._job.ledger.get(step)
        return Age(entry.branch if entry is not None else 0, step)

    def waiting_for(self, step: int) -> list[str]:
        """Of an open step, for messages: tickets of which units are to come, and units that have not reached a rank."""
        return list(dict.fromkeys(key for gang in self._gangs for key in gang.steps.waiting_for(step)))

    def short(self, step: int) -> list[tuple[str, int, int]]:
        """Tickets of which fewer units came than the flow said, though whoever worked on them is through: (key, units
        that came or were dropped, units)."""
        age, within = self._age_of(step), self._within()
        known = [found for gang in self._gangs if (found := gang.steps.of(age)) is not None]
        return [
            (ticket, units - found.missing(ticket), units)
            for found in known
            for ticket in found.incomplete()
            if (units := found.wanted[ticket]) is not None
            and not any(book.is_worked_on(UnitId(age.branch, ticket)) for book in within)
        ]

    def holders(self, step: int) -> list[WorkerId]:
        """Who has in hand what the step waits for, in the order of what waits longest."""
        found: dict[WorkerId, None] = {}
        age = self._age_of(step)
        waited = {
            ticket
            for gang in self._gangs
            for key in gang.steps.waiting_for(step)
            for ticket in gang.steps.at(age).tickets_of(key)
        }
        for queue in self.queues.values():
            found |= dict.fromkeys(queue.core.book.consumers_of(waited))
        return list(found)

    def full(self) -> list[str]:
        """Producers that keep their share of a channel of one step, in words."""
        specs = (spec for spec in self.channel_specs() if spec.name in self.queues)
        return [words for spec in specs for words in self.queues[spec.name].full(spec)]

    def measured(self) -> dict[str, Measured]:
        """How large units have been so far, by channel."""
        return {name: queue.measured for name, queue in self.queues.items()}
