"""What only the TCP link has: a kernel's diagnosis of a peer, backlog behind a full receiver, certificates."""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket
import ssl
import struct
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from rlinf_worker.links import devices, frame, nccl, tcp
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.errors import LinkBroken, LinkClosed, LinkRefused
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.listener import Listener, dial
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import KIB, LinkSettings
from rlinf_worker.links.wire import Wire


def tcp_info(*, state=1, retransmits=0, probes=0, unacked=0, last_ack_ms=0):
    words = [0] * 16
    words[4], words[12] = unacked, last_ack_ms
    return struct.pack("<8B16I", state, 0, retransmits, probes, 0, 0, 0, 0, *words) + bytes(100)


@pytest.mark.parametrize(
    ("info", "why"),
    [
        (tcp_info(), None),
        (tcp_info(last_ack_ms=3_600_000), None),  # idle: keepalive's business
        (tcp_info(unacked=3, last_ack_ms=4000, retransmits=4), None),
        (tcp_info(unacked=3, last_ack_ms=5100, retransmits=4), "acknowledged nothing for 5.1 s"),
        (tcp_info(probes=1, last_ack_ms=60_000), None),  # full but alive: each probe is answered
        (tcp_info(probes=3, last_ack_ms=9000), "acknowledged nothing for 9.0 s"),
        (tcp_info(probes=2, last_ack_ms=5001), "acknowledged nothing for 5.0 s"),
        (tcp_info(probes=2, last_ack_ms=5000), None),  # no longer than that
        (tcp_info(unacked=1, last_ack_ms=9000, retransmits=1), "acknowledged nothing for 9.0 s"),
        (tcp_info(unacked=3, last_ack_ms=9000), None),  # nothing was sent twice: it has only just been sent
        (tcp_info(retransmits=4, last_ack_ms=9000), None),  # all has been acknowledged since
        (tcp_info(state=5, probes=3, last_ack_ms=9000), None),  # this end closes it
        (tcp_info(state=8), "the connection was closed"),
        (tcp_info(state=7), "reset or timed out"),
    ],
)
def test_the_kernels_account_tells_a_lost_node_from_a_full_one(info, why):
    got = tcp.diagnose(info, 5.0)
    assert (got is None) if why is None else (why in (got or ""))


async def test_what_was_sent_before_a_close_arrives_even_if_the_receiver_had_stopped_reading(connect):
    settings = LinkSettings(inbox_bytes=64 * KIB, linger_s=10.0)
    a, b = await connect("tcp", settings)
    payload = np.zeros(50_000, np.uint8)
    for _ in range(60):  # 3 MB: in the kernel's buffers, b reads 64 KiB of it
        await a.send(Message(b"", payload))
    closing = asyncio.create_task(a.close())
    await asyncio.sleep(2.2)  # b's watch has looked at the connection twice
    async with asyncio.timeout(30):
        for _ in range(60):
            assert (await b.recv()).nbytes > 50_000
        with pytest.raises(LinkClosed, match="the peer closed it"):
            await b.recv()
    await closing


async def test_a_frame_above_the_bound_breaks_the_link_with_a_sentence(connect):
    a, b = await connect("tcp", LinkSettings(max_message_bytes=100_000))
    a._transport.write(frame.FIXED.pack(1 << 40, 0, 0, 0, frame.DATA, 0))
    with pytest.raises(LinkBroken, match="no valid frame: a frame of 1099511627776 bytes, wanted at most 100000"):
        async with asyncio.timeout(20):
            await b.recv()


async def test_a_frame_out_of_sequence_breaks_the_link(connect):
    a, b = await connect("tcp")
    a._sent = 5
    await a.send(Message(b"x", 1))
    with pytest.raises(LinkBroken, match="frame 5 where 0 was due"):
        async with asyncio.timeout(20):
            await b.recv()


