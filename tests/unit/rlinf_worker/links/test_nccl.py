"""The lane over NCCL: its rules against a fake that has them, and its calls against the torch that is installed."""

from __future__ import annotations

import asyncio
import datetime
import os
import sys
import threading
import types
from typing import Any

import msgspec
import pytest
import torch

from rlinf_worker.links import beside, devices, nccl, payload_arrays, shm, tcp
from rlinf_worker.links.devices import Gpu, choose
from rlinf_worker.links.errors import LinkBroken, LinkClosed
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.lane import LaneError
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import LinkSettings
from tests.unit.rlinf_worker.links.nccl_fake import World

A = Identity(job="job-1", worker="a", attempt=0)
B = Identity(job="job-1", worker="b", attempt=0)
GPUS = [Gpu(uuid="gpu-0", index=0, nccl="2.29.7"), Gpu(uuid="gpu-1", index=0, nccl="2.29.7")]
SIZE = 300_000


@pytest.fixture
def world(monkeypatch):
    """Tensors of 300 KB and more pass for ones on a GPU; each end of a link has another GPU."""
    world = World()
    said = iter(range(1 << 20))
    monkeypatch.setattr(devices, "here", lambda: GPUS[next(said) % 2])
    monkeypatch.setattr(devices, "device_index", lambda tensor: 0)
    for module in (devices, nccl):
        monkeypatch.setattr(module, "place", lambda index: torch.device("cpu"))
    monkeypatch.setattr(payload_arrays, "device_kind", lambda tensor: "cuda" if tensor.nbytes >= SIZE else "cpu")
    monkeypatch.setattr(nccl, "new_group", world.new_group)
    # Of the store only its port is seen by the fake; a real one waits for the DNS.
    monkeypatch.setattr(nccl, "make_store", lambda host, port, *, is_master: types.SimpleNamespace(port=port or 29500))
    yield world
    assert world.broken == []


@pytest.fixture
async def link_pair(run_dir):
    """Makes pairs over TCP or shared memory whose lane is there at both ends."""
    things: list[Any] = []

    async def make(kind="tcp", **bounds):
        settings = LinkSettings(**bounds)
        listener = await Listener.open(
            B, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1", settings=settings
        )
        a: Any
        b: Any
        to: dict[str, Any] = {"peer": B, "settings": settings}
        try:
            if kind == "tcp":
                a = await tcp.dial("127.0.0.1", listener.endpoint.port, A, context=None, **to)
            else:
                a = await shm.dial(listener.endpoint.unix_path, A, shm_dir="/dev/shm", **to)
            things.append(a)
            b = await asyncio.wait_for(listener.accept(), 20)
            things.append(b)
        finally:
            await listener.close()
        await until(lambda: not a.beside.coming and not b.beside.coming)
        return a, b

    yield make
    for thing in things:
        thing.abort("the test is over")
        await thing.close()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def value(number, size=SIZE):
    return {"gpu": torch.full((size,), number % 251, dtype=torch.uint8), "cpu": torch.tensor([number]), "n": number}


async def check(link, number):
    with await asyncio.wait_for(link.recv(), 20) as message:
        got = message.value()
    assert (message.head, got["n"], int(got["cpu"])) == (b"%d" % number, number, number)
    assert got["gpu"].dtype == torch.uint8
    assert bool((got["gpu"] == number % 251).all())


@pytest.mark.parametrize("kind", ["tcp", "shm"])
async def test_buffers_on_two_gpus_go_over_nccl_both_ways_and_keep_their_order(world, link_pair, kind):
    a, b = await link_pair(kind)

    async def send(link):
        for number in range(20):
            await link.send(Message(b"%d" % number, value(number, SIZE if number % 3 else 10)))

    async def receive(link):
        for number in range(20):
            await check(link, number)

    async with asyncio.timeout(20):
        await asyncio.gather(send(a), send(b), receive(a), receive(b))
    assert a.counters.device_messages == b.counters.device_messages == 13
    tags = {rank: [tag for name, _, of, tag in world.calls if (name, of) == ("send", rank)][1:] for rank in (0, 1)}
    assert tags == {0: list(range(13)), 1: list(range(13))}


