"""State that leaves a GPU and comes back, and two processes that take turns on one (`make test-gpu`)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rlinf_worker import devices
from tools.bench import gpu
from tools.bench.gpu_parts import peer

pytestmark = pytest.mark.gpu  # conftest skips these with a sentence where there is no device


def test_state_leaves_the_gpu_and_comes_back_bit_for_bit():
    peer.use("cuda:0")
    before = torch.cuda.memory_reserved("cuda:0")
    holder = peer.Holder("cuda:0", 256)
    for _ in range(3):
        holder.do("offload")
        assert holder.host.bytes_now() == 0
        assert torch.cuda.memory_reserved("cuda:0") - before < 64 * peer.MIB
        holder.do("load")
        assert holder.is_whole()


def test_two_processes_on_one_gpu_change_200_times_without_growth():
    found = gpu.switches("cuda:0", 256, 200)
    assert found["growth_200_switches"] < 16


def test_one_gb_is_handed_over_by_cuda_ipc():
    assert gpu.handover("cuda:0", 1024, "ipc") < 1.0


def test_a_worker_on_a_slot_sees_its_device_alone():
    """Found by the driver's tool, and the very one that CUDA calls 0 in a process that is given it."""
    count = torch.cuda.device_count()
    pod = devices.find("nvidia.com/gpu", slots=count, environ={})
    assert len(set(pod)) == count
    script = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)"
    for slot in range(count):
        environ = {**os.environ, **devices.environ_of(pod, [slot])}
        said = subprocess.run(
            [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120, check=True
        ).stdout.split()
        assert (said[0], said[1].removeprefix("GPU-")) == ("1", pod[slot].removeprefix("GPU-"))
