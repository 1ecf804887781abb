"""Links whose other end is another process: killed, stopped, left alone with a full ring."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest

from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.errors import LinkBroken
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.listener import Listener, dial
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import KIB, LinkSettings

ME = Identity(job="j", worker="tester", attempt=0)
SETTINGS = LinkSettings(
    ring_bytes=256 * KIB, max_ring_bytes=1024 * KIB, outbox_bytes=256 * KIB, inbox_bytes=256 * KIB, lost_after_s=2.0
)
PATIENT = dataclasses.replace(SETTINGS, lost_after_s=60.0)
"""What wakes somebody under these is the end of the connection, and not that nobody answers."""

PEER = """
import asyncio, json, sys, time
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import LinkSettings

run_dir, pod_uid, task = sys.argv[1:]

async def main():
    me = Identity(job="j", worker="peer", attempt=0)
    listener = await Listener.open(me, pod_uid=pod_uid, run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1",
                                   settings=LinkSettings(ring_bytes=256 << 10, max_ring_bytes=1 << 20))
    print(json.dumps(listener.endpoint.to_dict()), flush=True)
    link = await listener.accept()
    number = 0
    if task == "light":
        status = open("/proc/self/status").read().split()
        await link.send(Message(b"", [int(status[status.index("VmRSS:") + 1]), sorted(sys.modules)]))
    while True:
        if task == "flood":
            size = 300_000 if number % 7 == 0 else 900
            await link.send(Message(b"%d" % number, bytes([number % 256]) * size))
        elif task == "check":
            message = await link.recv()
            assert message.head == b"%d" % number, (message.head, number)
            assert message.value() == bytes([number % 256]) * len(message.value())
            message.release()
            await link.send(Message(b"ok %d" % number))
        else:
            await asyncio.sleep(3600)
        number += 1

asyncio.run(main())
"""


@pytest.fixture(params=["shm", "tcp"])
def kind(request):
    return request.param


@pytest.fixture
async def start(tmp_path_factory):
    processes, links = [], []

    async def make(kind, task, *, settings=PATIENT):
        run_dir = str(tmp_path_factory.mktemp("r"))
        arguments = [sys.executable, "-c", PEER, run_dir, "pod" if kind == "shm" else "other", task]
        process = await asyncio.to_thread(subprocess.Popen, arguments, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        there = Endpoint.from_dict(json.loads(await asyncio.to_thread(process.stdout.readline)))
        link = await dial(there, ME, pod_uid="pod", shm_dir="/dev/shm", settings=settings)
        assert link.kind == kind
        links.append(link)
        return process, link

    yield make
    for process in processes:
        process.kill()
        process.communicate()
    for link in links:
        await link.close()


async def test_a_peer_killed_in_mid_send_breaks_the_link_at_once_after_whole_messages_only(start, kind):
    process, link = await start(kind, "flood")
    for number in range(200):
        message = await link.recv()
        assert message.head == b"%d" % number
        message.release()
    os.kill(process.pid, signal.SIGKILL)
    reason = None
    async with asyncio.timeout(30):
        while reason is None:
            number += 1
            try:
                message = await link.recv()
                assert message.head == b"%d" % number
                assert message.value() == bytes([number % 256]) * len(message.value())
                message.release()
            except LinkBroken as err:
                reason = err
    assert "process is gone" in reason.why or "connection is gone" in reason.why
    with pytest.raises(LinkBroken):
        await link.send(Message(b""))


async def test_a_peer_killed_while_a_sender_waits_for_it_wakes_the_sender(start, kind):
    process, link = await start(kind, "sleep")

    async def send():
        while True:
            await link.send(Message(b"", bytes(100_000)))

    sending = asyncio.create_task(send())
    await asyncio.sleep(0.3)
    assert not sending.done()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(LinkBroken):
        async with asyncio.timeout(30):
            await sending


async def test_a_stopped_peer_is_back_pressure_and_no_break_nor_corruption(start, kind):
    """Longer stopped than `lost_after_s`: its node still acknowledges."""
    process, link = await start(kind, "check", settings=SETTINGS)
    sent = 0

    async def send():
        nonlocal sent
        for number in range(60):
            size = 400_000 if number % 3 == 0 else 1000
            await link.send(Message(b"%d" % number, bytes([number % 256]) * size))
            sent += 1

    os.kill(process.pid, signal.SIGSTOP)
    sending = asyncio.create_task(send())
    await asyncio.sleep(SETTINGS.lost_after_s + 1.5)
    assert link.broken is None
    assert not sending.done() or kind == "tcp"  # a TCP connection's kernel buffers may hold all of it
    os.kill(process.pid, signal.SIGCONT)
    async with asyncio.timeout(30):
        for number in range(60):
            assert (await link.recv()).head == b"ok %d" % number
        await sending
    assert sent == 60


async def test_a_peer_whose_link_end_is_only_waiting_notices_that_this_end_is_gone(start, kind):
    """The same, seen from the listener of this process."""
    process, link = await start(kind, "check")
    watching = asyncio.create_task(link.wait_broken())
    await asyncio.sleep(0.05)
    process.kill()
    async with asyncio.timeout(30):
        assert isinstance(await watching, LinkBroken)


async def test_a_worker_with_links_is_small(start, kind):
    _, link = await start(kind, "light")
    async with asyncio.timeout(30):
        resident_kib, modules = (await link.recv()).value()
    assert not {"numpy", "torch", "pydantic"} & set(modules)
    assert resident_kib < 45 * 1024


async def test_two_workers_of_one_process_and_their_dialler_share_nothing_but_the_link(tmp_path_factory):
    run_dir = str(tmp_path_factory.mktemp("r"))
    a = await Listener.open(ME, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host=None)
    b = await Listener.open(
        Identity(job="j", worker="other", attempt=0), pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host=None
    )
    to_b, to_a = await a.dial(b.endpoint), await b.dial(a.endpoint)
    await to_b.send(Message(b"1"))
    await to_a.send(Message(b"2"))
    assert (await (await b.accept()).recv()).head == b"1"
    assert (await (await a.accept()).recv()).head == b"2"
    for thing in (to_a, to_b, a, b):
        await thing.close()
