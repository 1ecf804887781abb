"""What only the shared-memory link has: rings that grow, views, a full /dev/shm, a socket path that is too long."""

from __future__ import annotations

import asyncio
import errno
import gc
import mmap
import os
import resource
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_worker.links import hello, ring, segments, shm
from rlinf_worker.links.errors import LinkBroken, ShmTooSmall, SocketPathTooLong
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.listener import Listener, socket_path
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import KIB, MIB, LinkSettings

TIGHT = LinkSettings(ring_bytes=512 * KIB, max_ring_bytes=512 * KIB)


async def take(link):
    async with asyncio.timeout(20):
        return await link.recv()


async def test_a_large_message_is_viewed_not_copied_and_outlives_its_message_and_its_link(connect):
    a, b = await connect("shm")
    sent = np.random.default_rng(0).integers(0, 255, 300_000, np.uint8)
    await a.send(Message(b"", {"x": sent}))
    with await take(b) as message:
        got = message.value()["x"]
    assert b._reader.lent == 1
    await a.close()
    await b.close()
    del a, b, message
    gc.collect()
    np.testing.assert_array_equal(got, sent)


async def test_views_that_nobody_releases_make_the_sender_wait_and_are_never_overwritten(connect):
    a, b = await connect("shm", TIGHT)
    held = []

    async def send():
        for i in range(8):
            await a.send(Message(b"", np.full(150_000, i, np.uint8)))

    sending = asyncio.create_task(send())
    for _ in range(2):
        held.append((await take(b)).value())
    await asyncio.sleep(0.1)
    assert not sending.done()
    for i in range(2, 8):
        assert [int(x[0]) for x in held] == [int(x[-1]) for x in held] == [i - 2, i - 1]
        held.pop(0)
        held.append((await take(b)).value())
    await sending


async def test_a_view_dropped_in_another_thread_gives_its_room_back(connect):
    a, b = await connect("shm", TIGHT)
    held = []
    for i in range(2):
        await a.send(Message(b"", np.full(200_000, i, np.uint8)))
        held.append((await take(b)).value())
    sending = asyncio.create_task(a.send(Message(b"", np.full(200_000, 3, np.uint8))))
    await asyncio.sleep(0.05)
    assert not sending.done()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    async with asyncio.timeout(20):
        await sending


async def test_small_messages_need_no_release(connect):
    a, b = await connect("shm", LinkSettings(ring_bytes=64 * KIB))
    held = []
    for i in range(500):
        await a.send(Message(b"", np.full(8000, i % 251, np.uint8)))
        held.append((await take(b)).value())
    assert all((x == i % 251).all() for i, x in enumerate(held))


async def test_the_ring_grows_for_large_messages_once(connect):
    a, b = await connect("shm")
    for i in range(5):
        await a.send(Message(b"", np.full(4 * MIB, i, np.uint8)))
        with await take(b) as message:
            assert (message.value() == i).all()
    assert a._writer.size >= 12 * MIB
    assert a.counters.chunked_messages == 0
    assert b._writer.size == 1 * MIB, "the other direction has sent nothing large"


async def test_a_ring_that_grows_does_not_stop_the_loop(connect, monkeypatch):
    """Filling page tables of 64 MiB takes 60 ms; it is done in threads, at both ends."""
    threads = []
    populate = segments.populate

    def populate_here(memory):
        threads.append(threading.current_thread())
        populate(memory)

    monkeypatch.setattr(segments, "populate", populate_here)
    a, b = await connect("shm")
    payload = np.ones(8 << 20, np.uint8)
    await a.send(Message(b"", payload))
    with await b.recv() as message:
        assert (message.value() == payload).all()
    assert a._writer.size == b._reader.size == 25 << 20
    async with asyncio.timeout(20):
        while len(threads) < 2:
            await asyncio.sleep(0.005)
    assert threading.main_thread() not in threads
    for size in (segments.AT_ONCE_BYTES, segments.AT_ONCE_BYTES + 4096):
        fd = segments.make_segment("/dev/shm", size)
        monkeypatch.setattr(mmap, "mmap", lambda fd, size, flags: flags)
        got: Any = segments.map_segment(fd)
        assert bool(got & mmap.MAP_POPULATE) == (size == segments.AT_ONCE_BYTES)


