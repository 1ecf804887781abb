"""The second connection of a TCP link: who is let in, what goes there, and what its end means."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections import Counter

import numpy as np
import pytest

from rlinf_worker.links import door, frame, tcp
from rlinf_worker.links.door import Door, come_in
from rlinf_worker.links.errors import LinkBroken, LinkClosed
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.lane import RECORD
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import KIB, MIB, LinkSettings
from tests.unit.rlinf_worker.links.test_tcp import tcp_info

ME = Identity(job="job-1", worker="b", attempt=0)
PEER = Identity(job="job-1", worker="a", attempt=0)


def big(number, size=300_000):
    return Message(b"%d" % number, np.full(size, number % 251, np.uint8))


async def eventually(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def listen(run_dir, **settings):
    return await Listener.open(
        ME, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1", settings=LinkSettings(**settings)
    )


async def dial(listener, **settings):
    link = await tcp.dial(
        "127.0.0.1", listener.endpoint.port, PEER, peer=ME, settings=LinkSettings(**settings),
        context=None,
    )  # fmt: skip
    return link, await listener.accept()


async def test_only_buffers_of_large_messages_take_the_second_connection(connect):
    a, b = await connect("bulk")
    for size in (0, 10, 5_000, 7_000, 2_000_000):
        await a.send(Message(b"%d" % size, np.ones(size, np.uint8)))
    for size in (0, 10, 5_000, 7_000, 2_000_000):
        with await b.recv() as message:
            assert message.head == b"%d" % size
            assert message.value().sum() == size
    assert (a.counters.bulk_messages, a.counters.sent_messages) == (2, 5)


async def test_small_messages_behind_a_large_one_wait_for_it(connect):
    a, b = await connect("bulk")
    gate = threading.Event()
    put = a._lane._put
    a._lane._put = lambda *job: (gate.wait(40), put(*job))
    await a.send(big(1))
    await a.send(Message(b"2", "small"))
    early = asyncio.create_task(b.recv())
    await eventually(lambda: len(b._wire.frames) == 2)
    assert not early.done()
    gate.set()
    assert (await early).head == b"1"
    assert (await b.recv()).head == b"2"


async def test_a_link_closed_behind_a_large_message_still_brings_it(connect):
    a, b = await connect("bulk")
    gate = threading.Event()
    get = b._lane._get
    b._lane._get = lambda *job: (gate.wait(40), get(*job))
    for number in range(3):
        await a.send(big(number))
    closing = asyncio.create_task(a.close())
    await eventually(lambda: b._wire._goodbye)
    assert b.broken is None
    gate.set()
    for number in range(3):
        assert (await b.recv()).value()[0] == number
    with pytest.raises(LinkClosed, match="the peer closed it"):
        await b.recv()
    await closing


async def test_the_end_of_the_second_connection_within_a_message_breaks_the_link(connect):
    a, b = await connect("bulk")
    a._lane._put = lambda sequence, pieces, nbytes: a._lane._sock.send(RECORD.pack(sequence, nbytes) + b"half")
    await a.send(big(0))
    await a.send(Message(b"behind", 1))
    await eventually(lambda: len(b._wire.frames) == 2)
    a._lane._sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(LinkBroken, match="its process is gone"):
        async with asyncio.timeout(20):
            await b.recv()


async def test_a_record_of_another_message_breaks_the_link(connect):
    a, b = await connect("bulk")
    put = a._lane._put
    a._lane._put = lambda sequence, pieces, nbytes: put(sequence + 1, pieces, nbytes)
    await a.send(big(0))
    with pytest.raises(LinkBroken, match=r"brought record \(1, 300000\) where \(0, 300000\) was due"):
        async with asyncio.timeout(20):
            await b.recv()


async def test_an_announcement_above_the_bound_breaks_the_link_before_memory_is_taken(connect):
    a, b = await connect("bulk", LinkSettings(max_message_bytes=100_000))
    out = frame.of_message(big(0, 200_000), 0)
    a._transport.write(frame.announced(out)[0])
    with pytest.raises(LinkBroken, match="a frame of 200000 bytes, wanted at most 100000"):
        async with asyncio.timeout(20):
            await b.recv()


async def test_what_was_announced_and_has_no_room_waits_in_the_senders_kernel(connect):
    a, b = await connect("bulk", LinkSettings(inbox_bytes=500_000))
    sending = asyncio.create_task(asyncio.wait_for(_send(a, 40), 40))
    await eventually(lambda: b._wire.paused)
    assert sum(arrival.area is not None for arrival in b._wire.frames) == 1
    for number in range(40):
        with await b.recv() as message:
            assert message.head == b"%d" % number
    await sending


async def test_small_messages_that_fill_the_inbox_behind_a_large_one_do_not_keep_it_out(connect):
    a, b = await connect("bulk", LinkSettings(inbox_bytes=400_000))
    for number in range(1000):
        await a.send(big(number) if number in (0, 1, 500) else Message(b"%d" % number, bytes(1000)))
    async with asyncio.timeout(30):
        for number in range(1000):
            with await b.recv() as message:
                assert message.head == b"%d" % number


async def _send(link, count):
    for number in range(count):
        await link.send(big(number))


async def test_threads_and_sockets_of_a_link_are_gone_after_it(connect):
    before = {thread.ident for thread in threading.enumerate()}
    a, b = await connect("bulk")
    await a.send(big(1))
    (await b.recv()).release()
    socks = [a._lane._sock, b._lane._sock]
    await a.close()
    await b.close()
    await eventually(lambda: all(sock.fileno() == -1 for sock in socks))
    await eventually(lambda: not [t for t in threading.enumerate() if t.ident not in before and "lane" in t.name])


@pytest.mark.parametrize(("here", "there"), [("tls", "plain"), ("plain", "tls"), ("tls", "tls")])
async def test_where_one_end_wants_everything_encrypted_there_is_no_second_connection(run_dir, here, there):
    listener = await listen(run_dir, bulk=here)
    a, b = await dial(listener, bulk=there)
    await a.send(big(1, 3_000_000))
    assert (await b.recv()).value().nbytes == 3_000_000
    assert a._lane is b._lane is None
    b._transport.write(frame.announced(frame.of_message(big(0), 0))[0])
    with pytest.raises(LinkBroken, match="it announced bulk data on a link without a lane"):
        async with asyncio.timeout(20):
            await a.recv()
    await b.close()
    await listener.close()


async def test_a_dialer_that_cannot_come_in_goes_on_without(run_dir, monkeypatch, caplog):
    listener = await listen(run_dir)
    monkeypatch.setattr(Door, "ticket", lambda self, enter: {"port": 9, "number": 1, "secret": b"x" * 32})
    a, b = await dial(listener)
    await a.send(big(1, 3_000_000))
    assert (await b.recv()).value().nbytes == 3_000_000
    assert "no bulk connection, all goes over TLS" in caplog.text
    for thing in (a, b, listener):
        await thing.close()


async def test_a_dialer_whose_link_ends_as_it_comes_in_keeps_no_connection(run_dir, monkeypatch):
    listener = await listen(run_dir)
    a, b = await dial(listener)
    inside, outside = socket.socketpair()

    async def come_in_late(there, ticket):
        b.abort("the test ends it")
        await eventually(lambda: a.broken is not None)
        return inside

    monkeypatch.setattr(door, "come_in", come_in_late)
    await a._come_in({"port": 9})
    assert inside.fileno() == -1
    outside.close()
    for thing in (a, b, listener):
        await thing.close()


async def test_the_door_lets_nobody_in_without_the_secret_and_nobody_twice(caplog):
    entered: list[socket.socket] = []
    refused = Counter[str]()
    the_door = Door("127.0.0.1", settings=LinkSettings(hello_timeout_s=60.0), refused=refused)
    ticket = the_door.ticket(entered.append)
    assert ticket is not None
    assert await come_in("127.0.0.1", ticket | {"secret": b"\0" * 32}) is None
    assert await come_in("127.0.0.1", ticket | {"number": 77}) is None
    assert not entered
    await eventually(lambda: refused["ticket"] == 2)
    again = the_door.ticket(entered.append)
    assert again is not None
    inside = await come_in("127.0.0.1", again)
    assert inside is not None
    with inside:
        await eventually(lambda: len(entered) == 1)
    assert await come_in("127.0.0.1", again) is None
    assert again["secret"].hex() not in caplog.text
    entered[0].close()
    await the_door.close()


async def test_the_door_waits_for_nobody_who_says_nothing():
    refused = Counter[str]()
    the_door = Door("127.0.0.1", settings=LinkSettings(hello_timeout_s=0.3), refused=refused)
    ticket = the_door.ticket(lambda sock: None)
    assert ticket is not None
    with socket.create_connection(("127.0.0.1", ticket["port"])):
        await eventually(lambda: refused["ticket"] == 1)
    await the_door.close()


@pytest.mark.parametrize("waiting", [2, 0], ids=["with room", "full"])
async def test_a_door_without_descriptors_says_so_and_looks_again_in_a_while(monkeypatch, caplog, waiting):
    monkeypatch.setattr(door, "DEAF_S", 0.1)
    monkeypatch.setattr(door, "MAX_TICKETS", waiting)
    the_door = Door("127.0.0.1", settings=LinkSettings(), refused=Counter())
    assert the_door._open()

    class Full:
        def __init__(self, sock):
            self.sock, self.calls = sock, 0

        def accept(self):
            self.calls += 1
            if self.calls < 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return self.sock.accept()

        def __getattr__(self, name):
            return getattr(self.sock, name)

    full = Full(the_door._sock)
    monkeypatch.setattr(the_door, "_sock", full)
    with socket.create_connection(full.getsockname()):
        await eventually(lambda: full.calls)
        for _ in range(20):
            await asyncio.sleep(0)
        assert full.calls == 1, "and turns the loop no faster meanwhile"
        await eventually(lambda: full.calls >= 3)
    said = [record for record in caplog.records if record.message == "cannot accept a bulk connection"]
    assert len(said) == 2
    await the_door.close()


async def test_a_ticket_is_good_for_a_while_and_tickets_are_bounded(monkeypatch):
    monkeypatch.setattr(door, "MAX_TICKETS", 2)
    the_door = Door("127.0.0.1", settings=LinkSettings(hello_timeout_s=0.05), refused=Counter())
    first = the_door.ticket(lambda sock: None)
    assert first is not None
    assert the_door.ticket(lambda sock: None) is not None
    assert the_door.ticket(lambda sock: None) is None
    await eventually(lambda: not the_door._tickets)
    assert await come_in("127.0.0.1", first) is None
    await the_door.close()
    assert the_door.ticket(lambda sock: None) is None


def test_the_settings_say_why_a_large_message_is_one_from_a_quarter_of_a_mebibyte():
    assert LinkSettings().bulk_from_bytes == 256 * KIB < LinkSettings().inbox_bytes == 24 * MIB


async def test_a_flow_that_is_dropped_on_the_second_connection_alone_breaks_the_link(connect, monkeypatch):
    """Something between two pods forgets one of two connections: nothing says so, and TCP tries for 15 minutes."""
    a, b = await connect("bulk")
    for lane in (a._lane, b._lane):
        assert lane._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, probes = (lane._sock.getsockopt(socket.IPPROTO_TCP, o) for o in (socket.TCP_KEEPIDLE, socket.TCP_KEEPCNT))
        assert idle + probes <= a.settings.lost_after_s
        state, *_ = lane.info()
        assert state == 1
    await a.send(big(0))
    assert (await b.recv()).head == b"0", "what the kernel says of a living one breaks nothing"
    monkeypatch.setattr(a._lane, "info", lambda: tcp_info(unacked=3, last_ack_ms=5100, retransmits=4))
    async with asyncio.timeout(20):
        assert "acknowledged nothing for 5.1 s, on its bulk connection" in (await a.wait_broken()).why
        await b.wait_broken()
