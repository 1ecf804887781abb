"""Which stream routes there should be, given who is present. Pure and level-triggered: the core sends the difference
between what is wanted and what it has sent, so a route needs no life cycle of its own.

Ends are paired by rank, the same way in both directions: the many-to-one side by `rank % other`, so that in a cycle a
simulator and its policy worker have one link.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from rlinf_api.names import WorkerId
from rlinf_api.placement import Placement
from rlinf_worker.driver.members import Members, WorkerRecord
from rlinf_worker.driver.topology import StreamSpec

RELAYS = 2  # holders that a late receiver of weights is told of: one may have none itself, or be gone


class RouteKey(NamedTuple):
    channel: str
    producer: WorkerId
    producer_attempt: int
    consumer: WorkerId
    consumer_attempt: int


def pairs(producers: int, consumers: int, *, first_rank_only: bool = False) -> list[tuple[int, int]]:
    """(producer rank, consumer rank) of every route.

    >>> pairs(4, 2), pairs(1, 3), pairs(2, 2, first_rank_only=True)
    ([(0, 0), (1, 1), (2, 0), (3, 1)], [(0, 0), (0, 1), (0, 2)], [(0, 0), (0, 1)])
    """
    if first_rank_only:
        return [(0, c) for c in range(consumers)]
    if producers >= consumers:
        return [(p, p % consumers) for p in range(producers)]
    return [(c % producers, c) for c in range(consumers)]


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


def partners(
    streams: Sequence[StreamSpec], queues: Sequence[tuple[str, str]], *, placement: Placement, of: WorkerId
) -> set[WorkerId]:
    """Whom a worker has links with under a plan: its ends of streams, and all of the roles at the other ends of its
    queues, given as (producer, consumer)."""
    ids = {role: [w.id for w in placement.of_role(role)] for role in {w.role for w in placement.workers}}
    found: set[WorkerId] = set()
    for stream in streams:
        producers, consumers = ids[stream.producer], ids[stream.consumer]
        for p, c in pairs(len(producers), len(consumers), first_rank_only=stream.first_rank_only):
            if of in (producers[p], consumers[c]):
                found |= {producers[p], consumers[c]}
    for producer, consumer in queues:
        if of in ids.get(producer, ()):
            found.update(ids[consumer])
        elif of in ids[consumer]:
            found.update(ids.get(producer, ()))
    return found - {of}


def wanted(
    streams: Sequence[StreamSpec],
    members: Members,
    *,
    away: frozenset[WorkerId] = frozenset(),
    rehomed: frozenset[str] = frozenset(),
) -> frozenset[RouteKey]:
    """Routes whose two ends are both present. Another of its role has the routes of who is `away`; but those of roles
    whose units are `rehomed` take routes and units together: who has the units has routes of its own."""
    keys = set()
    for stream in streams:
        producers, consumers = members.of_role(stream.producer), members.of_role(stream.consumer)
        if stream.first_rank_only:  # weights also for those who are being prepared: here when their turn comes
            ahead = (w for w in members.prepared.values() if w.placed.role == stream.consumer)
            consumers = [*consumers, *sorted(ahead, key=lambda w: w.placed.rank)]
        all_pairs = pairs(len(producers), len(consumers), first_rank_only=stream.first_rank_only)
        producers, consumers = _meanwhile(producers, away, rehomed), _meanwhile(consumers, away, rehomed)
        for p, c in all_pairs:
            if producers[p].present and consumers[c].present:
                keys.add(_key(stream, producers[p], consumers[c]))
        if stream.first_rank_only:
            here = [c for c in consumers if c.present]
            keys |= {_key(stream, here[a], here[b]) for a, b in relays(len(here))}
    return frozenset(keys)


def _meanwhile(workers: list[WorkerRecord], away: frozenset[WorkerId], rehomed: frozenset[str]) -> list[WorkerRecord]:
    """By rank, with others in the places of those that are away: the same ones in every stream of the role."""
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


def _key(stream: StreamSpec, producer: WorkerRecord, consumer: WorkerRecord) -> RouteKey:
    return RouteKey(stream.channel, producer.placed.id, producer.attempt, consumer.placed.id, consumer.attempt)
