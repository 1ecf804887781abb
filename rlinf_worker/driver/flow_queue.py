"""One queue of the flow, as the driver runs it: what workers say of it goes to its pure core (rlinf_worker.queues), and
what the core answers to workers. For: driver.exchange, which has all of them, and driver.core.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.lease_sets import Measured
from rlinf_api.names import WorkerId
from rlinf_worker.driver import translate
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.tickets import Tickets
from rlinf_worker.driver.topology import QueueSpec
from rlinf_worker.queues.core import QueueCore
from rlinf_worker.queues.rounds import Assignment, RoundAssignment
from rlinf_worker.queues.units import INLINE, Age, UnitInfo, keys_of

ROUNDS_PER_STEP: Final = 100_000  # numbers of one driver attempt; 21,000 attempts fit into the int32 of the wire


class FlowQueue:
    def __init__(self, job: Job, spec: QueueSpec) -> None:
        self.spec, self._members, self._sessions = spec, job.members, job.sessions
        self.core = QueueCore(
            micro_batch=job.placement.channel(spec.channel).micro_batch,
            rounds=spec.rounds,
            order="lineage" if job.flow_settings.order == "lineage" else "arrival",
            first_round=job.attempt * ROUNDS_PER_STEP + 1,
        )
        self.core.consumers.ranked = [w.placed.id for w in self._members.of_role(spec.consumer)]
        self.tickets = Tickets(self.core, job.members, role=spec.consumer)
        self.measured = Measured()
        self._made: dict[Age, dict[str, int]] = {}  # bytes of what was made so far, by open step

    # --- what workers say ---------------------------------------------------------------------------------------------
    def announced(self, units: Iterable[pb.Unit], *, producer: WorkerId, after: Age) -> None:
        """Units of a dead branch or of a committed step are released at once, as are duplicates."""
        made = [replace(UnitInfo.from_pb(unit), producer=producer) for unit in units]
        late = [unit for unit in made if unit.age <= after]
        news = [unit for unit in made if unit.age > after]
        self._measure(unit for unit in news if not self.core.knows(unit.id))
        self.core.counts["late"] += len(late)
        self.tell_producers([*late, *self.core.announce(news)], kind="released")

    def held(self, worker: WorkerId, keys: pb.Keys) -> None:
        self.tell_producers(self.core.held(worker, branch=keys.branch, keys=keys.keys), kind="held")

    def acked(self, worker: WorkerId, keys: pb.Keys) -> None:
        self.tell_producers(self.core.acked(worker, branch=keys.branch, keys=keys.keys), kind="released")

    def reconnected(self, worker: WorkerId) -> None:
        """A consumer: it states its credit anew, and hears again of what it was given and does not hold."""
        self.core.consumers.credit(worker, 0)
        units, rounds = self.core.assigned_to(worker)
        if units:
            self._assign(Assignment(consumer=worker, units=tuple(units)))
        for formed in rounds:
            self._round(formed)

    # --- what it says to them -----------------------------------------------------------------------------------------
    def match(self, first: QueueCore | None) -> None:
        """`first`: of the queue that it joins."""
        if first is None and self.spec.rounds:
            for formed in self.core.match_rounds():
                self._round(formed)
        else:
            for given in self.core.follow(first) if first is not None else self.core.match():
                self._assign(given)

    def _round(self, formed: RoundAssignment) -> None:
        for part in formed.parts:
            message = translate.round_to_pb(self.spec.channel, formed, part, self._members)
            self._sessions.tell(part.consumer, round=message)

    def _assign(self, given: Assignment) -> None:
        message = translate.assign_to_pb(self.spec.channel, given, self._members)
        self._sessions.tell(given.consumer, assign=message)

    def tell_producers(self, units: Iterable[UnitInfo], *, kind: str) -> None:
        by_producer = defaultdict[WorkerId, list[UnitInfo]](list)
        for unit in units:
            by_producer[unit.producer].append(unit)
        for producer, made in by_producer.items():
            for keys in keys_of(self.spec.channel, made) if producer != INLINE else ():
                self._sessions.tell(producer, **{kind: keys})

    # --- the end of steps ---------------------------------------------------------------------------------------------
    def forget(self, upto: Age, *, waiting_only: bool = False, count: str = "late") -> None:
        """Its producers free what they made of these steps."""
        gone = self.core.forget(upto, waiting_only=waiting_only, count=count)
        self.tell_producers(gone, kind="released")

    def close_step(self, upto: Age) -> None:
        for age in [age for age in self._made if age <= upto]:
            sizes, most = self._made.pop(age).values(), self.measured
            units, size = max(len(sizes), most.step_units), max(sum(sizes), most.step_bytes)
            self.measured = replace(most, step_units=units, step_bytes=size)
        self.tickets.close(upto)

    def cancel(self, branch: int) -> None:
        """Everything of this branch and older ones is void."""
        self.forget(Age.end_of(branch), count="dropped")
        self.tickets.close(Age.end_of(branch))
        self._made.clear()
        for record in self._members.of_role(self.spec.consumer):
            self._sessions.tell(record.placed.id, cancel=pb.Cancel(channel=self.spec.channel, branch=branch))

    def _measure(self, made: Iterable[UnitInfo]) -> None:
        """By key: what is lost and made again is one unit."""
        for unit in made:
            self._made.setdefault(unit.age, {})[unit.key] = unit.size_bytes
            if unit.size_bytes > self.measured.largest_bytes:
                self.measured = replace(self.measured, largest_bytes=unit.size_bytes)

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
