"""All queues and routes of the flow: the driver's side. What concerns one queue alone is driver.flow_queue's; here is
what goes over several, and the routes of cycles and weights.

| called by | about | tells |
|---|---|---|
| core.py, when somebody comes or goes | redelivery; routes, by routes.py | their ends (route, unroute) |
| core.py, from Channels.Connect | what a filter dropped, what a peer does not have | producers: released |
| the flow | tickets, steps | consumers |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, product

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import InvariantBroken, UserError
from rlinf_api.lease_sets import Measured
from rlinf_api.names import WorkerId
from rlinf_api.quantities import to_bytes
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver import routes as routing
from rlinf_worker.driver.flow_queue import FlowQueue
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.results import ResultsBook
from rlinf_worker.driver.steps import TicketsOf
from rlinf_worker.queues.expected import Wanted
from rlinf_worker.queues.units import Age, UnitId, UnitInfo, uids_of


class Exchange:
    def __init__(self, job: Job) -> None:
        self._job, self._members = job, job.members
        self._routes = routing.RouteTable(job)
        self._away: frozenset[WorkerId] = frozenset()  # whose units go to others of their role
        self.queues: dict[str, FlowQueue] = {}
        self.results: dict[str, ResultsBook] = {}
        self._ends: list[FlowQueue] = []
        """Where the units of a step end: the committing queue, and those that join it."""

    def declare(self) -> None:
        """The job knows its channels by now."""
        for spec in self._job.topology.queues:
            self.queues[spec.channel] = FlowQueue(self._job, spec)
        for name, first in self.queues.items():
            if parts := [queue.core for queue in self.queues.values() if queue.spec.joins == name]:
                first.core.parts = parts
        if (last := self._job.topology.committing) is not None:
            self._ends = [self.committing, *(q for q in self.queues.values() if q.spec.joins == last.channel)]
        for end in self._ends:
            end.expected, end.core.is_end = self.committing.core.steps, True
        for told in self._job.topology.results:
            self.results[told.channel] = ResultsBook(self._job, told, expected=self.committing.core.steps)

    def queue(self, channel: str) -> FlowQueue:
        queue = self.queues.get(channel)
        if queue is None:
            raise UserError(f"{channel!r} is no queue of this flow", wanted=f"one of {', '.join(self.queues)}")
        return queue

    @property
    def committing(self) -> FlowQueue:
        spec = self._job.topology.committing
        if spec is None:
            raise InvariantBroken("a flow without a committing queue was started")
        return self.queues[spec.channel]

    # --- what workers say ---------------------------------------------------------------------------------------------
    def announced(self, channel: str, units: Iterable[pb.Unit], *, producer: WorkerId, after: Age) -> None:
        to: ResultsBook | FlowQueue = self.results.get(channel) or self.queue(channel)
        to.announced(units, producer=producer, after=after)

    def dropped(self, worker: WorkerId, message: pb.Drop) -> None:
        """The step does not wait for a unit of that key; the gang hears of it with the last round."""
        queue, last = self.queue(message.channel), self.committing
        done = queue.core.acked(worker, branch=message.branch, keys=[message.key], count="dropped")
        queue.tell_producers(done, kind="released")
        for unit in done:
            if queue is not last and (last.core.knows(unit.id) or last.core.has_all_of(unit)):
                continue  # made by another before
            for end in self._ends:
                end.tell_producers(end.core.end(unit), kind="released")
            step = last.core.steps.at(unit.age)
            over = [ticket for ticket in unit.of_tickets if step.has_all(ticket) and step.is_empty(ticket)]
            for any_queue in self.queues.values():
                any_queue.tickets.end(UnitId(unit.branch, ticket) for ticket in over)

    def reconnected(self, worker: WorkerId, role: str, hello: pb.Hello, *, after: PolicyVersion) -> None:
        """Everything a worker holds on its next connection; what it was told may have been lost with its last stream
        and is said again."""
        over = Age.at(after)
        for taken in hello.taken:
            queue, unit = self.queue(taken.channel), UnitInfo.from_pb(taken.unit)
            if unit.age > over:
                queue.core.restore_held(worker, unit)
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
                self._make_again(queue.core.remove_consumer(worker))

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
        for results in self.results.values():
            results.close(Age.end_of(branch))

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
        specs, last = [], topology.committing
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
                    until_commit=not queue.consumer
                    or (last is not None and last.channel in (queue.channel, queue.joins)),
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
        ends = [end.core for end in self._ends]
        for end, age in product(ends, {unit.age for unit in units}):
            end.steps.at(age).expect(wanted)
        self.queue(channel).tickets.put(units, ends=ends)

    def open_step(self, step: int, *, branch: int, wanted: Wanted) -> None:
        age = Age(branch, step)
        for queue in self._ends:
            queue.core.steps.at(age).open(wanted)
        for end in self._ends:
            end.look_at(age)
        for results in self.results.values():
            results.look_at(age)

    def close_step(self, step: int, *, branch: int) -> None:
        upto = Age(branch, step)
        for results in self.results.values():
            results.close(upto)
        for queue in self.queues.values():
            if queue in self._ends:  # nobody takes what still waits there
                queue.forget(upto, waiting_only=True)
            else:
                queue.core.close(upto)
            queue.close_step(upto)

    def forget_committed(self, version: PolicyVersion) -> None:
        """A new driver has learnt what has committed, after it was told of units that are older."""
        for queue in self.queues.values():
            queue.forget(Age.at(version))
        for results in self.results.values():
            results.close(Age.at(version))

    def match(self) -> None:
        self._seal()
        for queue in self.queues.values():
            queue.match(self.queues[queue.spec.joins].core if queue.spec.joins else None)

    def _seal(self) -> None:
        """Tickets of which nothing is on its way any more, or again."""
        turned = dict[UnitId, Age]()
        within = [queue.core.book for queue in self.queues.values() if queue not in self._ends]
        for queue in self.queues.values():
            news = queue.core.book.take_turned()
            turned |= news if queue not in self._ends else {}
        for unit in chain.from_iterable(queue.core.take_again() for queue in self.queues.values()):
            self._is_made_again(unit)
        for ticket, age in turned.items():
            sealed = not any(book.is_worked_on(ticket) for book in within)
            for end in self._ends:
                end.core.steps.at(age).seal(ticket.key, sealed=sealed)
        if turned and self.results:
            self._job.changed.set()  # the flow may wait for them

    def _is_made_again(self, unit: UnitInfo) -> None:
        for end in self._ends:
            end.core.steps.at(unit.age).again(unit.of_tickets)

    # --- looking in ---------------------------------------------------------------------------------------------------
    def is_through(self, age: Age, ticket: str) -> bool:
        """Nobody works on anything of it."""
        step = self.committing.core.steps.of(age)
        return step is not None and step.is_sealed(ticket)

    def tickets_of(self, step: int) -> TicketsOf:
        """Of a unit of that step, by its key, as the gang's queue knows it."""
        entry = self._job.ledger.get(step)
        return self.committing.core.steps.at(Age(entry.branch if entry is not None else 0, step)).tickets_of

    def short(self, step: int) -> list[tuple[str, int, int]]:
        """Tickets of which fewer units came than the flow said, though whoever worked on them is through: (key, units
        that came or were dropped, units)."""
        entry = self._job.ledger.get(step)
        found = self.committing.core.steps.of(Age(entry.branch, step)) if entry is not None else None
        if found is None:
            return []
        within = [queue.core.book for queue in self.queues.values() if queue not in self._ends]
        return [
            (ticket, units - found.missing(ticket), units)
            for ticket in found.incomplete()
            if (units := found.wanted[ticket]) is not None
            and not any(book.is_worked_on(UnitId(found.age.branch, ticket)) for book in within)
        ]

    def holders(self, step: int) -> list[WorkerId]:
        """Who has in hand what the step waits for, in the order of what waits longest."""
        found: dict[WorkerId, None] = {}
        tickets_of = self.tickets_of(step)
        waited = {t for key in self.committing.core.steps.waiting_for(step) for t in tickets_of(key)}
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