async def test_dtypes_views_and_several_buffers_arrive_as_they_were(world, link_pair):
    a, b = await link_pair()
    sent = [
        torch.randn(400, 500).to(torch.bfloat16).T,
        torch.randn(300, 300, dtype=torch.complex64),
        torch.arange(SIZE) % 2 == 0,
        torch.ones(3),
    ]
    await a.send(Message(b"", sent))
    got = (await asyncio.wait_for(b.recv(), 20)).value()
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(sent, got, strict=True))
    assert a.counters.device_messages == 1


@pytest.mark.parametrize("kind", ["tcp", "shm"])
async def test_nothing_moves_before_the_receiver_asks_and_a_close_waits_for_what_was_accepted(world, link_pair, kind):
    a, b = await link_pair(kind)
    before = len(world.calls)
    await a.send(Message(b"0", value(0)))
    await a.send(Message(b"1", value(1)))
    assert len(world.calls) == before
    closing = asyncio.create_task(a.close())
    await check(b, 0)
    await check(b, 1)
    await closing
    with pytest.raises(LinkClosed):
        await asyncio.wait_for(b.recv(), 20)


async def test_a_sender_waits_when_the_gpu_memory_that_it_lends_is_at_the_bound(world, link_pair, monkeypatch):
    monkeypatch.setattr(beside, "HELD_BYTES", 2 * SIZE)
    for kind in ("tcp", "shm"):
        a, b = await link_pair(kind)
        for number in range(2):
            await a.send(Message(b"%d" % number, value(number)))
        assert not a.send_nowait(Message(b"2", value(2)))
        third = asyncio.create_task(a.send(Message(b"2", value(2))))
        await check(b, 0)
        await asyncio.wait_for(third, 20)
        await check(b, 1)
        await check(b, 2)


async def test_a_cancelled_receiver_loses_nothing(world, link_pair):
    a, b = await link_pair()
    world.held.set()
    await a.send(Message(b"0", value(0)))
    waiting = asyncio.create_task(b.recv())
    await until(lambda: any(call[0] == "recv" and call[3] == 0 and len(world.calls) > 5 for call in world.calls))
    waiting.cancel()
    world.held.clear()
    world.move()
    await check(b, 0)


@pytest.mark.parametrize("kind", ["tcp", "shm"])
async def test_a_dead_peer_aborts_both_communicators_and_wakes_who_waits(world, link_pair, kind):
    a, b = await link_pair(kind)
    world.held.set()
    await a.send(Message(b"0", value(0)))
    waiting = asyncio.create_task(b.recv())
    await until(lambda: len([call for call in world.calls if call[0] in ("send", "recv")]) == 6)
    if kind == "tcp":
        a._transport.abort()  # what the kernel does for a process that was killed
    else:
        a._sock.shutdown(2)
    with pytest.raises(LinkBroken):
        await asyncio.wait_for(waiting, 20)
    await until(lambda: len([call for call in world.calls if call[0] == "abort"]) == 4)
    with pytest.raises(LinkBroken):
        await a.send(Message(b"1", value(1)))


async def test_a_peer_that_says_twice_that_it_has_a_message_breaks_the_link(world, link_pair):
    a, b = await link_pair()
    await a.send(Message(b"0", value(0)))
    await check(b, 0)
    await until(lambda: a.beside.lane.holds == 0)
    a.beside.lane.hear(msgspec.msgpack.encode(("done", 0, [])))
    with pytest.raises(LinkBroken, match="it sent a note 'done' on GPU buffers 0 out of turn"):
        await a.send(Message(b"1", value(1)))


async def test_two_links_at_once_have_communicators_of_their_own(world, link_pair):
    pairs = [await link_pair(), await link_pair("shm")]
    for number in range(5):
        for a, _ in pairs:
            await a.send(Message(b"%d" % number, value(number)))
        for _, b in pairs:
            await check(b, number)
    assert len(world.pairs) == 4
    pairs[0][0].abort("one of them")
    await pairs[1][0].send(Message(b"9", value(9)))
    await check(pairs[1][1], 9)


async def test_where_nccl_cannot_be_built_everything_goes_by_way_of_the_host(world, link_pair, monkeypatch):
    def fail(store, key, rank):
        raise RuntimeError("no route between the two GPUs")

    monkeypatch.setattr(nccl, "new_group", fail)
    a, b = await link_pair()
    await a.send(Message(b"7", value(7)))
    await check(b, 7)
    assert a.beside.lane is None
    assert a.counters.device_messages == 0


