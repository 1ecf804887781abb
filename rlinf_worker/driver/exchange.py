"""All queues and routes of the flow: the driver's side. What concerns one queue alone is driver.flow_queue's; here is
what goes over several, and the routes of cycles and weights.

| called by | about | tells |
|---|---|---|
| core.py, when somebody comes or goes | redelivery; routes, by route_table.py | their ends (route, unroute) |
| core.py, from Channels.Connect | what a filter dropped, what a peer does not have | producers: released |
| the flow | tickets, steps | consumers |
"""

from __future__ import annotations

from collections.abc import Iterable

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import InvariantBroken, UserError
from rlinf_api.lease_sets import Measured
from rlinf_api.names import WorkerId
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver import routes as routing
from rlinf_worker.driver import translate
from rlinf_worker.driver.flow_queue import FlowQueue
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.route_table import RouteTable
from rlinf_worker.queues.units import Age, UnitId, UnitInfo, uids_of


class Exchange:
    def __init__(self, job: Job) -> None:
        self._job, self._members = job, job.members
        self._routes = RouteTable(job)
        self._away: frozenset[WorkerId] = frozenset()  # whose units go to others of their role
        self.queues: dict[str, FlowQueue] = {}

    def declare(self) -> None:
        """The job knows its channels by now."""
        for spec in self._job.topology.queues:
            self.queues[spec.channel] = FlowQueue(self._job, spec)
        for name, first in self.queues.items():
            if parts := [queue.core for queue in self.queues.values() if queue.spec.joins == name]:
                first.core.parts = parts

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

    def _of_the_gang(self) -> list[FlowQueue]:
        """Where the units of a step end: the committing queue, and those that join it."""
        last = self.committing
        return [last, *(queue for queue in self.queues.values() if queue.spec.joins == last.spec.channel)]

    # --- what workers say ---------------------------------------------------------------------------------------------
    def dropped(self, worker: WorkerId, message: pb.Drop) -> None:
        """The step does not wait for a unit of that key; the gang hears of it with the last round."""
        queue, last = self.queue(message.channel), self.committing
        done = queue.core.dropped(worker, branch=message.branch, key=message.key)
        queue.tell_producers(done, kind="released")
        for unit in done:
            if queue is not last and last.core.knows(unit.id):
                continue  # made by another before
            for any_queue in self.queues.values():
                any_queue.tickets.end(unit.id)
            for end in self._of_the_gang():
                end.tell_producers(end.core.end(unit), kind="released")

    def reconnected(self, worker: WorkerId, role: str, hello: pb.Hello, *, after: PolicyVersion) -> None:
        """Everything a worker holds on its next connection; what it was told may have been lost with its last stream
        and is said again."""
        over = Age.at(after)
        for taken in hello.taken:
            queue, unit = self.queue(taken.channel), UnitInfo.from_pb(taken.unit)
            if unit.age > over:
                queue.core.restore_held(worker, unit)
        for made in hello.produced:
            self.queue(made.channel).announced([made.unit], producer=worker, after=over)
        for queue in self.queues.values():
            if queue.spec.consumer == role:
                queue.reconnected(worker)
        self._routes.reconnected(worker)

    def peer_lost(self, worker: WorkerId, peer: WorkerId, message: pb.PeerLost) -> None:
        """A worker cannot fetch from a peer, which is alive. What the peer keeps is handed out again; a release would
        acknowledge what it was made from. What it does not have is made again."""
        keys = message.units if message.HasField("units") else None
        named = set(uids_of(keys)) if keys is not None else None
        for queue in self.queues.values() if keys is None else [self.queue(keys.channel)]:
            if message.missing:
                self._make_again(queue.core.missing(worker, peer, units=named))
            else:
                queue.core.hand_back(worker, peer, units=named)

    # --- who comes and goes -------------------------------------------------------------------------------------------
    def gone(self, worker: WorkerId, role: str) -> bool:
        """Its units go elsewhere. True where it was a rank of a gang: the caller forms the gang anew."""
        for queue in self.queues.values():
            if queue.spec.producer == role:
                self._make_again(queue.core.remove_producer(worker))
            if queue.spec.consumer == role:
                self._make_again(queue.core.remove_consumer(worker))
        return any(queue.spec.consumer == role and queue.spec.rounds for queue in self.queues.values())

    def _make_again(self, lost: Iterable[UnitInfo]) -> None:
        """The tickets from which lost units were made wait again."""
        wanted = {UnitId(unit.branch, parent) for unit in lost for parent in unit.parents}
        for queue in self.queues.values():
            queue.tickets.make_again(wanted)
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
        """Every channel, with the sizes of the plan in force."""
        topology = self._job.topology
        sizes = {role: len(self._members.of_role(role)) for role in {q.producer for q in topology.queues}}
        return translate.channel_specs(topology, self._job.placement, roles=sizes)

    # --- routes -------------------------------------------------------------------------------------------------------
    def update_routes(self) -> None:
        self._routes.want(self._wanted_routes())

    def _wanted_routes(self) -> frozenset[routing.RouteKey]:
        rehomed = frozenset(queue.spec.consumer for queue in self.queues.values() if queue.tickets.affinities)
        return routing.wanted(self._job.topology, self._members, away=self._away, rehomed=rehomed)

    @property
    def routes(self) -> list[routing.RouteKey]:
        return self._routes.told

    # --- what the flow says -------------------------------------------------------------------------------------------
    def put_tickets(self, channel: str, units: Iterable[UnitInfo]) -> None:
        self.queue(channel).tickets.put(units, ends=[end.core for end in self._of_the_gang()])

    def open_step(self, step: int, *, branch: int, keys: Iterable[str]) -> None:
        self.committing.core.steps.open(Age(branch, step), keys)

    def close_step(self, step: int, *, branch: int) -> None:
        gangs, upto = self._of_the_gang(), Age(branch, step)
        for queue in self.queues.values():
            if queue in gangs:  # nobody takes what still waits there
                queue.forget(upto, waiting_only=True)
            else:
                queue.core.close(upto)
            queue.close_step(upto)

    def forget_committed(self, version: PolicyVersion) -> None:
        """A new driver has learnt what has committed, after it was told of units that are older."""
        for queue in self.queues.values():
            queue.forget(Age.at(version))

    def match(self) -> None:
        for queue in self.queues.values():
            queue.match(self.queues[queue.spec.joins].core if queue.spec.joins else None)

    # --- looking in ---------------------------------------------------------------------------------------------------
    def full(self) -> list[str]:
        """Producers that keep their share of a channel of one step, in words."""
        specs = (spec for spec in self.channel_specs() if spec.name in self.queues)
        return [words for spec in specs for words in self.queues[spec.name].full(spec)]

    def measured(self) -> dict[str, Measured]:
        """How large units have been so far, by channel."""
        return {name: queue.measured for name, queue in self.queues.items()}
