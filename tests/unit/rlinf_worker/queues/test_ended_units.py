"""Which units a step of a gang is done without, by branch and step."""

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.queues.receipts import EndedUnits


def ended(*keys):
    return [pb.Ended(key=key, tickets=[key], units=1) for key in keys]


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