async def test_a_store_that_the_dns_holds_up_costs_the_lane_and_not_the_link(world, link_pair, monkeypatch):
    let_go = threading.Event()
    monkeypatch.setattr(nccl, "make_store", lambda host, port, *, is_master: let_go.wait(20))
    monkeypatch.setattr(nccl, "STORE_WAIT_S", 0.1)
    try:
        a, b = await link_pair()
        await a.send(Message(b"7", value(7)))
        await check(b, 7)
    finally:
        let_go.set()
    assert (a.beside.lane, b.beside.lane, world.calls) == (None, None, [])


@pytest.mark.parametrize(
    "torch_now",
    [
        None,
        types.SimpleNamespace(),
        types.SimpleNamespace(cuda=types.SimpleNamespace()),
        types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: False)),
    ],
    ids=["not loaded", "just begun", "cuda just begun", "its GPU not used"],
)
def test_no_gpu_is_asked_for_while_torch_is_not_there_or_only_in_part(monkeypatch, torch_now):
    """A link is made while a role's thread still imports torch: what is there of it by then is not to be relied on."""
    monkeypatch.setitem(sys.modules, "torch", torch_now)
    assert devices.here() is None


class Failed:
    """An event behind a kernel that failed, as torch tells of it: when somebody waits for it."""

    def __init__(self, error):
        self.error = error

    def synchronize(self):
        raise self.error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("CUDA error: an illegal memory access"),
            "this end's GPU failed before NCCL could move a message",
        ),
        (KeyError("what nobody thought of"), "its nccl lane failed: KeyError"),
    ],
)
async def test_a_kernel_that_failed_before_the_transfer_breaks_the_link_with_a_sentence(
    world, link_pair, monkeypatch, error, said
):
    a, b = await link_pair()
    monkeypatch.setattr(nccl, "_ready_event", lambda device: Failed(error))
    await a.send(Message(b"0", value(0)))
    with pytest.raises(LinkBroken):
        await asyncio.wait_for(b.recv(), 5)
    await asyncio.wait_for(a.wait_broken(), 5)
    assert any(said in link.broken.why for link in (a, b))


@pytest.mark.parametrize("failing", ["receiver", "sender"])
async def test_a_stream_that_takes_no_event_breaks_the_link_with_a_sentence(world, link_pair, monkeypatch, failing):
    a, b = await link_pair()
    calls = []

    def fail(device):
        calls.append(1)  # the receiver's comes first: it asks for the message
        if len(calls) == (1 if failing == "receiver" else 2):
            raise RuntimeError("CUDA error: device-side assert")

    monkeypatch.setattr(nccl, "_ready_event", fail)
    await a.send(Message(b"0", value(0)))
    with pytest.raises(LinkBroken):
        await asyncio.wait_for(b.recv(), 5)
    why = "on the GPU: CUDA error" if failing == "receiver" else "cannot hand over GPU memory (NCCL: CUDA error"
    assert why in (b if failing == "receiver" else a).broken.why


async def test_where_one_end_wants_everything_encrypted_nothing_goes_over_nccl_between_pods(world, link_pair):
    for kind, lane in (("tcp", None), ("shm", "nccl")):
        a, b = await link_pair(kind, bulk="tls")
        await a.send(Message(b"7", value(7)))
        await check(b, 7)
        assert (a.beside.lane and a.beside.lane.kind) == lane


@pytest.mark.parametrize("kind", ["tcp", "shm"])
async def test_an_end_that_was_told_to_use_the_host_does(world, link_pair, kind):
    a, b = await link_pair(kind, gpu="host")
    await a.send(Message(b"7", value(7)))
    await check(b, 7)
    assert (a.beside.lane, b.beside.lane, world.calls) == (None, None, [])


async def test_a_note_out_of_turn_breaks_the_link(world, link_pair):
    a, b = await link_pair()
    b.beside.lane.say("go", 5)
    assert "out of turn" in (await asyncio.wait_for(a.wait_broken(), 20)).why


async def test_an_announcement_above_the_bound_breaks_the_link_before_memory_is_taken(world, link_pair):
    a, b = await link_pair(max_message_bytes=SIZE * 2)
    object.__setattr__(a, "settings", LinkSettings())
    await a.send(Message(b"0", value(0, SIZE * 3)))
    with pytest.raises(LinkBroken, match="wanted 1 to 600000"):
        await asyncio.wait_for(b.recv(), 20)


