"""Weights between workers: who is sent what, what is believed, and what becomes of those who are gone. No sockets."""

import asyncio
import random
import threading

import numpy as np
import pytest

from rlinf_api.errors import DeadlineExceeded, InvariantBroken
from rlinf_worker.channels.protocol import ChannelClosed, PolicyVersion
from rlinf_worker.links import frames
from rlinf_worker.links.message import Message
from rlinf_worker.weights import channel, copying, edition
from rlinf_worker.weights.edition import SchemaChanged, WeightsCorrupt
from rlinf_worker.weights.layout import Sharding
from rlinf_worker.weights.planning import View
from rlinf_worker.weights.receiver import MAX_REFUSED
from rlinf_worker.weights.tensors import Shard
from tests.fakes.weights_net import WeightsNet

PART = 4 << 20
V1, V2, V3 = (PolicyVersion(0, number) for number in (1, 2, 3))


def model(seed, *, mb=12.0):
    """Of three parts and a bit of a fourth, in two tensors and a plain number."""
    draw = np.random.default_rng(seed)
    return {"w": draw.normal(size=(int(mb * (1 << 18)),)).astype("f4"), "b": draw.normal(size=(7, 3)), "seed": seed}


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.fixture
async def pod_net(tmp_path):
    made = WeightsNet(tmp_path)
    async with asyncio.timeout(25):
        yield made
        await made.close()


async def grow(net, count, *, pods="bcdefg"):
    actor = net.node("actor/0", pod="a")
    rollouts = [net.node(f"rollout/{n}", pod=pods[n]) for n in range(count)]
    for rollout in rollouts:
        await net.route(actor, rollout)
    return actor, rollouts


async def test_a_version_is_published_when_it_has_arrived_and_each_is_sent_once(net):
    actor, (rollout,) = await grow(net, 1)
    for number, version in enumerate((V1, V2, V3), start=1):
        await actor.weights.publish(version, model(number))
        assert net.frames_of(frames.WeightsHave)[-1].number == version.number
        got, tensors = await rollout.weights.pull(version)
        assert (got, rollout.weights.version, actor.weights.version) == (version, version, version)
        same(tensors, model(number))
    size = actor.weights.publisher.edition.memory.nbytes
    assert actor.weights.sender.sent_bytes == pytest.approx(3 * size, abs=3 * 64)
    assert (actor.weights.account_out.items, rollout.weights.account_in.items) == (3, 3)
    assert actor.weights.account_out.bytes == 3 * size
    assert rollout.weights.account_in.bytes == pytest.approx(3 * size, abs=3 * 64)
    assert actor.weights.published == 3
    assert min(actor.weights.seconds, rollout.weights.seconds) > 0
    assert [len(net.frames_of(kind)) for kind in (frames.WeightsHead, frames.WeightsEnd)] == [3, 3]


async def test_a_newer_version_is_an_event_once_it_is_whole_and_until_it_is_served(net):
    actor, (rollout,) = await grow(net, 1)
    waits = rollout.host.waits
    first = asyncio.ensure_future(rollout.weights.newer(PolicyVersion(0, 0)))
    await actor.weights.publish(V1, model(1))
    assert await first == V1
    assert await rollout.weights.newer(PolicyVersion(0, 0)) == V1, "nobody has pulled it"
    held, _ = await rollout.weights.pull(V1)
    second = asyncio.ensure_future(rollout.weights.newer(held))
    await asyncio.sleep(0)
    assert not second.done()
    assert waits.tasks == set(), "no wait of the role"
    await actor.weights.publish(V2, model(2))
    await actor.weights.publish(V3, model(3))
    assert await second == V2
    assert (await rollout.weights.pull(await second))[0] == V3, "the newest, whichever was heard of"
    branch = asyncio.ensure_future(rollout.weights.newer(V3))
    await actor.weights.publish(PolicyVersion(1, 2), model(4))
    assert await branch == PolicyVersion(1, 2), "of a newer branch, though its number is lower"
    last = asyncio.ensure_future(rollout.weights.newer(PolicyVersion(1, 2)))
    await asyncio.sleep(0)
    waits.stop("the job ends")
    with pytest.raises(ChannelClosed):
        await last


