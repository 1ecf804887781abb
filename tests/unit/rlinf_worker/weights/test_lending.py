"""Child processes of a worker read a version of the weights where the worker received it."""

import asyncio
import dataclasses
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.weights.layout import Sharding
from rlinf_worker.weights.lending import BorrowedWeights
from rlinf_worker.weights.planning import View
from tests.fakes.weights_child import Child
from tests.fakes.weights_net import WeightsNet

MB = 1 << 18  # numbers of four bytes
ROWS, COLUMNS = Sharding(shape=(8, MB), mesh=(2,), dims=(0,)), Sharding(shape=(8, MB), mesh=(2,), dims=(1,))


def version(number):
    return PolicyVersion(0, number)


def weights(value):
    w = np.arange(8 * MB, dtype="f4").reshape(8, MB) + value
    return {"w": w, "b": np.full(3, value, "f8"), "name": b"abc", "steps": value}


@pytest.fixture(params=["received", "a peer's", "of no shared memory"])
async def pair(request):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        net = WeightsNet(None if request.param == "of no shared memory" else Path(folder))
        actor = net.node("actor/0", pod="a")
        rollout = net.node("rollout/0", pod="a" if request.param == "a peer's" else "b")
        await net.route(actor, rollout)
        async with asyncio.timeout(50):
            yield actor, rollout
            await net.close()
        assert [error for node in net.nodes.values() for error in node.errors] == []


async def test_a_child_reads_what_its_worker_was_sent_where_it_lies(pair):
    actor, rollout = pair
    await actor.weights.publish(version(1), weights(1))
    with Child() as child:
        async with rollout.weights.lent(version(1)) as lent:
            assert lent.version == rollout.weights.version == version(1)
            has_it = [arena for node in pair for arena in node.weights._arenas._kept]
            is_copied = lent.memory[2:4] not in [arena.shared[2:4] for arena in has_it if arena.shared is not None]
            assert is_copied is (rollout.weights._arenas._shm_dir is None), "the host has it once"
            found = child.read(lent)
    assert found["w"].tobytes() == weights(1)["w"].tobytes()
    assert (found["b"].tolist(), found["name"], found["steps"]) == ([1.0] * 3, b"abc", 1)


@pytest.mark.parametrize(("sharding", "cut"), [(ROWS, np.s_[4:]), (COLUMNS, np.s_[:, MB // 2 :])])
async def test_a_child_sets_its_own_part_of_the_tensors_all_or_none(net, sharding, cut):
    actor, rollout = net.node("actor/0", pod="a"), net.node("rollout/0", pod="b")
    await net.route(actor, rollout)
    w, view = weights(1)["w"], View(1, {"w": sharding})
    await actor.weights.publish(version(1), {"w": w, "v": w[0]})
    with Child() as child:
        async with rollout.weights.lent(version(1)) as lent:
            mine = {"w": np.zeros_like(w[cut]), "v": np.zeros(MB, "f4")}
            was, now = child.copy(lent, into=mine, view=view)
            assert was == version(1)
            assert now["w"].tobytes() == np.ascontiguousarray(w[cut]).tobytes()
            assert now["v"].tobytes() == w[0].tobytes()
            short = {**mine, "v": mine["v"][1:]}
            with pytest.raises(RuntimeError, match=r"SchemaChanged.*v is float32\[262144\], was float32\[262143\]"):
                child.copy(lent, into=short, view=view)


async def test_what_is_lent_stays_as_it_is_while_newer_versions_come(pair):
    actor, rollout = pair
    await actor.weights.publish(version(1), weights(1))
    with Child() as child:
        async with rollout.weights.lent(version(1)) as lent:
            child.keep(lent)
            for number in range(2, 6):  # more than there are arenas
                await actor.weights.publish(version(number), weights(number))
                await rollout.weights.pull(version(number))
            assert child.kept()["w"][0, :2].tolist() == [1.0, 2.0]
        for number in range(6, 9):
            await actor.weights.publish(version(number), weights(number))
            async with rollout.weights.lent(version(number)) as lent:
                assert child.read(lent)["w"][0, :2].tolist() == [number, number + 1]


async def test_what_was_lent_is_used_again_once_it_is_given_back(pair):
    actor, rollout = pair
    places = set()
    for number in range(1, 9):
        await actor.weights.publish(version(number), weights(number))
        async with rollout.weights.lent(version(number)) as lent:
            places.add(lent.memory[2:4])
    assert len(places) <= 3


async def test_two_that_lend_do_not_write_over_each_other(pair):
    actor, rollout = pair
    await actor.weights.publish(version(1), weights(1))
    with Child() as child:
        async with rollout.weights.lent(version(1)) as lent:
            await actor.weights.publish(version(2), weights(2))

            async def second():
                async with rollout.weights.lent(version(2)) as lent:
                    return child.read(lent)["w"][0, 0]

            waiting = asyncio.create_task(second())
            await asyncio.sleep(0.05)
            assert child.read(lent)["w"][0, 0] == 1.0
            assert not waiting.done()
        assert await waiting == 2.0


async def test_a_child_that_cannot_have_it_is_told_what_to_do(pair):
    actor, rollout = pair
    await actor.weights.publish(version(1), weights(1))
    async with rollout.weights.lent(version(1)) as lent:
        pid, fd, device, inode, size = lent.memory
    other = dataclasses.replace(lent, memory=(pid, fd, device, inode + 1, size))
    with Child() as child, pytest.raises(RuntimeError, match=r"UserError: weights b0-1 cannot be read by process"):
        child.read(other)
    mine = BorrowedWeights().arrays(lent)
    with pytest.raises(ValueError, match="read-only"):
        mine["w"][0, 0] = 3.0
    assert pid == os.getpid()
