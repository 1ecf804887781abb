"""What a unit is on the wire, and back."""

from msgspec.structs import replace

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.queues.units import UnitInfo

UNIT = UnitInfo(
    key="p:3/7", branch=2, step=17, weight=0.0, size_bytes=65_536, version=PolicyVersion(2, 16),
    producer=WorkerId("env/3"), inline=b"{}", tickets=("p:3", "p:4"), wants_seal=True,
)  # fmt: skip


def test_all_that_a_unit_is_comes_back_but_whose_it_is_to_be():
    assert UnitInfo.from_pb(UNIT.to_pb()) == UNIT, "a weight of nothing, too"
    assert UnitInfo.from_pb(replace(UNIT, affinity=3).to_pb()) == UNIT, "that is the driver's alone"


def test_what_is_not_said_of_a_unit_is_what_most_are():
    assert UnitInfo.from_pb(pb.Unit(key="a")) == UnitInfo(key="a", branch=0, step=0, weight=1.0, tickets=())
    assert UnitInfo(key="a", branch=0, step=1).of_tickets == ("a",)