async def test_of_other_tensors_whoever_waits_for_a_newer_version_hears_too(net):
    actor, (rollout,) = await grow(net, 1)
    await actor.weights.publish(V1, model(1))
    news = asyncio.ensure_future(rollout.weights.newer(V1))
    actor.weights.publisher.edition = None
    with pytest.raises(SchemaChanged):
        await actor.weights.publish(V2, {"other": np.zeros(3)})
    with pytest.raises(SchemaChanged):
        await news


async def test_who_has_the_arrays_may_not_write_them_and_keeps_them(net):
    actor, (rollout,) = await grow(net, 1)
    await actor.weights.publish(V1, model(1))
    _, first = await rollout.weights.pull(V1)
    with pytest.raises(ValueError, match="read-only"):
        first["w"][0] = 1.0
    for number, version in enumerate((V2, V3), start=2):
        await actor.weights.publish(version, model(number))
        await rollout.weights.pull(version)
    same(first, model(1))


async def test_a_pull_into_tensors_sets_all_of_them_or_none(net):
    actor, (rollout,) = await grow(net, 1)
    await actor.weights.publish(V1, {"w": np.arange(6.0), "b": np.ones(2, "f4")})
    mine = {"w": np.zeros(6), "b": np.zeros(2, "f4")}
    await rollout.weights.pull(V1, into=mine)
    assert (mine["w"].tolist(), mine["b"].tolist()) == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 1.0])
    other = {"w": np.zeros(6), "b": np.zeros(3, "f4")}
    with pytest.raises(SchemaChanged, match=r"b is float32\[2\], was float32\[3\]"):
        await rollout.weights.pull(V1, into=other)
    assert not other["w"].any()


async def test_the_publisher_serves_two_and_each_of_those_two_more(net):
    actor, rollouts = await grow(net, 5)
    await actor.weights.publish(V1, model(1))
    for rollout in rollouts:
        same((await rollout.weights.pull(V1))[1], model(1))
    moved = {worker.worker: sub.via.worker for worker, sub in actor.weights.subscribers.all.items() if sub.via}
    assert moved == {"rollout/2": "rollout/0", "rollout/3": "rollout/0", "rollout/4": "rollout/1"}
    size = rollouts[0].weights.account_in.bytes
    sent = [node.weights.sender.sent_bytes for node in (actor, *rollouts)]
    assert sent == [2 * size, 2 * size, size, 0, 0, 0]


async def test_below_a_worker_that_dies_only_what_is_missing_is_sent_again(net):
    actor, (_, first, last, *_) = await grow(net, 3)
    parent = net.nodes["rollout/0"]
    await actor.weights.publish(V1, model(1))
    came = []

    def half(here, there, frame, _):
        if here is parent and there is last and isinstance(frame, frames.WeightsParts):
            came.append(len(frame.sent))
            if len(came) > 1:
                return False
        return not (here is parent and there is last and isinstance(frame, frames.WeightsEnd))

    net.change = half
    publishing = asyncio.create_task(actor.weights.publish(V2, model(2)))
    while len(came) < 2:
        await asyncio.sleep(0)
    had = last.weights.receiver.under_way
    while sum(found is not None for found in had.hashes) < came[0]:  # a thread counts what came; the way is quicker
        await asyncio.sleep(0.001)
    missing = sum(part.nbytes for part, found in zip(had.parts, had.hashes, strict=True) if found is None)
    assert 0 < missing < had.memory.nbytes
    before = len(net.said)
    net.kill(parent)
    await publishing
    same((await last.weights.pull(V2))[1], model(2))
    assert last.weights.receiver.reroutes == 1
    again = [
        f for a, b, f in net.said[before:] if (a, b) == ("actor/0", "rollout/2") and isinstance(f, frames.WeightsParts)
    ]
    assert sum(had.parts[n].nbytes for frame in again for n in frame.sent) == missing
    assert first.weights.receiver.reroutes == 0


