"""What turns look like on the wire: every field arrives, each in its own place."""

from dataclasses import replace

import pytest

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_worker.turns import messages, rule
from rlinf_worker.turns.arbiter import Report
from rlinf_worker.turns.rule import Kind, LeaseSet, Order, Standing, Turn

ENV = Turn(
    role="env", workers=("env/0", "env/1"), gang=True, fed_inside=True, beside=frozenset({"actor"}), until_units=6
)
ACTOR = Turn(role="actor", workers=("actor/0",), until_units=2)
LEASE = LeaseSet(name="all", turns=(ENV, ACTOR))
REPORT = Report(worker="env/1", standing=Standing.MORE, ripe=False, seen=7, items=3, memory_bytes=1 << 40)


def on_the_wire(lease: LeaseSet) -> agents_pb2.LeaseSet:
    """As the driver writes it."""
    turns = [
        agents_pb2.Turn(
            role=t.role, workers=t.workers, gang=t.gang, fed_inside=t.fed_inside, beside=t.beside,
            until_units=t.until_units,
        )
        for t in lease.turns
    ]  # fmt: skip
    return agents_pb2.LeaseSet(name=lease.name, turns=turns)


def test_a_lease_set_arrives_whole():
    assert messages.lease_set(on_the_wire(LEASE)) == LEASE


@pytest.mark.parametrize("ripe", [False, True])
def test_a_report_arrives_whole_and_goes_on_whole(ripe):
    report = replace(REPORT, ripe=ripe)
    said = slots_pb2.TurnReport(lease_set="all", standing="more", ripe=ripe, seen=7, items=3, memory_bytes=1 << 40)
    assert messages.report("env/1", said) == report
    passed = messages.worker_turn("all", report, attempt=4)
    assert (passed.lease_set, passed.worker, passed.attempt) == ("all", "env/1", 4)
    assert messages.report("env/1", passed) == report


@pytest.mark.parametrize(("worker", "units"), [("env/0", 6), ("env/1", 6), ("actor/0", 2)])
def test_an_order_has_its_number_its_kind_and_how_long_the_turn_lasts(worker, units):
    own = messages.to_worker(LEASE, Order(worker, Kind.FINISH, yielding=True), number=9)
    assert own == slots_pb2.TurnOrder(
        lease_set="all", number=9, kind="finish", yielding=True, until_units=units
    )  # fmt: skip
    told = messages.to_agent(LEASE, Order(worker, Kind.FINISH, yielding=True), number=9, attempt=4)
    assert (told.worker, told.attempt) == (worker, 4)
    assert messages.passed_on(told) == own, "the same, by way of the agent"


def test_the_word_to_kill_names_a_life():
    said = messages.kill(LEASE, "env/1", attempt=4)
    assert said == agents_pb2.TurnOrder(lease_set="all", worker="env/1", attempt=4, kind=rule.KILL)
    assert rule.KILL not in list(Kind), "no order of the rule is taken for it"