async def test_a_dialer_without_the_jobs_certificate_is_no_peer(run_dir, authority):
    me, peer = Identity(job="job-1", worker="b", attempt=0), Identity(job="job-1", worker="a", attempt=0)
    listener = await Listener.open(
        me, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1", tls=authority.server
    )
    there: dict[str, Any] = {"peer": me, "settings": LinkSettings(hello_timeout_s=1.0)}
    stranger = ssl.create_default_context()
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    for context in (None, stranger, ssl.create_default_context()):
        sentence = r"connecting to 127\.0\.0\.1|the other end's certificate names no part"
        with pytest.raises((LinkBroken, LinkRefused), match=sentence):
            async with asyncio.timeout(20):
                await tcp.dial("127.0.0.1", listener.endpoint.port, peer, context=context, **there)
    assert not listener._links
    await listener.close()


async def test_admit_sees_the_certificate(run_dir, authority):
    me, peer = Identity(job="job-1", worker="b", attempt=0), Identity(job="job-1", worker="a", attempt=0)
    seen = []
    listener = await Listener.open(
        me, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1", tls=authority.server,
        admit=lambda who, certificate: seen.append((who, certificate)),
    )  # fmt: skip
    context = authority.client
    link = await tcp.dial(
        "127.0.0.1", listener.endpoint.port, peer,
        peer=me, settings=LinkSettings(), context=context,
    )  # fmt: skip
    ((who, certificate),) = seen
    assert who == peer
    assert (certificate or {})["subject"] == ((("commonName", "worker"),),)
    await link.close()
    await listener.close()


async def test_nobody_at_the_address_is_a_sentence(run_dir):
    me = Identity(job="j", worker="a", attempt=0)
    with socket.socket() as taken:  # and nobody listens: the port of a listener that was closed may be another's
        taken.bind(("127.0.0.1", 0))
        there = Endpoint(
            worker="b", attempt=0, pod_uid="q", unix_path=f"{run_dir}/x", host="127.0.0.1", port=taken.getsockname()[1]
        )
        with pytest.raises(LinkBroken, match=r"the link to worker b#0 is broken: connecting to 127\.0\.0\.1:\d+"):
            await dial(there, me, pod_uid="p", shm_dir="/dev/shm")


async def test_a_message_that_arrives_together_with_the_hello_is_not_judged_by_the_hellos_bound():
    """A peer may send as soon as it has answered; its kernel may deliver both in one piece."""

    class Deaf(asyncio.Transport):
        reading = True

        def pause_reading(self):
            self.reading = False

        def resume_reading(self):
            self.reading = True

        def is_closing(self):
            return False

    wire, transport = Wire(LinkSettings()), Deaf()
    wire.transport = transport
    greeting = frame.of_message(Message(b"hello"), 0, frame.HELLO).prefix
    large = frame.of_message(Message(bytes(8 * KIB)), 0, frame.DATA).prefix
    arrived = bytes(greeting) + bytes(large)
    wire.get_buffer(-1)[: len(arrived)] = arrived
    wire.buffer_updated(len(arrived))
    assert not transport.reading, "more than a hello would be taken from somebody unknown"
    assert len(wire.frames) == 1
    assert bytes(await wire.first_frame()) == b"hello"
    assert transport.reading
    assert wire.lost is None
    taken = wire.take()
    assert taken is not None
    assert taken.whole.nbytes == len(large)