async def test_of_a_delta_only_blocks_that_changed_are_sent(net):
    actor, (rollout,) = await grow(net, 1)
    tensors = model(1)
    await actor.weights.publish(V1, tensors, delta=True)
    before = actor.weights.sender.sent_bytes
    tensors = {**tensors, "w": tensors["w"].copy()}
    tensors["w"][20_000] += 1
    await actor.weights.publish(V2, tensors, delta=True)
    assert actor.weights.sender.sent_bytes - before == 64 << 10
    same((await rollout.weights.pull(V2))[1], tensors)
    late = net.node("rollout/1", pod="z")
    await net.route(actor, late)
    same((await late.weights.pull(V2))[1], tensors)


def damage(times):
    """The first byte of so many messages of parts."""

    def change(here, there, frame, buffers):
        nonlocal times
        if isinstance(frame, frames.WeightsParts) and buffers and times:
            times -= 1
            buffers[0] = bytes([buffers[0][0] ^ 1]) + buffers[0][1:]
        return True

    return change


async def test_what_came_damaged_is_fetched_anew_and_counted(net):
    actor, (rollout,) = await grow(net, 1)
    net.change = damage(MAX_REFUSED - 1)
    await actor.weights.publish(V1, model(1, mb=2))
    same((await rollout.weights.pull(V1))[1], model(1, mb=2))
    receiver = rollout.weights.receiver
    assert (receiver.corrupt, receiver.retries) == (MAX_REFUSED - 1, MAX_REFUSED - 1)
    net.change = damage(MAX_REFUSED - 1)  # a version that arrived has set the count back
    await actor.weights.publish(V2, model(2, mb=2))
    same((await rollout.weights.pull(V2))[1], model(2, mb=2))


async def test_what_is_damaged_here_is_not_built_on_a_second_time(net):
    actor, (rollout,) = await grow(net, 1)
    tensors = model(1, mb=1)
    await actor.weights.publish(V1, tensors, delta=True)
    receiver = rollout.weights.receiver
    receiver.here.lent[5] ^= 1
    tensors = {**tensors, "w": tensors["w"].copy()}
    tensors["w"][-1] += 1
    publishing = asyncio.create_task(actor.weights.publish(V2, tensors, delta=True))
    while receiver.here.version != V2:
        assert rollout.errors == []
        await asyncio.sleep(0)
    same((await rollout.weights.pull(V2))[1], tensors)
    assert (receiver.corrupt, receiver.retries) == (1, 1)
    await publishing


async def test_parts_of_another_version_and_those_from_a_stranger_are_none_of_this_one(net):
    actor, (rollout,) = await grow(net, 1)
    stranger = net.node("actor/9", pod="q")
    net.link(stranger, rollout)
    net.change = lambda here, there, frame, buffers: isinstance(frame, frames.WeightsHead)
    publishing = asyncio.create_task(actor.weights.publish(V2, model(2, mb=2)))
    receiver = rollout.weights.receiver
    while not net.frames_of(frames.WeightsEnd):
        await asyncio.sleep(0)
    wrong = model(3, mb=2)["w"].tobytes()

    def say(node, version):
        parts = frames.WeightsParts(version.branch, version.number, 0, [1], [0])
        node.peer("rollout/0").post(Message(frames.encode(parts), buffers=[memoryview(wrong)]))

    net.change = lambda *_: True
    say(stranger, V2)
    say(actor, V1)
    net.link(actor, rollout)  # which asks for what has not come
    await publishing
    same((await rollout.weights.pull(V2))[1], model(2, mb=2))
    assert (receiver.corrupt, receiver.arrivals) == (0, 1)


async def test_damage_that_does_not_end_ends_the_worker(pod_net):
    actor, (rollout,) = await grow(pod_net, 1)
    pod_net.change = damage(1000)
    publishing = asyncio.create_task(actor.weights.publish(V1, model(1, mb=2)))
    while not rollout.errors:
        await asyncio.sleep(0)
    assert isinstance(rollout.errors[0], WeightsCorrupt)
    assert rollout.weights.receiver.corrupt == MAX_REFUSED
    publishing.cancel()


