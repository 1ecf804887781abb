"""What the ends of a queue wait for, by name, when that is worth a turn, and what they count."""

import asyncio
from typing import Any, cast
from unittest.mock import Mock

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import DeadlineExceeded
from rlinf_api.names import WorkerId
from rlinf_worker.channels import labels
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import Item, PolicyVersion
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.queues.channel import QueueChannel
from rlinf_worker.queues.parents import Parents
from rlinf_worker.queues.units import UnitId, UnitInfo
from rlinf_worker.spans import Recorder

SPEC = pb.ChannelSpec(
    name="units", producer="env", consumer="actor", micro_batch=4, depth=2, capacity_units=4, capacity_bytes=1 << 20
)


def end(role: str, **more: Any) -> tuple[QueueChannel, Waits]:
    said: Any = {"tell": Mock(), "mark": Mock(), "finish_item": Mock(), "fatal": Mock(), "recorder": Recorder()}
    host = Host(worker=f"{role}/0", role=role, peers=cast(Any, Mock()), waits=Waits(), **said)
    spec = pb.ChannelSpec.FromString(SPEC.SerializeToString())
    for name, value in more.items():
        setattr(spec, name, value)
    return QueueChannel(host, spec, Parents()), host.waits


def give(channel: QueueChannel, *keys: str) -> None:
    units = [UnitInfo(key=key, branch=0, step=3, inline=b'{"slice": 1}').to_pb() for key in keys]
    channel.into.on_assign(pb.Assign(channel="units", units=units))


