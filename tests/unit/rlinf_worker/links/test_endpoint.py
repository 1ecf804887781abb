"""Listening, dialling the cheapest link, and every way in which a hello is refused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import socket

import msgspec
import pytest

from rlinf_api.errors import DeadlineExceeded, UserError
from rlinf_worker.links import hello, shm
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.errors import LinkBroken, LinkClosed, LinkRefused, LinkStale
from rlinf_worker.links.hello import Identity, Refusal
from rlinf_worker.links.listener import Listener, dial, socket_path
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import LinkSettings

ME = Identity(job="job-1", worker="actor/0/0", attempt=2)
PEER = Identity(job="job-1", worker="env/0/0", attempt=1)
PATIENT = LinkSettings(dial_timeout_s=30.0, hello_timeout_s=30.0, linger_s=0.5)
QUICK = LinkSettings(dial_timeout_s=1.0, hello_timeout_s=0.3, linger_s=0.5)
"""For what is about these bounds."""


@pytest.fixture
async def listen(run_dir):
    listeners = []

    async def make(me=ME, **kwargs):
        kwargs = {
            "pod_uid": "pod",
            "run_dir": run_dir,
            "shm_dir": "/dev/shm",
            "host": "127.0.0.1",
            "settings": PATIENT,
        } | kwargs
        listeners.append(await Listener.open(me, **kwargs))
        return listeners[-1]

    yield make
    for listener in listeners:
        await listener.close()


async def call(there, me=PEER, pod_uid="pod", *, settings=PATIENT):
    return await dial(there, me, pod_uid=pod_uid, shm_dir="/dev/shm", settings=settings)


def test_an_endpoint_travels_as_plain_values():
    there = Endpoint(worker="w", attempt=1, pod_uid="p", unix_path="/x", host="h", port=2)
    assert Endpoint.from_dict(there.to_dict()) == there
    with pytest.raises(UserError, match=r"cannot read an endpoint.*port"):
        Endpoint.from_dict(there.to_dict() | {"port": "x"})


async def test_dial_takes_the_cheapest_link_that_both_ends_share(listen, monkeypatch):
    listener = await listen()
    links = [await call(listener.endpoint), await call(listener.endpoint, pod_uid="another pod")]
    links.append(await call(dataclasses.replace(listener.endpoint, unix_path="/gone.sock")))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    links.append(await call(listener.endpoint))
    assert [link.kind for link in links] == ["shm", "tcp", "tcp", "tcp"]
    for link in links:
        other = await listener.accept()
        assert other.kind == link.kind
        await link.close()
        await other.close()


async def test_a_listener_dials_for_its_worker_and_accepts_until_it_is_closed(listen):
    a, b = await listen(PEER), await listen(ME)
    link = await a.dial(b.endpoint)
    assert (link.me, link.peer) == (PEER, ME)
    await link.send(Message(b"x", 1))
    seen = []

    async def serve():
        with contextlib.suppress(LinkClosed):
            while True:
                other = await b.accept()
                seen.append((await other.recv()).value())
                await other.close()

    serving = asyncio.create_task(serve())
    async with asyncio.timeout(20):
        while seen != [1]:
            await asyncio.sleep(0.005)
    await b.close()
    async with asyncio.timeout(20):
        await serving
    assert seen == [1]
    with pytest.raises(LinkClosed, match="its listener is closed"):
        await b.accept()
    await link.close()


@pytest.mark.parametrize("way", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("change", "error", "code", "sentence"),
    [
        (
            {"dialer": Identity(job="other", worker="x", attempt=0)},
            LinkRefused,
            "job",
            "job other, worker actor/0/0#2 of job job-1",
        ),
        ({"attempt": 1}, LinkStale, "stale", "wants attempt 1 of worker actor/0/0, which is at 2"),
        (
            {"worker": "actor/0/1"},
            LinkRefused,
            "worker",
            "wants worker 'actor/0/1', but this address is worker actor/0/0#2's",
        ),
        ({"protocol": 7}, LinkRefused, "protocol", "speaks link protocol 7, worker .* speaks 1; run the"),
        ({"admit": Refusal("admit", "env is not wanted here")}, LinkRefused, "admit", "env is not wanted here"),
        (
            {"admit": Refusal("stale", "attempt 1 was replaced by 2")},
            LinkStale,
            "stale",
            "was replaced by 2",
        ),
    ],
)
async def test_a_hello_that_is_out_of_order_is_refused_with_a_sentence_at_both_ends(
    listen, monkeypatch, caplog, way, change, error, code, sentence
):
    def admit(who, shown):
        if "admit" in change:
            raise change["admit"]

    listener = await listen(admit=admit)
    there = listener.endpoint
    changed = {key: value for key, value in change.items() if key in ("attempt", "worker")}
    there = dataclasses.replace(there, **changed)
    if "protocol" in change:
        pack = hello._pack

        def other(fields, me):
            return pack(fields | ({"protocol": change["protocol"]} if "to_worker" in fields else {}), me)

        monkeypatch.setattr(hello, "_pack", other)
    with pytest.raises(error, match=sentence):
        await call(there, change.get("dialer", PEER), "pod" if way == "shm" else "another pod")
    async with asyncio.timeout(20):
        while not listener.refused:
            await asyncio.sleep(0.01)
    assert listener.refused == {code: 1}
    assert not listener._links
    assert [record.why for record in caplog.records if record.message == "refused a link"]


@pytest.mark.parametrize("way", ["shm", "tcp"])
@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 100, b"\x00" * 40, b"\x80", b"x" * 4096]
)
async def test_garbage_instead_of_a_hello_is_refused_and_the_next_dial_succeeds(listen, monkeypatch, way, garbage):
    listener = await listen(settings=dataclasses.replace(QUICK, hello_timeout_s=2.0))  # for what is not whole
    loop = asyncio.get_running_loop()
    if way == "shm":
        sock, address = shm.make_socket(), listener.endpoint.unix_path
    else:
        sock, address = socket.socket(), ("127.0.0.1", listener.endpoint.port)
        sock.setblocking(False)
    with sock:
        await loop.sock_connect(sock, address)
        await loop.sock_sendall(sock, garbage)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):
                assert await loop.sock_recv(sock, 100) == b"", "it must hang up without a word"
            while not listener.refused:
                await asyncio.sleep(0.01)
    assert sum(listener.refused.values()) == 1
    link = await call(listener.endpoint, pod_uid="pod" if way == "shm" else "other")
    await link.close()
    await (await listener.accept()).close()


@pytest.mark.parametrize("way", ["shm", "tcp"])
async def test_a_connection_that_says_nothing_is_dropped_in_time(listen, way):
    listener = await listen(settings=QUICK)
    loop = asyncio.get_running_loop()
    sock, address = (
        (shm.make_socket(), listener.endpoint.unix_path)
        if way == "shm"
        else (socket.socket(), ("127.0.0.1", listener.endpoint.port))
    )
    sock.setblocking(False)
    with sock:
        await loop.sock_connect(sock, address)
        async with asyncio.timeout(20):
            assert await loop.sock_recv(sock, 100) == b""
    assert listener.refused == {"silent": 1}


@pytest.mark.parametrize("way", ["shm", "tcp"])
async def test_a_listener_that_does_not_answer_costs_the_dialer_its_deadline_and_no_more(run_dir, way):
    path = os.path.join(run_dir, "mute.sock")
    with shm.make_socket() as unix, socket.create_server(("127.0.0.1", 0)) as server:
        unix.bind(path)
        unix.listen(1)
        there = Endpoint(
            worker="w", attempt=0, pod_uid="pod", unix_path=path, host="127.0.0.1", port=server.getsockname()[1]
        )
        with pytest.raises(
            DeadlineExceeded, match="a link from worker env/0/0#1 to worker w#0 did not happen within 1 s"
        ):
            await call(there, pod_uid="pod" if way == "shm" else "other", settings=QUICK)


async def test_a_socket_left_by_a_dead_process_is_taken_over_and_a_living_one_is_not(listen, run_dir):
    path = socket_path(run_dir, ME)
    with shm.make_socket() as old:
        old.bind(path)
    listener = await listen()
    with pytest.raises(UserError, match="Address already in use"):
        await listen()
    assert os.stat(path).st_mode & 0o777 == 0o600
    await listener.close()
    assert not os.path.exists(path)


async def test_a_port_that_is_taken_is_a_sentence_and_leaves_no_socket_file(listen, run_dir):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen at 127.0.0.1:{port}.*use port 0"):
            await listen(port=port)
    assert os.listdir(run_dir) == []


async def test_an_endpoint_without_a_port_is_not_reachable_from_another_pod(listen, monkeypatch):
    listener = await listen(host=None)
    with pytest.raises(LinkBroken, match="listens at no port and shares no pod"):
        await call(listener.endpoint, pod_uid="other")


async def test_closing_a_listener_closes_the_links_that_nobody_took(listen):
    listener = await listen()
    link = await call(listener.endpoint)
    await listener.close()
    async with asyncio.timeout(20):
        await link.wait_broken()
    await link.close()


@pytest.mark.parametrize("number", [True, 1.0, "1", None, 0, 2])
def test_a_protocol_number_is_an_integer_that_is_known(number):
    raw = hello.ask(PEER, ME)
    fields = msgspec.msgpack.decode(raw) | {"protocol": number}
    with pytest.raises(hello.Refusal, match="speaks link protocol"):
        hello.check_ask(msgspec.msgpack.encode(fields), ME, admit=None)


async def test_more_callers_than_may_wait_do_not_keep_the_loop_busy_and_are_let_in_in_their_turn(listen, monkeypatch):
    monkeypatch.setattr("rlinf_worker.links.listener.MAX_WAITING_LINKS", 4)
    looks, look = list[int](), Listener._on_unix

    def counted(self):
        looks.append(1)
        look(self)

    monkeypatch.setattr(Listener, "_on_unix", counted)
    listener = await listen(settings=dataclasses.replace(QUICK, hello_timeout_s=0.2))
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            silent = stack.enter_context(shm.make_socket())
            silent.connect(listener.endpoint.unix_path)
        async with asyncio.timeout(5):
            while len(listener._hellos) < 4:
                await asyncio.sleep(0.001)
        before = len(looks)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(looks) - before < 5, "the loop was woken for those that wait, again and again"
        link = await call(listener.endpoint)  # behind all of them, once they have been hung up on
    assert link.kind == "shm"
    await link.close()


@pytest.mark.parametrize("way", ["shm", "tcp"])
async def test_links_that_nobody_takes_are_bounded(listen, monkeypatch, way):
    monkeypatch.setattr("rlinf_worker.links.listener.MAX_WAITING_LINKS", 2)
    listener = await listen()
    pod_uid = "another pod" if way == "tcp" else "pod"
    links = [await call(listener.endpoint, pod_uid=pod_uid) for _ in range(2)]
    async with asyncio.timeout(5):
        while len(listener._links) < 2:
            await asyncio.sleep(0.001)
    short = dataclasses.replace(QUICK, dial_timeout_s=0.3)
    with pytest.raises((LinkBroken, DeadlineExceeded)):
        await dial(listener.endpoint, PEER, pod_uid=pod_uid, shm_dir="/dev/shm", settings=short)
    assert len(listener._links) == 2
    links.append(await listener.accept())
    links.append(await call(listener.endpoint, pod_uid=pod_uid))
    assert links[-1].kind == way
    for link in links:
        await link.close()


async def test_a_listener_that_cannot_accept_says_so_and_looks_again_in_a_while(listen, monkeypatch, caplog):
    monkeypatch.setattr("rlinf_worker.links.listener.DEAF_S", 0.05)
    listener = await listen()

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

    monkeypatch.setattr(listener, "_unix", Full(listener._unix))
    link = await call(listener.endpoint)
    assert len([record for record in caplog.records if record.message == "cannot accept a link"]) == 2
    await link.close()