async def test_what_a_relay_passes_on_damaged_comes_from_the_source(net):
    actor, (_, _, below) = await grow(net, 3)

    def damaged(here, there, frame, buffers):
        if there is below and here is not actor and buffers:
            buffers[0] = bytes([buffers[0][0] ^ 1]) + buffers[0][1:]
        return True

    net.change = damaged
    await actor.weights.publish(V1, model(1, mb=2))
    same((await below.weights.pull(V1))[1], model(1, mb=2))
    receiver = below.weights.receiver
    assert (receiver.corrupt, receiver.retries, receiver.reroutes) == (1, 1, 1)


@pytest.fixture
def copying_stops(monkeypatch):
    """Versions are copied in threads, which wait before the third part for `go_on`."""
    monkeypatch.setattr(channel, "INLINE_BYTES", 0)
    monkeypatch.setattr(edition, "PART_BYTES", 64 << 10)
    copy, begin, go_on, copied = copying.copy_bytes, threading.Event(), threading.Event(), 0

    def copy_bytes(target, source):
        nonlocal copied
        if threading.current_thread() is not threading.main_thread():
            assert (begin if copied < 2 else go_on).wait(10)
            copied += 1
        copy(target, source)

    monkeypatch.setattr(copying, "copy_bytes", copy_bytes)
    yield begin, go_on
    begin.set()
    go_on.set()


async def test_parts_are_sent_while_others_are_copied(net, copying_stops):
    begin, go_on = copying_stops
    actor, (rollout,) = await grow(net, 1)
    publishing = asyncio.create_task(actor.weights.publish(V1, model(1, mb=1)))
    while not net.frames_of(frames.WeightsHead):
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)  # and looks in vain for a part
    begin.set()
    while not net.frames_of(frames.WeightsParts) and not publishing.done():
        await asyncio.sleep(0.001)
    assert net.frames_of(frames.WeightsParts)
    assert not publishing.done(), "some parts are still to be copied"
    go_on.set()
    await publishing
    same((await rollout.weights.pull(V1))[1], model(1, mb=1))


async def test_a_version_whose_publisher_is_cancelled_while_it_is_copied_is_sent_no_further(net, copying_stops):
    begin, go_on = copying_stops
    actor, (rollout,) = await grow(net, 1)
    publishing = asyncio.create_task(actor.weights.publish(V1, model(1, mb=1)))
    begin.set()
    while not net.frames_of(frames.WeightsParts):
        await asyncio.sleep(0.001)
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)
    go_on.set()
    made = actor.weights.publisher.edition
    assert made.dead
    await actor.weights.publish(V2, model(2, mb=1))
    same((await rollout.weights.pull(V2))[1], model(2, mb=1))
    assert len(made.hashes) < 16, "nor is the rest of it copied"


async def test_other_tensors_are_refused_at_both_ends(net):
    actor, (rollout,) = await grow(net, 1)
    await actor.weights.publish(V1, {"w": np.ones(3)})
    with pytest.raises(SchemaChanged, match="b is new"):
        await actor.weights.publish(V2, {"w": np.ones(3), "b": np.ones(3)})
    other = net.node("actor/1", pod="q")
    await net.route(other, rollout)
    with pytest.raises(SchemaChanged, match=r"worker rollout/0#1 refused weights b0-2.*w is float64\[4\]"):
        await other.weights.publish(V2, {"w": np.ones(4)})
    with pytest.raises(SchemaChanged, match=r"w is float64\[4\], was float64\[3\]"):
        await rollout.weights.pull(V2)
    assert (await rollout.weights.pull(V1))[0] == V1
    third = net.node("actor/2", pod="r")
    await net.route(third, rollout)
    telling = asyncio.create_task(third.weights.publish(V2, {"w": np.ones(4)}))
    while not net.frames_of(frames.WeightsEnd, by="actor/2"):
        await asyncio.sleep(0)
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    assert rollout.weights.receiver.refused == 1, "what was refused once is not looked at again"


async def test_a_version_with_other_bytes_is_known_wherever_it_was_seen(pod_net):
    actor, (rollout,) = await grow(pod_net, 1)
    await actor.weights.publish(V1, model(1, mb=2))
    await actor.weights.publish(V1, model(1, mb=2))
    with pytest.raises(InvariantBroken, match="weights b0-1 exist twice with different bytes"):
        await actor.weights.publish(V1, model(2, mb=2))
    again = pod_net.node("actor/1", pod="q")
    await again.weights.publish(V1, model(3, mb=2))
    await pod_net.route(again, rollout)
    while not again.errors:
        await asyncio.sleep(0)
    assert "weights b0-1 exist twice with different bytes" in str(again.errors[0])
    assert again.weights.checksums.conflicts == 1