def test_a_key_is_taken_once():
    ticket = {"port": 1, "key": "k" * 32}
    nccl.come("127.0.0.1", ticket)
    with pytest.raises(LaneError, match="used before"):
        nccl.come("127.0.0.1", ticket)
    with pytest.raises(LaneError, match="cannot be read"):
        nccl.come("127.0.0.1", {"port": "1"})


async def test_a_listener_makes_a_store_and_its_dialer_comes_to_that_one(monkeypatch):
    asked: list[tuple[str, int, bool]] = []
    monkeypatch.setattr(nccl, "make_store", lambda host, port, *, is_master: asked.append((host, port, is_master)))
    await nccl.open_store("10.0.0.7")
    make, key = nccl.come("10.0.0.7", {"port": 29500, "key": "d" * 32})
    assert (key, asked) == ("d" * 32, [("10.0.0.7", 0, True)]), "the dialer's when its group is built"
    make()
    assert asked[1:] == [("10.0.0.7", 29500, False)]


@pytest.mark.parametrize("before", [None, "3"])
def test_a_lanes_communicators_have_no_watchdog_and_those_of_a_gang_keep_theirs(monkeypatch, before):
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", list[str | None]()
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)

    class ProcessGroupNCCL:
        Options = types.SimpleNamespace

        def __init__(self, *args: Any) -> None:
            seen.append(os.environ.get(name))

    distributed = types.SimpleNamespace(ProcessGroupNCCL=ProcessGroupNCCL, PrefixStore=lambda key, store: store)
    monkeypatch.setattr("importlib.import_module", lambda name: distributed)
    nccl.new_group("a store", "k", 0)
    assert (seen, os.environ.get(name)) == (["0"], before)


def test_after_an_abort_nothing_is_sent():
    world = World()
    groups = nccl.Groups(GPUS[0], 0)
    groups._groups = [world.new_group(None, "k", 0)]
    groups.abort()
    with pytest.raises(LaneError, match="the link is broken"):
        groups.move(0, [torch.zeros(1)], 0)
    assert world.broken == []


OTHER = Gpu(uuid="gpu-1", index=0, nccl="2.28.3")


@pytest.mark.parametrize(
    ("ours", "theirs", "same_pod", "may_be_plain", "way"),
    [
        (None, None, True, True, "host"),
        (GPUS[0], None, True, True, "host"),
        (None, GPUS[0], False, True, "host"),
        (GPUS[0], GPUS[0], True, True, "ipc"),
        (GPUS[0], GPUS[0], True, False, "ipc"),
        (GPUS[0], GPUS[0], False, True, "host"),
        (GPUS[0], GPUS[1], True, False, "nccl"),
        (GPUS[0], GPUS[1], False, True, "nccl"),
        (GPUS[0], GPUS[1], False, False, "host"),
        (GPUS[0], OTHER, True, True, "host"),
        (Gpu(uuid="x", index=0), Gpu(uuid="y", index=0), True, True, "host"),
    ],
)
def test_the_way_between_two_ends(ours, theirs, same_pod, may_be_plain, way):
    assert choose(ours, theirs, same_pod=same_pod, may_be_plain=may_be_plain) == way


def test_a_process_that_has_not_used_its_gpu_says_nothing():
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        pytest.skip("another test of this process has used its GPU")
    assert devices.here() is None


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="the installed torch was built without NCCL")
def test_the_adapters_calls_are_those_of_the_installed_torch():
    distributed: Any = torch.distributed
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=nccl.STALL_S)
    assert options._timeout.total_seconds() == nccl.STALL_S
    if not torch.cuda.is_available():
        # It looks for GPUs after its arguments: others are a TypeError before.
        with pytest.raises(ValueError, match="no GPUs found"):
            nccl.new_group(distributed.HashStore(), "key", 0)
        with pytest.raises(TypeError):
            distributed.ProcessGroupNCCL(distributed.HashStore(), 0, 2, options, "one more")
    for name in ("send", "recv"):
        said = getattr(distributed.ProcessGroupNCCL, name).__doc__
        assert "tensors: collections.abc.Sequence[torch.Tensor], " + {"send": "dst", "recv": "src"}[name] in said
        assert "tag:" in said
    assert "ErrorType" in distributed.ProcessGroupNCCL.get_error.__doc__
    assert "abort" in distributed.ProcessGroupNCCL.abort.__doc__
    c10d: Any = torch._C
    assert "SUCCESS" in c10d._distributed_c10d.ErrorType.__members__
    assert callable(distributed.Work.is_completed)
