"""Turns as the driver has a part in them: tells agents which lease sets there are, and runs those that span pods.

For: core.py. A set over pods changes hands all or nothing: every holder is frozen before one is offloaded, and all have
said that their memory is free (or are dead and their memory is seen to be) before the next is granted. A set inside one
pod is its agent's alone (agent/turns.py).

Soft state: what workers do stands in the hellos of their agents. A new driver decides nothing about a set before all of
its pods have said hello; until then the holder goes on.

| what | consumes | waits for | unblocked by |
|---|---|---|---|
| Arbiter (of each set over pods) | WorkerTurn of agents | its timers | see turns/arbiter.py |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from rlinf_api import lease_sets
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.lease_sets import Measured, PlacedSet
from rlinf_api.names import WorkerId
from rlinf_api.placement import Placement
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.members import PodKey
from rlinf_worker.driver.topology import Topology
from rlinf_worker.turns import messages
from rlinf_worker.turns.arbiter import Arbiter, Report, Timers
from rlinf_worker.turns.rule import LeaseSet, Order, Standing

logger = logging.getLogger(__name__)

NUMBERS_PER_DRIVER: Final = 1 << 40
"""Order numbers grow over all drivers of a job: a worker ignores one that is not above the last it obeyed."""


@dataclass(slots=True)
class _Set:
    """`unheard`: pods of it whose agents have not said, of this set as it is now, what they hold. `sent`: the last
    order to each of its workers before."""

    message: agents_pb2.LeaseSet  # of all pods
    arbiter: Arbiter
    unheard: set[PodKey]
    reports: dict[str, Report] = field(default_factory=dict)
    sent: dict[str, tuple[int, Order]] = field(default_factory=dict)


class DriverTurns:
    def __init__(self, job: Job, *, timers: Timers | None = None) -> None:
        """`timers`: what deadlines are set by; None: the event loop."""
        self._job, self._members, self._timers = job, job.members, timers
        self._placement: Placement | None = None
        self._messages: dict[str, agents_pb2.LeaseSet] = {}  # of all pods, by name
        self._sets: dict[str, _Set] = {}
        self._told: dict[PodKey, int] = {}  # the instruction by which an agent was last told its sets
        self._lives: dict[str, int] = {}  # attempt that an agent last spoke of, by worker
        self._number = job.attempt * NUMBERS_PER_DRIVER
        self._changes_before = 0  # of sets that are no more
        self._stalled: dict[str | PodKey, str] = {}  # why, by set over pods and by pod

    # --- the plan ---------------------------------------------------------------------------------------------------
    def adopt(self, placement: Placement, topology: Topology) -> None:
        """The plan that comes into force. Raises InvalidManifest where its lease sets do not fit the flow."""
        check(placement, topology, {})  # what was measured has been looked at when the plan was prepared
        self._placement = placement
        self._messages = {lease.name: _message(lease, placement, topology) for lease in placement.lease_sets}
        over_pods = {lease.name: lease for lease in placement.lease_sets if lease.spans_pods}
        reports, sent = dict[str, Report](), dict[str, tuple[int, Order]]()
        for name, known in list(self._sets.items()):
            if name not in over_pods or known.message != self._messages[name]:
                known.arbiter.close()
                self._changes_before += known.arbiter.changes
                del self._sets[name]
                self._stalled.pop(name, None)
                reports |= known.reports
                sent |= {**known.sent, **known.arbiter.sent}
        for name, lease in over_pods.items():
            if name not in self._sets:
                rules = messages.lease_set(self._messages[name])
                timers = self._timers or asyncio.get_running_loop()
                arbiter = Arbiter(rules, self, self._job.settings.limits, timers=timers, first_number=self._number)
                self._sets[name] = _Set(
                    self._messages[name],
                    arbiter,
                    set(lease.pods),
                    {worker: reports[worker] for worker in rules.workers if worker in reports},
                    {worker: sent[worker] for worker in rules.workers if worker in sent},
                )
        for key, pod in self._members.pods.items():
            if pod.attached:
                self._tell_sets(key)

    def _tell_sets(self, key: PodKey) -> None:
        if self._placement is None or not (self._messages or key in self._told or self._job.attempt > 1):
            return  # it has never heard of any
        here = {worker.id for worker in self._placement.in_pod(*key)}
        sets = [_part_of(lease, here) for lease in self._messages.values()]
        parts = agents_pb2.LeaseSets(sets=[lease for lease in sets if lease.turns])
        self._told[key] = self._job.instruct(key, lease_sets=parts)

    @property
    def changes(self) -> int:
        """Turns that began in sets over pods, since this driver began."""
        return self._changes_before + sum(lease.arbiter.changes for lease in self._sets.values())

    def answered(self, key: PodKey, number: int) -> None:
        """The agent has taken its sets over; what its workers hold in them it had said before."""
        if self._told.get(key) == number:
            self._all_heard(key)

    # --- what agents say ----------------------------------------------------------------------------------------------
    def attached(self, key: PodKey, hello: agents_pb2.Hello) -> None:
        """What the agent holds is so; what it does not speak of holds nothing."""
        self._tell_sets(key)
        said = {turn.worker: turn for turn in hello.turns}
        for lease in self._sets.values():
            for worker in self._in_pod(lease, key):
                if worker in said:
                    self._is_of_life(lease, worker, said[worker].attempt)
                    self._take(lease, messages.report(worker, said[worker]))
                    lease.arbiter.again(worker)
                else:
                    self._forget(lease, worker)
        self._all_heard(key)

    def _all_heard(self, key: PodKey) -> None:
        for lease in self._sets.values():
            if key in lease.unheard:
                lease.unheard.discard(key)
                if not lease.unheard:
                    lease.arbiter.rebuild(lease.reports, lease.sent)

    def heard(self, key: PodKey, turn: agents_pb2.WorkerTurn) -> None:
        lease = self._sets.get(turn.lease_set)
        if lease is None or turn.worker not in self._in_pod(lease, key):
            return  # of a plan that is no more
        if turn.attempt < self._lives.get(turn.worker, 0):
            return
        self._is_of_life(lease, turn.worker, turn.attempt)
        if turn.standing == Standing.AWAY:
            self._forget(lease, turn.worker)
        else:
            self._take(lease, messages.report(turn.worker, turn))

    def pod_lost(self, key: PodKey) -> None:
        """Its workers ended with it, or run where nobody else's slots are: a set over pods goes on without them."""
        self._stalled.pop(key, None)
        for lease in self._sets.values():
            for worker in self._in_pod(lease, key):
                self._forget(lease, worker)

    def _is_of_life(self, lease: _Set, worker: str, attempt: int) -> None:
        """With a later life the earlier one is gone, and what was asked of it; its agent's word of that may be lost."""
        if attempt > self._lives.get(worker, attempt):
            self._forget(lease, worker)
        self._lives[worker] = attempt

    def _take(self, lease: _Set, report: Report) -> None:
        lease.reports[report.worker] = report
        if not lease.unheard:
            lease.arbiter.said(report)

    def _forget(self, lease: _Set, worker: str) -> None:
        lease.reports.pop(worker, None)
        lease.sent.pop(worker, None)
        if not lease.unheard:
            lease.arbiter.gone(worker)

    def _in_pod(self, lease: _Set, key: PodKey) -> Iterator[str]:
        for worker in lease.arbiter.lease.workers:
            record = self._members.workers.get(WorkerId(worker))
            if record is not None and record.placed.pod == key:
                yield worker

    # --- Hands of the arbiters ----------------------------------------------------------------------------------------
    def order(self, lease: LeaseSet, order: Order, *, number: int) -> None:
        self._number = max(self._number, number)
        if (record := self._members.workers.get(WorkerId(order.worker))) is not None:
            attempt = self._lives.get(order.worker, record.attempt)
            said = messages.to_agent(lease, order, number=number, attempt=attempt)
            self._job.instruct(record.placed.pod, turn=said)

    def kill(self, lease: LeaseSet, worker: str, *, why: str) -> None:
        self._job.event("turns", f"worker {worker} is killed: {why}", worker=worker)
        if (record := self._members.workers.get(WorkerId(worker))) is not None:
            said = messages.kill(lease, worker, attempt=self._lives.get(worker, record.attempt))
            self._job.instruct(record.placed.pod, turn=said)

    def overdue(self, lease: LeaseSet, why: str) -> None:
        self._job.event("turns", why)

    def stalled(self, lease: LeaseSet, why: str) -> None:
        self._note_stalled(lease.name, why)

    def noticed(self, key: PodKey, notice: agents_pb2.Notice) -> None:
        """An agent's word for people, on the sets that it runs among others."""
        if notice.kind == messages.TURNS_STALLED:
            self._note_stalled(key, notice.message)
        else:
            self._job.event(notice.kind, notice.message)

    def _note_stalled(self, where: str | PodKey, why: str) -> None:
        before = self._stalled.get(where, "")
        self._stalled[where] = why
        if bool(why) != bool(before):
            self._job.event("turns", why or f"turns bring items again, after: {before}")

    # --- for people ---------------------------------------------------------------------------------------------------
    @property
    def stalls(self) -> list[str]:
        """Rule (d): where turns go by without an item, with what every worker does; a condition of the job."""
        return [why for why in self._stalled.values() if why]


