"""Which routes there should be, of cycles and of weights, given who is present. Level-triggered: the table sends the
difference between what is wanted and what it has sent, so a route needs no life cycle of its own.

The ends of a cycle are paired by rank, the many-to-one side by `rank % other`, so that a simulator keeps its policy
worker; where anybody may answer, each asker has all of them.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.placement import Placement
from rlinf_worker.channels import messages
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.members import Members, WorkerRecord
from rlinf_worker.driver.topology import CycleSpec, Topology
from rlinf_worker.links.endpoint import Endpoint

Life = tuple[WorkerId, int]
MIN_CREDIT: Final = 8
"""Questions unanswered on a route of a cycle at least: one with a few stages must not wait for room."""
RELAYS: Final = 2  # holders that a late receiver of weights is told of: one may have none itself, or be gone


class RouteKey(NamedTuple):
    """`producer`: of a cycle the asker; `consumer`: its answerer."""

    channel: str
    producer: WorkerId
    producer_attempt: int
    consumer: WorkerId
    consumer_attempt: int


def pairs(askers: int, answerers: int, *, anybody: bool = False) -> list[tuple[int, int]]:
    """(rank, rank) of every route of a cycle.

    >>> pairs(4, 2), pairs(1, 3), pairs(2, 2, anybody=True)
    ([(0, 0), (1, 1), (2, 0), (3, 1)], [(0, 0), (0, 1), (0, 2)], [(0, 0), (0, 1), (1, 0), (1, 1)])
    """
    if anybody:
        return [(a, b) for a in range(askers) for b in range(answerers)]
    if askers >= answerers:
        return [(a, a % answerers) for a in range(askers)]
    return [(b % askers, b) for b in range(answerers)]


@functools.lru_cache(maxsize=64)  # asked at every step, with the same numbers until another plan comes
def homes(affinities: int, consumers: int) -> tuple[int, ...]:
    """Which consumer each affinity belongs to: even shares, and one consumer more moves its own share and no other. A
    function of the two numbers alone, so that every driver says the same.

    >>> homes(6, 2), homes(6, 3)
    ((0, 0, 0, 1, 1, 1), (0, 0, 2, 2, 1, 1))
    """
    shares: list[list[int]] = [list(range(affinities))]
    loads = [(-affinities, 0)]  # a heap: the fullest first, the lower number of two
    for new in range(1, consumers):
        share = []
        for _ in range(affinities // (new + 1)):
            load, fullest = heapq.heappop(loads)
            share.append(shares[fullest].pop())
            heapq.heappush(loads, (load + 1, fullest))
        shares.append(share)
        heapq.heappush(loads, (-len(share), new))
    owner = {affinity: consumer for consumer, share in enumerate(shares) for affinity in share}
    return tuple(owner[affinity] for affinity in range(affinities))


@functools.lru_cache(maxsize=64)
def homes_meanwhile(affinities: int, consumers: int, away: frozenset[int]) -> tuple[int, ...]:
    """As `homes`, with those of consumers that are away given to who has fewest; nobody else's move. Where all are
    away, they wait.

    >>> homes_meanwhile(6, 3, frozenset({1})), homes_meanwhile(2, 2, frozenset({0, 1}))
    ((0, 0, 2, 2, 0, 2), (0, 1))
    """
    found = list(homes(affinities, consumers))
    loads = [(found.count(c), c) for c in range(consumers) if c not in away]
    heapq.heapify(loads)
    for affinity, home in enumerate(found):
        if home in away and loads:
            load, found[affinity] = heapq.heappop(loads)
            heapq.heappush(loads, (load + 1, found[affinity]))
    return tuple(found)


def partners(topology: Topology, *, placement: Placement, of: WorkerId) -> set[WorkerId]:
    """Whom a worker has links with under a plan: its ends of cycles, who publishes its weights or gets them, and all of
    the roles at the other ends of its queues."""
    ids = {role: [w.id for w in placement.of_role(role)] for role in {w.role for w in placement.workers}}
    ends: list[tuple[WorkerId, WorkerId]] = []
    for cycle in topology.cycles:
        askers, answerers = ids[cycle.asker], ids[cycle.answerer]
        ends += [(askers[a], answerers[b]) for a, b in pairs(len(askers), len(answerers), anybody=cycle.anybody)]
    for weights in topology.weights:
        ends += [(ids[weights.producer][0], consumer) for consumer in ids[weights.consumer]]
    for queue in topology.queues:
        ends += itertools.product(ids.get(queue.producer, ()), ids[queue.consumer])
    return {worker for both in ends if of in both for worker in both} - {of}


def wanted(
    topology: Topology,
    members: Members,
    *,
    away: frozenset[WorkerId] = frozenset(),
    rehomed: frozenset[str] = frozenset(),
) -> frozenset[RouteKey]:
    """Routes whose two ends are both present. Another of its role has the routes of who is `away`; but those of roles
    whose units are `rehomed` take routes and units together: who has the units has routes of its own."""
    keys = set()
    for cycle in topology.cycles:
        for asker, answerer in _of_cycle(cycle, members, away, rehomed):
            if asker.present and answerer.present:
                keys.add(_key(cycle.channel, asker, answerer))
    for weights in topology.weights:
        # Also for those who are being prepared: the weights are here when their turn comes.
        ahead = (w for w in members.prepared.values() if w.placed.role == weights.consumer)
        others = [*members.of_role(weights.consumer), *sorted(ahead, key=lambda w: w.placed.rank)]
        here = [w for w in _meanwhile(others, away, rehomed) if w.present]
        root = _meanwhile(members.of_role(weights.producer), away, rehomed)[0]
        if root.present:
            keys |= {_key(weights.channel, root, consumer) for consumer in here}
        keys |= {_key(weights.channel, here[a], here[b]) for a, b in relays(len(here))}
    return frozenset(keys)


def concerns_itself_alone(topology: Topology, members: Members, moved: Collection[WorkerId]) -> bool:
    """Whether routes of others stay as they are when these come and go: not where weights have relays among them, nor
    while a plan is prepared."""
    roles = {role for weights in topology.weights for role in (weights.producer, weights.consumer)}
    return not members.prepared and all(
        (record := members.workers.get(worker)) is not None and record.placed.role not in roles for worker in moved
    )


def wanted_of(topology: Topology, members: Members, moved: Collection[WorkerId]) -> frozenset[RouteKey]:
    """As `wanted`, of these workers alone, while nobody is away."""
    keys = set()
    for cycle, worker in itertools.product(topology.cycles, moved):
        me = members.workers[worker]
        if not me.present or me.placed.role not in cycle.roles:
            continue
        asks = me.placed.role == cycle.asker
        others = members.of_role(cycle.answerer if asks else cycle.asker)
        count = len(members.of_role(me.placed.role))
        for number in _opposite(me.placed.rank, count, len(others), anybody=cycle.anybody):
            if (other := others[number]).present:
                keys.add(_key(cycle.channel, *((me, other) if asks else (other, me))))
    return frozenset(keys)


def _opposite(rank: int, mine: int, theirs: int, *, anybody: bool) -> Iterable[int]:
    """Ranks at the other end of the `pairs` that this one is in, whichever end it is.

    >>> [list(_opposite(rank, 4, 2, anybody=False)) for rank in range(4)]
    [[0], [1], [0], [1]]
    >>> [list(_opposite(rank, 2, 4, anybody=False)) for rank in range(2)]
    [[0, 2], [1, 3]]
    """
    if anybody:
        return range(theirs)
    return [rank % theirs] if mine > theirs else range(rank, theirs, mine)


def _of_cycle(
    cycle: CycleSpec, members: Members, away: frozenset[WorkerId], rehomed: frozenset[str]
) -> list[tuple[WorkerRecord, WorkerRecord]]:
    askers, answerers = members.of_role(cycle.asker), members.of_role(cycle.answerer)
    found = pairs(len(askers), len(answerers), anybody=cycle.anybody)
    askers, answerers = _meanwhile(askers, away, rehomed), _meanwhile(answerers, away, rehomed)
    return [(askers[a], answerers[b]) for a, b in found]


def _meanwhile(workers: list[WorkerRecord], away: frozenset[WorkerId], rehomed: frozenset[str]) -> list[WorkerRecord]:
    """By rank, with others in the places of those that are away: the same ones in every cycle of the role."""
    others = [w for w in workers if w.placed.id not in away]
    if not others or len(others) == len(workers) or workers[0].placed.role in rehomed:
        return workers
    turn = itertools.cycle(others)
    return [next(turn) if w.placed.id in away else w for w in workers]


def relays(consumers: int) -> list[tuple[int, int]]:
    """(holder, asker): of whom a consumer of weights may ask a version that its producer cannot give at the moment.
    Links are made only when it asks.

    >>> relays(1), relays(2), relays(3)
    ([], [(1, 0), (0, 1)], [(2, 0), (1, 0), (0, 1), (2, 1), (1, 2), (0, 2)])
    """
    return [((c - d) % consumers, c) for c in range(consumers) for d in range(1, min(consumers, RELAYS + 1))]


def _key(channel: str, producer: WorkerRecord, consumer: WorkerRecord) -> RouteKey:
    return RouteKey(channel, producer.placed.id, producer.attempt, consumer.placed.id, consumer.attempt)


class RouteTable:
    """Routes as their ends have been told of them: numbers, ends, and what is said again to a worker that comes back.

        wanted ──new──> told under a number of its own ──not wanted──> ended: told, and again to who connects anew, as
        long as both lives go on

    A route of weights is told to both ends, one of a cycle to the end that asks. A route that returns has another
    number."""

    def __init__(self, job: Job, *, rehomed: Callable[[], frozenset[str]]) -> None:
        """`rehomed`: roles of which another has units and routes together, while one is away."""
        self._job, self._rehomed = job, rehomed
        self._away: frozenset[WorkerId] = frozenset()  # in whose places are others of their role
        self._told = set[RouteKey]()
        self._of: dict[WorkerId, set[RouteKey]] = {}  # of those that are wanted, by their ends
        self._numbers: dict[RouteKey, int] = {}  # of routes that are wanted
        self._ended: dict[RouteKey, int] = {}  # of others between lives that go on
        self._next_number = (job.attempt << 32) + 1

    def update(self, moved: Collection[WorkerId] | None = None) -> None:
        """To who is present now. `moved`: of whom there is news; None: of anybody."""
        topology, members = self._job.topology, self._job.members
        if moved is not None and not self._away and concerns_itself_alone(topology, members, moved):
            self._want(wanted_of(topology, members, moved), of=moved)
        else:
            self._want(self._wanted())

    def stand_in(self, away: frozenset[WorkerId]) -> None:
        """Others have the routes of these, until they are away no more."""
        self._away = away
        self.update()

    def _wanted(self) -> frozenset[RouteKey]:
        return wanted(self._job.topology, self._job.members, away=self._away, rehomed=self._rehomed())

    def _want(self, wanted: frozenset[RouteKey], *, of: Collection[WorkerId] | None = None) -> None:
        """A route whose worker connects anew is told again as it was, unless it had ended meanwhile. `of`: the routes
        of these workers; None: all."""
        known = set(self._numbers) if of is None else {route for worker in of for route in self._of.get(worker, ())}
        for gone in sorted(known - wanted):
            self._ended[gone] = self._numbers.pop(gone)
            self._told.discard(gone)
            for end in (gone.producer, gone.consumer):
                self._of[end].discard(gone)
            for end_life, peer in self._told_to(gone):
                self._unroute(gone, end_life, peer)
        for new in sorted(wanted - known):
            self._numbers[new] = self._next_number
            self._next_number += 1
            for end in (new.producer, new.consumer):
                self._of.setdefault(end, set()).add(new)
        self._ended = {route: number for route, number in self._ended.items() if self._may_return(route)}
        for new in sorted(wanted - self._told):
            self._tell(new)
        self._told |= wanted

    def resize(self) -> None:
        """Another plan is in force: routes that stay are told again, as their credit has changed."""
        kept = set(self._told)
        self.update()
        for route in sorted(kept & self._told):
            self._tell(route)

    def reconnected(self, worker: WorkerId) -> None:
        """What it was told last may have been lost with its stream: what has ended is said again at once, routes with
        the next look at what is wanted."""
        for route in sorted(self._ended):
            for end, peer in self._told_to(route):
                if end[0] == worker:
                    self._unroute(route, end, peer)
        self._told -= self._of.get(worker, set())

    def _may_return(self, route: RouteKey) -> bool:
        lives = ((route.producer, route.producer_attempt), (route.consumer, route.consumer_attempt))
        records = [(self._job.members.find(worker), attempt) for worker, attempt in lives]
        return route not in self._numbers and all(found is not None and found.attempt == a for found, a in records)

    def _unroute(self, route: RouteKey, end: Life, peer: Life) -> None:
        session, number = self._job.sessions.workers.get(end[0]), self._ended[route]
        if session is not None and session.attempt == end[1]:
            said = pb.Unroute(channel=route.channel, worker=peer[0], attempt=peer[1], number=number)
            self._job.sessions.tell(end[0], unroute=said)

    def _tell(self, route: RouteKey) -> None:
        job, plan = self._job, self._job.placement.channel(route.channel)
        credit = messages.credit(depth=plan.depth, micro_batch=plan.micro_batch)
        for (end, _), (peer, _) in self._told_to(route):
            record = job.members.find(peer)
            endpoint = (record.endpoint if record else None) or Endpoint(worker=peer, attempt=0)
            said = pb.Route(
                channel=route.channel,
                peer=messages.endpoint_to_pb(endpoint),
                outgoing=end == route.producer,
                credit=max(MIN_CREDIT, credit),
                roster=job.roster,
                number=self._numbers[route],
            )
            job.sessions.tell(end, route=said)

    def _told_to(self, route: RouteKey) -> list[tuple[Life, Life]]:
        """(an end, its peer)."""
        producer, consumer = (route.producer, route.producer_attempt), (route.consumer, route.consumer_attempt)
        both = any(route.channel == weights.channel for weights in self._job.topology.weights)
        return [(producer, consumer), (consumer, producer)] if both else [(producer, consumer)]