async def test_within_a_pod_nothing_is_sent_and_memory_is_given_back(pod_net):
    actor, (rollout,) = await grow(pod_net, 1, pods="a")
    for number in range(1, 6):
        version = PolicyVersion(0, number)
        await actor.weights.publish(version, model(number))
        same((await rollout.weights.pull(version))[1], model(number))
    assert actor.weights.sender.sent_bytes == 0
    assert [f.number for f in pod_net.frames_of(frames.WeightsFree)] == [1, 2, 3, 4]
    assert len(actor.weights._arenas._kept) == 2
    arena = actor.weights.publisher.edition.arena
    assert list(arena.leases) == [("rollout/0#1", 0, 5)]
    actor.weights.on_unroute("rollout/0", 1)
    assert list(arena.leases) == []


async def test_a_neighbour_maps_what_another_of_its_pod_was_sent(pod_net):
    actor, (first, second) = await grow(pod_net, 2, pods="bb")
    await actor.weights.publish(V1, model(1))
    for rollout in (first, second):
        same((await rollout.weights.pull(V1))[1], model(1))
    assert actor.weights.sender.sent_bytes == first.weights.account_in.bytes
    assert first.weights.sender.sent_bytes == 0
    assert second.weights.receiver.here.arena is not None
    assert second.weights.receiver.here.adopted


async def test_where_memory_cannot_be_mapped_it_is_sent(pod_net, monkeypatch):
    actor, (rollout,) = await grow(pod_net, 1, pods="a")
    monkeypatch.setattr(rollout.weights._arenas, "map", lambda shared: None)
    await actor.weights.publish(V1, model(1, mb=2))
    same((await rollout.weights.pull(V1))[1], model(1, mb=2))
    assert actor.weights.sender.sent_bytes == rollout.weights.account_in.bytes
    assert pod_net.frames_of(frames.WeightsSubscribe, by="rollout/0")[-1].pid == 0
    receiver = rollout.weights.receiver
    assert (receiver.corrupt, receiver.retries) == (0, 0), "what was only offered is not damaged"


async def test_every_rank_sends_its_own_shards_and_a_view_only_what_it_wants(net):
    ranks = [net.node(f"actor/{n}", pod=f"a{n}", rank=n) for n in range(2)]
    net.gang = [rank.endpoint for rank in ranks]
    rollout = net.node("rollout/0", pod="b")
    await net.route(ranks[0], rollout)
    whole = np.arange(24.0).reshape(4, 6)
    sharding = Sharding(shape=(4, 6), mesh=(2,), dims=(0,))
    for version, factor in ((V1, 1.0), (V2, 2.0)):
        shards = [{"w": Shard(factor * half, sharding)} for half in np.split(whole, 2)]
        await asyncio.gather(*(r.weights.publish(version, s) for r, s in zip(ranks, shards, strict=True)))
        _, found = await rollout.weights.pull(version)
        np.testing.assert_array_equal(found["w"], factor * whole)
    assert [rank.weights.sender.sent_bytes for rank in ranks] == [2 * 96, 2 * 96]
    rollout.weights.select(View(1, {"w": Sharding(shape=(4, 6), mesh=(2,), dims=(1,))}))
    _, found = await rollout.weights.pull(V2)
    np.testing.assert_array_equal(found["w"], 2.0 * whole[:, 3:])
    three = Sharding(shape=(6, 6), mesh=(3,), dims=(0,))
    with pytest.raises(InvariantBroken, match="sharded over other ranks than the gang has: got 3 shards, wanted 2"):
        await ranks[0].weights.publish(V3, {"w": Shard(np.zeros((2, 6)), three)})