def check(placement: Placement, topology: Topology, measured: Mapping[str, Measured]) -> None:
    """What only the flow, and the units that it has had so far, can say of a plan's lease sets. Raises
    InvalidManifest."""
    taken = {slot: lease.name for lease in placement.lease_sets for slot in lease.slots}
    what = f"plan revision {placement.revision}"
    for queue in topology.queues:
        if queue.rounds:
            lease_sets.check_gang(queue.consumer, placement.workers, taken, what=what)
    queues = [
        lease_sets.DeclaredQueue(
            channel=queue.channel,
            producer=queue.producer,
            consumer=queue.consumer,
            ranks=len(placement.of_role(queue.consumer)) if queue.rounds else 0,
            producers=len(placement.of_role(queue.producer)),
            measured=measured.get(queue.channel, Measured()),
        )
        for queue in topology.queues
    ]
    lease_sets.check_channels(placement.lease_sets, placement.channels, queues, revision=placement.revision)


def _message(lease: PlacedSet, placement: Placement, topology: Topology) -> agents_pb2.LeaseSet:
    gangs = {queue.consumer for queue in topology.queues if queue.rounds}
    feeds: dict[str, set[str]] = {}
    for queue in topology.queues:
        feeds.setdefault(queue.consumer, set()).add(queue.producer)
    for cycle in topology.cycles:
        feeds.setdefault(cycle.answerer, set()).add(cycle.asker)
        feeds.setdefault(cycle.asker, set()).add(cycle.answerer)
    for weights in topology.weights:
        feeds.setdefault(weights.consumer, set()).add(weights.producer)
    inside = {turn.role for turn in lease.turns if len(turn.workers) == len(placement.of_role(turn.role))}
    turns = [
        agents_pb2.Turn(
            role=turn.role,
            workers=turn.workers,
            until_units=turn.share_units(gang=turn.role in gangs),
            gang=turn.role in gangs and len(turn.workers) > 1,
            fed_inside=feeds.get(turn.role, set()) <= inside and bool(feeds.get(turn.role)),
            beside=sorted(turn.beside),
        )
        for turn in lease.turns
    ]
    return agents_pb2.LeaseSet(name=lease.name, by_driver=lease.spans_pods, turns=turns)


def _part_of(lease: agents_pb2.LeaseSet, here: set[WorkerId]) -> agents_pb2.LeaseSet:
    """The set as the agent of one pod knows it: with its own workers."""
    part = agents_pb2.LeaseSet(name=lease.name, by_driver=lease.by_driver)
    for turn in lease.turns:
        workers = [worker for worker in turn.workers if WorkerId(worker) in here]
        if workers:
            part.turns.add().CopyFrom(turn)
            part.turns[-1].ClearField("workers")
            part.turns[-1].workers.extend(workers)
    return part
