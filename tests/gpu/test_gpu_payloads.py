"""Payloads with tensors on a real GPU, over the links of one machine (`make test-gpu`)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from rlinf_worker.links.hello import Identity
from rlinf_worker.links.listener import Listener, dial
from rlinf_worker.links.message import Message

pytestmark = pytest.mark.gpu  # conftest skips these with a sentence where there is no device
B = Identity(job="j", worker="b", attempt=0)


async def test_tensors_on_a_gpu_arrive_on_a_gpu(tmp_path_factory):
    """By way of the host: two pods with one GPU (one process cannot open a CUDA IPC handle of its own)."""
    listener = await Listener.open(
        B, pod_uid="another", run_dir=str(tmp_path_factory.mktemp("r")), shm_dir="/dev/shm", host="127.0.0.1"
    )
    a = await dial(listener.endpoint, Identity(job="j", worker="a", attempt=0), pod_uid="p", shm_dir="/dev/shm")
    assert a.kind == "tcp"
    value: dict[str, Any] = {
        "bf16": torch.randn(1000, 1000, device="cuda").to(torch.bfloat16).T,
        "one": torch.ones((), device="cuda"),
        "none": torch.empty(0, 3, device="cuda"),
        "cpu": torch.arange(10),
    }
    async with asyncio.timeout(30):
        b = await listener.accept()
        await a.send(Message(b"", value))
        got = (await b.recv()).value()
    for name, sent in value.items():
        assert torch.equal(got[name].cpu(), sent.cpu()), name
    assert [got[name].device.type for name in ("bf16", "one", "cpu")] == ["cuda", "cuda", "cpu"]
    for thing in (a, b, listener):
        await thing.close()
