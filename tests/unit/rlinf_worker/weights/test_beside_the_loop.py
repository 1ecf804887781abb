"""What takes long of a version is done beside the event loop, and nobody is given memory that it still works on."""

import asyncio
import threading

import numpy as np
import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.links import frames
from rlinf_worker.weights import copying, edition, planning, tensors
from rlinf_worker.weights.layout import Sharding
from rlinf_worker.weights.planning import View
from rlinf_worker.weights.tensors import Shard

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)
MB = 1 << 18  # numbers of four bytes


async def pair(net):
    actor, rollout = net.node("actor/0", pod="a"), net.node("rollout/0", pod="b")
    await net.route(actor, rollout)
    return actor, rollout


class Stopped:
    """Calls of a function from other threads than the test's wait until `go_on` is set."""

    def __init__(self, call):
        self._call, self.begun, self.go_on, self.at_once, self.most = call, threading.Event(), threading.Event(), 0, 0

    def __call__(self, *args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            self.begun.set()
            assert self.go_on.wait(20)
            self.at_once -= 1
        return self._call(*args, **kwargs)

    async def wait_begun(self):
        """While the loop runs: else this would never come back."""
        while not self.begun.is_set():
            await asyncio.sleep(0.001)


class Noted:
    """Whether calls of a function came from the test's thread."""

    def __init__(self, call):
        self._call, self.threads = call, set()

    def __call__(self, *args, **kwargs):
        self.threads.add(threading.current_thread() is threading.main_thread())
        return self._call(*args, **kwargs)


@pytest.fixture
def stop(monkeypatch):
    stopped = []

    def stop(owner, name):
        stopped.append(Stopped(getattr(owner, name)))
        monkeypatch.setattr(owner, name, stopped[-1])
        return stopped[-1]

    yield stop
    for one in stopped:
        one.go_on.set()


def weights(value, *, mb=2):
    return {"w": np.full(mb * MB, value, "f4")}


async def test_the_loop_goes_on_while_a_receiver_copies_what_came(net, stop):
    actor, rollout = await pair(net)
    copies = stop(copying, "copy_bytes")
    publishing = asyncio.create_task(actor.weights.publish(V1, weights(1)))
    await copies.wait_begun()
    assert rollout.weights.receiver.under_way.hashes == [None], "it is not here before it has been copied and checked"
    copies.go_on.set()
    await publishing
    assert (await rollout.weights.pull(V1))[1]["w"].tolist() == [1.0] * (2 * MB)


async def test_small_versions_cost_no_thread(net, stop):
    actor, rollout = await pair(net)
    copies = stop(copying, "copy_bytes")
    await actor.weights.publish(V1, {"w": np.ones(7)})
    await rollout.weights.pull(V1)
    assert not copies.begun.is_set()


@pytest.mark.parametrize("where", ["in a part", "between two"])
async def test_memory_that_is_still_written_is_given_to_nobody(net, stop, monkeypatch, where):
    actor, rollout = await pair(net)
    copies = stop(copying, "copy_bytes") if where == "in a part" else stop(edition.Assembly, "add")
    if where == "between two":
        monkeypatch.setattr(edition.Assembly, "add", lambda *args: copies(*args))
    publishing = asyncio.create_task(actor.weights.publish(V1, weights(1)))
    await copies.wait_begun()
    old = rollout.weights.receiver.under_way.arena
    rollout.weights.select(View(1, {"w": Sharding(shape=(2 * MB,), mesh=(2,), dims=(0,))}))
    assert rollout.weights.receiver.under_way is None, "it was given up"
    assert old.held == 0
    assert old.busy
    assert rollout.weights._arenas.take(old.nbytes) is not old
    copies.go_on.set()
    await publishing
    assert (await rollout.weights.pull(V1))[1]["w"].tolist() == [1.0] * MB
    assert rollout.weights.receiver.here.arena is old, "it goes to the next version once that is over"
    assert rollout.weights.receiver.corrupt == 0


async def test_what_was_given_up_while_it_was_copied_damages_nothing(net, stop):
    actor, rollout = await pair(net)

    def damage(here, there, frame, buffers):
        if isinstance(frame, frames.WeightsParts) and buffers:
            buffers[0] = b"?" + buffers[0][1:]
        return True

    net.change = damage
    copies = stop(copying, "copy_bytes")
    publishing = asyncio.create_task(actor.weights.publish(V1, weights(1)))
    await copies.wait_begun()
    net.change = lambda *_: True
    rollout.weights.select(View(1, {"w": Sharding(shape=(2 * MB,), mesh=(2,), dims=(0,))}))
    copies.go_on.set()
    await publishing
    assert rollout.weights.receiver.corrupt == 0, "of what nobody waits for"


async def test_what_comes_over_several_links_is_worked_off_one_by_one(net, stop):
    ranks = [net.node(f"actor/{n}", pod=f"a{n}", rank=n) for n in range(2)]
    net.gang = [rank.endpoint for rank in ranks]
    rollout = net.node("rollout/0", pod="b")
    await net.route(ranks[0], rollout)
    copies = stop(copying, "copy_bytes")
    sharding = Sharding(shape=(2 * 2 * MB,), mesh=(2,), dims=(0,))
    published = asyncio.gather(
        *(rank.weights.publish(V1, {"w": Shard(np.full(2 * MB, n, "f4"), sharding)}) for n, rank in enumerate(ranks))
    )
    await copies.wait_begun()
    while len(net.frames_of(frames.WeightsParts)) < 2:
        await asyncio.sleep(0.001)
    copies.go_on.set()
    await published
    assert (await rollout.weights.pull(V1))[1]["w"].tolist() == [0.0] * (2 * MB) + [1.0] * (2 * MB)
    assert copies.most == 1


async def test_memory_is_reserved_beside_the_loop_at_both_ends(net, stop):
    actor, rollout = await pair(net)
    makes = stop(actor.weights._arenas, "_make")
    publishing = asyncio.create_task(actor.weights.publish(V1, weights(1)))
    await makes.wait_begun()
    assert net.frames_of(frames.WeightsHead) == []
    makes.go_on.set()
    await publishing
    late = net.node("rollout/1", pod="c")
    makes = stop(late.weights._arenas, "_make")
    await net.route(actor, late)
    await makes.wait_begun()
    made = late.weights.receiver.under_way
    assert made.arena is None
    late.weights.select(View(1, {"w": Sharding(shape=(2 * MB,), mesh=(2,), dims=(0,))}))
    makes.go_on.set()
    assert (await late.weights.pull(V1))[1]["w"].tolist() == [1.0] * MB
    assert made.dead
    assert late.weights.receiver.here.arena is made.arena, "what came for one that had been given up goes to the next"
    assert made.arena.held == 1
    assert (await rollout.weights.pull(V1))[0] == V1


async def test_checksums_of_a_view_that_is_cut_otherwise_are_made_beside_the_loop(net, stop, monkeypatch):
    actor, rollout = await pair(net)
    rollout.weights.select(View(1, {"w": Sharding(shape=(4, MB), mesh=(2,), dims=(1,))}))
    hashes = stop(edition, "hash_ranges")
    planning.parts_of.cache_clear()
    plans = Noted(planning.plan)
    monkeypatch.setattr(planning, "plan", plans)
    publishing = asyncio.create_task(actor.weights.publish(V1, {"w": np.ones((4, MB), "f4")}))
    await hashes.wait_begun()
    assert net.frames_of(frames.WeightsParts) == []
    assert plans.threads == {False}, "which part is whose takes seconds for many tensors"
    hashes.go_on.set()
    await publishing
    assert (await rollout.weights.pull(V1))[1]["w"].tolist() == [[1.0] * (MB // 2)] * 4


async def test_a_part_that_comes_about_while_a_thread_looks_for_it_is_sent(net, monkeypatch):
    """Nothing else may come about later: it was the last part, and nobody would look again."""
    actor, rollout = await pair(net)
    rollout.weights.select(View(1, {"w": Sharding(shape=(8, MB), mesh=(2,), dims=(1,))}))
    hash_of, fill = edition.Edition.hash_of, edition.Edition.fill
    has_looked, is_told = threading.Event(), threading.Event()

    def looked(self, view, index):
        found = hash_of(self, view, index)
        has_looked.set()
        assert is_told.wait(20)
        return found

    def filled_late(self, *args, **kwargs):
        assert has_looked.wait(20), "nobody looked for a part before there was one"
        fill(self, *args, **kwargs)

    finish = edition.Edition.finish

    def told(self):
        finish(self)
        asyncio.get_running_loop().call_soon(is_told.set)  # after everybody was told that all is here

    monkeypatch.setattr(edition.Edition, "hash_of", looked)
    monkeypatch.setattr(edition.Edition, "fill", filled_late)
    monkeypatch.setattr(edition.Edition, "finish", told)
    async with asyncio.timeout(15):
        await actor.weights.publish(V1, {"w": np.ones((8, MB), "f4")})
        got = (await rollout.weights.pull(V1))[1]["w"]
    assert (got.shape, got.min(), actor.weights.subscribers.late) == ((8, MB // 2), 1.0, 0)


async def test_tensors_of_a_role_are_set_beside_the_loop_and_a_pull_that_is_cancelled_leaves_them_alone(net, stop):
    actor, rollout = await pair(net)
    await actor.weights.publish(V1, weights(1, mb=8))
    mine = weights(0, mb=8)
    sets = stop(tensors, "copy_into")
    pulling = asyncio.create_task(rollout.weights.pull(V1, into=mine))
    await sets.wait_begun()
    pulling.cancel()
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert not pulling.done(), "somebody still writes into them"
    sets.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert mine["w"].tolist() == [1.0] * (8 * MB)
    assert rollout.weights.version is None, "whoever was cancelled has pulled nothing"
