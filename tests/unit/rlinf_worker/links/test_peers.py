"""Links of a worker to others that come and go: what a replaced peer leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_worker.links import devices, frames, segments
from rlinf_worker.links import peers as peers_module
from rlinf_worker.links.devices import Gpu, is_news
from rlinf_worker.links.errors import ShmTooSmall
from rlinf_worker.links.hello import Identity, Refusal
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import PeerLinks
from rlinf_worker.links.settings import LinkSettings
from tests.unit.rlinf_worker.links import ipc_fake


def mapped() -> dict[tuple[int, int], str]:
    """Parts of shared memory that this process has, by their addresses."""
    gc.collect()
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/" in line:
            start, _, end = line.split()[0].partition("-")
            found[int(start, 16), int(end, 16)] = line
    return found


others: set[tuple[int, int]] = set()


@pytest.fixture(autouse=True)
def what_others_have_mapped():
    """Libraries that a test before has imported keep a page for good."""
    others.clear()
    others.update(mapped())


def shared_memory() -> int:
    """Bytes of rings that this process has mapped since the test began."""
    return sum(end - start for start, end in mapped() if (start, end) not in others)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def start(tmp_path_factory):
    """`peers = await start("a", 1)`: one life of a worker, which for the others is another process of its pod."""
    run_dir = str(tmp_path_factory.mktemp("r"))
    errors: list[BaseException] = []
    async with contextlib.AsyncExitStack() as stack:

        async def make(worker, attempt=1, **settings):
            me = Identity(job="j", worker=worker, attempt=attempt)
            listener = await Listener.open(
                me, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1", **settings
            )
            peers = PeerLinks(listener, on_fatal=errors.append)
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
        await until(lambda: shared_memory() == 0)
        held.append(len(me._tasks))
    # After the fifth life as after the first: a keeper that dials, and nothing of those before.
    await until(lambda: len(me._tasks) <= held[0])
    assert len(me._peers) == 1


async def test_a_worker_is_known_by_its_life_and_an_older_one_is_refused(start):
    me = await start("a")
    me.admit(Identity(job="j", worker="b", attempt=0), None)  # of whom nothing is known
    first = me.peer("b", 1)
    assert me.find("b", 1) is first
    assert (me.find("b", 2), me.find("c", 1)) == (None, None)
    second = me.peer("b", 2)
    assert (me.find("b", 1), me.find("b", 2)) == (None, second)
    me.admit(second.identity, None)
    with pytest.raises(Refusal, match="attempt 2 of worker b has taken the place of 1") as refused:
        me.admit(first.identity, None)
    assert refused.value.code == "stale"


async def test_a_message_that_was_sent_is_not_kept_until_the_next(start):
    """It may view the ring of the peer that waits for room."""
    me, other = await start("a"), await start("b")
    peer = me.want(other.listener.endpoint, by="test", at_once=True)
    await until(lambda: peer.link is not None)
    message = Message(frames.encode(frames.Pull("c", [])), np.ones(3 << 20, np.uint8))
    watched = weakref.ref(message)
    peer.post(message)
    assert not peer.drained.is_set(), "it is larger than what a ring takes at once"
    del message
    await asyncio.wait_for(peer.drained.wait(), 10)
    await until(lambda: watched() is None)


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


def full(directory: str, nbytes: int) -> int:
    raise ShmTooSmall("no room for a ring in /dev/shm", got="0 bytes free", next="raise its size limit")


@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize("at", ["dialer", "listener"])
async def test_a_shared_memory_that_is_full_costs_a_running_job_speed_and_one_that_starts_a_sentence(
    start, monkeypatch, caplog, has_begun, at
):
    me, other = await start("a"), await start("b")
    me.has_begun = has_begun
    errors: list[BaseException] = []
    me._on_fatal = errors.append
    make, calls = segments.make_segment, list[int]()

    def full_once(directory: str, nbytes: int) -> int:
        calls.append(1)
        return full(directory, nbytes) if len(calls) == (1 if at == "dialer" else 2) else make(directory, nbytes)

    monkeypatch.setattr(segments, "make_segment", full_once)
    peer = me.want(other.listener.endpoint, by="test", at_once=True)
    if not has_begun:
        await until(lambda: errors)
        assert isinstance(errors.pop(), ShmTooSmall)
        return
    await until(lambda: peer.link is not None)
    assert peer.link is not None
    assert peer.link.kind == "tcp"
    assert me.around_shm == 1
    (said,) = [record for record in caplog.records if record.message.startswith("a link within the pod goes by TCP")]
    assert "no room for a ring in /dev/shm" in said.__dict__["why"]
    peer.link.abort("the next one finds room again")
    await until(lambda: peer.link is not None and peer.link.kind == "shm")


async def test_without_a_port_a_link_waits_for_room_in_a_full_shared_memory(start, monkeypatch):
    me, other = await start("a"), await start("b")
    me.has_begun = True
    there = dataclasses.replace(other.listener.endpoint, port=0)
    make, calls = segments.make_segment, list[int]()

    def full_for_a_while(directory: str, nbytes: int) -> int:
        calls.append(1)
        return full(directory, nbytes) if len(calls) < 3 else make(directory, nbytes)

    monkeypatch.setattr(segments, "make_segment", full_for_a_while)
    peer = me.want(there, by="test", at_once=True)
    await until(lambda: peer.link is not None)
    assert peer.link is not None
    assert peer.link.kind == "shm"
    assert me.around_shm == 0


def test_what_is_news_of_a_gpu():
    bare, with_nccl = Gpu(uuid="g", index=0), Gpu(uuid="g", index=0, nccl="2.29.7")
    told = [(said, now) for said in (None, bare, with_nccl) for now in (None, bare, with_nccl) if is_news(said, now)]
    assert told == [(None, bare), (None, with_nccl), (bare, with_nccl)]
    assert not is_news(bare, Gpu(uuid="h", index=1, nccl="2.29.7")), "what a process calls its current one may change"


async def test_links_are_made_again_with_a_lane_once_a_process_uses_its_gpu(start, monkeypatch):
    ipc_fake.install(monkeypatch)
    me, other = await start("a"), await start("b")
    using: set[Any] = set()
    monkeypatch.setattr(devices, "of", lambda settings: ipc_fake.GPU if settings in using else None)
    monkeypatch.setattr(me.listener, "_settings", LinkSettings(linger_s=4.0))
    monkeypatch.setattr(other.listener, "_settings", LinkSettings(linger_s=3.0))
    peer = me.want(other.listener.endpoint, by="test", at_once=True)
    await until(lambda: peer.link is not None)
    (there,) = other._peers.values()
    await until(lambda: there.link is not None)
    first: Any = peer.link
    me.on_device()
    assert peer.link is first, "nothing is news"
    using.add(me.listener._settings)
    me.on_device()
    await until(lambda: peer.link not in (None, first))
    second: Any = peer.link
    assert second.beside.lane is None, "its other end has none yet"
    me.on_device()
    assert peer.link is second, "said already"
    await until(lambda: there.link is not None and there.link is not first)
    using.add(other.listener._settings)
    other.on_device()
    await until(lambda: peer.link not in (None, second))
    third: Any = peer.link
    await until(lambda: third.beside.lane is not None)
    assert third.beside.lane.kind == "ipc"
    me.on_device()
    other.on_device()
    assert peer.link is third
    assert me.tally.breaks.total() == other.tally.breaks.total() == 0, "they were closed in good order"
    await until(lambda: me.tally.open() == {"shm": 1})


async def test_a_peer_that_is_wanted_again_as_soon_as_it_is_given_up_keeps_its_back_off(start, monkeypatch):
    """The driver gives its units to the same worker again: ten times a second is no back-off."""
    monkeypatch.setattr(peers_module, "BACKOFF_S", (0.01, 0.02, 0.05, 0.4))
    me, other = await start("a"), await start("b")
    nowhere = other.listener.endpoint
    await other.close()
    loop, lost = asyncio.get_running_loop(), list[float]()

    def give_up_and_want_again(peer, why):
        lost.append(loop.time())
        me.unwant(peer, by="units")
        loop.call_soon(lambda: me.want(nowhere, by="units", at_once=True))

    me.on_unreachable.append(give_up_and_want_again)
    peer = me.want(nowhere, by="units", at_once=True)
    await until(lambda: len(lost) == 4)
    gaps = [later - earlier for earlier, later in itertools.pairwise(lost)]
    assert min(gaps[1:]) >= 0.4
    assert me.dials == 6
    assert peer.is_news()
    assert not peer.is_news(), "said once in half a minute"
