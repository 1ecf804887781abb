"""Links of a worker to others that come and go: what a replaced peer leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_worker.channels import frames
from rlinf_worker.links import endpoint
from rlinf_worker.links.endpoint import Listener
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.message import Message
from rlinf_worker.runtime.peers import Peers


def shared_memory() -> int:
    """Bytes of rings that this process has mapped."""
    gc.collect()
    size = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/" in line:
            start, _, end = line.split()[0].partition("-")
            size += int(end, 16) - int(start, 16)
    return size


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def start(tmp_path_factory, monkeypatch):
    """`peers = await start("a", 1)`: one life of a worker, which for the others is another process of its pod."""
    monkeypatch.setattr(endpoint, "_HERE", {})
    run_dir = str(tmp_path_factory.mktemp("r"))
    errors: list[BaseException] = []
    async with contextlib.AsyncExitStack() as stack:

        async def make(worker, attempt=1, **settings):
            me = Identity(job="j", worker=worker, attempt=attempt)
            listener = await Listener.open(
                me, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1", **settings
            )
            endpoint._HERE.clear()
            peers = Peers(listener, on_fatal=errors.append)
            stack.push_async_callback(peers.close)
            peers.handlers[frames.Pull] = lambda peer, frame, message: None
            peers.start()
            return peers

        yield make
    assert errors == []


async def test_peers_that_were_replaced_leave_no_task_and_no_ring(start):
    me = await start("a")
    held = []
    for attempt in range(1, 6):
        other = await start("b", attempt)
        peer = me.want(other.listener.endpoint, by="test", at_once=True)
        await until(lambda peer=peer: peer.link is not None)
        assert peer.link.kind == "shm"
        peer.post(Message(frames.encode(frames.Pull("c", [])), np.ones(3 << 20, np.uint8)))
        await asyncio.wait_for(peer.drained.wait(), 10)
        await other.close()
        await until(lambda peer=peer: peer.link is None)
        held.append((len(me._tasks), shared_memory()))
    # of the fourth and the fifth life alike: a keeper that dials, and nothing of those before
    assert held[4][0] == held[0][0], held
    assert held[4][1] == held[0][1] == 0, held
    assert len(me._peers) == 1


async def test_a_message_that_a_role_still_reads_outlives_the_link_that_brought_it(start):
    me, other = await start("a"), await start("b")
    got: list[Message] = []
    me.handlers[frames.Pull] = lambda peer, frame, message: got.append(message)
    peer = other.want(me.listener.endpoint, by="test", at_once=True)
    await until(lambda: peer.link is not None)
    peer.post(Message(frames.encode(frames.Pull("c", [])), np.full(1 << 20, 7, np.uint8)))
    await until(lambda: got)
    await other.close()
    (there,) = me._peers.values()
    await until(lambda: there.link is None)
    assert (got.pop().value() == 7).all()
    await until(lambda: shared_memory() == 0)
