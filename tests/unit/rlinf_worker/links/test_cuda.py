"""Buffers to another process on the same GPU: torch's two calls, faked, and what is checked around them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch

from rlinf_worker.links import cuda, shm
from rlinf_worker.links.errors import LinkBroken
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import LinkSettings
from tests.unit.rlinf_worker.links import ipc_fake
from tests.unit.rlinf_worker.links.ipc_fake import SIZE

A = Identity(job="job-1", worker="a", attempt=0)
B = Identity(job="job-1", worker="b", attempt=0)


@pytest.fixture
def ipc(monkeypatch):
    return ipc_fake.install(monkeypatch)


@pytest.fixture
async def pair(run_dir, ipc):
    settings = LinkSettings()
    listener = await Listener.open(B, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host=None, settings=settings)
    b: Any
    a: Any = await shm.dial(listener.endpoint.unix_path, A, peer=B, shm_dir="/dev/shm", settings=settings)
    b = await asyncio.wait_for(listener.accept(), 20)
    assert a.beside.lane.kind == b.beside.lane.kind == "ipc"
    yield a, b
    for link in (a, b):
        link.abort("the test is over")
        await link.close()
    await listener.close()


async def test_buffers_are_copied_by_the_receiver_and_kept_by_the_sender_until_then(pair, ipc):
    a, b = pair
    block = torch.zeros(3 * SIZE, dtype=torch.uint8)
    sent = [block[SIZE : 2 * SIZE], torch.randn(SIZE).to(torch.bfloat16), torch.arange(3)]
    sent[0].fill_(7)
    one, two = Message(b"one", sent[0]), Message(b"two", sent)
    await a.send(one)
    await a.send(two)
    assert (a.beside.lane.holds, ipc.shared) == (2, {})  # nothing is shared before it is asked for
    got = (await asyncio.wait_for(b.recv(), 20)).value()
    assert torch.equal(got, sent[0])
    assert got.data_ptr() != sent[0].data_ptr()
    got = (await asyncio.wait_for(b.recv(), 20)).value()
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(sent, got, strict=True))
    await asyncio.wait_for(a.close(), 20)
    assert len(ipc.opened) == len(ipc.shared) == 2
    assert a.counters.device_messages == 2


async def test_a_handle_that_cannot_be_opened_breaks_the_link_with_a_sentence(pair, ipc):
    a, b = pair
    ipc.opened.append(b"handle-0")
    await a.send(Message(b"", torch.ones(SIZE)))
    with pytest.raises(LinkBroken, match="cannot open its GPU memory"):
        await asyncio.wait_for(b.recv(), 20)


async def test_a_sender_that_cannot_share_breaks_the_link_with_a_sentence(pair, monkeypatch):
    a, b = pair

    def fail(storage):
        raise RuntimeError("invalid argument")

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", fail)
    await a.send(Message(b"", torch.ones(SIZE)))
    with pytest.raises(LinkBroken, match="is gone"):
        await asyncio.wait_for(b.recv(), 20)
    assert "cannot hand over GPU memory (CUDA IPC: invalid argument)" in a.broken.why


@pytest.mark.parametrize("error", [ValueError("bad handle"), TypeError("tuple of 8"), AssertionError("no CUDA")])
@pytest.mark.parametrize(("call", "end"), [("_new_shared_cuda", "open its"), ("_share_cuda_", "hand over")])
async def test_whatever_torch_raises_of_a_handle_breaks_the_link_and_leaves_nobody_waiting(
    pair, monkeypatch, error, call, end
):
    a, b = pair

    def fail(*_):
        raise error

    monkeypatch.setattr(torch.UntypedStorage, call, staticmethod(fail) if call.startswith("_new") else fail)
    await a.send(Message(b"", torch.ones(SIZE)))
    with pytest.raises(LinkBroken):
        await asyncio.wait_for(b.recv(), 5)
    why = (b if end == "open its" else a).broken.why
    assert f"cannot {end} GPU memory (CUDA IPC: {error})" in why


GOOD = [b"m" * 64, 1000, 0, b"counter", 0, b"e" * 64, True, 100]


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, "text"), (0, b"m" * 5000), (1, 999), (1, "1000"), (2, -1), (4, -1), (6, 1), (7, 101), (7, -1)],
)
def test_a_handle_is_checked_before_it_is_opened(at, value):
    assert cuda.check(GOOD, 900).start == 100
    with pytest.raises(ValueError, match="CUDA IPC handle"):
        cuda.check([*GOOD[:at], value, *GOOD[at + 1 :]], 900)


def test_a_handle_is_plain_values_on_the_wire():
    handle = cuda.check(GOOD, 900)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(handle)) == GOOD


def test_the_two_calls_are_those_of_the_installed_torch():
    """As far as a machine without a GPU can tell: they exist, and the opening one takes eight values."""
    assert callable(torch.UntypedStorage._share_cuda_)
    with pytest.raises(RuntimeError, match="tuple of 8 items expected"):
        torch.UntypedStorage._new_shared_cuda(0)
    with pytest.raises(RuntimeError, match="only available on CUDA"):
        torch.zeros(3).untyped_storage()._share_cuda_()
