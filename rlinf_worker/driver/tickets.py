"""What the flow has put into one queue for its open steps, and whose each ticket is. For: driver.flow_queue.

A ticket with an affinity belongs to one consumer; while that is away, another of its role stands in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rlinf_api.names import WorkerId
from rlinf_worker.driver import routes as routing
from rlinf_worker.driver.members import Members
from rlinf_worker.queues.core import QueueCore
from rlinf_worker.queues.units import Age, UnitId, UnitInfo


class Tickets:
    def __init__(self, core: QueueCore, members: Members, *, role: str) -> None:
        self._core, self._members, self._role = core, members, role
        self._put: dict[UnitId, UnitInfo] = {}  # as the flow has
        self._away: frozenset[WorkerId] = frozenset()
        self.affinities = 0  # that the flow has named: 0 up to this

    def put(self, units: Iterable[UnitInfo], *, ends: Iterable[QueueCore]) -> None:
        """Idempotent: a ticket whose unit is at all its ends already (a new driver puts all of a step again) is not
        handed out."""
        units = list(units)
        self._put.update((unit.id, unit) for unit in units)
        self.affinities = max([self.affinities, *(u.affinity + 1 for u in units if u.affinity is not None)])
        fresh = [unit for unit in units if not all(end.knows(unit.id) for end in ends)]
        self._count_rehomed(unit for unit in fresh if not self._core.knows(unit.id))
        self._core.announce(self._at_home(fresh))

    def make_again(self, uids: Iterable[UnitId]) -> None:
        for ticket in self._at_home(self._put[uid] for uid in uids if uid in self._put):
            self._core.requeue(ticket)

    def stand_in(self, away: frozenset[WorkerId]) -> int:
        """How many tickets wait for somebody else now; those that others have in hand stay with them."""
        self._away = away
        if not self.affinities:
            return 0
        waiting = {unit.id for unit in self._core.rehome(self._at_home(self._put.values()))}
        return self._count_rehomed(unit for unit in self._put.values() if unit.id in waiting)

    def end(self, uid: UnitId) -> None:
        self._put.pop(uid, None)

    def close(self, upto: Age) -> None:
        self._put = {uid: unit for uid, unit in self._put.items() if unit.age > upto}

    def _at_home(self, units: Iterable[UnitInfo]) -> list[UnitInfo]:
        """With the consumer that each belongs to, or that stands in for it, where the flow's affinity was."""
        homes = self._homes(self._away)
        return [u if u.affinity is None else replace(u, affinity=homes[u.affinity]) for u in units]

    def _homes(self, away: frozenset[WorkerId]) -> tuple[int, ...]:
        consumers = [worker.placed.id for worker in self._members.of_role(self._role)]
        indices = frozenset(index for index, worker in enumerate(consumers) if worker in away)
        return routing.homes_meanwhile(self.affinities, len(consumers), indices)

    def _count_rehomed(self, units: Iterable[UnitInfo]) -> int:
        """How many of these, as the flow has put them, wait for a stand-in."""
        meanwhile, usual = self._homes(self._away), self._homes(frozenset())
        count = sum(u.affinity is not None and meanwhile[u.affinity] != usual[u.affinity] for u in units)
        self._core.counts["rehomed"] += count
        return count
