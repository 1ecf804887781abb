"""Units and routes: the driver's side of all channels of the flow. Turns what workers say into calls of the pure queue
cores, and what the cores answer into messages.

| called by | about | tells |
|---|---|---|
| core.py, from Channels.Connect | announce, credit, held, acked, drop | producers: held, released; consumers: assign |
| core.py, when somebody comes or goes | routes, redelivery | both ends (route, unroute) |
| the flow | tickets, steps | consumers |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import InvariantBroken, UserError
from rlinf_api.lease_sets import Measured
from rlinf_api.names import WorkerId
from rlinf_api.plan import Placement
from rlinf_worker.channels import messages
from rlinf_worker.channels.book import Age
from rlinf_worker.channels.matching import QueueCore
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.channels.rounds import Assignment, RoundAssignment
from rlinf_worker.channels.units import INLINE, UnitId, UnitInfo
from rlinf_worker.driver import routes as routing
from rlinf_worker.driver import translate
from rlinf_worker.driver.flow import QueueSpec, Topology
from rlinf_worker.driver.members import Members
from rlinf_worker.driver.sessions import Sessions
from rlinf_worker.links.endpoint import Endpoint

ROUNDS_PER_STEP: Final = 100_000  # numbers of one driver attempt; 21,000 attempts fit into the int32 of the wire


@dataclass(slots=True, eq=False)
class _Queue:
    spec: QueueSpec
    core: QueueCore
    tickets: dict[tuple[int, str], UnitInfo] = field(default_factory=dict)  # of open steps, where the driver produces
    affinities: int = 0  # that the flow has named: 0 up to this
    measured: Measured = field(default_factory=Measured)
    by_step: dict[int, dict[str, int]] = field(default_factory=dict)  # bytes of what was made so far, by open step

    def measure(self, made: Iterable[UnitInfo]) -> None:
        """By key: what is lost and made again is one unit."""
        for unit in made:
            self.by_step.setdefault(unit.step, {})[unit.key] = unit.size_bytes
            if unit.size_bytes > self.measured.largest_bytes:
                self.measured = replace(self.measured, largest_bytes=unit.size_bytes)

    def step_over(self, number: int) -> None:
        for step in [step for step in self.by_step if step <= number]:
            sizes = self.by_step.pop(step).values()
            most = self.measured
            units, size = max(len(sizes), most.step_units), max(sum(sizes), most.step_bytes)
            self.measured = replace(most, step_units=units, step_bytes=size)


class Exchange:
    def __init__(
        self,
        topology: Topology,
        placement: Placement,
        *,
        members: Members,
        sessions: Sessions,
        order: str,
        attempt: int,
    ) -> None:
        """`attempt`: of the driver."""
        self.topology, self._placement, self._members, self._sessions = topology, placement, members, sessions
        self._routes: frozenset[routing.RouteKey] = frozenset()
        self._numbers: dict[routing.RouteKey, int] = {}  # of routes that are wanted
        self._ended: dict[routing.RouteKey, int] = {}  # of others between lives that go on
        self._next_number = (attempt << 32) + 1
        self._away: frozenset[WorkerId] = frozenset()  # whose units go to others of their role
        self._queues: dict[str, _Queue] = {}
        for spec in topology.queues:
            core = QueueCore(
                spec.channel,
                micro_batch=placement.channel(spec.channel).micro_batch,
                rounds=spec.rounds,
                order="lineage" if order == "lineage" else "arrival",
                first_round=attempt * ROUNDS_PER_STEP + 1,
            )
            core.set_consumers([w.placed.id for w in members.of_role(spec.consumer)])
            self._queues[spec.channel] = _Queue(spec, core)
        for spec in topology.queues:
            if spec.joins:
                self._join(self._queues[spec.joins].core)

    def _join(self, first: QueueCore) -> None:
        parts = [q.core for q in self._queues.values() if q.spec.joins == first.name]
        first.is_ready = lambda uid: all(part.knows(uid.branch, uid.key) for part in parts)

    def _queue(self, channel: str) -> _Queue:
        queue = self._queues.get(channel)
        if queue is None:
            raise UserError(f"{channel!r} is no queue of this flow", wanted=f"one of {', '.join(self._queues)}")
        return queue

    @property
    def _committing(self) -> _Queue:
        spec = self.topology.committing
        if spec is None:
            raise InvariantBroken("a flow without a committing queue was started")
        return self._queues[spec.channel]

    def _of_the_gang(self) -> list[_Queue]:
        """Where the units of a step end: the committing queue, and those that join it."""
        last = self._committing
        return [last, *(queue for queue in self._queues.values() if queue.spec.joins == last.spec.channel)]

    # --- what workers say -------------------------------------------------------------------------------------------
    def credit(self, worker: WorkerId, message: pb.Credit) -> None:
        self._queue(message.channel).core.credit(worker, message.units)

    def announce(self, channel: str, units: Iterable[pb.Unit], *, producer: WorkerId, after: PolicyVersion) -> None:
        """Units of a dead branch or of a committed step are released at once, as are duplicates."""
        queue = self._queue(channel)
        infos = [replace(messages.unit_from_pb(u), producer=producer) for u in units]
        late = [_is_late(u, after) for u in infos]
        queue.measure(
            u for u, is_late in zip(infos, late, strict=True) if not is_late and not queue.core.knows(u.branch, u.key)
        )
        duplicates = queue.core.announce(u for u, is_late in zip(infos, late, strict=True) if not is_late)
        gone = [u for u, is_late in zip(infos, late, strict=True) if is_late]
        queue.core.counts["late"] += len(gone)
        self._tell_producers(queue, [*gone, *duplicates], kind="released")

    def held(self, worker: WorkerId, message: pb.Keys) -> None:
        queue = self._queue(message.channel)
        news = queue.core.held(worker, branch=message.branch, keys=message.keys)
        self._tell_producers(queue, news, kind="held")

    def acked(self, worker: WorkerId, message: pb.Keys) -> None:
        queue = self._queue(message.channel)
        done = queue.core.acked(worker, branch=message.branch, keys=message.keys)
        self._tell_producers(queue, done, kind="released")

    def dropped(self, worker: WorkerId, message: pb.Drop) -> None:
        """The step does not wait for a unit of that key; the gang hears of it with the last round."""
        queue = self._queue(message.channel)
        done = queue.core.dropped(worker, branch=message.branch, key=message.key)
        self._tell_producers(queue, done, kind="released")
        for unit in done:
            self._end(unit, dropped_from=queue)

    def _end(self, unit: UnitInfo, *, dropped_from: _Queue) -> None:
        last = self._committing
        if dropped_from is not last and last.core.knows(unit.branch, unit.key):
            return  # made by another before
        for queue in self._queues.values():
            queue.tickets.pop((unit.branch, unit.key), None)
        for queue in self._of_the_gang():
            self._tell_producers(queue, queue.core.end(unit), kind="released")

    def reconnected(self, worker: WorkerId, role: str, hello: pb.Hello, *, after: PolicyVersion) -> None:
        """Everything a worker holds on its next connection. Its credit is stated anew; what it was given and does not
        hold may have been lost with its last stream and is said again."""
        for taken in hello.taken:
            queue, unit = self._queue(taken.channel), messages.unit_from_pb(taken.unit)
            if not _is_late(unit, after):
                queue.core.restore_held(worker, unit)
        for made in hello.produced:
            self.announce(made.channel, [made.unit], producer=worker, after=after)
        for queue in self._queues.values():
            if queue.spec.consumer == role:
                queue.core.credit(worker, 0)
                self._say_again(queue, worker)
        for route in sorted(self._ended):  # the word may have been lost with its last stream
            ends = ((route.producer, route.producer_attempt), (route.consumer, route.consumer_attempt))
            for end, peer in (ends, ends[::-1]):
                if end[0] == worker:
                    self._unroute(route, end, peer)
        self._routes = frozenset(r for r in self._routes if worker not in (r.producer, r.consumer))

    def _say_again(self, queue: _Queue, worker: WorkerId) -> None:
        units, rounds = queue.core.assigned_to(worker)
        if units:
            self._assign(queue, Assignment(consumer=worker, units=tuple(units)))
        for formed in rounds:
            self._round(queue, formed)

    def peer_lost(self, worker: WorkerId, peer: WorkerId, message: pb.PeerLost) -> None:
        """A worker cannot fetch from a peer, which is alive. What the peer keeps is handed out again; a release would
        acknowledge what it was made from. What it does not have is made again."""
        keys = message.units if message.HasField("units") else None
        named = {UnitId(keys.branch, key) for key in keys.keys} if keys is not None else None
        for queue in self._queues.values() if keys is None else [self._queue(keys.channel)]:
            if message.missing:
                self._make_again(queue.core.missing(worker, peer, units=named))
            else:
                queue.core.hand_back(worker, peer, units=named)

    def forget_committed(self, version: PolicyVersion) -> None:
        """A new driver has learnt what has committed, after it was told of units that are older."""
        for queue in self._queues.values():
            late = queue.core.forget_committed(version.number, branch=version.branch)
            self._tell_producers(queue, late, kind="released")

    def _tell_producers(self, queue: _Queue, units: Iterable[UnitInfo], *, kind: str) -> None:
        grouped: dict[tuple[WorkerId, int], list[str]] = {}
        for unit in units:
            if unit.producer != INLINE:
                grouped.setdefault((unit.producer, unit.branch), []).append(unit.key)
        for (producer, branch), keys in grouped.items():
            self._sessions.tell(producer, **{kind: pb.Keys(channel=queue.spec.channel, keys=keys, branch=branch)})

    # --- who comes and goes -----------------------------------------------------------------------------------------
    def gone(self, worker: WorkerId, role: str) -> bool:
        """Its units go elsewhere. True where it was a rank of a gang: the caller forms the gang anew."""
        gang = False
        for queue in self._queues.values():
            if queue.spec.producer == role:
                self._make_again(queue.core.remove_producer(worker))
            if queue.spec.consumer == role:
                self._make_again(queue.core.remove_consumer(worker))
                gang = gang or queue.spec.rounds
        return gang

    def _make_again(self, lost: Iterable[UnitInfo]) -> None:
        """The tickets from which lost units were made wait again."""
        wanted = {(unit.branch, parent) for unit in lost for parent in unit.parents}
        for queue in self._queues.values():
            for ticket in self._at_home(queue, (queue.tickets[ticket] for ticket in wanted & queue.tickets.keys())):
                queue.core.requeue(ticket)
            queue.core.expect_again(wanted)

    def cancel(self, branch: int) -> None:
        """Everything of this branch and older ones is void."""
        for queue in self._queues.values():
            self._tell_producers(queue, queue.core.cancel(branch), kind="released")
            queue.tickets.clear()
            queue.by_step.clear()
            for record in self._members.of_role(queue.spec.consumer):
                self._sessions.tell(record.placed.id, cancel=pb.Cancel(channel=queue.spec.channel, branch=branch))

    def replan(self, placement: Placement, *, roster: int) -> None:
        """Another plan is in force: sizes, consumers and routes are its own. No step is open; credit that was stated
        before is forgotten one by one, as workers answer."""
        self._placement = placement
        for queue in self._queues.values():
            queue.core.micro_batch = placement.channel(queue.spec.channel).micro_batch
            queue.core.set_consumers([w.placed.id for w in self._members.of_role(queue.spec.consumer)])
        kept = self._routes
        self.update_routes(roster=roster)
        for route in sorted(kept & self._routes):  # told again, only the credit changes
            self._tell_route(route, roster=roster)

    def channel_specs(self) -> list[pb.ChannelSpec]:
        """Every channel, with the sizes of the plan in force."""
        roles = {q.producer for q in self.topology.queues}
        sizes = {role: len(self._members.of_role(role)) for role in roles}
        return translate.channel_specs(self.topology, self._placement, roles=sizes)

    def forget_credit(self, worker: WorkerId) -> None:
        for queue in self._queues.values():
            queue.core.credit(worker, 0)

    def update_routes(self, *, roster: int) -> None:
        """A route whose worker connects anew is told again as it was, unless it had ended meanwhile."""
        rehomed = frozenset(queue.spec.consumer for queue in self._queues.values() if queue.affinities)
        wanted = routing.wanted(self.topology.streams, self._members, away=self._away, rehomed=rehomed)
        for gone in sorted(self._numbers.keys() - wanted):
            self._ended[gone] = self._numbers[gone]
            self._unroute(gone, (gone.producer, gone.producer_attempt), (gone.consumer, gone.consumer_attempt))
            self._unroute(gone, (gone.consumer, gone.consumer_attempt), (gone.producer, gone.producer_attempt))
        self._ended = {route: number for route, number in self._ended.items() if self._may_return(route, wanted)}
        self._numbers = {route: number for route, number in self._numbers.items() if route in wanted}
        for new in sorted(wanted - self._numbers.keys()):
            self._numbers[new] = self._next_number
            self._next_number += 1
        for new in sorted(wanted - self._routes):
            self._tell_route(new, roster=roster)
        self._routes = wanted

    def _may_return(self, route: routing.RouteKey, wanted: frozenset[routing.RouteKey]) -> bool:
        ends = ((route.producer, route.producer_attempt), (route.consumer, route.consumer_attempt))
        records = [(self._members.find(worker), attempt) for worker, attempt in ends]
        return route not in wanted and all(found is not None and found.attempt == a for found, a in records)

    def _unroute(self, route: routing.RouteKey, end: tuple[WorkerId, int], peer: tuple[WorkerId, int]) -> None:
        session, number = self._sessions.workers.get(end[0]), self._ended[route]
        if session is not None and session.attempt == end[1]:
            said = pb.Unroute(channel=route.channel, worker=peer[0], attempt=peer[1], number=number)
            self._sessions.tell(end[0], unroute=said)

    def _tell_route(self, route: routing.RouteKey, *, roster: int) -> None:
        """Both ends."""
        plan = self._placement.channel(route.channel)
        for end, peer in ((route.producer, route.consumer), (route.consumer, route.producer)):
            record = self._members.find(peer)
            endpoint = (record.endpoint if record else None) or Endpoint(worker=peer, attempt=0)
            said = pb.Route(
                channel=route.channel,
                peer=messages.endpoint_to_pb(endpoint),
                outgoing=end == route.producer,
                credit=max(
                    translate.MIN_STREAM_CREDIT, messages.credit(depth=plan.depth, micro_batch=plan.micro_batch)
                ),
                roster=roster,
                number=self._numbers[route],
            )
            self._sessions.tell(end, route=said)

    # --- what the flow says -----------------------------------------------------------------------------------------
    def put_tickets(self, channel: str, units: Iterable[UnitInfo]) -> None:
        """Idempotent: a ticket whose unit is already made (a new driver puts all of a step again) is not handed out."""
        queue, ends = self._queue(channel), [last.core for last in self._of_the_gang()]
        units, fresh = list(units), []
        queue.affinities = max([queue.affinities, *(u.affinity + 1 for u in units if u.affinity is not None)])
        for unit in units:
            queue.tickets[(unit.branch, unit.key)] = unit
            if not all(end.knows(unit.branch, unit.key) for end in ends):
                fresh.append(unit)
        self._count_rehomed(queue, [unit for unit in fresh if not queue.core.knows(unit.branch, unit.key)])
        queue.core.announce(self._at_home(queue, fresh))

    def _at_home(self, queue: _Queue, units: Iterable[UnitInfo]) -> list[UnitInfo]:
        """With the consumer that each belongs to, or that stands in for it, where the flow's affinity was."""
        homes = self._homes(queue, self._away)
        return [u if u.affinity is None else replace(u, affinity=homes[u.affinity]) for u in units]

    def _homes(self, queue: _Queue, away: frozenset[WorkerId]) -> tuple[int, ...]:
        consumers = [worker.placed.id for worker in self._members.of_role(queue.spec.consumer)]
        indices = frozenset(index for index, worker in enumerate(consumers) if worker in away)
        return routing.homes_meanwhile(queue.affinities, len(consumers), indices)

    def _count_rehomed(self, queue: _Queue, units: Iterable[UnitInfo]) -> int:
        """Of tickets as the flow has put them: how many wait for a stand-in."""
        meanwhile, usual = self._homes(queue, self._away), self._homes(queue, frozenset())
        count = sum(u.affinity is not None and meanwhile[u.affinity] != usual[u.affinity] for u in units)
        queue.core.counts["rehomed"] += count
        return count

    def stand_in(self, away: frozenset[WorkerId], *, roster: int) -> int:
        """What belongs to workers that are away goes to the others of their role, until they are not. Tickets: an
        affinity is for what a consumer has made for itself, which one that is away has lost; those that others have in
        hand stay with them. And routes. How many tickets wait for somebody else now."""
        self._away, moved = away, 0
        self.update_routes(roster=roster)
        for queue in self._queues.values():
            if queue.affinities:
                waiting = {unit.id for unit in queue.core.rehome(self._at_home(queue, queue.tickets.values()))}
                moved += self._count_rehomed(queue, [u for u in queue.tickets.values() if u.id in waiting])
        return moved

    def open_step(self, step: int, *, branch: int, keys: Iterable[str]) -> None:
        self._committing.core.open_step(step, branch=branch, keys=keys)

    def close_step(self, step: int, *, branch: int) -> None:
        gangs = self._of_the_gang()
        for queue in self._queues.values():
            if queue in gangs:  # nobody takes what still waits there
                unexpected = queue.core.forget_committed(step, branch=branch, waiting_only=True)
                self._tell_producers(queue, unexpected, kind="released")
            else:
                queue.core.close_step(step, branch=branch)
            queue.step_over(step)
            for ticket in [t for t, unit in queue.tickets.items() if unit.step <= step]:
                del queue.tickets[ticket]

    # --- matching ---------------------------------------------------------------------------------------------------
    def match(self) -> None:
        for queue in self._queues.values():
            if queue.spec.joins:
                for given in queue.core.follow(self._queues[queue.spec.joins].core):
                    self._assign(queue, given)
            elif queue.spec.rounds:
                for formed in queue.core.match_rounds():
                    self._round(queue, formed)
            else:
                for given in queue.core.match():
                    self._assign(queue, given)

    def _round(self, queue: _Queue, formed: RoundAssignment) -> None:
        for part in formed.parts:
            message = translate.round_to_pb(queue.spec.channel, formed, part, self._members)
            self._sessions.tell(part.consumer, round=message)

    def _assign(self, queue: _Queue, given: Assignment) -> None:
        message = translate.assign_to_pb(queue.spec.channel, given, self._members)
        self._sessions.tell(given.consumer, assign=message)

    # --- looking in -------------------------------------------------------------------------------------------------
    def waiting_for(self, step: int) -> list[str]:
        return self._committing.core.waiting_for(step)

    def full(self) -> list[str]:
        """Producers that keep their share of a channel of one step, in words: what else they make of it has to wait."""
        found = []
        for spec in (spec for spec in self.channel_specs() if spec.name in self._queues):
            book = self._queues[spec.name].core.book
            for record in self._members.of_role(spec.producer):
                kept = defaultdict[Age, list[int]](list)
                for entry in book.made_by(record.placed.id):
                    kept[entry.age].append(entry.unit.size_bytes)
                for age in sorted(kept)[1 if spec.until_commit else 0 :]:  # the oldest gets in whole: channels.queue
                    units, nbytes = len(kept[age]), sum(kept[age])
                    if units >= spec.capacity_units or nbytes >= spec.capacity_bytes:
                        found.append(
                            f"{record.placed.id} keeps {units} units, {nbytes} bytes, of step {age.step} in channel "
                            f"{spec.name!r}, whose capacity gives it {spec.capacity_units}, {spec.capacity_bytes}"
                        )
        return found

    def refused(self, channel: str) -> None:
        """A ticket of the flow's that is not what the flow declares."""
        self._queue(channel).core.counts["refused"] += 1

    def counts(self) -> list[tuple[str, dict[str, int], int]]:
        """(channel, units by what became of them, depth)."""
        return [(name, dict(q.core.counts), q.core.depth) for name, q in self._queues.items()]

    def levels(self) -> list[tuple[str, int, int]]:
        """(channel, units that no consumer has yet, payload bytes of all its units)."""
        return [(name, q.core.waiting, q.core.queued_bytes) for name, q in self._queues.items()]

    def measured(self) -> dict[str, Measured]:
        """How large units have been so far, by channel."""
        return {name: queue.measured for name, queue in self._queues.items()}

    @property
    def routes(self) -> list[routing.RouteKey]:
        return sorted(self._routes)


def _is_late(unit: UnitInfo, after: PolicyVersion) -> bool:
    """Of a dead branch, or of a step that has committed."""
    return unit.branch < after.branch or unit.step <= after.number
