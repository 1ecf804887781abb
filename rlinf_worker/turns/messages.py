"""Turns as they stand on the wire, for both who run them: agent/turns.py and driver/turns.py."""

from __future__ import annotations

from typing import Final

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_worker.turns import rule
from rlinf_worker.turns.arbiter import Report
from rlinf_worker.turns.rule import LeaseSet, Order, Standing

TURNS_STALLED: Final = "turns-stalled"
"""Kind of an agent's notice: turns of its pod that go by without an item, in words; empty: none any more."""


def lease_set(message: agents_pb2.LeaseSet) -> LeaseSet:
    return LeaseSet(
        name=message.name,
        turns=tuple(
            rule.Turn(
                role=turn.role,
                workers=tuple(turn.workers),
                gang=turn.gang,
                fed_inside=turn.fed_inside,
                beside=frozenset(turn.beside),
                until_units=turn.until_units,
            )
            for turn in message.turns
        ),
    )


def report(worker: str, said: slots_pb2.TurnReport | agents_pb2.WorkerTurn) -> Report:
    return Report(
        worker=worker,
        standing=Standing(said.standing),
        ripe=said.ripe,
        seen=said.seen,
        items=said.items,
        memory_bytes=said.memory_bytes,
    )


def worker_turn(lease_set: str, report: Report, *, attempt: int) -> agents_pb2.WorkerTurn:
    return agents_pb2.WorkerTurn(
        lease_set=lease_set,
        worker=report.worker,
        attempt=attempt,
        standing=report.standing,
        ripe=report.ripe,
        seen=report.seen,
        items=report.items,
        memory_bytes=report.memory_bytes,
    )


def to_worker(lease: LeaseSet, order: Order, *, number: int) -> slots_pb2.TurnOrder:
    """An agent's own."""
    return passed_on(to_agent(lease, order, number=number, attempt=0))


def passed_on(order: agents_pb2.TurnOrder) -> slots_pb2.TurnOrder:
    """The driver's, by the agent."""
    return slots_pb2.TurnOrder(
        lease_set=order.lease_set,
        number=order.number,
        kind=order.kind,
        yielding=order.yielding,
        until_units=order.until_units,
    )


def to_agent(lease: LeaseSet, order: Order, *, number: int, attempt: int) -> agents_pb2.TurnOrder:
    """The driver's, of a worker's life `attempt`."""
    return agents_pb2.TurnOrder(
        lease_set=lease.name,
        worker=order.worker,
        attempt=attempt,
        number=number,
        kind=order.kind,
        yielding=order.yielding,
        until_units=lease.turns[lease.turn_of(order.worker)].until_units,
    )


def kill(lease: LeaseSet, worker: str, *, attempt: int) -> agents_pb2.TurnOrder:
    return agents_pb2.TurnOrder(lease_set=lease.name, worker=worker, attempt=attempt, kind=rule.KILL)