async def begun(waiting: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    return task


async def test_a_consumer_waits_by_name_and_takes_a_turn_for_a_quarter_of_its_window():
    channel, waits = end("actor")
    taking = await begun(channel.take_batch(at_least=3))
    assert [name for name, _ in waits.current()] == ["a micro-batch of channel 'units' for actor/0"]
    (wait,) = waits.gated
    give(channel, "a")
    assert not wait.ripe()
    give(channel, "b")
    assert wait.ripe()
    await asyncio.sleep(0)
    assert not taking.done()
    give(channel, "c", "d", "e")
    assert [item.key for item in await taking] == ["a", "b", "c", "d"]


async def test_each_item_is_counted_once_taken_or_dropped():
    channel, _ = end("actor")
    give(channel, "a", "b")
    kept, dropped = await channel.take(), await channel.take()
    channel.drop(dropped, "too old")
    account = channel.account_in
    assert (account.items, account.step, dict(account.dropped)) == (2, 3, {"too old": 1})
    assert channel.in_hand == 1
    channel.ack(kept)
    assert channel.in_hand == 0


async def test_a_producer_waits_for_room_by_name_and_takes_a_turn_when_three_quarters_are_free():
    channel, waits = end("env")
    for key in "abcd":
        await channel.put({"n": 1}, key=key, step=3)
    putting = await begun(channel.put({"n": 1}, key="e", step=3))
    nbytes = channel.out.shelf.units()[0].size_bytes
    assert [name for name, _ in waits.current()] == [f"room for unit 'e' of {nbytes} bytes in channel 'units'"]
    (wait,) = waits.gated
    channel.out.shelf.release([UnitId(0, "a"), UnitId(0, "b")])
    assert not wait.ripe()
    channel.out.on_released([UnitId(0, "c")])
    assert wait.ripe()
    await putting
    assert [unit.key for unit in channel.out.shelf.units()] == ["d", "e"]
    assert (channel.account_out.items, channel.account_out.duplicates) == (5, 0)


async def test_a_producer_that_finds_no_room_in_time_says_how_much_nobody_takes():
    channel, _ = end("env")
    channel._host.peer_wait_s = 0.01
    for key in "abcd":
        await channel.put({"n": 1}, key=key, step=3)
    with pytest.raises(
        DeadlineExceeded, match=r"within 0\.01 s: got still missing: a consumer that takes one of the 4 "
    ):
        await channel.put({"n": 1}, key="e", step=3)
    assert channel.out.shelf.waiting == []


async def test_what_was_on_its_way_at_a_hello_is_nobodys_before_the_welcome():
    channel, _ = end("actor")
    given = channel.into.given
    given.assign([UnitInfo(key="a", branch=0, step=3)])
    given.hello()
    given.units.arrived(UnitId(0, "a"), cast(Any, "payload"))
    assert not given.has_next()
    assert given.credit_due() is None
    forgotten, here = given.welcomed(is_new_driver=False)
    assert (forgotten, [unit.key for unit in here]) == (0, ["a"])
    assert given.has_next()


# --- what a unit has from its parents ---------------------------------------------------------------------------------
def parent(key, *, step, branch, version):
    source = WorkerId("driver")
    return Item(key=key, payload=None, channel="tickets", source=source, step=step, branch=branch, version=version)


async def test_a_unit_is_of_its_newest_parents_step_and_branch_and_of_the_oldest_version():
    channel, _ = end("env")
    channel._host.max_staleness = lambda: 5
    parents = [
        parent("a", step=7, branch=2, version=PolicyVersion(2, 6)),
        parent("b", step=9, branch=1, version=PolicyVersion(2, 4)),
        parent("c", step=8, branch=2, version=PolicyVersion(2, 7)),
    ]
    await channel.put({"n": 1}, key="abc", parents=parents)
    await channel.put({"n": 1}, key="said", step=3, branch=4, version=PolicyVersion(4, 2), parents=parents)
    found = [(u.key, u.step, u.branch, u.version) for u in channel.out.shelf.units()]
    assert found == [
        ("abc", 8, 2, PolicyVersion(2, 4)),
        ("said", 3, 4, PolicyVersion(4, 2)),
    ]


@pytest.mark.parametrize(
    ("held", "version"), [(None, (2, 7)), ((2, 6), (2, 6)), ((2, 9), (2, 7))], ids=["none", "older", "newer"]
)
async def test_a_unit_is_as_old_as_the_weights_of_its_worker_where_it_does_not_say_what_made_it(held, version):
    channel, _ = end("env")
    channel._host.max_staleness, channel._host.weights_version = lambda: 1, lambda: held and PolicyVersion(*held)
    ticket = parent("a", step=8, branch=2, version=PolicyVersion(2, 7))
    await channel.put({"n": 1}, key="a", parents=[ticket])
    await channel.put({"n": 1}, key="said", version=PolicyVersion(2, 8), parents=[ticket])
    await channel.put({"n": 1}, key="no parents", step=8, branch=2)
    found = {unit.key: unit.version for unit in channel.out.shelf.units()}
    alone = PolicyVersion(*(held or (2, 6)))
    assert found == {"a": PolicyVersion(*version), "said": PolicyVersion(2, 8), "no parents": alone}


@pytest.mark.parametrize(
    "labels_of",
    [
        pytest.param({"version": PolicyVersion(2, 5)}, id="said"),
        pytest.param({"held": PolicyVersion(2, 5)}, id="by the weights of its worker"),
        pytest.param({"of": PolicyVersion(2, 5)}, id="by its parent"),
        pytest.param({"version": PolicyVersion(1, 50), "got": "b1-50"}, id="of a dead branch"),
    ],
)
async def test_what_is_made_with_too_old_weights_is_refused_at_the_call(labels_of):
    channel, _ = end("env")
    channel._host.max_staleness, channel._host.weights_version = lambda: 1, lambda: labels_of.get("held")
    ticket = parent("p:1", step=8, branch=2, version=labels_of.get("of", PolicyVersion(2, 7)))
    with pytest.raises(labels.StaleVersion) as refused:
        await channel.put({"n": 1}, key="p:1/0", version=labels_of.get("version"), parents=[ticket])
    assert str(refused.value) == (
        "unit 'p:1/0' of channel 'units' is made with weights that are too old for step 8: got version "
        f"{labels_of.get('got', 'b2-5')}, wanted b2-6 or newer, by spec.flow.maxStaleness; make it with await "
        "ctx.weights.pull(ticket.version); where other weights made it, say version=..."
    )
    assert (channel.out.shelf.units(), channel.account_out.refused) == ([], {"StaleVersion": 1})
    await channel.put({"n": 1}, key="p:1/0", version=PolicyVersion(2, 6), parents=[ticket])


async def test_the_flow_may_be_told_of_any_weights():
    channel, _ = end("env", consumer="")
    await channel.put({"score": 1}, key="p:1", step=8, branch=2, version=PolicyVersion(0, 1))
    assert [unit.version for unit in channel.out.shelf.units()] == [PolicyVersion(0, 1)]


async def test_a_unit_without_parents_is_of_the_newest_branch_that_its_worker_knows_and_of_a_step_that_is_given():
    channel, _ = end("env")
    channel._host.newest_branch = lambda: 5
    await channel.put({"n": 1}, key="a", step=3)
    await channel.put({"n": 1}, key="b", step=3, branch=2)
    assert [(unit.key, unit.branch) for unit in channel.out.shelf.units()] == [("a", 5), ("b", 2)]
    with pytest.raises(
        labels.LabelError,
        match=r"the step of item 'c' of channel 'units' .* got none, .*; pass parents=\[...\] or step=",
    ):
        await channel.put({"n": 1}, key="c")