async def test_who_comes_back_from_a_relay_that_died_meets_every_rank_again(net):
    ranks = [net.node(f"actor/{n}", pod=f"a{n}", rank=n) for n in range(2)]
    net.gang = [rank.endpoint for rank in ranks]
    parent, below = (net.node(f"rollout/{n}", pod="bc"[n]) for n in range(2))
    for rollout in (parent, below):
        await net.route(ranks[0], rollout)
    sharding = Sharding(shape=(4, 6), mesh=(2,), dims=(0,))

    async def publish(version):
        shards = [{"w": Shard(np.full((2, 6), float(version.number + n)), sharding)} for n in range(2)]
        await asyncio.gather(*(r.weights.publish(version, s) for r, s in zip(ranks, shards, strict=True)))

    def met():
        return {(feed.peer.worker, feed.kind) for feed in below.weights.receiver.feeds.all.values()}

    await publish(V1)
    assert met() == {("actor/0", "root"), ("actor/1", "source")}
    ranks[0].peer("rollout/1").post(Message(frames.encode(frames.WeightsMove(parent.endpoint.to_dict()))))
    while met() != {("actor/0", "root"), ("rollout/0", "parent")}:
        await asyncio.sleep(0)
    net.kill(parent)
    while below.weights.receiver.reroutes == 0:
        await asyncio.sleep(0)
    await publish(V2)
    assert met() == {("actor/0", "root"), ("actor/1", "source")}
    np.testing.assert_array_equal((await below.weights.pull(V2))[1]["w"][:, 0], [2.0, 2.0, 3.0, 3.0])


async def test_a_late_worker_is_served_by_whoever_has_a_version_where_there_is_no_publisher(net):
    actor, (rollout,) = await grow(net, 1)
    await actor.weights.publish(V1, model(1, mb=2))
    await rollout.weights.pull(V1)
    net.kill(actor)
    late = net.node("rollout/1", pod="c")
    late.weights.on_route(rollout.endpoint, outgoing=False)
    same((await late.weights.pull(V1))[1], model(1, mb=2))
    assert [feed.kind for feed in late.weights.receiver.feeds.all.values()] == ["late"]
    again = net.node("actor/1", pod="q")
    await net.route(again, late)
    await net.route(again, rollout)
    await again.weights.publish(V2, model(2, mb=2))
    same((await late.weights.pull(V2))[1], model(2, mb=2))
    assert [feed.kind for feed in late.weights.receiver.feeds.all.values()] == ["root"]


async def test_publishing_does_not_wait_for_those_that_are_gone(net):
    actor, (first, second) = await grow(net, 2)
    net.kill(first)
    await actor.weights.publish(V1, model(1))
    same((await second.weights.pull(V1))[1], model(1))
    assert [peer.worker for peer in actor.weights.subscribers.all] == ["rollout/1"]


# --- whoever is frozen ------------------------------------------------------------------------------------------------
@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(channel, "RELAY_S", 0.2)
    monkeypatch.setattr(channel, "CONFIRM_S", 0.2)
    monkeypatch.setattr(channel, "SLOWEST", 10**12)


async def test_below_a_worker_that_the_driver_gives_up_the_source_is_asked_before_any_link_ends(net):
    actor, (parent, first, last) = await grow(net, 3)
    await actor.weights.publish(V1, model(1))
    net.freeze(parent)
    publishing = asyncio.create_task(actor.weights.publish(V2, model(2)))
    while first.weights.receiver.here.version != V2:
        await asyncio.sleep(0.001)
    assert last.weights.receiver.here.version == V1
    began = asyncio.get_running_loop().time()
    last.weights.on_unroute("rollout/0", 1)  # the driver told this one first
    same((await last.weights.pull(V2))[1], model(2))
    assert asyncio.get_running_loop().time() - began < channel.RELAY_S
    assert last.weights.receiver.reroutes == 1
    net.unroute(parent)
    await publishing


async def test_who_is_given_up_leaves_those_below_it_to_the_source(net):
    """The source alone has been told."""
    actor, (parent, _, last) = await grow(net, 3)
    await actor.weights.publish(V1, model(1))
    net.freeze(parent)
    publishing = asyncio.create_task(actor.weights.publish(V2, model(2)))
    await asyncio.sleep(0.05)
    actor.weights.on_unroute("rollout/0", 1)
    async with asyncio.timeout(channel.RELAY_S):
        same((await last.weights.pull(V2))[1], model(2))
        await publishing
    assert actor.weights.subscribers.all[actor.peer("rollout/2")].via is None


