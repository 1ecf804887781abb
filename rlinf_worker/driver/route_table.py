"""Routes as their ends have been told of them: numbers, ends, and what is said again to a worker that comes back.

    wanted ──new──> told under a number of its own ──not wanted──> ended: told, and again to who connects anew, as long
    as both lives go on

A route of weights is told to both ends, one of a cycle to the end that asks. A route that returns has another number.
Called by exchange.py; which routes there should be is routes.py's to say.
"""

from __future__ import annotations

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.channels import messages
from rlinf_worker.driver import translate
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.routes import RouteKey
from rlinf_worker.links.endpoint import Endpoint

Life = tuple[WorkerId, int]


class RouteTable:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._told: frozenset[RouteKey] = frozenset()
        self._numbers: dict[RouteKey, int] = {}  # of routes that are wanted
        self._ended: dict[RouteKey, int] = {}  # of others between lives that go on
        self._next_number = (job.attempt << 32) + 1

    @property
    def told(self) -> list[RouteKey]:
        return sorted(self._told)

    def want(self, wanted: frozenset[RouteKey]) -> None:
        """A route whose worker connects anew is told again as it was, unless it had ended meanwhile."""
        for gone in sorted(self._numbers.keys() - wanted):
            self._ended[gone] = self._numbers[gone]
            for end, peer in self._told_to(gone):
                self._unroute(gone, end, peer)
        self._ended = {route: number for route, number in self._ended.items() if self._may_return(route, wanted)}
        self._numbers = {route: number for route, number in self._numbers.items() if route in wanted}
        for new in sorted(wanted - self._numbers.keys()):
            self._numbers[new] = self._next_number
            self._next_number += 1
        for new in sorted(wanted - self._told):
            self._tell(new)
        self._told = wanted

    def resize(self, wanted: frozenset[RouteKey]) -> None:
        """Another plan is in force: routes that stay are told again, as their credit has changed."""
        kept = self._told
        self.want(wanted)
        for route in sorted(kept & self._told):
            self._tell(route)

    def reconnected(self, worker: WorkerId) -> None:
        """What it was told last may have been lost with its stream: what has ended is said again at once, routes with
        the next look at what is wanted."""
        for route in sorted(self._ended):
            for end, peer in self._told_to(route):
                if end[0] == worker:
                    self._unroute(route, end, peer)
        self._told = frozenset(r for r in self._told if worker not in (r.producer, r.consumer))

    def _may_return(self, route: RouteKey, wanted: frozenset[RouteKey]) -> bool:
        lives = ((route.producer, route.producer_attempt), (route.consumer, route.consumer_attempt))
        records = [(self._job.members.find(worker), attempt) for worker, attempt in lives]
        return route not in wanted and all(found is not None and found.attempt == a for found, a in records)

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
                credit=max(translate.MIN_CREDIT, credit),
                roster=job.roster,
                number=self._numbers[route],
            )
            job.sessions.tell(end, route=said)

    def _told_to(self, route: RouteKey) -> list[tuple[Life, Life]]:
        """(an end, its peer)."""
        producer, consumer = (route.producer, route.producer_attempt), (route.consumer, route.consumer_attempt)
        both = any(route.channel == weights.channel for weights in self._job.topology.weights)
        return [(producer, consumer), (consumer, producer)] if both else [(producer, consumer)]
