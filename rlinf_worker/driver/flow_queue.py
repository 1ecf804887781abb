"""One queue of the flow, as the driver runs it: what workers say of it goes to its pure core (rlinf_worker.queues), and
what the core answers to workers. For: driver.exchange, which has all of them, and driver.core.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from rlinf_api import conditions
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_api.lease_sets import Measured
from rlinf_api.names import WorkerId
from rlinf_worker.channels import labels, messages
from rlinf_worker.channels.protocol import PolicyVersion, oldest_version
from rlinf_worker.driver import routes as routing
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.members import Members
from rlinf_worker.driver.partials import Partials
from rlinf_worker.driver.sessions import Sessions
from rlinf_worker.driver.topology import QueueSpec
from rlinf_worker.queues.core import QueueCore
from rlinf_worker.queues.steps import RoundAssignment
from rlinf_worker.queues.units import INLINE, Age, UnitId, UnitInfo, uids_of

ROUNDS_PER_STEP: Final = 100_000  # numbers of one driver attempt; 21,000 attempts fit into the int32 of the wire


def tell_producers(sessions: Sessions, channel: str, units: Iterable[UnitInfo], *, kind: str) -> None:
    """`kind`: held or released."""
    made = defaultdict[tuple[WorkerId, int], list[str]](list)
    for unit in units:
        made[unit.producer, unit.branch].append(unit.key)
    for (producer, branch), keys in made.items():
        if producer != INLINE:
            sessions.tell(producer, can_wait=True, **{kind: pb.Keys(channel=channel, branch=branch, keys=keys)})


class Tickets:
    """What the flow has put into one queue for its open steps, and whose each ticket is. One with an affinity belongs
    to one consumer; while that is away, another of its role stands in."""

    def __init__(self, core: QueueCore, members: Members, *, role: str) -> None:
        self._core, self._members, self._role = core, members, role
        self._put: dict[UnitId, UnitInfo] = {}  # as the flow has
        self._away: frozenset[WorkerId] = frozenset()
        self._named: dict[Age, int] = {}  # of how many affinities a flow spoke: in open steps, and in the last one

    @property
    def affinities(self) -> int:
        """As many as the flow divides its work by: 0 up to this. It may be fewer from one step to the next, as where a
        flow has one for each worker and another plan has fewer of them."""
        return max(self._named.values(), default=0)

    def put(self, units: Iterable[UnitInfo], *, ends: Sequence[QueueCore]) -> None:
        """Idempotent: a ticket whose units are at all their ends already (a new driver puts all of a step again) is not
        handed out, but where somebody waits for more than them: for the last of it, or for what the flow is told. One
        that ends nowhere always is."""
        units = list(units)
        self._put.update((unit.id, unit) for unit in units)
        for unit in units:
            if unit.affinity is not None:
                self._named[unit.age] = max(self._named.get(unit.age, 0), unit.affinity + 1)
        fresh = [u for u in units if u.wants_seal or not ends or not all(end.steps.has_all_of(u) for end in ends)]
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

    def divide_anew(self) -> None:
        """There are more consumers, or fewer: a flow that has an affinity for each of them has others from now on. No
        step is open."""
        self._named.clear()

    def end(self, uids: Iterable[UnitId]) -> None:
        for uid in uids:
            self._put.pop(uid, None)

    def close(self, upto: Age) -> None:
        self._put = {uid: unit for uid, unit in self._put.items() if unit.age > upto}
        last = max(self._named, default=upto)
        self._named = {age: count for age, count in self._named.items() if age > upto or age == last}

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


class FlowQueue:
    def __init__(self, job: Job, spec: QueueSpec) -> None:
        self.spec, self._job, self._members, self._sessions = spec, job, job.members, job.sessions
        self.core = QueueCore(
            micro_batch=job.placement.channel(spec.channel).micro_batch,
            rounds=spec.rounds,
            order="lineage" if job.flow_settings.order == "lineage" else "arrival",
            first_round=job.attempt * ROUNDS_PER_STEP + 1,
        )
        self.expected = self.core.steps
        """Which keys a step has: of a queue that is joined, those of the queue that it joins."""
        self.core.consumers.ranked = [w.placed.id for w in self._members.of_role(spec.consumer)]
        self.tickets = Tickets(self.core, job.members, role=spec.consumer)
        self.measured = Measured()
        self._partials = Partials()
        self._made: dict[Age, dict[str, int]] = {}  # bytes of what was made so far, by open step

    # --- what workers say ---------------------------------------------------------------------------------------------
    def announced(self, units: Iterable[pb.Unit], *, producer: WorkerId, after: Age) -> None:
        """Units of a dead branch or of a committed step are released at once, as are duplicates."""
        made = [UnitInfo.from_pb(unit, producer=producer) for unit in units]
        late = [unit for unit in made if unit.age <= after]
        news = [unit for unit in made if unit.age > after]
        self.core.counts["late"] += len(late)
        self._refuse_stale(news)
        found = self.core.announce(news)
        self._measure(found.news)
        self.tell_producers([*late, *found.duplicates], kind="released")
        self.tell_producers(found.held, kind="held")
        self._refuse_strangers(found.news)

    def _refuse_stale(self, units: Iterable[UnitInfo]) -> None:
        """Fails the job for units of somebody who gets around `put`, which refuses them. A unit that is made again from
        its ticket would be as old."""
        known: tuple[Age, PolicyVersion] | None = None  # units of one message are mostly alike
        for unit in units:
            if (unit.age, unit.version) == known:
                continue
            known, bound = (unit.age, unit.version), self._job.ledger.max_staleness
            oldest = oldest_version(unit.step, branch=unit.branch, max_staleness=bound)
            try:
                labels.check_age(self.spec.channel, key=unit.key, step=unit.step, version=unit.version, oldest=oldest)
            except labels.StaleVersion as refused:
                self._job.fail(conditions.Reason.USER_ERROR, f"worker {unit.producer}: {refused}")
                return

    def look_at(self, age: Age) -> None:
        """The flow has said all that a step of the gang expects; some of it may have been made by now."""
        self._refuse_strangers(entry.unit for entry in self.core.book.waiting(age))  # no round takes them

    def _refuse_strangers(self, units: Iterable[UnitInfo]) -> None:
        """Else the step would wait for ever for the unit that this one was to be."""
        for unit, why in self.expected.strangers(units):
            name = self.spec.channel
            expected = ", ".join(self.expected.waiting_for(unit.step)[:3])
            problem = UserError(
                f"step {unit.step} does not know a unit that worker {unit.producer} put into queue {name!r}",
                got=f"key {unit.key!r}, {why}",
                wanted=f"a unit of what it waits for{f', such as {expected}' if expected else ''}",
                next="put it with parents=[...], what it was made of, or with the ticket's key; where more than one "
                "comes of a ticket, the flow says so: Ticket(..., units=8)",
            )  # fmt: skip
            self._job.fail(conditions.Reason.USER_ERROR, str(problem))
            return

    def held(self, worker: WorkerId, keys: pb.Keys) -> None:
        self.tell_producers(self.core.held(worker, branch=keys.branch, keys=keys.keys), kind="held")

    def sealed(self, worker: WorkerId, keys: pb.Keys) -> None:
        self.core.sealed(worker, branch=keys.branch, keys=keys.keys)

    def kept(self, worker: WorkerId, said: pb.Partial) -> None:
        """Keeps what there is of a unit for whoever is given it next."""
        entry = self.core.book.get(UnitId(said.branch, said.key))
        if entry is not None and entry.consumer == worker:
            self._partials.keep(entry.unit.id, entry.unit.age, said.json)

    def acked(self, worker: WorkerId, keys: pb.Keys) -> None:
        for uid in uids_of(keys) if len(self._partials) else ():
            self._partials.forget(uid)
        self.tell_producers(self.core.acked(worker, branch=keys.branch, keys=keys.keys), kind="released")

    def reconnected(self, worker: WorkerId) -> None:
        """A consumer: it states its credit anew, and hears again of what it was given and does not hold."""
        self.core.consumers.credit(worker, 0)
        units, rounds = self.core.assigned_to(worker)
        if units:
            self._assign(worker, units)
        for formed in rounds:
            self._round(formed)

    # --- what it says to them -----------------------------------------------------------------------------------------
    def match(self) -> None:
        if self.spec.together and not self._job.begun:
            return  # a consumer that has part of a ticket's units may not have said so yet to this driver
        if self.spec.rounds and not self.spec.joins:
            for formed in self.core.match_rounds():
                self._round(formed)
        else:
            for worker, units in self.core.match().items():
                self._assign(worker, units)

    def _round(self, formed: RoundAssignment) -> None:
        for rank, units in formed.parts.items():
            said = pb.Round(
                channel=self.spec.channel,
                step=formed.step,
                branch=formed.branch,
                number=formed.number,
                last=formed.last,
                total_weight=formed.total_weight,
                producers=self._producers(units),
                ended=[ended.to_pb() for ended in formed.ended],
            )
            for unit in units:
                unit.written(said.units.add)
            self._sessions.tell(rank, round=said)

    def _assign(self, worker: WorkerId, units: Sequence[UnitInfo]) -> None:
        assign = pb.Assign(channel=self.spec.channel, producers=self._producers(units))
        for unit in units:
            said = unit.written(assign.units.add)
            if len(self._partials):
                said.partial = self._partials.of(unit.id)
        self._sessions.tell(worker, assign=assign)

    def _producers(self, units: Iterable[UnitInfo]) -> list[pb.Endpoint]:
        """Endpoints of everybody who holds one of these units."""
        producers = dict.fromkeys(u.producer for u in units if u.producer)
        records = [self._members.workers.get(worker) for worker in producers]
        return [messages.endpoint_to_pb(r.endpoint) for r in records if r is not None and r.endpoint is not None]

    def tell_superfluous(self, worker: WorkerId, unit: UnitInfo) -> None:
        """Nobody needs what it makes of this unit, of which it has not heard yet."""
        if not self.core.is_end:  # who ends steps is told by their commit
            said = pb.Cancel(channel=self.spec.channel, branch=unit.branch, keys=[unit.key])
            self._sessions.tell(worker, cancel=said)

    def tell_producers(self, units: Iterable[UnitInfo], *, kind: str) -> None:
        tell_producers(self._sessions, self.spec.channel, units, kind=kind)

    def consumer_gone(self, worker: WorkerId) -> list[UnitInfo]:
        """What is lost by it."""
        self.tell_producers(self.core.departures.take_over(worker), kind="released")
        return self.core.departures.remove_consumer(worker)

    # --- the end of steps ---------------------------------------------------------------------------------------------
    def forget(self, upto: Age, *, waiting_only: bool = False, count: str = "late") -> None:
        """Its producers free what they made of these steps."""
        gone = self.core.forget(upto, waiting_only=waiting_only, count=count)
        self.tell_producers(gone, kind="released")

    def close_step(self, upto: Age) -> None:
        for age in [age for age in self._made if age <= upto]:
            sizes, most = self._made.pop(age).values(), self.measured
            units, size = max(len(sizes), most.step_units), max(sum(sizes), most.step_bytes)
            self.measured = dataclasses.replace(most, step_units=units, step_bytes=size)
        self.tickets.close(upto)
        self._partials.close(upto)

    def cancel(self, branch: int) -> None:
        """Everything of this branch and older ones is void."""
        self.forget(Age.end_of(branch), count="dropped")
        self.tickets.close(Age.end_of(branch))
        self._partials.close(Age.end_of(branch))
        self._made.clear()
        for record in self._members.of_role(self.spec.consumer):
            self._sessions.tell(record.placed.id, cancel=pb.Cancel(channel=self.spec.channel, branch=branch))

    def _measure(self, made: Iterable[UnitInfo]) -> None:
        """By key: what is lost and made again is one unit."""
        most = self.measured.largest_bytes
        for unit in made:
            self._made.setdefault(unit.age, {})[unit.key] = unit.size_bytes
            most = max(most, unit.size_bytes)
        if most > self.measured.largest_bytes:
            self.measured = dataclasses.replace(self.measured, largest_bytes=most)

    # --- looking in ---------------------------------------------------------------------------------------------------
    def full(self, spec: pb.ChannelSpec) -> list[str]:
        """Producers that keep their share of it of one step, in words: what else they make of it has to wait."""
        found = []
        for record in self._members.of_role(spec.producer):
            kept = defaultdict[Age, list[int]](list)
            for entry in self.core.book.made_by(record.placed.id):
                kept[entry.unit.age].append(entry.unit.size_bytes)
            for age in sorted(kept)[1 if spec.until_commit else 0 :]:  # the oldest gets in whole: queues.shelf
                units, nbytes = len(kept[age]), sum(kept[age])
                if units >= spec.capacity_units or nbytes >= spec.capacity_bytes:
                    found.append(
                        f"{record.placed.id} keeps {units} units, {nbytes} bytes, of step {age.step} in channel "
                        f"{spec.name!r}, whose capacity gives it {spec.capacity_units}, {spec.capacity_bytes}"
                    )
        return found
