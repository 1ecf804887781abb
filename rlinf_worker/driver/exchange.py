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
from collections.abc import Iterable, Sequence
from itertools import chain

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_api.lease_sets import Measured
from rlinf_api.names import WorkerId
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.channel_specs import channel_specs
from rlinf_worker.driver.ends import StepEnds
from rlinf_worker.driver.flow_queue import FlowQueue
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.remaking import Remaking
from rlinf_worker.driver.results import ResultsBook, Through
from rlinf_worker.driver.routes import RouteTable
from rlinf_worker.driver.steps import OpenStep
from rlinf_worker.queues.expected import Wanted
from rlinf_worker.queues.together import Homes
from rlinf_worker.queues.units import Age, UnitId, UnitInfo, uids_of


class Exchange:
    def __init__(self, job: Job) -> None:
        self._job, self._members = job, job.members
        self.queues: dict[str, FlowQueue] = {}
        self.routes = RouteTable(job, rehomed=self._rehomed)
        self.results: dict[str, ResultsBook] = {}
        self.through = Through()
        self.ends = StepEnds(job, self.queues)
        self.remaking = Remaking(job, self.queues, self.ends)

    def declare(self) -> None:
        """The job knows its channels by now."""
        for spec in self._job.topology.queues:
            self.queues[spec.channel] = FlowQueue(self._job, spec)
        homes = defaultdict[str, Homes](Homes)
        for queue in self.queues.values():
            if queue.spec.together:
                queue.core.keep_together(homes[queue.spec.consumer])
            if queue.spec.joins:
                queue.core.joint.join(self.queues[queue.spec.joins].core.joint)
        self.ends.declare()
        self.results = {told.channel: ResultsBook(self._job, told) for told in self._job.topology.results}

    def queue(self, channel: str) -> FlowQueue:
        queue = self.queues.get(channel)
        if queue is None:
            raise UserError(f"{channel!r} is no queue of this flow", wanted=f"one of {', '.join(self.queues)}")
        return queue

    def book(self, channel: str) -> ResultsBook | FlowQueue:
        """Where units of it are announced."""
        return self.results.get(channel) or self.queue(channel)

    # --- what workers say ---------------------------------------------------------------------------------------------
    def announced(self, channel: str, units: Iterable[pb.Unit], *, producer: WorkerId, after: Age) -> None:
        self.book(channel).announced(units, producer=producer, after=after)

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
            if entry is None or self.ends.has_begun(queue, entry.unit):
                continue
            holder = entry.consumer
            self._end(queue, queue.core.withdraw(uid))
            if holder is not None:
                queue.tell_superfluous(holder, entry.unit)

    def _end(self, queue: FlowQueue, done: Sequence[UnitInfo]) -> None:
        """Nothing more is made of these."""
        queue.tell_producers(done, kind="released")
        for unit in done:
            for gang in self.ends.behind(queue.spec.channel):
                last = gang.queues[0]
                if queue is not last and (last.core.knows(unit.id) or last.core.steps.has_all_of(unit)):
                    continue  # made by another before
                for end in gang.queues:
                    end.tell_producers(end.core.end(unit), kind="released")
            over = [ticket for ticket in unit.of_tickets if self.ends.is_over(unit.age, ticket)]
            for any_queue in self.queues.values():
                any_queue.tickets.end(UnitId(unit.branch, ticket) for ticket in over)

    def reconnected(self, worker: WorkerId, role: str, hello: pb.Hello, *, after: PolicyVersion) -> None:
        """Everything a worker holds on its next connection, but for what it has made; what it was told may have been
        lost with its last stream and is said again."""
        over = Age.at(after)
        for taken in hello.taken:
            queue, unit = self.queue(taken.channel), UnitInfo.from_pb(taken.unit)
            if unit.age <= over or not queue.core.restore_held(worker, unit):
                queue.tell_superfluous(worker, unit)
            if unit.age > over:
                self.ends.made_again(unit)  # where this driver is another, it hands its tickets out anew
        for queue in self.queues.values():
            if queue.spec.consumer == role:
                queue.reconnected(worker)
        self.routes.reconnected(worker)

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
                self.remaking.make_again(queue.core.departures.missing(worker, peer, units=named))
            else:
                queue.core.departures.hand_back(worker, peer, units=named)

    # --- who comes and goes -------------------------------------------------------------------------------------------
    def gone(self, worker: WorkerId, role: str) -> None:
        """Its units go elsewhere."""
        for queue in self.queues.values():
            if queue.spec.producer == role:
                self.remaking.producer_died()
                self.remaking.make_again(queue.core.departures.remove_producer(worker))
            if queue.spec.consumer == role:
                self.remaking.make_again(queue.consumer_gone(worker))

    def stand_in(self, away: frozenset[WorkerId]) -> int:
        """What belongs to workers that are away goes to the others of their role, until they are not. Tickets: an
        affinity is for what a consumer has made for itself, which one that is away has lost. And routes. How many
        tickets wait for somebody else now."""
        self.routes.stand_in(away)
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
            consumers = [w.placed.id for w in self._members.of_role(queue.spec.consumer)]
            if len(consumers) != len(queue.core.consumers.ranked):
                queue.tickets.divide_anew()
            queue.core.consumers.ranked = consumers
        self.routes.resize()

    def _rehomed(self) -> frozenset[str]:
        """Roles whose tickets go to whom an affinity names."""
        return frozenset(queue.spec.consumer for queue in self.queues.values() if queue.tickets.affinities)

    # --- what the flow says -------------------------------------------------------------------------------------------
    def put_tickets(self, channel: str, units: Sequence[UnitInfo], *, wanted: Wanted) -> None:
        """`wanted`: of each unit's key, how many units come of it."""
        ends = self.ends.expect(channel, {unit.age for unit in units}, wanted)
        self.queue(channel).tickets.put(units, ends=ends)

    def open_step(self, entry: OpenStep) -> None:
        """The flow has said all of it."""
        self.ends.open(entry)
        for results in self.results.values():
            results.look_at(Age(entry.branch, entry.number))

    def close_step(self, step: int, *, branch: int) -> None:
        upto = Age(branch, step)
        self.remaking.close_step(step)
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
            news = queue.core.book.worked_on.take_turned()
            turned |= news if not queue.core.is_end else {}
        for unit in chain.from_iterable(queue.core.departures.take_again() for queue in self.queues.values()):
            self.ends.made_again(unit)
        for ticket, age, sealed in self.ends.seal(turned):
            self.through.seal(age, ticket.key, sealed=sealed)
        if turned and self.results:
            self._job.changed.set()  # the flow may wait for them

    # --- looking in ---------------------------------------------------------------------------------------------------
    def full(self) -> list[str]:
        """Producers that keep their share of a channel of one step, in words."""
        specs = (spec for spec in channel_specs(self._job) if spec.name in self.queues)
        return [words for spec in specs for words in self.queues[spec.name].full(spec)]

    def measured(self) -> dict[str, Measured]:
        """How large units have been so far, by channel."""
        return {name: queue.measured for name, queue in self.queues.items()}
