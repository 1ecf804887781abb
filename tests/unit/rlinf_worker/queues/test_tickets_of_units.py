"""What a unit says of the tickets that it comes of, how an item's last one is said, and what the flow is told."""

import json
from typing import Any, cast

import numpy as np
import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import Item, LineageKey, PolicyVersion
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.links.errors import PayloadError
from rlinf_worker.queues.channel import QueueChannel
from rlinf_worker.queues.parents import Parents
from rlinf_worker.queues.units import UnitId
from rlinf_worker.spans import Recorder


class Role:
    """One that takes tickets and makes units, or tells the flow."""

    def __init__(self) -> None:
        parents = Parents[Item]()
        host = Host(
            worker="env/0", role="env", peers=cast(Any, None), waits=Waits(), recorder=Recorder(), tell=cast(Any, None),
            mark=lambda source, *, can_wait=False: None, finish_item=lambda item: self.tickets.finish(item),
            fatal=cast(Any, None),
        )  # fmt: skip
        sizes: Any = {"mode": "Queue", "micro_batch": 8, "depth": 8, "capacity_units": 99, "capacity_bytes": 1 << 30}
        self.tickets = QueueChannel(host, pb.ChannelSpec(name="tickets", consumer="env", **sizes), parents)
        self.units = QueueChannel(
            host, pb.ChannelSpec(name="units", producer="env", consumer="actor", **sizes), parents
        )
        self.scores = QueueChannel(
            host, pb.ChannelSpec(name="scores", producer="env", until_commit=True, **sizes), parents
        )
        self.last = QueueChannel(
            host, pb.ChannelSpec(name="last", producer="env", consumer="actor", until_commit=True, **sizes), parents
        )
        self.host = host

    async def take(self, *units: pb.Unit) -> list[Item]:
        self.tickets.into.on_assign(pb.Assign(channel="tickets", units=units))
        return [await self.tickets.take() for _ in units]

    def said(self, channel: QueueChannel) -> list[Any]:
        out = list[pb.WorkerMessage]()
        channel.out.drain(out)
        channel.into.drain(out)
        kinds = [(str(message.WhichOneof("kind")), message) for message in out]
        return [(kind, getattr(message, kind)) for kind, message in kinds if kind not in ("held", "credit")]

    def announced(self, channel: QueueChannel) -> list[pb.Unit]:
        return [unit for kind, said in self.said(channel) if kind == "announce" for unit in said.units]


def ticket(key: str, *, step: int = 4, wants_seal: bool = False, **more: Any) -> pb.Unit:
    version = pb.PolicyVersion(branch=1, number=step - 1)
    return pb.Unit(key=key, step=step, branch=1, version=version, inline=b"{}", wants_seal=wants_seal, **more)


async def test_a_unit_comes_of_the_tickets_of_its_parents_and_of_its_own_where_it_has_none():
    role = Role()
    one, other, made = await role.take(ticket("p:1"), ticket("p:2"), ticket("d:1", tickets=["p:1", "p:3"]))
    assert (one.tickets, made.tickets) == (("p:1",), ("p:1", "p:3"))
    await role.units.put(0, key="p:1", parents=[one])
    await role.units.put(0, key="p:1/7", parents=[one])
    await role.units.put(0, key="g:1", parents=[other, made, one])
    await role.units.put(0, key="p:9", step=4)
    found = {unit.key: (list(unit.tickets), unit.step, unit.branch) for unit in role.announced(role.units)}
    assert found == {
        "p:1": ([], 4, 1),
        "p:1/7": (["p:1"], 4, 1),
        "g:1": (["p:2", "p:1", "p:3"], 4, 1),
        "p:9": ([], 4, 0),
    }


async def test_a_unit_of_nothing_is_refused_at_the_call_where_units_end():
    role = Role()
    role.host.in_hand.has_all = True
    one, made = await role.take(ticket("p:1"), ticket("d:1", tickets=["p:2", "p:3"]))
    for end in (role.last, role.scores):
        for key in ("p:1", "p:3"):
            await end.put(0, key=key, step=4)
        for key in ("p:1/0", "d:1", "p:9"):
            with pytest.raises(UserError) as refused:
                await end.put(0, key=key, step=4)
            assert str(refused.value) == (
                f"unit {key!r} of channel {end.name!r} is made of nothing: got no parents, and a key that is no ticket "
                "of what the role has in hand, wanted what it was made of; put it with parents=[...], or with the "
                "ticket's key, before the ack"
            )
        await end.put(0, key="p:1/0", parents=[one])
        assert [unit.key for unit in role.announced(end)] == ["p:1", "p:3", "p:1/0"]
    role.tickets.drop(made, "why")
    with pytest.raises(UserError, match="is made of nothing"):
        await role.last.put(0, key="p:2", step=4)


