"""Which routes there should be, of cycles and of weights, given who is present. Pure and level-triggered: the table
sends the difference between what is wanted and what it has sent, so a route needs no life cycle of its own.

The ends of a cycle are paired by rank, the many-to-one side by `rank % other`, so that a simulator keeps its policy
worker; where anybody may answer, each asker has all of them.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from typing import NamedTuple

from rlinf_api.names import WorkerId
from rlinf_api.placement import Placement
from rlinf_worker.driver.members import Members, WorkerRecord
from rlinf_worker.driver.topology import CycleSpec, Topology

RELAYS = 2  # holders that a late receiver of weights is told of: one may have none itself, or be gone


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