def test_page_tables_are_filled_ahead():
    memory = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    segments.populate(memory)
    filled = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory[::4096] = bytes(len(memory) // 4096)
    touched = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - filled
    assert touched < 200, f"{touched} faults, {filled - before} before"
    memory.close()


async def test_a_view_into_the_old_ring_survives_the_growth(connect):
    a, b = await connect("shm")
    await a.send(Message(b"", np.full(200_000, 7, np.uint8)))
    old = (await take(b)).value()
    await a.send(Message(b"", np.full(4 * MIB, 8, np.uint8)))
    assert ((await take(b)).value() == 8).all()
    assert (old == 7).all()


async def test_a_message_goes_in_chunks_when_shared_memory_is_full(connect, monkeypatch):
    a, b = await connect("shm")

    def full(*_):
        raise ShmTooSmall("no room")

    monkeypatch.setattr(segments, "make_segment", full)
    value = np.random.default_rng(1).integers(0, 255, 5 * MIB, np.uint8)
    for _ in range(2):
        sending = asyncio.create_task(a.send(Message(b"h", value)))
        message = await take(b)
        await sending
        np.testing.assert_array_equal(message.value(), value)
    assert a.counters.chunked_messages == 2


async def test_a_larger_ring_that_cannot_be_mapped_breaks_the_link_with_a_sentence(connect, monkeypatch):
    a, _ = await connect("shm")

    def none_left(fd):
        os.close(fd)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(segments, "map_segment", none_left)
    with pytest.raises(LinkBroken, match="passing it a larger ring: Cannot allocate memory"):
        await a.send(Message(b"", np.zeros(4 * MIB, np.uint8)))


async def test_a_full_shared_memory_is_a_sentence_at_both_ends_when_the_link_is_made(run_dir, monkeypatch):
    me, peer = Identity(job="j", worker="b", attempt=0), Identity(job="j", worker="a", attempt=0)
    listener = await Listener.open(me, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host=None)
    to: dict[str, Any] = {"peer": me, "shm_dir": "/dev/shm", "settings": LinkSettings()}

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            ShmTooSmall, match=r"no room for a ring in /dev/shm: got .* bytes free, wanted 1052672 bytes; raise"
        ):
            await shm.dial(listener.endpoint.unix_path, peer, **to)
    calls = []

    def full_the_second_time(fd, offset, length):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full_the_second_time)
    with pytest.raises(ShmTooSmall, match="worker b#0 cannot make its ring: got no room for a ring"):
        await shm.dial(listener.endpoint.unix_path, peer, **to)
    assert listener.refused == {"lost": 1, "shm": 1}
    await listener.close()


async def test_a_hello_whose_ring_cannot_be_mapped_is_refused_and_its_descriptors_are_closed(run_dir):
    me, peer = Identity(job="j", worker="b", attempt=0), Identity(job="j", worker="a", attempt=0)
    listener = await Listener.open(me, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host=None)

    def doorbells():
        found = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        return sum("eventfd" in str(path.readlink()) for path in found if path.is_symlink())

    before = doorbells()
    passed = [os.eventfd(0), os.eventfd(0)]  # of which neither is a ring
    with shm.make_socket() as sock:
        sock.connect(listener.endpoint.unix_path)
        socket.send_fds(sock, [hello.ask(peer, me, extra={"gpu": None})], passed)
        for fd in passed:
            os.close(fd)
        async with asyncio.timeout(20):
            while not listener.refused:
                await asyncio.sleep(0)
    assert listener.refused == {"garbage": 1}
    await listener.close()
    assert doorbells() <= before


def test_a_directory_that_is_missing_is_a_sentence():
    with pytest.raises(ShmTooSmall, match=r"cannot make shared memory in /nowhere.*mount a Memory emptyDir"):
        segments.make_segment("/nowhere", 4096)


async def test_a_run_directory_too_deep_for_a_socket_is_a_sentence_before_anything_listens(tmp_path):
    deep = str(tmp_path / ("d" * 100))
    me = Identity(job="j", worker="b", attempt=0)
    with pytest.raises(SocketPathTooLong, match=r"got \d+ bytes, wanted at most 107.*shorter run directory"):
        await Listener.open(me, pod_uid="p", run_dir=deep, shm_dir="/dev/shm", host=None)


def test_socket_paths_of_workers_attempts_and_jobs_differ_and_are_short():
    ids = [
        Identity(job=job, worker=worker, attempt=attempt)
        for job in ("j1", "j2")
        for worker in ("a/0/1", "a-0-1", "x" * 300 + "1", "x" * 300 + "2")
        for attempt in (0, 1)
    ]
    paths = {socket_path("/run/rlinf", me) for me in ids}
    assert len(paths) == len(ids)
    assert max(map(len, paths)) < 70


async def test_nothing_is_left_in_shared_memory_nor_open_when_links_are_gone(connect):
    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # in /dev/shm itself others come and go
        a, b = await connect("shm", shm_dir=folder)
        await a.send(Message(b"", np.zeros(4 * MIB, np.uint8)))
        (await take(b)).release()
        assert os.listdir(folder) == []
    await a.close()
    await b.close()
    for _ in range(1500):
        if descriptors() <= before + 2:
            break
        await asyncio.sleep(0.01)  # page tables of the last ring may still be filling, in a thread
    assert descriptors() <= before + 2, "the listener's socket and its server are all that may remain"


async def test_a_close_that_is_overtaken_by_another_ends_in_good_order(connect):
    a, _ = await connect("shm", TIGHT)  # nobody takes at the other end
    sending = asyncio.create_task(a.send(Message(b"", np.zeros(4 * MIB, np.uint8))))
    while a._large is None:
        await asyncio.sleep(0)
    first = asyncio.create_task(a.close())
    await asyncio.sleep(0)
    assert not first.done()  # it waits for that message
    a.abort("its peer ends too")
    await a.close()  # as who reads from it does
    async with asyncio.timeout(20):
        await first
    with pytest.raises(LinkBroken, match="its peer ends too"):
        await sending


async def test_garbage_in_the_ring_breaks_the_link_with_a_sentence(connect):
    a, b = await connect("shm")
    a._writer._data[:24] = b"\xff" * 24
    a._writer._words[ring._HEAD] = 4096
    a._ring_bell()
    with pytest.raises(LinkBroken, match="its ring holds no valid frame"):
        await take(b)


def test_another_machine_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "memory order, this is aarch64; TCP is used instead" in (segments.supported() or "")