async def test_a_unit_of_nothing_is_put_where_it_may_be_for_its_consumer_alone_or_the_role_may_know_of_more():
    role = Role()
    await role.take(ticket("p:1"))
    await role.last.put(0, key="p:9", step=4)
    role.host.in_hand.has_all = True
    await role.units.put(0, key="p:9", step=4)
    assert len(role.announced(role.last)) == len(role.announced(role.units)) == 1


async def test_what_a_question_is_answered_for_names_no_ticket():
    role = Role()
    role.host.in_hand.has_all = True
    question = Item(
        channel="actions", key=LineageKey("q"), payload=1, step=4, branch=1, source=WorkerId("agent/0"),
        version=PolicyVersion(1, 3),
    )  # fmt: skip
    with pytest.raises(UserError, match="'p:1' of channel 'last' is made of nothing"):
        await role.last.put(0, key="p:1", parents=[question])
    await role.take(ticket("p:1"))
    await role.last.put(0, key="p:1", parents=[question])


async def test_the_last_unit_of_an_item_is_said_where_somebody_has_to_hear_it_and_until_it_is_finished():
    role = Role()
    counted, open_ = await role.take(ticket("p:1"), ticket("p:2", wants_seal=True))
    for item in (counted, open_):
        await role.units.put(0, key=f"{item.key}/0", parents=[item])
        role.tickets.ack(item)
    assert [unit.wants_seal for unit in role.announced(role.units)] == [False, True]
    sealed = ("sealed", pb.Keys(channel="tickets", branch=1, keys=["p:2"]))
    assert role.said(role.tickets) == [sealed]
    assert role.said(role.tickets) == [], "once"
    role.tickets.into.hello()
    assert role.said(role.tickets) == [sealed], "to each driver"
    role.units.out.on_held([UnitId(1, "p:1/0"), UnitId(1, "p:2/0")])
    assert role.said(role.tickets) == [("acked", pb.Keys(channel="tickets", branch=1, keys=["p:1", "p:2"]))]
    role.tickets.into.hello()
    assert [kind for kind, _ in role.said(role.tickets)] == ["acked"]


async def test_of_a_branch_that_is_void_nothing_is_said():
    role = Role()
    [item] = await role.take(ticket("p:2", wants_seal=True))
    await role.units.put(0, key="p:2/0", parents=[item])
    role.tickets.ack(item)
    role.tickets.on_cancel(pb.Cancel(branch=1))
    role.tickets.into.hello()
    assert role.said(role.tickets) == []


async def test_the_flow_is_told_a_value_with_the_word_on_it():
    role = Role()
    [item] = await role.take(ticket("p:1"))
    value = {"reward": np.float32(0.5), "count": np.int64(3), "kept": True, "why": ["ä", None]}
    await role.scores.put(value, key="p:1", parents=[item])
    [told] = role.announced(role.scores)
    assert json.loads(told.inline) == {"reward": 0.5, "count": 3, "kept": True, "why": ["ä", None]}
    assert [held.unit.inline for held in role.scores.out.hello()] == [told.inline], "to each driver"
    await role.units.put(value, key="p:1", parents=[item])
    assert [unit.inline for unit in role.announced(role.units)] == [b""], "a consumer fetches it"


@pytest.mark.parametrize(
    ("value", "got", "wanted"),
    [
        (float("nan"), "Out of range float values are not JSON compliant", "what JSON can write, without NaN"),
        (np.zeros(2), "ndarray array([0., 0.])", "what JSON can write, without NaN"),
        (b"x", "bytes b'x'", "what JSON can write, without NaN"),
        ("x" * 65_535, "65537 bytes", "at most 65536"),
    ],
)
async def test_what_the_flow_cannot_be_told_is_refused_at_the_call(value, got, wanted):
    role = Role()
    with pytest.raises(PayloadError) as refused:
        await role.scores.put(value, key="p:1", step=1)
    assert str(refused.value).startswith("result 'p:1' of channel 'scores' cannot be told to the flow: got ")
    assert got in str(refused.value)
    assert f"wanted {wanted}; pass what it decides by" in str(refused.value)
    await role.scores.put("x" * 65_534, key="p:1", step=1)
    assert len(role.announced(role.scores)) == 1