async def test_a_peer_that_ends_right_behind_its_answer_is_a_broken_link(run_dir, authority, monkeypatch):
    """A closed TLS connection has neither socket nor addresses, and asking it for them raises AttributeError."""
    me, peer = Identity(job="job-1", worker="b", attempt=0), Identity(job="job-1", worker="a", attempt=0)
    listener = await Listener.open(
        me, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1", tls=authority.server
    )

    async def dialled():
        await tcp.dial(
            "127.0.0.1", listener.endpoint.port, peer, context=authority.client,
            peer=me, settings=LinkSettings(),
        )  # fmt: skip

    def ends(link, *_: Any, in_good_order: bool, **__: Any):
        link._wire.closed_by_peer = in_good_order
        link._transport.close()
        if in_good_order:
            link._wire.fail("the peer closed it")
        else:
            link._transport._ssl_protocol._transport = None  # as after connection_lost
            link._wire.connection_lost(ConnectionResetError("reset"))

    for in_good_order, why in ((True, "the peer closed it"), (False, "the connection is gone: reset")):
        monkeypatch.setattr(
            "rlinf_worker.links.meet_gpus.as_dialer", functools.partial(ends, in_good_order=in_good_order)
        )
        with pytest.raises(LinkBroken, match=f"the link to worker b#0 is broken: {why}"):
            async with asyncio.timeout(20):
                await dialled()
    await listener.close()


async def test_a_link_on_a_connection_that_has_ended_is_broken_from_the_start():
    wire = Wire(LinkSettings())
    wire.transport = Mock()
    wire.connection_lost(ConnectionResetError("reset by peer"))
    me, peer = Identity(job="j", worker="b", attempt=0), Identity(job="j", worker="a", attempt=0)
    link = tcp.TcpLink(wire, me, peer, settings=LinkSettings())
    with pytest.raises(LinkBroken, match="a#0 is broken: the connection is gone: reset by peer"):
        link.send_nowait(Message(b"x"))


async def test_a_link_whose_connection_is_gone_meanwhile_can_be_looked_at():
    """As the watch does once a second, also while a last lane is busy behind an end in good order."""
    link = tcp.TcpLink.__new__(tcp.TcpLink)
    link._transport = cast(Any, SimpleNamespace(get_extra_info=lambda name: None))
    assert link._trouble() == "the connection is gone"


@pytest.mark.parametrize("kind", ["tcp", "tls"])
async def test_a_link_whose_peer_does_not_answer_gives_its_socket_back_when_it_is_closed(connect, kind):
    """asyncio would keep it, and what it had buffered, for the 30 s in which TLS may say good-bye."""
    a, b = await connect(kind)
    beneath = b._transport._ssl_protocol._transport if kind == "tls" else b._transport
    beneath.pause_reading()  # as a process that is stopped
    sock = a._transport.get_extra_info("socket")
    began = time.monotonic()
    await a.close()
    await a.close()  # as who reads from it does, too
    while sock.fileno() >= 0:
        await asyncio.sleep(0.01)
        assert time.monotonic() - began < 15
    b.abort("the test is over")


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
async def test_a_dialer_that_leaves_while_a_lane_is_made_for_it_is_counted_as_lost(
    run_dir, authority, monkeypatch, secure
):
    me, peer = Identity(job="job-1", worker="b", attempt=0), Identity(job="job-1", worker="a", attempt=0)
    settings = LinkSettings()
    listener = await Listener.open(
        me, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1",
        tls=authority.server if secure else None, settings=settings,
    )  # fmt: skip
    asked = asyncio.Event()
    wires: list[Wire] = []
    accept = tcp.accept

    def accepting(wire, *args, **named):
        wires.append(wire)
        return accept(wire, *args, **named)

    monkeypatch.setattr(tcp, "accept", accepting)

    async def no_store(host: str) -> None:
        asked.set()
        await wires[0].ended

    gpus = itertools.cycle(devices.Gpu(uuid=uuid, index=0, nccl="2.27") for uuid in ("one", "two"))
    monkeypatch.setattr(devices, "here", lambda: next(gpus))
    monkeypatch.setattr(nccl, "open_store", no_store)
    dialling = asyncio.create_task(
        tcp.dial(
            "127.0.0.1",
            listener.endpoint.port,
            peer,
            context=authority.client if secure else None,
            peer=me,
            settings=settings,
        )
    )
    async with asyncio.timeout(20):
        await asked.wait()
        dialling.cancel()
        while not listener.refused["lost"]:
            await asyncio.sleep(0.01)
    assert not listener._links
    await listener.close()
