"""CUDA IPC between two processes on one GPU, and NCCL between two GPUs (`make test-gpu`). Never run by us: no GPU."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from rlinf_worker.links import nccl
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.settings import LinkSettings

pytestmark = pytest.mark.gpu  # conftest skips these with a sentence where there is no device
ME = Identity(job="j", worker="b", attempt=0)

DIALER = """
import asyncio, json, sys, torch
torch.cuda.set_device(int(sys.argv[2]))
torch.ones(1, device="cuda")
import torch.distributed
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.listener import dial
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.message import Message

async def main():
    me = Identity(job="j", worker="a", attempt=0)
    link = await dial(Endpoint.from_dict(json.loads(sys.argv[1])), me, pod_uid="p", shm_dir="/dev/shm")
    while link.beside.coming:
        await asyncio.sleep(0.01)
    for number in range(20):
        big = torch.full((int(sys.argv[3]) // 4,), number, device="cuda", dtype=torch.float32)
        await link.send(Message(b"%d" % number, {"big": big, "bf16": big[:1000].to(torch.bfloat16), "cpu": number}))
    await link.close()

asyncio.run(main())
"""


async def receive(run_dir: str, *, device: int, nbytes: int) -> str:
    """20 messages from a process on GPU `device` to this one on GPU 0; which lane brought them."""
    torch.cuda.set_device(0)
    torch.ones(1, device="cuda")
    settings = LinkSettings(linger_s=30.0)
    listener = await Listener.open(
        ME, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1", settings=settings
    )
    arguments = [sys.executable, "-c", DIALER, json.dumps(listener.endpoint.to_dict()), str(device), str(nbytes)]
    process = await asyncio.to_thread(subprocess.Popen, arguments)
    try:
        async with asyncio.timeout(120):
            link: Any = await listener.accept()
            for number in range(20):
                got = (await link.recv()).value()
                assert got["cpu"] == number
                assert got["big"].device == torch.device("cuda", 0)
                assert bool((got["big"] == number).all())
                assert bool((got["bf16"].float() == number).all())
            kind = str(link.beside.lane.kind)
            assert await asyncio.to_thread(process.wait, 60) == 0
        await link.close()
    finally:
        process.kill()
        process.wait()
        await listener.close()
    return kind


@pytest.mark.parametrize("nbytes", [1 << 20, 1 << 28])
async def test_two_processes_on_one_gpu_hand_over_by_cuda_ipc(tmp_path_factory, nbytes):
    before = torch.cuda.memory_allocated()
    assert await receive(str(tmp_path_factory.mktemp("r")), device=0, nbytes=nbytes) == "ipc"
    assert torch.cuda.memory_allocated() - before < 4 * nbytes


@pytest.mark.parametrize("nbytes", [1 << 20, 1 << 28])
async def test_two_processes_on_two_gpus_send_over_nccl(tmp_path_factory, nbytes):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU on this machine, and NCCL needs two")
    assert await receive(str(tmp_path_factory.mktemp("r")), device=1, nbytes=nbytes) == "nccl"


def test_the_constructor_takes_our_options_and_a_group_that_moved_nothing_can_be_aborted():
    torch.cuda.set_device(0)
    distributed: Any = torch.distributed
    group = nccl.new_group(distributed.HashStore(), "key", 0)
    assert group.get_error().name == "SUCCESS"
    group.abort()
