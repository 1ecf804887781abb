"""Which units a step of a gang is done without, by branch and step."""

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.queues.expected import Ended, StepUnits
from rlinf_worker.queues.receipts import EndedUnits
from rlinf_worker.queues.units import Age, UnitInfo


def ended(*keys):
    return [pb.Ended(key=key, tickets=[key], units=1) for key in keys]


def unit(key, *, of=""):
    return UnitInfo(key=key, branch=0, step=1, tickets=(of,) if of else ())


def test_a_step_is_done_without_its_own_and_what_is_before_it_is_forgotten():
    units = EndedUnits()
    units.add(ended("env:0@1"), step=1, branch=0)
    units.add(ended("env:0@2", "env:1@2"), step=2, branch=0)
    units.add(ended("env:1@2", "env:2@2"), step=2, branch=0)
    units.add(ended("env:0@3"), step=3, branch=0)
    units.add(ended("env:9@2"), step=2, branch=1)
    assert units.take(2, branch=0) == ended("env:0@2", "env:1@2", "env:2@2")
    assert units.take(2, branch=0) == [], "once"
    assert units.take(1, branch=0) == [], "it was before"
    assert units.take(3, branch=0) == ended("env:0@3")
    assert units.take(2, branch=1) == ended("env:9@2")


def test_what_is_told_again_with_more_units_counts_once():
    units = EndedUnits()
    units.add([pb.Ended(key="p:0", tickets=["p:0"], units=3)], step=1, branch=0)
    units.add([pb.Ended(key="p:0", tickets=["p:0"], units=8)], step=1, branch=0)
    assert units.take(1, branch=0) == [pb.Ended(key="p:0", tickets=["p:0"], units=8)]


def test_a_branch_that_is_given_up_takes_its_own_and_older_ones_along():
    units = EndedUnits()
    for branch in (0, 1, 2):
        units.add(ended(f"env:{branch}@9"), step=9, branch=branch)
    units.cancel(1)
    assert units.take(9, branch=0) == []
    assert units.take(9, branch=1) == []
    assert units.take(9, branch=2) == ended("env:2@9")


def test_what_a_filter_drops_of_a_ticket_is_counted_once_and_what_it_drops_later_added():
    step = StepUnits(Age(0, 1))
    step.open({"p:0": 3, "p:1": 2})
    step.know(unit("p:0/0", of="p:0"))
    step.end(unit("p:0"))
    assert step.ended["p:0"] == Ended(key="p:0", tickets=("p:0",), units=2), "all that was to come"
    assert step.has_all("p:0")
    step.end(unit("p:0"))
    assert step.ended["p:0"].units == 2, "told again"
    step.forget(unit("p:0/0", of="p:0"))
    assert not step.has_all("p:0")
    step.end(unit("p:0"))
    assert step.ended["p:0"].units == 3, "and the one that was lost"
    step.end(unit("p:1/0", of="p:1"))
    assert step.ended["p:1/0"] == Ended(key="p:1/0", tickets=("p:1",), units=1)
    assert step.missing("p:1") == 1