@pytest.mark.usefixtures("quick")
async def test_below_a_frozen_worker_versions_come_from_the_source_and_nobody_waits_for_it(net):
    actor, (parent, first, last) = await grow(net, 3)
    await actor.weights.publish(V1, model(1))
    net.freeze(parent)
    await actor.weights.publish(V2, model(2))
    subscribers = actor.weights.subscribers
    assert (subscribers.taken_over, subscribers.late) == (1, 1)
    for rollout in (first, last):
        same((await rollout.weights.pull(V2))[1], model(2))
    await actor.weights.publish(V3, model(3))
    assert subscribers.late == 1, "it is not waited for again"
    joining = net.node("rollout/3", pod="h")
    await net.route(actor, joining)
    assert subscribers.all[actor.peer("rollout/3")].via is not actor.peer("rollout/0"), "nor does it pass anything on"
    same((await joining.weights.pull(V3))[1], model(3))
    assert (subscribers.taken_over, subscribers.late) == (1, 1)


@pytest.mark.usefixtures("quick")
async def test_who_thaws_is_waited_for_again_once_it_has_a_version(net):
    actor, (slow, _) = await grow(net, 2)
    net.freeze(slow)
    await actor.weights.publish(V1, model(1))
    assert [sub.peer.worker for sub in subscribed(actor) if sub.is_late] == ["rollout/0"]
    net.frozen.clear()
    net.link(actor, slow)
    same((await slow.weights.pull(V1))[1], model(1))
    await asyncio.sleep(0.01)
    assert [sub.peer.worker for sub in subscribed(actor) if sub.is_late] == []
    await actor.weights.publish(V2, model(2))
    assert slow.weights.receiver.here.version == V2, "the publisher waited"


@pytest.mark.usefixtures("quick")
async def test_who_is_late_within_a_pod_is_sent_one_version_at_a_time(pod_net):
    actor, (slow, well) = await grow(pod_net, 2, pods="aa")
    await actor.weights.publish(V1, model(1))
    pod_net.freeze(slow)
    for number in range(2, 7):
        await actor.weights.publish(PolicyVersion(0, number), model(number))
        await well.weights.pull(PolicyVersion(0, number))
    assert len(pod_net.frames_of(frames.WeightsHead, to="rollout/0")) == 2, "and no more until it confirms the second"
    size = actor.weights.publisher.edition.memory.nbytes
    assert actor.weights.sender.sent_bytes < 3 * size, "some are mapped: two arenas wait for the one that is late"


@pytest.mark.usefixtures("quick")
async def test_who_asks_again_is_not_sent_back_to_the_relay_that_was_slow(pod_net):
    actor = pod_net.node("actor/0", pod="a")
    parent, below = pod_net.node("rollout/0", pod="b"), pod_net.node("rollout/1", pod="b")
    for rollout in (parent, below):
        await pod_net.route(actor, rollout)
    await actor.weights.publish(V1, model(1))
    pod_net.freeze(parent)
    asked = 0

    def impatient(here, there, frame, _):
        nonlocal asked
        if (here, there) == (actor, below) and isinstance(frame, frames.WeightsHead) and not asked:
            asked += 1
            below.weights.receiver.leave_relays()  # its own patience ends before it hears of the source
        return True

    pod_net.change = impatient
    await actor.weights.publish(V2, model(2))
    assert (asked, actor.weights.subscribers.taken_over) == (1, 1)
    assert actor.weights.subscribers.late in (1, 2), "the frozen one, and on a busy machine the other, too"
    same((await below.weights.pull(V2))[1], model(2))
    assert [sub.via for sub in subscribed(actor) if sub.peer.worker == "rollout/1"] == [None]
    assert below.weights.receiver.reroutes == 0, "nobody was lost"


