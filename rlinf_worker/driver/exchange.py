"""Units and routes: the driver's side of all channels of the flow. Turns what workers say into calls of the pure queue
cores, and what the cores answer into messages.

| called by | about | tells |
|---|---|---|
| core.py, from Channels.Connect | announce, credit, held, acked, drop | producers: held, released; consumers: assign |
| core.py, when somebody comes or goes | redelivery; routes, by route_table.py | both ends (route, unroute) |
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
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver import routes as routing
from rlinf_worker.driver import translate
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.route_table import RouteTable
from rlinf_worker.driver.topology import QueueSpec
from rlinf_worker.queues.matching import QueueCore
from rlinf_worker.queues.rounds import Assignment, RoundAssignment
from rlinf_worker.queues.units import INLINE, Age, UnitId, UnitInfo

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
    def __init__(self, job: Job) -> None:
        self._job, self._members, self._sessions = job, job.members, job.sessions
        self._routes = RouteTable(job)
        self._away: frozenset[WorkerId] = frozenset()  # whose units go to others of their role
        self._queues: dict[str, _Queue] = {}

    def declare(self) -> None:
        """The job knows its channels by now."""
        job = self._job
        for spec in job.topology.queues:
            core = QueueCore(
                spec.channel,
                micro_batch=job.placement.channel(spec.channel).micro_batch,
                rounds=spec.rounds,
                order="lineage" if job.flow_settings.order == "lineage" else "arrival",
                first_round=job.attempt * ROUNDS_PER_STEP + 1,
            )
            core.set_consumers([w.placed.id for w in self._members.of_role(spec.consumer)])
            self._queues[spec.channel] = _Queue(spec, core)
        for spec in job.topology.queues:
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
        spec = self._job.topology.committing
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
        infos = [replace(UnitInfo.from_pb(u), producer=producer) for u in units]
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
            queue, unit = self._queue(taken.channel), UnitInfo.from_pb(taken.unit)
            if not _is_late(unit, after):
                queue.core.restore_held(worker, unit)
        for made in hello.produced:
            self.announce(made.channel, [made.unit], producer=worker, after=after)
        for queue in self._queues.values():
            if queue.spec.consumer == role:
                queue.core.credit(worker, 0)
                self._say_again(queue, worker)
        self._routes.reconnected(worker)

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

    def replan(self) -> None:
        """Another plan is in force: sizes, consumers and routes are its own. No step is open; credit that was stated
        before is forgotten one by one, as workers answer."""
        for queue in self._queues.values():
            queue.core.micro_batch = self._job.placement.channel(queue.spec.channel).micro_batch
            queue.core.set_consumers([w.placed.id for w in self._members.of_role(queue.spec.consumer)])
        self._routes.resize(self._wanted_routes())

    def channel_specs(self) -> list[pb.ChannelSpec]:
        """Every channel, with the sizes of the plan in force."""
        topology = self._job.topology
        sizes = {role: len(self._members.of_role(role)) for role in {q.producer for q in topology.queues}}
        return translate.channel_specs(topology, self._job.placement, roles=sizes)

    def forget_credit(self, worker: WorkerId) -> None:
        for queue in self._queues.values():
            queue.core.credit(worker, 0)

    def update_routes(self) -> None:
        self._routes.want(self._wanted_routes())

    def _wanted_routes(self) -> frozenset[routing.RouteKey]:
        rehomed = frozenset(queue.spec.consumer for queue in self._queues.values() if queue.affinities)
        return routing.wanted(self._job.topology.streams, self._members, away=self._away, rehomed=rehomed)

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
        """How many of these tickets, as the flow has put them, wait for a stand-in."""
        meanwhile, usual = self._homes(queue, self._away), self._homes(queue, frozenset())
        count = sum(u.affinity is not None and meanwhile[u.affinity] != usual[u.affinity] for u in units)
        queue.core.counts["rehomed"] += count
        return count

    def stand_in(self, away: frozenset[WorkerId]) -> int:
        """What belongs to workers that are away goes to the others of their role, until they are not. Tickets: an
        affinity is for what a consumer has made for itself, which one that is away has lost; those that others have in
        hand stay with them. And routes. How many tickets wait for somebody else now."""
        self._away, moved = away, 0
        self.update_routes()
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
                    kept[entry.unit.age].append(entry.unit.size_bytes)
                for age in sorted(kept)[1 if spec.until_commit else 0 :]:  # the oldest gets in whole: queues.given
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
        return self._routes.told


def _is_late(unit: UnitInfo, after: PolicyVersion) -> bool:
    """It belongs to a dead branch, or to a step that has committed."""
    return unit.branch < after.branch or unit.step <= after.number
