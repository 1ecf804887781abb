"""Turns in one pod: runs the lease sets that lie in it, and relays for those that span pods.

For: main.py (what workers say and what becomes of them) and instructions.py (what the driver says). A set inside the
pod changes hands without the driver: two messages over the pod's own socket. Fencing is process death: a worker that
does not let go is killed, and the slots go on only when its processes are reaped and its memory is seen to be free.

| what | consumes | waits for | unblocked by |
|---|---|---|---|
| Arbiter (of each own set) | reports | its timers | see turns/arbiter.py |
| `_let_go` (task per dead worker) | /proc, NVML | nothing of it to be left | see remains.py |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import time

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_api.errors import Stale, UserError
from rlinf_worker import memory
from rlinf_worker.agent import supervisor
from rlinf_worker.agent.remains import Remains
from rlinf_worker.agent.supervisor import Supervisor
from rlinf_worker.memory import Probe
from rlinf_worker.settings import Settings
from rlinf_worker.turns import messages, rule
from rlinf_worker.turns.arbiter import Arbiter, Report, Timers
from rlinf_worker.turns.messages import TURNS_STALLED
from rlinf_worker.turns.rule import Kind, LeaseSet, Order, Standing

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _SetWorker:
    """`lease_set`: empty, it is in none. `sent`: the last order that went to it, whoever decided it. `leaving`: of an
    attempt whose memory is not seen to be free yet."""

    id: str
    lease_set: str = ""
    attempt: int = 0
    report: Report | None = None
    sent: tuple[int, Order] | None = None
    joined: bool = False
    level_bytes: int | None = None  # on the pod's accelerators before it was let load; None: it has left, or unknown
    keeps_told: bool = False  # that its offload left most of its memory where it was
    leaving: asyncio.Task[None] | None = None
    turn_began: float | None = None  # by the clock on the wall: when it has been granted the slots, or holds them

    @property
    def held(self) -> Report | None:
        """What it has to be taken for by whoever begins to decide: it holds the slots until it is certain that it does
        not, if it is dead, or was given them and has not said so yet."""
        if self.leaving is not None:
            return Report(worker=self.id, standing=Standing.HOLDS)
        if self.report is not None and self.sent is not None:
            number, order = self.sent
            if order.kind is Kind.GRANT and number > self.report.seen:
                return replace(self.report, standing=Standing.HOLDS)
        return self.report

    @property
    def has_left(self) -> bool:
        """It may load, or keep what it has, from the order on that lets it; not after it has said to be off."""
        if self.report is None or self.report.standing in rule.ON_SLOTS:
            return False
        number, order = self.sent or (0, None)
        return order is None or not (
            order.kind is Kind.PRELOAD or (order.kind is Kind.GRANT and number > self.report.seen)
        )

    @property
    def turn(self) -> agents_pb2.WorkerTurn | None:
        """The turn as the driver is told of it; None: there is nothing to say."""
        held = self.held
        return messages.worker_turn(self.lease_set, held, attempt=self.attempt) if held is not None else None


@dataclass(slots=True)
class _PodSet:
    message: agents_pb2.LeaseSet
    arbiter: Arbiter | None = None  # None: the driver's
    free_since: float = 0.0
    """When the slots were left, as who left them last says it; 0: nobody has said so since the turn that is, or who had
    it is dead."""


class AgentTurns:
    def __init__(
        self,
        settings: Settings,
        *,
        workers: Supervisor,
        order: supervisor.Order,
        tell: Callable[[agents_pb2.AgentMessage], None],
        probe: Probe,
        turn_over: Callable[[str, float, float], None],
        timers: Timers,
    ) -> None:
        """`turn_over` is told of each turn of a worker: from the grant until its slots are free again. `timers`: the
        agent's clock, by which all that is here waits."""
        self._settings, self._workers, self._order, self._turn_over = settings, workers, order, turn_over
        self._tell, self._probe, self._timers = tell, probe, timers
        self._remains = Remains(workers, probe, say=lambda why: self.notice("turns", why), clock=timers.time)
        self._sets: dict[str, _PodSet] = {}
        self._members: dict[str, _SetWorker] = {}
        self._number = 0  # highest of an order to any worker
        self._changes_before = 0  # those of sets that are no more
        self._stalled: dict[str, str] = {}  # why, by set
        self.kills = 0

    # --- the plan ---------------------------------------------------------------------------------------------------
    def adopt(self, message: agents_pb2.LeaseSets) -> list[str]:
        """The sets of the plan in force. One that has not changed goes on as it is. Returns who takes no turns any
        more: each hears so by `alone`, once nobody else ends on its slots."""
        alone = []
        wanted = {lease.name: lease for lease in message.sets}
        for name, known in list(self._sets.items()):
            if wanted.get(name) != known.message:
                del self._sets[name]
                if known.arbiter is not None:
                    self._changes_before += known.arbiter.changes
                    known.arbiter.close()
                if self._stalled.pop(name, ""):
                    self.notice(TURNS_STALLED, "; ".join(text for text in self._stalled.values() if text))
        before = {worker: member.lease_set for worker, member in self._members.items()}
        inside = {worker: name for name, lease in wanted.items() for turn in lease.turns for worker in turn.workers}
        for worker in {*inside, *before}:  # first: a worker obeys orders of the set that it knows to be in
            member = self._members.setdefault(worker, _SetWorker(worker))
            member.lease_set = inside.get(worker, "")
            self._note_turn(member)
            was = before.get(worker, "")
            if not member.joined or was == member.lease_set:
                continue
            if not was and member.report is None:  # it has the slots to itself until it says that it is off
                member.report = Report(worker=worker, standing=Standing.HOLDS)
            if member.lease_set:
                self._say_membership(member)
            else:
                alone.append(worker)
        for name, lease in wanted.items():
            if name not in self._sets:
                self._make(lease)
        return alone

    def alone(self, worker: str) -> None:
        """The slots are its own from here on, unless yet another plan has it take turns."""
        member = self._members[worker]
        if member.joined and not member.lease_set:
            member.report = member.sent = None  # it forgets what it was told, and takes no order of that set any more
            self._say_membership(member)

    def _make(self, message: agents_pb2.LeaseSet) -> None:
        """A new set, or one that the plan has changed: what its workers hold now is where it begins."""
        known = {worker: self._members[worker] for turn in message.turns for worker in turn.workers}
        made = self._sets[message.name] = _PodSet(message)
        if message.by_driver:
            for member in known.values():
                self._tell_held(member)
            return
        made.arbiter = Arbiter(
            messages.lease_set(message), self, self._settings,
            timers=self._timers, first_number=self._number,
        )  # fmt: skip
        reports = {worker: member.held for worker, member in known.items() if member.held}
        sent = {worker: member.sent for worker, member in known.items() if member.sent is not None}
        made.arbiter.rebuild(reports, sent)

    def _tell_held(self, member: _SetWorker) -> None:
        if (turn := member.turn) is not None:
            self._tell(agents_pb2.AgentMessage(turn=turn))

    def _say_membership(self, member: _SetWorker) -> None:
        said = slots_pb2.Membership(lease_set=member.lease_set)
        self._order(member.id, slots_pb2.AgentOrder(membership=said))

    def together(self, one: str, other: str) -> bool:
        """They take turns with each other."""
        sets = [member.lease_set if (member := self._members.get(worker)) else "" for worker in (one, other)]
        return sets[0] != "" and sets[0] == sets[1]

    # --- what workers say, and what becomes of them -------------------------------------------------------------------
    def joined(self, worker: str, attempt: int) -> None:
        member = self._members.setdefault(worker, _SetWorker(worker))
        member.joined, member.attempt, member.report, member.sent = True, attempt, None, None
        member.level_bytes, member.keeps_told = None, False
        self._say_membership(member)

    def said(self, worker: str, attempt: int, said: slots_pb2.TurnReport) -> None:
        member = self._members.get(worker)
        if member is None or not member.joined or attempt != member.attempt or said.lease_set != member.lease_set:
            return  # said by a life, whose death may be seen before its last words, or in a plan that is no more
        before, member.report = member.report, messages.report(worker, said)
        if member.level_bytes is not None and member.has_left and not said.stays:
            member.level_bytes = None
            self._look_what_it_keeps(member, had=before.memory_bytes if before else 0, has=said.memory_bytes)
        if member.leaving is None:
            self._note_turn(member)  # before the next one is granted
            self._pass_on(member, free_since=said.free_since)

    def _note_turn(self, member: _SetWorker) -> None:
        held = member.held if member.lease_set else None
        has_slots = held is not None and held.standing in rule.ON_SLOTS
        if has_slots and member.turn_began is None:
            member.turn_began = time()
        elif not has_slots and member.turn_began is not None:
            began, member.turn_began = member.turn_began, None
            self._turn_over(member.id, began, time())

    def _look_what_it_keeps(self, member: _SetWorker, *, had: int, has: int) -> None:
        if not member.keeps_told and has > memory.free_level(0, had) > 0:
            member.keeps_told = True
            self.notice("turns", f"worker {member.id} has left its slots and keeps {has} of {had} bytes on them")

    def _pass_on(self, member: _SetWorker, *, free_since: float = 0.0) -> None:
        lease = self._sets.get(member.lease_set)
        if lease is None or member.report is None:
            return
        if lease.arbiter is not None:
            lease.free_since = 0.0 if member.report.standing in rule.ON_SLOTS else free_since or lease.free_since
            lease.arbiter.said(member.report)
        else:
            self._tell_held(member)

    def gone(self, worker: str, attempt: int) -> None:
        """It has exited. The slots are somebody else's when nothing of it is left."""
        member = self._members.get(worker)
        if member is None or attempt != member.attempt:
            return
        had = member.report.memory_bytes if member.report is not None else 0
        # Nobody knows what a worker had that dies in its load: everything above the level counts as its own.
        limit = None if member.level_bytes is None else memory.free_level(member.level_bytes, had)
        member.joined, member.report, member.sent, member.level_bytes = False, None, None, None
        if member.lease_set and self._remains.are_there(worker, limit_bytes=limit):
            member.leaving = asyncio.create_task(self._let_go(worker, attempt, limit_bytes=limit))
        else:
            self._free(worker, attempt, member)

    async def _let_go(self, worker: str, attempt: int, *, limit_bytes: float | None) -> None:
        await self._remains.wait(worker, limit_bytes=limit_bytes)
        self._free(worker, attempt, self._members[worker])

    def _free(self, worker: str, attempt: int, member: _SetWorker) -> None:
        member.leaving = None
        self._note_turn(member)
        lease = self._sets.get(member.lease_set)
        if lease is None:
            return
        if lease.arbiter is not None:
            lease.free_since = 0.0
            lease.arbiter.gone(worker)
        else:
            away = Report(worker=worker, standing=Standing.AWAY)
            turn = messages.worker_turn(member.lease_set, away, attempt=attempt)
            self._tell(agents_pb2.AgentMessage(turn=turn))
        if member.joined:  # its next life has spoken meanwhile
            self._pass_on(member)

    # --- Hands of the arbiters ----------------------------------------------------------------------------------------
    def order(self, lease: LeaseSet, order: Order, *, number: int) -> None:
        said = messages.to_worker(lease, order, number=number)
        if order.kind is Kind.GRANT:
            said.free_since = self._sets[lease.name].free_since
        self._send(order, said)

    def _send(self, order: Order, said: slots_pb2.TurnOrder) -> None:
        self._number = max(self._number, said.number)
        member = self._members[order.worker]
        member.sent = said.number, order
        if order.kind in (Kind.GRANT, Kind.PRELOAD) and member.level_bytes is None:
            member.level_bytes = self._probe.used_bytes()
        self._note_turn(member)
        self._order(order.worker, slots_pb2.AgentOrder(turn=said))

    def kill(self, lease: LeaseSet, worker: str, *, why: str) -> None:
        self.kills += 1
        self._workers.condemn(worker, why=why)

    def overdue(self, lease: LeaseSet, why: str) -> None:
        self.notice("turns", why)

    def stalled(self, lease: LeaseSet, why: str) -> None:
        """The driver's condition is of the pod: all that is so in it."""
        self._stalled[lease.name] = why
        self.notice(TURNS_STALLED, "; ".join(text for _, text in sorted(self._stalled.items()) if text))

    def notice(self, kind: str, message: str) -> None:
        logger.warning(message)
        self._tell(agents_pb2.AgentMessage(notice=agents_pb2.Notice(kind=kind, message=message)))

    # --- the driver's -------------------------------------------------------------------------------------------------
    def obey(self, order: agents_pb2.TurnOrder) -> None:
        """An order of the driver for a set that spans pods. Raises Stale where its worker is not that any more."""
        member, lease = self._members.get(order.worker), self._sets.get(order.lease_set)
        if lease is None or lease.arbiter is not None:
            raise Stale(f"lease set {order.lease_set!r} is not the driver's here", next="send the plan's sets first")
        if member is None or not member.joined or member.attempt != order.attempt:
            present = f"attempt {member.attempt}" if member is not None else "no such worker"
            what = f"worker {order.worker} cannot have a turn of {order.lease_set!r}"
            raise Stale(what, got=f"attempt {order.attempt}", wanted=present)
        if order.kind == rule.KILL:
            self.kills += 1
            why = f"lease set {order.lease_set!r} not released within {self._settings.turn_release_s:g} s"
            self._workers.condemn(order.worker, why=why)
            return
        try:
            said = Order(order.worker, Kind(order.kind), order.yielding)
        except ValueError as error:
            raise UserError(
                f"an order of lease set {order.lease_set!r} that this agent does not know", got=repr(order.kind),
                next="run driver and worker pods from images of the same version",
            ) from error  # fmt: skip
        self._send(said, messages.passed_on(order))

    def hello(self) -> Iterable[agents_pb2.WorkerTurn]:
        """What a new driver has to know: who holds, waits or is gone in the sets that it runs."""
        for member in self._members.values():
            lease = self._sets.get(member.lease_set)
            if lease is not None and lease.arbiter is None and (turn := member.turn) is not None:
                yield turn

    # --- small things -------------------------------------------------------------------------------------------------
    @property
    def changes(self) -> int:
        """Turns that began in the sets of this pod."""
        return self._changes_before + sum(lease.arbiter.changes for lease in self._sets.values() if lease.arbiter)

    async def close(self) -> None:
        for lease in self._sets.values():
            if lease.arbiter is not None:
                lease.arbiter.close()
        tasks = [member.leaving for member in self._members.values() if member.leaving is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self._members.values():
            member.lease_set = ""
            self._note_turn(member)