@pytest.mark.usefixtures("quick")
async def test_a_pull_is_given_up_when_nothing_has_come_for_long(net):
    actor, (rollout,) = await grow(net, 1)
    rollout.weights._host.peer_wait_s = 0.5
    parts = 0

    def slowly(here, there, frame, _):
        nonlocal parts
        parts += isinstance(frame, frames.WeightsParts)
        return True

    net.change = slowly
    with pytest.raises(DeadlineExceeded, match=r"weights b0-1 or newer for rollout/0 .*actor/0"):
        await rollout.weights.pull(V1)
    loop = asyncio.get_running_loop()
    began = loop.time()
    pulling = asyncio.create_task(rollout.weights.pull(V1))
    for _ in range(12):  # longer than the bound in all
        await asyncio.sleep(0.1)
        rollout.weights.receiver.arrivals += 1
    assert not pulling.done()
    assert loop.time() - began > 1.0
    await actor.weights.publish(V1, model(1))
    same((await pulling)[1], model(1))


@pytest.mark.usefixtures("quick")
async def test_within_a_pod_what_a_frozen_neighbour_has_mapped_is_taken_from_the_source(pod_net):
    actor = pod_net.node("actor/0", pod="a")
    parent, below = pod_net.node("rollout/0", pod="b"), pod_net.node("rollout/1", pod="b")
    for rollout in (parent, below):
        await pod_net.route(actor, rollout)
    await actor.weights.publish(V1, model(1))

    def half(here, there, frame, _):
        if (here, there) == (parent, below) and isinstance(frame, frames.WeightsEnd):
            pod_net.freeze(parent)
            return False
        return True

    pod_net.change = half
    await actor.weights.publish(V2, model(2))
    same((await below.weights.pull(V2))[1], model(2))
    assert actor.weights.subscribers.taken_over == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(40))
async def test_whatever_freezes_and_dies_the_others_get_each_version(tmp_path, monkeypatch, seed):
    """Random trees in pods, with late joiners; who is lost is frozen or killed, and its end heard of in any order."""
    monkeypatch.setattr(edition, "PART_BYTES", PART >> 8)  # as many parts as of 5 MiB: what happens is about messages
    chance = random.Random(seed)
    net = WeightsNet(tmp_path if chance.random() < 0.5 else None)
    actor, well, count = net.node("actor/0", pod="a"), [], 0

    async def join():
        nonlocal count
        node = net.node(f"rollout/{count}", pod=chance.choice("bcd"))
        count += 1
        await net.route(actor, node)
        well.append(node)

    async def lose():
        node = well.pop(chance.randrange(len(well)))
        how = chance.choice(["freeze", "freeze, give up", "kill", "kill, give up", "give up, kill"])
        if how.startswith("freeze"):
            net.freeze(node)
        for part in how.split(", "):
            await asyncio.sleep(chance.choice([0, 0.005]))
            if part == "kill":
                net.kill(node)
            elif part == "give up":
                net.unroute(node)

    async with asyncio.timeout(60):
        for _ in range(chance.randint(2, 6)):
            await join()
        for number in range(1, 4):
            version = PolicyVersion(0, number)
            publishing = asyncio.create_task(actor.weights.publish(version, model(number, mb=5 / 256)))
            for _ in range(chance.randint(0, 3)):
                for _ in range(chance.randint(0, 12)):
                    await asyncio.sleep(0)
                await (lose() if len(well) > 1 and chance.random() < 0.6 else join())
            await publishing
            for node in well:
                async with asyncio.timeout(5 * (channel.RELAY_S + channel.CONFIRM_S)):
                    same((await node.weights.pull(version))[1], model(number, mb=5 / 256))
        errors = [error for node in net.nodes.values() for error in node.errors]
        await net.close()
    assert errors == []


def subscribed(node):
    return list(node.weights.subscribers.all.values())


async def test_the_highest_branch_is_that_of_all_it_has_or_is_being_sent(net):
    actor, (rollout,) = await grow(net, 1)
    await actor.weights.publish(PolicyVersion(3, 1), model(1, mb=2))
    assert (actor.weights.highest_branch, rollout.weights.highest_branch) == (3, 3)
    net.change = lambda here, there, frame, buffers: not isinstance(frame, frames.WeightsEnd)
    publishing = asyncio.create_task(actor.weights.publish(PolicyVersion(5, 2), model(2, mb=2)))
    while rollout.weights.receiver.under_way is None:
        await asyncio.sleep(0)
    assert rollout.weights.highest_branch == 5
    publishing.cancel()
